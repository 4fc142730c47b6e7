"""`proxykv report`: from rows to figures, tables and plots; errors in a file name the line and the field."""

from __future__ import annotations

import json
import math

import pytest

from proxykv_hf import InvalidInputError, cli
from proxykv_hf.evaluation import statistics
from proxykv_hf.evaluation.cells import WHOLE, Variant
from proxykv_hf.evaluation.drawing import new_figure, spread
from proxykv_hf.evaluation.outcomes import read_outcomes
from proxykv_hf.evaluation.plots import _draw_scores
from proxykv_hf.evaluation.summary import summarize
from proxykv_hf.evaluation.table import markdown

OURS, KVZIP, SNAP = Variant("proxykv", "global"), Variant("kvzip", "global"), Variant("snapkv", "uniform")

#: The scores of the questions, two per context, by task, method and ratio.
SCORES = {
    ("easy", "full", 1.0): [1, 1, 1, 1],
    ("easy", "kvzip", 0.2): [1, 1, 1, 0],
    ("easy", "proxykv", 0.2): [1, 1, 0, 0],
    ("easy", "snapkv", 0.2): [0, 0, 1, 0],
    ("fair", "full", 1.0): [1, 0, 1, 1],
    ("fair", "kvzip", 0.2): [0, 0, 1, 0],
    ("fair", "proxykv", 0.2): [0, 0, 1, 1],
    ("fair", "snapkv", 0.2): [0, 0, 0, 0],
    ("hard", "full", 1.0): [0, 0, 1, 0],
    ("hard", "kvzip", 0.2): [0, 0, 1, 0],
    ("hard", "proxykv", 0.2): [0, 0, 0, 0],
    ("hard", "snapkv", 0.2): [0, 0, 0, 0],
}


def header(**changes):
    entries = {
        "format": 1,
        "target": "org/model",
        "target_weights": "00ff",
        "mapper": "mappers/model",
        "dtype": "float32",
        "tokens": 500,
        "seed": 0,
        "allocation": "native",
        "query_aware": False,
        "wording": "77",
        "data": None,
        "tasks": {"easy": "exact_match", "fair": "exact_match", "hard": "f1"},
        "methods": ["proxykv", "kvzip", "snapkv"],
        "ratios": [0.2],
        "versions": {"torch": "2.13.0"},
        "hardware": "a CPU",
        "commit": "abc123",
        "command": ["proxykv", "evaluate", "--tasks", "easy hard"],
    }
    return {"header": entries | changes}


def rows(scores=SCORES, nll=lambda method, question: {"full": 0.1, "kvzip": 0.5, "proxykv": 0.7}.get(method, 2.0)):
    for (task, method, ratio), values in scores.items():
        for question, score in enumerate(values):
            yield {
                "task": task,
                "example": f"{question // 2:05}",
                "question": question % 2,
                "method": method,
                "allocation": {"full": None, "snapkv": "uniform"}.get(method, "global"),
                "ratio": ratio,
                "bytes": round(1000 * ratio) + (10 if method == "snapkv" else 0),
                "bytes_full": 1000,
                "answer": "an answer",
                "score": score,
                "nll": nll(method, question),
                "tokens_nll": 3,
                "seconds": 0.1,
            }


@pytest.fixture
def write(tmp_path):
    """A function that writes a file of these lines; by default the header and all rows."""

    def make(*lines, name="results.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines or (header(), *rows())))
        return path

    return make


@pytest.fixture
def of_any_number(monkeypatch):
    """Allow intervals from any number of contexts, for cases that are worked out by hand."""
    monkeypatch.setattr(statistics, "LEAST_CONTEXTS", 1)


@pytest.mark.usefixtures("of_any_number")
def test_figures_of_a_small_file_by_hand(write):
    summary = summarize(read_outcomes([write()]), samples=100)
    assert summary.judged == ["easy", "fair"]  # in hard, the full cache answers one question in four
    easy, fair = summary.tasks["easy"], summary.tasks["fair"]
    assert (easy.metric, easy.examples, easy.questions, easy.full.score.value) == ("exact_match", 2, 4, 1.0)
    ours = easy.figures[OURS.at(0.2)]
    assert (ours.score.value, ours.questions, ours.pairs, ours.kept) == (0.5, 4, 4, 0.2)
    assert ours.of_reference.value == pytest.approx(2 / 3)
    assert ours.of_full.value == 0.5
    assert ours.lead is ours.lead_nll is None
    assert ours.nll.value == pytest.approx(0.7)
    assert ours.nll_over_reference.value == pytest.approx(0.2)
    other = easy.figures[SNAP.at(0.2)]
    assert other.lead.value == 0.25
    assert other.lead_nll.value == pytest.approx(0.7 - 2.0)
    # The contexts' leads are +2 and -1 in 2 questions. A resample draws one context: its mean is 1.0 or -0.5.
    assert (other.lead.low, other.lead.high) == (-0.5, 1.0)

    unsure = fair.figures[OURS.at(0.2)]
    assert unsure.of_reference is None  # kvzip's own score is 0.25
    assert unsure.reference_score == 0.25
    assert unsure.nll_over_reference.value == pytest.approx(0.2)

    mean = summary.overall[OURS.at(0.2)]
    assert mean.score.value == pytest.approx((0.5 + 0.5) / 2)
    assert mean.of_reference.value == pytest.approx((0.5 + 0.5) / (0.75 + 0.25))
    assert mean.of_full.value == pytest.approx(1.0 / 1.75)
    assert (mean.questions, mean.pairs) == (8, 8)
    assert summary.overall[KVZIP.at(0.2)].lead.value == pytest.approx(0.0)
    assert summary.overall[WHOLE].score.value == pytest.approx(0.875)


@pytest.mark.usefixtures("of_any_number")
def test_intervals_over_tasks_are_those_of_a_plain_loop(write):
    from proxykv_hf.evaluation.statistics import draw

    found = summarize(read_outcomes([write()]), samples=80, seed=3).overall[OURS.at(0.2)]

    def mean(task, method, resample):
        values = [
            SCORES[task, method, 1.0 if method == "full" else 0.2][2 * place : 2 * place + 2] for place in resample
        ]
        return sum(map(sum, values)) / (2 * len(values))

    draws = {task: draw(2, 80, [3, *task.encode()]) for task in ("easy", "fair")}
    scores, shares = [], []
    for easy, fair in zip(draws["easy"], draws["fair"], strict=True):
        ours, full = ((mean("easy", m, easy) + mean("fair", m, fair)) / 2 for m in ("proxykv", "full"))
        scores.append(ours)
        shares.append(ours / full)
    for estimate, values in ((found.score, scores), (found.of_full, shares)):
        values.sort()
        assert estimate.low == pytest.approx(values[1] + 0.975 * (values[2] - values[1]))  # at 0.025 * 79 = 1.975
        assert estimate.high == pytest.approx(values[77] + 0.025 * (values[78] - values[77]))


def test_a_tasks_intervals_do_not_depend_on_the_other_tasks(write):
    alone = {key: values for key, values in SCORES.items() if key[0] == "easy"}
    one = summarize(read_outcomes([write(header(), *rows(alone), name="one.jsonl")]), samples=50)
    assert one.tasks["easy"] == summarize(read_outcomes([write()]), samples=50).tasks["easy"]


def test_the_report_tells_no_length_of_examples_from_a_file(write, tmp_path, capsys):
    path = write(header(tokens=None, data="00ff"), *rows())
    outcomes = read_outcomes([path])
    text = markdown(outcomes, summarize(outcomes, samples=20))
    assert "3 tasks with 12 questions about 6 contexts. The methods prune the cache before they know any" in text
    assert "None tokens" not in text


def test_the_report_says_whether_methods_know_the_question(write):
    outcomes = read_outcomes([write(header(query_aware=True), *rows())])
    text = markdown(outcomes, summarize(outcomes, samples=20))
    assert "The methods **know the question** when they prune the cache." in text
    assert "before they know" not in text


@pytest.mark.usefixtures("of_any_number")
def test_the_report_in_markdown(write):
    outcomes = read_outcomes([write()])
    text = markdown(outcomes, summarize(outcomes, samples=2000))
    lines = text.splitlines()
    assert "3 tasks with 12 questions about 6 contexts of at most 500 tokens. The methods prune the cache" in text
    left_out = "The full cache scores under 0.5 on these tasks, so they are left out of all means: hard (0.25)."
    assert left_out in lines
    assert "| full |  | 0.88 (0.75–1.00) |  |" in lines
    assert "| **proxykv** | global |  | 0.50 (0.00–1.00) |" in lines
    assert "| share of the full cache's bytes |  | 1.00 | 0.20–0.21 |" in lines
    assert "| snapkv | uniform | +37.5 (-25.0 to +100.0) | 8 |" in lines
    assert "| snapkv | uniform | **-1.300 (-1.300 to -1.300)** | 8 |" in lines
    assert "| easy | 1.00 | 0.67 (0.00–1.00) |" in lines
    assert "| fair | 0.75 | kvzip 0.25: nll +0.20 (+0.20 to +0.20) |" in lines
    assert "| hard (not in the means) | 0.25 | kvzip 0.25: nll +0.20 (+0.20 to +0.20) |" in lines
    about = "4 questions about 2 contexts; metric f1. There are no intervals, because there are fewer than 8 contexts."
    assert f"{about} The full cache scores only 0.25, so the means leave this task out." in lines
    assert "| target weights | 00ff |" in lines
    assert "| commit | abc123 |" in lines
    assert "proxykv evaluate --tasks 'easy hard'" in lines
    assert "Missing answers" not in text


@pytest.mark.usefixtures("of_any_number")
def test_unequal_sets_are_named_and_only_shared_questions_compared(write):
    def there(row):
        if row["method"] == "snapkv":
            return row["task"] != "fair"  # snapkv lacks this task
        return not (row["task"] == "easy" and row["method"] == "kvzip" and row["example"] == "00001")

    outcomes = read_outcomes([write(header(), *filter(there, rows()))])
    summary = summarize(outcomes, samples=100)
    easy = summary.tasks["easy"].figures
    assert easy[KVZIP.at(0.2)].questions == easy[KVZIP.at(0.2)].pairs == 2
    assert easy[KVZIP.at(0.2)].lead.value == 0.0  # on the first context alone, which both answered
    assert easy[KVZIP.at(0.2)].lead.low is None  # one context gives no interval
    assert easy[OURS.at(0.2)].of_reference.value == 1.0
    assert SNAP.at(0.2) not in summary.overall
    text = markdown(outcomes, summary)
    assert "- kvzip (global) at 0.2: answered 2 of 4 questions of easy" in text
    assert "- snapkv (uniform) at 0.2: answered 0 of 4 questions of fair" in text
    assert "| snapkv | uniform |  | – |" in text
    assert "| kvzip | global | +12.5 | 6 |" in text  # a mean over a task without an interval has none either


def test_one_score_of_the_reference_decides_for_all_methods(write):
    """In fair, kvzip scores 0.25, but 0.5 on the only context of snapkv, which still gets no quotient."""
    some = (row for row in rows() if (row["method"], row["example"]) != ("snapkv", "00000"))
    outcomes = read_outcomes([write(header(), *some)])
    fair = summarize(outcomes, samples=20).tasks["fair"].figures
    for cell in (SNAP.at(0.2), OURS.at(0.2), KVZIP.at(0.2)):
        assert (fair[cell].of_reference, fair[cell].reference_score) == (None, 0.25)
    assert "kvzip 0.50" not in markdown(outcomes, summarize(outcomes, samples=20))


def test_means_of_the_questions_that_all_answered(write, tmp_path):
    """The file lacks snapkv's rows for the first context of each task, and for every ratio but 0.2."""
    more = {(task, method, 0.1): [0, 0, 0, 0] for task in ("easy", "fair") for method in ("kvzip", "proxykv")}
    some = [row for row in rows(SCORES | more) if (row["method"], row["example"]) != ("snapkv", "00000")]
    path = write(header(), *some)
    outcomes = read_outcomes([path])
    summary = summarize(outcomes, samples=20)
    assert set(summary.shared) == {WHOLE, OURS.at(0.2), KVZIP.at(0.2), SNAP.at(0.2)}
    found = summary.shared[OURS.at(0.2)]
    assert (found.score.value, found.questions, found.pairs) == (0.5, 4, 4)  # easy 0, fair 1
    assert (summary.shared[KVZIP.at(0.2)].score.value, summary.shared[WHOLE].score.value) == (0.5, 1.0)
    text = markdown(outcomes, summary)
    fewer = "Some rows are means over fewer than the 8 questions: snapkv (uniform) answered 4. The other methods"
    assert f"{fewer} answered all questions.\n" in text
    table = text.split(
        "The means over the 4 questions in 2 tasks that all methods answered, at the ratios that all methods have:"
    )[1]
    assert table.strip().startswith("| method | allocation | all | 0.2 |\n|---|---|---|---|\n| full |  | 1.00 |  |\n")
    assert "| **proxykv** | global |  | 0.50 |" in table.split("##")[0]
    assert cli.main(["report", str(path), "--out", str(tmp_path / "out"), "--samples", "20"]) == 0
    figures = json.loads((tmp_path / "out" / "report.json").read_text())
    assert figures["shared_tasks"] == ["easy", "fair"]
    assert {entry["method"] for entry in figures["shared"]} == {"full", "kvzip", "proxykv", "snapkv"}


def test_means_of_the_same_questions_leave_out_a_task_that_a_method_lacks(write):
    outcomes = read_outcomes(
        [write(header(), *(row for row in rows() if (row["task"], row["method"]) != ("fair", "snapkv")))]
    )
    summary = summarize(outcomes, samples=20)
    assert summary.shared_tasks == ["easy"]
    assert summary.shared[SNAP.at(0.2)].score.value == 0.25
    whole = summarize(read_outcomes([write()]), samples=20)
    assert (whole.shared, whole.shared_tasks) == ({}, [])
    assert "fewer than the" not in markdown(read_outcomes([write()]), whole)


def test_variants_are_ordered_by_the_ratios_that_all_have(write):
    """At 0.2, the ratio that all variants have, kvzip leads; its mean over its own two ratios is the lowest."""
    more = {(task, "kvzip", 0.1): [0, 0, 0, 0] for task in ("easy", "fair")}
    scores = SCORES | {("easy", "kvzip", 0.2): [1, 1, 1, 1]} | more
    assert summarize(read_outcomes([write(header(), *rows(scores))]), samples=5).variants() == [KVZIP, OURS, SNAP]
    apart = {key: values for key, values in scores.items() if key[1:] != ("kvzip", 0.2)}
    assert summarize(read_outcomes([write(header(), *rows(apart))]), samples=5).variants() == [OURS, SNAP, KVZIP]


def test_few_contexts_give_no_interval_for_one_task_but_for_several(write):
    scores = {key: values * 2 for key, values in SCORES.items()}  # four contexts in each task
    outcomes = read_outcomes([write(header(), *rows(scores))])
    text = markdown(outcomes, summarize(outcomes, samples=50))
    assert "| easy | 1.00 | 0.67 |" in text
    about = "8 questions about 4 contexts; metric exact_match. There are no intervals, because there are fewer than 8"
    assert about in text
    assert "A task with fewer than 8 contexts has no interval. |" in text
    assert "| **proxykv** | global |  | 0.50 (0." in text  # over both tasks


def test_one_context_and_no_likelihood(write):
    scores = {key: values[:2] for key, values in SCORES.items() if key[0] == "easy"}
    outcomes = read_outcomes([write(header(), *rows(scores, nll=lambda *_: None))])
    summary = summarize(outcomes, samples=20)
    ours = summary.overall[OURS.at(0.2)]
    assert (ours.score.value, ours.score.low, ours.nll, ours.nll_over_reference) == (1.0, None, None, None)
    text = markdown(outcomes, summary)
    about = "2 questions about 1 context; metric exact_match. There are no intervals, because there are fewer than 8"
    assert about in text
    assert "| **proxykv** | global |  | 1.00 |" in text
    assert "- 8 answers without a log-likelihood" in text


def test_nothing_within_the_models_reach(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = write(header(), *rows({key: values for key, values in SCORES.items() if key[0] == "hard"}))
    assert cli.main(["report", str(path), "--samples", "10", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "No task is left, so there are no means." in text
    assert "## Score" not in text
    assert not list((tmp_path / "out").glob("*.png"))


def test_several_files_of_one_experiment(write):
    def some(keep, name, **changes):
        return write(header(**changes), *(row for row in rows() if keep(row)), name=name)

    parts = [
        some(lambda row: row["task"] == "easy", "1.jsonl", tasks={"easy": "exact_match"}),
        # Repeats the rows of the full cache.
        some(lambda row: row["method"] in ("full", "kvzip"), "2.jsonl", mapper=None),
        some(lambda row: row["task"] != "easy" and row["method"] not in ("full", "kvzip"), "3.jsonl"),
    ]
    assert summarize(read_outcomes(parts), samples=50).tasks == summarize(read_outcomes([write()]), samples=50).tasks


def test_two_allocations_of_a_method(write):
    also = [row | {"allocation": "uniform", "score": 1} for row in rows() if row["method"] in ("proxykv", "kvzip")]
    outcomes = read_outcomes([write(header(), *rows(), *also)])
    summary = summarize(outcomes, samples=10)
    assert (summary.ours, summary.reference) == (OURS, KVZIP)
    assert summary.tasks["easy"].figures[Variant("proxykv", "uniform").at(0.2)].lead.value == -0.5
    assert summarize(outcomes, "kvzip:uniform", "proxykv:uniform", 10).ours == Variant("proxykv", "uniform")


def test_the_command_writes_report_figures_and_pictures(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    also = [row | {"allocation": "global"} for row in rows() if row["method"] == "snapkv"]
    path = write(header(), *rows(), *also)
    assert cli.main(["report", str(path), "--out", str(out), "--samples", "50"]) == 0
    assert capsys.readouterr().out == f"{out / 'report.md'}\n"
    for name in ("scores.png", "recovery.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (out / "report.md").read_text()
    figures = json.loads((out / "report.json").read_text())
    assert figures["headers"] == [header()["header"]]
    assert (figures["judged"], figures["samples"]) == (["easy", "fair"], 50)
    ours = next(entry for entry in figures["overall"] if entry["method"] == "proxykv")
    assert (ours["ratio"], ours["score"]["value"]) == (0.2, 0.5)
    assert figures["tasks"]["fair"]["figures"][0]["method"] == "full"


def test_without_a_folder_it_prints(write, capsys):
    assert cli.main(["report", str(write()), "--samples", "50"]) == 0
    assert capsys.readouterr().out.startswith("# Scores with a pruned KV cache: org/model\n")


def test_of_some_tasks_alone(write, capsys):
    alone = summarize(read_outcomes([write()]).of_tasks(["fair"]), samples=50)
    both = summarize(read_outcomes([write()]), samples=50)
    assert alone.judged == ["fair"]
    assert alone.tasks["fair"] == both.tasks["fair"]
    assert {cell: found.score for cell, found in alone.overall.items()} == {
        cell: found.score for cell, found in both.tasks["fair"].figures.items()
    }
    assert cli.main(["report", str(write()), "--tasks", "fair", "other"]) == 2
    assert "unknown tasks other: expected some of easy, fair, hard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": None}, r"line 3: score: expected a number from 0 to 1, got None"),
        ({"score": 1.5}, r"line 3: score: expected a number from 0 to 1, got 1.5"),
        ({"ratio": 0}, r"line 3: ratio: expected a number in \(0, 1\], got 0"),
        ({"allocation": "native"}, r"line 3: allocation: expected global or uniform, got 'native'"),
        ({"allocation": None}, r"line 3: allocation: expected global or uniform, got None"),
        ({"allocation": ["global"]}, r"line 3: allocation: expected global or uniform, got \['global'\]"),
        ({"nll": math.nan}, r"line 3: nll: expected a number or null, got nan"),
        ({"task": "other"}, r"line 3: task: expected one of the header's tasks \(easy, fair, hard\), got 'other'"),
        ({"task": ["easy"]}, r"line 3: task: expected one of the header's tasks .*, got \['easy'\]"),
        ({"question": "0"}, r"line 3: question: expected an integer of at least 0, got '0'"),
        ({"question": -1}, r"line 3: question: expected an integer of at least 0, got -1"),
        ({"bytes": -1}, r"line 3: bytes: expected a number of at least 0, got -1"),
        ({"bytes_full": 0}, r"line 3: bytes_full: expected a number above 0, got 0"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(write, changes, message):
    row = next(row for row in rows() if row["method"] == "kvzip")
    with pytest.raises(InvalidInputError, match=message):
        read_outcomes([write(header(), row, row | {"question": 1} | changes)])


@pytest.mark.parametrize(
    "field", ["task", "example", "question", "method", "allocation", "ratio", "bytes", "bytes_full", "score", "nll"]
)
def test_a_missing_field_is_named_with_its_line(write, field):
    row = next(row for row in rows() if row["method"] == "kvzip")
    del row[field]
    with pytest.raises(InvalidInputError, match=rf"line 2: {field}: expected .*, but the field is missing"):
        read_outcomes([write(header(), row)])


def test_files_that_are_not_evaluations(write, tmp_path):
    path = tmp_path / "wrong.jsonl"
    for text, message in (
        ("", "expected a header and rows, but .* is empty"),
        ("words\n", "line 1: expected JSON"),
        ("[1]\n", "line 1: expected a JSON object, got list"),
        ("{}\n", "line 1: expected a header, .* got none"),
        (json.dumps(header()) + '\n{"task": "ea', r"line 2: expected JSON, .*if a run was cut short here"),
        (json.dumps(header(format=2)) + "\n", "header.format: expected 1, got 2"),
        (json.dumps(header(later=3)) + "\n", "header.later: expected a list of runs, got 3"),
        (json.dumps(header()) + "\n", "expected rows after the header, got none"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=message):
            read_outcomes([path])
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match="expected JSON lines in UTF-8"):
        read_outcomes([path])
    lacking = header()
    del lacking["header"]["dtype"]
    with pytest.raises(InvalidInputError, match=r"header\.dtype: expected a value, got none"):
        read_outcomes([write(lacking)])
    with pytest.raises(InvalidInputError, match="task easy: expected rows of the method 'full'"):
        read_outcomes([write(header(), *(row for row in rows() if row["method"] != "full"))])


def test_files_that_do_not_belong_together(write):
    first = write()
    for changes, message in (
        ({"dtype": "bfloat16"}, "dtype is 'float32' in .* and 'bfloat16' in"),
        ({"target_weights": "1234"}, "target_weights is '00ff' in .* and '1234' in"),
        ({"data": "my.jsonl"}, "data is None in .* and 'my.jsonl' in"),
        ({"tasks": {"easy": "f1"}}, "task easy: expected the metric of the other files, exact_match, got f1"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            read_outcomes([first, write(header(**changes), name="other.jsonl")])
    texts = [write(header(examples={"easy 00000": name}), *rows(), name=f"{name}.jsonl") for name in ("aa", "bb")]
    with pytest.raises(InvalidInputError, match=r"easy 00000 is 'aa' in .* and 'bb' in"):
        read_outcomes(texts)
    mappers = [write(header(identities={"proxykv": name}), *rows(), name=f"{name}.jsonl") for name in ("one", "two")]
    with pytest.raises(InvalidInputError, match=r"proxykv is 'one' in .* and 'two' in"):
        read_outcomes(mappers)
    other = [row | {"score": 0} for row in rows() if row["method"] == "full"]
    with pytest.raises(InvalidInputError, match=r"question 0, full at 1 occurs twice, with scores 1 and 0"):
        read_outcomes([first, write(header(), *other, name="other.jsonl")])


@pytest.mark.parametrize("option", ["reference", "ours"])
def test_a_named_method_that_is_not_there(write, capsys, option):
    path = write(header(), *(row for row in rows() if row["method"] != "kvzip"))
    for name in ("kvzip", "proxykv:uniform"):
        assert cli.main(["report", str(path), f"--{option}", name]) == 2
        error = capsys.readouterr().err
        assert f"--{option}: expected a method that prunes and is in {path}, got '{name}': the files have " in error
        assert "the files have proxykv:global, snapkv" in error
    assert cli.main(["report", str(path), f"--{option}", "full"]) == 2
    error = capsys.readouterr().err
    assert "got 'full': the files have proxykv:global, snapkv:uniform; recovery of the full cache is" in error


def test_without_the_methods_that_are_compared_by_default(write, tmp_path, capsys):
    def report(*lacking):
        path = write(header(), *(row for row in rows() if row["method"] not in lacking))
        out = tmp_path / "-".join(lacking)
        assert cli.main(["report", str(path), "--samples", "20", "--out", str(out)]) == 0
        assert not (out / "recovery.png").exists()
        return (out / "report.md").read_text(), json.loads((out / "report.json").read_text())

    text, figures = report("kvzip")
    assert "The files have no rows of kvzip, so no recovery relative to it is shown. To choose another method, " in text
    assert "## Recovery relative to the full cache" in text
    assert "## Recovery relative to kvzip" not in text
    assert "divided by the score of kvzip" not in text
    assert "## proxykv (global) compared with the other methods" in text
    assert (figures["reference"], figures["ours"]["method"]) == (None, "proxykv")

    text, figures = report("proxykv")
    assert "The files have no rows of proxykv, so it is not compared with the other methods. To compare another" in text
    assert "## Recovery relative to kvzip (global)" in text
    assert "compared with the other methods\n" not in text
    assert (figures["reference"]["method"], figures["ours"]) == ("kvzip", None)

    text, _ = report("proxykv", "kvzip")
    assert "| snapkv | uniform |  | 0.12 |" in text
    text, _ = report("proxykv", "kvzip", "snapkv")
    assert "| full |  | 0.88 |" in text


def test_samples_are_at_least_one(write, capsys):
    path = write()
    assert cli.main(["report", str(path), "--samples", "0"]) == 2
    assert "--samples: expected at least 1, got 0" in capsys.readouterr().err


def test_labels_lead_to_where_their_curves_end(write):
    """At 0.1, snapkv has no rows, so that its curve ends inside the panel."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Annotation

    more = {(task, method, 0.1): [0, 1, 0, 0] for task in ("easy", "fair") for method in ("kvzip", "proxykv")}
    summary = summarize(read_outcomes([write(header(), *rows(SCORES | more))]), samples=10)
    axes = new_figure(4, 4).subplots()
    _draw_scores(axes, summary, "uniform")
    ends = {label.get_text(): label.xy for label in axes.texts if isinstance(label, Annotation)}
    assert ends == {"snapkv": (0.2, 0.125), "proxykv (global)": (0.1, 0.25), "kvzip (global)": (0.1, 0.25)}
    assert all(label.xycoords == "data" for label in axes.texts if isinstance(label, Annotation))


def test_labels_are_spread_as_little_as_it_takes():
    assert spread([0.5, 0.1, 0.9], 0.1, 0.0) == [0.5, 0.1, 0.9]
    assert spread([0.5, 0.5, 0.5], 0.1, 0.0) == pytest.approx([0.4, 0.5, 0.6])
    assert spread([0.0, 0.02], 0.1, 0.0) == pytest.approx([0.0, 0.1])
    assert spread([0.52, 0.5, 0.64], 0.1, 0.0) == pytest.approx([0.5533, 0.4533, 0.6533], abs=1e-4)
    assert spread([], 0.1, 0.0) == []

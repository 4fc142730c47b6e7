"""Files of examples: what is read, and the errors for invalid lines."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from proxykv_hf import InvalidInputError
from proxykv_hf.evaluation.longbench import DATA_SETS
from proxykv_hf.evaluation.metrics import METRICS
from proxykv_hf.evaluation.readers import FORMATS, read
from proxykv_hf.evaluation.tasks import TASKS, niah


def written(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def asked(**fields):
    return {"text": "?", "references": ["a"]} | fields


def test_every_task_survives_a_round_trip_in_our_own_format(tmp_path):
    examples = [task.make(300, lambda text: len(text.split()), 0, index) for task in TASKS.values() for index in (0, 1)]
    lines = [dataclasses.asdict(example) | {"metric": TASKS[example.task].metric} for example in examples]
    reading = read(written(tmp_path / "all.jsonl", lines), "proxykv")
    assert reading.examples == tuple(examples)
    assert reading.metrics == {name: task.metric for name, task in TASKS.items()}
    assert reading.errors == ()


def test_what_may_be_left_out(tmp_path):
    lines = ["", {"context": "c", "metric": "f1", "questions": [{"text": "t", "references": ["r"]}]}, "  "]
    path = written(tmp_path / "mine.jsonl", lines)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    (example,) = read(path, "proxykv").examples
    assert (example.task, example.name) == ("mine", "00002")
    assert dataclasses.asdict(example.questions[0]) == {
        "text": "t",
        "references": ("r",),
        "answer_prefix": "",
        "max_new_tokens": 32,
        "choices": (),
    }


def test_bad_lines_are_named_and_the_rest_is_read(tmp_path):
    good = {"name": "a", "context": "c", "metric": "f1", "questions": [asked()]}
    bad = [
        ("{no json", "line", r"expected JSON in UTF-8 \(Expecting property"),
        ("[1, 2]", "line", r"expected a JSON object, got \[1, 2\]"),
        ({k: v for k, v in good.items() if k != "context"}, "context", "expected a string, got no such field"),
        (good | {"context": 5}, "context", "expected a string, got 5"),
        (good | {"metric": "bleu"}, "metric", r'expected one of classification, .*, got "bleu"'),
        (good | {"questions": []}, "questions", r"expected a list of at least one object, got \[\]"),
        (good | {"questions": [asked(), 7]}, r"questions\[1\]", "expected a JSON object, got 7"),
        (
            good | {"questions": [{"text": "?"}]},
            r"questions\[0\].references",
            "expected a list of strings that are not blank, got no such",
        ),
        (good | {"questions": [asked(references=[])]}, r"questions\[0\].references", "expected at least one string"),
        (
            good | {"questions": [asked(references=["a", 1])]},
            r"questions\[0\].references",
            "expected a list of strings",
        ),
        (
            good | {"questions": [asked(references=["a", " "])]},
            r"questions\[0\].references",
            "expected .* not blank, got",
        ),
        (good | {"questions": [asked(choices=["a", ""])]}, r"questions\[0\].choices", "expected .* not blank, got"),
        (
            good | {"questions": [asked(text="half \ud83d")]},
            r"questions\[0\].text",
            r'expected a string, got "half \\ud83d"',
        ),
        (good | {"context": " \n"}, "context", "expected a string that is not blank, got"),
        (
            good | {"questions": [asked(max_new_tokens=0)]},
            r"questions\[0\].max_new_tokens",
            "expected an integer of at least 1",
        ),
        (good | {"questions": [asked(max_new_tokens=True)]}, r"questions\[0\].max_new_tokens", "expected .*, got true"),
        (
            good | {"metric": "classification", "questions": [asked(choices=["a"]), asked()]},
            r"questions\[1\].choices",
            "expected the classes, a list of strings, got no such field",
        ),
        (
            good | {"metric": "classification", "questions": [asked(references=["a", "A"], choices=["a", "b"])]},
            r"questions\[0\].references",
            r'expected some of choices, got \["a", "A"\]',
        ),
        (good, "name", "expected a different name in each line, got a again"),
        (good | {"name": "x", "metric": "count"}, "metric", "expected f1 as in the lines before, got count"),
        (good | {"name": "x", "context": ["long"] * 50}, "context", r'expected a string, got \["long", .{40,60}…'),
    ]
    path = written(tmp_path / "mixed.jsonl", [good, *(line for line, *_ in bad), good | {"name": "last"}])
    with path.open("ab") as file:
        file.write(b'\n{"context": "\xff"}')
    reading = read(path, "proxykv")
    assert [example.name for example in reading.examples] == ["a", "last"]
    assert [error.line for error in reading.errors] == [*range(2, 2 + len(bad)), len(bad) + 3]
    for error, (_, field, problem) in zip(reading.errors, bad, strict=False):
        assert re.fullmatch(f"line {error.line}, {field}: {problem}.*", str(error))
    assert "expected JSON in UTF-8" in reading.errors[-1].problem


def longbench(**fields):
    return {
        "input": "Who?",
        "context": "Once {upon} a time.",
        "answers": ["Clara", "Clara Fenwick"],
        "length": 4,
        "dataset": "narrativeqa",
        "language": "en",
        "all_classes": None,
        "_id": "0",
    } | fields


def test_longbench_comes_with_its_prompts(tmp_path):
    reading = read(
        written(tmp_path / "n.jsonl", [longbench(), longbench(dataset="lcc_e", input="", answers=["x"])]), "longbench"
    )
    story, code = reading.examples
    assert story.context.endswith("explanation.\n\nStory: Once {upon} a time.")
    assert story.questions[0].text.startswith("\n\nNow, answer the question based on the story as concisely as you can")
    assert story.questions[0].text.endswith("\n\nQuestion: Who?\n\nAnswer:")
    assert (story.questions[0].references, story.questions[0].max_new_tokens) == (("Clara", "Clara Fenwick"), 128)
    assert code.context + code.questions[0].text == (
        "Please complete the code given below. \nOnce {upon} a time.Next line of code:\n"
    )
    assert reading.metrics == {"narrativeqa": "f1", "lcc_e": "edit_similarity"}
    assert {form.metric for form in DATA_SETS.values()} < set(METRICS)
    assert len(DATA_SETS) == 16


def test_longbenchs_bad_lines(tmp_path):
    lines = [
        longbench(dataset="dureader"),
        longbench(dataset="trec"),
        longbench(dataset="trec", all_classes=["a", "b"], answers=["a"]),
        longbench(answers=None),
        longbench(dataset="trec", all_classes=["a", "b"], answers=["c"]),
    ]
    reading = read(written(tmp_path / "n.jsonl", lines), "longbench")
    assert [(error.line, error.field) for error in reading.errors] == [
        (1, "dataset"),
        (2, "all_classes"),
        (4, "answers"),
        (5, "answers"),
    ]
    assert reading.errors[0].problem.startswith("expected one of narrativeqa, qasper, ")
    assert reading.examples[0].questions[0].choices == ("a", "b")


NEEDLE = "A special magic number is hidden.\nOne of the special magic numbers for a-b is: 1234567."
SOLVED = (
    "Track.\n\nVAR A = 12\nQuestion: Find all variables that are assigned the value 12 above. Answer: A\n\nVAR B = 2"
)
ASK = "Answer the question based on the given documents. Only give me the answer."
WORDS = "Question: What are the 10 most common words in the above list?"


@pytest.mark.parametrize(
    ("context", "question", "prefix", "metric", "longest"),
    [
        (
            NEEDLE,
            "\nWhat is the special magic number for a-b?",
            " The special magic number is",
            "string_match_all",
            128,
        ),
        (NEEDLE, "\nWhat are all the special magic numbers for a-b?", "", "string_match_all", 128),
        (SOLVED, "\nQuestion: Find all variables that are assigned the value 2 in", "", "string_match_all", 30),
        ("1. a 2. b", f"\n{WORDS}", "", "string_match_all", 120),
        # On one line, as RULER writes it with --remove_newline_tab.
        ("1. a 2. b", f" {WORDS}", "", "string_match_all", 120),
        (
            "a ... b",
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'.",
            "",
            "string_match_all",
            50,
        ),
        (f"{ASK}\n\nDocument 1: Question: y", f"\n\n{ASK}\n\nQuestion: who?", " Answer:", "string_match_part", 32),
    ],
)
def test_rulers_question_is_split_from_its_context(tmp_path, context, question, prefix, metric, longest):
    line = {"index": 3, "input": context + question, "outputs": ["x"], "length": 50, "answer_prefix": prefix}
    reading = read(written(tmp_path / "some_task" / "validation.jsonl", [line]), "ruler")
    (example,) = reading.examples
    assert (example.task, example.name, example.context) == ("some_task", "00001", context)
    (asked,) = example.questions
    assert (asked.text, asked.answer_prefix) == (question, prefix.strip())
    assert (asked.references, asked.max_new_tokens) == (("x",), longest)
    assert reading.metrics == {"some_task": metric}


def test_rulers_own_wording_is_ours(tmp_path):
    """Our RULER tasks, written as RULER's lines, are split again into the same context and question."""
    for name in (*niah.CONFIGURATIONS, "vt", "cwe", "fwe", "qa_1"):
        example = TASKS[name].make(700, lambda text: len(text.split()), 0, 0)
        (asked, *_) = example.questions
        line = {"input": example.context + asked.text, "outputs": list(asked.references)}
        reading = read(written(tmp_path / f"{name}.jsonl", [line]), "ruler")
        assert reading.examples[0].context == example.context
        assert reading.metrics == {name: TASKS[name].metric}


def test_rulers_bad_lines(tmp_path):
    lines = [
        {"input": "No such thing. Question: what?", "outputs": ["x"]},
        {"outputs": ["x"]},
        {"input": " \nWhat is the special magic number for x?", "outputs": ["x"]},
    ]
    errors = read(written(tmp_path / "x.jsonl", lines), "ruler").errors
    assert [(error.line, error.field) for error in errors] == [(1, "input"), (2, "input"), (3, "input")]
    assert "expected a document before the question" in errors[2].problem
    assert "expected a text with one of RULER's questions at its end" in errors[0].problem


def test_no_such_file_or_format(tmp_path):
    with pytest.raises(InvalidInputError, match="format: expected one of proxykv, longbench, ruler, got 'csv'"):
        read(tmp_path, "csv")
    for format in FORMATS:
        with pytest.raises(InvalidInputError, match=r"expected a file of JSON lines, but .* is not a file"):
            read(tmp_path, format)

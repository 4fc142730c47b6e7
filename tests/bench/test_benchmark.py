"""What measures: `proxykv bench`, and the benchmarks that need no real model."""

from __future__ import annotations

import json
import re
import statistics
import sys

import decode_attention
import gpu_check
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper

from proxykv_hf import InvalidInputError, RetentionPolicy, SnapKVScorer, cli
from proxykv_hf.bench import measure, meter
from proxykv_hf.bench.prompt import prompt_ids
from proxykv_hf.bench.report import markdown, summarize
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers

METHODS = ("full", "uncompressed", "kvzip", "proxykv:proxy_first")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with its tokenizer, and a mapper whose proxy is the target's own first layers."""
    folder = tmp_path_factory.mktemp("bench")
    target = tiny_model("llama", 3)
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    make_mapper(target, first_layers(target, 2), whole_proxy=target, proxy_id=SELF_PROXY).save_pretrained(
        folder / "mapper"
    )
    return folder


@pytest.fixture
def bench(folders, tmp_path, capsys):
    """Runs the command; its status, what it wrote to stdout and stderr, and the results' file."""

    def run(*arguments, lengths=(40, 24), methods=METHODS, out=None):
        out = out or tmp_path / "results.json"
        target = str(folders / "target")
        asked = ["bench", "--target", target, "--lengths", *map(str, lengths), "--methods", *methods]
        code = cli.main([*asked, "--repeats", "2", "--new-tokens", "3", "--out", str(out), *arguments])
        return code, capsys.readouterr(), out

    return run


def test_a_run_writes_rows_summary_table_and_picture(bench, folders, tmp_path):
    picture = tmp_path / "plot.png"
    code, printed, out = bench(
        "--mapper", str(folders / "mapper"), "--threads", "2", "--proxy-threads", "1", "--plot", str(picture)
    )
    assert code == 0
    results = json.loads(out.read_text())
    header, rows, summary = results["header"], results["rows"], results["summary"]
    assert header["versions"]["torch"] == torch.__version__
    assert header["command"].startswith("proxykv bench --target ")
    assert (header["threads"], header["proxy_threads"], torch.get_num_threads()) == (2, 1, 1)
    assert (header["dtype"], header["proxy"], header["policy"]["sink_tokens"]) == ("float32", SELF_PROXY, 0)
    # Repeat by repeat, length by length, the methods in turn, beginning with another in the next repeat.
    order = [(row["repeat"], row["length"], row["method"]) for row in rows]
    turned = (*METHODS[1:], METHODS[0])
    assert order == [
        *((0, length, method) for length in (40, 24) for method in METHODS),
        *((1, length, method) for length in (40, 24) for method in turned),
    ]
    for row in rows:
        full = next(other for other in rows if (other["length"], other["method"]) == (row["length"], "full"))
        assert row["bytes_full"] == full["bytes_full"] == 2 * 4 * 3 * 2 * 8 * row["length"]
        assert row["bytes_peak"] >= row["bytes_kept"]
        assert row["tokens_per_second"] == pytest.approx(3 / row["decode_seconds"])
        assert row["seconds"] >= row["phases"]["prefill"] > 0
        if row["method"] == "uncompressed":
            assert row["answer"] == full["answer"]
            assert row["bytes_kept"] == pytest.approx(row["bytes_full"], rel=0.01)
        elif row["method"] != "full":
            assert row["bytes_kept"] < 0.35 * row["bytes_full"]
        assert ("mapper" in row["phases"]) == row["method"].startswith("proxykv")
    assert [(entry["length"], entry["method"]) for entry in summary] == [(n, m) for n in (24, 40) for m in METHODS]
    seconds = {
        method: statistics.median(row["seconds"] for row in rows if (row["length"], row["method"]) == (40, method))
        for method in METHODS
    }
    entry = summary[-1]
    assert entry["seconds"] == seconds["proxykv:proxy_first"]
    assert entry["seconds_over_kvzip"] == seconds["proxykv:proxy_first"] / seconds["kvzip"]
    assert entry["seconds_over_full"] == seconds["proxykv:proxy_first"] / seconds["full"]
    assert entry["scoring_over_full_prefill"] > 0
    assert 0 < entry["mapper_share"] < 1
    assert summary[0]["mapper_share"] is None
    assert "40 tokens, medians of 2:" in printed.out
    assert printed.out.count("| kvzip | ") == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "results.json"]


def test_an_interrupted_run_keeps_the_repeats_that_are_whole(bench, tmp_path, monkeypatch):
    once, calls = measure.measure, []

    def stopped(*args):
        calls.append(None)
        if len(calls) == 2 + 2 + 2:  # two to warm up, a repeat of two, and one more
            raise KeyboardInterrupt
        return once(*args)

    monkeypatch.setattr(measure, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench(lengths=(20,), methods=("full", "snapkv"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["full", "snapkv"]
    assert [entry["runs"] for entry in results["summary"]] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"methods": ("full", "guess")},
            "methods: expected some of full, uncompressed, proxykv, kvzip, .*, got full, guess",
        ),
        ({"methods": ("full", "full")}, "each once, got full, full"),
        ({"methods": ("full", "proxykv")}, "give --mapper FOLDER"),
        ({"methods": ("full", "hidden_state")}, "method hidden_state: .* give --hidden-state FOLDER"),
        ({"arguments": ("--mapper", "nowhere")}, "--mapper: expected only with a method that reads it .*, got kvzip"),
        ({"lengths": (0,)}, r"lengths: expected numbers of at least 1, each once, got \[0\]"),
        ({"lengths": (9, 9)}, r"each once, got \[9, 9\]"),
        (
            {"lengths": (4094,), "methods": ("full",)},
            "4094 tokens and what follows it need 4097 positions, but the target has 4096: give shorter lengths\n",
        ),
        (
            {"lengths": (2100,), "methods": ("kvzip",)},
            "but the target has 4096: give shorter lengths, or leave out kvzip",
        ),
        ({"arguments": ("--threads", "0")}, "--threads: expected at least 1, got 0"),
        ({"arguments": ("--proxy-threads", "-1")}, "--proxy-threads: expected at least 1, got -1"),
        ({"arguments": ("--repeats", "0")}, "repeats: expected at least 1, got 0"),
        ({"arguments": ("--new-tokens", "0")}, "new_tokens: expected at least 1, got 0"),
        ({"arguments": ("--retention-ratio", "2")}, r"retention_ratio: expected a number in \(0, 1\]"),
        ({"arguments": ("--device", "abacus")}, "device: expected one that torch finds here, got 'abacus'"),
        ({"arguments": ("--plot", "missing/plot.png")}, "expected a folder that can be written for missing/plot.png"),
        ({"out": "missing/results.json"}, "expected a folder that can be written for missing/results.json"),
        ({"out": "."}, "expected a file to write, but . is a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(bench, monkeypatch, arguments, message):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    given = {"methods": ("full", "kvzip")} | arguments
    code, printed, _ = bench(*given.pop("arguments", ()), **given)
    assert code == 2
    assert printed.err.startswith("proxykv: ")
    assert re.search(message, printed.err)


def test_a_proxy_without_the_positions_is_refused_before_a_model_is_loaded(bench, folders, tmp_path, monkeypatch):
    small = tiny_model("llama", 3).config
    small.max_position_embeddings = 30
    small.save_pretrained(tmp_path / "proxy")
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    code, printed, _ = bench(
        "--mapper", str(folders / "mapper"), "--proxy", str(tmp_path / "proxy"), methods=("proxykv",), lengths=(40,)
    )
    assert code == 2
    assert "need 40 positions, but the proxy has 30: give shorter lengths\n" in printed.err


def test_a_proxy_without_the_positions_to_repeat_is_refused_before_anything_is_measured(bench, tmp_path, monkeypatch):
    small = tiny_model("llama", 3)
    small.config.max_position_embeddings = 300
    small.save_pretrained(tmp_path / "proxy")
    tiny_tokenizer().save_pretrained(tmp_path / "proxy")
    monkeypatch.setattr(measure, "measure", None)
    options = {"methods": ("full", "static_alignment"), "lengths": (40, 200)}
    code, printed, _ = bench("--proxy", str(tmp_path / "proxy"), **options)
    assert code == 2
    assert "expected at most 300 tokens, the proxy's positions, got" in printed.err


@pytest.mark.parametrize(("module", "extra"), [("tqdm", "models"), ("matplotlib", "plot")])
def test_a_missing_extra_is_named(bench, tmp_path, monkeypatch, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    code, printed, _ = bench("--plot", str(tmp_path / "plot.png"), methods=("full",))
    assert code == 2
    assert f"expected {module} to be installed: pip install 'proxykv-hf[{extra}]'" in printed.err


def test_a_prompt_has_exactly_so_many_tokens():
    tokenizer = tiny_tokenizer()
    long = prompt_ids(tokenizer, 5000)
    assert long.shape == (1, 5000)
    assert torch.equal(prompt_ids(tokenizer, 300), long[:, :300])
    assert len({tokenizer.decode(long[0, start : start + 40]) for start in range(0, 4960, 40)}) == 124
    assert tokenizer.decode(prompt_ids(tokenizer, 4, "A lighthouse")[0]) == "A li"
    with pytest.raises(InvalidInputError, match=r"text: expected at least 13 tokens, .* got 12"):
        prompt_ids(tokenizer, 13, "A lighthouse")


def test_a_text_of_ones_own_is_read(bench, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time. " * 3)
    assert bench("--text", str(path), methods=("full",), lengths=(30,))[0] == 0
    code, printed, _ = bench("--text", str(path), methods=("full",), lengths=(90,))
    assert code == 2
    assert "text: expected at least 91 tokens" in printed.err


def test_a_failing_scorer_is_an_error_and_no_figure(bench, monkeypatch):
    monkeypatch.setattr("proxykv_hf.scorers.snapkv.window_scores", lambda *_: torch.tensor(torch.nan))
    code, printed, out = bench(methods=("snapkv",))
    assert code == 2
    assert "the scores of row 0 hold NaN" in printed.err
    assert not out.exists()


def test_a_summary_says_nothing_where_nothing_can_be_compared():
    policy = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    plan = measure.Plan(("snapkv",), (30,), policy, repeats=1, new_tokens=2)
    ids = prompt_ids(tokenizer, 31)
    rows = list(measure.runs(plan, measure.make_methods(plan, {"snapkv": SnapKVScorer()}), model, tokenizer, ids))
    (entry,) = summarize(rows)
    compared = [name for name in entry if "_over_" in name]
    assert [entry[name] for name in compared] == [None] * len(compared)
    assert markdown([entry]).endswith(" |  |  |  |  |  |  |")
    with pytest.raises(InvalidInputError, match="proxykv:overlap: expected a scorer proxykv, got none"):
        measure.make_methods(measure.Plan(("proxykv:overlap",), (30,), policy), {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_the_peak_is_what_was_taken_beyond_before_even_if_given_back(monkeypatch, tmp_path):
    cpu, size = torch.device("cpu"), 40_000_000
    held = torch.ones(size // 4)  # before: does not count
    peak = meter.PeakMemory(cpu)
    if peak.bytes() is None:
        pytest.skip("this sandbox does not let a process forget its peak")
    torch.ones(size // 4)
    assert 0.9 * size < peak.bytes() < 1.5 * size
    assert meter.PeakMemory(cpu).bytes() < size / 4
    monkeypatch.setattr(meter, "_PROCESS", tmp_path / "nothing")
    assert meter.PeakMemory(cpu).bytes() is None
    del held


def test_the_check_for_gpus_runs_on_tiny_models(capsys, tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--tiny", "--repeats", "1", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert all(check.get("is_right", True) for check in results["header"]["checks"])
    assert {(row["length"], row["method"]) for row in results["rows"]} == {
        (256, "kvzip"),
        *(
            (length, method)
            for length in (256, 512)
            for method in ("full", "proxykv:overlap", "proxykv:proxy_first", "proxykv:sequential")
        ),
    }
    assert "512 tokens, medians of 1:" in capsys.readouterr().out


def test_the_check_for_gpus_fails_when_something_is_wrong(monkeypatch, capsys):
    wrong = {"check": "ragged attention", "largest_difference": 1.0, "is_right": False}
    monkeypatch.setattr(gpu_check, "check_attention", lambda *_: wrong)
    monkeypatch.setattr(gpu_check, "check_order", lambda *_: {})
    monkeypatch.setattr(gpu_check, "runs", lambda *_: iter(()))
    assert gpu_check.main(["--tiny"]) == 1
    assert "something is wrong" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_gpus_says_that_there_is_none(capsys):
    assert gpu_check.main([]) == 2
    assert "finds no CUDA GPU" in capsys.readouterr().err


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_ragged_heads_are_timed_against_padded_ones(capsys):
    decode_attention.main("ragged --tokens 64 --heads 4 --group 2 --head-dim 16 --queries 1 3 --repeats 2".split())
    rows = lines(capsys)
    assert [(row["spread"], row["queries"]) for row in rows] == [
        ("linear", 1), ("linear", 3), ("geometric", 1), ("geometric", 3),
    ]  # fmt: skip
    assert decode_attention.head_lengths("linear", 4, 64) == [1, 22, 43, 64]
    assert decode_attention.head_lengths("geometric", 4, 64) == [1, 4, 16, 64]
    assert [row["kept_bytes"] for row in rows] == [2 * 4 * 16 * total for total in (130, 130, 85, 85)]
    assert all(row["is_sum_of_lengths"] and row["largest_difference"] < 1e-5 and row["ratio"] > 0 for row in rows)


def test_allocations_are_compared_at_equal_bytes(capsys):
    decode_attention.main("allocation --tokens 100 --repeats 2 --new-tokens 3".split())
    ragged, uniform = lines(capsys)
    assert (ragged["allocation"], uniform["allocation"], uniform["over_uniform"]) == ("global", "uniform", 1)
    assert ragged["kept_bytes"] == pytest.approx(uniform["kept_bytes"], rel=0.01)


def test_bytes_are_within_two_percent_of_the_budget(capsys):
    decode_attention.main("bytes --tokens 400".split())
    rows = lines(capsys)
    assert [row["ratio"] for row in rows] == [0.05, 0.1, 0.2, 0.3, 0.5]
    assert all(99.5 < row["percent_of_budget"] < 102 for row in rows)

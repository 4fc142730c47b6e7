"""``proxykv evaluate``: what it refuses, what it writes, and a run that was killed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import asked
import pytest
import torch
from tiny_mappers import make_mapper
from transformers import AutoTokenizer

from proxykv_hf import cli
from proxykv_hf.commands import evaluate as command
from proxykv_hf.commands import sources
from proxykv_hf.evaluation.metrics import check_metric
from proxykv_hf.evaluation.sole import sole_use
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers

EXAMPLES = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return asked.save_model(tmp_path_factory.mktemp("home") / "target")


@pytest.fixture(autouse=True)
def _letters(monkeypatch):
    monkeypatch.setattr(command, "TASKS", {"letters": asked.TASK})
    monkeypatch.setattr(command, "METRICS", asked.METRICS)
    monkeypatch.setattr(command, "check_metric", lambda name: None)


def options(home, out, *more):
    common = ["--target", str(home), "--tasks", "letters", "--tokens", "50", "--examples", str(EXAMPLES)]
    return ["evaluate", *common, "--ratios", "0.2", "0.5", "--out", str(out), *more]


def run(capsys, *arguments):
    code = cli.main([*map(str, arguments)])
    return code, capsys.readouterr().err


def contents(path):
    """The header and the rows, without the seconds, which differ from run to run."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert all(row.pop("seconds") > 0 for row in rows)
    return header["header"], rows


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """The file of a run that was not interrupted; tests must not change it."""
    out = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    torch.set_num_threads(1)  # as in the runs that are killed: the header tells the number
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "TASKS", {"letters": asked.TASK})
        patch.setattr(command, "METRICS", asked.METRICS)
        patch.setattr(command, "check_metric", lambda name: None)
        assert cli.main(options(home, out)) == 0
    return out


def test_what_a_file_holds(home, whole):
    header, rows = contents(whole)
    assert {name: header[name] for name in ("format", "target", "dtype", "tokens", "seed", "allocation")} == {
        "format": 1,
        "target": str(home),
        "dtype": "float32",
        "tokens": 50,
        "seed": 0,
        "allocation": "native",
    }
    assert (header["query_aware"], header["mapper"], header["data"]) == (False, None, None)
    assert (header["tasks"], header["ratios"]) == ({"letters": "held"}, [0.2, 0.5])
    assert header["methods"] == ["full", "kvzip", "snapkv", "random"]
    assert header["command"][:3] == ["proxykv", "evaluate", "--target"]
    assert {"python", "torch", "transformers", "proxykv-hf"} <= set(header["versions"])
    assert "CPU threads" in header["hardware"]
    assert [row["block"] for row in rows] == [2 * 7] * 14 + [3 * 7] * 21 + [4 * 7] * 28
    assert list(rows[0]) == [
        "task", "example", "question", "method", "allocation", "ratio", "bytes", "bytes_full", "answer", "score",
        "nll", "tokens_nll", "block",
    ]  # fmt: skip


KILLED = """
import os, signal, sys
import asked
from pathlib import Path
from proxykv_hf import cli
from proxykv_hf.commands import evaluate as command
from proxykv_hf.commands import sources
from proxykv_hf.evaluation.metrics import check_metric
from proxykv_hf.evaluation.sole import sole_use
from proxykv_hf.evaluation import rows

command.TASKS, command.METRICS, command.check_metric = {"letters": asked.TASK}, asked.METRICS, lambda name: None
append = rows.RowFile.append

def cut_short(file, block):
    append(file, block)
    if len(file.rows) > 14:  # after the rows of the second example
        data = file.path.read_bytes()
        os.truncate(file.path, len(data) - int(sys.argv[1]))
        os.kill(os.getpid(), signal.SIGKILL)

rows.RowFile.append = cut_short
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize("lost", [0, 1, 500, 2000])
def test_a_run_that_was_killed_goes_on_to_the_same_file(home, whole, tmp_path, lost, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = options(home, out)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(lost), *arguments], env=environment, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    left = out.read_bytes()
    assert len(left) < len(whole.read_bytes())
    assert run(capsys, *arguments)[0] == 0
    header, rows = contents(out)
    expected_header, expected_rows = contents(whole)
    header["command"][-1] = str(whole)  # only --out differs
    assert (header, rows) == (expected_header, expected_rows)
    finished = left.split(b"\n")[1:15]
    assert out.read_bytes().split(b"\n")[1:15] == finished  # finished work was not done again


def test_more_is_added_and_nothing_done_twice(home, whole, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    narrow = [option if option != str(EXAMPLES) else "1" for option in options(home, out, "--methods", "random")]
    assert run(capsys, *narrow)[0] == 0
    first = contents(out)[1]
    assert len(first) == 2 * 3
    assert run(capsys, *options(home, out))[0] == 0
    header, rows = contents(out)
    assert rows[: len(first)] == first
    assert header["methods"] == ["full", "random", "kvzip", "snapkv"]
    assert len(header["later"]) == 1

    def plain(rows):
        names = ("task", "example", "question", "method", "allocation", "ratio", "answer", "bytes")
        return sorted([str(row[name]) for name in names] for row in rows)

    assert plain(rows) == plain(contents(whole)[1])


def test_a_file_that_another_run_writes_to_is_left_alone(home, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "load", None)
    out = tmp_path / "rows.jsonl"
    out.write_bytes(whole.read_bytes())
    with sole_use(out):
        code, error = run(capsys, *options(home, out, "--redo", "snapkv"))
    assert code == 2
    assert f"{out} is in use by another run: wait until it is over, or give another --out" in error
    assert out.read_bytes() == whole.read_bytes()


def test_a_method_is_done_again(home, whole, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    out.write_bytes(whole.read_bytes())
    assert f"proxykv: {out} holds results of seed 0" in run(capsys, *options(home, out, "--seed", "1"))[1]
    assert run(capsys, *options(home, out, "--redo", "snapkv"))[0] == 0
    rows, before = contents(out)[1], contents(whole)[1]
    assert [row["method"] for row in rows[-8:]] == ["snapkv"] * 8
    assert len(rows) == len(before)


def save_mapper(target, folder, seed):
    """Save a random mapper whose proxy is the target's own first layers."""
    mapper = make_mapper(target, first_layers(target, 2), whole_proxy=target, proxy_id=SELF_PROXY)
    torch.manual_seed(seed)
    torch.nn.init.normal_(mapper.heads.output)
    mapper.save_pretrained(folder)
    return folder


def test_a_retrained_mapper_is_another_method(home, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    one, two = (save_mapper(asked.talkative_model(), tmp_path / str(seed), seed) for seed in (1, 2))
    arguments = options(
        home, out, "--methods", "proxykv", "head_prior", "random", "--examples", "1", "--questions", "1"
    )
    assert run(capsys, *arguments, "--mapper", one)[0] == 0
    code, error = run(capsys, *arguments, "--mapper", two)
    assert code == 2
    assert f"{out} holds results of another proxykv (mapper " in error
    assert "give another --out, or --redo proxykv" in error
    assert run(capsys, *arguments, "--mapper", two, "--redo", "proxykv")[0] == 0
    header, rows = contents(out)
    assert [row["method"] for row in rows].count("proxykv") == 2
    assert header["mapper"] == str(two)
    code, error = run(capsys, *arguments, "--mapper", two, "--methods", "static_alignment")
    assert code == 2
    assert "method static_alignment: expected a proxy that is a model of its own" in error


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tasks", "riddles"], "--tasks: expected all, or some of letters, got riddles"),
        (["--methods", "guess"], "methods: expected some of full, proxykv, kvzip, "),
        (["--ratios", "0.3", "1.5"], "retention_ratio: expected a number in (0, 1], got 1.5"),
        (["--methods", "snapkv=0.1,"], "--methods: expected ratios as in snapkv=0.1,0.2, got 'snapkv=0.1,'"),
        (["--methods", "full=0.5", "random"], "--methods: expected full without ratios, since it keeps everything"),
        (["--methods", "random=0.5"], "--ratios: expected only with a method that has no ratios of its own"),
        (["--methods", "full"], "--ratios: expected only with a method that has no ratios of its own"),
        (["--methods", "snapkv=0.1,2", "random"], "retention_ratio: expected a number in (0, 1], got 2.0"),
        (["--ratios", "0.3", "0.3"], "ratios: expected at least one, each once, got 0.3, 0.3"),
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--examples", "0"], "--examples: expected at least 1, got 0"),
        (["--batch-tokens", "0"], "--batch-tokens: expected at least 1, got 0"),
        (["--redo", "guess"], "methods: expected some of full, proxykv, kvzip, "),
        (["--redo", "h2o"], "--redo: expected some of --methods, which are run again, got h2o"),
        (["--methods", "proxykv"], "method proxykv: expected a trained mapper, got none: give --mapper FOLDER"),
        (["--methods", "hidden_state"], "method hidden_state: expected trained heads, got none: give --hidden-state"),
        (
            ["--methods", "kvzip", "--mapper", "m"],
            "--mapper: expected only with a method that reads it (proxykv, head_",
        ),
        (["--proxy", "p"], "--proxy: expected only with a method that reads it (proxykv, static_alignment), got kvzip"),
        (["--format", "ruler"], "--format: expected only with --data"),
        (["--out", "/nowhere/rows.jsonl"], "expected a folder that can be written for /nowhere/rows.jsonl"),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(home, tmp_path, capsys, monkeypatch, more, words):
    monkeypatch.setattr("proxykv_hf.commands.sources.load", None)
    code, error = run(capsys, *options(home, tmp_path / "rows.jsonl", *more))
    assert code == 2
    assert words in error
    assert not Path(tmp_path / "rows.jsonl").exists()


def test_a_missing_package_of_a_metric_is_reported_before_a_model_is_loaded(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("proxykv_hf.commands.sources.load", None)
    monkeypatch.setattr(command, "check_metric", check_metric)
    monkeypatch.setattr(command, "TASKS", {"letters": dataclasses.replace(asked.TASK, metric="rouge_l")})
    monkeypatch.setitem(sys.modules, "rouge", None)
    code, error = run(capsys, *options(home, tmp_path / "rows.jsonl"))
    assert code == 2
    assert "expected rouge to be installed: pip install 'proxykv-hf[eval]'" in error


def test_a_context_without_positions_is_refused_before_any_work(home, tmp_path, capsys):
    code, error = run(capsys, *options(home, tmp_path / "rows.jsonl", "--tokens", "4096"))
    assert code == 2
    assert "task letters, example 00000: expected at most 4096 tokens, the target's positions" in error
    assert not Path(tmp_path / "rows.jsonl").exists()


def test_a_mapper_is_evaluated_where_one_is_given(home, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    mapper = save_mapper(asked.talkative_model(), tmp_path / "mapper", 1)
    arguments = options(home, out, "--examples", "1", "--questions", "1", "--mapper", mapper)
    assert run(capsys, *arguments)[0] == 0
    header, rows = contents(out)
    assert header["methods"] == ["full", "proxykv", "kvzip", "snapkv", "random"]
    assert [row["method"] for row in rows].count("proxykv") == 2


def test_examples_from_a_file_and_what_is_wrong_in_it(home, tmp_path, capsys):
    data = tmp_path / "mine.jsonl"
    question = {"text": "\nWho?", "references": ["a fox"], "max_new_tokens": 4}
    good = {"context": "a fox and a hen", "questions": [question] * 2, "metric": "held"}
    data.write_text("\n".join(json.dumps(line) for line in (good, {"context": "x"}, good)))
    told = []
    load = sources.load
    out = tmp_path / "rows.jsonl"
    arguments = ["evaluate", "--target", home, "--data", data, "--methods", "random", "--ratios", "0.5", "--out", out]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxykv_hf.evaluation.readers.METRICS", asked.METRICS)
        patch.setattr(sources, "load", lambda *given: (told.append(capsys.readouterr().err), load(*given))[1])
        code, error = run(capsys, *arguments)
        assert run(capsys, *arguments, "--examples", "1", "--out", tmp_path / "first.jsonl")[0] == 2
    assert {row["example"] for row in contents(tmp_path / "first.jsonl")[1]} == {"00001"}
    assert code == 2
    for words in (told[0], error):  # before the work and after it
        assert f"1 lines of {data} were left out:\nline 2, questions: expected" in words
    header, rows = contents(out)
    assert (header["tasks"], header["tokens"], len(header["data"])) == ({"mine": "held"}, None, 64)
    assert [(row["example"], row["question"], row["method"]) for row in rows] == [
        (example, question, method)
        for example in ("00001", "00003")
        for question in (0, 1)
        for method in ("full", "random")
    ]


def test_a_file_without_examples_and_options_of_tasks_are_refused(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("proxykv_hf.commands.sources.load", None)
    data, out = tmp_path / "mine.jsonl", tmp_path / "rows.jsonl"
    arguments = ["evaluate", "--target", home, "--data", data, "--out", out]
    code, error = run(capsys, *arguments)
    assert code == 2
    assert f"expected a file of JSON lines, but {data} is not a file" in error
    data.write_text("{}")
    code, error = run(capsys, *arguments)
    assert code == 2
    assert f"expected examples in {data}, got none\nline 1, questions: expected" in error
    code, error = run(capsys, *arguments, "--tokens", "50")
    assert code == 2
    assert "--tokens: expected only with --tasks" in error
    assert not out.exists()


def test_rows_of_another_chat_template_are_not_mixed(home, tmp_path, capsys):
    folder, out = tmp_path / "target", tmp_path / "rows.jsonl"
    shutil.copytree(home, folder)
    arguments = options(folder, out, "--methods", "random", "--dtype", "float32")
    assert run(capsys, *arguments)[0] == 0
    before = out.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}Today is Monday. {{ message['content'] }}{% endfor %} So: "
    tokenizer.save_pretrained(folder)
    code, error = run(capsys, *arguments, "--examples", str(EXAMPLES + 1))
    assert code == 2
    assert re.search("holds results of wording '[0-9a-f]{16}', and this run has '[0-9a-f]{16}': give another", error)
    assert out.read_bytes() == before

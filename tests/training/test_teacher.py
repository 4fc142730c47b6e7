"""Teacher shards: resumable, shared by processes, checked when read; on a tiny model."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from texts import write_texts
from tiny import tiny_model, tiny_tokenizer

from proxykv_hf import InvalidInputError, KVzipScorer, ModelGeometry, ProxyPrunedCache, RetentionPolicy, ShardError, cli
from proxykv_hf.attention.reconstruction import RECIPE
from proxykv_hf.chat import chat_affixes, encode
from proxykv_hf.commands import teacher as command
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.training import shards, teacher
from proxykv_hf.training.corpus import Corpus
from proxykv_hf.training.shards import DOCUMENTS_PER_SHARD, load_shards
from proxykv_hf.training.teacher import import_folder, score_corpus

DOCUMENTS = 2 * DOCUMENTS_PER_SHARD + 3
TOKENIZER = tiny_tokenizer()
PREFIX = encode(TOKENIZER, chat_affixes(TOKENIZER)[0])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus(write_texts(tmp_path_factory.mktemp("texts")), tokens=(10, 30))


def score(model, corpus, out, documents=DOCUMENTS, **arguments):
    score_corpus(model, TOKENIZER, corpus, documents, out, target_id="tiny", progress=False, **arguments)


def folder_of(corpus, source):
    path = corpus.sources[source][0].path
    return next(parent for parent in path.parents if parent.name == source)


@pytest.fixture(scope="module")
def whole(model, corpus, tmp_path_factory):
    """A folder made without interruption; not to be changed."""
    folder = tmp_path_factory.mktemp("shards") / "whole"
    with torch.no_grad():
        score(model, corpus, folder)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_a_folder_holds(model, corpus, whole):
    documents = list(
        load_shards(
            whole,
            geometry=ModelGeometry.from_config(model.config),
            weights=weights_fingerprint(model),
            score_recipe=RECIPE,
        )
    )
    assert [document.name for document in documents] == [f"doc-{k:06d}" for k in range(DOCUMENTS)]
    assert sorted(path.name for path in whole.iterdir()) == [
        "manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "shard-00002.safetensors",
    ]  # fmt: skip
    for number, document in enumerate(documents):
        source = corpus.document(number)
        ids = PREFIX + encode(TOKENIZER, source.text)[: source.tokens]
        assert document.input_ids.tolist() == ids
        assert (document.kind, document.sources, document.split) == (source.kind, source.sources, "train")
        assert document.prefix_tokens == len(PREFIX)
        assert document.scores.shape == (3, 2, source.tokens)
        assert document.scores.dtype == torch.float16
    with ProxyPrunedCache(model, KVzipScorer(TOKENIZER), RetentionPolicy(1.0)) as cache:
        scores = cache.prefill(torch.tensor([ids]), context=(len(PREFIX), len(ids)), prune=False)["kvzip"]
    assert torch.equal(scores[0, :, :, len(PREFIX) :].half(), document.scores)
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest["corpus"] == corpus.recipe()
    assert manifest["target"]["id"] == "tiny"
    assert sum(sum(shard["documents"].values()) for shard in manifest["shards"]) == sum(
        document.scores.shape[2] for document in documents
    )


@pytest.mark.parametrize("stop_after", [0, 3, DOCUMENTS_PER_SHARD, DOCUMENTS_PER_SHARD + 1, DOCUMENTS - 1])
def test_a_run_that_was_stopped_goes_on_and_repeats_nothing(model, corpus, whole, tmp_path, monkeypatch, stop_after):
    calls = []
    teacher_scores = teacher.teacher_scores

    def interrupted(*arguments):
        calls.append(None)
        if len(calls) == stop_after + 1:
            raise KeyboardInterrupt
        return teacher_scores(*arguments)

    monkeypatch.setattr(teacher, "teacher_scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(model, corpus, tmp_path / "out")
    finished = [document.name for document in load_shards(tmp_path / "out")]
    assert len(finished) == stop_after // DOCUMENTS_PER_SHARD * DOCUMENTS_PER_SHARD
    score(model, corpus, tmp_path / "out")
    assert len(calls) == DOCUMENTS + 1
    assert contents(tmp_path / "out") == contents(whole)
    score(model, corpus, tmp_path / "out", documents=5)
    assert len(calls) == DOCUMENTS + 1


def test_a_folder_takes_more_documents_later(model, corpus, whole, tmp_path):
    for documents in (2, DOCUMENTS_PER_SHARD + 1, DOCUMENTS):
        score(model, corpus, tmp_path, documents=documents)
        assert len(list(load_shards(tmp_path))) == documents
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_processes_make_what_one_makes(model, corpus, whole, tmp_path, order):
    for index in order:
        score(model, corpus, tmp_path, process_index=index, process_count=2)
    assert contents(tmp_path) == contents(whole)


def test_the_last_to_write_leaves_the_manifest_right(model, corpus, whole, copied, monkeypatch):
    """Another process finishes a shard just before this one writes a manifest without it."""
    late = copied / "shard-00002.safetensors"
    data = late.read_bytes()
    late.unlink()
    write = shards.write_whole

    def overtaken(path, text):
        late.write_bytes(data)
        write(path, text)

    monkeypatch.setattr(shards, "write_whole", overtaken)
    score(model, corpus, copied, documents=DOCUMENTS_PER_SHARD)
    assert contents(copied) == contents(whole)


def test_a_shard_that_was_finished_but_not_listed_is_taken_in(model, corpus, whole, copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    del manifest["shards"][1]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    score(model, corpus, copied)
    assert contents(copied) == contents(whole)
    os.rename(copied / "shard-00001.safetensors", copied / "shard-00001.partial")  # whole, but without its name
    score(model, corpus, copied)
    assert contents(copied) == contents(whole)


def altered(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [altered, lambda data: data[:-50], lambda data: b""])
def test_a_damaged_shard_is_refused_by_name_and_made_again_when_deleted(model, corpus, whole, copied, damage):
    path = copied / "shard-00001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    documents = load_shards(copied)
    assert next(documents).name == "doc-000000"
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors is cut short or altered: expected sha256 .*Delete"):
        list(documents)
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors is cut short or altered"):
        score(model, corpus, copied)
    path.unlink()
    with pytest.raises(ShardError, match=r"shard-00001\.safetensors is missing, though manifest\.json lists it"):
        list(load_shards(copied))
    score(model, corpus, copied)
    assert contents(copied) == contents(whole)


def test_a_partial_shard_that_is_cut_short_is_refused_by_name(model, corpus, copied):
    path = copied / "shard-00001.safetensors"
    (copied / "shard-00001.partial").write_bytes(path.read_bytes()[:-50])
    path.unlink()
    with pytest.raises(ShardError, match=r"shard-00001\.partial is not a complete shard .*delete it"):
        score(model, corpus, copied)


def test_a_manifest_that_is_none(copied, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder of teacher shards with a manifest"):
        load_shards(tmp_path)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(ShardError, match="is not JSON"):
        load_shards(copied)
    (copied / "manifest.json").write_text('{"format": 1, "target": {}, "corpus": {}}')
    with pytest.raises(ShardError, match=r"manifest\.json lacks score_recipe, shards: delete it"):
        load_shards(copied)
    (copied / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ShardError, match="expected shards of format 1, got 99"):
        load_shards(copied)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("target", "x"),
        ("target", {"id": "tiny", "weights": "x", "dtype": None}),
        ("corpus", None),
        ("shards", {}),
        ("shards", ["shard-00000.safetensors"]),
        ("shards", [{"file": "shard-00000.safetensors"}]),
    ],
)
def test_a_manifest_that_is_damaged_inside(copied, part, value):
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {part: value}))
    with pytest.raises(ShardError, match=rf"manifest\.json is damaged in {part}: delete it and run the teacher again"):
        load_shards(copied)


@pytest.mark.parametrize("when", ["read_shard", "_sha256"])
def test_a_shard_that_another_process_grows_is_left_out(whole, copied, monkeypatch, when):
    """It takes its shard away while this one still looks at another."""
    manifest = json.loads((whole / "manifest.json").read_text())
    look = getattr(shards, when)

    def slow(path, *arguments):
        (copied / "shard-00002.safetensors").unlink(missing_ok=True)
        return look(path, *arguments)

    monkeypatch.setattr(shards, when, slow)
    shards.ShardFolder(copied, {key: value for key, value in manifest.items() if key not in ("shards", "format")})
    assert json.loads((copied / "manifest.json").read_text()) == manifest | {"shards": manifest["shards"][:2]}


def test_what_does_not_match_is_refused_by_naming_the_difference(model, corpus, whole, copied):
    other = tiny_model("llama", 3)
    with pytest.raises(ShardError, match=r"target\.geometry\.num_attention_heads: expected 6, got 4"):
        load_shards(whole, geometry=ModelGeometry.from_config(other.config))
    with pytest.raises(ShardError, match=r"target\.weights: expected 'abc', got"):
        load_shards(whole, weights="abc")
    with pytest.raises(ShardError, match="score_recipe: expected 'kvzip-2', got 'kvzip-1'"):
        load_shards(whole, score_recipe="kvzip-2")
    before = contents(copied)
    with pytest.raises(ShardError, match=r"copied was made from something else: target\.geometry.*target\.weights"):
        score(other, corpus, copied)
    seeded = Corpus([folder_of(corpus, "essays")], tokens=(10, 30), seed=1)
    with pytest.raises(ShardError, match=r"corpus\.seed: expected 1, got 0; corpus\.sources: expected no code"):
        score(model, seeded, copied)
    assert contents(copied) == before
    (copied / "manifest.json").unlink()  # the shards know it too
    with pytest.raises(ShardError, match=r"shard-00000\.safetensors was made from something else: .*corpus\.seed"):
        score(model, seeded, copied)


@pytest.mark.parametrize("full_at", [2, DOCUMENTS_PER_SHARD + 4])
def test_a_full_disk_leaves_what_was_there(model, corpus, whole, tmp_path, monkeypatch, full_at):
    writes = []
    fsync = os.fsync

    def full(descriptor):
        writes.append(None)
        if len(writes) > full_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.partial'"):
        score(model, corpus, tmp_path)
    assert not list(tmp_path.glob(".*"))
    assert len(list(load_shards(tmp_path))) == (DOCUMENTS_PER_SHARD if full_at > DOCUMENTS_PER_SHARD else 0)
    monkeypatch.setattr(os, "fsync", fsync)
    score(model, corpus, tmp_path)
    assert contents(tmp_path) == contents(whole)


def test_documents_that_have_no_room_are_refused_before_any_work(model, corpus, tmp_path):
    longer = Corpus([folder_of(corpus, "code")], tokens=(10, 2100))
    with pytest.raises(InvalidInputError, match=r"tokens: the longest documents, of 2100 tokens, .* target has 4096"):
        score(model, longer, tmp_path)
    with pytest.raises(InvalidInputError, match="documents: expected at least 1, got 0"):
        score(model, corpus, tmp_path, documents=0)
    assert not list(tmp_path.iterdir())


def write_foreign(path, tokens=12, prefix=PREFIX, heads=2, score=0.5, **metadata):
    tensors = {
        "input_ids": torch.tensor([*prefix, *range(10, 10 + tokens)], dtype=torch.int32),
        "scores": torch.rand(3, heads, tokens).half(),
    }
    tensors["scores"][0, 0, 0] = score
    defaults = {"kind": "prose", "recipe": RECIPE, "prefix_tokens": str(len(prefix)), "seed": "1"}
    save_file(tensors, path, metadata=defaults | metadata)


def test_scores_from_elsewhere_become_shards(model, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(DOCUMENTS_PER_SHARD + 2):
        write_foreign(source / f"doc-{number:04d}.safetensors", tokens=9 + number)
    arguments = {"target_id": "tiny", "progress": False}
    import_folder(source, model, TOKENIZER, tmp_path / "out", split="held_out", **arguments)
    documents = list(load_shards(tmp_path / "out", weights=weights_fingerprint(model)))
    assert len(documents) == DOCUMENTS_PER_SHARD + 2
    for number, document in enumerate(documents):
        there = load_file(source / f"doc-{number:04d}.safetensors")
        assert torch.equal(document.input_ids, there["input_ids"])
        assert torch.equal(document.scores, there["scores"])
        assert (document.kind, document.split) == ("prose", "held_out")
        assert document.sources == (f"doc-{number:04d}.safetensors",)
    write_foreign(source / "more.safetensors")
    with pytest.raises(ShardError, match=r"corpus\.imported_sha256: .*corpus\.documents: expected 11, got 10"):
        import_folder(source, model, TOKENIZER, tmp_path / "out", split="held_out", **arguments)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recipe": "kvzip-0"}, r"doc\.safetensors: expected scores of recipe kvzip-1, got 'kvzip-0'"),
        ({"prefix_tokens": "2"}, r"doc\.safetensors: expected scores \[L, H, N\] and prefix_tokens that make up"),
        ({"prefix": [9, 9, 9]}, r"doc\.safetensors: expected scores \[3, 2, N\] after the target's chat prefix"),
        ({"heads": 4}, r"got \[3, 4, 12\] for \d+ tokens: another target's\?"),
    ],
)
def test_scores_of_another_target_are_not_imported(model, tmp_path, wrong, message):
    write_foreign(tmp_path / "doc.safetensors", **wrong)
    with pytest.raises(ShardError, match=message):
        import_folder(tmp_path, model, TOKENIZER, tmp_path / "out", target_id="tiny", progress=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.5])
def test_numbers_that_are_no_scores_are_not_imported(model, tmp_path, value):
    write_foreign(tmp_path / "a.safetensors")
    write_foreign(tmp_path / "doc.safetensors", score=value)
    with pytest.raises(
        ShardError, match=r"doc\.safetensors: expected scores from 0 to 1, as attention weights are, got"
    ):
        import_folder(tmp_path, model, TOKENIZER, tmp_path / "out", target_id="tiny", progress=False)


def test_what_cannot_be_imported(model, tmp_path):
    with pytest.raises(InvalidInputError, match="found none in"):
        import_folder(tmp_path, model, TOKENIZER, tmp_path / "out", target_id="tiny", progress=False)
    (tmp_path / "doc.safetensors").write_bytes(b"nothing")
    with pytest.raises(ShardError, match=r"doc\.safetensors is not a complete file of scores"):
        import_folder(tmp_path, model, TOKENIZER, tmp_path / "out", target_id="tiny", progress=False)


def test_the_command_line_scores_imports_and_refuses(model, corpus, whole, tmp_path, monkeypatch, capsys):
    texts = [word for source in ("essays", "code") for word in ("--text", str(folder_of(corpus, source)))]
    common = ["teacher", "--target", "tiny", "--out", str(tmp_path / "out")]
    length = ["--tokens", "10", "30"]
    assert cli.main([*common, *texts, "--documents", "0"]) == 2
    assert "--documents: expected at least 1, got 0" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main([*common, "--text", str(tmp_path / "empty")]) == 2
    assert "expected text files" in capsys.readouterr().err
    monkeypatch.setattr(command, "load", lambda target, device, dtype: (model, TOKENIZER))
    assert cli.main([*common, *texts, *length, "--documents", str(DOCUMENTS)]) == 0
    assert contents(tmp_path / "out") == contents(whole)
    assert f"{DOCUMENTS}/{DOCUMENTS}" in capsys.readouterr().err
    assert cli.main([*common, *texts, *length, "--split", "held_out"]) == 2
    assert "corpus.split: expected 'held_out', got 'train'" in capsys.readouterr().err
    assert cli.main([*common, "--import", str(tmp_path / "empty")]) == 2
    assert "files to import, found none" in capsys.readouterr().err
    assert cli.main([*common, "--import", str(tmp_path / "empty"), "--documents", "9", "--seed", "0"]) == 2
    assert "--documents, --seed: expected only with --text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*common, *texts, "--import", str(tmp_path)])
    assert "not allowed with argument --text" in capsys.readouterr().err

"""The command line's own mistakes-in, clear-words-out; real answers are in test_real.py."""

from __future__ import annotations

import json

import pytest
import torch
from heads import random_heads
from tiny import tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper

from proxykv_hf import HiddenStateScorer, ProxyPrunedCache, cli
from proxykv_hf.chat import chat_affixes, encode
from proxykv_hf.commands import models
from proxykv_hf.evaluation.methods import METHODS
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Its folder; 4,096 positions, one token a byte. In it are ``mapper``, whose proxy is the target, and ``heads``."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny_model("llama", 3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    mapper = make_mapper(model, first_layers(model, 2), whole_proxy=model, proxy_id=SELF_PROXY)
    mapper.save_pretrained(folder / "mapper")
    HiddenStateScorer(random_heads(model)).save_pretrained(folder / "heads")
    return folder


def run(capsys, *arguments):
    code = cli.main(["generate", "--target", "nowhere", "--question", "What?", *arguments])
    return code, capsys.readouterr().err


def test_wrong_input_is_refused_before_a_model_is_loaded(capsys, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    assert run(capsys, str(empty)) == (2, f"proxykv: expected a document, but {empty} is empty\n")
    code, error = run(capsys, str(tmp_path / "missing.txt"))
    assert code == 2
    assert "No such file" in error
    for value in ("0", "1.5", "nan"):
        code, error = run(capsys, str(empty), "--retention-ratio", value)
        assert code == 2
        assert "retention_ratio: expected a number in (0, 1]" in error
    assert run(capsys, str(empty), "--max-new-tokens", "0")[0] == 2


def test_a_file_that_is_no_text_is_named(capsys, tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    code, error = run(capsys, str(path))
    assert code == 2
    assert f"expected text in UTF-8, but {path} is not" in error


def test_an_unknown_target_shows_the_short_names(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time.")
    code = cli.main(["generate", "--target", str(tmp_path / "empty"), "--question", "What?", str(path)])
    error = capsys.readouterr().err
    assert code == 2
    assert "--target: expected a folder with a model" in error
    assert "short names here: gemma3-270m, qwen2.5-coder-0.5b" in error


def test_a_document_that_finds_no_positions_is_refused_with_what_helps(capsys, tmp_path, target):
    path = tmp_path / "long.txt"
    path.write_text("a" * 3000)
    common = ("--target", str(target), str(path), "--max-new-tokens", "2")
    code, error = run(capsys, *common)
    assert code == 2
    assert "the document with KVzip's repetition of it takes 50" in error
    assert f"and {target} has 4096 positions: give a shorter document, or a model for longer ones, or another" in error
    assert "chunk_tokens" not in error
    assert run(capsys, *common, "--scorer", "random")[0] == 0
    path.write_text("a" * 4095)
    code, error = run(capsys, *common, "--scorer", "random")
    assert code == 2
    assert "the document with a question and its answer takes 41" in error
    assert "give a shorter document, or a model for longer ones\n" in error


def answered(capsys, target, path, *more):
    """What ``generate --json`` prints."""
    arguments = ["--target", str(target), "--question", "Who?", "--json", "--max-new-tokens", "4", *more]
    assert cli.main(["generate", *arguments, str(path)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_mapper_is_used_where_one_is_given(capsys, tmp_path, target, monkeypatch):
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time there was a lamp. " * 4)
    kept = []
    close = ProxyPrunedCache.close
    monkeypatch.setattr(ProxyPrunedCache, "close", lambda self: (kept.append(self.kept_indices(1)), close(self))[1])
    result = answered(capsys, target, path, "--mapper", str(target / "mapper"), "--device", "cpu", "--dtype", "float32")
    assert (result["scorer"], result["mapper"]) == ("proxykv", str(target / "mapper"))
    assert result["report"]["fallback"] is None
    monkeypatch.undo()
    model, tokenizer = tiny_model("llama", 3), tiny_tokenizer()
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    ids = torch.tensor([prefix + encode(tokenizer, path.read_text())])
    with ProxyPrunedCache.from_pretrained(target / "mapper", target=model, tokenizer=tokenizer) as cache:
        cache.prefill(ids, context=(len(prefix), ids.shape[1]))
        assert all(torch.equal(a[a < ids.shape[1]], b) for a, b in zip(kept[0], cache.kept_indices(1), strict=True))
    assert answered(capsys, target, path)["scorer"] == "kvzip"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_answers(capsys, tmp_path, target, name):
    path = tmp_path / "story.txt"
    path.write_text("Once upon a time there was a lamp. " * 4)
    folders = {"mapper": target / "mapper", "hidden_state": target / "heads", "proxy": target}
    wanted = METHODS[name].wants[-1:]  # of static alignment, the proxy
    given = [text for source in wanted for text in (f"--{source.replace('_', '-')}", str(folders[source]))]
    result = answered(capsys, target, path, "--scorer", name, "--dtype", "bfloat16", *given)
    assert result["scorer"] == name
    assert result["report"]["fallback"] is None
    assert result["report"]["bytes_kept"] < 0.5 * result["report"]["bytes_full"]


def test_what_a_scorer_lacks_or_leaves_unread_is_refused(capsys, target):
    code, error = run(capsys, "--scorer", "proxykv")
    assert code == 2
    assert error == "proxykv: method proxykv: expected a trained mapper, got none: give --mapper FOLDER\n"
    code, error = run(capsys, "--scorer", "kvzip", "--mapper", "m")
    assert code == 2
    assert "--mapper: expected only with a method that reads it (proxykv, head_prior, static_alignment), got " in error
    code, error = run(capsys, "--proxy", "p")
    assert code == 2
    assert "--proxy: expected only with a method that reads it (proxykv, static_alignment), got kvzip" in error
    code, error = run(capsys, "--mapper", "nowhere", str(target / "config.json"))
    assert code == 2
    assert "that holds a mapper" in error  # told before the target, which is nowhere either


@pytest.mark.parametrize(("option", "folder"), [("--mapper", "mapper"), ("--hidden-state", "heads")])
def test_another_target_is_refused_before_its_weights_are_read(capsys, tmp_path, target, monkeypatch, option, folder):
    monkeypatch.setattr("proxykv_hf.commands.sources.load", None)
    tiny_model("llama", 3, layers=5).config.save_pretrained(tmp_path)
    (tmp_path / "story.txt").write_text("Once upon a time.")
    code, error = run(capsys, "--target", str(tmp_path), option, str(target / folder), str(tmp_path / "story.txt"))
    assert code == 2
    assert "another target than this: expected num_layers=3" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scorer", "guess"],
        ["--retention-ratio", "many"],
        ["--retention-ratio", "0.3", "--max-tokens", "4"],
    ],
)
def test_wrong_options_show_the_usage(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, *arguments)
    assert stopped.value.code == 2
    assert "usage: proxykv" in capsys.readouterr().err


def test_names_that_are_not_ours_go_to_transformers(tmp_path):
    assert models.resolve("someone/some-model") == "someone/some-model"
    assert models.resolve(str(tmp_path)) == str(tmp_path)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("proxykv-hf ")

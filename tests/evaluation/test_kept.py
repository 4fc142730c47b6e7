"""`proxykv kept`: which tokens are kept, the words that most heads keep, the plot."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import random_scores, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper
from tokenizers import normalizers

from proxykv_hf import (
    FixedScorer,
    InvalidInputError,
    KVzipScorer,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    cli,
)
from proxykv_hf.chat import chat_affixes, encode
from proxykv_hf.evaluation.kept import Kept, find_kept, peaks
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers

TEXT = "the lamp is 41 steps up, the lamp is lit."
POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_masks_are_what_a_pruned_cache_keeps(kind):
    model, tokenizer = tiny_model(kind), tiny_tokenizer()
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    ids = torch.tensor([prefix + encode(tokenizer, TEXT)])
    scorers = {"fixed": FixedScorer(random_scores(model, 1, ids.shape[1])), "kvzip": KVzipScorer(tokenizer)}
    kept = find_kept(model, tokenizer, TEXT, scorers, POLICY)
    for name, scorer in scorers.items():
        with ProxyPrunedCache(model, scorer, POLICY, tokenizer=tokenizer) as cache:
            cache.prefill(ids, context=(len(prefix), ids.shape[1]))
            for place, layer in enumerate(kept.layers):
                for head, indices in enumerate(cache.kept_indices(layer)):
                    inside = indices[len(prefix) :] - len(prefix)  # the whole prefix is kept
                    assert kept.masks[name][place, head].nonzero()[:, 0].tolist() == inside.tolist()
    assert kept.layers == ((1,) if kind == "gemma3" else (0, 1, 2))
    assert kept.overlap("fixed", "fixed") == 1.0
    both = (kept.masks["fixed"] & kept.masks["kvzip"]).sum() / kept.masks["kvzip"].sum()
    assert kept.overlap("kvzip", "fixed") == pytest.approx(float(both))


def test_words_and_marks_are_spans_of_tokens():
    model, tokenizer = tiny_model(), tiny_tokenizer()  # one token per byte
    kept = find_kept(model, tokenizer, TEXT, {"random": RandomScorer()}, POLICY, tokens=22, marks=["lamp", "41"])
    assert kept.masks["random"].shape == (3, 2, 22)
    assert kept.words == (
        (0, 3, "the"),
        (4, 8, "lamp"),
        (9, 11, "is"),
        (12, 14, "41"),
        (15, 20, "steps"),
        (21, 22, "u"),
    )
    assert kept.marks == ((4, 8), (12, 14))
    share = kept.heads_keeping("random")
    assert share.tolist() == pytest.approx([float(kept.masks["random"][:, :, n].sum()) / 6 for n in range(22)])


def test_words_and_marks_that_the_tokenizer_drops():
    model, tokenizer = tiny_model(), copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("-", "")
    text, scorers = "a -- b-c", {"random": RandomScorer()}
    kept = find_kept(model, tokenizer, text, scorers, POLICY, marks=["b-c"])
    assert kept.words == ((0, 1, "a"), (3, 5, "b-c"))
    assert kept.marks == ((3, 5),)
    with pytest.raises(InvalidInputError, match="marks: expected passages that have tokens, got '--': the tokenizer d"):
        find_kept(model, tokenizer, text, scorers, POLICY, marks=["b-c", "--"])


def test_peaks_are_the_most_kept_words_apart_from_each_other():
    words = [(0, 2, "one,"), (2, 4, "two"), (4, 5, "--"), (5, 8, "(three)"), (8, 9, "four")]
    shares = torch.tensor([0.1, 0.9, 0.8, 0.1, 1.0, 0.2, 0.7, 0.3, 0.6])
    assert peaks(shares, words, 9, 1) == [(1, "one"), (2, "two"), (6, "three"), (8, "four")]
    assert peaks(shares, words, 9, 2) == [(1, "one"), (6, "three"), (8, "four")]
    assert peaks(shares, words, 2, 2) == [(1, "one"), (6, "three")]


def test_what_is_refused():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    scorers = {"random": RandomScorer()}
    for text, options, message in (
        ("", {}, "expected a text, got none"),
        (TEXT, {"marks": ["lantern"]}, "expected passages of the text's 41 tokens, got 'lantern'"),
        (TEXT, {"tokens": 10, "marks": ["41"]}, "expected passages of the text's 10 tokens, got '41'"),
        ("a" * 5000, {}, "the text takes 500. tokens and the target has 4096 positions"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            find_kept(model, tokenizer, text, scorers, POLICY, **options)


def test_the_command_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    target = tiny_model("llama", 3)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    mapper = make_mapper(target, first_layers(target, 2), whole_proxy=target, proxy_id=SELF_PROXY)
    mapper.save_pretrained(tmp_path / "mapper")
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "kept.png"
    command = ["kept", str(tmp_path / "text.txt"), "--target", str(tmp_path / "target"), "--out", str(out)]
    assert cli.main([*command, "--mapper", str(tmp_path / "mapper"), "--mark", "41"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    for arguments, message in (
        (["--methods", "proxykv"], "method proxykv: expected a trained mapper, got none: give --mapper FOLDER"),
        (
            ["--methods", "random", "--proxy", "p"],
            "--proxy: expected only with a method that reads it (proxykv, static",
        ),
        (["--methods", "random", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--methods", "random", "--mark", "42"], "expected passages of the text's 41 tokens, got '42'"),
        (["--methods", "random", "--retention-ratio", "2"], "retention_ratio: expected a number in"),
    ):
        assert cli.main([*command, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_overlap_is_a_share_of_what_the_first_keeps():
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    kept = Kept((0,), {"all": mask, "first": mask & (torch.arange(3) == 0)}, (), ())
    assert kept.overlap("all", "first") == pytest.approx(1 / 3)
    assert kept.overlap("first", "all") == 1.0

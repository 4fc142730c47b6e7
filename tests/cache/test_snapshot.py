from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import random_ids, random_scores, tiny_model

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    GeometryError,
    ProxyKVWarning,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
)
from proxykv_hf._compat import call_forward
from proxykv_hf.cache.snapshot import FILE_NAME


def policy(**kwargs):
    return RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0, **kwargs)


def test_an_empty_cache_is_not_saved(tmp_path):
    model = tiny_model()
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        with pytest.raises(CacheStateError, match="expected a prefilled cache, got an empty one"):
            cache.save(tmp_path / "folder")
        assert not (tmp_path / "folder").exists()
        cache.prefill(random_ids(1, 20))
        cache.save(tmp_path / "folder")


@pytest.mark.parametrize("state", ["whole", "pruned"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_saved_cache_continues_where_it_was(tmp_path, kind, allocation, state):
    model = tiny_model(kind)
    ids, new = random_ids(2, 40), random_ids(2, 4, seed=3)
    scorer = FixedScorer(random_scores(model, 2, 40))
    bounds = (np.int64(2), np.int64(38))
    options = {"context": bounds, "timeout": 60.0, "schedule": "overlap"}
    with ProxyPrunedCache(model, scorer, policy(allocation=allocation), **options) as cache:
        cache.prefill(ids, prune=state == "pruned")
        call_forward(model, input_ids=random_ids(2, 2, seed=1), cache=cache)
        cache.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
        with ProxyPrunedCache.load(tmp_path, target=model, scorer=scorer) as loaded:
            a, b = cache.report().to_dict(), loaded.report().to_dict()
            for same in ("seen_tokens", "kept_tokens", "bytes_full", "fallback", "devices"):
                assert a[same] == b[same], same
            assert b["bytes_kept"] <= a["bytes_kept"]  # slack is not saved
            assert loaded.policy == cache.policy
            assert loaded.context == cache.context == [(2, 38)]
            assert (loaded.timeout, loaded.schedule) == (60.0, "overlap")
            expected = call_forward(model, input_ids=new, cache=cache).logits
            torch.testing.assert_close(call_forward(model, input_ids=new, cache=loaded).logits, expected)
            layer = cache.geometry.full_layers[0]
            for ours, theirs in zip(loaded.kept_indices(layer, 1), cache.kept_indices(layer, 1), strict=True):
                assert torch.equal(ours, theirs)
            loaded.reset()
            loaded.prefill(ids)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_saved_cache_takes_the_dtype_of_the_model_that_loads_it(tmp_path, kind, allocation):
    exact = tiny_model(kind).bfloat16().float()  # so that the weights are the same
    scorer = FixedScorer(random_scores(exact, 1, 40))
    with ProxyPrunedCache(exact, scorer, policy(allocation=allocation)) as cache:
        cache.prefill(random_ids(1, 40))
        cache.save(tmp_path)
    half = tiny_model(kind).bfloat16()
    with ProxyPrunedCache.load(tmp_path, target=half) as loaded, ProxyPrunedCache(half, scorer, cache.policy) as own:
        own.prefill(random_ids(1, 40))
        assert loaded.report().bytes_kept == own.report().bytes_kept
        logits, expected = (
            call_forward(half, input_ids=random_ids(1, 4, seed=3), cache=either).logits for either in (loaded, own)
        )
        torch.testing.assert_close(logits, expected, atol=0.5, rtol=0.1)


def test_saving_replaces_an_older_file(tmp_path):
    model = tiny_model()
    for tokens in (20, 40):
        with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
            cache.prefill(random_ids(1, tokens))
            cache.save(tmp_path / "sub" / "folder")
    with ProxyPrunedCache.load(tmp_path / "sub" / "folder", target=model) as loaded:
        assert loaded.report().seen_tokens == [40]
        loaded.reset()
        with pytest.raises(CacheStateError, match="was given no scorer"):
            loaded.prefill(random_ids(1, 5))


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    from proxykv_hf.cache import snapshot

    model = tiny_model()
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, 20))
        cache.save(tmp_path)
        before = (tmp_path / FILE_NAME).read_bytes()

        def full_disk(*args, **kwargs):
            raise OSError("No space left on device")

        monkeypatch.setattr(snapshot, "save_file", full_disk)
        with pytest.raises(OSError, match="No space"):
            cache.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_missing_foreign_or_damaged_file_is_refused_with_the_reason(tmp_path):
    model = tiny_model()
    with pytest.raises(FileNotFoundError, match=r"as cache.save\(folder\) writes it"):
        ProxyPrunedCache.load(tmp_path, target=model)
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, 20))
        cache.save(tmp_path)
    with pytest.raises(GeometryError, match=r"num_layers=2.* got .*num_layers=3"):
        ProxyPrunedCache.load(tmp_path, target=tiny_model(layers=2))
    other = tiny_model()
    other.model.layers[1].mlp.up_proj.weight.data *= 2
    with pytest.warns(ProxyKVWarning, match="other weights of the same geometry"):
        ProxyPrunedCache.load(tmp_path, target=other).close()

    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CacheStateError, match=r"expected a whole safetensors file, but .* is damaged"):
        ProxyPrunedCache.load(tmp_path, target=model)
    path.write_bytes(whole)
    save_file(load_file(path), path, metadata={"proxykv": json.dumps({"format": 99})})
    with pytest.raises(CacheStateError, match="format 1, got 99"):
        ProxyPrunedCache.load(tmp_path, target=model)
    path.write_bytes(whole)
    tensors = load_file(path)
    del tensors["1.keys"]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CacheStateError, match=r"lacks '1.keys'"):
        ProxyPrunedCache.load(tmp_path, target=model)
    path.write_bytes(whole)
    header = json.loads(metadata["proxykv"])
    header["policy"]["later"] = 1
    save_file(load_file(path), path, metadata={"proxykv": json.dumps(header)})
    with pytest.raises(CacheStateError, match=r"'later'.*load it with the version of proxykv-hf that saved it"):
        ProxyPrunedCache.load(tmp_path, target=model)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(CacheStateError, match="format 1, got None"):
        ProxyPrunedCache.load(tmp_path, target=model)
    assert model.config._attn_implementation == "sdpa"

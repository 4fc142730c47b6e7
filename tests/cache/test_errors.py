"""Bad input gives a clear error before any work, or an uncompressed cache and one warning."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
from tiny import pad_left, random_ids, random_scores, tiny_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    GeometryError,
    InvalidInputError,
    InvalidPolicyError,
    KVzipScorer,
    ProxyKVError,
    ProxyKVWarning,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    ScorerRun,
    ScoringError,
    UnsupportedModelError,
    errors,
    prune_dynamic_cache,
    with_proxykv,
)
from proxykv_hf._compat import cache_keyword, call_forward

TOKENS = 30


def policy(ratio=0.3, **kwargs):
    return RetentionPolicy(ratio, **{"sink_tokens": 0, "recent_tokens": 0} | kwargs)


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def calls(model):
    """A list to which every forward of the model adds an entry."""
    count = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: count.append(None))
    yield count
    handle.remove()


def test_every_error_is_also_the_built_in_it_resembles():
    leaves = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, ProxyKVError)]
    assert len(leaves) > 5
    for leaf in leaves:
        assert leaf is ProxyKVError or issubclass(leaf, (ValueError, RuntimeError, TypeError))


@pytest.mark.parametrize("context", [(-1, 5), (5, 5), (7, 3), (0, TOKENS + 1), [(0, 5), (0, 5)]])
def test_a_context_outside_the_prompt_is_refused_before_any_work(model, calls, context):
    with (
        ProxyPrunedCache(model, RandomScorer(), policy()) as cache,
        pytest.raises(InvalidInputError, match="context: expected"),
    ):
        cache.prefill(random_ids(1, TOKENS), context=context)
    assert not calls


def test_a_context_outside_a_prompt_of_stock_generate_is_an_error_too(model):
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(model, RandomScorer(), policy(), context=(5, TOKENS + 9)) as cache:
        with pytest.raises(InvalidInputError, match=f"start < stop <= {TOKENS}"):
            model.generate(ids, **{cache_keyword(model): cache}, max_new_tokens=3, do_sample=False)
        cache.reset()
        with pytest.raises(InvalidInputError, match="context"):
            cache.prefill(ids)
        cache.prefill(ids, context=(5, 9))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.empty(1, 0, dtype=torch.long), None, "at least one token"),
        (torch.empty(0, 3, dtype=torch.long), None, "at least one token"),
        (torch.ones(5, dtype=torch.long), None, r"a tensor \[batch, tokens\]"),
        (torch.ones(1, 5, dtype=torch.long), torch.ones(1, 4), r"expected attention_mask \[1, 5\]"),
        (torch.ones(1, 5, dtype=torch.long), torch.zeros(1, 5), "row 0 of the prompt has no tokens"),
    ],
)
def test_an_invalid_prompt_is_refused_before_any_work(model, calls, ids, mask, message):
    with (
        ProxyPrunedCache(model, RandomScorer(), policy()) as cache,
        pytest.raises(InvalidInputError, match=message),
    ):
        cache.prefill(ids, mask)
    assert not calls


def test_an_empty_input_over_a_filled_cache_says_what_the_cache_has_seen(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(InvalidInputError, match=rf"got none beyond the {TOKENS} that the cache has seen"):
            call_forward(model, input_ids=torch.empty(1, 0, dtype=torch.long), cache=cache)


def test_a_prompt_token_cannot_be_masked_later(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        mask = torch.ones(1, TOKENS + 1, dtype=torch.long)
        mask[0, 4] = 0
        with pytest.raises(InvalidInputError, match=r"prompt's \[30\] tokens, got \[29\]"):
            call_forward(model, input_ids=random_ids(1, 1), attention_mask=mask, cache=cache)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_an_error_while_pruning_never_leaves_a_half_pruned_cache(model, monkeypatch, allocation):
    from proxykv_hf.cache.pruning import Pruner

    ids, prune = random_ids(1, TOKENS), Pruner.prune

    def out_of_memory(self, place, *args):
        if place == 1:
            raise torch.OutOfMemoryError("none left")
        return prune(self, place, *args)

    monkeypatch.setattr(Pruner, "prune", out_of_memory)
    with ProxyPrunedCache(model, RandomScorer(), policy(allocation=allocation)) as cache:
        with pytest.raises(torch.OutOfMemoryError):
            cache.prefill(ids)
        with pytest.raises(CacheStateError, match=r"call reset\(\)"):
            call_forward(model, input_ids=ids, cache=cache)
        assert not list(cache.tensors())
        plain = DynamicCache()
        call_forward(model, input_ids=ids, cache=plain)
        with pytest.raises(torch.OutOfMemoryError):
            prune_dynamic_cache(plain, random_scores(model, 1, TOKENS), policy(allocation=allocation), target=model)
        assert [type(layer).__name__ for layer in plain.layers] == ["DynamicLayer"] * 3
        monkeypatch.undo()
        cache.reset()
        cache.prefill(ids)
        assert cache.report().kept_tokens != [[[TOKENS] * 2] * 3]


def test_kvzip_is_refused_if_its_repetition_needs_more_positions_than_there_are(model, calls):
    from tiny import tiny_tokenizer

    ids = random_ids(1, 2500)
    tokenizer = tiny_tokenizer()
    model.config.max_position_embeddings = 4000
    with ProxyPrunedCache(model, KVzipScorer(tokenizer), policy()) as cache:
        with pytest.raises(InvalidInputError, match="has 4000: give a shorter prompt, or fewer chunk_tokens"):
            cache.prefill(ids)
        assert not calls
        cache.scorer = KVzipScorer(tokenizer, chunk_tokens=1000)
        cache.reset()
        cache.prefill(ids)


def test_an_argument_of_a_wrong_type_is_refused_and_named(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        for wrong in ([[1, 2, 3]], {"input_ids": random_ids(1, 3)}, "text"):
            with pytest.raises(InvalidInputError, match=f"got a {type(wrong).__name__}"):
                cache.prefill(wrong)
    with pytest.raises(TypeError, match="expected a scorer"):
        ProxyPrunedCache(model, RandomScorer, policy())
    with pytest.raises(InvalidInputError, match="expected the target's tokenizer, got 'gpt2'"):
        KVzipScorer("gpt2")


def test_a_cache_cannot_be_pickled(model):
    import pickle

    with (
        ProxyPrunedCache(model, RandomScorer(), policy()) as cache,
        pytest.raises(TypeError, match=r"use save\(folder\) and load\(\)"),
    ):
        pickle.dumps(cache)


def test_a_mask_of_the_kept_length_is_refused(model, calls):
    with ProxyPrunedCache(model, RandomScorer(), policy(allocation="uniform")) as cache:
        cache.prefill(random_ids(1, TOKENS))
        calls.clear()
        kept = round(0.3 * TOKENS)
        with pytest.raises(InvalidInputError, match=rf"\[1, {TOKENS + 1}\], over the {TOKENS} tokens seen \(not only"):
            call_forward(model, input_ids=random_ids(1, 1), attention_mask=torch.ones(1, kept + 1), cache=cache)
        assert not calls
        call_forward(model, input_ids=random_ids(1, 1), attention_mask=torch.ones(1, TOKENS + 1), cache=cache)


def test_a_four_dimensional_mask_is_refused(model):
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    with (
        ProxyPrunedCache(model, RandomScorer(), policy()) as cache,
        pytest.raises(InvalidInputError, match="2-D attention_mask"),
    ):
        call_forward(model, input_ids=random_ids(1, TOKENS), attention_mask=mask, cache=cache)


def test_another_number_of_rows_is_refused(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(InvalidInputError, match=r"expected 1 rows, .* got 2: fork\(n\)"):
            call_forward(model, input_ids=random_ids(2, 1), cache=cache)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_crop_into_the_pruned_part_is_refused_and_changes_nothing(model, allocation):
    with ProxyPrunedCache(model, RandomScorer(), policy(allocation=allocation)) as cache:
        cache.prefill(random_ids(1, TOKENS))
        call_forward(model, input_ids=random_ids(1, 3), cache=cache)
        with pytest.raises(CacheStateError, match=r"cannot crop 4 of 33 tokens: only the last 3 lie after the pruned"):
            cache.crop(-4)
        assert cache.get_seq_length() == TOKENS + 3
        cache.crop(-3)
        assert cache.get_seq_length() == TOKENS
        with pytest.raises(InvalidInputError, match="expected 0 or less, got 3"):
            cache.crop(3)


def test_cropping_a_sliding_window_that_did_not_record_is_refused_and_changes_nothing():
    model = tiny_model("gemma3")
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        call_forward(model, input_ids=random_ids(1, 3), cache=cache)
        with pytest.raises(CacheStateError, match=r"activate_past_recording\(\)"):
            cache.crop(-1)
        assert [layer.get_seq_length() for layer in cache.layers] == [TOKENS + 3] * 3


def test_a_sliding_window_can_be_cropped_only_within_what_was_recorded():
    model = tiny_model("gemma3")
    ids, new = random_ids(1, TOKENS), random_ids(1, 4, seed=1)
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(ids)
        expected = call_forward(model, input_ids=new[:, :2], cache=cache.fork()).logits
        cache.activate_past_recording()
        with pytest.raises(CacheStateError, match="holds a sliding window of 16"):
            cache.crop(-3)  # nothing was recorded yet
        call_forward(model, input_ids=new, cache=cache)
        cache.crop(-2)
        with pytest.raises(CacheStateError, match="holds a sliding window of 16"):
            cache.crop(-2)  # the first crop dropped what this one needs
        cache.reset()
        cache.prefill(ids)
        cache.activate_past_recording()
        call_forward(model, input_ids=new, cache=cache)
        cache.crop(-4)
        torch.testing.assert_close(call_forward(model, input_ids=new[:, :2], cache=cache).logits, expected)


def test_cropping_the_whole_prompt_is_refused(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        call_forward(model, input_ids=random_ids(1, TOKENS), cache=cache)
        with pytest.raises(CacheStateError, match="nothing of the prompt would be left"):
            cache.crop(-TOKENS)
        cache.crop(-4)
        assert cache.report().seen_tokens == [TOKENS - 4]


def test_a_whole_cache_can_be_cropped_into_its_prompt_and_then_pruned(model):
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        scores = cache.prefill(ids, prune=False)["random"]
        cache.crop(-10)
        with cache.compress(scores[..., : TOKENS - 10], policy()) as pruned:
            assert pruned.report().seen_tokens == [TOKENS - 10]
            assert sum(map(sum, pruned.report().kept_tokens[0])) == round(0.3 * 6 * (TOKENS - 10))


def test_a_cache_works_only_with_its_own_model(model):
    other = tiny_model()
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        with pytest.raises(CacheStateError, match="cache's own target"):
            call_forward(other, input_ids=random_ids(1, TOKENS), cache=cache)
        with (
            ProxyPrunedCache(other, RandomScorer(), policy()),
            pytest.raises(GeometryError, match="a cache belongs to the model it was made with"),
        ):
            call_forward(other, input_ids=random_ids(1, TOKENS), cache=cache)
        with pytest.raises(CacheStateError, match="call that model itself"):
            call_forward(model.model, input_ids=random_ids(1, TOKENS), cache=cache)
        cache.prefill(random_ids(1, TOKENS))


def test_a_forward_in_another_thread_is_not_disturbed(model):
    ids, arguments = random_ids(1, TOKENS), {"max_new_tokens": 6, "do_sample": False}
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        expected = model.generate(ids, **{cache_keyword(model): cache}, **arguments)
    within, go, outputs, passes = threading.Event(), threading.Event(), [], []

    def pause(*_):
        passes.append(None)
        if len(passes) == 4:
            within.set()
            go.wait(30)

    cache = ProxyPrunedCache(model, RandomScorer(), policy())
    handle = model.model.layers[1].register_forward_pre_hook(pause)
    thread = threading.Thread(
        target=lambda: outputs.append(model.generate(ids, **{cache_keyword(model): cache}, **arguments))
    )
    thread.start()
    assert within.wait(30)
    for use in (cache.report, cache.fork, lambda: call_forward(model, input_ids=ids[:, :1], cache=cache)):
        with pytest.raises(CacheStateError, match="in use by another thread"):
            use()
    go.set()
    thread.join()
    handle.remove()
    assert torch.equal(outputs[0], expected)
    assert cache.report().seen_tokens == [TOKENS + 5]
    cache.close()


def test_a_forward_that_died_with_its_thread_spoils_the_cache(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:

        def die(*_):
            raise SystemExit

        def work():
            with contextlib.suppress(SystemExit):
                call_forward(model, input_ids=random_ids(1, TOKENS), cache=cache)

        handle = model.model.layers[1].register_forward_pre_hook(die)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        handle.remove()
        with pytest.raises(CacheStateError, match="half written"):
            cache.report()


def test_a_closed_cache_refuses_every_call(model):
    cache = ProxyPrunedCache(model, RandomScorer(), policy())
    cache.prefill(random_ids(1, TOKENS))
    cache.close()
    for use in (
        cache.report,
        cache.fork,
        cache.reset,
        lambda: cache.crop(0),
        lambda: cache.kept_indices(0),
        lambda: cache.prefill(random_ids(1, 3)),
        lambda: call_forward(model, input_ids=random_ids(1, 1), cache=cache),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: list(cache),
    ):
        with pytest.raises(CacheStateError, match="closed"):
            use()


def test_prefill_needs_an_empty_cache_and_compress_a_whole_one(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        with pytest.raises(CacheStateError, match="expected a whole cache"):
            cache.compress(torch.rand(1, 3, 2, TOKENS), policy())
        cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(CacheStateError, match=r"got one that is ready: call reset\(\)"):
            cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(CacheStateError, match="expected a whole cache"):
            cache.compress(torch.rand(1, 3, 2, TOKENS), policy())
        with pytest.raises(InvalidInputError, match=r"fork\(0\)"):
            cache.fork(0)


def test_scorers_are_compared_over_a_whole_cache_only(model):
    with (
        ProxyPrunedCache(model, None, policy()) as cache,
        pytest.raises(InvalidInputError, match="prune=False"),
    ):
        cache.prefill(random_ids(1, TOKENS), scorers={"random": RandomScorer()})


def test_a_cache_without_a_scorer_cannot_prefill(model, calls):
    with (
        ProxyPrunedCache(model, None, policy()) as cache,
        pytest.raises(CacheStateError, match="was given no scorer"),
    ):
        cache.prefill(random_ids(1, TOKENS))
    assert not calls


def test_a_wrong_policy_scorer_or_timeout_is_refused(model):
    with pytest.raises(InvalidPolicyError, match=r"RetentionPolicy\(retention_ratio=0.3\)"):
        ProxyPrunedCache(model, RandomScorer(), 0.3)
    with pytest.raises(TypeError, match=r"KVzipScorer\(tokenizer\)"):
        ProxyPrunedCache(model, "kvzip", policy())
    for timeout in ("5", -1, float("nan"), float("inf"), True):
        with pytest.raises(InvalidInputError, match=f"timeout: expected seconds, .* got {timeout!r}"):
            ProxyPrunedCache(model, RandomScorer(), policy(), timeout=timeout)
    assert model.config._attn_implementation == "sdpa"


def test_kvzip_without_a_tokenizer_is_refused_before_any_work(model, calls):
    with (
        ProxyPrunedCache(model, KVzipScorer(), policy()) as cache,
        pytest.raises(InvalidInputError, match="give KVzipScorer"),
    ):
        model.generate(random_ids(1, TOKENS), **{cache_keyword(model): cache}, max_new_tokens=2)
    assert not calls


def test_embeddings_work_with_scorers_that_need_no_ids(model):
    from tiny import tiny_tokenizer

    embeddings = model.get_input_embeddings()(random_ids(1, TOKENS))
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        call_forward(model, inputs_embeds=embeddings, cache=cache)
        assert cache.report().fallback is None
        assert sum(map(sum, cache.report().kept_tokens[0])) == round(0.3 * 6 * TOKENS)
    with (
        ProxyPrunedCache(model, KVzipScorer(tiny_tokenizer()), policy()) as cache,
        pytest.raises(InvalidInputError, match="needs the prompt's input_ids"),
    ):
        call_forward(model, inputs_embeds=embeddings, cache=cache)


class Failing:
    name = "failing"

    def __init__(self, where):
        self.where, self.observes = where, where == "observe"

    def begin(self, request):
        if self.where == "begin":
            raise RuntimeError("out of luck")

        class Run(ScorerRun):
            def observe(self, observation):
                if observation.layer:
                    raise RuntimeError("out of luck")

            def finish(self, cache):
                raise RuntimeError("out of luck")

        return Run()


def bad_scorers(model):
    nan = random_scores(model, 1, TOKENS)
    nan[0, 1, 1, 3] = torch.nan
    return [
        (FixedScorer(nan), "hold NaN"),
        (
            FixedScorer(torch.rand(1, 2, 2, TOKENS)),
            r"expected scores \[R, L, H, N\] = \[1, 3, 2, 30\], got \[1, 2, 2, 30\]",
        ),
        (FixedScorer(torch.rand(TOKENS)), r"got \[30\]"),
        (FixedScorer("scores"), "got str"),
        (Failing("begin"), "out of luck"),
        (Failing("finish"), "out of luck"),
        (Failing("observe"), "out of luck"),
    ]


@pytest.mark.parametrize("case", range(7))
def test_failed_scoring_leaves_the_cache_uncompressed_with_one_warning_or_raises_if_strict(model, case):
    scorer, message = bad_scorers(model)[case]
    ids = random_ids(1, TOKENS)
    arguments = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **{cache_keyword(model): DynamicCache()}, **arguments)
    with ProxyPrunedCache(model, scorer, policy()) as cache:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = model.generate(ids, **{cache_keyword(model): cache}, **arguments)
        ours = [w for w in caught if issubclass(w.category, ProxyKVWarning)]
        assert len(ours) == 1
        assert scorer.name in str(ours[0].message)
        assert scorer.name in cache.report().fallback
        assert "fallback" in str(cache.report())
        assert torch.equal(out, plain)
        assert cache.report().kept_tokens == [[[TOKENS + 5] * 2] * 3]
    strict = ProxyPrunedCache(model, scorer, policy(), strict=True)
    with strict, pytest.raises(ScoringError, match=message):
        model.generate(ids, **{cache_keyword(model): strict}, **arguments)
    with ProxyPrunedCache(model, scorer, policy()) as cache, pytest.raises(ScoringError, match=message):
        cache.prefill(ids, prune=False)


def test_nan_in_padding_and_sliding_windows_is_ignored():
    model = tiny_model("gemma3")
    ids, mask = pad_left([random_ids(1, n)[0] for n in (20, TOKENS)])
    scores = random_scores(model, 2, TOKENS)
    scores[0, :, :, :10] = torch.nan  # padding
    scores[:, [0, 2]] = torch.nan  # sliding windows
    with ProxyPrunedCache(model, FixedScorer(scores), policy(), strict=True) as cache:
        cache.prefill(ids, mask)
        assert cache.report().fallback is None


def test_protection_beyond_the_budget_gives_one_warning(model):
    wide = RetentionPolicy(0.05, sink_tokens=4, recent_tokens=8)
    with ProxyPrunedCache(model, RandomScorer(), wide) as cache:
        with pytest.warns(ProxyKVWarning, match="do not fit in the budget: 63 KV pairs more") as caught:
            cache.prefill(random_ids(2, TOKENS)[:1])
        assert len(caught) == 1
        assert cache.report().kept_tokens == [[[12, 12]] * 3]


def tiny(config_class, model_class, **kwargs):
    return model_class(config_class(vocab_size=50, hidden_size=16, **kwargs)).eval()


def test_models_without_a_prunable_cache_are_refused():
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
        )
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder BartConfig"):
        ProxyPrunedCache(bart, RandomScorer(), policy())
    mamba = tiny(MambaConfig, MambaForCausalLM, num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="MambaConfig"):
        ProxyPrunedCache(mamba, RandomScorer(), policy())
    sliding = tiny(
        MistralConfig, MistralForCausalLM, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="sliding windows only"):
        ProxyPrunedCache(sliding, RandomScorer(), policy(), strict=True)


def test_the_keys_of_a_ragged_layer_are_refused_as_a_single_tensor(model):
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(CacheStateError, match=r"kept_pairs\(\) of the cache gives them head by head"):
            _ = cache.layers[0].keys
    with ProxyPrunedCache(model, RandomScorer(), policy(allocation="uniform")) as cache:
        cache.prefill(random_ids(1, TOKENS))
        assert [keys.shape[2] for keys, *_ in cache] == [9] * 3


@pytest.mark.parametrize("context", [5, (5.7, 50.2), [], [(1, 2), 3], "ab"])
def test_a_context_that_is_no_span_is_refused(model, context):
    with pytest.raises(InvalidInputError, match=r"context: expected \(start, stop\)"):
        ProxyPrunedCache(model, RandomScorer(), policy(), context=context)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_cache_that_is_not_to_be_used_is_refused_and_stays_usable(ratio):
    """Transformers itself goes on, sends all tokens again in every step, and gives wrong tokens."""
    model = with_proxykv(tiny_model())
    ids = random_ids(1, 30)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(ratio)) as cache:
        with pytest.raises(InvalidInputError, match="expected use_cache=True with a cache, got False"):
            model.generate(ids, cache=cache, use_cache=False, max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == 0
        answer = model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(ratio)) as fresh:
        assert torch.equal(answer, model.generate(ids, cache=fresh, max_new_tokens=4, do_sample=False))

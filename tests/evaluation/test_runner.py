"""The runner against a plain loop: one prefill, one copy and one ``generate`` for every answer."""

from __future__ import annotations

import asked
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from proxykv_hf import InvalidInputError, InvalidPolicyError, KVzipScorer, ProxyPrunedCache, RandomScorer, SnapKVScorer
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.chat import chat_affixes, encode
from proxykv_hf.evaluation.cells import Cell
from proxykv_hf.evaluation.methods import FULL, METHODS, Method, Sources, check_methods, make_methods
from proxykv_hf.evaluation.rows import key_of
from proxykv_hf.evaluation.runner import Case, Runner, make_cells

TOKENIZER = tiny_tokenizer()
RATIOS = [0.2, 0.5]


@pytest.fixture(scope="module")
def model():
    return asked.talkative_model()


@pytest.fixture(scope="module")
def methods():
    return {
        "kvzip": Method(KVzipScorer(TOKENIZER), "global", "kvzip-1"),
        "snapkv": Method(SnapKVScorer(8), "uniform", "window 8"),
        "random": Method(RandomScorer(), "uniform", "seed 0"),
    }


def case(index=1, tokens=60, metric="held", query_aware=False):
    example = asked.make(tokens, lambda text: len(encode(TOKENIZER, text)), 0, index)
    return Case.of(example, metric, TOKENIZER, query_aware)


def native(methods):
    return {name: method.allocation for name, method in methods.items()}


def runner(model, methods, allocation="native+global", batch_tokens=200):
    cells = make_cells(native(methods), RATIOS, allocation)
    return Runner(model, TOKENIZER, methods, cells, asked.METRICS, batch_tokens)


def nothing(count):
    pass


def alone(model, methods, example, question, cell, query_aware, reference):
    """Answer, nll, tokens of the reference and bytes, from nothing but the cache and ``generate``."""
    before, after = chat_affixes(TOKENIZER)
    prefix, context = encode(TOKENIZER, before), encode(TOKENIZER, example.context)
    asks = encode(TOKENIZER, question.text)
    turn = encode(TOKENIZER, after + question.answer_prefix)
    prompt = prefix + context + (asks if query_aware else [])
    turn = turn if query_aware else asks + turn
    scorer = RandomScorer() if cell.method == FULL else methods[cell.method].scorer
    with ProxyPrunedCache(model, scorer, cell.policy, tokenizer=TOKENIZER, strict=True) as cache:
        cache.prefill(torch.tensor([prompt]), context=(len(prefix), len(prefix) + len(context)))
        kept = cache.report()
        held = sum(map(sum, kept.kept_tokens[0])) * 2 * 8 * 4
        losses = []
        with cache.fork() as fork:
            given = turn
            for token in encode(TOKENIZER, reference):
                logits = call_forward(model, cache=fork, input_ids=torch.tensor([given]), use_cache=True).logits[0, -1]
                losses.append(-float(logits.double().log_softmax(-1)[token]))
                given = [token]
        ids = torch.tensor([prompt + turn])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=question.max_new_tokens,
            pad_token_id=0,
            **{cache_keyword(model): cache},
        )
    answer = TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return answer, sum(losses) / len(losses), len(losses), held


@pytest.mark.parametrize("query_aware", [False, True])
def test_every_row_is_that_of_a_plain_loop(model, methods, query_aware):
    made = case(query_aware=query_aware)
    running = runner(model, methods)
    running.check(made)
    done = []
    rows = running.run(made, {}, done.append)
    assert [key_of(row) for row in rows] == running.keys(made)
    assert sum(done) == len(rows) == 3 * (1 + (1 + 2 + 2) * 2)
    assert len({row["answer"] for row in rows if row["question"] == 2}) > 2
    for row in rows:
        question = made.example.questions[row["question"]]
        cell = Cell(row["method"], row["allocation"], row["ratio"])
        reference = f" {question.references[0]}"
        expected = alone(model, methods, made.example, question, cell, query_aware, reference)
        assert (row["answer"], row["tokens_nll"], row["bytes"]) == (expected[0], *expected[2:])
        assert row["nll"] == pytest.approx(expected[1], abs=1e-3)
        assert row["score"] == float(question.references[0][0] in row["answer"])
        full = next(full for full in rows if (full["method"], full["question"]) == (FULL, row["question"]))
        assert row["bytes_full"] == full["bytes"]
        assert row["seconds"] > 0


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_masked_tokens_take_no_place_in_a_sliding_window(family, batch_tokens):
    attention = "eager" if family == "gemma2" else None  # sdpa has no softcap on every version
    model = tiny_model(family, 2, attention=attention)
    model.generation_config.eos_token_id = list(range(150, 200))
    methods = {"snapkv": Method(SnapKVScorer(8), "uniform", ""), "random": Method(RandomScorer(), "uniform", "")}
    cells = make_cells(native(methods), [0.5, 1.0], "native")
    for index in (1, 2):
        made = case(index)
        known = {}
        # In the second run, the answers of the full cache are known.
        for methods_now in ({"random": methods["random"]}, methods):
            some = [cell for cell in cells if cell.method in (FULL, *methods_now)]
            running = Runner(model, TOKENIZER, methods_now, some, asked.METRICS, batch_tokens)
            known |= {key_of(row): row for row in running.run(made, known, nothing)}
        for row in known.values():
            question = made.example.questions[row["question"]]
            cell = Cell(row["method"], row["allocation"], row["ratio"])
            expected = alone(model, methods, made.example, question, cell, False, f" {question.references[0]}")
            assert row["answer"] == expected[0]
            assert row["nll"] == pytest.approx(expected[1], abs=1e-4)


def test_logits_that_are_not_finite_are_refused_with_the_examples_name(methods):
    model = asked.talkative_model()
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(
        InvalidInputError, match=r"task letters, example 00001, full at 1: expected finite logits, .* --dtype"
    ):
        runner(model, methods).run(case(), {}, nothing)


def test_a_turn_without_tokens_is_refused_with_the_examples_name(monkeypatch):
    from proxykv_hf.evaluation import prompts
    from proxykv_hf.evaluation.task import Example, Question

    monkeypatch.setattr(prompts, "chat_affixes", lambda tokenizer: ("<", ""))
    for query_aware, text in ((True, "What?"), (False, "")):
        example = Example("mine", "7", "once", (Question(text, ("a",)),))
        with pytest.raises(InvalidInputError, match="task mine, example 7: expected something between the context and"):
            Case.of(example, "held", TOKENIZER, query_aware)


def test_one_prefill_a_document_and_none_for_what_is_known(model, methods, monkeypatch):
    prefills = []
    prefill = ProxyPrunedCache.prefill

    def counted(cache, ids, **options):
        prefills.append(sorted(options["scorers"] or ()))
        return prefill(cache, ids, **options)

    monkeypatch.setattr(ProxyPrunedCache, "prefill", counted)
    made = case()
    whole = runner(model, methods).run(made, {}, nothing)
    assert prefills == [["kvzip", "random", "snapkv"]]
    known = {key_of(row): row for row in whole}
    assert runner(model, methods).run(made, known, nothing) == []
    assert len(prefills) == 1

    few = {"random": methods["random"]}
    first = runner(model, few, "native").run(made, {}, nothing)
    assert {row["method"] for row in first} == {FULL, "random"}
    later = runner(model, methods).run(made, {key_of(row): row for row in first}, nothing)
    assert prefills[1:] == [["random"], ["kvzip", "random", "snapkv"]]
    together = {key_of(row): row["answer"] for row in first + later}
    assert together == {key: row["answer"] for key, row in known.items()}
    assert len(first) + len(later) == len(whole)


def test_a_question_that_was_left_out_is_all_that_is_asked_later(model, methods):
    made = case()
    whole = runner(model, methods).run(made, {}, nothing)
    known = {key_of(row): row for row in whole if row["question"] != 1}
    rows = runner(model, methods).run(made, known, nothing)
    assert {row["question"] for row in rows} == {1}
    assert [row["answer"] for row in rows] == [row["answer"] for row in whole if row["question"] == 1]
    only_full = runner(model, {}).run(made, {}, nothing)
    assert [row["method"] for row in only_full] == [FULL] * 3


def test_the_size_of_batches_changes_no_answer(model, methods):
    made = case(2)
    answers = [
        [
            (row["answer"], pytest.approx(row["nll"], abs=1e-4))
            for row in runner(model, methods, batch_tokens=size).run(made, {}, nothing)
        ]
        for size in (1, 90, 100_000)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_all_references_are_wanted_where_the_metric_wants_them(model):
    question = case().example.questions[0]
    made = case(metric="string_match_all")
    every = encode(TOKENIZER, " " + ", ".join(question.references))
    assert list(made.sittings[0].turns[0].reference) == every
    assert list(case().sittings[0].turns[0].reference) == encode(TOKENIZER, " " + question.references[0])


@pytest.mark.parametrize(
    ("prefix", "expected"), [("", "abc"), ("It is:", " abc"), ("It is ", "abc"), ('It is "', "abc"), ("x (", "abc")]
)
def test_a_reference_follows_its_prefix_as_an_answer_would(prefix, expected):
    from proxykv_hf.evaluation.prompts import reference_text
    from proxykv_hf.evaluation.task import Question

    assert reference_text(Question("?", ("abc", "d"), prefix), all_wanted=False) == expected
    assert reference_text(Question("?", ("",), prefix), all_wanted=False) == ""


def test_cells_of_an_allocation(methods):
    methods = native(methods)

    def of(allocation):
        return [(c.method, c.allocation, c.ratio) for c in make_cells(methods, [0.5], allocation)]

    full = (FULL, None, 1.0)
    assert of("native") == [full, ("kvzip", "global", 0.5), ("snapkv", "uniform", 0.5), ("random", "uniform", 0.5)]
    assert of("uniform") == [full, *[(name, "uniform", 0.5) for name in methods]]
    assert of("global") == [full, *[(name, "global", 0.5) for name in methods]]
    own = [(c.method, c.ratio) for c in make_cells(methods, [0.5], "native", {"snapkv": (0.1, 0.3)})]
    assert own == [(FULL, 1.0), ("kvzip", 0.5), ("snapkv", 0.1), ("snapkv", 0.3), ("random", 0.5)]
    both = [(name, way, 0.5) for name in ("snapkv", "random") for way in ("global", "uniform")]
    assert of("native+global") == [full, ("kvzip", "global", 0.5), *both]
    with pytest.raises(InvalidInputError, match=r"expected one of native, global, uniform, native\+global, got 'mine'"):
        of("mine")
    with pytest.raises(InvalidPolicyError, match=r"expected a number in \(0, 1\], got 2"):
        make_cells(methods, [2], "native")
    for ratios in ([], [0.1, 0.1]):
        with pytest.raises(InvalidInputError, match="ratios: expected at least one, each once"):
            make_cells(methods, ratios, "native")
        with pytest.raises(InvalidInputError, match="ratios: expected at least one, each once"):
            make_cells(methods, [0.5], "native", {"snapkv": ratios})


def test_a_case_without_positions_is_refused_by_name_before_any_work(model, methods):
    running = runner(model, methods)
    with pytest.raises(InvalidInputError, match="letters, example 00001: expected at most 4096 tokens, the target's"):
        running.check(case(tokens=4090))
    with pytest.raises(InvalidInputError, match="letters, example 00001: KVzip repeats the context"):
        running.check(case(tokens=3000))
    runner(model, {"random": methods["random"]}).check(case(tokens=3000))


def test_methods_are_known_by_name(model):
    native = {name: making.allocation for name, making in METHODS.items()}
    everywhere = {"proxykv", "kvzip", "head_prior", "static_alignment", "hidden_state"}
    each_head = {"snapkv", "h2o", "expected_attention", "streaming_llm", "random"}
    assert native == dict.fromkeys(everywhere, "global") | dict.fromkeys(each_head, "uniform")
    with pytest.raises(InvalidInputError, match=r"expected some of full, proxykv, kvzip, .*, each once, got guess"):
        check_methods(["guess"])
    with pytest.raises(InvalidInputError, match="each once"):
        check_methods(["kvzip", "kvzip"])
    sources = Sources(model, TOKENIZER, seed=3)
    made = make_methods(["random", FULL, "kvzip", "snapkv"], sources)
    assert {name: (method.allocation, method.identity) for name, method in made.items()} == {
        "random": ("uniform", "seed 3"),
        "kvzip": ("global", "kvzip-1"),
        "snapkv": ("uniform", "window 64, kernel 5"),
    }
    for name in ("proxykv", "head_prior", "static_alignment"):
        with pytest.raises(InvalidInputError, match=f"method {name}: expected a trained mapper, got none"):
            make_methods([name], sources)

"""The corpus: seeded, independent documents; two sides that share neither files nor made-up words."""

from __future__ import annotations

import gzip
import random
import re

import hidden_facts
import pytest
from module_text import string_constants
from texts import write_texts

from proxykv_hf import InvalidInputError, ProxyKVWarning
from proxykv_hf.training import corpus as corpus_module
from proxykv_hf.training import generated
from proxykv_hf.training.corpus import CHARACTERS_PER_TOKEN, KINDS, Corpus
from proxykv_hf.training.generated import Names, is_held_out, strewn

TOKENS = (30, 200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def test_a_document_depends_on_seed_and_number_alone(folders):
    forwards = [Corpus(folders, seed=3, tokens=TOKENS).document(k) for k in range(40)]
    corpus = Corpus(folders[::-1], seed=3, tokens=TOKENS)
    assert [corpus.document(k) for k in reversed(range(40))] == forwards[::-1]
    assert [Corpus(folders, seed=4, tokens=TOKENS).document(k) for k in range(40)] != forwards


def test_all_kinds_come_in_all_lengths_and_short_ones_more_often(folders):
    corpus = Corpus(folders, tokens=TOKENS)
    documents = [corpus.document(k) for k in range(300)]
    assert {document.kind for document in documents} == set(KINDS)
    lengths = sorted(document.tokens for document in documents)
    assert TOKENS[0] <= lengths[0] < 35
    assert 190 < lengths[-1] <= TOKENS[1]
    assert abs(lengths[150] - (TOKENS[0] * TOKENS[1]) ** 0.5) < 12  # the median of a log-uniform length
    for document in documents:
        assert len(document.text) > 0.5 * CHARACTERS_PER_TOKEN * document.tokens
        assert document.sources
    joined = next(document for document in documents if document.kind == "joined")
    assert {name.split("/")[0] for name in joined.sources} == {"essays", "code"}


def test_no_file_and_no_made_up_word_is_on_both_sides(folders, monkeypatch):
    words: list[str] = []
    one_word = Names.word

    def noted(names):
        words.append(one_word(names))
        return words[-1]

    monkeypatch.setattr(Names, "word", noted)
    found = {}
    for split in ("train", "held_out"):
        words.clear()
        corpus = Corpus(folders, split=split, tokens=TOKENS)
        documents = [corpus.document(k) for k in range(150)]
        assert {document.split for document in documents} == {split}
        found[split] = {name for document in documents for name in document.sources}, set(words)
    for train, held_out in zip(found["train"], found["held_out"], strict=True):
        assert train
        assert held_out
        assert not train & held_out
    assert not any(map(is_held_out, found["train"][1]))
    assert all(map(is_held_out, found["held_out"][1]))


def test_a_files_side_does_not_hang_on_where_its_folder_is_or_how_it_is_packed(folders, tmp_path):
    held_out = Corpus(folders[:1], split="held_out").sources["essays"]
    for file in held_out:
        text = corpus_module.read_text(file.path)
        path = tmp_path / "others" / "below" / file.path.name.removesuffix(".gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(InvalidInputError, match="for the train documents, found none"):
        Corpus([tmp_path / "others"])
    assert len(Corpus([tmp_path / "others"], split="held_out").sources["others"]) == len(held_out)


def test_evaluation_uses_no_wording_of_the_generated_material():
    def runs(module):
        """All three words in a row."""
        found = set()
        for text in string_constants(module):
            words = re.findall(r"[a-z']+", text.lower())
            found |= set(zip(words, words[1:], words[2:], strict=False))
        return found

    assert ("the", "special", "magic") in runs(hidden_facts)
    assert ("remember", "that", "the") in runs(generated)
    assert not runs(hidden_facts) & runs(generated)
    names = set(hidden_facts._ADJECTIVES + hidden_facts._NOUNS)
    assert not names & {word for text in string_constants(generated) for word in text.split()}


def test_strewing_loses_nothing():
    text = "One. Two!\nThree\n\nFour"
    for seed in range(30):
        mixed = strewn(random.Random(seed), text, ["<a>", "<b>", "<c>"])
        assert re.findall("<.>", mixed) == ["<a>", "<b>", "<c>"]
        assert re.sub(r"<.>[ \n]", "", mixed) == text
    assert strewn(random.Random(0), "no end", ["<a>"]) == "<a>\nno end"


def test_the_recipe_tells_every_difference(folders, tmp_path):
    recipe = Corpus(folders, tokens=TOKENS).recipe()
    assert recipe == Corpus(folders, tokens=list(TOKENS)).recipe()
    assert recipe["sources"].keys() == {"essays", "code"}
    others = write_texts(tmp_path)
    assert Corpus(others, tokens=TOKENS).recipe() == recipe
    changed = Corpus(others, tokens=TOKENS).sources["essays"][0].path
    changed.write_bytes(gzip.compress(b"x" * 300) if changed.suffix == ".gz" else b"x" * 300)
    recipes = [
        recipe,
        Corpus(others, tokens=TOKENS).recipe(),
        Corpus(folders, seed=1, tokens=TOKENS).recipe(),
        Corpus(folders, split="held_out", tokens=TOKENS).recipe(),
        Corpus(folders, tokens=(30, 201)).recipe(),
    ]
    assert all(recipes.count(each) == 1 for each in recipes)


def test_files_that_are_no_text_are_left_out_with_one_warning(tmp_path):
    folders = write_texts(tmp_path)
    before = Corpus(folders).recipe()
    for name, data in {
        "a.md": b"\xff\xfe\x00",
        "b.py": b"\x89PNG\xff",
        "c.txt.gz": b"no gzip",
        "d.md": b"\xc3",
    }.items():
        (folders[0] / name).write_bytes(data)
    (folders[0] / "picture.png").write_bytes(b"\x89PNG")
    (folders[0] / "short.md").write_text("too short")
    (folders[1] / "copy.py").write_bytes((folders[1] / "package" / "module_1.py").read_bytes())
    with pytest.warns(ProxyKVWarning, match=r"left out 4 files that are not UTF-8 text: essays/a.md, .*c.txt.gz, …"):
        after = Corpus(folders).recipe()
    assert after["sources"] == before["sources"]  # a copy counts once


@pytest.mark.filterwarnings("ignore::proxykv_hf.ProxyKVWarning")
def test_what_makes_no_corpus(folders, tmp_path):
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.txt").write_bytes(b"\xff" * 500)
    (tmp_path / "essays").mkdir()
    for wrong, message in [
        ([], "found none in no folder"),
        ([tmp_path / "essays"], r"expected text files \(\.py, \.rst, .*found none in .*essays"),
        ([tmp_path / "binary"], "found none in .*binary"),
        ([tmp_path / "nowhere"], "expected a folder of text files, but .*nowhere is not a folder"),
        ([folders[0], tmp_path / "essays"], "folders of different names, got .*essays and .*essays"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            Corpus(wrong)
    with pytest.raises(InvalidInputError, match="1 <= least <= greatest, got 9 and 8"):
        Corpus(folders, tokens=(9, 8))
    with pytest.raises(InvalidInputError, match="split: expected one of train, held_out, got 'test'"):
        Corpus(folders, split="test")

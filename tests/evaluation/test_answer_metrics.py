"""Scores of answers, against values worked out by hand."""

from __future__ import annotations

import sys

import pytest

from proxykv_hf import InvalidInputError
from proxykv_hf.evaluation.metrics import METRICS, check_metric, normalized
from proxykv_hf.evaluation.task import Question


def score(metric, answer, *references, choices=()):
    return METRICS[metric](answer, Question("", references, choices=choices))


@pytest.mark.parametrize(
    ("metric", "answer", "references", "expected"),
    [
        ("string_match_all", "They are ABC and def.", ("abc", "DEF", "ghi", "jkl"), 0.5),
        ("string_match_all", "4813027.", ("4813027",), 1.0),
        ("string_match_all", "", ("4813027",), 0.0),
        ("string_match_part", "in Old Harrowmere", ("nowhere", "harrowmere"), 1.0),
        ("string_match_part", "in Falham", ("nowhere", "harrowmere"), 0.0),
        ("exact_match", " The Harrow-mere! ", ("other", "harrowmere"), 1.0),
        ("exact_match", "Harrowmere it is", ("harrowmere",), 0.0),
        # "red fox jumps" and "red fox": precision 2/3, recall 1.
        ("f1", "The red fox jumps.", ("a red fox",), 0.8),
        # "x x y" and "x y y" have one x and one y in common.
        ("f1", "x x y", ("x y y",), 2 / 3),
        ("f1", "nothing", ("at all", "a thing nothing"), 2 / 3),
        ("f1", "", ("fox",), 0.0),
        ("f1", "red fox\nQuestion: red", ("red fox",), 2 / 3),
        ("f1_first_line", "\n red fox\nQuestion: red", ("red fox",), 1.0),
        ("count", "There are 12, or 13 of 12.", ("12",), 2 / 3),
        ("count", "none", ("12",), 0.0),
        ("count", "112", ("12",), 0.0),
        ("retrieval", " 7", ("Paragraph 7",), 1.0),
        ("retrieval", "Paragraph 7 or Paragraph 17", ("Paragraph 7",), 0.5),
        ("retrieval", "none", ("Paragraph 7",), 0.0),
        # "return x" and "return y" have a block of 7 of their 8 characters in common; 7 / 8 is rounded to hundredths.
        ("edit_similarity", "\n# a comment\n```\nreturn x\nreturn y", ("return y",), 0.88),
        # The longest block of "abcd" and "bcda", "bcd", counts. The two "a" are on different sides of it.
        ("edit_similarity", "abcd", ("bcda", "xyz"), 0.75),
        ("edit_similarity", "", ("return y",), 0.0),
        ("edit_similarity", "// no code", ("return y",), 0.0),
        # The texts have 5 and 6 words, 4 of them in common and in order: precision 4/5, recall 4/6.
        ("rouge_l", "one two three four five", ("one two three four six seven",), 2 * 0.8 * (4 / 6) / (0.8 + 4 / 6)),
        ("rouge_l", "same words", ("other things", "same words"), 1.0),
        ("rouge_l", "", ("one",), 0.0),
        ("rouge_l", "first" + " other" * 1100, ("first",), 0.0),
        ("rouge_l_first_line", "one two\nthree", ("one two",), 1.0),
    ],
)
def test_scores_are_those_worked_out_by_hand(metric, answer, references, expected):
    assert score(metric, answer, *references) == pytest.approx(expected, abs=1e-6)


def test_classes():
    choices = ("number", "phone number", "place", "date")
    assert score("classification", " place\nType: date", "place", choices=choices) == 1
    assert score("classification", "place or date", "place", choices=choices) == 0.5
    assert score("classification", "date", "place", choices=choices) == 0
    # A class whose name is a part of the right name does not count; one whose name contains the right name does.
    assert score("classification", "phone number", "phone number", choices=choices) == 1
    assert score("classification", "phone number", "number", choices=choices) == 0.5
    assert score("classification", "none of them", "number", choices=choices) == 0


def test_normalized():
    assert normalized("  The Theory, of an ANT's\n a-b ") == "theory of ants ab"


def test_a_missing_package_is_reported_before_any_work(monkeypatch):
    for name in METRICS:
        check_metric(name)
    with pytest.raises(InvalidInputError, match=r"metric: expected one of classification, count, .*, got 'bleu'"):
        check_metric("bleu")
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(InvalidInputError, match=r"expected rouge to be installed: pip install 'proxykv-hf\[eval\]'"):
        check_metric("rouge_l")
    check_metric("f1")

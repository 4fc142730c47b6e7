"""The benchmark of the mapper's cost and seams: what its figures hang on."""

from __future__ import annotations

import itertools

import mapper_scaling
import pytest
import torch
from tiny_mappers import random_mapper

from proxykv_hf.proxy import mapper


def test_exponents_of_powers_are_found():
    rows = [
        {"tokens": n, "seconds": 3 * n**1.5, "cpu_seconds": 2.0 * n, "peak_bytes": n + 5, "input_bytes": 8 * n}
        for n in (2000, 4000, 8000, 170_000)
    ]
    found = mapper_scaling.summary([*rows, rows[0] | {"cpu_seconds": 1.0}, rows[0]], (2000, 4000, 8000))
    assert found["exponents"] == pytest.approx({"seconds": 1.5, "cpu_seconds": 1.0, "peak_bytes": 1.0}, abs=0.01)
    assert found["lengths"][2000]["cpu_seconds"] == 4000  # the median
    text = mapper_scaling.lengths_table(found)
    assert "| 170,000 | 340000.00 |" in text
    assert "Exponents: clock s 1.500, CPU s 1.000, peak " in text


def test_memory_that_cannot_be_told_is_left_out():
    rows = [{"tokens": n, "seconds": n, "cpu_seconds": n, "peak_bytes": None, "input_bytes": n} for n in (10, 20)]
    found = mapper_scaling.summary(rows, (10, 20))
    assert set(found["exponents"]) == {"seconds", "cpu_seconds"}
    assert "not measured" in mapper_scaling.lengths_table(found)


def test_one_measurement(tmp_path):
    random_mapper().save_pretrained(tmp_path)
    found = mapper_scaling.measure_one(tmp_path, 100, torch.get_num_threads())
    assert found["tokens"] == 100
    assert found["seconds"] > 0
    assert found["input_bytes"] == 4 * 100 * (7 + 3 * 2)


@pytest.mark.parametrize("tokens", [70, 91, 200, 333])
def test_moved_windows_cover_the_text_with_seams_elsewhere(tokens):
    spans = mapper._windows(tokens, 32, 8)
    others = mapper_scaling.moved(spans, tokens)
    covered = torch.zeros(tokens, dtype=torch.bool)
    for start, stop in others:
        covered[start:stop] = True
    assert covered.all()
    assert all(stop - start == 32 for start, stop in others)
    distances = mapper_scaling.seam_distances(spans, tokens)
    seams = [(earlier[1] + later[0]) // 2 for earlier, later in itertools.pairwise(others[1:-1])]
    assert all(distances[seam] > 8 for seam in seams if seam < tokens - 2 * 32)


def test_distances_are_to_the_middle_of_an_overlap():
    distances = mapper_scaling.seam_distances([(0, 32), (24, 56)], 56)
    assert distances.argmin() in (27, 28)
    assert distances[0] == 27.5
    assert distances[27] == distances[28] == 0.5


def test_a_seam_shows_at_its_distance_only():
    torch.manual_seed(0)
    ours = torch.randn(2, 3, 600)
    theirs = ours.clone()
    distances = (torch.arange(600) - 300.0).abs()
    theirs[..., distances < 16] = torch.randn(2, 3, int((distances < 16).sum())) + 3
    found = mapper_scaling.by_distance(ours, theirs, distances)
    assert found["difference"][0] > 1
    assert found["difference"][1:] == [0.0] * (len(mapper_scaling.DISTANCES) - 1)
    assert found["0.1"][0] < 0.5
    assert "| here, kept by both, 0.1 |" in mapper_scaling.seams_table({"here": found})


def test_a_mapper_of_one_position_knows_no_windows():
    model = random_mapper(encoder_layers=0, kernel_size=1)
    model.config.window, model.config.overlap = 32, 8
    found = mapper_scaling.compare_windows(model, torch.randn(1, 7, 300))
    assert set(found) == {"one window", "moved windows"}
    for rows in found.values():
        assert max(value for value in rows["difference"] if value == value) < 1e-5
    far = mapper_scaling.compare_windows(random_mapper(), torch.randn(1, 7, 300))
    assert far["one window"]["difference"][0] > 1e-4


def test_seams_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    found = mapper_scaling.compare_windows(random_mapper(), torch.randn(1, 7, 300))
    mapper_scaling.plot(found, tmp_path / "seams.png", "Tiny")
    assert (tmp_path / "seams.png").stat().st_size > 1000

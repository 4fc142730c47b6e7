"""Agreement, ranks and baselines, against plain references."""

from __future__ import annotations

import itertools

import pytest
import torch

from proxykv_hf.training.dataset import TrainingDocument
from proxykv_hf.training.metrics import (
    RATIOS,
    average_ranks,
    gain,
    mean_agreement,
    mean_metrics,
    measure,
    prior_scores,
    retained_mass,
    spearman,
)
from proxykv_hf.training.ridge import Ridge, Statistics


def plain_ranks(values):
    return [1 + sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def plain_spearman(x, y):
    x, y = plain_ranks(x), plain_ranks(y)
    mx, my = sum(x) / len(x), sum(y) / len(y)
    cross = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    norm = (sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y)) ** 0.5
    return cross / norm if norm else 0.0


def test_ranks_and_their_correlation_equal_a_plain_reference_with_ties():
    torch.manual_seed(0)
    ours, theirs = torch.randint(0, 6, (2, 3, 20)).float(), torch.randn(2, 3, 20)
    ours[0, 0] = 4.0  # constant: no correlation
    found = spearman(ours, theirs)
    for layer, head in itertools.product(range(2), range(3)):
        assert average_ranks(ours)[layer, head].tolist() == plain_ranks(ours[layer, head].tolist())
        assert float(found[layer, head]) == pytest.approx(
            plain_spearman(ours[layer, head].tolist(), theirs[layer, head].tolist()), abs=1e-12
        )
    assert float(found[0, 0]) == 0
    torch.testing.assert_close(spearman(theirs, theirs.exp()), torch.ones(2, 3, dtype=torch.float64))


def test_agreement_equals_a_plain_reference():
    torch.manual_seed(0)
    ours, teacher = torch.randn(2, 3, 20), torch.randn(2, 3, 20)
    found = measure(ours, teacher)
    for ratio in RATIOS:
        keep = round(ratio * 20)
        heads = [
            len(set(ours[i, j].topk(keep).indices.tolist()) & set(teacher[i, j].topk(keep).indices.tolist())) / keep
            for i in range(2)
            for j in range(3)
        ]
        assert found[f"head@{ratio}"] == pytest.approx(sum(heads) / 6)
        whole = [set(x.flatten().topk(round(ratio * 120)).indices.tolist()) for x in (ours, teacher)]
        assert found[f"global@{ratio}"] == pytest.approx(len(whole[0] & whole[1]) / round(ratio * 120))
        kept = sum(float(teacher.flatten()[place].exp()) for place in whole[0])
        assert found[f"mass@{ratio}"] == pytest.approx(kept / float(teacher.exp().sum()), rel=1e-5)
    perfect = measure(teacher, teacher)
    assert all(perfect[f"{key}@{ratio}"] == 1 for key in ("head", "global") for ratio in RATIOS)
    assert retained_mass(teacher, teacher, 0.3) > retained_mass(-teacher, teacher, 0.3)


def test_means_and_gains():
    one, two = {"head@0.1": 0.2, "spearman": 1.0}, {"head@0.1": 0.4, "spearman": 0.0}
    assert mean_metrics([one, two]) == pytest.approx({"head@0.1": 0.3, "spearman": 0.5})
    assert gain(two, one) == pytest.approx({"head@0.1": 0.2, "spearman": -1.0})
    assert mean_agreement(one) == 0.2


def test_the_prior_chooses_heads_and_within_them_by_chance():
    prior = torch.tensor([[0.0, -3.0]])
    ours = prior_scores(prior, 2000, torch.Generator().manual_seed(0))
    assert ours.shape == (1, 2, 2000)
    teacher = prior[..., None] + torch.randn(1, 2, 2000, generator=torch.Generator().manual_seed(1))
    found = measure(ours, teacher)
    assert found["head@0.3"] == pytest.approx(0.3, abs=0.05)
    assert found["global@0.5"] > 0.85


def documents(count=4, channels=5, noise=0.0):
    torch.manual_seed(0)
    weights = torch.randn(channels, 6)
    made = []
    for number in range(count):
        features = (3 * torch.randn(channels, 30 + number) + 2).half()
        scores = (weights.T @ features.float()).view(2, 3, -1) - 7
        scores += noise * torch.randn_like(scores)
        made.append(TrainingDocument(f"d{number}", "prose", "train", features, scores))
    return made


def test_statistics_are_those_of_all_tokens():
    made = documents()
    found = Statistics.of(made)
    whole = torch.cat([document.features.double() for document in made], dim=1)
    torch.testing.assert_close(found.mean.double(), whole.mean(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std.double(), whole.std(1, correction=0), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.prior, torch.cat([d.scores for d in made], 2).mean(2), atol=1e-5, rtol=0)
    assert found.tokens == whole.shape[1]


def test_a_ridge_finds_a_line_and_shrinks_with_its_strength():
    made = documents()
    statistics = Statistics.of(made)
    weak, strong = (Ridge.fit(made, statistics, strength) for strength in (1e-6, 100.0))
    torch.testing.assert_close(weak.predict(made[1].features), made[1].scores, atol=1e-2, rtol=1e-3)
    x = torch.cat([statistics.standardise(document.features) for document in made], dim=1)
    y = torch.cat([document.scores.flatten(0, 1) for document in made], dim=1) - statistics.prior.flatten()[:, None]
    expected = torch.linalg.solve(x @ x.T / x.shape[1] + 100 * torch.eye(5), x @ y.T / x.shape[1])
    torch.testing.assert_close(strong.weights, expected, atol=1e-5, rtol=1e-4)
    assert strong.weights.norm() < 0.1 * weak.weights.norm()

"""The five terms of the hybrid loss: gradients, plain twins, and the property that each exists for."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from proxykv_hf import InvalidInputError
from proxykv_hf.training import losses
from proxykv_hf.training.losses import WEIGHTS, HybridLoss, binary_loss, cosine_loss, fine_loss, global_loss, mse_loss

R, W = (0.2, 0.5), (2.0, 1.0)
SHAPE = (2, 2, 12)


def scores(seed=0, shape=SHAPE):
    """Log scores without ties, float64."""
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 4


def seeded():
    return torch.Generator().manual_seed(7)


def fine(ours, teacher, pairs=64):
    return fine_loss(ours, teacher, R, W, 0.5, pairs, seeded())


def apart(ours, teacher, pairs=64):
    return global_loss(ours, teacher, R, W, 0.5, pairs, seeded())


def binary(ours, teacher):
    return binary_loss(ours, teacher, R, W, 0.5)


TERMS = {"binary": binary, "mse": mse_loss, "fine": fine, "global": apart, "cosine": cosine_loss}


@pytest.mark.parametrize("name", ["mse", "fine", "global", "cosine"])
def test_gradients_equal_finite_differences(name):
    ours, teacher = scores(1).requires_grad_(), scores(2)
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda x: TERMS[name](x, teacher), (ours,))


def cuts(ours, ratio):
    """The K-th largest of each head, and of all."""
    return ours.topk(max(1, round(ratio * ours.shape[2]))).values[..., -1:], ours.flatten().topk(
        max(1, round(ratio * ours.numel()))
    ).values[-1]


def binary_twin(ours, teacher, held):
    """Element by element; the cuts are those of ``held``."""
    total = 0.0
    for ratio, weight in zip(R, W, strict=True):
        for cut, border in zip(cuts(held, ratio), cuts(teacher, ratio), strict=True):
            member = (teacher >= border).double()
            chance = torch.sigmoid((ours - cut) / 0.5)
            total += weight * -(member * chance.log() + (1 - member) * (1 - chance).log()).mean()
    return total / (2 * sum(W))


def test_binary_equals_a_plain_twin_and_its_cut_is_held_still():
    ours, teacher = scores(1), scores(2)
    torch.testing.assert_close(binary(ours, teacher), binary_twin(ours, teacher, ours))
    moving = ours.clone().requires_grad_()
    with torch.enable_grad():
        binary(moving, teacher).backward()
    step = 1e-6
    for place in ((0, 0, 0), (1, 1, 3), (0, 1, 11)):
        nudge = torch.zeros(SHAPE, dtype=torch.float64)
        nudge[place] = step
        up, down = (binary_twin(ours + sign * nudge, teacher, ours) for sign in (1, -1))
        assert float(moving.grad[place]) == pytest.approx(float((up - down) / (2 * step)), abs=1e-8)


def test_mse_fine_and_global_equal_plain_twins():
    ours, teacher = scores(1), scores(2)
    weight = 0.1 + teacher.exp().sqrt()
    torch.testing.assert_close(mse_loss(ours, teacher), (weight * (ours - teacher) ** 2).sum() / weight.sum())
    orders, separations = [], []
    for mine, theirs in ((ours.flatten(0, 1), teacher.flatten(0, 1)), (ours.view(1, -1), teacher.view(1, -1))):
        for ratio, factor in zip(R, W, strict=True):
            keep = round(ratio * mine.shape[1])
            order, above = [], []
            for row in range(len(mine)):
                places = theirs[row].argsort(descending=True).tolist()
                best, rest = places[:keep], places[keep:]
                order += [functional.softplus(-(mine[row, i] - mine[row, j]) / 0.5)
                          for i in best for j in best if theirs[row, i] > theirs[row, j]]  # fmt: skip
                above += [(float(theirs[row, i].exp() - theirs[row, j].exp()),
                           max(0.0, 0.5 - float(mine[row, i] - mine[row, j]))) for i in best for j in rest]  # fmt: skip
            orders.append(factor * sum(order) / len(order))
            separations.append(factor * sum(w * x for w, x in above) / sum(w for w, _ in above))
    # Sampled pairs come close to all pairs.
    assert float(fine(ours, teacher, 40_000)) == pytest.approx(float(sum(orders) / (2 * sum(W))), rel=0.02)
    assert float(apart(ours, teacher, 40_000)) == pytest.approx(sum(separations) / (2 * sum(W)), rel=0.02)


@pytest.mark.parametrize("name", sorted(TERMS))
def test_following_the_gradient_agrees_with_the_teacher_more(name):
    teacher = scores(2, (1, 2, 40))
    ours = scores(1, (1, 2, 40)).requires_grad_()
    optimizer = torch.optim.Adam([ours], lr=0.05)
    with torch.enable_grad():
        first = float(TERMS[name](ours, teacher).detach())
        for _ in range(150):
            optimizer.zero_grad()
            loss = TERMS[name](ours, teacher)
            loss.backward()
            optimizer.step()
    assert float(loss.detach()) < 0.4 * first


def test_binary_asks_for_membership_and_not_for_values():
    teacher = scores(2)
    right, shifted = 5 * (teacher - teacher.mean()), 5 * teacher + 100
    assert float(binary(right, teacher)) == pytest.approx(float(binary(shifted, teacher)), rel=1e-6)
    assert float(binary(-teacher, teacher)) > 3 * float(binary(teacher, teacher))
    # With two ratios the small one weighs twice as much here.
    one, two = (binary_loss(scores(1), teacher, (ratio,), (1.0,), 0.5) for ratio in R)
    assert float(binary(scores(1), teacher)) == pytest.approx(float((2 * one + two) / 3))


def test_mse_minds_what_the_teacher_keeps():
    teacher = torch.full((1, 1, 2), -12.0)
    teacher[..., 0] = -0.1
    high, low = teacher.clone(), teacher.clone()
    high[..., 0] -= 1
    low[..., 1] -= 1
    assert float(mse_loss(high, teacher)) > 5 * float(mse_loss(low, teacher)) > 0
    assert float(mse_loss(teacher, teacher)) == 0


def test_fine_minds_only_the_order_within_the_top():
    teacher = scores(2)
    outside = teacher.flatten(0, 1).argsort(1, descending=True)[:, 6:]  # in no head's Top-K
    everywhere = set(teacher.flatten().topk(24).indices.tolist())
    row, column = next((r, int(c)) for r in range(4) for c in outside[r] if r * 12 + int(c) not in everywhere)
    changed = teacher.clone()
    changed.view(4, 12)[row, column] += 50
    assert torch.equal(fine(changed, teacher), fine(teacher, teacher))
    assert float(fine(10 * teacher, teacher)) < float(fine(teacher, teacher)) < float(fine(-teacher, teacher))
    flat = torch.zeros(SHAPE, dtype=torch.float64)
    assert float(fine(teacher, flat)) == 0  # equal scores have no order


def test_global_is_zero_once_the_top_is_above_the_rest():
    teacher = torch.tensor([[[-1.0, -9.0, -2.0, -10.0]]])
    far = torch.tensor([[[3.0, 0.0, 2.0, 1.0]]])
    near = torch.tensor([[[3.0, 0.0, 1.2, 1.0]]])

    def only(ours):
        return float(global_loss(ours, teacher, (0.5,), (1.0,), 0.5, 64, seeded()))

    assert only(far) == 0
    assert 0 < only(near) <= 0.3 + 1e-6
    assert only(-far) > 1
    assert float(global_loss(far[..., :1], teacher[..., :1], (0.5,), (1.0,), 0.5, 64, seeded())) == 0  # no rest


def test_cosine_minds_each_heads_shape_and_not_its_level():
    teacher = scores(2)
    level = torch.tensor([[3.0, -40.0], [900.0, 0.0]])[..., None]
    assert float(cosine_loss(teacher + level, teacher)) == pytest.approx(0, abs=1e-7)
    root = [(x / 2).exp() for x in (scores(1), teacher)]
    expected = 1 - (root[0] * root[1]).sum(2) / (root[0].norm(dim=2) * root[1].norm(dim=2))
    torch.testing.assert_close(cosine_loss(scores(1), teacher), expected.mean())


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any tensor has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_pairs_take_memory_linear_in_the_tokens():
    with Largest() as largest:
        HybridLoss(pairs=32)(scores(1, (2, 2, 5000)), scores(2, (2, 2, 5000)), seeded())
    assert largest.elements == 2 * 2 * 5000


def test_the_hybrid_is_the_weighted_sum_and_draws_by_its_generator():
    ours, teacher = scores(1), scores(2)
    loss = HybridLoss({"fine": 0.25, "cosine": 0.0})
    assert loss.weights == WEIGHTS | {"fine": 0.25, "cosine": 0.0}
    total, terms = loss(ours, teacher, seeded())
    assert sorted(terms) == ["binary", "fine", "global", "mse"]
    assert float(total) == pytest.approx(sum(loss.weights[name] * float(term) for name, term in terms.items()))
    assert torch.equal(total, loss(ours, teacher, seeded())[0])
    assert not torch.equal(total, loss(ours, teacher, torch.Generator().manual_seed(8))[0])
    perfect = HybridLoss()(teacher, teacher, seeded())[1]
    assert all(float(perfect[name]) < float(value) for name, value in HybridLoss()(ours, teacher, seeded())[1].items())


def test_one_token_and_one_head_have_a_loss_too():
    for shape in ((1, 1, 1), (1, 1, 2), (3, 1, 1)):
        ours = scores(1, shape).requires_grad_()
        with torch.enable_grad():
            total, _ = HybridLoss()(ours, scores(2, shape), seeded())
            total.backward()
        assert math.isfinite(float(total.detach()))
        assert ours.grad.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {"mass": 1.0}}, "weights: unknown terms mass: expected some of binary, mse, fine"),
        ({"weights": dict.fromkeys(WEIGHTS, 0.0)}, "weights: expected numbers of at least 0, not all 0"),
        ({"weights": {"fine": math.nan}}, "weights: expected numbers"),
        ({"ratios": (0.1, 1.0, 0.3, 0.5)}, r"ratios: expected numbers in \(0, 1\), got"),
        ({"ratios": ()}, "ratios: expected"),
        ({"ratio_weights": (1.0,)}, "ratio_weights: expected a number of at least 0 for each of ratios"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"margin": -1.0}, "margin: expected a number of at least 0"),
        ({"pairs": 0}, "pairs: expected a whole number of at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        HybridLoss(**arguments)


def test_small_ratios_weigh_most():
    loss = HybridLoss()
    assert list(loss.ratio_weights) == sorted(loss.ratio_weights, reverse=True)
    assert losses.WEIGHTS["binary"] == losses.WEIGHTS["mse"] == 1.0

"""The loop that trains a mapper, in one process or several.

Everything random (the order of documents, dropout, noise, sampled pairs) is seeded with the seed, the epoch and the
document's position in the epoch, and no generator carries its state to the next document. So a run that is stopped and
resumed, and a run in several processes, do the same as an uninterrupted run in one process.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..errors import InvalidInputError, ScoringError
from ..proxy.mapper import HybridAxialMapper
from .checkpoints import Checkpoints, Epoch, Trained
from .config import TrainingConfig
from .dataset import FeatureDataset, TrainingDocument
from .metrics import describe, mean_agreement, mean_metrics, measure


def make_accelerator(config: TrainingConfig) -> Accelerator:
    """Set up the device, the processes and gradient accumulation, and bfloat16 on a GPU that supports it.

    Raises:
        InvalidInputError: The number of processes does not divide ``batch``.
    """
    cuda = torch.cuda.is_available()
    accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16" if cuda and torch.cuda.is_bf16_supported() else "no")
    if config.batch % accelerator.num_processes:
        raise InvalidInputError(
            f"batch: expected a multiple of {accelerator.num_processes}, the number of processes, got {config.batch}"
        )
    accelerator.gradient_accumulation_steps = config.batch // accelerator.num_processes
    return accelerator


def train(
    mapper: HybridAxialMapper,
    training: FeatureDataset,
    held_out: FeatureDataset,
    config: TrainingConfig,
    checkpoints: Checkpoints,
    accelerator: Accelerator,
) -> tuple[HybridAxialMapper, list[Epoch]]:
    """Train a mapper, from the last checkpoint if there is one.

    Args:
        mapper: The mapper, with its head prior and channel statistics set; it is trained in place.
        training: The documents to train on.
        held_out: The documents to evaluate on after every epoch.
        config: The configuration of the run.
        checkpoints: Where the state is saved after every epoch; see `Checkpoints.start`.
        accelerator: From `make_accelerator`.

    Returns: a mapper with the averaged weights that agreed best with the teacher on ``held_out``, in eval mode on
        the CPU; and the history, with these keys for each epoch: ``epoch`` (from 1), ``seconds``, ``learning_rate``
        (after the last step), ``loss``, ``terms``, ``metrics`` (see `metrics.measure`) and ``agreement``.

    Raises:
        ScoringError: The loss or its gradient is not finite. Saved checkpoints are not changed.
    """
    nn.Module.to(mapper, accelerator.device)
    steps = config.epochs * math.ceil(len(training) / config.batch)
    optimizer = torch.optim.AdamW(_groups(mapper, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, steps, config.warm_up)
    )
    trained = Trained(mapper, copy.deepcopy(mapper).eval().requires_grad_(False), optimizer, scheduler)
    history = checkpoints.restore(trained)
    model, stepper = accelerator.prepare(_NoisyMapper(mapper, config.noise), optimizer)
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    while len(history) < config.epochs and not _is_stale(history, config.patience):
        epoch, began = len(history) + 1, time.perf_counter()
        mapper.train()
        sums: dict[str, float] = {}
        places = epoch_order(len(training), config.batch, config.seed, epoch)
        with torch.random.fork_rng(devices), torch.enable_grad():
            for place in range(accelerator.process_index, len(places), accelerator.num_processes):
                document = training[places[place]]
                with accelerator.accumulate(model):
                    generator = _seed_all(config.seed, epoch, place)
                    ours = _full_layers(mapper, model(document.features[None].to(accelerator.device)))
                    loss, terms = config.loss(ours, document.scores.to(ours.device), generator)
                    where = f"epoch {epoch}, step {place // config.batch + 1}, document {document.name}"
                    _refuse_not_finite(where, terms | {"sum": loss.detach()})
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), config.clip_norm)
                        _refuse_not_finite(where, {"gradient": norm})
                    stepper.step()
                    stepper.zero_grad()
                    if accelerator.sync_gradients:
                        scheduler.step()
                        done = (epoch - 1) * len(places) // config.batch + place // config.batch
                        _average(trained.averaged, mapper, min(config.ema_decay, (1 + done) / (10 + done)))
                _add(sums, {"loss": float(loss.detach())} | {name: float(term) for name, term in terms.items()})
        means = _mean_over_processes(sums, len(places))
        metrics = evaluate(trained.averaged, held_out, accelerator)
        history.append(
            {
                "epoch": epoch,
                "seconds": round(time.perf_counter() - began, 3),
                "learning_rate": scheduler.get_last_lr()[0],
                "loss": means.pop("loss"),
                "terms": means,
                "metrics": metrics,
                "agreement": mean_agreement(metrics),
            }
        )
        line = f"epoch {epoch:3d}, {history[-1]['seconds']:.0f} s, loss {history[-1]['loss']:.4f}: {describe(metrics)}"
        accelerator.print(line, flush=True)
        if accelerator.is_main_process:
            checkpoints.save(trained, history, best_epoch(history))
        accelerator.wait_for_everyone()
    best = copy.deepcopy(mapper)
    nn.Module.to(best, "cpu").eval()
    checkpoints.load_averaged(best, best_epoch(history))
    return best, history


@torch.no_grad()
def evaluate(mapper: HybridAxialMapper, documents: FeatureDataset, accelerator: Accelerator) -> dict[str, float]:
    """The mean metrics of a mapper in eval mode. Each process evaluates a part of the documents."""
    own = range(accelerator.process_index, len(documents), accelerator.num_processes)
    found = [(index, _measure(mapper, documents[index], accelerator.device)) for index in own]
    return mean_metrics([metrics for _, metrics in sorted(gather_object(found))])


def best_epoch(history: list[Epoch]) -> int:
    """The epoch with the best agreement, from 1; of equal ones, the first."""
    return 1 + max(range(len(history)), key=lambda index: (history[index]["agreement"], -index))


def epoch_order(documents: int, batch: int, seed: int, epoch: int) -> list[int]:
    """The documents of an epoch in order, in steps of ``batch``. The epoch's first documents fill up the last step."""
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(_seed(seed, epoch, -1))).tolist()
    return [order[place % documents] for place in range(math.ceil(documents / batch) * batch)]


def learning_rate_share(step: int, steps: int, warm_up: float) -> float:
    """The share of the peak learning rate at a step, from 0: a linear rise, limited by a cosine that falls to 0."""
    rise = (step + 1) / (warm_up * steps) if warm_up else 1.0
    return min(rise, 0.5 * (1 + math.cos(math.pi * step / steps)))


class _NoisyMapper(nn.Module):
    """A mapper with noise on its bottleneck, for training. It has one forward, which processes can synchronize."""

    def __init__(self, mapper: HybridAxialMapper, noise: float) -> None:
        super().__init__()
        self.mapper, self.noise = mapper, noise

    def forward(self, features: Tensor) -> Tensor:  # [B, C, N] to [B, L, H, N]
        projected = self.mapper.project(features)
        return self.mapper.score(projected + self.noise * torch.randn_like(projected))


def _groups(mapper: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups that hold every trained parameter: matrices with weight decay; biases, norms and scalars without."""
    parameters = [parameter for parameter in mapper.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _seed(seed: int, epoch: int, place: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch} {place}".encode()).digest()[:8]) >> 1


def _seed_all(seed: int, epoch: int, place: int) -> torch.Generator:
    """Seed torch, for dropout and noise, and return a seeded generator on the CPU, for pairs."""
    number = _seed(seed, epoch, place)
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number)


@torch.no_grad()
def _average(averaged: nn.Module, mapper: nn.Module, decay: float) -> None:
    for mean, parameter in zip(averaged.parameters(), mapper.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


def _full_layers(mapper: HybridAxialMapper, scores: Tensor) -> Tensor:
    """The scores of the full-attention layers: `[1, L, H, N]` to `[L, H, N]`."""
    return scores[0, list(mapper.config.target.full_layers)]


def _measure(mapper: HybridAxialMapper, document: TrainingDocument, device: torch.device) -> dict[str, float]:
    ours = _full_layers(mapper, mapper(document.features[None].to(device)))
    return measure(ours.cpu(), document.scores)


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _mean_over_processes(sums: dict[str, float], documents: int) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in gather_object([sums]):
        _add(total, part)
    return {name: value / documents for name, value in total.items()}


def _is_stale(history: list[Epoch], patience: int) -> bool:
    return bool(history) and len(history) - best_epoch(history) >= patience


def _refuse_not_finite(where: str, terms: Mapping[str, Tensor]) -> None:
    wrong = [name for name, value in terms.items() if not torch.isfinite(value)]
    if wrong:
        raise ScoringError(
            f"training failed in {where}: not a finite number in {', '.join(wrong)}. Checkpoints of earlier epochs "
            "are intact; try a smaller learning_rate, or look at that document"
        )

"""Train a mapper on features of the proxy and KVzip scores of the target, and say how well it agrees.

    python examples/train_mapper.py features.pt --title "SmolLM2-135M" --out mappers/smollm2

``features.pt`` comes from ``extract_features.py``. Documents of the held-out side are held out, or
every fifth where there is none. The recipe, in three steps:

1. A ridge regression from the standardised features to the log scores, in closed form, tells what a line
   can do.
2. The mapper is trained from random weights and the head prior: a squared error weighted by the teacher's
   score, and a cross-entropy of belonging to the teacher's Top-K. (Started from the regression it learns
   less: that has fitted the training documents already, and what it leaves over there is not what it leaves
   over elsewhere.) Channels are dropped out, a ridge of a kind: there are many, and few documents.
3. The weights that agreed best with the teacher on the held-out documents are saved, so the figures printed
   for them are a little too good.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from proxykv_hf.mapper import CLAMP, HybridAxialMapper, HybridAxialMapperConfig
from proxykv_hf.model_card import mapper_card

RATIOS = (0.1, 0.2, 0.3, 0.5)
#: Deviation of the heads' output vectors at the start.
START = 0.0375
LIMITS = """- Trained on documents of at most 2,000 tokens in English and Python; longer texts are read in windows, how
  well was not measured.
- For the weights named above. Other weights of the same geometry work with a warning, a little less well.
- Agreement is with KVzip, not with answers: see the repository's benchmarks for those."""
#: KVzip scores below this are the same to the log target.
SCORE_FLOOR = 1e-7


@dataclass
class Document:
    """One document.

    Args:
        features: `[C, n]`, float16.
        target: `[L, H, n]`, the log of the teacher's scores.
        held_out: Whether it is never to be trained on.
    """

    features: Tensor
    target: Tensor
    held_out: bool


def load(path: Path) -> tuple[dict[str, Any], dict[str, Document]]:
    """What the mapper's config says of the two models, and the documents by name."""
    stored = torch.load(path, weights_only=True)
    documents = {
        name: Document(entry["x"], entry["y"].float().clamp(min=SCORE_FLOOR).log(), entry["held_out"])
        for name, entry in stored["documents"].items()
    }
    if len(documents) < 5 or all(document.held_out for document in documents.values()):
        raise SystemExit(f"expected at least 5 documents, not all held out, got {len(documents)} in {path}")
    return stored["config"], documents


def split(documents: dict[str, Document]) -> tuple[list[Document], list[Document]]:
    """For training, and held out."""
    ordered = [documents[name] for name in sorted(documents)]
    if not any(document.held_out for document in ordered):
        for document in ordered[::5]:
            document.held_out = True
    return [d for d in ordered if not d.held_out], [d for d in ordered if d.held_out]


def overlap(ours: Tensor, theirs: Tensor, ratio: float) -> float:
    """Share of the teacher's Top-K that is in ours, along the last axis, mean over the others."""
    keep = max(1, round(ratio * ours.shape[-1]))
    chosen = torch.zeros_like(ours).scatter_(-1, ours.topk(keep).indices, 1.0)
    return float(chosen.gather(-1, theirs.topk(keep).indices).mean())


def agreement(predictions: Sequence[Tensor], documents: Sequence[Document]) -> dict[str, float]:
    """Mean over documents, with Top-K taken within each head (``head@ratio``) and over all (``global@ratio``)."""
    result: dict[str, float] = {}
    for ratio in RATIOS:
        pairs = [(ours, document.target) for ours, document in zip(predictions, documents, strict=True)]
        heads = [overlap(ours, theirs, ratio) for ours, theirs in pairs]
        whole = [overlap(ours.flatten(), theirs.flatten(), ratio) for ours, theirs in pairs]
        result |= {f"head@{ratio}": sum(heads) / len(heads), f"global@{ratio}": sum(whole) / len(whole)}
    return dict(sorted(result.items(), key=lambda item: item[0].startswith("global")))


@dataclass
class Regression:
    """Ridge regression of log scores on standardised features, for any strength.

    Args:
        mean: `[C]`.
        std: `[C]`.
        prior: `[T]`, the mean log score of each head.
        variances: `[C]`, ascending eigenvalues of the features' correlation.
        directions: `[C, C]`, its eigenvectors, in columns.
        moments: `[C, T]`, features times scores, in those directions.
    """

    mean: Tensor
    std: Tensor
    prior: Tensor
    variances: Tensor
    directions: Tensor
    moments: Tensor

    @classmethod
    def fit(cls, documents: Sequence[Document]) -> Regression:
        count = sum(document.features.shape[1] for document in documents)
        rows = [document.features.float() for document in documents]
        mean = torch.stack([x.double().sum(1) for x in rows]).sum(0) / count
        square = torch.stack([x.double().pow(2).sum(1) for x in rows]).sum(0) / count
        std = (square - mean.pow(2)).clamp(min=1e-8).sqrt()
        prior = torch.cat([document.target.flatten(0, 1) for document in documents], dim=1).mean(1)
        empty = torch.empty(0)
        result = cls(mean.float(), std.float(), prior, empty, empty, empty)
        gram = torch.zeros(len(mean), len(mean))
        moments = torch.zeros(len(mean), len(prior))
        for document in documents:
            x = result.standardise(document.features)
            gram.addmm_(x, x.T, alpha=1 / count)
            moments.addmm_(x, (document.target.flatten(0, 1) - prior[:, None]).T, alpha=1 / count)
        result.variances, result.directions = torch.linalg.eigh(gram)
        result.moments = result.directions.T @ moments
        return result

    def standardise(self, features: Tensor) -> Tensor:  # [C, n]
        return ((features.float() - self.mean[:, None]) / self.std[:, None]).clamp(-CLAMP, CLAMP)

    def predict(self, document: Document, strength: float) -> Tensor:
        """Log scores `[L, H, n]`."""
        weights = self.directions @ (self.moments / (self.variances[:, None] + strength))  # [C, T]
        scores = weights.T @ self.standardise(document.features) + self.prior[:, None]
        return scores.view_as(document.target)


def weighted_error(ours: Tensor, target: Tensor) -> Tensor:
    """``sum w (ours - target)^2 / sum w`` over `[L, H, n]`, ``w = 0.1 + sqrt(teacher's score)``."""
    weight = 0.1 + (target / 2).exp()
    return (weight * (ours - target).pow(2)).sum() / weight.sum()


def membership_error(ours: Tensor, target: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of ``(ours - own Top-K threshold) / temperature`` against the teacher's Top-K.

    Mean over the ratios, Top-K within each head and over all heads; `[L, H, n]`.
    """
    terms = []
    for mine, theirs in ((ours.flatten(0, 1), target.flatten(0, 1)), (ours.flatten()[None], target.flatten()[None])):
        for ratio in RATIOS:
            keep = max(1, round(ratio * mine.shape[-1]))
            member = theirs >= theirs.topk(keep).values[:, -1:]
            margin = (mine - mine.detach().topk(keep).values[:, -1:]) / temperature
            terms.append(functional.binary_cross_entropy_with_logits(margin, member.float()))
    return torch.stack(terms).mean()


@torch.no_grad()
def evaluate(mapper: HybridAxialMapper, documents: Sequence[Document]) -> dict[str, float]:
    mapper.eval()
    return agreement([mapper(document.features[None])[0] for document in documents], documents)


def train(
    mapper: HybridAxialMapper, documents: Sequence[Document], held_out: Sequence[Document], args: argparse.Namespace
) -> None:
    """Train, and leave the mapper with the weights that agreed best with the teacher on ``held_out``."""
    parameters = [parameter for parameter in mapper.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98))
    per_epoch = math.ceil(len(documents) / args.batch)
    steps = args.epochs * per_epoch

    def schedule(step: int) -> float:
        warm_up = 0.05 * steps
        return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    best, best_state = evaluate(mapper, held_out), copy.deepcopy(mapper.state_dict())
    began, stale = time.time(), 0
    print("start      ", describe(best), flush=True)
    for epoch in range(args.epochs):
        mapper.train()
        total = 0.0
        for batch in torch.randperm(len(documents)).split(args.batch):
            for index in batch.tolist():
                projected = mapper.project(documents[index].features[None])
                noisy = projected + args.noise * torch.randn_like(projected)
                ours, target = mapper.score(noisy)[0], documents[index].target
                loss = weighted_error(ours, target) + args.membership * membership_error(ours, target, args.temperature)
                (loss / len(batch)).backward()
                total += float(loss.detach()) / len(documents)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        found = evaluate(mapper, held_out)
        stale += 1
        if mean(found) > mean(best):
            best, best_state, stale = found, copy.deepcopy(mapper.state_dict()), 0
        print(f"epoch {epoch + 1:3d}, {time.time() - began:4.0f} s, loss {total:.4f} ", describe(found), flush=True)
        if stale == args.patience:
            break
    mapper.load_state_dict(best_state)


def mean(found: dict[str, float]) -> float:
    return sum(found.values()) / len(found)


def describe(found: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in found.items()) + f" mean {mean(found):.4f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="the file that extract_features.py wrote")
    parser.add_argument("--title", required=True, help="of the card")
    parser.add_argument("--out", type=Path, required=True, help="folder for the mapper and its card")
    for name in ("bottleneck", "head_tokens", "width", "kernel_size", "encoder_layers"):
        default = getattr(HybridAxialMapperConfig(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--noise", type=float, default=0.1, help="deviation of noise on the bottleneck, in training")
    parser.add_argument("--ridge", type=float, default=0.3, help="strength of the regression")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--membership", type=float, default=1.0, help="weight of the cross-entropy")
    parser.add_argument("--temperature", type=float, default=0.5, help="of the cross-entropy, in log-score units")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1, help="documents per step")
    parser.add_argument("--patience", type=int, default=6, help="epochs without a better agreement before it stops")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    config, everything = load(args.features)
    documents, held_out = split(everything)
    sizes = ("bottleneck", "head_tokens", "width", "kernel_size", "encoder_layers", "dropout")
    recipe = {name: value for name, value in vars(args).items() if name not in (*sizes, "out", "features", "title")}
    tokens = sum(document.features.shape[1] for document in documents)
    summary = (
        f"{len(documents)} documents, {tokens:,} tokens; weighted squared error of log scores and Top-K "
        f"cross-entropy, {args.epochs} epochs, seed {args.seed}"
    )
    mapper = HybridAxialMapper(
        HybridAxialMapperConfig(
            **config, training=recipe | {"summary": summary}, **{name: getattr(args, name) for name in sizes}
        )
    )
    print(f"{sum(p.numel() for p in mapper.parameters()) / 1e6:.2f} M parameters, {len(documents)} documents")
    regression = Regression.fit(documents)
    mapper.set_channel_statistics(regression.mean, regression.std)
    mapper.set_head_prior(regression.prior.view(-1, mapper.config.target.num_key_value_heads))
    with torch.no_grad():
        mapper.heads.output.normal_(std=START)
    prior = [regression.prior[:, None].expand(-1, document.features.shape[1]) for document in held_out]
    ridge = [regression.predict(document, args.ridge) for document in held_out]
    # Equal scores would be taken in the order of the text, which is no choice at all.
    blind = [
        p.reshape(d.target.shape) + 1e-4 * torch.rand(d.target.shape) for p, d in zip(prior, held_out, strict=True)
    ]
    found = {"head prior": agreement(blind, held_out), "ridge regression": agreement(ridge, held_out)}
    print("regression ", describe(found["ridge regression"]), flush=True)
    train(mapper, documents, held_out, args)
    found["this mapper"] = evaluate(mapper, held_out)
    print("mapper     ", describe(found["this mapper"]))
    save(mapper.eval(), found, len(held_out), args)


def save(
    mapper: HybridAxialMapper, found: dict[str, dict[str, float]], held_out: int, args: argparse.Namespace
) -> None:
    """The mapper, and a card that tells how it was made and how well it does."""
    mapper.save_pretrained(args.out)
    rows = {
        f"{name}, {where}": {str(ratio): values[f"{key}@{ratio}"] for ratio in RATIOS}
        for where, key in (("over all heads", "global"), ("within each head", "head"))
        for name, values in found.items()
    }
    card = mapper_card(
        mapper,
        title=args.title,
        folder=args.out.as_posix(),
        agreement=rows,
        held_out=f"{held_out}; they also chose the epoch, so the figures are a little too good",
        limits=LIMITS,
    )
    card.save(args.out / "README.md")


if __name__ == "__main__":
    main()

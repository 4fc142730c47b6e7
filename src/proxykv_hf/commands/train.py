"""``proxykv train``."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import optional, public_name, resolve, target_named

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..training.config import TrainingConfig
    from ..training.prepare import Source


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train a mapper on a teacher's scores",
        description="Train a mapper as a TOML file describes it: run the proxy over the teacher's documents (its "
        "features are kept beside the shards), train, and write the mapper, its card, results.json, history.json and, "
        "if matplotlib is installed, curves.png. The processes of `accelerate launch` or `torchrun` share the work.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, such as those in examples/")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    parser.add_argument(
        "--out", metavar="FOLDER", help="for the mapper and the checkpoints, in place of the one in CONFIG"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    # Imported here, because these modules are slow to import and no other command needs them.
    from ..errors import InvalidInputError
    from ..training.checkpoints import Checkpoints
    from ..training.config import TrainingConfig
    from ..training.loop import make_accelerator

    if not arguments.config.is_file():
        raise InvalidInputError(f"expected a TOML file, but there is no {arguments.config}")
    replaced = {} if arguments.out is None else {"out": arguments.out}
    config = TrainingConfig.read(arguments.config, **replaced)
    if not arguments.resume:  # before making features, which takes long, refuse a run that may not start
        Checkpoints(config.checkpoints, {}).start(resume=False)
    optional("tqdm", "models")
    accelerator = make_accelerator(config)
    try:
        _run(config, arguments.resume, accelerator)
    finally:
        accelerator.end_training()


def _run(config: TrainingConfig, resume: bool, accelerator: Accelerator) -> None:
    from ..training.checkpoints import Checkpoints
    from ..training.curves import plot
    from ..training.loop import best_epoch, train
    from ..training.metrics import describe
    from ..training.prepare import new_mapper, prepare
    from ..training.results import PRIOR, measure_baselines, save_results, summary
    from ..training.ridge import Statistics

    target, proxy = _source(config.target, "target"), None if config.proxy is None else _source(config.proxy, "proxy")
    prepared = prepare(config, target, proxy, accelerator)
    training, held_out = prepared.training, prepared.held_out
    checkpoints = Checkpoints(config.checkpoints, {"config": config.identity()} | prepared.identity)
    checkpoints.start(resume)
    statistics = Statistics.of(training[index] for index in range(len(training)))
    mapper = new_mapper(config, prepared, statistics, {"summary": summary(config, training)} | config.identity())
    size = sum(parameter.numel() for parameter in mapper.parameters())
    accelerator.print(
        f"{size / 1e6:.2f} M parameters; {len(training)} documents for training, {len(held_out)} held out", flush=True
    )
    baselines = {}
    if accelerator.is_main_process:
        baselines = measure_baselines(training, held_out, statistics, config)
        for name, found in baselines.items():
            print(f"{name}: {describe(found)}", flush=True)
    mapper, history = train(mapper, training, held_out, config, checkpoints, accelerator)
    if accelerator.is_main_process:
        best = best_epoch(history)
        save_results(mapper, history, baselines, config, training, held_out, best)
        if importlib.util.find_spec("matplotlib") is not None:
            plot(history, baselines[PRIOR], config.folder / "curves.png", config.title)
        print(f"epoch {best} has the best agreement; its mapper and results are in {config.folder}", flush=True)


def _source(name: str, what: str) -> Source:
    """A model that a config names, after a check that there is such a model."""
    from transformers import AutoConfig

    from ..training.prepare import Source

    folder = resolve(name)
    with target_named(name, what):
        AutoConfig.from_pretrained(folder)
    return Source(folder, public_name(name))

"""From a teacher's shards to a mapper: features on disk, the loop, its checkpoints, and the command; tiny models."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from safetensors import safe_open
from safetensors.torch import load_file
from taught import DOCUMENTS, settings
from tiny import tiny_model

from proxykv_hf import FeatureRecipe, InvalidInputError, ModelGeometry, ProxyKVWarning, ScoringError
from proxykv_hf.proxy.features import proxy_features
from proxykv_hf.proxy.loading import first_layers
from proxykv_hf.training import checkpoints, dataset, feature_cache, loop
from proxykv_hf.training.checkpoints import Checkpoints
from proxykv_hf.training.config import TrainingConfig
from proxykv_hf.training.dataset import FeatureDataset, Place, places_of, split, taught_shards
from proxykv_hf.training.feature_cache import FeatureMaker, make_features, missing_features
from proxykv_hf.training.losses import HybridLoss
from proxykv_hf.training.prepare import Source, new_mapper, prepare
from proxykv_hf.training.ridge import Statistics
from proxykv_hf.training.shards import ShardFolder, checked_shards, load_shards, read_manifest

RECIPE = FeatureRecipe(("attention", "hidden"), 2, (1, 2))

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def prepared(config):
    accelerator = loop.make_accelerator(config)
    proxy = None if config.proxy is None else Source(config.proxy, "org/small")
    return prepare(config, Source(config.target, "org/tiny"), proxy, accelerator), accelerator


def trained(config, resume=False):
    """A run without the command around it."""
    ready, accelerator = prepared(config)
    saved = Checkpoints(config.checkpoints, {"config": config.identity()} | ready.identity)
    saved.start(resume)
    statistics = Statistics.of(ready.training[index] for index in range(len(ready.training)))
    mapper = new_mapper(config, ready, statistics, {})
    return loop.train(mapper, ready.training, ready.held_out, config, saved, accelerator)


def maker():
    return FeatureMaker(first_layers(tiny_model("llama", 2), 2), RECIPE)


def made(teacher, reader):
    shards = list(checked_shards(teacher))
    missing = missing_features(shards, reader.identity())
    make_features(missing, reader, progress=False)
    return shards, missing


# Features on disk.


def test_features_are_made_once_and_are_the_proxys(home, teacher):
    reader = maker()
    shards, missing = made(teacher, reader)
    assert len(missing) == len(shards) == 2
    places = places_of(shards, reader.identity())
    assert missing_features(shards, reader.identity()) == []
    geometry = ModelGeometry.from_config(tiny_model("llama", 2).config)
    documents = FeatureDataset(places, geometry)
    assert len(documents) == DOCUMENTS
    for index, source in enumerate(load_shards(teacher)):
        document = documents[index]
        expected = proxy_features(reader.proxy, source.input_ids.long(), RECIPE)[:, source.prefix_tokens :]
        assert torch.equal(document.features, expected.half())
        assert torch.equal(document.scores, source.scores.float().clamp(min=dataset.SCORE_FLOOR).log())
        assert (document.kind, document.split) == (source.kind, source.split)
        assert document.name == f"{teacher}/{source.name}"
        assert places[index].tokens == source.scores.shape[2]
    with safe_open(places[0].features, framework="pt") as file:
        header = json.loads(file.metadata()["proxykv"])
    assert header["shard_sha256"] == shards[0].sha256
    assert header["recipe"] == json.loads(json.dumps(RECIPE.to_dict()))
    assert {path.name for path in teacher.iterdir()} >= {"manifest.json", places[0].features.parent.name}
    assert len(list(load_shards(teacher))) == DOCUMENTS  # the teacher does not mind them


def test_other_proxies_and_recipes_have_files_of_their_own(home, teacher):
    reader = maker()
    shards, _ = made(teacher, reader)
    others = [
        FeatureMaker(reader.proxy, FeatureRecipe(("attention",), 2)),
        FeatureMaker(first_layers(tiny_model("llama", 2, layers=4).float(), 2).bfloat16(), RECIPE),
    ]
    for other in others:
        assert len(missing_features(shards, other.identity())) == 2
        made(teacher, other)
    assert len(list(teacher.glob("features-*"))) == 3
    assert missing_features(shards, reader.identity()) == []


def test_features_that_do_not_fit_are_made_again_with_the_reason(home, teacher):
    reader = maker()
    shards, _ = made(teacher, reader)
    path = feature_cache.feature_path(shards[0], reader.identity())
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.warns(ProxyKVWarning, match=r"shard-00000\.safetensors: not a complete file of features .*made again"):
        assert made(teacher, reader)[1] == shards[:1]
    assert path.read_bytes() == whole
    shutil.copy(feature_cache.feature_path(shards[1], reader.identity()), path)  # of another shard
    with pytest.warns(ProxyKVWarning, match="shard_sha256: expected"):
        assert made(teacher, reader)[1] == shards[:1]
    assert path.read_bytes() == whole


def test_a_stopped_run_goes_on_with_the_next_shard(home, teacher, monkeypatch):
    reader, calls = maker(), []

    def stopped(*arguments, **keywords):
        calls.append(None)
        if len(calls) == 10:  # in the second shard
            raise KeyboardInterrupt
        return proxy_features(*arguments, **keywords)

    monkeypatch.setattr(feature_cache, "proxy_features", stopped)
    with pytest.raises(KeyboardInterrupt):
        made(teacher, reader)
    assert len(made(teacher, reader)[1]) == 1
    assert not list(teacher.rglob(".*"))


def test_features_that_are_no_numbers_are_refused(home, teacher):
    broken = FeatureMaker(first_layers(tiny_model("llama", 2), 2), RECIPE)
    broken.proxy.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.full((32, 48), math.nan))
    with pytest.raises(InvalidInputError, match=r"features of doc-000000 in .*shard-00000.* not all finite"):
        made(teacher, broken)


def test_what_fits_stays_in_memory_and_the_rest_is_read_each_time(home, teacher, monkeypatch):
    reader = maker()
    shards, _ = made(teacher, reader)
    reads = []
    read = dataset.read_features
    monkeypatch.setattr(dataset, "read_features", lambda *place: reads.append(None) or read(*place))
    geometry = ModelGeometry.from_config(tiny_model("llama", 2).config)
    places = places_of(shards, reader.identity())
    one = FeatureDataset(places, geometry)[0]
    size = one.features.nbytes + one.scores.nbytes
    for memory, expected in ((1 << 30, DOCUMENTS), (0, 2 * DOCUMENTS), (size, 2 * DOCUMENTS - 1)):
        reads.clear()
        documents = FeatureDataset(places, geometry, memory)
        for index in 2 * list(range(DOCUMENTS)):
            assert documents[index].name == places[index].name
        assert len(reads) == expected


def place(name, side="train"):
    return Place(name, "prose", side, 5, Path("s"), Path("f"), name)


def test_held_out_are_those_that_say_so_or_every_fifth():
    names = [f"d{number:02d}" for number in range(12)]
    training, held_out = split([place(name) for name in names])
    assert [entry.name for entry in held_out] == ["d00", "d05", "d10"]
    assert [entry.name for entry in training] == [name for name in names if name not in ("d00", "d05", "d10")]
    training, held_out = split(
        [place(name) for name in reversed(names)]
    )  # in the order given, whatever they are called
    assert [entry.name for entry in held_out] == ["d11", "d06", "d01"]
    training, held_out = split([*(place(name) for name in names), place("x", "held_out")])
    assert [entry.name for entry in held_out] == ["x"]
    assert len(training) == 12
    with pytest.raises(InvalidInputError, match="at least 5 documents, not all held out, got 0 for training and 12"):
        split([place(name, "held_out") for name in names])
    with pytest.raises(InvalidInputError, match="at least 5 documents"):
        split([place(name) for name in names[:4]])


def part_of(home, folder, documents):
    """A folder of shards that holds some of the teacher's documents."""
    manifest = read_manifest(home / "teacher")
    shards = ShardFolder(folder, {key: value for key, value in manifest.items() if key not in ("shards", "format")})
    shards.keep(0, list(load_shards(home / "teacher"))[documents])
    shards.finish(0)
    return folder


def test_where_folders_lie_decides_nothing_and_their_order_is_known(home, tmp_path):
    first, second = part_of(home, tmp_path / "a", slice(6)), part_of(home, tmp_path / "b", slice(6, None))

    def read(*folders):
        config = settings(home, "", tmp_path / "out", teacher=[str(folder) for folder in folders])
        ready, _ = prepared(TrainingConfig.from_dict(config))
        sides = [[side[index].scores for index in range(len(side))] for side in (ready.training, ready.held_out)]
        return ready.identity, sides

    identity, sides = read(first, second)
    assert list(map(len, sides)) == [8, 3]
    again, other_sides = read(first.rename(tmp_path / "z"), second.rename(tmp_path / "y"))
    assert again == identity
    for ours, theirs in zip(sides, other_sides, strict=True):
        assert all(torch.equal(*each) for each in zip(ours, theirs, strict=True))
    assert read(tmp_path / "y", tmp_path / "z")[0] != identity  # other documents would be held out


def test_a_document_in_two_folders_is_refused(home, teacher, tmp_path):
    geometry = ModelGeometry.from_config(tiny_model("llama", 2).config)
    first, second = part_of(home, tmp_path / "a", slice(6)), part_of(home, tmp_path / "b", slice(5, None))
    with pytest.raises(InvalidInputError, match=r"but 1 of .*/b are in .*/a too: leave one of these folders out"):
        taught_shards([first, second], geometry)
    (tmp_path / "link").symlink_to(teacher)
    with pytest.raises(InvalidInputError, match=rf"but {DOCUMENTS} of .*/link are in .*/teacher too"):
        taught_shards([teacher, tmp_path / "link"], geometry)


# The loop.


def weights(folder, epoch):
    found = {}
    for name in ("mapper", "averaged"):
        tensors = load_file(Path(folder) / "checkpoints" / f"epoch-{epoch:04d}" / f"{name}.safetensors")
        found |= {f"{name}.{key}": value for key, value in tensors.items()}
    return found


def without_seconds(history):
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in history]


@pytest.fixture(scope="module")
def uninterrupted(home, tmp_path_factory):
    """A whole run, its config and what came of it; not to be changed."""
    root = tmp_path_factory.mktemp("run")
    teacher = shutil.copytree(home / "teacher", root / "teacher")
    config = TrainingConfig.from_dict(settings(home, teacher, root / "out"))
    with torch.no_grad():
        mapper, history = trained(config)
    return config, mapper, history


def test_training_learns_and_keeps_the_last_and_the_best(uninterrupted):
    config, mapper, history = uninterrupted
    assert [entry["epoch"] for entry in history] == [1, 2, 3]
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["learning_rate"] == pytest.approx(0, abs=1e-9)
    assert set(history[0]["terms"]) == {"binary", "mse", "fine", "global", "cosine"}
    best = loop.best_epoch(history)
    kept = sorted(path.name for path in config.checkpoints.iterdir())
    assert kept == sorted({f"epoch-{best:04d}", "epoch-0003"})
    averaged = load_file(config.checkpoints / f"epoch-{best:04d}" / "averaged.safetensors")
    assert all(torch.equal(value, averaged[name]) for name, value in mapper.state_dict().items())
    found = loop.evaluate(mapper, prepared(config)[0].held_out, Accelerator(cpu=True))
    assert found == history[best - 1]["metrics"]
    assert not mapper.training


@pytest.mark.parametrize("after", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(home, uninterrupted, tmp_path, monkeypatch, after):
    config, _, history = uninterrupted
    again = TrainingConfig.from_dict(config.to_dict() | {"out": str(tmp_path)})
    evaluate = loop.evaluate

    def stopped(*arguments):  # at the end of the next epoch, before it is saved
        if (again.checkpoints / f"epoch-{after:04d}").is_dir():
            raise KeyboardInterrupt
        return evaluate(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", stopped)
        with pytest.raises(KeyboardInterrupt):
            trained(again)
    torch.manual_seed(99)  # nothing hangs on torch's own generator
    _, found = trained(again, resume=True)
    assert without_seconds(found) == without_seconds(history)
    ours, theirs = weights(tmp_path, 3), weights(config.out, 3)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_checkpoints_are_not_overwritten_nor_mixed(uninterrupted):
    config, _, _ = uninterrupted
    with pytest.raises(
        InvalidInputError, match=r"checkpoints holds checkpoints of an earlier run: continue it \(--resume\)"
    ):
        trained(config)
    other = TrainingConfig.from_dict(config.to_dict() | {"epochs": 4, "loss": {"weights": {"fine": 0.5}}})
    with pytest.raises(
        InvalidInputError,
        match=r"epoch-0003 is of another run: config\.loss\.weights\.fine: expected 0\.5, got 1\.0; config\.epochs: ex",
    ):
        trained(other, resume=True)
    renamed = TrainingConfig.from_dict(config.to_dict() | {"title": "Another"})
    assert len(trained(renamed, resume=True)[1]) == 3  # nothing left to do


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(home, uninterrupted, tmp_path, monkeypatch):
    config, _, history = uninterrupted
    again = TrainingConfig.from_dict(config.to_dict() | {"out": str(tmp_path)})
    write = checkpoints.write_whole

    def full(path, data):
        if path.name == "optimizer.pt" and "epoch-0002" in str(path):
            raise OSError(28, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(checkpoints, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        trained(again)
    assert Checkpoints(again.checkpoints, {}).last().name == "epoch-0001"
    monkeypatch.undo()
    assert without_seconds(trained(again, resume=True)[1]) == without_seconds(history)
    assert not list(again.checkpoints.glob(".*"))


def test_a_loss_that_is_no_number_names_where_and_leaves_the_checkpoint(home, uninterrupted, tmp_path, monkeypatch):
    config, _, _ = uninterrupted
    again = TrainingConfig.from_dict(config.to_dict() | {"out": str(tmp_path)})
    call = HybridLoss.__call__
    calls = []

    def broken(self, ours, scores, generator):
        calls.append(None)
        total, terms = call(self, ours, scores, generator)
        return (total * math.nan, terms | {"fine": total * math.nan}) if len(calls) == 12 else (total, terms)

    monkeypatch.setattr(HybridLoss, "__call__", broken)
    with pytest.raises(
        ScoringError, match=r"in epoch 2, step 2, document .*teacher/doc-\d+: not a finite number in fine, sum\. Check"
    ):
        trained(again)
    assert Checkpoints(again.checkpoints, {}).last().name == "epoch-0001"
    monkeypatch.undo()
    assert len(trained(again, resume=True)[1]) == 3


def test_training_stops_when_nothing_gets_better(home, teacher, tmp_path, monkeypatch):
    config = TrainingConfig.from_dict(settings(home, teacher, tmp_path / "out", epochs=9, patience=2))
    monkeypatch.setattr(loop, "mean_agreement", lambda metrics: 0.5)
    _, history = trained(config)
    assert len(history) == 3
    assert loop.best_epoch(history) == 1


def test_every_step_is_whole_and_every_document_comes():
    for documents, batch in ((9, 2), (9, 1), (3, 4)):
        order = loop.epoch_order(documents, batch, 0, 1)
        assert len(order) == -(-documents // batch) * batch
        assert set(order) == set(range(documents))
        assert order == loop.epoch_order(documents, batch, 0, 1)
        assert order != loop.epoch_order(documents, batch, 0, 2) or documents == 3
    assert loop.epoch_order(9, 1, 0, 1) != loop.epoch_order(9, 1, 1, 1)


def test_the_learning_rate_rises_and_falls():
    shares = [loop.learning_rate_share(step, 100, 0.1) for step in range(101)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) > 0.95
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[100] == pytest.approx(0)
    assert loop.learning_rate_share(0, 100, 0.0) == 1


def test_biases_and_norms_do_not_decay(uninterrupted):
    _, mapper, _ = uninterrupted
    matrices, vectors = loop._groups(mapper.requires_grad_(True), 0.05)
    assert vectors["weight_decay"] == 0
    assert any(parameter is mapper.heads.bias for parameter in vectors["params"])
    assert any(parameter is mapper.heads.linear for parameter in matrices["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(mapper.parameters()))


def test_every_parameter_is_trained_and_a_scalar_does_not_decay():
    module = torch.nn.Linear(3, 2)
    module.scale = torch.nn.Parameter(torch.tensor(1.0))
    module.frozen = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    matrices, others = loop._groups(module, 0.05)
    assert [id(parameter) for parameter in matrices["params"]] == [id(module.weight)]
    assert {id(parameter) for parameter in others["params"]} == {id(module.bias), id(module.scale)}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.05, 0)


def process(index, port, arguments):
    """One of two."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index)}
    torch.set_num_threads(1)
    trained(TrainingConfig.from_dict(arguments))
    assert PartialState().num_processes == 2
    PartialState().destroy_process_group()


@pytest.mark.slow
def test_two_processes_do_what_one_does(home, uninterrupted, tmp_path):
    config, _, history = uninterrupted
    teacher = shutil.copytree(home / "teacher", tmp_path / "teacher")
    arguments = config.to_dict() | {"out": str(tmp_path / "out"), "teacher": [str(teacher)]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(process, (port, arguments), nprocs=2)
    theirs, ours = weights(config.out, 3), weights(tmp_path / "out", 3)
    for name, value in theirs.items():
        if name.endswith("qkv.bias"):  # softmax does not see the key's: AdamW makes steps of its gradient's rounding
            theirs_of, ours_of = value.chunk(3), ours[name].chunk(3)
            value, ours[name] = torch.cat(theirs_of[::2]), torch.cat(ours_of[::2])
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=0, msg=name)
    state = json.loads((tmp_path / "out" / "checkpoints" / "epoch-0003" / "state.json").read_text())
    assert [e["loss"] for e in state["history"]] == pytest.approx([e["loss"] for e in history], abs=1e-5)

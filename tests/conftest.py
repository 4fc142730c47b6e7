from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
import torch
from taught import make_home
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface


def registered() -> list[str]:
    mappings = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    return [name for mapping in mappings for name in mapping if name.startswith("proxykv_")]


@pytest.fixture(autouse=True)
def _quiet_and_clean():
    """One thread (the models are tiny), no autograd; afterwards no attention function of ours is registered."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    if registered():
        gc.collect()
    assert registered() == []


@pytest.fixture(scope="module")
def on_the_cpu():
    """As on a machine without a GPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def home(on_the_cpu, tmp_path_factory):
    """See `taught.make_home`; one for each file of tests."""
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def teacher(home, tmp_path):
    """A copy of its shards, to be written to."""
    return Path(shutil.copytree(home / "teacher", tmp_path / "teacher"))

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
    """Run each test with one thread (the models are tiny) and without autograd.

    Afterwards, none of the package's attention functions may still be registered.
    """
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    if registered():
        gc.collect()
    assert registered() == []


@pytest.fixture(scope="module")
def on_the_cpu():
    """Make torch find no GPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def home(on_the_cpu, tmp_path_factory):
    """The folders of `taught.make_home`, made once for each test module."""
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def teacher(home, tmp_path):
    """A copy of the teacher's shards, which a test may change."""
    return Path(shutil.copytree(home / "teacher", tmp_path / "teacher"))

from __future__ import annotations

import gc

import pytest
import torch
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

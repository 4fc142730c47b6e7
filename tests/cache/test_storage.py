from __future__ import annotations

import pytest
import torch

from proxykv_hf.cache.storage import DenseStorage, RaggedStorage, storage_bytes


def states(batch=2, heads=3, tokens=5, dim=4, value_dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, heads, tokens, dim, generator=generator),
        torch.randn(batch, heads, tokens, value_dim, generator=generator),
    )


def test_appending_equals_concatenating_and_leaves_little_slack():
    keys, values = states(tokens=1000)
    storage, all_keys, all_values = DenseStorage(keys, values), keys, values
    for step in range(60):
        new_keys, new_values = states(tokens=1 + step % 3, seed=step)
        storage.append(new_keys, new_values)
        all_keys, all_values = torch.cat([all_keys, new_keys], 2), torch.cat([all_values, new_values], 2)
        exact = all_keys.nbytes + all_values.nbytes
        per_token = exact // storage.length
        assert storage_bytes(list(storage.tensors())) <= exact + per_token * max(16, 0.03 * storage.length)
    assert torch.equal(storage.keys, all_keys)
    assert torch.equal(storage.values, all_values)


def test_appending_in_steps_does_not_copy_every_time():
    storage = DenseStorage(*states(tokens=100))
    buffers = set()
    for step in range(64):
        storage.append(*states(tokens=1, seed=step))
        buffers.add(storage.keys.data_ptr())
    assert len(buffers) <= 5


def test_a_small_part_of_a_large_tensor_does_not_hold_it():
    keys, values = states(tokens=1000)
    storage = DenseStorage(keys[:, :, :3], values[:, :, 997:])
    assert storage_bytes(list(storage.tensors())) == 2 * 3 * 3 * (4 + 6) * 4


def test_stored_tensors_need_no_gradient():
    keys, values = states()
    storage = DenseStorage(keys.requires_grad_(), values)
    assert not storage.keys.requires_grad


@pytest.mark.parametrize("ragged", [False, True])
def test_forks_are_independent_and_share_until_written(ragged):
    keys, values = states(tokens=40)
    storage = DenseStorage(keys, values)
    if ragged:
        keep = torch.rand(2, 3, 40) < 0.4
        keep[..., 0] = True
        storage = RaggedStorage.empty(keys, values, keep, torch.arange(2))
        storage.fill(keys, values, keep, [0, 1])
    fork = storage.fork()
    shared = storage_bytes([*storage.tensors(), *fork.tensors()])
    assert shared == storage_bytes(list(storage.tensors()))
    one, two = states(tokens=1, seed=1), states(tokens=1, seed=2)
    storage.append(*one)
    fork.append(*two)
    assert torch.equal(storage.keys[:, :, -1:], one[0])
    assert torch.equal(fork.keys[:, :, -1:], two[0])
    fork.crop(1)
    fork.append(*one)
    assert torch.equal(fork.keys, storage.keys)


def test_filling_keeps_marked_columns_in_order_and_all_later_ones():
    keys, values = states(batch=3, tokens=10)
    keep = torch.zeros(2, 3, 8, dtype=torch.bool)
    places = [[[1, 5], [0, 7], [2, 3]], [[6, 7], [0, 1], [4, 5]]]
    for row in range(2):
        for head in range(3):
            keep[row, head, places[row][head]] = True
    rows = [1, 0, 1]
    storage = DenseStorage.empty(keys, values, keep)
    storage.fill(keys, values, keep, torch.tensor(rows))
    for batch_row, row in enumerate(rows):
        for head in range(3):
            columns = [*places[row][head], 8, 9]
            assert torch.equal(storage.keys[batch_row, head], keys[batch_row, head, columns])
            assert torch.equal(storage.values[batch_row, head], values[batch_row, head, columns])


def test_ragged_storage_holds_each_head_exactly():
    keys, values = states(batch=3, tokens=12)
    keep = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(1)) < 0.4
    keep[:, :, 3] = True
    storage = RaggedStorage.empty(keys, values, keep, torch.tensor([0, 1, 1]))
    storage.fill(keys, values, keep, [0, 1])
    for row in range(2):
        for head in range(3):
            columns = keep[row, head].nonzero()[:, 0]
            block_keys, block_values = storage.block.heads[row][head]
            assert torch.equal(block_keys, keys[row, head, columns])
            assert torch.equal(block_values, values[row, head, columns])
    assert torch.equal(storage.keys, keys[:, :, 10:])
    kept = int(keep.sum()) * (4 + 6) * 4
    assert storage_bytes(list(storage.tensors())) == kept + 3 * 3 * 2 * (4 + 6) * 4
    storage.select(torch.tensor([2, 0]))
    assert storage.rows.tolist() == [1, 0]
    assert torch.equal(storage.values, values[[2, 0], :, 10:])


def test_tensors_from_inference_mode_are_made_writable():
    with torch.inference_mode():  # one head: contiguous already, so nothing else would copy it
        storage = DenseStorage(*states(heads=1))
    storage.crop(2)
    storage.append(*states(heads=1, tokens=1))
    assert storage.length == 4


@pytest.mark.parametrize("first", ["inference", "no_grad"])
def test_a_storage_filled_in_inference_mode_can_grow_outside_of_it(first):
    mode = torch.inference_mode if first == "inference" else torch.no_grad
    with mode():
        storage = DenseStorage(*states())
        storage.append(*states(tokens=1))
        storage.select(torch.tensor([1, 0]))
    with torch.no_grad():
        storage.append(*states(tokens=1))
        storage.append(*states(tokens=1))
    assert storage.length == 8

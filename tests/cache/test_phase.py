"""`Lifecycle`: which calls each phase allows, and from which thread."""

from __future__ import annotations

import threading

import pytest

from proxykv_hf import CacheStateError
from proxykv_hf.cache.phase import Lifecycle, Phase


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_allows_and_refuses_the_right_calls(phase):
    life = Lifecycle()
    life.phase = phase
    if phase is Phase.CLOSED:
        with pytest.raises(CacheStateError, match="the cache is closed: make a new one"):
            life.check_phase()
    elif phase is Phase.SPOILED:
        with pytest.raises(CacheStateError, match=r"left the cache half written: call reset\(\) or make a new one"):
            life.check_phase()
    else:
        life.check_phase()
    if phase is Phase.EMPTY:
        life.check_empty()
    else:
        with pytest.raises(CacheStateError, match=rf"got one that is {phase.value}: call reset\(\) first"):
            life.check_empty()


def test_a_forward_belongs_to_its_thread_while_the_thread_is_alive():
    life, begun, go = Lifecycle(), threading.Event(), threading.Event()

    def forward():
        life.begin_forward()
        begun.set()
        go.wait(10)

    thread = threading.Thread(target=forward)
    thread.start()
    assert begun.wait(10)
    assert life.in_forward
    with pytest.raises(CacheStateError, match="in use by another thread, in a forward"):
        life.check_thread()
    go.set()
    thread.join()
    assert not life.used_elsewhere(), "the forward of a thread that has died is in nobody's way"
    life.check_thread()
    assert life.in_forward
    life.end_forward()
    life.begin_forward()
    life.check_thread()
    assert life.in_forward

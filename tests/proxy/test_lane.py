from __future__ import annotations

import gc
import threading
import traceback
import weakref

import pytest
import torch

from proxykv_hf import InvalidInputError
from proxykv_hf.proxy.lane import Lane, check_cancelled, usable_device

CPU = torch.device("cpu")


def test_work_runs_beside_and_its_result_is_fetched():
    started, go = threading.Event(), threading.Event()

    def work():
        started.set()
        go.wait(10)
        return torch.ones(3)

    job = Lane(CPU).submit(work)
    assert started.wait(10)
    assert not job.ready()
    go.set()
    assert torch.equal(job.result(), torch.ones(3))
    assert job.ready()


def test_an_error_surfaces_with_its_own_traceback():
    def deep():
        raise ValueError("deep down")

    job = Lane(CPU).submit(deep)
    with pytest.raises(ValueError, match="deep down") as caught:
        job.result()
    assert "in deep" in "".join(traceback.format_exception(caught.value))


def test_waiting_ends_after_the_timeout():
    go = threading.Event()
    job = Lane(CPU).submit(lambda: go.wait(10))
    with pytest.raises(TimeoutError, match=r"after 0.01 s"):
        job.result(0.01)
    go.set()
    assert job.result(10) is True


def test_a_cancelled_job_stops_and_lets_go_of_everything():
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    stopped = []

    def work(tensor=tensor):
        try:
            while True:
                check_cancelled()
        finally:
            stopped.append(tensor.sum())

    job = Lane(CPU).submit(work)
    del work, tensor
    job.cancel()
    assert stopped
    gc.collect()
    assert gone() is None


def test_grad_mode_and_thread_counts_stay_in_the_lane():
    torch.set_num_threads(2)
    seen = []

    def work():
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))
        return torch.ones(2, requires_grad=True) * 2

    with torch.enable_grad():
        result = Lane(CPU, threads=1).submit(work).result()
        assert torch.is_grad_enabled()
    assert seen == [(False, 1)]
    assert not result.requires_grad
    assert torch.get_num_threads() == 2
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_device_that_is_not_there_is_refused_in_plain_words():
    for make in (usable_device, lambda device: Lane(torch.device(device))):
        with pytest.raises(InvalidInputError, match=r"device: expected one that torch finds here, got 'cuda'"):
            make("cuda")
    with pytest.raises(InvalidInputError, match="got 'abacus'"):
        usable_device("abacus")


def test_thread_counts_of_lanes_leave_threads_started_meanwhile_alone():
    torch.set_num_threads(3)
    go, started = threading.Event(), threading.Barrier(3)

    def work():
        started.wait(10)
        go.wait(10)
        return torch.get_num_threads()

    jobs = [Lane(CPU, threads=count).submit(work) for count in (1, 2)]
    started.wait(10)
    seen = []
    for _ in range(2):  # while they run, and after
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        go.set()
        assert [job.result(10) for job in jobs] in ([1, 2], [None, None])
    assert seen == [3, 3]
    assert torch.get_num_threads() == 3


def test_an_interrupted_wait_does_not_take_the_work_for_done(monkeypatch):
    go = threading.Event()

    def work():
        go.wait(10)
        check_cancelled()

    job = Lane(CPU).submit(work)
    job._thread._is_stopped = True  # what Python 3.11 believes after a KeyboardInterrupt in Thread.join
    assert not job.ready()
    with pytest.raises(TimeoutError):
        job.result(0.01)
    threading.Timer(0.05, go.set).start()
    job.cancel()
    assert go.is_set()
    job._thread._is_stopped = False
    job._thread.join(10)

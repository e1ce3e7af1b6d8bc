"""Threads of a rank for compiled code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from shotcast.device.cpu.threads import in_parallel


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("count", "parts"), [(7, None), (2, None), (1, None), (0, None), (7, 2), (7, 1)])
def test_all_is_run_once_by_as_many_threads(count: int, parts: int | None) -> None:
    ran: list[tuple[int, int, int]] = []
    meeting = threading.Barrier(max(1, min(3, count if parts is None else parts)))

    def run(first: int, stop: int) -> None:
        meeting.wait(100)  # each part has a thread
        ran.append((first, stop, threading.get_ident()))

    in_parallel(run, count, parts)
    assert [number for first, stop, _ in sorted(ran) for number in range(first, stop)] == list(range(count))
    assert len({thread for _, _, thread in ran}) == meeting.parties


@pytest.mark.parametrize("failing", [0, 4])
def test_an_error_of_a_part_is_raised_once_all_have_ended(failing: int) -> None:
    ended = []

    def run(first: int, stop: int) -> None:
        if failing in range(first, stop):
            raise ValueError("a part")
        time.sleep(0.05)
        ended.append(first)

    for _ in range(2):  # the threads go on
        with pytest.raises(ValueError, match="a part"):
            in_parallel(run, 6)
        assert len(ended) == 2
        ended.clear()


def test_several_callers_at_once() -> None:
    sums = [0] * 4

    def call(number: int) -> None:
        found: list[int] = []
        for _ in range(200):
            in_parallel(lambda first, stop: found.extend(range(first, stop)), 50)
        sums[number] = sum(found)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sums == [200 * 50 * 49 // 2] * 4


def test_a_forked_process_has_threads_of_its_own() -> None:
    in_parallel(lambda first, stop: None, 3)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        found: list[int] = []
        in_parallel(lambda first, stop: found.extend(range(first, stop)), 30)
        os._exit(0 if sorted(found) == list(range(30)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""Ranks agree on a number through a store, whatever became of earlier attempts. The ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from shotcast.errors import CollectiveTimeout
from shotcast.memory.agreed_number import agreed_number
from shotcast.memory.members import Members

RANKS = 3


class DeathError(Exception):
    """A rank has ended in the middle of an attempt."""


class Mortal:
    """A store whose caller dies at its operation number ``last``."""

    def __init__(self, store: dist.Store, last: int):
        self._store, self._left = store, last

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            if not self._left:
                raise DeathError
            self._left -= 1
            return operation(*args)

        return counted


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each call returned or raised; they run at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


def attempt(store: Any, rank: int, timeout_s: float = 100.0) -> Callable[[], int]:
    return lambda: agreed_number(store, Members(rank), RANKS, timeout_s)


KEPT = {"numbers", *(f"here/{rank}" for rank in range(RANKS))}


def test_numbers_ascend_and_leave_no_keys() -> None:
    store = dist.HashStore()
    for number in range(20):
        assert together([attempt(store, rank) for rank in range(RANKS)]) == [number] * RANKS
        assert set(store.list_keys()) == KEPT
    assert agreed_number(dist.HashStore(), Members(0), 1, 1.0) == 0


@pytest.mark.parametrize("slow", range(RANKS))
def test_attempts_that_follow_at_once_do_not_mix(slow: int) -> None:
    store = dist.HashStore()

    def rank_of(rank: int) -> Callable[[], list[int]]:
        def attempts() -> list[int]:
            numbers = []
            for _ in range(50):
                numbers.append(attempt(store, rank)())
                if rank == slow:
                    time.sleep(0.003)
            return numbers

        return attempts

    assert together([rank_of(rank) for rank in range(RANKS)]) == [list(range(50))] * RANKS


@pytest.mark.parametrize("absent", range(RANKS))
def test_a_rank_that_does_not_come_is_named(absent: int) -> None:
    store = dist.HashStore()
    present = [rank for rank in range(RANKS) if rank != absent]
    for error in together([attempt(store, rank, 1.0) for rank in present]):
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == (absent,)
        assert error.op == "construction"
    # it may come after all, and find what the others left; then they come again
    (late,) = together([attempt(store, absent, 0.1)])
    assert isinstance(late, CollectiveTimeout)
    first, *others = together([attempt(store, rank) for rank in range(RANKS)])
    assert isinstance(first, int)
    assert others == [first] * (RANKS - 1)


def test_a_rank_that_died_having_come_is_named() -> None:
    store = dist.HashStore()
    calls = [attempt(store, 0, 1.0), attempt(store, 1, 1.0), attempt(Mortal(store, 1), 2)]
    first, second, dead = together(calls)
    assert isinstance(dead, DeathError)
    for error in (first, second):
        assert isinstance(error, CollectiveTimeout)
        assert error.missing == (2,)


def test_a_rank_that_died_having_accepted_is_named() -> None:
    store = dist.HashStore()

    class Accepts:
        """The store of a rank that dies when it has accepted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            store.set(key, value)
            if key.startswith("accepted"):
                raise DeathError

    leader, survivor, dead = together([attempt(store, 0, 1.0), attempt(store, 1), attempt(Accepts(), 2)])
    assert isinstance(dead, DeathError)
    assert survivor == 0
    assert isinstance(leader, CollectiveTimeout)
    assert leader.missing == (2,)


@pytest.mark.parametrize("victim", range(RANKS))
def test_a_rank_that_died_at_any_moment_is_replaced(victim: int) -> None:
    store, numbers, died, last = dist.HashStore(), set(), True, 0
    while died:
        stores = [Mortal(store, last) if rank == victim else store for rank in range(RANKS)]
        results = together([attempt(stores[rank], rank, 0.03) for rank in range(RANKS)])
        died = isinstance(results[victim], DeathError)
        numbers |= {result for result in results if isinstance(result, int)}
        first, *others = together([attempt(store, rank) for rank in range(RANKS)])
        assert isinstance(first, int)
        assert others == [first] * (RANKS - 1)
        assert first not in numbers
        numbers.add(first)
        last += 1
    assert last > 4


def test_a_successor_meets_ranks_that_still_wait() -> None:
    store = dist.HashStore()
    dead = together([attempt(Mortal(store, 1), 1)])
    assert isinstance(dead[0], DeathError)
    with ThreadPoolExecutor(RANKS) as pool:
        waiting = [pool.submit(attempt(store, rank)) for rank in (0, 2)]
        while not any("invited" in key for key in store.list_keys()):
            pass
        successor = pool.submit(attempt(store, 1))
        assert [one.result() for one in (*waiting, successor)] == [0, 0, 0]

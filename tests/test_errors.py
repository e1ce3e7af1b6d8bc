"""Errors can be pickled, as they cross process boundaries, and they say what to do."""

from __future__ import annotations

import pickle

import pytest

from shotcast import errors

INSTANCES = [
    errors.ShotcastError("text"),
    errors.ConfigError("text"),
    errors.UnsupportedError("text"),
    errors.ClosedError("text"),
    errors.CollectiveTimeout(0, [3, 5], "all_reduce", 1 << 40, 2.5),
    errors.CollectiveTimeout(1, [], "barrier", 1, 0.1),
    errors.CollectiveTimeout(1, [2, 3], "all_reduce", 1, 0.1, "unreachable", "2, 3 (node b)"),
    errors.CollectiveMismatch(0, {1: "barrier()", 0: "all_reduce(float32, 64 KiB)"}, [1], ["op"], 12),
    errors.RankFailed(2, "Traceback ..."),
    errors.EngineDead("rank 1 was killed"),
]


def test_list_is_complete() -> None:
    defined = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.ShotcastError)}
    assert {type(error) for error in INSTANCES} == defined


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_round_trip(error: errors.ShotcastError, protocol: int) -> None:
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_timeout_names_the_missing() -> None:
    error = errors.CollectiveTimeout(0, [3, 5], "all_reduce", 7, 2.5)
    assert error.missing == (3, 5)
    happened = "all_reduce (call 7) did not complete within its timeout of 2.5 s (timeout_s); missing ranks: 3, 5"
    assert happened in str(error)


def test_timeout_names_nodes_that_cannot_be_reached() -> None:
    error = errors.CollectiveTimeout(0, [2, 3, 4], "all_reduce", 7, 2.5, "unreachable", "2, 3 (node b), 4 (node c)")
    assert error.missing == (2, 3, 4)
    assert "connections were lost or nodes do not answer (within 2.5 s); unreachable ranks: 2, 3 (node b), 4 (" in str(
        error
    )


def test_mismatch_lists_calls_by_rank() -> None:
    error = errors.CollectiveMismatch(0, {1: "b", 0: "a"}, [1], ["op", "root"], 12)
    assert "differs between ranks in op, root; differing ranks: 1. rank 0: a; rank 1: b. Every" in str(error)


def test_mismatch_of_calls_that_only_another_rank_knows() -> None:
    error = errors.CollectiveMismatch(0, {}, [0], [], 12)
    assert "in its header; differing ranks: 0. The rank that found the mismatch reports the calls. Every" in str(error)


@pytest.mark.parametrize(("error", "builtin"), [(errors.ConfigError, ValueError), (errors.UnsupportedError, TypeError)])
def test_also_what_python_would_raise(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)

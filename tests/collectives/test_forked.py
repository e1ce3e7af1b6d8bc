"""Communicators in forked processes: refused there, and untouched in the process that made them."""

from __future__ import annotations

import fork_targets as targets
import pytest

import shotcast


def test_every_use_in_a_child_is_refused() -> None:
    shotcast.spawn(targets.every_use, 2, timeout_s=300)


def test_a_child_releases_nothing_of_its_maker() -> None:
    shotcast.spawn(targets.child_drops_it, 2, "cpu", 5, timeout_s=300)


@pytest.mark.gpu
def test_a_child_releases_nothing_of_the_gpus() -> None:
    shotcast.spawn(targets.child_drops_it, 2, "cuda", 3, timeout_s=200)


@pytest.mark.full
def test_maker_and_child_at_once() -> None:
    assert shotcast.spawn(targets.used_at_once, 2, 20, timeout_s=300) == [20, 20]


@pytest.mark.full
def test_forks_that_make_no_calls() -> None:
    shotcast.spawn(targets.forks_without_calls, 2, timeout_s=300)

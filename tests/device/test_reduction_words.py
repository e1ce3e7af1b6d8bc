"""Reductions of tiles of words, run by Triton's interpreter and compared with plain torch bit by bit."""

from __future__ import annotations

import reduction_targets as targets

from quick_interpreter import interpret
from shotcast import wire


def test_every_reduction_of_every_dtype() -> None:
    (done,) = interpret(targets.every_reduction, 1, (3, 2, 5, 8))
    assert done == sum(len(names) for names in wire.REDUCED.values())


def test_a_stopped_call_leaves_nan() -> None:
    interpret(targets.stopped, 1)

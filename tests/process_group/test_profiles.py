"""Calls of process groups in profiles."""

from __future__ import annotations

import profile_targets as targets
import pytest

import shotcast


@pytest.mark.full
def test_profiles_show_every_call() -> None:
    for calls, training in shotcast.spawn(targets.profiled, 2, timeout_s=300):
        assert calls == [
            ("shotcast:all_reduce", False, [[6]]),
            ("shotcast:all_reduce", True, [[6]]),
            ("shotcast:all_gather", False, [[6]] * 3),
            ("shotcast:barrier", False, []),
        ]
        assert training == [("shotcast:all_reduce", True, [[4]])]

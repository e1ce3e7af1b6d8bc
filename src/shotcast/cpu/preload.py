"""Imported by the server that ranks are forked from, so that what every rank needs is there when it starts.

numba reads its implementations of functions when it first compiles or loads one: a third of a second of each rank.
"""

from __future__ import annotations

from numba.core.registry import cpu_target

import shotcast.cpu.executor  # noqa: F401

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()

"""Calls whose kernels also compute, as those of :mod:`shotcast.overlap`, with the protocol of every call.

Who makes such a call says what it is and how it is launched; the communicator gives it an epoch, a deadline and a
workspace that is large enough, and names ranks that call something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shotcast.wire import CallPlan


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """A call that brings its launches, made again and again with other operands; each object is looked up once."""

    plan: CallPlan  # the header of the call, and the room that it needs of the workspace
    # a name for all that the compiler is told. Ranks meet once for each name. Those whose operands lie in memory in
    # other ways have other names: the call then begins without a meeting
    form: str
    # `launches(context)`, from the `shotcast.transport.triton.binding.KernelContext` of a workspace: the
    # `shotcast.device.triton.launch.Launch` of each kernel. Each has an epoch of its own, and takes all operands
    launches: Callable[[Any], Sequence[Any]]
    given: Callable[..., Sequence[Any]]  # returns the operands of a call as the launches take them

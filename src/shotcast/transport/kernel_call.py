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
    """A call that brings its launches. It is made again and again with other operands; each object is looked up once.

    Attributes:
        plan: the header of the call, and the room that it needs of the workspace.
        form: a name for all that the compiler is told. Ranks meet once for each name. Those whose operands lie in
            memory in other ways have other names: the call then begins without a meeting.
        launches: ``launches(context)``, from the :class:`~shotcast.transport.triton.binding.KernelContext` of a
            workspace: the :class:`~shotcast.device.triton.launch.Launch` of each kernel. Each has an epoch of its own,
            and takes all operands.
        given: returns the operands of a call as the launches take them.
    """

    plan: CallPlan
    form: str
    launches: Callable[[Any], Sequence[Any]]
    given: Callable[..., Sequence[Any]]

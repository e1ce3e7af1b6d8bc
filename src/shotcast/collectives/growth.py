"""Growth of the workspace, before the first call that needs more of it than there is.

Ranks allocate together, so a rank that is absent, or calls something else, would make the others wait in an allocation
that no deadline limits. Therefore they first exchange the header of the call, on the terms of every call: by its
deadline, the absent rank is named.
"""

from __future__ import annotations

from collections.abc import Callable

from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.first_use import Form
from shotcast.collectives.interface import Executor, GrowingExecutor
from shotcast.errors import ConfigError
from shotcast.wire import Fault


def grow(
    executor: Executor, call: Call, capturing: bool, compiled: Callable[[Form, Callable[[], object]], None]
) -> Fault | bool:
    """Make room for ``call``, unless there is enough. Collective: every rank makes the call.

    Args:
        compiled: ``compiled(form, load)`` returns once all ranks have loaded a kernel.

    Returns:
        Whether there is a new workspace, which calls use from now on that are bound from now on; or the fault that
        ended the exchange of headers.

    Raises:
        ConfigError: the call is being captured in a graph; or, on all ranks, a rank has too little memory.
    """
    if call.room <= executor.room:
        return False
    if capturing:
        raise ConfigError(
            f"{call.label} needs a larger workspace, which cannot be made inside a graph capture; call it once before"
        )
    assert isinstance(executor, GrowingExecutor)
    meeting = executor.meeting(call.plan)
    compiled(Form("meeting"), meeting.load)
    meeting.run()
    if fault := executor.fault():
        return fault
    executor.grow(call.room)
    return True

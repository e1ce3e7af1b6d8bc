"""Asynchronous calls: started now, waited for later."""

from __future__ import annotations

import functools
from typing import Any

from shotcast.collectives.calls.caller import Caller
from shotcast.collectives.started import Handle, StreamStarter, ThreadStarter
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ClosedError, ConfigError

STARTABLE = sorted(
    [f"all_reduce_{norm}_norm{fp8}" for norm in ("layer", "rms") for fp8 in ("", "_fp8")]
    + [f"{op}{form}" for op in ("all_gather", "all_reduce", "reduce_scatter") for form in ("", "_coalesced")]
    + ["all_to_all", "all_to_all_list", "barrier", "batch_send_recv", "broadcast", "gather", "reduce", "scatter"]
)
"""Names of the calls that can be started."""

_MESSAGES = ("send", "recv")
"""Calls between two ranks. Started one by one, they could deadlock, for example if both ranks receive first."""


class StartedCalls(Caller):
    """The call that starts others asynchronously."""

    _starter: StreamStarter | ThreadStarter | None

    def start(self, call: str, *args: Any, **kwargs: Any) -> Handle:
        """Start a call, and return before it has completed.

        On GPUs it is enqueued on a stream of the communicator, behind the pending work of the current stream; on CPU
        ranks a thread runs it. All calls keep their order, so every rank must start the same ones in the same order,
        and a synchronous call waits for the ones before it. Do not write its tensors or read its results until
        :meth:`Handle.wait` has returned.

        Args:
            call: the name of a communicating call, such as ``"all_reduce"``; for messages, ``"batch_send_recv"``.
            args, kwargs: its arguments. Lists of tensors may be changed afterwards, but not the tensors.

        Returns:
            A handle: ``wait()`` returns what the call returns, or raises what it raises (on GPUs the current stream
                waits, so it also works in graph captures, and must precede their end); ``is_completed()`` tells whether
                it has finished. Under torch.compile the call has finished when this returns.

        Raises:
            ConfigError: the call does not exist or cannot be started.
            ClosedError: after :meth:`close`.
        """
        if call in _MESSAGES:
            raise ConfigError(
                f"a {call} cannot be started, as calls that are started keep their order and ranks would wait for each "
                f"other; start a batch_send_recv of all messages that go on at once"
            )
        if call not in STARTABLE:
            raise ConfigError(f"no call {call!r} can be started; there are {', '.join(STARTABLE)}")
        if is_traced():
            return Handle(getattr(self, call)(*args, **kwargs))
        args, kwargs = _copied(args), _copied(kwargs)
        make = functools.partial(getattr(self, call), *args, **kwargs)
        if self._closed:
            raise ClosedError(f"start {call}: this communicator was closed")
        if self._starter is None:
            if self.device.type == "cuda":
                self._starter = StreamStarter(self.device)
            else:
                self._starter = ThreadStarter(self._prepared.pause, self._prepared.resume)
        handle = self._starter.start(make, (args, kwargs))
        handle.call = call
        return handle


def _copied(arguments: Any) -> Any:
    """Copy the lists, tuples and dicts of arguments, with the same tensors."""
    if isinstance(arguments, dict):
        return {name: _copied(value) for name, value in arguments.items()}
    if isinstance(arguments, list):
        return [_copied(value) for value in arguments]
    if type(arguments) is tuple:  # those with names have tensors alone
        return tuple(_copied(value) for value in arguments)
    return arguments

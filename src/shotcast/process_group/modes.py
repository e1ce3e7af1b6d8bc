"""Calls under PyTorch dispatch modes such as CommDebugMode, which see the calls of C++ process groups.

A method of a C++ group is an operator of ``torch.ops.c10d``, whose kernel calls the library. Methods of a Python group
are called without an operator. Under a mode, they also go through the operator: modes see it, and the method runs the
call in place of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from shotcast.collectives.started import tensors_in
from shotcast.process_group import torch_private
from shotcast.process_group.torch_private import dispatch_modes

P = ParamSpec("P")
T = TypeVar("T")


def visible(*others: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method's calls visible to modes; ``others`` are PyTorch's alternative names for it."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        name = next(name for name in (method.__name__, *others) if hasattr(torch_private.ProcessGroup, name))

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not dispatch_modes():
                return method(*args, **kwargs)
            return _dispatched(name, method, *args, **kwargs)

        return call

    return decorate


def _dispatched(name: str, method: Callable[..., Any], group: Any, /, *args: Any, **kwargs: Any) -> Any:
    seeing = [mode for mode in torch_private.users_modes() if not isinstance(mode, _Begin | _End)]
    if not seeing:
        return method(group, *args, **kwargs)
    end = _End(group, functools.partial(method, group, *args, **kwargs))
    operator = getattr(torch_private.ProcessGroup(group.rank(), group.size()), name)  # of `torch.ops.c10d`
    given = {key: value for key, value in kwargs.items() if value is not None}
    with torch_private.replaced_modes([end, *seeing, _Begin(end)]):
        work = operator(*[value for value in args if value is not None], **given)
    return work if end.work is None else end.work


class _Begin(torch_private.DispatchMode):
    """The first mode, which passes the Python group to the operator."""

    def __init__(self, end: _End):
        super().__init__()
        self._end = end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (place := torch_private.place_of_group(func)) is not None:
            args = (*args[:place], self._end.group.boxed(), *args[place + 1 :])
            self._end.operands = list(tensors_in(args))
        return func(*args, **(kwargs or {}))


class _End(torch_private.DispatchMode):
    """The last mode, which runs the call. PyTorch's kernel runs it if a mode has replaced operands."""

    def __init__(self, group: Any, make: Callable[[], Any]):
        super().__init__()
        self.group, self._make = group, make
        self.operands: list[Any] = []
        self.work: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = torch_private.place_of_group(func)
        group = None if place is None else torch_private.ProcessGroup.unbox(args[place])
        if group is not self.group or not self._has_operands(args):
            return func(*args, **(kwargs or {}))
        self.work = self._make()
        boxed = self.work.boxed()
        return (args[0], boxed) if len(func._schema.returns) == 2 else boxed

    def _has_operands(self, args: Any) -> bool:
        found = list(tensors_in(args))
        return len(found) == len(self.operands) and all(a is b for a, b in zip(found, self.operands, strict=True))

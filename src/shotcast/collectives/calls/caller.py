"""The base class of the calls: what they need from their communicator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from shotcast.collectives.algorithm import Topology
from shotcast.collectives.arguments import output
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.choice.resolver import ResolvedCall
from shotcast.collectives.interface import Collectives, Executor
from shotcast.collectives.ops import OpSpec
from shotcast.collectives.prepared import Given, PreparedCalls
from shotcast.collectives.torch_ops import autograd, operators
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError


class Caller(Collectives):
    """A part of a communicator: a group of calls that rely on the other parts."""

    _executor: Executor | None
    _closed: bool
    _prepared: PreparedCalls
    _run: Callable[..., ResolvedCall]
    """Runs a call on checked tensors: :meth:`Communicator._run`."""
    explain: Callable[..., Explanation]
    topology: Topology
    """The facts about ranks and machine that determine the choice of algorithms."""

    def __init_subclass__(cls) -> None:
        for name, method in vars(cls).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                method.__qualname__ = f"Communicator.{name}"  # which Python's errors about arguments give

    def _make(
        self,
        spec: OpSpec,
        x: torch.Tensor,
        out: torch.Tensor | None,
        given: Given | None,
        operands: dict[str, Any],
        elements: tuple[int, ...] = (),
        count: int | None = None,
    ) -> torch.Tensor:
        """Run an operation on ``x``, which has been checked, and return ``out`` or a new tensor.

        It is traced, recorded by autograd, or run. ``operands`` follow its specification; ``elements`` are the
        ``sizes`` of :meth:`_run`, which also takes ``count`` and ``given``.
        """
        operands = operands | {"x": x, "world_size": self.world_size, "rank": self.rank}
        shape = spec.shape(**operands)
        if is_traced():
            return operators.traced(spec, self, out, operands)
        if out is None and x.requires_grad and torch.is_grad_enabled():
            return autograd.record(spec, self, operands)
        own_at = spec.own_at(**operands)
        out = output(x, out, shape, spec.method, own_at)
        if not spec.in_place and out.data_ptr() == x.data_ptr() and x.numel():
            raise ConfigError(f"{spec.method} cannot work in place; give another tensor as out, or none")
        if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(spec, self, out, operands)
        assert spec.op is not None
        algorithm, reduction, root = operands["algorithm"], operands.get("reduction", "sum"), operands.get("root", 0)
        source, sms = None if own_at is None else x, operands.get("sms")
        self._run(spec.op, source, out, algorithm, reduction, root, elements, sms=sms, count=count, given=given)
        return out


def key_of(method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the key under which a communicator looks up a prepared call with these arguments."""
    keys: list[tuple[Any, ...]] = []

    def find(key: tuple[Any, ...], operands: Any) -> Any:
        keys.append(key)
        return SimpleNamespace(run=lambda operands: True)

    method(SimpleNamespace(_prepared=SimpleNamespace(find=find)), *args, **kwargs)
    return keys[0]

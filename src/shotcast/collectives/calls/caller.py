"""The base class of the calls: what they need from their communicator."""

from __future__ import annotations

from abc import abstractmethod

import torch

from shotcast.collectives.algorithm import Topology
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.choice.resolver import Call
from shotcast.collectives.interface import Collectives, Executor
from shotcast.collectives.prepared import Given, PreparedCalls
from shotcast.memory.operands import NormTensors
from shotcast.wire import Norm, Op


class Caller(Collectives):
    """A part of a communicator: some of its calls, made by what the others have."""

    _executor: Executor | None
    _closed: bool
    _prepared: PreparedCalls

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """The facts about ranks and machine that the choice of algorithms depends on."""

    @abstractmethod
    def _run(
        self,
        op: Op,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        algorithm: str = "auto",
        reduction: str = "sum",
        root: int = 0,
        sizes: tuple[int, ...] = (),
        norm: Norm | None = None,
        tensors: NormTensors | None = None,
        *,
        sms: int | None = None,
        count: int | None = None,
        given: Given | None = None,
    ) -> Call:
        """Make a call on tensors that have been checked; ``count`` elements define it, if not those of a tensor.

        It is prepared for the arguments that the method was ``given``.
        """

    @abstractmethod
    def explain(
        self,
        x: torch.Tensor,
        op: str = "all_reduce",
        algorithm: str = "auto",
        reduction: str = "sum",
        mode: str | None = None,
        sms: int | None = None,
    ) -> Explanation:
        """Return which algorithm a call would take."""

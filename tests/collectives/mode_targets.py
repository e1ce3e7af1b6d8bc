"""Functions that the ranks of tests/collectives/test_modes.py run: CPU ranks whose streams pretend to be captured."""

from __future__ import annotations

import logging
from typing import Any

import expected_results
import pytest
import torch
from fake_streams import FakeStreams
from workers import check, inputs

import shotcast
from shotcast.collectives.choice import agreement
from shotcast.collectives.choice.table import TableRow, parse, render
from shotcast.collectives.registry import registered
from shotcast.collectives.stream_order import StreamChain
from shotcast.errors import ConfigError
from shotcast.wire import CallPlan, LaunchShape, NodeShape, Op


class Modes:
    """Streams that are captured or not, and what a communicator with such streams did.

    Attributes:
        entered: the number of calls that were ordered.
        bound: the number of plans that were bound.
        loaded: the algorithms that were compiled.
    """

    def __init__(self) -> None:
        self.streams = FakeStreams(2)
        self.entered = 0
        self.bound = 0
        self.loaded: list[str] = []
        self.chain = StreamChain(torch.device("cuda", 0), streams=self.streams)
        enter = self.chain.enter

        def counted() -> bool:
            self.entered += 1
            return enter()

        self.chain.enter = counted  # type: ignore[method-assign]

    @property
    def graph(self) -> bool:
        """True while the current stream is captured."""
        return self.streams.capturing()

    @graph.setter
    def graph(self, captured: bool) -> None:
        stream = self.streams.current = self.streams.all[captured]
        if captured:
            self.streams.begin(stream)


class Recorded:
    """A bound call that records when it runs and when it is compiled."""

    def __init__(self, call: Any, plan: CallPlan, ran: list[CallPlan], loaded: list[str]) -> None:
        self.call, self.plan, self.ran, self.loaded = call, plan, ran, loaded

    def run(self, *tensors: Any) -> None:
        self.ran.append(self.plan)
        self.call.run(*tensors)

    def load(self) -> None:
        self.loaded.append(self.plan.algorithm)
        self.call.load()


def rows(algorithm: str, mode: str) -> dict[tuple[str, str, str], list[TableRow]]:
    return {(mode, "all_reduce", "float32"): [TableRow(float("inf"), algorithm, LaunchShape(0, 0, 0, 4096), mode)]}


def with_modes(comm: shotcast.Communicator) -> tuple[Modes, list[CallPlan]]:
    """Give ``comm`` streams, and a table with one-shot for captured calls and two-shot for eager ones.

    Return its modes and plans.
    """
    modes, plans = Modes(), []
    comm._chain = comm._prepared.chain = modes.chain
    comm._resolver.graphs = True
    text = render("a GPU", NodeShape(1, comm.world_size), rows("one_shot", "graph") | rows("two_shot", "eager"), {}, [])
    comm._resolver.tables = (("user table", parse(text, "t.json", registered())),)
    bind = comm._executor.bind

    def recorded(plan: CallPlan) -> Recorded:
        modes.bound += 1
        return Recorded(bind(plan), plan, plans, modes.loaded)

    comm._executor.bind = recorded
    return modes, plans


def each_mode_has_its_own_choice() -> list[str]:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        modes, plans = with_modes(comm)
        xs = inputs(5000, torch.float32, comm.world_size, 1, "cpu")
        for graph in (False, True, False, True):
            modes.graph = graph
            got = comm.all_reduce(xs[comm.rank])
            check(got, expected_results.all_reduce(xs, "one_shot"), graph)
        assert modes.entered == 6  # in a capture twice: the prepared call finds that it is none
        assert len(comm._calls) == 2
        assert {plan.launch.chunk_bytes for plan in plans} == {4096}
        return [plan.algorithm for plan in plans]


def eager_call_compiles_the_captured_one() -> tuple[list[str], list[str]]:
    """Return what was compiled before a capture, and what was compiled after it."""
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        modes, _ = with_modes(comm)
        loaded = modes.loaded
        x = torch.ones(8)
        comm.all_reduce(x)
        before = list(loaded)
        modes.graph = True
        assert comm.all_reduce(x).tolist() == [comm.world_size] * 8
        modes.graph = False
        comm.all_reduce(torch.ones(16), algorithm="ring")
        return before, loaded[len(before) :]


def capture_without_a_call_before() -> str:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        modes, _ = with_modes(comm)
        modes.graph = True
        with pytest.raises(ConfigError) as caught:
            comm.all_reduce(torch.ones(8))
        return str(caught.value)


def explained() -> list[tuple[str, str, str]]:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        modes, _ = with_modes(comm)
        x = torch.ones(8)
        explanations = [comm.explain(x), comm.explain(x, mode="graph"), comm.explain(x, mode="eager")]
        modes.graph = True
        explanations += [comm.explain(x), comm.explain(x, mode="eager")]
        assert modes.entered == 0, "explain orders nothing"
        with pytest.raises(ConfigError, match="mode is graph or eager, not 'captured'"):
            comm.explain(x, mode="captured")
        assert "float32, captured: one_shot" in str(comm.explain(x))
        return [(one.mode, one.algorithm, one.source) for one in explanations]


def modes_of_cpu_ranks() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        assert comm.explain(torch.ones(8)).mode == "eager"
        for mode in ("graph", ""):
            with pytest.raises(ConfigError, match=f"mode is eager, as CPU ranks have no graphs, not '{mode}'"):
                comm.explain(torch.ones(8), mode=mode)


def explicit_launches() -> None:
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        modes, plans = with_modes(comm)
        xs = inputs(5000, torch.bfloat16, comm.world_size, 2, "cpu")
        out = torch.empty_like(xs[0])
        bound = []
        for chunk in (64, 704, 64):
            launch = LaunchShape(0, 64, 0, chunk)
            call = comm._run(Op.ALL_REDUCE, xs[comm.rank], out, algorithm="two_shot", launch=launch)
            assert not call.needs, "all is compiled"
            bound.append(modes.bound)
            check(out, expected_results.all_reduce(xs, "two_shot"), chunk)
        assert bound == [1, 2, 2], "what is measured has no twin, and is bound once"
        comm.all_reduce(xs[comm.rank], out=out, algorithm="two_shot")
        assert [plan.launch.chunk_bytes for plan in plans] == [64, 704, 64, 0]
        assert len(comm._calls) == 3


def single_rank_orders_nothing() -> int:
    with shotcast.Communicator(device="cpu") as comm:
        modes, _ = with_modes(comm)
        comm.all_reduce(torch.ones(3))
        return modes.entered


def packaged_table_of_other_kernels() -> tuple[str, str, list[str]]:
    """Return the reasons of a call that the table would have decided and of a named one, and what was logged."""

    def stale(part: str, world_size: int, algorithms: object) -> None:
        raise ConfigError("table x.json was made for revision 0 of the kernels")

    agreement.packaged = stale  # type: ignore[assignment]
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shotcast").addHandler(handler)
    with shotcast.Communicator(device="cpu", timeout_s=100) as comm:
        x = torch.ones(8)
        assert comm.all_reduce(x).tolist() == [comm.world_size] * 8
        by_model = comm.explain(x)
        assert by_model.source == "cost model"
        return by_model.reason, comm.explain(x, algorithm="ring").reason, logged

"""The choice of algorithm as pure functions: from the problem to the candidates to the choice."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from predicted import predicted_us
from shotcast import wire
from shotcast.collectives import fingerprints
from shotcast.collectives.algorithm import FUSED, Algorithm, Algorithms, CollectiveProblem, Form, Topology
from shotcast.collectives.choice import select
from shotcast.collectives.choice.candidates import (
    candidates,
    capacity,
    fitted,
    keeps_bits,
    launch_shape,
    launch_shapes,
    launch_unsupported_reason,
    unsupported_reason,
)
from shotcast.collectives.choice.choice import Candidate, Explanation
from shotcast.collectives.choice.resolver import Resolver
from shotcast.collectives.choice.select import choose
from shotcast.collectives.choice.table import MODES, Table, parse
from shotcast.collectives.registry import registered
from shotcast.cost.collective import NVLINK4, SHARED_MEMORY, NetworkCost, Work, time_us
from shotcast.errors import ConfigError
from shotcast.hardware.nodes import NodeLayout
from shotcast.transport.cpu import COMPILED
from shotcast.transport.transport import NO_NETWORK, Network
from shotcast.wire import LaunchShape, Norm, Op
from transports_by_name import named

ALGORITHMS = tuple(registered())

ROW = 16
"""The number of elements in a fused operation's row."""


def make_topology(
    kernels: str = "compiled",
    world_size: int = 4,
    max_bytes: int = 1 << 20,
    unsupported_reason: str = "",
    multicast: bool = False,
    allow_fp8: bool = False,
    nodes: int = 1,
    exclusive: bool = True,
) -> Topology:
    """Return the topology of so many ranks on each of ``nodes`` nodes."""
    device = "cuda" if kernels == "triton" else "cpu"
    layout = NodeLayout.of_keys([f"n{node}" for node in range(nodes) for _ in range(world_size)])
    network = Network("some wires", NetworkCost(50.0, 2.0)) if nodes > 1 else NO_NETWORK
    transport = named(kernels, nodes)
    facts = layout, device, "cpu", transport, unsupported_reason, multicast, max_bytes, registered(), allow_fp8, network
    return Topology(*facts, exclusive=exclusive)


def problem(
    op: Op = Op.ALL_REDUCE,
    nbytes: int = 1024,
    dtype: str = "float32",
    topology: Topology | None = None,
    sizes: tuple[int, ...] = (),
    reduction: str = "sum",
) -> CollectiveProblem:
    norm = Norm(ROW) if op in FUSED else None
    return CollectiveProblem(op, nbytes, dtype, topology or make_topology(), 0, sizes, reduction, norm)


def table(
    *rows: object,
    op: str = "all_reduce",
    dtype: str = "float32",
    name: str = "t",
    mode: str = "eager",
    part: str = "cpu",
) -> Table:
    entries = {mode: {op: {dtype: list(rows)}}}
    whole = {"format": 3, "part": part, "world_size": 4, "entries": entries}
    return parse(json.dumps(whole), name, registered())


problems = st.builds(
    problem,
    op=st.sampled_from(Op),
    nbytes=st.integers(0, 1 << 33),
    dtype=st.sampled_from([*wire.DTYPES, "qint8"]),
    topology=st.builds(
        make_topology,
        kernels=st.sampled_from(["triton", "interpreter", "compiled"]),
        world_size=st.integers(2, 8),
        max_bytes=st.integers(1, 512 << 20),
        multicast=st.booleans(),
        allow_fp8=st.booleans(),
        nodes=st.sampled_from([1, 1, 1, 2, 3, 5]),
    ),
    reduction=st.sampled_from(wire.REDUCTIONS),
)
names = st.sampled_from([*ALGORITHMS, "auto"])
arguments = names | st.just("lossless")
_NOT_A_SUM = "only one_shot and two_shot do more than sum float32, float16, bfloat16, and this is "


class TestOrder:
    USER = table([None, "two_shot", None], name="user.json")
    PACKAGED = table([None, "one_shot", None], name="packaged.json")
    TABLES = (("user table", USER), ("packaged table", PACKAGED))

    def test_argument_then_environment_then_tables_then_model(self) -> None:
        large = problem(nbytes=1 << 20)
        cases = [
            (choose(large, "ring", "vendor", self.TABLES), "argument", "ring"),
            (choose(large, "auto", "vendor", self.TABLES), "environment", "vendor"),
            (choose(large, "auto", "auto", self.TABLES), "user table", "two_shot"),
            (choose(large, "auto", "auto", self.TABLES[1:]), "packaged table", "one_shot"),
            (choose(large, "auto", "auto", ()), "cost model", "two_shot"),
        ]
        for choice, source, algorithm in cases:
            assert (choice.source, choice.candidate.algorithm) == (source, algorithm)

    def test_a_table_without_a_row_is_skipped(self) -> None:
        silent = table([64, "ring", None], name="silent.json")
        tables = (("user table", silent), ("packaged table", self.PACKAGED))
        assert choose(problem(), "auto", "auto", tables).source == "packaged table"
        assert choose(problem(nbytes=64), "auto", "auto", tables).source == "user table"

    def test_an_illegal_row_is_skipped(self) -> None:
        ring = table([None, "ring", None], op="broadcast")
        choice = choose(problem(Op.BROADCAST), "auto", "auto", (("user table", ring),))
        assert (choice.source, choice.candidate.algorithm) == ("cost model", "one_shot")
        assert choice.reason.endswith("; t has ring, but there is no ring broadcast; there is one_shot")

    @pytest.mark.parametrize("mode", MODES)
    def test_each_mode_has_its_own_rows(self, mode: str) -> None:
        captured = table([None, "ring", None], name="graph.json", mode="graph", part="H")
        eager = table([None, "two_shot", None], name="eager.json", mode="eager", part="H")
        both = dataclasses.replace(captured, rows=captured.rows | eager.rows)
        choice = choose(problem(), "auto", "auto", (("user table", both),), mode)
        assert choice.candidate.algorithm == {"graph": "ring", "eager": "two_shot"}[mode]
        assert "calls" not in choice.reason

    @pytest.mark.parametrize(("mode", "other"), [MODES, MODES[::-1]])
    def test_rows_of_the_other_mode_serve_and_the_reason_says_so(self, mode: str, other: str) -> None:
        rows = table([4096, "ring", None], name="t.json", mode=other, part="H")
        choice = choose(problem(), "auto", "auto", (("packaged table", rows),), mode)
        assert (choice.source, choice.candidate.algorithm) == ("packaged table", "ring")
        message = f"t.json: ring for up to 4 KiB, by its {other} rows, as it has none for {mode} calls"
        assert choice.reason == message

    def test_an_illegal_environment_variable_is_skipped(self) -> None:
        choice = choose(problem(Op.BROADCAST), "auto", "two_shot", ())
        assert (choice.source, choice.candidate.algorithm) == ("cost model", "one_shot")
        message = "; SHOTCAST_ALGORITHM is two_shot, but there is no two_shot broadcast; there is one_shot"
        assert choice.reason.endswith(message)

    def test_launch_is_the_rows_or_the_default(self) -> None:
        shape = {"programs": 0, "block_words": 0, "num_warps": 0, "chunk_bytes": 640}
        rows = table([100, "ring", shape], [2000, "ring", None])
        tables = (("user table", rows),)
        assert choose(problem(nbytes=100), "auto", "auto", tables).candidate.launch.chunk_bytes == 640
        assert choose(problem(nbytes=101), "auto", "auto", tables).candidate.launch.chunk_bytes == 0

    @pytest.mark.parametrize(("algorithm", "tiles"), [("one_shot", 64), ("two_shot", 16)])
    def test_a_launch_has_no_programs_without_tiles(self, algorithm: str, tiles: int) -> None:
        """A larger message won the row. The tiles of one-shot divide the message, those of two-shot a slice."""
        shape = {"programs": 100, "block_words": 128, "num_warps": 1}
        rows = (("user table", table([1 << 18, algorithm, shape])),)
        topology = make_topology("triton")
        for nbytes, programs in ((64 * 512, tiles), (64 * 512 - 16, tiles), (1 << 18, 100)):
            launch = choose(problem(nbytes=nbytes, topology=topology), "auto", "auto", rows).candidate.launch
            assert (launch.programs, launch.block_words, launch.num_warps) == (programs, 128, 1)

    def test_a_launch_covers_the_largest_part_of_an_uneven_gather(self) -> None:
        shape = {"programs": 4096, "block_words": 128, "num_warps": 1}
        rows = (("user table", table([1 << 20, "one_shot", shape], op="all_gather")),)
        case = dataclasses.replace(
            problem(Op.ALL_GATHER, 1 << 18, topology=make_topology("triton")), sizes=(1 << 16, 0, 0, 0)
        )
        assert choose(case, "auto", "auto", rows).candidate.launch.programs == 512

    def test_reasons(self) -> None:
        rows = table([2048, "ring", None], [None, "two_shot", None], name="mine.json")
        tables = (("user table", rows),)
        assert choose(problem(), "auto", "auto", tables).reason == "mine.json: ring for up to 2 KiB"
        assert choose(problem(nbytes=4096), "auto", "auto", tables).reason == "mine.json: two_shot for any size"
        assert choose(problem(), "ring", "auto", tables).reason == "named in the call"
        assert choose(problem(), "auto", "ring", tables).reason == "SHOTCAST_ALGORITHM"
        times = [predicted_us("all_reduce", name, 1024, 4, SHARED_MEMORY) for name in ("one_shot", "two_shot", "ring")]
        message = "predicted us: one_shot {:.1f}, two_shot {:.1f}".format(*times[:2])
        assert choose(problem(), "auto", "auto", ()).reason == message

    @given(problems, arguments, names, st.lists(st.sampled_from(ALGORITHMS), max_size=2))
    def test_any_choice_is_legal_and_its_source_is_the_first_that_may_decide(
        self, case: CollectiveProblem, argument: str, environment: str, rows: list[str]
    ) -> None:
        tables = [
            (source, table([None, name, None], op=case.op.label, dtype=case.dtype))
            for source, name in zip(("user table", "packaged table"), rows, strict=False)
            if case.dtype in wire.DTYPES
        ]
        legal = [candidate.algorithm for candidate in candidates(case)]
        chosen = argument in ("auto", "lossless")
        if not chosen and argument not in legal:
            with pytest.raises(ConfigError, match=f"{argument} cannot serve this {case.op.label}") as caught:
                choose(case, argument, environment, tables)
            assert unsupported_reason(case, argument) in str(caught.value)
            return
        choice = choose(case, argument, environment, tables)
        assert choice.candidate.algorithm in legal
        assert choice.reason
        if not chosen:
            wanted = "argument", argument
        elif environment in legal:
            wanted = "environment", environment
        elif legal == ["vendor"]:
            wanted = "legality", "vendor"
        else:
            may = [name for name in legal if name != "two_shot_fp8" or (case.topology.allow_fp8 and argument == "auto")]
            may = [name for name in may if not case.topology.algorithms[name].by_name]
            named = [(source, name) for (source, _), name in zip(tables, rows, strict=False) if name in may]
            own = [name for name in may if name != "vendor" and (keeps_bits(case, name) or name == "two_shot_fp8")]
            wanted = named[0] if named else ("cost model" if own else "legality", choice.candidate.algorithm)
        assert (choice.source, choice.candidate.algorithm) == wanted
        assert choose(case, argument, environment, tables) == choice

    @given(st.integers(0, 1 << 26), st.integers(1, 8), st.integers(2, 9), st.sampled_from(["triton", "compiled"]))
    def test_model_takes_the_least_time_over_nodes(self, nbytes: int, ranks: int, nodes: int, kernels: str) -> None:
        topology = make_topology(kernels, ranks, 512 << 20, nodes=nodes)
        case = problem(nbytes=nbytes, topology=topology)
        choice = choose(case, "auto", "auto", ())
        link = NVLINK4 if kernels == "triton" else SHARED_MEMORY
        own = [
            name
            for name in ALGORITHMS
            if name != "vendor" and not unsupported_reason(case, name) and keeps_bits(case, name)
        ]
        works = {name: registered()[name].forms[Op.ALL_REDUCE].work(nbytes, topology.shape, 4) for name in own}
        times = {name: time_us(work, link, topology.network.cost) for name, work in works.items()}
        assert times[choice.candidate.algorithm] == min(times.values())
        assert f"for {nodes}x{ranks} ranks over {topology.network.name} of 50 us and 2 GB/s" in choice.reason

    @given(st.integers(0, 1 << 26), st.integers(2, 8), st.sampled_from(["triton", "compiled"]))
    def test_model_takes_the_least_time(self, nbytes: int, world_size: int, kernels: str) -> None:
        case = problem(nbytes=nbytes, topology=make_topology(kernels, world_size, 512 << 20))
        taken = choose(case, "auto", "auto", ()).candidate.algorithm
        link = NVLINK4 if kernels == "triton" else SHARED_MEMORY
        own = [name for name in ("one_shot", "two_shot", "ring") if not unsupported_reason(case, name)]
        own = [name for name in own if name != "ring" or world_size == 2]
        times = {name: predicted_us("all_reduce", name, nbytes, world_size, link) for name in own}
        assert times[taken] == min(times.values())


class TestNodes:
    def test_sums_over_nodes_need_nodes(self) -> None:
        for kernels in ("triton", "interpreter", "compiled"):
            case = problem(topology=make_topology(kernels))
            assert unsupported_reason(case, "nvrar") == "all ranks are on one node"
            over = problem(topology=make_topology(kernels, nodes=2))
            assert (
                unsupported_reason(over, "nvrar")
                == unsupported_reason(over, "nvrar_pairs")
                == unsupported_reason(over, "nvrar_halving")
                == ""
            )
        assert unsupported_reason(problem(topology=make_topology("triton", nodes=2)), "nvrar_two_shot") == (
            "nvrar_two_shot has no Triton kernel"
        )

    def test_cpu_hosts_have_all_but_scatters_and_exchanges(self) -> None:
        topology = make_topology(nodes=3)
        served = {
            op
            for op in Op
            if choose(problem(op, topology=topology), "auto", "auto", ()).candidate.algorithm != "vendor"
        }
        copies = {Op.ALL_GATHER, Op.BROADCAST, Op.SEND, Op.RECV, Op.BARRIER}
        assert served == {Op.ALL_REDUCE, Op.REDUCE, Op.ALL_REDUCE_RMS_NORM, Op.ALL_REDUCE_LAYER_NORM} | copies
        assert (
            unsupported_reason(problem(topology=topology), "one_shot")
            == "one_shot has no form for CPU ranks on several nodes"
        )
        scatter = choose(problem(Op.REDUCE_SCATTER, topology=topology), "auto", "auto", ())
        assert (scatter.source, scatter.reason) == ("legality", "no native kernel carries reduce_scatter between hosts")

    def test_kernels_of_gpus_take_nodes_of_consecutive_ranks(self) -> None:
        mixed = dataclasses.replace(make_topology("triton", nodes=2), layout=NodeLayout.of_keys(["a", "b"] * 4))
        case = problem(topology=mixed)
        assert unsupported_reason(case, "nvrar") == "its kernel takes nodes of consecutive ranks"
        choice = choose(case, "auto", "auto", ())
        assert choice.candidate.algorithm == "vendor"
        assert "one_shot adds up in another order than the contract has over several nodes" in choice.reason
        assert choose(case, "one_shot", "auto", ()).candidate.algorithm == "one_shot", "by name"

    @pytest.mark.parametrize(("nbytes", "best"), [(64, "nvrar_pairs"), (64 << 20, "nvrar_two_shot")])
    def test_size_decides_between_steps_and_bytes(self, nbytes: int, best: str) -> None:
        case = problem(nbytes=nbytes, topology=make_topology(world_size=1, nodes=8))
        assert choose(case, "auto", "auto", ()).candidate.algorithm == best


class TestBits:
    @pytest.mark.parametrize(("world_size", "held"), [(2, True), (3, False), (8, False)])
    @pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE_SCATTER])
    def test_bits_of_sums(self, op: Op, world_size: int, held: bool) -> None:
        case = problem(op, topology=make_topology(world_size=world_size))
        assert keeps_bits(case, "one_shot")
        assert keeps_bits(case, "ring") == held
        for name in ("two_shot_fp8", "multimem", "vendor"):
            assert not keeps_bits(case, name)

    def test_bits_of_copies(self) -> None:
        assert all(keeps_bits(problem(Op.ALL_GATHER), name) for name in ("one_shot", "ring", "vendor"))

    @pytest.mark.parametrize("left", [["multimem", "vendor"], ["two_shot_fp8", "vendor"]])
    def test_vendor_serves_if_no_algorithm_keeps_the_bits(
        self, left: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        few = tuple(Candidate(name, LaunchShape()) for name in left)
        monkeypatch.setattr(select, "candidates", lambda case: few)
        choice = choose(problem(), "auto", "auto", ())
        assert (choice.source, choice.candidate.algorithm) == ("legality", "vendor")


class TestLegality:
    OFFERED = (
        (Op.ALL_REDUCE, ["one_shot", "two_shot", "two_shot_fp8", "ring", "vendor"]),
        (Op.REDUCE_SCATTER, ["one_shot", "ring", "vendor"]),
        (Op.ALL_GATHER, ["one_shot", "ring", "vendor"]),
        (Op.ALL_TO_ALL, ["one_shot", "vendor"]),
        (Op.BROADCAST, ["one_shot", "vendor"]),
        (Op.GATHER, ["one_shot", "vendor"]),
        (Op.SCATTER, ["one_shot", "vendor"]),
        (Op.ALL_TO_ALL_UNEVEN, ["one_shot", "vendor"]),
        (Op.REDUCE, ["one_shot", "two_shot", "vendor"]),
        (Op.SEND, ["one_shot", "vendor"]),
        (Op.RECV, ["one_shot", "vendor"]),
        (Op.BARRIER, ["one_shot", "vendor"]),
        (Op.ALL_REDUCE_RMS_NORM, ["one_shot", "two_shot", "vendor"]),
        (Op.ALL_REDUCE_LAYER_NORM, ["one_shot", "two_shot", "vendor"]),
    )

    @pytest.mark.every(3)
    @pytest.mark.parametrize(("op", "names"), OFFERED)
    @pytest.mark.parametrize("kernels", ["compiled", "interpreter", "triton"])
    def test_candidates_of_each_operation(self, op: Op, names: list[str], kernels: str) -> None:
        case = problem(op, topology=make_topology(kernels))
        lacking = {"two_shot_fp8"} if kernels == "compiled" else set()
        found = [candidate.algorithm for candidate in candidates(case)]
        assert found == [name for name in names if name not in lacking]

    def test_all_operations_are_covered(self) -> None:
        assert {op for op, _ in self.OFFERED} == set(Op)

    @pytest.mark.parametrize(
        ("case", "algorithm", "message"),
        [
            (problem(Op.BROADCAST), "ring", "there is no ring broadcast; there is one_shot"),
            (problem(dtype="int32"), "ring", _NOT_A_SUM + "sum of int32"),
            (problem(reduction="max"), "ring", _NOT_A_SUM + "max of float32"),
            (problem(dtype="complex64", reduction="max"), "two_shot", "native kernels have no max of complex64"),
            (problem(dtype="float8_e5m2"), "two_shot", "native kernels have no sum of float8_e5m2"),
            (problem(Op.BROADCAST, dtype="qint8"), "one_shot", "dtype qint8 has no code of its own"),
            (problem(Op.ALL_GATHER, sizes=(1, 2, 3, 4)), "ring", "the ring takes equal parts only"),
            (problem(topology=make_topology("", unsupported_reason="no reason")), "ring", "no reason"),
            (
                problem(Op.ALL_GATHER, dtype="int8", topology=make_topology("triton")),
                "ring",
                "the ring moves float32, float16, bfloat16 only, and this is int8",
            ),
            (
                problem(nbytes=(512 << 10) + 4, topology=make_topology("triton")),
                "one_shot",
                "it would take 2097168 B of a workspace that has 2 MiB (max_bytes)",
            ),
            (
                problem(nbytes=(1 << 20) + 4, topology=make_topology("triton")),
                "ring",
                "it would take 1048580 B of a workspace that has 1 MiB (max_bytes)",
            ),
            (
                problem(Op.ALL_TO_ALL, nbytes=(512 << 10) + 1, dtype="int8", topology=make_topology("triton")),
                "one_shot",
                "it would take 1048578 B of a workspace that has 1 MiB (max_bytes)",
            ),
        ],
    )
    def test_unsupported_reasons(self, case: CollectiveProblem, algorithm: str, message: str) -> None:
        assert unsupported_reason(case, algorithm) == message
        assert algorithm not in [candidate.algorithm for candidate in candidates(case)]
        with pytest.raises(ConfigError) as caught:
            choose(case, algorithm, "auto", ())
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("case", "algorithm"),
        [
            (problem(nbytes=512 << 10, topology=make_topology("triton")), "one_shot"),
            (problem(nbytes=1 << 20, topology=make_topology("triton")), "two_shot"),
            (problem(Op.ALL_TO_ALL, nbytes=512 << 10, dtype="int8", topology=make_topology("triton")), "one_shot"),
            (problem(nbytes=1 << 40), "ring"),
            (problem(nbytes=1 << 33, topology=make_topology("triton")), "two_shot"),
            (problem(Op.SEND, nbytes=1 << 33, dtype="int8", topology=make_topology("triton")), "one_shot"),
            (problem(Op.ALL_GATHER, sizes=(1, 2, 3, 4)), "one_shot"),
        ],
    )
    def test_at_the_limit(self, case: CollectiveProblem, algorithm: str) -> None:
        assert unsupported_reason(case, algorithm) == ""

    @given(problems)
    def test_vendor_is_always_legal_and_last(self, case: CollectiveProblem) -> None:
        assert candidates(case)[-1].algorithm == "vendor"
        assert unsupported_reason(case, "vendor") == ""

    def test_two_shot_splits_messages_beyond_the_workspace(self) -> None:
        case = problem(nbytes=1 << 33, topology=make_topology("triton"))
        assert [candidate.algorithm for candidate in candidates(case)] == ["two_shot", "vendor"]

    @pytest.mark.parametrize("argument", ["tree", "", None])
    def test_unknown_algorithm(self, argument: str) -> None:
        with pytest.raises(
            ConfigError, match=rf"unknown algorithm .*; there are auto, lossless, {', '.join(ALGORITHMS)}"
        ):
            choose(problem(), argument, "auto", ())

    @pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE_SCATTER])
    def test_large_messages_of_flag_cells_go_to_the_library(self, op: Op) -> None:
        topology = make_topology("triton", max_bytes=512 << 20)
        for dtype, reduction in (("int32", "max"), ("float64", "sum"), ("float32", "max")):
            for nbytes in (4 << 20, (4 << 20) + 64):
                case = problem(op, nbytes, dtype, topology, reduction=reduction)
                choice = choose(case, "auto", "auto", ())
                by_library = nbytes > 4 << 20 and dtype != "float32"
                assert (choice.candidate.algorithm == "vendor") == by_library, (dtype, nbytes)
                assert ("twice the bytes" in choice.reason) == by_library
                assert choose(case, "one_shot", "auto", ()).candidate.algorithm == "one_shot"

    def test_a_divided_message_of_flag_cells_needs_four_times_the_room(self) -> None:
        topology = make_topology("triton", max_bytes=512 << 20)
        assert capacity(problem(nbytes=1 << 20, dtype="int64", topology=topology), "two_shot") == 4 << 20
        assert capacity(problem(nbytes=1 << 20, reduction="max", topology=topology), "two_shot") == 1 << 20
        assert capacity(problem(nbytes=1 << 30, dtype="int64", topology=topology), "two_shot") == 512 << 20

    def test_reductions_are_in_rank_order_on_any_nodes(self) -> None:
        topology = make_topology("triton", 4, nodes=4)
        assert not keeps_bits(problem(topology=topology), "one_shot"), "sums in float32 have a tree"
        for dtype, reduction in (("float64", "sum"), ("float32", "avg"), ("int32", "max")):
            case = problem(dtype=dtype, reduction=reduction, topology=topology)
            assert keeps_bits(case, "one_shot")
            assert choose(case, "auto", "auto", ()).source == "cost model"

    def test_reason_for_the_vendor(self) -> None:
        choice = choose(problem(dtype="float8_e5m2"), "auto", "auto", ())
        assert (choice.source, choice.candidate.algorithm) == ("legality", "vendor")
        assert choice.reason == "native kernels have no sum of float8_e5m2"
        choice = choose(problem(topology=make_topology("", unsupported_reason="several hosts")), "auto", "auto", ())
        assert choice.reason == "several hosts"


class TestByName:
    """Sums of nodes in 16 bits serve only calls that name them."""

    @staticmethod
    def case(dtype: str = "bfloat16", kernels: str = "compiled") -> CollectiveProblem:
        topology = make_topology(kernels, 1, allow_fp8=True, nodes=8)
        return problem(nbytes=64 << 20, dtype=dtype, topology=topology)

    @pytest.mark.parametrize("kernels", ["triton", "interpreter", "compiled"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_naming_it_selects_it(self, dtype: str, kernels: str) -> None:
        case = self.case(dtype, kernels)
        for argument, environment in (("nvrar_16bit", "auto"), ("auto", "nvrar_16bit")):
            assert choose(case, argument, environment, ()).candidate.algorithm == "nvrar_16bit"
        assert not keeps_bits(case, "nvrar_16bit")

    @pytest.mark.parametrize("kernels", ["triton", "interpreter", "compiled"])
    def test_float32_is_refused(self, kernels: str) -> None:
        why = "it sends sums of nodes in the 16 bits of float16 or bfloat16, and this is float32"
        with pytest.raises(
            ConfigError, match=f"nvrar_16bit cannot serve this all_reduce of float32, 64M?i?B?.*: {why}"
        ):
            choose(self.case("float32", kernels), "nvrar_16bit", "auto", ())
        choice = choose(self.case("float32", kernels), "auto", "nvrar_16bit", ())
        assert choice.candidate.algorithm != "nvrar_16bit"
        assert why in choice.reason

    def test_auto_takes_it_from_no_table(self) -> None:
        named = table([None, "nvrar_16bit", None], dtype="bfloat16", name="short.json")
        choice = choose(self.case(), "auto", "auto", (("user table", named),))
        assert choice.source == "cost model"
        assert "short.json has nvrar_16bit, but it serves only calls that name it" in choice.reason

    def test_the_model_says_that_it_might_do(self) -> None:
        choice = choose(self.case(), "auto", "auto", ())
        assert choice.candidate.algorithm == "nvrar_two_shot"
        assert "; nvrar_16bit might do with " in choice.reason
        assert choice.reason.endswith("but it serves only calls that name it")


class TestFp8:
    """FP8 transport is for callers who name it, and for ``auto`` where it is allowed."""

    NBYTES = 64 << 20
    NAMES = table([None, "two_shot_fp8", None], name="fast.json")

    def case(self, allow_fp8: bool, nbytes: int = NBYTES, dtype: str = "float32") -> CollectiveProblem:
        return problem(nbytes=nbytes, dtype=dtype, topology=make_topology("triton", 4, 64 << 20, allow_fp8=allow_fp8))

    @pytest.mark.parametrize("allow_fp8", [False, True])
    def test_naming_it_selects_it(self, allow_fp8: bool) -> None:
        named = choose(self.case(allow_fp8), "two_shot_fp8", "auto", ())
        assert (named.source, named.candidate.algorithm) == ("argument", "two_shot_fp8")
        named = choose(self.case(allow_fp8), "auto", "two_shot_fp8", (("user table", table([None, "ring", None])),))
        assert (named.source, named.candidate.algorithm) == ("environment", "two_shot_fp8")

    @given(problems.filter(lambda case: not case.topology.allow_fp8), st.lists(st.sampled_from(ALGORITHMS)))
    def test_auto_never_takes_it_unless_allowed(self, case: CollectiveProblem, rows: list[str]) -> None:
        tables = [
            ("user table", table([None, name, None], op=case.op.label, dtype=case.dtype))
            for name in rows
            if case.dtype in wire.DTYPES
        ]
        assert choose(case, "auto", "auto", tables).candidate.algorithm != "two_shot_fp8"

    def test_auto_takes_it_where_it_is_allowed_and_named_by_a_table(self) -> None:
        choice = choose(self.case(True), "auto", "auto", (("user table", self.NAMES),))
        assert (choice.source, choice.candidate.algorithm) == ("user table", "two_shot_fp8")
        assert choice.reason == "fast.json: two_shot_fp8 for any size"

    @pytest.mark.parametrize("dtype", wire.REDUCIBLE)
    def test_auto_takes_it_where_it_is_allowed_and_the_model_finds_it_faster(self, dtype: str) -> None:
        choice = choose(self.case(True, dtype=dtype), "auto", "auto", ())
        assert (choice.source, choice.candidate.algorithm) == ("cost model", "two_shot_fp8")
        small = choose(self.case(True, 1024, dtype), "auto", "auto", ())
        assert small.candidate.algorithm == "one_shot"

    @pytest.mark.parametrize("tables", [(), (("user table", NAMES),)], ids=["model", "table"])
    def test_lossless_does_not_take_it_even_where_it_is_allowed(self, tables: tuple[tuple[str, Table], ...]) -> None:
        choice = choose(self.case(True), "lossless", "auto", tables)
        assert choice.candidate.algorithm == "two_shot"
        assert "but it loses precision, and the call is to be lossless" in choice.reason
        named = choose(self.case(True), "lossless", "two_shot_fp8", tables)
        assert (named.source, named.candidate.algorithm) == ("environment", "two_shot_fp8")

    def test_the_reason_says_when_it_was_left_out(self) -> None:
        choice = choose(self.case(False), "auto", "auto", (("user table", self.NAMES),))
        assert choice.candidate.algorithm == "two_shot"
        assert choice.source == "cost model"
        assert "fast.json has two_shot_fp8, but allow_fp8 is not set" in choice.reason
        time_us = predicted_us("all_reduce", "two_shot_fp8", self.NBYTES, 4, NVLINK4, 4)
        assert f"; two_shot_fp8 might do with {time_us:.1f}, but allow_fp8 is not set" in choice.reason
        small = choose(self.case(False, 1024), "auto", "auto", ())
        assert "fp8" not in small.reason, "it would not have been taken"

    @pytest.mark.parametrize(("dtype", "times"), [("float32", 3.8), ("bfloat16", 1.9), ("float16", 1.9)])
    def test_messages_beyond_the_workspace_fit_if_their_bytes_do(self, dtype: str, times: float) -> None:
        most = max(
            n for n in range(1 << 20, 5 << 20, 4096) if not unsupported_reason(self.sized(n, dtype), "two_shot_fp8")
        )
        assert times < most / (1 << 20) < times + 0.1
        message = unsupported_reason(self.sized(most + 4096, dtype), "two_shot_fp8")
        assert message.startswith("it would take ")
        assert message.endswith(" (max_bytes)")

    def sized(self, nbytes: int, dtype: str) -> CollectiveProblem:
        return problem(nbytes=nbytes, dtype=dtype, topology=make_topology("triton", max_bytes=1 << 20))

    @given(st.integers(0, 1 << 22), st.integers(1, 1 << 22), st.integers(2, 8), st.sampled_from(wire.REDUCIBLE))
    def test_messages_up_to_max_bytes_fit(self, nbytes: int, max_bytes: int, world_size: int, dtype: str) -> None:
        """The slots of short messages consist mostly of scales and padding."""
        topology = make_topology("interpreter", world_size, max(nbytes, max_bytes))
        assert unsupported_reason(problem(nbytes=nbytes, dtype=dtype, topology=topology), "two_shot_fp8") == ""

    def test_unsupported_calls(self) -> None:
        for case, message in (
            (problem(dtype="int32"), _NOT_A_SUM + "sum of int32"),
            (problem(reduction="max"), _NOT_A_SUM + "max of float32"),
            (problem(Op.REDUCE_SCATTER), "there is no two_shot_fp8 reduce_scatter; there is one_shot, ring"),
        ):
            assert unsupported_reason(case, "two_shot_fp8") == message

    @given(st.integers(0, 512 << 20), st.integers(2, 8), st.sampled_from(wire.REDUCIBLE))
    def test_launch_depends_on_the_bytes_sent(self, nbytes: int, world_size: int, dtype: str) -> None:
        topology = make_topology("triton", world_size, 512 << 20)
        shape = launch_shape(problem(nbytes=nbytes, dtype=dtype, topology=topology), "two_shot_fp8")
        sent = nbytes / wire.DTYPES[dtype] / world_size
        assert shape.programs == 1 or (shape.programs - 1) * 4 * shape.block_words < sent
        if sent >= 1 << 20:
            assert shape.num_warps == (8 if world_size <= 4 else 4), "registers of as many slots"


class TestMultimem:
    """Sums in the switch need a multicast address and a caller who names them."""

    SWITCHED = problem(nbytes=1 << 20, topology=make_topology("triton", multicast=True))

    def test_needs_a_multicast_address_and_a_sum_of_floats(self) -> None:
        assert unsupported_reason(self.SWITCHED, "multimem") == ""
        assert (
            unsupported_reason(problem(topology=make_topology("triton")), "multimem")
            == "the ranks share no multicast address"
        )
        switch = make_topology("triton", multicast=True)
        for case, message in (
            (
                problem(dtype="int32", topology=switch),
                _NOT_A_SUM + "sum of int32",
            ),
            (problem(reduction="max", topology=switch), _NOT_A_SUM + "max of float32"),
            (problem(Op.BROADCAST, topology=switch), "there is no multimem broadcast; there is one_shot"),
        ):
            assert unsupported_reason(case, "multimem") == message
        assert unsupported_reason(problem(nbytes=1 << 24, topology=switch), "multimem") == "", "it passes in pieces"

    @given(st.integers(0, 512 << 20), st.integers(2, 8))
    def test_the_model_never_takes_it(self, nbytes: int, world_size: int) -> None:
        case = problem(nbytes=nbytes, topology=make_topology("triton", world_size, 512 << 20, multicast=True))
        assert "multimem" in [candidate.algorithm for candidate in candidates(case)]
        assert choose(case, "auto", "auto", ()).candidate.algorithm != "multimem"

    def test_naming_it_selects_it(self) -> None:
        tables = (("user table", table([None, "multimem", None])),)
        sources = [
            choose(self.SWITCHED, "multimem", "auto", ()),
            choose(self.SWITCHED, "auto", "multimem", ()),
            choose(self.SWITCHED, "auto", "auto", tables),
        ]
        assert [choice.source for choice in sources] == ["argument", "environment", "user table"]
        assert {choice.candidate.algorithm for choice in sources} == {"multimem"}
        assert choose(problem(), "auto", "multimem", tables).source == "cost model", "no multicast address here"


class TestLaunch:
    @given(problems, st.sampled_from(["one_shot", "two_shot", "ring", "multimem"]))
    def test_kernels_accept_the_launch(self, case: CollectiveProblem, algorithm: str) -> None:
        assume(case.op in registered()[algorithm].forms)
        shape = launch_shape(case, algorithm)
        if case.topology.transport.name == "compiled":
            assert shape == LaunchShape(programs=0, block_words=0, num_warps=0, chunk_bytes=0)
            return
        assert launch_unsupported_reason(case.topology.transport, registered()[algorithm], shape) == ""
        assert shape.block_words & (shape.block_words - 1) == 0, "Triton's tiles are powers of two"
        assert shape.block_words >= 16
        assert shape.num_warps in (1, 2, 4, 8, 16)

    @given(problems, st.sampled_from(ALGORITHMS))
    def test_tuned_shapes_begin_with_the_default_and_are_legal(self, case: CollectiveProblem, algorithm: str) -> None:
        assume(case.op in registered()[algorithm].forms)
        shapes = launch_shapes(case, algorithm)
        assert shapes[0] == launch_shape(case, algorithm)
        assert len(set(shapes)) == len(shapes)
        for shape in shapes:
            assert launch_unsupported_reason(case.topology.transport, registered()[algorithm], shape) == ""
        if algorithm == "vendor" or case.topology.transport.name == "interpreter":
            assert len(shapes) == 1

    @pytest.mark.parametrize(
        ("shape", "why"),
        [
            (LaunchShape(8, 64, 4), "block_words is at least the threads of a program, 128 in 4 warps, not 64"),
            (LaunchShape(8, 128, 4), ""),
            (LaunchShape(8, 128, 0), "num_warps is a power of two from 1 to 16, not 0"),
            (LaunchShape(8, 128, "1"), "num_warps is a whole number, not '1'"),  # type: ignore[arg-type]
            (LaunchShape(True, 128, 1), "programs is a whole number, not True"),
        ],
    )
    def test_no_call_is_made_with_a_launch_that_kernels_cannot_take(self, shape: LaunchShape, why: str) -> None:
        """An argument and the description of an algorithm are held to the same rules as a table."""
        form = Form(work=lambda nbytes, world_size, itemsize: Work(1, 1, 1), triton="a:b", launch=lambda _: shape)
        own = Algorithm(name="own", label="own", summary="", forms={Op.ALL_REDUCE: form})
        topology = dataclasses.replace(make_topology("triton"), algorithms=Algorithms((*registered().members, own)))
        resolver = Resolver(topology, "auto", (), (), None, True)
        case = problem(topology=topology)
        for algorithm, launch in (("two_shot", shape), ("own", None)):
            if why:
                with pytest.raises(ConfigError, match=f"all_reduce by {algorithm} cannot be launched so: {why}"):
                    resolver.resolve(case, algorithm, False, launch)
            else:
                assert resolver.resolve(case, algorithm, False, launch).plan.launch == shape

    @pytest.mark.parametrize(
        ("recorded", "said"),
        [
            (None, ""),
            ("0123", "; made by earlier kernels (two_shot); measured in spring"),
            ("", "; the fingerprints of the kernels that made it were not recorded; measured in spring"),
        ],
    )
    def test_explain_says_which_kernels_made_the_table(self, recorded: str | None, said: str) -> None:
        if recorded is None:
            recorded = fingerprints.of_operation(registered(), Op.ALL_REDUCE, COMPILED)["two_shot"]
        kernels = {("eager", "all_reduce", "float32"): {"two_shot": recorded}} if recorded else {}
        made = dataclasses.replace(
            table([None, "two_shot", None]), kernels=kernels, earlier_kernels="measured in spring"
        )
        resolver = Resolver(make_topology(), "auto", (("SHOTCAST_TABLE", made),), (), None, False)
        explanation = resolver.explain(torch.ones(64), "all_reduce", "auto", "sum", "eager")
        assert explanation.reason == f"t: two_shot for any size{said}"

    def test_tables_of_one_name_are_told_apart(self) -> None:
        """A user's table may be called like the packaged one that it was made of."""
        other, own = (
            table([None, "two_shot", None], dtype=dtype, name="same.json") for dtype in ("float16", "float32")
        )
        own = dataclasses.replace(own, kernels={("eager", "all_reduce", "float32"): {"two_shot": "of old"}})
        tables = ("user table", other), ("packaged table", own)
        resolver = Resolver(make_topology(), "auto", tables, (), None, False)
        explanation = resolver.explain(torch.ones(256), "all_reduce", "auto", "sum", "eager")
        assert explanation.source == "packaged table"
        assert "made by earlier kernels (two_shot)" in explanation.reason

    def test_more_programs_than_tiles_are_not_tried(self) -> None:
        for shape in launch_shapes(problem(nbytes=64 << 10, topology=make_topology("triton")), "two_shot"):
            assert shape.programs <= -(-(16 << 10) // 4 // shape.block_words)

    def test_a_large_message_has_shapes_of_every_kind(self) -> None:
        shapes = launch_shapes(
            problem(nbytes=64 << 20, topology=make_topology("triton", max_bytes=64 << 20)), "two_shot"
        )
        tiles = {(shape.block_words, shape.num_warps) for shape in shapes}
        assert tiles == {(128, 1), (256, 1), (256, 2), (512, 4), (1024, 4), (1024, 8)}
        words = (64 << 20) // 4 // 4
        assert {shape.programs for shape in shapes} == {1024} | {words // block for block, _ in tiles}

    @pytest.mark.parametrize("name", ["one_shot", "two_shot"])
    def test_fused_kernels_have_one_launch(self, name: str) -> None:
        fused = dataclasses.replace(
            problem(Op.ALL_REDUCE_RMS_NORM, nbytes=1 << 20, topology=make_topology("triton")), norm=Norm(4096)
        )
        assert launch_shapes(fused, name) == (launch_shape(fused, name),)

    def test_chunks_up_to_the_message(self) -> None:
        chunks = [shape.chunk_bytes for shape in launch_shapes(problem(nbytes=100_000), "one_shot")]
        assert chunks == [0, 32 << 10, 64 << 10, 128 << 10]

    @pytest.mark.parametrize("share", [512 << 10, (512 << 10) - 4])
    def test_larger_tiles_from_half_a_mebibyte_a_rank(self, share: int) -> None:
        case = problem(nbytes=4 * share, topology=make_topology("triton", max_bytes=1 << 28))
        assert launch_shape(case, "two_shot").num_warps == (4 if share == 512 << 10 else 1)

    def test_two_nodes_of_one_rank_have_large_tiles(self) -> None:
        topology = make_topology("triton", 1, 1 << 28, nodes=2)
        assert launch_shape(problem(nbytes=4 << 20, topology=topology), "nvrar") == LaunchShape(1024, 1024, 8)

    @pytest.mark.parametrize("mib", [1, 64])
    @pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER])
    def test_two_ranks_keep_small_tiles(self, op: Op, mib: int) -> None:
        topology = make_topology("triton", 2, max_bytes=1 << 28)
        words = (mib << 20) // 4 // (1 if op is Op.ALL_REDUCE else 2)
        assert launch_shape(problem(op, mib << 20, topology=topology), "one_shot") == LaunchShape(words // 128, 128, 1)

    @pytest.mark.parametrize("op", [Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL])
    def test_large_parts_by_half_the_warps_of_two_shot(self, op: Op) -> None:
        topology = make_topology("triton", max_bytes=1 << 28)
        wanted = LaunchShape(programs=4096, block_words=1024, num_warps=4)
        assert launch_shape(problem(op, 64 << 20, topology=topology), "one_shot") == wanted
        assert launch_shape(problem(nbytes=64 << 20, topology=topology), "two_shot").num_warps == 8


def rows(
    hidden: int,
    op: Op = Op.ALL_REDUCE_RMS_NORM,
    count: int = 4,
    dtype: str = "bfloat16",
    quantize: str = "",
    topology: Topology | None = None,
) -> CollectiveProblem:
    norm = Norm(hidden, quantize)
    nbytes = count * hidden * wire.DTYPES[dtype]
    return CollectiveProblem(op, nbytes, dtype, topology or make_topology("triton", max_bytes=1 << 26), norm=norm)


class TestFused:
    @pytest.mark.parametrize(
        ("case", "message"),
        [
            (rows(1001), "fused kernels take rows of a multiple of 16 bytes, and these have 2002"),
            (rows(4, dtype="float16"), "fused kernels take rows of a multiple of 16 bytes, and these have 8"),
            (rows(0), "fused kernels take rows of a multiple of 16 bytes, and these have 0"),
            (rows(16392), "fused kernels take rows of up to 32 KiB, and these have 32784 B"),
            (rows(64, dtype="int32"), "fused kernels add up float32, float16, bfloat16, and this is int32"),
        ],
    )
    def test_rows_that_no_program_can_hold(self, case: CollectiveProblem, message: str) -> None:
        assert unsupported_reason(case, "one_shot") == unsupported_reason(case, "two_shot") == message
        choice = choose(case, "auto", "auto", ())
        assert (choice.source, choice.candidate.algorithm) == ("legality", "vendor")
        assert choice.reason == f"{message}; so the sum is a call of its own, and the norm follows it"

    def test_rows_at_the_limit(self) -> None:
        for case in (rows(8), rows(16384), rows(8192, dtype="float32")):
            assert unsupported_reason(case, "one_shot") == unsupported_reason(case, "two_shot") == ""

    def test_compiled_ranks_take_any_rows(self) -> None:
        assert unsupported_reason(rows(1001, topology=make_topology()), "two_shot") == ""
        assert unsupported_reason(rows(0, topology=make_topology()), "two_shot") == "rows have no elements"

    def test_plain_rows_serve_a_fused_operation_without_rows(self) -> None:
        plain = table([20, "two_shot", {"programs": 7, "block_words": 64, "num_warps": 1}], [None, "vendor", None])
        fused = table([100, "one_shot", None], op="all_reduce_rms_norm")
        tables = (("user table", plain), ("packaged table", fused))
        small, large = problem(Op.ALL_REDUCE_RMS_NORM, 16), problem(Op.ALL_REDUCE_RMS_NORM, 64)
        choice = choose(small, "auto", "auto", tables)
        assert (choice.source, choice.candidate.algorithm) == ("user table", "two_shot")
        assert choice.candidate.launch == launch_shape(small, "two_shot"), "not that of another kernel"
        assert choose(large, "auto", "auto", tables).candidate.algorithm == "vendor"
        assert choose(large, "auto", "auto", tables[1:]).candidate.algorithm == "one_shot"

    def test_rows_of_the_other_norm_serve_before_plain_ones(self) -> None:
        rows_of = {
            ("all_reduce", "float32"): [[None, "vendor", None]],
            ("all_reduce_rms_norm", "float32"): [[None, "two_shot", None]],
        }
        listed = {key[0]: table(*lines, op=key[0]) for key, lines in rows_of.items()}
        layer = problem(Op.ALL_REDUCE_LAYER_NORM, 64)
        for names, algorithm in ((("all_reduce_rms_norm", "all_reduce"), "two_shot"), (("all_reduce",), "vendor")):
            tables = tuple((name, listed[name]) for name in names)
            assert choose(layer, "auto", "auto", tables).candidate.algorithm == algorithm

    @given(st.integers(1, 2048), st.integers(0, 4096), st.sampled_from(["bfloat16", "float32"]), st.integers(2, 8))
    def test_a_fused_all_reduce_has_a_warp_for_each_tile(
        self, eighths: int, count: int, dtype: str, world_size: int
    ) -> None:
        case = rows(8 * eighths, count=count, dtype=dtype, topology=make_topology("triton", world_size, 1 << 28))
        row_words = 8 * eighths * wire.DTYPES[dtype] // 4
        padded = -(-row_words // 128) * 128
        for candidate in candidates(case)[:-1]:
            shape = candidate.launch
            assert shape.num_warps == 1
            one_shot = candidate.algorithm == "one_shot"
            tiles = count * -(-row_words // shape.block_words)
            if shape.block_words > 128:  # they pad no row further
                assert (shape.block_words, padded % 256) == (256, 0)
                assert world_size == 2
            else:
                assert shape.block_words == 128 or row_words <= shape.block_words < max(2 * row_words, 33)
                assert world_size > 2 or row_words <= 128 or padded % 256, "larger tiles would have been possible"
            sharing = 1 if one_shot else world_size
            assert shape.programs * sharing >= tiles > (shape.programs - 1) * sharing or tiles == 0
            slots = shape.programs * shape.block_words * 4 * world_size * (1 if one_shot else 2)
            assert slots <= 2 << 28


def test_text_of_an_explanation() -> None:
    compiled = LaunchShape(programs=0, block_words=0, num_warps=0)
    message = Explanation("all_reduce", 64, "float32", "ring", compiled, "cost model", "least", ("ring", "vendor"))
    assert str(message) == (
        "all_reduce of 64 bytes, float32: ring (chunks of default bytes), by cost model: least; legal: ring, vendor"
    )
    kernel = LaunchShape(programs=8, block_words=128, num_warps=1)
    message = Explanation("all_reduce", 64, "float32", "ring", kernel, "argument", "named", ("ring",))
    assert "ring (8 programs of 1 warps, 128 words a tile), by argument: named" in str(message)
    vendor = Explanation("all_reduce", 64, "int8", "vendor", compiled, "legality", "why", ("vendor",), by_library=True)
    assert "int8: vendor, by legality: why" in str(vendor)


class TestSharedCommunicators:
    """Grids of communicators that are not exclusive leave room for those of others."""

    @given(problems)
    def test_no_launch_holds_more_than_a_third_of_the_gpu(self, case: CollectiveProblem) -> None:
        shared = dataclasses.replace(case, topology=dataclasses.replace(case.topology, exclusive=False))
        alone = {one.algorithm: one.launch for one in candidates(case)}
        for found in candidates(shared):
            algorithm = case.topology.algorithms[found.algorithm]
            launch, whole = found.launch, alone[found.algorithm]
            if algorithm.forms[case.op].shared_from:  # its grids wait for nobody
                continue
            if case.topology.transport.name != "triton" or algorithm.library or algorithm.keeps_to_sms:
                assert launch == whole
                continue
            assert launch.programs * launch.num_warps <= 1024
            if whole.programs * whole.num_warps <= 1024:
                assert launch == whole
            for other in launch_shapes(shared, found.algorithm):
                assert other.programs * other.num_warps <= 1024

    @pytest.mark.parametrize(
        ("world_size", "exclusive", "mib", "launches"),
        [
            (2, True, 1, [(512, 256)]),
            (2, False, 1, [(512, 256)]),
            (2, False, 2, []),
            (2, True, 2, [(1024, 256)]),
            (4, True, 2, [(1024, 128)]),
            (4, False, 2, [(1024, 128)]),  # larger tiles would take more registers in all
        ],
    )
    def test_fused_tiles_leave_registers(
        self, world_size: int, exclusive: bool, mib: int, launches: list[tuple[int, int]]
    ) -> None:
        topology = make_topology("triton", world_size, 64 << 20, exclusive=exclusive)
        case = dataclasses.replace(
            problem(Op.ALL_REDUCE_RMS_NORM, mib << 20, "bfloat16", topology), norm=wire.Norm(8192)
        )
        found = [one.launch for one in candidates(case) if one.algorithm == "two_shot"]
        assert [(launch.programs, launch.block_words) for launch in found] == launches

    @pytest.mark.parametrize(
        ("kib", "launch"),
        [
            (512, LaunchShape(1024, 128, 1)),
            (1024, LaunchShape(1024, 256, 1)),  # half the programs are enough
            (1025, LaunchShape(128, 2048, 8)),
        ],
    )
    def test_grids_of_two_ranks_leave_warps(self, kib: int, launch: LaunchShape) -> None:
        topology = make_topology("triton", 2, 64 << 20, exclusive=False)
        assert launch_shape(problem(nbytes=kib << 10, dtype="bfloat16", topology=topology), "one_shot") == launch

    @pytest.mark.parametrize("tabled", [False, True])
    @pytest.mark.parametrize(
        ("kib", "exclusive", "algorithm"),
        [
            (1024, False, "one_shot"),
            (1025, False, "two_shot"),  # with fewer programs, it is faster
            (1025, True, "one_shot"),
        ],
    )
    def test_one_shot_of_two_ranks(self, kib: int, exclusive: bool, algorithm: str, tabled: bool) -> None:
        topology = make_topology("triton", 2, 64 << 20, exclusive=exclusive)
        case = problem(nbytes=kib << 10, dtype="bfloat16", topology=topology)
        tables = [("user table", table([None, "one_shot", None], dtype="bfloat16"))]
        choice = choose(case, "auto", "auto", tables if tabled else ())
        assert choice.candidate.algorithm == algorithm
        skipped = "one_shot, but other communicators share the GPU, where it serves up to 1 MiB"
        assert (skipped in choice.reason) == (tabled and algorithm == "two_shot")
        assert choose(case, "one_shot", "auto", tables).candidate.algorithm == "one_shot"

    def test_shared_rows_of_two_ranks_by_one_shot(self) -> None:
        """Up to 64 rows of 16 KiB: tiles are large, as twice as many small ones would be too many programs."""
        topology = make_topology("triton", 2, 64 << 20, exclusive=False)
        launch = launch_shape(rows(8192, count=64, topology=topology), "one_shot")
        assert launch == LaunchShape(1024, 256, 1)
        assert unsupported_reason(rows(8192, count=64, topology=topology), "one_shot") == ""
        assert "2080 warps" in unsupported_reason(rows(8192, count=65, topology=topology), "one_shot")

    @pytest.mark.parametrize(("count", "block"), [(1024, 256), (1025, 128)])
    def test_padded_rows_count_as_large_tiles(self, count: int, block: int) -> None:
        topology = make_topology("triton", 2, 64 << 20, exclusive=False)
        padded = rows(2 * 132, count=count, topology=topology)  # 132 words a row, in a tile of 256 or two of 128
        assert launch_shape(padded, "two_shot").block_words == block

    @pytest.mark.parametrize("ranks", [4, 8])
    def test_more_ranks_keep_their_registers(self, ranks: int) -> None:
        topology = make_topology("triton", ranks, 64 << 20, exclusive=False)
        case = problem(nbytes=64 << 20, dtype="bfloat16", topology=topology)
        for shape in (LaunchShape(2048, 128, 1), LaunchShape(1025, 1024, 1)):
            assert fitted(case, "two_shot", shape) == LaunchShape(128, 512, 4)

    def test_a_tuned_launch_that_would_fill_the_gpu_is_replaced(self) -> None:
        topology = make_topology("triton", 2, 64 << 20, exclusive=False)
        case = problem(nbytes=64 << 20, dtype="bfloat16", topology=topology)
        assert fitted(case, "two_shot", LaunchShape(8192, 1024, 8)) == LaunchShape(128, 2048, 8)
        assert fitted(case, "two_shot", LaunchShape(128, 1024, 8)) == LaunchShape(128, 1024, 8)

    def test_a_fused_call_that_would_fill_the_gpu_says_so(self) -> None:
        topology = make_topology("triton", 2, 64 << 20, exclusive=False)
        case = dataclasses.replace(
            problem(Op.ALL_REDUCE_RMS_NORM, 8 << 20, "bfloat16", topology), norm=wire.Norm(hidden=4096)
        )
        assert "the communicator is not exclusive" in unsupported_reason(case, "one_shot")
        alone = dataclasses.replace(case, topology=dataclasses.replace(topology, exclusive=True))
        assert "exclusive" not in unsupported_reason(alone, "one_shot")

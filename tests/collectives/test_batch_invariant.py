"""Batch-invariant mode: a sum has the same bits whatever the size of the message around it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import batch_invariant_targets as targets
import pytest
from bad_input_targets import construction_error
from hypothesis import given
from hypothesis import strategies as st
from test_select import arguments, make_topology, names, problems, table

import shared_ranks
import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast import wire
from shotcast.collectives.algorithm import FUSED, REDUCING, CollectiveProblem
from shotcast.collectives.choice.candidates import keeps_bits
from shotcast.collectives.choice.select import choose
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.wire import Op


def _in_mode(problem: CollectiveProblem) -> CollectiveProblem:
    return dataclasses.replace(problem, topology=dataclasses.replace(problem.topology, batch_invariant=True))


sums = st.builds(
    lambda one, op, dtype: dataclasses.replace(one, op=op, dtype=dtype, reduction="sum", norm=None),
    problems,
    st.sampled_from([Op.ALL_REDUCE, Op.REDUCE_SCATTER]),
    st.sampled_from(wire.REDUCIBLE),
)
"""Problems that every algorithm may serve."""


class TestChoice:
    @given(problems | sums, arguments, names, st.sampled_from(["ring", "vendor", "two_shot_fp8", "two_shot"]))
    def test_no_sum_leaves_the_contract(self, problem: CollectiveProblem, argument: str, named: str, row: str) -> None:
        problem, tables = _in_mode(problem), ()
        if problem.op is Op.ALL_REDUCE and problem.dtype in wire.REDUCIBLE:
            tables = (("user table", table([None, row, None], dtype=problem.dtype)),)
        try:
            choice = choose(problem, argument, named, tables)
        except (ConfigError, UnsupportedError):
            return
        name = choice.candidate.algorithm
        if problem.op in REDUCING:
            apart = problem.op in FUSED and name == "vendor"  # the sum is a call of its own, and a problem of its own
            assert apart or (name != "vendor" and keeps_bits(problem, name))

    @given(problems)
    def test_what_is_refused_does_not_depend_on_the_size_of_sums(self, problem: CollectiveProblem) -> None:
        """An all-reduce of the dtypes of models is served at every size, or, without native kernels, at none."""
        problem = dataclasses.replace(_in_mode(problem), op=Op.ALL_REDUCE, dtype="bfloat16", reduction="sum", norm=None)
        outcomes = set()
        for nbytes in (2, 4 << 10, problem.nbytes & ~1, 1 << 33):
            try:
                choose(dataclasses.replace(problem, nbytes=nbytes), "auto", "auto", ())
            except UnsupportedError:
                outcomes.add(False)
            else:
                outcomes.add(True)
        assert outcomes == {True}

    @pytest.mark.parametrize("op", [Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER])
    @pytest.mark.parametrize("nbytes", [64, 1 << 31])
    def test_what_is_served_between_cpu_hosts(self, op: Op, nbytes: int) -> None:
        """The list of docs/reference/numerics.md."""
        served = set()
        dtypes, reductions = (
            ("float32", "float16", "bfloat16", "float64", "int32", "bool"),
            ("sum", "max", "prod", "avg"),
        )
        for dtype, reduction in itertools.product(dtypes, reductions):
            problem = CollectiveProblem(op, nbytes, dtype, make_topology("compiled", nodes=2), reduction=reduction)
            try:
                choose(_in_mode(problem), "auto", "auto", ())
            except UnsupportedError:
                continue
            served.add((dtype, reduction))
        whole = {(dtype, reduction) for dtype in ("int32", "bool") for reduction in ("sum", "max", "prod")}
        floats = {(dtype, reduction) for dtype in wire.REDUCIBLE for reduction in ("sum", "max")} | {("float64", "max")}
        assert served == (set() if op is Op.REDUCE_SCATTER else whole | floats)

    @given(problems)
    def test_copies_are_those_without_the_mode(self, problem: CollectiveProblem) -> None:
        if problem.op not in REDUCING:
            assert choose(_in_mode(problem), "auto", "auto", ()) == choose(problem, "auto", "auto", ())


def _tempting(path: Path, world_size: int) -> dict[str, str]:
    """Return the variable that names a table which has other algorithms for other sizes."""
    rows = [[512, "one_shot", None], [8192, "ring", None], [None, "vendor", None]]
    dtypes = dict.fromkeys(wire.REDUCIBLE, rows) | {"float64": [[512, "two_shot", None], [None, "vendor", None]]}
    entries = {"eager": {"all_reduce": dtypes}}
    path.write_text(json.dumps({"format": 3, "part": "cpu", "world_size": world_size, "entries": entries}))
    return {"SHOTCAST_TABLE": str(path)}


ANY_DTYPE = [*wire.REDUCIBLE, "float64", "int32", "bool", "complex64"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("world_size", "max_bytes"),
    [(2, 1 << 20), (3, 1 << 12), *(pytest.param(n, 1 << 16, marks=pytest.mark.full) for n in (4, 8))],
)
def test_bits_do_not_depend_on_the_size(world_size: int, max_bytes: int, tmp_path: Path) -> None:
    environment = _tempting(tmp_path / "table.json", world_size)
    call = (targets.parts_of_messages, world_size, "cpu", ANY_DTYPE, 30_011, 12)
    assert shotcast.spawn(*call, True, max_bytes, timeout_s=300, env=environment) == [0] * world_size


def test_without_the_mode_they_may(tmp_path: Path) -> None:
    environment = _tempting(tmp_path / "table.json", 3)
    call = (targets.parts_of_messages, 3, "cpu", ["float32", "bfloat16"], 30_011, 12)
    others = shotcast.spawn(*call, False, 1 << 20, timeout_s=300, env=environment)
    assert min(others) > 0


@pytest.mark.full
def test_kernels_of_gpus_in_the_interpreter() -> None:
    call = (targets.parts_of_messages, 3, "cpu", ["bfloat16"], 1999, 3, True, 1 << 14)
    assert interpret(*call, env=GPU_COLLECTIVES) == [0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2])
def test_kernels_of_gpus(world_size: int) -> None:
    call = (targets.parts_of_messages, world_size, "cuda", ANY_DTYPE, 9_000_011, 12)
    assert shotcast.spawn(*call, True, 8 << 20, timeout_s=300) == [0] * world_size


def test_other_operations() -> None:
    shared_ranks.run(targets.other_operations, 3, "cpu")


def test_what_is_refused_and_explained() -> None:
    for errors, explained, of_the_half in shotcast.spawn(targets.refused, 3, timeout_s=300):
        ring, vendor, fp8, unserved, unexplained = errors
        for error in (ring, fp8):
            assert "in batch-invariant mode sums have the bits of the numerics contract, and its are others" in error
        assert "the vendor library reduces nothing" in vendor
        for error, dtype in ((unserved, "float8_e4m3fn"), (unexplained, "float8_e5m2")):
            assert f"and not this all_reduce (sum) of {dtype}, 64 B: native kernels have no sum of {dtype}" in error
        assert "float32, batch-invariant" in explained
        assert "float32, batch-invariant" in of_the_half


def test_one_rank_has_no_order() -> None:
    shotcast.spawn(targets.alone, 1, timeout_s=300)


def _on_all(**settings: Any) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(3), settings)


class TestConstruction:
    @staticmethod
    def error_of(*args: Any) -> str:
        first, *others = shared_ranks.run(construction_error, 3, *args)
        assert others == [first] * 2
        return first

    def test_the_environment_sets_it(self) -> None:
        environment = {"SHOTCAST_BATCH_INVARIANT": "1"}
        assert "batch-invariant" in shotcast.spawn(targets.of_the_environment, 2, env=environment, timeout_s=300)[0]

    def test_ranks_agree_on_it(self) -> None:
        message = self.error_of({}, {1: {"batch_invariant": True}})
        assert message == (
            "the ranks do not agree on batch_invariant (SHOTCAST_BATCH_INVARIANT): "
            "rank 0: False, rank 1: True, rank 2: False"
        )

    def test_what_contradicts_it(self) -> None:
        every = _on_all(batch_invariant=True)
        assert "SHOTCAST_ALGORITHM=ring, whose sums have other bits" in self.error_of(
            _on_all(SHOTCAST_ALGORITHM="ring"), every
        )
        assert self.error_of(_on_all(SHOTCAST_ALGORITHM="two_shot"), every) == ""
        both = _on_all(batch_invariant=True, allow_fp8=True)
        assert "batch_invariant and allow_fp8 exclude each other" in self.error_of({}, both)
        number = _on_all(batch_invariant=1)
        assert self.error_of({}, number) == "batch_invariant is True, False or None, not 1"

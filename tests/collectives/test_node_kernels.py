"""All-reduce over nodes by the GPUs' kernels, which the interpreter runs on ranks of logical nodes in shared memory."""

from __future__ import annotations

import itertools
import random
from typing import Any

import fused_targets
import pytest
from fused_targets import Case as Rows
from interpreter_targets import with_late_programs
from node_kernel_targets import KINDS, ROUNDED, changing_sizes, failures, in_pieces, values, wrapping_epochs

import shotcast
from quick_interpreter import GPU_COLLECTIVES, interpret
from shotcast.transport.triton.layout import WorkspaceLayout, network_slots
from shotcast.wire import MAX_WORLD_SIZE, Op

FLOATS = ("float32", "float16", "bfloat16")
COUNTS = (0, 1, 5, 64, 333, 2051)
Case = tuple[str, str, int, int, int]


def interpreted(fn: Any, nodes: int, local: int, *args: Any, timeout_s: float = 500, **kwargs: Any) -> list[Any]:
    return interpret(fn, nodes * local, *args, timeout_s=timeout_s, env=GPU_COLLECTIVES, **kwargs)


def cases(nodes: int, local: int, each: int) -> list[Case]:
    """Return calls of all kinds and dtypes, ``each`` of every combination, with sizes, shifts and programs drawn."""
    rng = random.Random(nodes * 10 + local)
    drawn = [
        (kind, dtype, rng.choice(COUNTS), rng.randrange(2), rng.randrange(1, 4))
        for kind, dtype, _ in itertools.product((*KINDS, *ROUNDED), FLOATS, range(each))
        if kind in KINDS or dtype != "float32"
    ]
    rng.shuffle(drawn)
    return drawn


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "local", "each"),
    [
        (3, 1, 1),
        *(
            pytest.param(nodes, local, 6, marks=pytest.mark.full)
            for nodes, local in ((1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (5, 1), (6, 1))
        ),
        *(pytest.param(nodes, local, 2, marks=pytest.mark.full) for nodes, local in ((7, 1), (8, 1), (4, 2), (2, 4))),
    ],
)
def test_sums_are_those_of_the_tree(nodes: int, local: int, each: int) -> None:
    """Bit for bit, and the same on all ranks, whatever ranks and programs are late."""
    made = cases(nodes, local, each)
    assert interpreted(with_late_programs, nodes, local, values, nodes, made) == [len(made)] * (nodes * local)


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2)])
def test_calls_that_clear_their_slots_themselves(nodes: int, local: int) -> None:
    made = cases(nodes, local, 4)
    assert interpreted(with_late_programs, nodes, local, values, nodes, made, 256) == [len(made)] * (nodes * local)


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "local", "calls"),
    [
        (2, 1, 25),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 1, 300), (3, 1, 300), (2, 2, 300), (2, 3, 50))),
    ],
)
def test_sizes_and_kinds_may_change_from_call_to_call(nodes: int, local: int, calls: int) -> None:
    """Each call clears what the one before has left, though they divide the slots differently."""
    interpreted(with_late_programs, nodes, local, changing_sizes, nodes, calls)


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.full)])
def test_epochs_across_borders(nodes: int, local: int) -> None:
    assert interpreted(wrapping_epochs, nodes, local, nodes)[0] > 1 << 32


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (3, 1), (2, 2)])
def test_messages_beyond_the_slots_between_nodes_pass_in_pieces(nodes: int, local: int) -> None:
    assert min(interpreted(in_pieces, nodes, local, nodes)) > 20


@pytest.mark.parametrize("max_bytes", [16, 4096, 1 << 20, 8 << 20, 512 << 20])
def test_slots_hold_a_piece_of_any_exchange(max_bytes: int) -> None:
    for nodes, local in itertools.product(range(2, 9), range(1, 9)):
        if nodes * local > MAX_WORLD_SIZE:
            continue
        where = WorkspaceLayout.for_messages(max_bytes, nodes=nodes, ranks_per_node=local)
        alone = WorkspaceLayout.for_messages(max_bytes)
        assert 16 <= where.piece_bytes <= max_bytes
        slice_words = -(-where.piece_bytes // (16 * local)) * 4
        between = where.slots_quads - alone.slots_quads
        assert network_slots(nodes) * 2 * slice_words <= between * 4
        assert where.nbytes - alone.nbytes == 3 * between * 16
        assert (where.staging_quads, where.window_quads) == (0, alone.window_quads)
        staged = WorkspaceLayout.for_messages(max_bytes, nodes=nodes, ranks_per_node=local, staged=True)
        assert (staged.staging_quads, staged.window_quads) == (between, 0)
        assert staged.staging_at == staged.slots_at + 3 * staged.slots_quads
        assert staged.nbytes == (staged.staging_at + 2 * between) * 16
        if max_bytes >= 512 << 20:
            assert where.piece_bytes >= 256 << 10, "a launch is short beside the time on the network"


ROWS = [
    Rows("bfloat16", 5, 64),
    Rows("float32", 1, 1000, shift=1),
    Rows("float16", 4, 576),
    Rows("float32", 0, 64),
    Rows("bfloat16", 2, 2048),
    Rows("float32", 7, 64),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "local", "rows", "forms"),
    [
        (2, 1, ROWS[:2], 1),
        *(pytest.param(*shape, ROWS, 5, marks=pytest.mark.full) for shape in ((2, 1), (2, 2), (3, 1), (2, 3), (4, 1))),
    ],
)
def test_norms_in_the_same_kernel(nodes: int, local: int, rows: list[Rows], forms: int) -> None:
    """Every exchange gives the bits of the sum and the norm one after the other."""
    env = {**GPU_COLLECTIVES, "SHOTCAST_RANKS_PER_NODE": str(local)}
    ops = [Op.ALL_REDUCE_RMS_NORM]
    done = interpret(fused_targets.cases, nodes * local, "cpu", rows, ops, 1 << 18, forms, env=env)
    algorithms = 5 if (nodes, local) in ((2, 1), (3, 1)) else 3  # those in one node have the same order here
    assert done == [(1 + algorithms * forms) * len(rows)] * (nodes * local)


@pytest.mark.full
@pytest.mark.timing
@pytest.mark.parametrize(
    ("nodes", "local", "kind", "fault"),
    [
        (3, 1, "nvrar", "late"),
        *(
            pytest.param(*shape, kind, fault, marks=pytest.mark.full)
            for shape, kind in zip(((2, 2), (3, 1), (2, 3), (2, 2), (3, 1)), (*KINDS, *ROUNDED), strict=True)
            for fault in ("late", "silent", "differs")
        ),
    ],
)
def test_faults_are_named(nodes: int, local: int, kind: str, fault: str) -> None:
    """A rank that is late, that sends its header and no data, or that calls something else, by its global number."""
    victim = nodes * local - 1
    for rank, (error, nan) in enumerate(interpreted(failures, nodes, local, nodes, kind, fault, victim)):
        if fault == "differs":
            assert (error.kind, bool(error.ranks)) == (shotcast.wire.MISMATCH, True)
        elif rank != victim:
            assert (error.kind, error.ranks) == (shotcast.wire.TIMEOUT, (victim,)), (rank, error)
            assert nan

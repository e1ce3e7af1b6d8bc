"""The arguments with which the executor launches kernels that multicast or that norm tiles, checked without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cross
from shotcast.collectives.registry import registered
from shotcast.device.triton.launch import Launch
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.transport.triton import executor as executor_module
from shotcast.transport.triton import layout, uneven
from shotcast.transport.triton.binding import KernelContext
from shotcast.transport.triton.executor import TritonExecutor
from shotcast.transport.triton.few_sms import few_sms
from shotcast.transport.triton.layout import WorkspaceLayout
from shotcast.transport.triton.multimem import multimem_all_reduce
from shotcast.wire import CallPlan, LaunchShape, Norm, Op

MAX_BYTES = 1 << 20


def launches(
    shape: LaunchShape,
    algorithm: str = "multimem",
    multicast: bool = True,
    op: Op = Op.ALL_REDUCE,
    nbytes: int = 1 << 16,
    norm: Norm | None = None,
) -> list[tuple[Launch, int]]:
    """Return what a rank of four would launch, each with its first byte, without compiling it."""
    plan = CallPlan(op, algorithm, "bfloat16", nbytes, launch=shape, norm=norm)
    return list(executor_of_four(multicast).bind(plan)._bind(True))


def executor_of_four(multicast: bool = False, nodes: int = 1, max_bytes: int = MAX_BYTES) -> TritonExecutor:
    """Return the executor of rank 1 of four, with no memory."""
    executor: Any = object.__new__(TritonExecutor)
    executor._capacities, executor.capacity, executor._algorithms = (max_bytes,), max_bytes, registered()
    executor._nodes, executor._group, executor._exclusive = nodes, SimpleNamespace(world_size=4), True
    where = WorkspaceLayout.for_messages(max_bytes, nodes=nodes, ranks_per_node=4 // nodes)
    context = KernelContext(
        rank=1,
        world_size=4,
        layout=where,
        own_address=1 << 40,
        addresses=(1 << 40,) * 4,
        peers_address=1 << 41,
        cells_address=1 << 42,
        blocks_address=1 << 44,
        cells_nbytes=24 * layout.row_cell_count(max_bytes),
        multicast=multicast,
        pdl=True,
        native_fp8=True,
        clear_after_read_bytes=layout.CLEAR_AFTER_READ_BYTES,
        header_of=executor._algorithms.header,
        nodes=nodes,
    )
    executor.workspaces = [SimpleNamespace(where=where, context=context)]
    return executor


@pytest.mark.parametrize(("block", "warps", "taken"), [(128, 1, 128), (512, 4, 512), (64, 1, 128), (128, 4, 512)])
def test_every_quad_has_one_thread(block: int, warps: int, taken: int) -> None:
    """Two threads that summed one quad could see two orders of addition, so the ranks would get different bits."""
    ((_, launch, start),) = launches(LaunchShape(8, block, warps))
    assert launch._kernel is multimem_all_reduce
    assert (launch.programs, launch.arguments["SHAPE"].BLOCK, start) == (9, taken, 0)


def test_kernels_that_only_sum_refuse_other_reductions() -> None:
    executor = executor_of_four()
    for algorithm, dtype in (("ring", "float32"), ("two_shot_fp8", "float32")):
        plan = CallPlan(Op.ALL_REDUCE, algorithm, dtype, 1 << 10, reduction="max")
        with pytest.raises(UnsupportedError, match=f"no {algorithm} all_reduce for max"):
            executor.bind(plan)._bind(True)
    for plan in (
        CallPlan(Op.ALL_REDUCE, "two_shot", "int64", 1 << 10, reduction="max"),
        CallPlan(Op.ALL_REDUCE, "vendor", "float8_e5m2", 1 << 10, reduction="max"),  # its headers are exchanged
    ):
        assert len(executor.bind(plan)._bind(True)) == 1


def test_programs_have_a_row_of_flags_each() -> None:
    ((_, launch, _),) = launches(LaunchShape(5000, 128, 1))
    where = WorkspaceLayout.for_messages(MAX_BYTES)
    assert launch.programs == 1 + layout.FLAG_ROWS
    assert launch.arguments["flags_at"] == where.flags_at
    assert where.progress_at - where.flags_at == layout.FLAG_ROWS * layout.FLAG_ROW_QUADS
    assert layout.FLAG_ROW_QUADS * layout.QUAD >= 8 * 8


def test_a_message_beyond_the_workspace_passes_in_pieces() -> None:
    made = launches(LaunchShape(8, 128, 1), nbytes=2 * MAX_BYTES + 32)
    assert [start for *_, start in made] == [0, 699072, 2 * 699072]
    assert [launch.arguments["nbytes"] for _, launch, _ in made] == [699072, 699072, 2 * MAX_BYTES + 32 - 2 * 699072]


@pytest.mark.parametrize(
    ("algorithm", "rows", "cell_stride"),
    [("one_shot", 8, 16), ("one_shot", 32, 16), ("one_shot", 33, 1), ("two_shot", 8, 1)],
)
def test_cells_of_few_rows_are_a_cache_line_apart(algorithm: str, rows: int, cell_stride: int) -> None:
    ((_, launch, _),) = launches(
        LaunchShape(rows * 32, 128, 1), algorithm, False, Op.ALL_REDUCE_RMS_NORM, rows * 16384, Norm(8192)
    )
    cells = launch.arguments["cells"]
    assert (launch.arguments["SHAPE"].ROW_TILES, cells.stride) == (32, cell_stride)
    assert cells.means - cells.squares == cells.largest - cells.means == 8 * layout.row_cell_count(MAX_BYTES)


@pytest.mark.parametrize(
    ("op", "algorithm", "nodes", "sizes"),
    [
        (Op.ALL_REDUCE, "two_shot", 1, (1 << 16, 16)),
        (Op.ALL_REDUCE, "two_shot", 1, (34, 32)),
        (Op.ALL_REDUCE, "nvrar_16bit", 4, (1 << 10, 8 << 20)),
        (Op.ALL_REDUCE, "few_sms", 1, (34, 1 << 20)),
        (Op.ALL_GATHER, "one_shot", 1, (8, 64)),
        (Op.SEND, "one_shot", 1, (2, 4096)),
    ],
)
def test_calls_of_one_form_need_the_same_kernels(op: Op, algorithm: str, nodes: int, sizes: tuple[int, int]) -> None:
    """A second size would otherwise be compiled within a deadline, or be refused in a capture."""
    executor = executor_of_four(nodes=nodes, max_bytes=16 << 20)
    compiled: list[set[str]] = []
    for nbytes in sizes:
        plan = CallPlan(op, algorithm, "bfloat16", nbytes, launch=LaunchShape(1, 512, 4, 4096))
        kernels = set()
        for _, launch, _ in (piece for aligned in (False, True) for piece in executor.bind(plan)._bind(aligned)):
            kernels.add(f"{launch.arguments['SHAPE']} {launch.options}")
        compiled.append(kernels)
        forms = {executor.variants(dataclasses.replace(plan, nbytes=size)) for size in sizes}
    assert (len(forms) == 1) == (compiled[0] == compiled[1])
    assert compiled[0] != compiled[1] or sizes == (1 << 16, 16)


def test_a_call_loads_its_forms_and_those_of_other_sizes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_of_four()
    executor._place_on_host, executor.device, executor._exclusive = (1, 4), torch.device("cpu"), False
    together: list[list[Any]] = []
    monkeypatch.setattr(executor_module, "load_all", lambda launches, *place: together.append([place, *launches]))
    plan = CallPlan(Op.ALL_REDUCE, "two_shot", "float32", 1 << 10, launch=LaunchShape(1, 512, 4))
    larger = dataclasses.replace(plan, nbytes=1 << 20, launch=LaunchShape(8, 1024, 4))
    copied = dataclasses.replace(larger, algorithm="copy_engines", launch=LaunchShape(8, 1024, 4, 1 << 16))
    bound = executor.bind(plan)
    bound.load()
    executor.load(bound, [larger, copied])
    forms, every = together
    names = [(launch._kernel.__name__, launch.arguments["SHAPE"]) for launch in forms[1:]]
    assert [name for name, _ in names] == ["gate", "two_shot_all_reduce"] * 2
    assert [shape.UNIT for name, shape in names if name != "gate"] == [16, 4]
    assert every[:5] == [(1, 4), *forms[1:]]
    rest = [launch._kernel.__name__ for launch in every[5:]]
    assert rest[:2] == ["barrier", "two_shot_all_reduce"]
    assert {*rest[2:]} == {"meeting", "sum_of_copies", "nan_if_stopped"}


def test_a_call_in_pieces_needs_the_kernels_of_its_pieces() -> None:
    """It may be made beside calls that wait, where no kernel can be loaded: those of calls of other sizes are there."""
    executor = executor_of_four(max_bytes=8 << 20)
    plan = CallPlan(Op.ALL_REDUCE, "two_shot", "float32", (20 << 20) + 4, launch=LaunchShape(1, 512, 4, 0))
    others, last = (executor.variants(dataclasses.replace(plan, nbytes=size)) for size in (8 << 20, (8 << 20) - 4))
    assert len({*others, *last}) == 2
    assert set(executor.variants(plan)) == {*others, *last}


def test_pieces_are_as_long_as_each_other_with_the_grid_of_the_call_as_far_as_they_have_tiles() -> None:
    """A short one would clear the slots of a long one, with few programs."""
    executor = executor_of_four(max_bytes=8 << 20)
    for programs in (128, 1 << 14):
        launch = LaunchShape(programs, 512, 4, 0)
        plan = CallPlan(Op.ALL_REDUCE, "two_shot", "float32", (16 << 20) + 4096, launch=launch)
        found = [(piece.nbytes, piece.launch.programs) for piece, _ in executor.pieces(plan)]
        long, short = 5593776, 5593760  # a third each, in quads
        tiles = -(-long // (4 * 512 * 4))  # a rank sums a quarter
        assert found == [(long, min(programs, tiles))] * 2 + [(short, min(programs, tiles))]


def test_the_sizes_of_an_uneven_call_are_arguments_of_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes launch the same kernel, which knows only whether all of them are multiples of 16 bytes."""
    shape = LaunchShape(64, 2048, 16, 1 << 16)
    executor = executor_of_four()
    executor.own_address, executor.device = 1 << 40, torch.device("cpu")
    bound = executor.bind(CallPlan(Op.ALL_TO_ALL_UNEVEN, "one_shot", "bfloat16", 0, launch=shape))
    given: list[tuple[bool, Sequence[int]]] = []
    for aligned in (True, False):
        ((_, launch, _),) = bound._bind(aligned)
        assert launch._open_names == ("x", "out", "spans")
        assert cross.kinds_where_launched(launch._kernel, dict(launch.arguments)) == cross.signature_of(launch._kernel)
        assert (16 if aligned else 2) == launch.arguments["SHAPE"].UNIT

        def keep(stream: int, values: Sequence[int], aligned: bool = aligned) -> None:
            given.append((aligned, values))

        bound._pieces[aligned] = (bound._pieces[aligned][0]._replace(launch=keep),)
    x, out = torch.zeros(1 << 20, dtype=torch.bfloat16), torch.zeros(1 << 20, dtype=torch.bfloat16)
    assert not (x.data_ptr() | out.data_ptr()) & 15
    monkeypatch.setattr(executor_module, "INTERPRETED", True)  # no stream
    bound.run(x, out, None, (8, 0, 24, 400_000, 16, 0, 32, 200_000))
    bound.run(x, out, None, (8, 1, 24, 40, 16, 1, 32, 200))
    with pytest.raises(ConfigError, match=r"takes .* steps through a window"):
        bound.run(x, out, None, (1 << 50, 0, 0, 0, 0, 0, 0, 0))
    (aligned, first), (other, second) = given
    assert (aligned, other) == (True, False)
    assert first[:2] == (x.data_ptr(), out.data_ptr())
    # rank 1 of four sends to 2, 3 and 0, in this order
    chunks = -(-(800_000 - uneven.head_bytes(executor.workspaces[0].context)) // (1 << 16))
    assert chunks > 0
    assert first[2:] == (
        *(16, 64, 0, 0, 0, 0, 0),
        *(48, 800_000, 16, 0, 0, 0, 0),
        *(16, 32, 0),  # its own part
        *(0, 32, 32, 96, *[400_096] * 5),
        *(800_000, 400_000, chunks),
    )
    assert second[2 + 7 + 7 :][:3] == (16, 32, 2)
    assert (second[-3], second[-1]) == (80, 0)


def test_sizes_of_few_sms_have_one_type_on_all_ranks() -> None:
    """A message beyond 2 GiB does not need a kernel of its own, which would be compiled within the deadline."""
    executor = executor_of_four(max_bytes=1 << 30)
    for nbytes in (64, 1 << 33):
        plan = CallPlan(Op.ALL_GATHER, "few_sms", "bfloat16", nbytes, launch=LaunchShape(64, 512, 4, 4096))
        ((_, launch, _),) = executor.bind(plan)._bind(True)
        arguments = dict(launch.arguments)
        assert cross.kinds_where_launched(few_sms, arguments) == cross.signature_of(few_sms)

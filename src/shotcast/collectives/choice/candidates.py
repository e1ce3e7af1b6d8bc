"""Which algorithms may serve a problem. Legality is stated here and nowhere else."""

from __future__ import annotations

import dataclasses

from shotcast import wire
from shotcast.collectives.choice.problem import Candidate, CollectiveProblem
from shotcast.device.triton.tiles import MAX_ROW_WORDS, row_tile
from shotcast.transport.triton.layout import QUAD, Layout, fp8_slot_quads, gathered_row_quads
from shotcast.units import align_up, format_size
from shotcast.wire import LaunchShape, Norm, Op

_OFFERED: dict[Op, tuple[str, ...]] = {
    Op.ALL_REDUCE: ("one_shot", "two_shot", "two_shot_fp8", "ring", "multimem"),
    Op.REDUCE_SCATTER: ("one_shot", "ring"),
    Op.ALL_GATHER: ("one_shot", "ring"),
    Op.ALL_TO_ALL: ("one_shot",),
    Op.BROADCAST: ("one_shot",),
    Op.SEND: ("one_shot",),
    Op.RECV: ("one_shot",),
    Op.BARRIER: ("one_shot",),
    Op.ALL_REDUCE_RMS_NORM: ("one_shot", "two_shot"),
    Op.REDUCE_SCATTER_RMS_NORM: ("one_shot",),
    Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER: ("two_shot",),
}
PLAIN = {
    Op.ALL_REDUCE_RMS_NORM: Op.ALL_REDUCE,
    Op.REDUCE_SCATTER_RMS_NORM: Op.REDUCE_SCATTER,
    Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER: Op.ALL_REDUCE,
}
"""Fused operations, and the plain ones that move as much in as many steps."""
_REDUCES = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, *PLAIN)


def obstacle(problem: CollectiveProblem, algorithm: str) -> str:
    """Why ``algorithm`` cannot serve ``problem``; empty if it can."""
    place, op = problem.topology, problem.op
    if algorithm == "vendor":
        return ""
    if algorithm not in _OFFERED[op]:
        return f"there is no {algorithm} {op.label}; there is {', '.join(_OFFERED[op])}"
    if not place.kernels:
        return place.obstacle
    if op in _REDUCES:
        if problem.reduction != "sum":
            return f"own kernels only sum, and this is {problem.reduction}"
        if problem.dtype not in wire.REDUCIBLE:
            return f"own kernels add up {', '.join(wire.REDUCIBLE)}, and this is {problem.dtype}"
    elif problem.dtype not in wire.DTYPES:
        return f"dtype {problem.dtype} has no code of its own"
    if problem.sizes and algorithm == "ring":
        return "the ring takes equal parts only"
    if algorithm == "multimem" and not place.multicast:
        return "the ranks share no multicast address"
    if op in PLAIN and (why := _rows_do_not_fit(problem)):
        return why
    if place.kernels == "compiled" or op in (Op.SEND, Op.RECV, Op.BARRIER):
        # GPU kernels count bytes in 32 bits with a sign, and round them up to 16
        limit = (1 << 32) if place.kernels == "compiled" else (1 << 31) - 16
        return "" if problem.nbytes < limit else f"one call carries less than {format_size(limit)}"
    return _beyond_workspace(problem, algorithm)


def _rows_do_not_fit(problem: CollectiveProblem) -> str:
    """Why the fused kernels, which hold a row in the registers of one program, cannot hold these; empty if they can.

    Compiled CPU ranks take any rows.
    """
    row = (problem.norm or Norm(0)).hidden * wire.DTYPES[problem.dtype]
    if problem.topology.kernels == "compiled":
        return "" if row else "rows have no elements"
    if row == 0 or row % QUAD:
        return f"fused kernels take rows of a multiple of {QUAD} bytes, and these have {row}"
    if row > 4 * MAX_ROW_WORDS:
        return f"fused kernels take rows of up to {format_size(4 * MAX_ROW_WORDS)}, and these have {format_size(row)}"
    return ""


def _beyond_workspace(problem: CollectiveProblem, algorithm: str) -> str:
    """Sentinel slots hold 2 max_bytes, flag cells max_bytes at twice the data (see transport/triton/layout.py)."""
    place, world_size = problem.topology, problem.topology.world_size
    if problem.op is Op.ALL_REDUCE and algorithm in ("two_shot", "multimem"):
        return ""  # a longer message passes in pieces
    cells = problem.dtype not in wire.REDUCIBLE
    if cells and algorithm == "ring":
        return f"the ring moves {', '.join(wire.REDUCIBLE)} only, and this is {problem.dtype}"
    if problem.op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER:
        assert problem.norm is not None
        rows = problem.nbytes // (problem.norm.hidden * wire.DTYPES[problem.dtype])
        needed = problem.nbytes + rows * gathered_row_quads(problem.norm, problem.dtype) * QUAD
        room = 2 * place.max_bytes
    elif problem.op is Op.ALL_REDUCE_RMS_NORM:
        block = _fused_tile(problem)
        row_words = (problem.norm or Norm(0)).hidden * wire.DTYPES[problem.dtype] // 4
        tiles = problem.nbytes // (4 * row_words) * -(-row_words // block)
        copies = tiles * world_size if algorithm == "one_shot" else 2 * align_up(tiles, world_size)
        needed, room = copies * block * 4, 2 * place.max_bytes
    elif problem.op is Op.ALL_REDUCE and algorithm == "one_shot":
        needed, room = problem.nbytes * world_size, 2 * place.max_bytes
    elif algorithm == "two_shot_fp8":
        needed = 2 * world_size * fp8_slot_quads(problem.nbytes, world_size, problem.dtype) * QUAD
        room = Layout.for_messages(place.max_bytes).slots_quads * QUAD
    elif problem.sizes:
        needed = align_up(max(problem.sizes) * wire.DTYPES[problem.dtype], 16) * world_size
        room = 2 * place.max_bytes
    else:
        needed, room = problem.nbytes, place.max_bytes
    if cells:
        needed, room = 2 * needed, place.max_bytes
    if needed > room:
        return f"it would take {format_size(needed)} of a workspace that has {format_size(room)} (max_bytes)"
    return ""


def keeps_bits(problem: CollectiveProblem, algorithm: str) -> bool:
    """Whether ``algorithm`` gives the bits of the numerics contract (docs/reference/numerics.md), which ``auto`` keeps.

    Copies are exact whoever makes them. Sums must be added in rank order and rounded once; the addition of two ranks
    commutes, and then the ring has these bits too.
    """
    if problem.op in (Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST, Op.SEND, Op.RECV, Op.BARRIER):
        return True
    return algorithm in ("one_shot", "two_shot") or (algorithm == "ring" and problem.topology.world_size == 2)


def candidates(problem: CollectiveProblem) -> tuple[Candidate, ...]:
    """All legal candidates, own ones first, then the vendor library."""
    names = (*_OFFERED[problem.op], "vendor")
    return tuple(Candidate(name, launch_shape(problem, name)) for name in names if not obstacle(problem, name))


def launch_shape(problem: CollectiveProblem, algorithm: str) -> LaunchShape:
    """The default launch of an algorithm: one tile a program.

    Small messages: programs of one warp, 128 words each, whose polls need no shared memory. From 512 KiB a rank's share
    on, larger tiles. A grid may be larger than the GPU holds at once: programs start in the order of their numbers, and
    wait for peers' programs of their own number, so the grid passes over the message like a window, and what crosses
    the slots stays in the cache (figures: docs/design/all_reduce.md).
    """
    place = problem.topology
    if algorithm == "vendor":
        return LaunchShape(programs=0, block_words=0, num_warps=0)
    if place.kernels == "compiled":
        return LaunchShape(programs=0, block_words=0, num_warps=0, chunk_bytes=0)
    if problem.op in PLAIN:
        return _fused_launch_shape(problem, algorithm)
    share = _share(problem, algorithm)
    words = max(share // 4, 1)
    if place.kernels == "interpreter":
        block = 1 << max(4, min(11, (words // 2).bit_length()))
        return LaunchShape(programs=min(3, -(-words // block)), block_words=block, num_warps=1)
    if share < 512 << 10:
        return LaunchShape(programs=min(1024, -(-words // 128)), block_words=128, num_warps=1)
    if share < 1 << 20 or algorithm in ("ring", "multimem") or (algorithm == "two_shot_fp8" and place.world_size > 4):
        return LaunchShape(programs=min(512, -(-words // 512)), block_words=512, num_warps=4)
    warps = 4 if problem.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL) else 8
    return LaunchShape(programs=-(-words // 1024), block_words=1024, num_warps=warps)


def _fused_tile(problem: CollectiveProblem) -> int:
    """Words of a tile of a fused all-reduce: a warp's, and no longer than a row.

    The interpreter runs programs one after the other, so there a tile is a row.
    """
    norm = problem.norm or Norm(0)
    row = 1 << max(4, (max(1, norm.hidden * wire.DTYPES.get(problem.dtype, 1) // 4) - 1).bit_length())
    return row if problem.topology.kernels == "interpreter" else min(row, 128)


def _fused_launch_shape(problem: CollectiveProblem, algorithm: str) -> LaunchShape:
    """All-reduce: one program a tile, or a tile of every slice.

    Reduce-scatter: programs that push tiles of ``block_words``, and as many or fewer that norm rows. Rows decide the
    warps (see :func:`row_tile`), so all programs of the grid have as many, and a tile is 16 bytes a thread: with less,
    threads would poll the same words and see them arrive at different times. 16 warps a multiprocessor are the bound,
    of 132: so a grid is resident at once with up to 128 registers a thread.
    """
    place, norm = problem.topology, problem.norm or Norm(0)
    row_words = max(1, norm.hidden * wire.DTYPES.get(problem.dtype, 1) // 4)
    if problem.op is Op.ALL_REDUCE_RMS_NORM:
        block = _fused_tile(problem)
        tiles = problem.nbytes // (4 * row_words) * -(-row_words // block)
        programs = tiles if algorithm == "one_shot" else -(-tiles // place.world_size)
        return LaunchShape(programs=max(1, programs), block_words=block, num_warps=1)
    rows = problem.nbytes // (4 * row_words) // place.world_size
    words = -(-problem.nbytes // 4 // place.world_size)
    if place.kernels == "interpreter":
        block = 1 << max(4, min(11, (words // 2).bit_length()))
        return LaunchShape(programs=4, block_words=block, num_warps=1)
    _, warps = row_tile(max(row_words, 1))
    most = min(512, 66 * (16 // warps)) - 1
    block = 128 * warps
    normers = max(1, min(rows, most))
    pushers = max(normers, min(-(-words // block), most))
    return LaunchShape(programs=pushers + normers, block_words=block, num_warps=warps)


_TILES = ((128, 1), (256, 1), (256, 2), (512, 4), (1024, 4), (1024, 8))
"""Words a tile and warps a program that are worth trying: each lane moves 16 or 32 bytes of a slot."""
_PROGRAMS = (1024,)
"""Most programs of a grid that goes over its tiles again and again; the other way is a program a tile, in order."""
_WARPS = 4096
"""Most warps of such a grid that is worth trying."""
_CHUNKS = tuple(1 << bits for bits in range(15, 21))

_MAX_PROGRAMS, _MAX_BLOCK_WORDS, _MAX_WARPS = (1 << 31) - 2, 4096, 16  # CUDA's grid, and the program of headers


def launch_obstacle(kernels: str, algorithm: str, shape: LaunchShape) -> str:
    """Why ``kernels`` (:attr:`Topology.kernels`) cannot run ``algorithm`` launched as ``shape``; empty if they can."""
    if algorithm == "vendor" or kernels == "compiled":
        return "" if shape.chunk_bytes >= 0 else f"chunk_bytes starts at 0, and is {shape.chunk_bytes}"
    if not 1 <= shape.programs <= _MAX_PROGRAMS:
        return f"programs are 1 to {_MAX_PROGRAMS}, not {shape.programs}"
    if not 16 <= shape.block_words <= _MAX_BLOCK_WORDS or shape.block_words & (shape.block_words - 1):
        return f"block_words is a power of two from 16 to {_MAX_BLOCK_WORDS}, not {shape.block_words}"
    if not 1 <= shape.num_warps <= _MAX_WARPS or shape.num_warps & (shape.num_warps - 1):
        return f"num_warps is a power of two from 1 to {_MAX_WARPS}, not {shape.num_warps}"
    return ""


def launch_shapes(problem: CollectiveProblem, algorithm: str) -> tuple[LaunchShape, ...]:
    """Launches worth trying for a legal candidate, the default first. Fused kernels have the default alone: theirs
    follows from the rows."""
    default, kernels = launch_shape(problem, algorithm), problem.topology.kernels
    shapes = [default]
    if algorithm != "vendor" and kernels == "compiled":
        # a chunk that holds the whole message is as good as any larger one
        shapes += [dataclasses.replace(default, chunk_bytes=chunk) for chunk in _CHUNKS if chunk < 2 * problem.nbytes]
    elif algorithm != "vendor" and kernels == "triton" and problem.op not in PLAIN:
        words = max(_share(problem, algorithm) // 4, 1)
        for block, warps in _TILES:
            if block == _TILES[0][0] or block <= words:
                tiles = -(-words // block)
                grids = [min(most, tiles) for most in _PROGRAMS if most * warps <= _WARPS]
                shapes += [
                    dataclasses.replace(default, programs=programs, block_words=block, num_warps=warps)
                    for programs in (*grids, tiles)
                ]
    return tuple(dict.fromkeys(shapes))


def fitted(problem: CollectiveProblem, algorithm: str, shape: LaunchShape) -> LaunchShape:
    """``shape``, found for a larger message of a plain operation, without programs that have no tile of this one.

    (Those are not free: at 2 ranks 32768 programs instead of 8192 took twice as long for 64 MiB.)
    """
    if problem.topology.kernels == "compiled":
        return shape
    share = max(problem.sizes) * wire.DTYPES[problem.dtype] if problem.sizes else _share(problem, algorithm)
    tiles = -(-max(share // 4, 1) // shape.block_words)
    return dataclasses.replace(shape, programs=min(shape.programs, tiles))


def _share(problem: CollectiveProblem, algorithm: str) -> int:
    """Bytes that the tiles of a launch are counted on: the message, or a rank's part of it, as it is sent."""
    if algorithm == "two_shot_fp8" and problem.dtype in wire.REDUCIBLE:
        return -(-problem.nbytes // (problem.topology.world_size * wire.DTYPES[problem.dtype]))
    if problem.op not in (Op.ALL_REDUCE, Op.BROADCAST, Op.SEND, Op.RECV) or algorithm in (
        "two_shot",
        "ring",
        "multimem",
    ):
        return -(-problem.nbytes // problem.topology.world_size)
    return problem.nbytes

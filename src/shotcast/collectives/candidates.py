"""Which algorithms may serve a problem. Legality is stated here and nowhere else."""

from __future__ import annotations

from shotcast import wire
from shotcast.collectives.problem import Candidate, CollectiveProblem
from shotcast.units import align_up, format_size
from shotcast.wire import LaunchShape, Op

_OFFERED: dict[Op, tuple[str, ...]] = {
    Op.ALL_REDUCE: ("one_shot", "two_shot", "ring"),
    Op.REDUCE_SCATTER: ("one_shot", "ring"),
    Op.ALL_GATHER: ("one_shot", "ring"),
    Op.ALL_TO_ALL: ("one_shot",),
    Op.BROADCAST: ("one_shot",),
    Op.SEND: ("one_shot",),
    Op.RECV: ("one_shot",),
    Op.BARRIER: ("one_shot",),
}
_REDUCES = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


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
    if place.kernels == "compiled" or op in (Op.SEND, Op.RECV, Op.BARRIER):
        # GPU kernels count bytes in 32 bits with a sign, and round them up to 16
        limit = (1 << 32) if place.kernels == "compiled" else (1 << 31) - 16
        return "" if problem.nbytes < limit else f"one call carries less than {format_size(limit)}"
    return _beyond_workspace(problem, algorithm)


def _beyond_workspace(problem: CollectiveProblem, algorithm: str) -> str:
    """Sentinel slots hold 2 max_bytes, flag cells max_bytes at twice the data (see kernels/layout.py)."""
    place, world_size = problem.topology, problem.topology.world_size
    cells = problem.dtype not in wire.REDUCIBLE
    if cells and algorithm == "ring":
        return f"the ring moves {', '.join(wire.REDUCIBLE)} only, and this is {problem.dtype}"
    if problem.op is Op.ALL_REDUCE and algorithm == "one_shot":
        needed, room = problem.nbytes * world_size, 2 * place.max_bytes
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
    share = problem.nbytes
    if problem.op not in (Op.ALL_REDUCE, Op.BROADCAST, Op.SEND, Op.RECV) or algorithm in ("two_shot", "ring"):
        share = -(-problem.nbytes // place.world_size)
    words = max(share // 4, 1)
    if place.kernels == "interpreter":
        block = 1 << max(4, min(11, (words // 2).bit_length()))
        return LaunchShape(programs=min(3, -(-words // block)), block_words=block, num_warps=1)
    if share < 512 << 10:
        return LaunchShape(programs=min(1024, -(-words // 128)), block_words=128, num_warps=1)
    if share < 1 << 20 or algorithm == "ring":
        return LaunchShape(programs=min(512, -(-words // 512)), block_words=512, num_warps=4)
    return LaunchShape(programs=-(-words // 1024), block_words=1024, num_warps=8)

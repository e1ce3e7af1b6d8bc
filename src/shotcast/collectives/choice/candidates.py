"""Candidates for a problem: which algorithms may serve it, and with which launches. Legality is defined only here."""

from __future__ import annotations

import dataclasses

from shotcast import wire
from shotcast.collectives.algorithm import FUSED, REDUCING, Algorithm, CollectiveProblem, Form, Topology
from shotcast.collectives.choice.choice import Candidate
from shotcast.transport.transport import Transport
from shotcast.transport.triton.layout import CELLS_TAKE, QUAD, capacities
from shotcast.units import format_size
from shotcast.wire import MAX_WORLD_SIZE, LaunchShape, Op


def unsupported_reason(problem: CollectiveProblem, name: str) -> str:
    """Return why the algorithm ``name`` cannot serve ``problem``; empty if it can."""
    topology, op = problem.topology, problem.op
    algorithm = topology.algorithms[name]
    if algorithm.library:
        # the library copies, or a fused operation becomes a sum, which is a separate problem, and a norm
        sums_itself = op in REDUCING and op not in FUSED and topology.world_size > 1
        if topology.batch_invariant and sums_itself:
            return "in batch-invariant mode the vendor library reduces nothing, as its order depends on the size"
        return ""
    form = algorithm.forms.get(op)
    if form is None:
        serving = [one for one in topology.algorithms.serving(op) if not one.library]
        own = [one.name for one in serving if _is_to_name(problem, one.forms[op])]
        return f"there is no {name} {op.label}; there is {', '.join(own)}"
    if topology.unsupported_reason:
        return topology.unsupported_reason
    if problem.sms and not form.keeps_to_sms:
        return "it does not keep to a number of SMs"
    if form.keeps_to_sms and not problem.sms:
        return "it serves calls that are given a number of SMs (sms)"
    if op in REDUCING:
        if why := _not_reduced(problem, form):
            return why
        if topology.batch_invariant and not keeps_bits(problem, name):
            return "in batch-invariant mode sums have the bits of the numerics contract, and its are others"
    elif problem.dtype not in wire.DTYPES:
        return f"dtype {problem.dtype} has no code of its own"
    if problem.sizes and not form.uneven:
        return f"the {algorithm.label} takes equal parts only"
    if algorithm.multicast and not topology.multicast:
        return "the ranks share no multicast address"
    if form.between_nodes and topology.shape.nodes == 1:
        return "all ranks are on one node"
    transport = topology.transport
    if not form.kernel(transport.field):
        forms = [one.forms[op] for one in topology.algorithms.serving(op) if not one.library]
        if topology.shape.nodes > 1 and not any(form.kernel(transport.field) for form in forms):
            return f"no native kernel carries {op.label} between hosts"
        return transport.missing.format(name=name)
    if topology.network.puts and not form.between_nodes and op is not Op.BARRIER:
        return "it stores to all ranks, and those of other hosts are reached by puts"
    if form.between_nodes and transport.consecutive and not topology.layout.consecutive:
        return "its kernel takes nodes of consecutive ranks"
    if why := form.unsupported_reason(problem):
        return why
    launch = None if form.keeps_to_sms else form.launch
    if launch is not None and (why := _beyond_others(problem, form, launch(problem))):
        return why
    if not transport.grids or op in (Op.SEND, Op.RECV, Op.BARRIER):
        return ""  # a message of any size passes in chunks
    return _beyond_workspace(problem, algorithm, form)


def _is_to_name(problem: CollectiveProblem, form: Form) -> bool:
    """Return whether errors mention an algorithm of this form: forms for shared GPUs serve only large calls."""
    return form.keeps_to_sms == bool(problem.sms) and not form.shared_from


_MOST_WARPS = 1024
"""The most warps of a call of a non-exclusive communicator: a quarter to a third of a GPU's registers.

A call that has passed its gate holds them until its peers have launched the same kernel. So calls of three or more
communicators can be in progress at once, in any order on their GPUs.
"""
_BESIDE_OTHERS = ((2, LaunchShape(128, 2048, 8)), (MAX_WORLD_SIZE, LaunchShape(128, 512, 4)))
"""Launches with this many warps, by maximum number of ranks; their tiles determine the registers per thread."""


def _beyond_others(problem: CollectiveProblem, form: Form, shape: LaunchShape) -> str:
    """Return why a waiting grid leaves too little of the GPU to other communicators; empty if it leaves enough."""
    warps = shape.programs * shape.num_warps
    if problem.topology.exclusive or problem.topology.device != "cuda" or warps <= _MOST_WARPS or form.shared_from:
        return ""
    return f"its grid has {warps} warps, and calls have up to {_MOST_WARPS} where the communicator is not exclusive"


def _beside_others(problem: CollectiveProblem, form: Form, shape: LaunchShape) -> LaunchShape:
    """Return the launch, or one that leaves room for calls of other communicators if this one would not."""
    if not _beyond_others(problem, form, shape):
        return shape
    ranks = problem.topology.shape.ranks_per_node
    halved = dataclasses.replace(shape, programs=-(-shape.programs // 2), block_words=256)
    few = ranks <= 2 and (shape.num_warps, shape.block_words) == (1, 128)
    if few and not _beyond_others(problem, form, halved):
        return halved
    return next(launch for most, launch in _BESIDE_OTHERS if ranks <= most)


def _not_reduced(problem: CollectiveProblem, form: Form) -> str:
    """Return why a form does not support the problem's reduction; empty if it does."""
    if problem.reduction not in wire.REDUCED.get(problem.dtype, ()):
        return f"native kernels have no {problem.reduction} of {problem.dtype}"
    if form.any_reduction:
        return ""
    if problem.reduction == "sum" and problem.dtype in wire.REDUCIBLE:
        return ""
    summed = ", ".join(wire.REDUCIBLE)
    if problem.op in FUSED:
        return f"fused kernels add up {summed}, and this is {problem.dtype}"
    serving = problem.topology.algorithms.serving(problem.op)
    forms, between = {one.name: one.forms[problem.op] for one in serving}, problem.topology.shape.nodes > 1
    able = [
        name
        for name, form in forms.items()
        if form.any_reduction and form.between_nodes <= between and _is_to_name(problem, form)
    ]
    return f"only {' and '.join(able)} do more than sum {summed}, and this is {problem.reduction} of {problem.dtype}"


def by_cells(topology: Topology, dtype: str, form: Form) -> bool:
    """Return whether a form sends flag cells, which take twice the bytes of the data (docs/reference/protocols.md)."""
    return topology.transport.cells and dtype not in wire.REDUCIBLE and form.flags_words


def _beyond_workspace(problem: CollectiveProblem, algorithm: Algorithm, form: Form) -> str:
    """Return why the workspace is too small; empty if it is not.

    Sentinel slots hold 2 max_bytes, flag cells max_bytes at twice the data (see transport/triton/layout.py).
    """
    if form.divides:
        return ""  # a longer message passes in pieces
    cells = by_cells(problem.topology, problem.dtype, form)
    if cells and not form.any_dtype:
        return f"the {algorithm.label} moves {', '.join(wire.REDUCIBLE)} only, and this is {problem.dtype}"
    needed, capacity = form.workspace(problem)
    if cells:
        needed, capacity = 2 * needed, problem.topology.max_bytes
    if needed > capacity:
        return f"it would take {format_size(needed)} of a workspace that has {format_size(capacity)} (max_bytes)"
    return ""


def capacity(problem: CollectiveProblem, name: str) -> int:
    """Return the longest message, in bytes, that the workspace must be laid out for to hold a legal candidate's call.

    It is 0 if any workspace will do: the smallest always exists. Pieces of a divided message are as long as the largest
    workspace allows.
    """
    topology = problem.topology
    algorithm = topology.algorithms[name]
    passing = problem.op in (Op.SEND, Op.RECV, Op.BARRIER)
    if algorithm.library or passing or not topology.transport.grids:
        return 0
    form = algorithm.forms[problem.op]
    if form.divides:
        cells = by_cells(topology, problem.dtype, form)
        return min(problem.nbytes * (CELLS_TAKE if cells else 1), topology.max_bytes)
    for size in capacities(topology.max_bytes):
        smaller = dataclasses.replace(problem, topology=dataclasses.replace(topology, max_bytes=size))
        if not _beyond_workspace(smaller, algorithm, form):
            return size
    return topology.max_bytes


def keeps_bits(problem: CollectiveProblem, name: str) -> bool:
    """Return whether ``name`` gives the bits of the numerics contract (docs/reference/numerics.md).

    Only float32 sums have an order over nodes; all other reductions run in rank order on any nodes.
    """
    if problem.op in REDUCING and not (problem.reduction == "sum" and problem.dtype in wire.REDUCIBLE):
        return not problem.topology.algorithms[name].lossy
    return problem.topology.algorithms[name].keeps_bits(problem.op, problem.topology.shape)


def candidates(problem: CollectiveProblem) -> tuple[Candidate, ...]:
    """Return all legal candidates: native ones first, then the vendor library."""
    serving = problem.topology.algorithms.serving(problem.op)
    names = [one.name for one in serving if not unsupported_reason(problem, one.name)]
    return tuple(Candidate(name, launch_shape(problem, name)) for name in names)


def launch_shape(problem: CollectiveProblem, name: str) -> LaunchShape:
    """Return the default launch of an algorithm: one tile per program.

    Small messages use programs of one warp with 128 words each, whose polls need no shared memory. Tiles grow once
    a rank's share reaches 512 KiB, but not between two GPUs. A grid may be larger than the GPU holds at once: programs
    start in numerical order and wait for the same-numbered programs of the peers. So the grid passes over the message
    like a window, and the words that cross the slots stay in the cache (figures: docs/design/all_reduce.md). On
    non-exclusive communicators, fewer programs pass over the message repeatedly.
    """
    topology, form = problem.topology, problem.topology.algorithms[name].forms[problem.op]
    if not topology.transport.grids:
        return LaunchShape(programs=0, block_words=0, num_warps=0, chunk_bytes=0)
    if form.launch is not None:
        return form.launch(problem)
    return _beside_others(problem, form, _whole_gpu(problem, form))


def _whole_gpu(problem: CollectiveProblem, form: Form) -> LaunchShape:
    """Return the launch of a call that may fill the GPU while it waits."""
    topology, share = problem.topology, form.share(problem)
    words = max(share // 4, 1)
    if topology.transport.serial:
        block = 1 << max(4, min(11, (words // 2).bit_length()))
        return LaunchShape(programs=min(3, -(-words // block)), block_words=block, num_warps=1)
    ranks = topology.world_size if topology.shape.nodes == 1 else MAX_WORLD_SIZE  # between nodes, a tile is a put
    warps = form.large_warps(ranks)
    if share < 512 << 10 or warps == 1:
        return LaunchShape(programs=-(-words // 128), block_words=128, num_warps=1)
    if share < 1 << 20 or not warps:
        return LaunchShape(programs=min(512, -(-words // 512)), block_words=512, num_warps=4)
    return LaunchShape(programs=-(-words // 1024), block_words=1024, num_warps=warps)


_TILES = ((128, 1), (256, 1), (256, 2), (512, 4), (1024, 4), (1024, 8))
"""Tiles (words, warps of the program) worth trying: each lane moves 16 or 32 bytes of a slot."""
_PROGRAMS, _WARPS = 1024, 4096
"""The most programs, and warps, of a grid that passes over its tiles repeatedly; the alternative is one per tile."""
_CHUNKS = tuple(1 << bits for bits in range(15, 21))

_MAX_PROGRAMS, _MAX_WARPS = (1 << 31) - 2, 16  # CUDA's grid, and the program of headers
_MAX_SENT_WORDS, _MAX_SENT_WARPS = 16384, 32
"""The same for SM-limited kernels, which do not poll words of a tile and have no header program."""


def launch_unsupported_reason(transport: Transport, algorithm: Algorithm, shape: LaunchShape) -> str:
    """Return why kernels of a transport cannot launch ``algorithm`` with ``shape``; empty if they can.

    On a GPU every thread needs separate words. If a tile has fewer words than threads, several threads poll one word
    and may see it arrive at different times, so one of them continues with the old value.
    """
    for name, value in dataclasses.asdict(shape).items():
        if not isinstance(value, int) or isinstance(value, bool):
            return f"{name} is a whole number, not {value!r}"
    if algorithm.library or not transport.grids:
        return "" if shape.chunk_bytes >= 0 else f"chunk_bytes starts at 0, and is {shape.chunk_bytes}"
    most, most_warps = transport.most_words, _MAX_WARPS
    if algorithm.keeps_to_sms:
        most, most_warps = _MAX_SENT_WORDS, _MAX_SENT_WARPS
    if not 1 <= shape.programs <= _MAX_PROGRAMS:
        return f"programs are 1 to {_MAX_PROGRAMS}, not {shape.programs}"
    if not 16 <= shape.block_words <= most or shape.block_words & (shape.block_words - 1):
        return f"block_words is a power of two from 16 to {most}, not {shape.block_words}"
    if not 1 <= shape.num_warps <= most_warps or shape.num_warps & (shape.num_warps - 1):
        return f"num_warps is a power of two from 1 to {most_warps}, not {shape.num_warps}"
    if algorithm.keeps_to_sms and (shape.chunk_bytes < 1 or shape.chunk_bytes % QUAD):
        return f"chunk_bytes is a multiple of {QUAD} from {QUAD} up, not {shape.chunk_bytes}"
    threads = 32 * shape.num_warps
    if not transport.serial and shape.block_words < threads:
        of_program = f"{threads} in {shape.num_warps} warps"
        return f"block_words is at least the threads of a program, {of_program}, not {shape.block_words}"
    return ""


def launch_shapes(problem: CollectiveProblem, name: str) -> tuple[LaunchShape, ...]:
    """Return the launches worth trying for a legal candidate, the default first.

    Forms with a separate launch, such as fused kernels, keep the default, unless they list alternatives.
    """
    default, transport = launch_shape(problem, name), problem.topology.transport
    algorithm = problem.topology.algorithms[name]
    form = algorithm.forms[problem.op]
    shapes = [default]
    if not algorithm.library and not transport.grids:
        # a chunk that holds the whole message is as good as any larger one
        shapes += [dataclasses.replace(default, chunk_bytes=chunk) for chunk in _CHUNKS if chunk < 2 * problem.nbytes]
    elif transport.grids and not transport.serial and form.launch is None:
        words = max(form.share(problem) // 4, 1)
        for block, warps in _TILES:
            if block == _TILES[0][0] or block <= words:
                tiles = -(-words // block)
                grids = (min(_PROGRAMS, tiles), tiles) if _PROGRAMS * warps <= _WARPS else (tiles,)
                shapes += [
                    dataclasses.replace(default, programs=programs, block_words=block, num_warps=warps)
                    for programs in grids
                ]
    elif transport.grids and not transport.serial:
        shapes += form.launches(problem)
    return tuple(dict.fromkeys(shape for shape in shapes if not _beyond_others(problem, form, shape)))


def fitted(problem: CollectiveProblem, name: str, shape: LaunchShape) -> LaunchShape:
    """Return ``shape``, which was tuned for a larger message, without the programs that have no tile in this one.

    (Idle programs are not free: 64 MiB on 2 ranks took twice as long with 32768 programs as with 8192.)
    """
    if not problem.topology.transport.grids:
        return shape
    form = problem.topology.algorithms[name].forms[problem.op]
    if form.keeps_to_sms:
        return dataclasses.replace(shape, programs=min(shape.programs, problem.sms))
    share = max(problem.sizes) * wire.DTYPES[problem.dtype] if problem.sizes else form.share(problem)
    tiles = -(-max(share // 4, 1) // shape.block_words)
    return _beside_others(problem, form, dataclasses.replace(shape, programs=min(shape.programs, tiles)))

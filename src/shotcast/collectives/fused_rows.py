"""Rows of fused calls: which ones kernels can hold, and how launches divide them."""

from __future__ import annotations

from shotcast.collectives.algorithm import CollectiveProblem
from shotcast.device.triton.tiles import MAX_ROW_WORDS, row_tile
from shotcast.transport.triton.layout import QUAD
from shotcast.units import align_up, format_size
from shotcast.wire import LaunchShape


def rows_unsupported_reason(problem: CollectiveProblem) -> str:
    """Return why the fused kernels, which hold a row in the registers of one program, cannot hold these rows; empty if
    they can. Host code takes any rows."""
    row = problem.row_bytes
    if not problem.topology.transport.grids:
        return "" if row else "rows have no elements"
    if row == 0 or row % QUAD:
        return f"fused kernels take rows of a multiple of {QUAD} bytes, and these have {row}"
    if row > 4 * MAX_ROW_WORDS:
        return f"fused kernels take rows of up to {format_size(4 * MAX_ROW_WORDS)}, and these have {format_size(row)}"
    return ""


TILE_WORDS = 128
"""The most words of a tile, one load of a warp."""


def tiles_of_rows(problem: CollectiveProblem, most: int = TILE_WORDS) -> tuple[int, int]:
    """Return the number of tiles in the rows of a fused all-reduce, and the words of a tile, at most ``most``.

    A tile belongs to one warp, with at least one word per thread, and is otherwise no longer than a row. Tiles of more
    than TILE_WORDS pad no row further than those do. The interpreter runs programs one after the other, so there a tile
    is a row. The bits do not depend on tiles.
    """
    words = max(1, problem.row_bytes // 4)
    interpreted = problem.topology.transport.serial
    row = 1 << max(4 if interpreted else 5, (words - 1).bit_length())
    block = row if interpreted else min(row, most)
    while not interpreted and block > TILE_WORDS and align_up(words, TILE_WORDS) % block:
        block //= 2
    return problem.nbytes // (4 * words) * -(-words // block), block


_MANY_PROGRAMS = 1024
"""From this many programs on, programs are fewer and larger: each takes about 5 ns."""
_MOST_BESIDE_OTHERS = 256
"""The most programs with larger tiles that leave room for calls of other communicators: with 255 registers a thread,
24% of an H200's."""
_WORDS_OF_SLICES = 1024
"""The most words that a program of two-shot holds, in a tile of every slice, without spilling registers."""


def tiles_of_slices(problem: CollectiveProblem) -> tuple[int, int]:
    """Return the number of tiles of a fused two-shot, and the words of a tile.

    Programs with larger tiles take up to three times as many registers, so of the communicators that share a GPU, only
    those of two ranks have some, in calls of up to a quarter of its registers. On two H200s, 512 rows of 8192 bfloat16
    take 41.0 us with tiles of 128 words, 30.8 with 256 and 30.2 with 512, and 32 rows 5.9, 6.5 and 6.8
    (``exploration/fused_tiles_x2.txt``).
    """
    world_size = problem.topology.world_size
    large = tiles_of_rows(problem, max(TILE_WORDS, _WORDS_OF_SLICES // (1 << (world_size - 1).bit_length())))
    fits = problem.topology.exclusive or (world_size == 2 and large[0] <= _MOST_BESIDE_OTHERS * world_size)
    small = tiles_of_rows(problem)
    return large if fits and small[0] >= _MANY_PROGRAMS * world_size else small


def tile_launch(problem: CollectiveProblem, programs: int) -> LaunchShape:
    """Return the launch of a fused all-reduce with one program per tile."""
    return LaunchShape(programs=max(1, programs), block_words=tiles_of_rows(problem)[1], num_warps=1)


_TILES_EACH = (2, 4, 8)
"""Tiles per program worth trying; more would take too many registers per thread."""
_LEAST_PROGRAMS = 128
"""The number of programs that gives every SM about one."""


_PROGRAMS_OF_TWO = 1024
"""The number of programs for a fused one-shot call of two ranks, the fastest on H200 from this many tiles on: 64 rows
of 8192 bfloat16 take 7.3 us with 1024 programs of two tiles and 10.7 with one tile each (``research/launch_sweep.py``).
"""


def one_shot_launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of a fused one-shot all-reduce: one program per tile or, with two ranks, per several tiles."""
    tiles, block = tiles_of_rows(problem)
    several = problem.topology.world_size == 2 and not problem.topology.transport.serial and tiles >= _PROGRAMS_OF_TWO
    if not several:
        return tile_launch(problem, tiles)
    most = _TILES_EACH[-1]
    each = next((each for each in _TILES_EACH if tiles <= each * _PROGRAMS_OF_TWO), most)
    return LaunchShape(-(-tiles // each), block, 1, 4 * block * each)


def launches_of_tiles(problem: CollectiveProblem) -> list[LaunchShape]:
    """Return launches with fewer programs of several tiles each (``chunk_bytes``) that still fill a GPU."""
    tiles, block = tiles_of_rows(problem)
    few = [each for each in _TILES_EACH if tiles >= each * _LEAST_PROGRAMS]
    return [LaunchShape(-(-tiles // each), block, 1, 4 * block * each) for each in few]


def scatter_launch(problem: CollectiveProblem) -> LaunchShape:
    """Return the launch of a fused reduce-scatter: programs that push tiles, and at most as many that normalize rows.

    Rows determine the warps (see :func:`row_tile`), so all programs of the grid have equally many, and a tile is 16
    bytes per thread: with less, threads would poll the same words and see them arrive at different times. The limit is
    16 warps on each of 132 multiprocessors, so a grid is resident at once with up to 128 registers per thread. Calls
    that leave room for others use half of that.
    """
    world_size = problem.topology.world_size
    row_words = max(1, problem.row_bytes // 4)
    rows = problem.nbytes // (4 * row_words) // world_size
    words = -(-problem.nbytes // 4 // world_size)
    if problem.topology.transport.serial:
        block = 1 << max(4, min(11, (words // 2).bit_length()))
        return LaunchShape(programs=4, block_words=block, num_warps=1)
    _, warps = row_tile(row_words)
    most = min(512, (66 if problem.topology.exclusive else 32) * (16 // warps)) - 1
    block = 128 * warps
    norm_programs = max(1, min(rows, most))
    push_programs = max(norm_programs, min(-(-words // block), most))
    return LaunchShape(programs=push_programs + norm_programs, block_words=block, num_warps=warps)

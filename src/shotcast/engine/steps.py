"""Steps in which every sequence decodes one token: which graph serves them, and what the device is told."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shotcast.engine.plan import StepPlan


def bucket_sizes(sequences: int) -> tuple[int, ...]:
    """Numbers of sequences for which graphs are captured, ascending, the last ``sequences``.

    Powers of two up to 8; from there an eighth to a quarter apart, so that no step has much more to do than it should:
    1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160, ...
    """
    sizes, size = [], 1
    while size < sequences:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 4)
    return (*sizes, sequences)


def bucket_of(plan: StepPlan, sizes: tuple[int, ...]) -> int | None:
    """The smallest of ``sizes`` that serves a step; None if it is none that a graph serves.

    Every sequence has one token, none is new to its slot, and so none is given more than the block of that token. A
    plan is all that this depends on: every rank takes the same way.
    """
    if not sizes or any(len(sequence.tokens) > 1 or sequence.fresh for sequence in plan.sequences):
        return None
    return next((size for size in sizes if size >= len(plan.sequences)), None)


def packed(plan: StepPlan, bucket: int, spare: int, out: npt.NDArray[np.int32]) -> None:
    """Fill ``out`` [bucket, ``kernels.steps.FIELDS``] with a step that :func:`bucket_of` serves.

    Rows without a sequence compute token 0 at position 0 of the tables' row ``spare``, which is nobody's.
    """
    for place, sequence in enumerate(plan.sequences):
        block = sequence.blocks[0] if sequence.blocks else -1
        out[place] = sequence.slot, sequence.start, sequence.tokens[0], block
    out[len(plan.sequences) : bucket] = spare, 0, 0, -1

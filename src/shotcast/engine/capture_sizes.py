"""Sizes of steps for which CUDA graphs are captured, and the size that serves a given step."""

from __future__ import annotations

from shotcast.engine.step_plan import StepPlan


def decode_capture_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the numbers of sequences for which decode graphs are captured, ascending up to ``max_sequences``; also the
    numbers of sampled tokens for which those of the head are.

    They are powers of two up to 8; from there they are an eighth to a quarter apart, so that padding adds little work:
    1, 2, 4, 8, 16, 24, ..., 64, 80, ..., 128, 160, ...
    """
    sizes, size = [], 1
    while size < max_sequences:
        sizes.append(size)
        size += size if size < 8 else max(8, (1 << (size.bit_length() - 1)) // 4)
    return (*sizes, max_sequences)


def prefill_capture_sizes(max_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which graphs of steps with prompts are captured, ascending up to ``max_tokens``.

    They are powers of two from 16 to 128, and from there powers of two with one size between: 16, 32, 64, 128, 192,
    256, 384, 512, 768, ... A smaller step takes as long as reading the weights does, and more sizes would make the
    capture expensive.
    """
    sizes, size = [], 16
    while size < max_tokens:
        sizes.append(size)
        size += size if size < 128 else (1 << (size.bit_length() - 1)) // 2
    return (*sizes, max_tokens)


def decode_capture_size(plan: StepPlan, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest of ``sizes`` whose decode graph serves a step, or None if no decode graph does.

    A decode graph serves steps in which every sequence has one token and none is new to its slot, so that no sequence
    gets more than the block of that token. The result depends on the plan only, so all ranks take the same path.
    """
    if not sizes or any(len(each.tokens) > 1 or each.is_new or each.propose for each in plan.sequences):
        return None
    return next((size for size in sizes if size >= len(plan.sequences)), None)

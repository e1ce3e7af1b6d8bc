r"""The cost of what a model computes on one GPU: a roofline for each kind of kernel, with measured efficiency.

A kernel has a fixed cost f, and takes the time of what bounds it. Near the corner of the roofline two bounds delay each
other, which a norm of order 4 describes:

.. math:: T = f + \left( (X / x)^4 + (Y / y)^4 \right)^{1/4}

with X and Y the amounts of work that bound it, and x and y the rates at which it does them. The consequence: a product
of few rows takes the time of reading its weights however many rows there are, until F / c passes B / b.

=================  ==========================================  ==================================================
kernel             X, the first amount                         Y, the second amount
=================  ==========================================  ==================================================
product            bytes of weights, b                         operations 2 m n k, c
decode attention   bytes of keys and values, b                 keys that one program reads in turn
prompt attention   operations of scores and values, c          keys that the last program reads in turn
pass over rows     bytes read and written, b                   0
=================  ==========================================  ==================================================

On a GPU a program of attention also begins. It takes as long as some keys more, 96 of a sequence that decodes and 192
of a token of a prompt, whose last tile of keys is half masked. With these round numbers the equation fits best what
``benchmarks/data/h200/kernels_x1.json`` has.

Products have three sets of constants, as they have three kernels: of one row, of few, and of many. Products of many
rows have another set for products in a row (:func:`sustained_kind`). Arithmetic at the full clock takes more power than
a GPU may take on average, so where it continues, the clock goes down until power is at the limit. Until then a GPU that
has rested saves, of the time that its products take in a row, up to s (:data:`FULL_CLOCK_US`):

.. math:: T = T_{row} - \min(T_{row} - T_{rested},\; s_{left})

What is saved uses up s, and idle time restores it: at the limit energy is proportional to time, so what is drawn beyond
the limit is proportional to the time that is saved, and a GPU that idles draws almost nothing.

An all-reduce with residual and norm in its kernel takes a moment d more than the sum, or what each rank takes to norm
all n bytes of rows, if that is longer:

.. math:: T = \max(T_{sum} + d,\; f + n / x)

Every rank norms every row, so f and x do not depend on the ranks, and a message that few ranks sum is bound by them:
8 MiB took 42 us on 2 H100 and 44 us on 4 H200, where the sums alone took 26 and 40.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ORDER = 4
"""The order of the norm that joins two bounds: 1 would add them up, infinity take the larger."""
FEW_ROWS = 64
"""The most rows of a product that the engine's native kernels for GPUs compute; the library computes those of more."""
FULL_CLOCK_US = 2_000.0
"""The least microseconds that a rested GPU saves at its full clock, before the clock goes down.

Measured on an H200 (``benchmarks/data/h200/kernels_x1.json``): matmuls are timed in isolated graphs of 2 ms that
are replayed six times, all at the full clock; sustained matmuls take 1.1 to 1.2 times as long.
"""
MOST_WIDE_ROWS = 2
"""The most rows that are multiplied with FP8 weights as they are; more are in FP8 too (``kernels/triton/gemv.py``)."""
FP8 = "_fp8"
"""The end of the names of kinds that are of weights or activations in FP8."""
PASSES = ("norm", "logits", "sampling")
"""Passes over rows that are kinds of their own: the residual and the norm on one rank, the joined logits with the
largest of each row, and sampling by temperature (greedy sampling has no kernel besides)."""
MOST_SPLITS = 64
_SPLIT_PROGRAMS = 256
"""Decode attention divides contexts, at most by 64, while it has fewer programs than this."""
DECODE_BEGINNING, PROMPT_BEGINNING = 96, 192
"""Keys that take as long as the start of a decoding sequence, and of a prompt's token, on a GPU; on a CPU none."""


class KernelWork(NamedTuple):
    """The amounts that bound a kernel: GB, Gflop or thousands of keys, as the table above says."""

    first: float
    second: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The constants of one kind of kernel."""

    fixed_us: float  # f
    first_rate: float  # x, a second: GB or Gflop
    second_rate: float = 1.0  # y, a second: Gflop or thousands of keys; 1 where there is no second amount

    def time_us(self, work: KernelWork) -> float:
        """Return the time of a kernel in microseconds, by the equation above."""
        first, second = 1e6 * work.first / self.first_rate, 1e6 * work.second / self.second_rate
        return self.fixed_us + (first**ORDER + second**ORDER) ** (1 / ORDER)


@dataclass(frozen=True, slots=True)
class FusedNormCost:
    """The constants of an all-reduce with residual and norm in its kernel, by the last equation above."""

    beyond_us: float  # d
    fixed_us: float  # f
    rate: float  # x, GB of the message a second

    def time_us(self, nbytes: float, sum_us: float) -> float:
        """Return the microseconds of a message of which the sum alone takes ``sum_us``."""
        return max(sum_us + self.beyond_us, self.fixed_us + nbytes / (1e3 * self.rate))


@dataclass(frozen=True, slots=True)
class HostCost:
    """The time that the host of an engine takes for a step, besides what the ranks compute and communicate.

    It schedules, builds the inputs, samples, and reports the tokens.
    """

    fixed_us: float  # a step
    per_sequence_us: float  # each sequence of it
    per_row_us: float  # each token of it
    hidden: bool  # the device computes meanwhile, since steps are enqueued ahead of it
    source: str  # the measurement; "not measured" if there is none
    per_layer_us: float = 0.0  # each layer of a step that no graph replays
    per_request_us: float = 0.0  # each request that begins in it
    client_us: float = 0.0  # a request on its way from the client to the loop, and its first token on the way back

    def time_us(self, sequences: int, rows: int, requests: int = 0, layers: int = 0) -> float:
        """Return the microseconds of a step of this many sequences, with this many tokens together.

        Args:
            layers: of a model whose steps no graph replays; 0 where one does.
        """
        step_us = self.fixed_us + sequences * self.per_sequence_us + rows * self.per_row_us
        return step_us + requests * self.per_request_us + layers * self.per_layer_us


NO_HOST = HostCost(0.0, 0.0, 0.0, True, "not measured")


def product_kind(rows: int, fp8: bool, few_rows: int = FEW_ROWS) -> str:
    rows_kind = "one_row" if rows == 1 else "few_rows" if rows <= few_rows else "many_rows"
    return f"product_{rows_kind}{FP8 * fp8}"


def sustained_kind(fp8: bool) -> str:
    """Return the kind of products of many rows that run in a row, at the clock that the GPU can keep up."""
    return f"sustained_product{FP8 * fp8}"


class FullClock:
    """Follows how much a GPU can still save at its full clock, by the second equation above.

    It begins with nothing, as after work.
    """

    def __init__(self) -> None:
        self._left_us = 0.0

    def rest(self, idle_us: float) -> None:
        """Restore what idle time restores."""
        self._left_us = min(FULL_CLOCK_US, self._left_us + idle_us)

    def take(self, saved_us: float) -> float:
        """Return the microseconds that work saves which at the full clock saves ``saved_us``, and use them up."""
        taken_us = min(saved_us, self._left_us)
        self._left_us -= taken_us
        return taken_us


def product(rows: int, outputs: int, inputs: int, weight_bytes: int) -> KernelWork:
    """Return the work of ``[rows, inputs] x [inputs, outputs]``, each weight of this many bytes.

    One row has two operations a weight, which never bound it.
    """
    operations = 2 * rows * outputs * inputs if rows > 1 else 0
    return KernelWork(outputs * inputs * weight_bytes / 1e9, operations / 1e9)


def decode_splits(sequences: int, kv_heads: int) -> int:
    """Return the parts in which decode attention reads a context."""
    return max(1, min(MOST_SPLITS, _SPLIT_PROGRAMS // max(1, sequences * kv_heads)))


def decode_attention(
    sequences: int, context: float, kv_heads: int, head_dim: int, itemsize: float, beginning: int = DECODE_BEGINNING
) -> KernelWork:
    """Return the work of the attention of ``sequences`` with one query each, over ``context`` tokens on average.

    ``beginning`` is the number of keys in whose time a sequence begins; 0 on a CPU.
    """
    nbytes = 2 * sequences * (context + beginning) * kv_heads * head_dim * itemsize
    return KernelWork(nbytes / 1e9, context / decode_splits(sequences, kv_heads) / 1e3)


def prompt_attention(
    parts: list[tuple[int, int]], heads: int, head_dim: int, beginning: int = PROMPT_BEGINNING
) -> KernelWork:
    """Return the work of the attention of parts of prompts: for each its tokens, and the tokens before them.

    A token sees those before it and itself, each with 4 operations a head and dimension: scores, and sums of values.
    It begins in the time of ``beginning`` keys; 0 on a CPU.
    """
    seen = sum(tokens * (before + (tokens + 1) / 2 + beginning) for tokens, before in parts)
    longest = max((tokens + before for tokens, before in parts), default=0)
    return KernelWork(4 * seen * heads * head_dim / 1e9, longest / 1e3)


def rows_pass(nbytes: float) -> KernelWork:
    """Return the work of a kernel that reads and writes this many bytes of activations."""
    return KernelWork(nbytes / 1e9)


KINDS = (
    *(f"product_{rows}{dtype}" for dtype in ("", FP8) for rows in ("one_row", "few_rows", "many_rows")),
    *(sustained_kind(fp8) for fp8 in (False, True)),
    "decode_attention",
    "prompt_attention",
    "rows_pass",
    f"rows_pass{FP8}",
    *PASSES,
    f"norm{FP8}",
)
"""The kinds of kernels on a GPU; those in FP8 only where it has that. A pass in FP8 writes FP8."""

HEAD_OF_PROMPTS = "head_of_prompts"
"""The kind of the logits after many rows: threads of the library that multiplied them still wait for more."""
CPU_KINDS = (
    "product",
    "large_product",
    "head",
    HEAD_OF_PROMPTS,
    "norm",
    "embedding",
    "activation",
    "decode_attention",
    "prompt_attention",
)
"""The kinds of kernels on a CPU, each with constants by number of rows, such as ``product@16``."""

r"""The cost of model computation on one GPU: a roofline per kind of kernel, with measured efficiency.

A kernel takes a fixed cost f plus the time of its bound. Near the corner of the roofline two bounds interact, which a
norm of order 4 describes:

.. math:: T = f + \left( (X / x)^4 + (Y / y)^4 \right)^{1/4}

with X and Y the amounts of work that bound it, and x and y the rates at which it does them. The consequence: a product
of few rows takes the time of reading its weights for any number of rows, until F / c exceeds B / b.

=================  ==========================================  ==================================================
kernel             X, the first amount                         Y, the second amount
=================  ==========================================  ==================================================
product            bytes of weights, b                         operations 2 m n k, c
decode attention   bytes of keys and values, b                 keys that one program reads in turn
prompt attention   operations of scores and values, c          keys that the last program reads in turn
pass over rows     bytes read and written, b                   0
=================  ==========================================  ==================================================

On a GPU an attention program also has a start-up cost, equivalent to 96 more keys for a decoding sequence and 192 for a
prompt token, whose last tile of keys is half masked. These round numbers fit ``benchmarks/data/h200/kernels_x1.json``
best.

Products have three sets of constants because they have three kernels: for one row, for few, and for many. Products of
many rows have another set for back-to-back runs (:func:`sustained_kind`). Arithmetic at the full clock draws more power
than a GPU may draw on average, so under sustained load the clock drops until power meets the limit. Until then a rested
GPU saves up to s of the time of back-to-back products (:data:`FULL_CLOCK_US`):

.. math:: T = T_{row} - \min(T_{row} - T_{rested},\; s_{left})

Savings use up s, and idle time restores it: at the limit energy is proportional to time, so the energy drawn beyond the
limit is proportional to the time saved, and an idle GPU draws almost nothing.

An all-reduce with fused residual and norm takes a time d more than the sum, or the time for each rank to normalize all
n bytes of rows, whichever is longer:

.. math:: T = \max(T_{sum} + d,\; f + n / x)

Every rank normalizes every row, so f and x do not depend on the number of ranks, and they bound messages that few ranks
sum: 8 MiB took 42 us on 2 H100 and 44 us on 4 H200, where just the sums took 26 and 40.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

ORDER = 4
"""The order of the norm that combines two bounds: 1 would add them, infinity would take the larger."""
FEW_ROWS = 64
"""The most rows that the engine's native GPU matmuls handle; larger products use the library."""
FULL_CLOCK_US = 2_000.0
"""The minimum time that a rested GPU saves at its full clock before the clock drops, in microseconds.

Measured on an H200 (``benchmarks/data/h200/kernels_x1.json``): matmuls are timed in isolated graphs of 2 ms that are
replayed six times, all at the full clock; sustained matmuls are 1.1 to 1.2 times slower.
"""
MOST_WIDE_ROWS = 2
"""The most rows multiplied with FP8 weights in 16 bits; more rows are converted to FP8 too
(``kernels/triton/gemv.py``).
"""
FP8 = "_fp8"
"""The suffix of kinds with weights or activations in FP8."""
PASSES = ("norm", "logits", "sampling")
"""Passes over rows with separate kinds: the residual and norm on one rank, the joined logits with each row's maximum,
and sampling by temperature (greedy sampling needs no further kernel)."""
MOST_SPLITS = 64
_SPLIT_PROGRAMS = 256
"""Decode attention splits contexts, into at most 64 parts, while it has fewer programs than this."""
DECODE_BEGINNING, PROMPT_BEGINNING = 96, 192
"""Start-up cost of a decoding sequence and of a prompt token on a GPU, in keys; 0 on a CPU."""


class KernelWork(NamedTuple):
    """The amounts of work that bound a kernel: GB, Gflop or thousands of keys, as in the table above."""

    first: float
    second: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCost:
    """The constants of one kind of kernel."""

    fixed_us: float  # f
    first_rate: float  # x, a second: GB or Gflop
    second_rate: float = 1.0  # y, a second: Gflop or thousands of keys; 1 where there is no second amount

    def time_us(self, work: KernelWork) -> float:
        """Return the time of a kernel in microseconds, from the equation above."""
        first, second = 1e6 * work.first / self.first_rate, 1e6 * work.second / self.second_rate
        return self.fixed_us + (first**ORDER + second**ORDER) ** (1 / ORDER)


@dataclass(frozen=True, slots=True)
class FusedNormCost:
    """The constants of an all-reduce with fused residual and norm, from the last equation above."""

    beyond_us: float  # d
    fixed_us: float  # f
    rate: float  # x, GB of the message a second

    def time_us(self, nbytes: float, sum_us: float) -> float:
        """Return the microseconds of a message whose sum takes ``sum_us``."""
        return max(sum_us + self.beyond_us, self.fixed_us + nbytes / (1e3 * self.rate))


@dataclass(frozen=True, slots=True)
class HostCost:
    """The host time of an engine step, beyond the computation and communication of the ranks.

    It covers scheduling, building inputs, sampling, and reporting tokens.
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
        """Return the microseconds of a step of this many sequences, with this many tokens in total.

        Args:
            layers: layers of a model whose steps are not replayed as graphs; 0 if they are.
        """
        step_us = self.fixed_us + sequences * self.per_sequence_us + rows * self.per_row_us
        return step_us + requests * self.per_request_us + layers * self.per_layer_us


NO_HOST = HostCost(0.0, 0.0, 0.0, True, "not measured")


def product_kind(rows: int, fp8: bool, few_rows: int = FEW_ROWS) -> str:
    rows_kind = "one_row" if rows == 1 else "few_rows" if rows <= few_rows else "many_rows"
    return f"product_{rows_kind}{FP8 * fp8}"


def sustained_kind(fp8: bool) -> str:
    """Return the kind of back-to-back products of many rows, at the sustained clock."""
    return f"sustained_product{FP8 * fp8}"


class FullClock:
    """Tracks how much time a GPU can still save at its full clock, by the second equation above.

    It starts at zero, as after work.
    """

    def __init__(self) -> None:
        self._left_us = 0.0

    def rest(self, idle_us: float) -> None:
        """Restore the budget for idle time."""
        self._left_us = min(FULL_CLOCK_US, self._left_us + idle_us)

    def take(self, saved_us: float) -> float:
        """Consume up to ``saved_us`` microseconds of the remaining savings at the full clock, and return the amount."""
        taken_us = min(saved_us, self._left_us)
        self._left_us -= taken_us
        return taken_us


def product(rows: int, outputs: int, inputs: int, weight_bytes: int) -> KernelWork:
    """Return the work of ``[rows, inputs] x [inputs, outputs]`` with ``weight_bytes`` bytes per weight.

    One row needs two operations per weight, which never limit it.
    """
    operations = 2 * rows * outputs * inputs if rows > 1 else 0
    return KernelWork(outputs * inputs * weight_bytes / 1e9, operations / 1e9)


def decode_splits(sequences: int, kv_heads: int) -> int:
    """Return the number of parts in which decode attention reads a context."""
    return max(1, min(MOST_SPLITS, _SPLIT_PROGRAMS // max(1, sequences * kv_heads)))


def decode_attention(
    sequences: int, context: float, kv_heads: int, head_dim: int, itemsize: float, beginning: int = DECODE_BEGINNING
) -> KernelWork:
    """Return the attention work of ``sequences`` with one query each, over ``context`` tokens on average.

    ``beginning`` is the start-up cost of a sequence in keys; 0 on a CPU.
    """
    nbytes = 2 * sequences * (context + beginning) * kv_heads * head_dim * itemsize
    return KernelWork(nbytes / 1e9, context / decode_splits(sequences, kv_heads) / 1e3)


def prompt_attention(
    parts: list[tuple[int, int]], heads: int, head_dim: int, beginning: int = PROMPT_BEGINNING
) -> KernelWork:
    """Return the attention work of parts of prompts, each given by its tokens and the tokens before them.

    A token attends to itself and all earlier tokens, with 4 operations per head and dimension: scores, and sums of
    values. Its start-up cost is ``beginning`` keys; 0 on a CPU.
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
"""The kinds of kernels on a GPU; FP8 kinds exist only if the GPU supports FP8. A pass in FP8 writes FP8."""

HEAD_OF_PROMPTS = "head_of_prompts"
"""The kind of logits computed after many rows, while the library's threads still wait for further products."""
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

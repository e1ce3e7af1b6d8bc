"""Per-token quantities of the sampler: penalized logits, distances, weights, noise and scores.

The sort keys are integers. Programs combine them with maxima and sums, whose results do not depend on the order.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

WEIGHT_UNIT = tl.constexpr(2.0**44)
"""The weight of the likeliest token, in integer units."""
BOUND_SLOPE = tl.constexpr(2.0**-23 * math.log(2.0))
BOUND_OFFSET = tl.constexpr((127 + 31) * math.log(2.0) + 0.01)
"""Constants of :func:`score_bound`; 0.01 exceeds all rounding errors combined."""
LOWEST_KEY = tl.constexpr(-(2**63) + 2**31 - 1)
"""A key below all other keys of :func:`argmax_key`; its token is 0."""
INTEGERS, REALS, STATE = tl.constexpr(5), tl.constexpr(6), tl.constexpr(3)
"""Column counts of the tensors of :class:`shotcast.kernels.triton.sampling.SamplingMetadata`."""


@triton.jit
def argmax_key(value, token):
    """Build an int64 that orders as the float32 values do; among equal values, the lower token has the larger key."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def key_token(key):
    """Extract the token of an :func:`argmax_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Extract the float32 value of an :func:`argmax_key`."""
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(distance):
    """Compute the integer weight of a token: exp(-distance) in units of 2^-44."""
    return (tl.exp(-distance) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def scramble(x, first, second):
    """Hash uint32 values as the CPU sampler of the engine does."""
    x ^= first
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= second
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def noise(token, keys):
    """Generate 31 uniformly distributed bits for each token."""
    first, second = keys
    return (scramble(scramble(token.to(tl.uint32, bitcast=True), 0, 0), first, second) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def uniform_of(bits):
    """Convert noise bits to a uniform number, in units of 2^-31."""
    return bits.to(tl.float32) + 0.5


@triton.jit
def score_bound(distance, bits):
    """Compute an upper bound of the score for a third of the work.

    A time is at least its uniform number, and the logarithm of a number is at least the bits of its float read as a
    number.
    """
    number = uniform_of(bits).to(tl.int32, bitcast=True).to(tl.float32)
    return -distance + BOUND_OFFSET - number * BOUND_SLOPE


@triton.jit
def score_key(distance, token, bits):
    """Compute the :func:`argmax_key` of each token's score, given its :func:`noise` bits.

    The exponentially distributed time is computed as the CPU sampler of the engine does.
    """
    uniform = uniform_of(bits) * (2.0**-31)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # log1p: the logarithm of the rounded 1 - uniform is off in proportion to that rounding.
    complement = 1.0 - uniform
    rounded = 1.0 - complement
    tiny = rounded == 0
    time = tl.where(tiny, uniform, -tl.log(complement) * tl.div_rn(uniform, tl.where(tiny, 1.0, rounded)))
    return argmax_key(-distance - tl.log(time), token)


@triton.jit
def load_row(logits, counts, masks, metadata, row, VOCAB: tl.constexpr):
    """Load a row's data: pointers to its logits and counts, its presence and frequency penalties, 1 / its temperature,
    its repetition penalty, a pointer to its mask, and whether it is constrained."""
    slot = tl.load(metadata.integers + row * INTEGERS).to(tl.int64)
    mask = tl.load(metadata.integers + row * INTEGERS + 4)
    row_reals = metadata.reals + row * REALS
    return (
        logits + row * VOCAB,
        counts + slot * VOCAB,
        tl.load(row_reals + 2),
        tl.load(row_reals + 3),
        tl.load(row_reals),
        tl.load(row_reals + 5),
        masks + mask.to(tl.int64) * ((VOCAB + 31) // 32),
        mask >= 0,
    )


@triton.jit
def has_penalties(row_data):
    """Check whether a row has a presence, frequency or repetition penalty."""
    return (row_data[2] != 0) | (row_data[3] != 0) | (row_data[5] != 1)


@triton.jit
def is_adjusted(row_data):
    """Check whether a row has penalties or is constrained, so that its likeliest token may not be the model's."""
    return has_penalties(row_data) | row_data[7]


@triton.jit
def penalised_logits(row_data, token, inside):
    """Load logits and apply penalties; minus infinity where not ``inside``, and for disallowed tokens."""
    logits, counts, presence, frequency, _, repetition, mask, constrained = row_data
    value = tl.load(logits + token, mask=inside, other=float("-inf"))
    if has_penalties(row_data):
        count = tl.load(counts + token, mask=inside, other=0)
        scaled = tl.where(value > 0, tl.div_rn(value, tl.where(inside, repetition, 1.0)), value * repetition)
        value = tl.where(count != 0, scaled, value)
        count = count & 0x3FFFFFFF  # the next bit says that the prompt has the token
        value = value - (tl.where(count > 0, presence, 0.0) + count.to(tl.float32) * frequency)
    if constrained:
        word = tl.load(mask + (token >> 5), mask=inside, other=0)
        value = tl.where(((word >> (token & 31)) & 1) == 1, value, float("-inf"))
    return value


@triton.jit
def load_largest(row_data, best, state, row):
    """Load the row's largest logit among allowed tokens, after penalties, and its token."""
    if is_adjusted(row_data):
        key = tl.load(state + row * STATE)
        token = key_token(key)
        value = key_value(key)
    else:
        token = tl.load(best + row * 2)
        value = tl.load(row_data[0] + token)
    return value, token


@triton.jit
def distances(row_data, largest, token, inside):
    """Compute the distances of tokens from the largest logit, divided by temperature; infinite where not ``inside``."""
    # abs clears the sign of a zero
    return tl.abs((largest - penalised_logits(row_data, token, inside)) * row_data[4])


@triton.jit
def noise_keys(integers, row):
    """Load the two words that key a row's noise."""
    row_integers = integers + row * INTEGERS
    return (
        tl.load(row_integers + 2).to(tl.uint32, bitcast=True),
        tl.load(row_integers + 3).to(tl.uint32, bitcast=True),
    )

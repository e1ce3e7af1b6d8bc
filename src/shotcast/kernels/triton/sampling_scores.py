"""What the tokens of a row have in a draw: logits after penalties, distances, weights, noise, scores.

Entries and keys of elements are integers, so that programs meet in maxima and sums, which depend on no order.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

UNIT = tl.constexpr(2.0**44)
"""Units of weight of the likeliest token."""
STEEP = tl.constexpr(2.0**-23 * math.log(2.0))
HIGHEST = tl.constexpr((127 + 31) * math.log(2.0) + 0.01)
"""Of :func:`highest`; 0.01 is more than all that is rounded."""
NOBODY = tl.constexpr(-(2**63) + 2**31 - 1)
"""An entry below all others, of token 0."""
INTEGERS, REALS, STATE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(3)
"""Columns of :class:`shotcast.kernels.triton.sampling.Rows`."""


@triton.jit
def entry(value, token):
    """An int64 in the order of float32 values; of equal ones, that of the lower token is larger."""
    bits = value.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(made):
    return 0x7FFFFFFF - (made & 0x7FFFFFFF)


@triton.jit
def value_of(made):
    order = (made >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(distance):
    return (tl.exp(-distance) * UNIT).to(tl.int64)


@triton.jit
def scramble(x, first, second):
    """``engine.draw.scramble`` of uint32."""
    x ^= first
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= second
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def noise(token, keys):
    """31 bits, uniform."""
    first, second = keys
    return (scramble(scramble(token.to(tl.uint32, bitcast=True), 0, 0), first, second) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def uniform_of(bits):
    """In units of 2^-31."""
    return bits.to(tl.float32) + 0.5


@triton.jit
def highest(distance, bits):
    """What scores are no higher than, for a third of the work: a time is not below its uniform number, nor the
    logarithm of a number below the bits of its float read as a number."""
    number = uniform_of(bits).to(tl.int32, bitcast=True).to(tl.float32)
    return -distance + HIGHEST - number * STEEP


@triton.jit
def race(distance, token, bits):
    """Entries of scores; the time is ``engine.draw.exponential``'s of ``bits``, which are the token's :func:`noise`."""
    uniform = uniform_of(bits) * (2.0**-31)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # log1p: by what 1 - uniform is rounded, its logarithm is off in proportion
    left = 1.0 - uniform
    gone = 1.0 - left
    tiny = gone == 0
    time = tl.where(tiny, uniform, -tl.log(left) * tl.div_rn(uniform, tl.where(tiny, 1.0, gone)))
    return entry(-distance - tl.log(time), token)


@triton.jit
def source_of(logits, counts, integers, reals, row, VOCAB: tl.constexpr):
    """Where a row's logits and counts begin; its presence and frequency penalty, and 1 / its temperature."""
    slot = tl.load(integers + row * INTEGERS).to(tl.int64)
    mine = reals + row * REALS
    return logits + row * VOCAB, counts + slot * VOCAB, tl.load(mine + 2), tl.load(mine + 3), tl.load(mine)


@triton.jit
def has_penalties(source):
    return (source[2] != 0) | (source[3] != 0)


@triton.jit
def penalised(source, token, inside):
    """Logits after penalties; minus infinity where not ``inside``."""
    logits, counts, presence, frequency, _ = source
    value = tl.load(logits + token, mask=inside, other=float("-inf"))
    if has_penalties(source):
        count = tl.load(counts + token, mask=inside, other=0)
        value = value - (tl.where(count > 0, presence, 0.0) + count.to(tl.float32) * frequency)
    return value


@triton.jit
def largest_of(source, best, state, row):
    """The row's largest logit after penalties, and its token."""
    if has_penalties(source):
        made = tl.load(state + row * STATE)
        token = token_of(made)
        value = value_of(made)
    else:
        token = tl.load(best + row * 2)
        value = tl.load(source[0] + token)
    return value, token


@triton.jit
def distances(source, largest, token, inside):
    """Infinite where not ``inside``."""
    # abs, for the sign of a zero
    return tl.abs((largest - penalised(source, token, inside)) * source[4])


@triton.jit
def keys_of(integers, row):
    mine = integers + row * INTEGERS
    return tl.load(mine + 2).to(tl.uint32, bitcast=True), tl.load(mine + 3).to(tl.uint32, bitcast=True)

r"""The time of multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) in a layer, and what it keeps.

Of each token a layer keeps one latent of r values, from which the keys and values of all heads are computed, and d
values of a key with positions, which all heads share: :math:`(r + d)` values instead of two for each key-value head and
dimension. Every rank keeps all of them; heads are divided between ranks.

A sequence that decodes never expands the latents of tokens before it: queries take in the matrix of keys, and results
of attention that of values. Then attention reads the latents once for all H heads of a rank,

.. math:: T = \max\left(\frac{c\,(r + d)\,b}{B},\; \frac{2\,c\,H\,(2 r + d)}{C}\right)

for c tokens of context in all, at the measured rate B at which attention reads keys and values, b bytes each, and the
rate C at which prompts are computed. Parts of prompts expand the latents of all that they see, by one product, and
are computed like those of ordinary heads with :math:`(n + d + v) / 2` dimensions, n of keys without positions and v of
values.

The consequence: keys and values take a small part of the memory, tensor parallel does not divide them, and with many
heads decoding is bound by arithmetic as much as by reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experts.model import ExpertModel, LatentAttention
from shotcast.cost.inference import decode_attention, prompt_attention, rows_pass
from shotcast.layers.partition import shard
from shotcast.planner.calibration import Calibration
from shotcast.planner.step import Priced

LATENT_STAND_IN = 0.3
"""The error of kernels of ordinary attention in place of latent ones, as a part of their time.

No kernel of latent attention was measured here. Published tables of a framework on the H200 lie that far from what is
predicted, as a root mean square (research/notes/mixture_of_experts.md); no constant is fitted to them.
"""


def one_after_another(*prices: Priced) -> Priced:
    """Return the price of kernels one after another, which are off alike."""
    time_us = sum(price.time_us for price in prices)
    residual = sum(price.time_us * price.residual for price in prices) / time_us
    return Priced(time_us, residual, sum(price.saved_us for price in prices))


class LatentLayer:
    """Prices the attention of a layer, with the products around it, on the rank that has most heads.

    Args:
        model: its dimensions, with latent attention.
        ranks: those that share the heads.
        calibration: constants of the kernels.
        product: the time and residual of a dense product of rows, outputs and inputs, in FP8 or not.
        fp8: products are in FP8, but for the two that decoding takes the matrices of keys and values in by.
        kv_item: bytes of a value of the cache.
    """

    def __init__(
        self,
        model: ExpertModel,
        latent: LatentAttention,
        ranks: int,
        calibration: Calibration,
        product: Callable[[int, int, int, bool], Priced],
        fp8: bool,
        kv_item: int,
    ):
        self._latent, self._hidden = latent, model.hidden
        self._heads = len(shard(model.heads, 0, ranks).part)
        self._calibration, self._product, self._fp8, self._kv_item = calibration, product, fp8, kv_item

    def parts(
        self, decoding: int, context: float, prompts: Sequence[tuple[int, int]], rows: int
    ) -> Mapping[str, Priced]:
        """Return the time and the residual of each part.

        Args:
            decoding: sequences that decode, a token each.
            context: tokens before these, on average.
            prompts: for each part of a prompt its tokens, and those before it.
            rows: all tokens.
        """
        latent, heads, fp8 = self._latent, self._heads, self._fp8
        kept, item = latent.kv_rank + latent.position, self._calibration.itemsize
        queries = heads * (latent.plain + latent.position)
        products = [self._product(rows, (latent.query_rank or 0) + kept, self._hidden, fp8)]
        products.append(self._product(rows, queries, latent.query_rank or self._hidden, fp8))
        if decoding:
            products.append(self._product(decoding, heads * latent.kv_rank, latent.plain, False))
            products.append(self._product(decoding, heads * latent.value, latent.kv_rank, False))
        if prompts:
            seen = sum(tokens + before for tokens, before in prompts)
            products.append(self._product(seen, heads * (latent.plain + latent.value), latent.kv_rank, fp8))
        turned = rows * 2 * (heads * latent.position + kept + (latent.query_rank or 0)) * item
        return {
            "qkv": one_after_another(*products),
            "rotation": Priced(
                self._calibration.time_us("rows_pass", rows_pass(turned)),
                self._calibration.residual("rows_pass"),
            ),
            "attention": self._attention(decoding, context, prompts),
            "output": self._product(rows, self._hidden, heads * latent.value, fp8),
        }

    def _attention(self, decoding: int, context: float, prompts: Sequence[tuple[int, int]]) -> Priced:
        latent, calibration = self._latent, self._calibration
        seen, kept = context + 1, latent.kv_rank + latent.position
        compute_rate = calibration.kinds["prompt_attention"].cost.first_rate
        time_us, residual = 0.0, 0.0
        if decoding:
            # one head of keys, of which each value is half of a pair
            work = decode_attention(decoding, seen, 1, kept, self._kv_item)
            read_us = calibration.time_us("decode_attention", work._replace(first=work.first / 2))
            operations = 2 * decoding * seen * self._heads * (2 * latent.kv_rank + latent.position)
            time_us = max(read_us, operations / compute_rate / 1e3)
            residual = calibration.residual("decode_attention")
        if prompts:
            width = latent.plain + latent.position + latent.value
            work = prompt_attention(list(prompts), self._heads, 1)
            work = work._replace(first=work.first * width / 2)
            time_us += calibration.time_us("prompt_attention", work)
            residual = max(residual, calibration.residual("prompt_attention"))
        return Priced(time_us, math.hypot(residual, LATENT_STAND_IN))


def latent_bytes(model: ExpertModel, latent: LatentAttention, item: int, ranks: int, quantization: str) -> int:
    """Return the bytes of a layer's latent attention and its two norms on the rank that has most heads.

    Args:
        item: bytes of a weight that is not quantized.
        ranks: those that share the heads.
        quantization: ``fp8`` if matrices take a byte a weight, and a float32 for each output.
    """
    shapes = latent.matrices(model.hidden, len(shard(model.heads, 0, ranks).part)).values()
    matrices, outputs = sum(math.prod(shape) for shape in shapes), sum(shape[0] for shape in shapes)
    norms = 2 * model.hidden + latent.kv_rank + (latent.query_rank or 0)
    biases = ((latent.query_rank or 0) + latent.kv_rank + latent.position + model.hidden) * model.attention_bias
    return (norms + biases) * item + (matrices + 4 * outputs if quantization else matrices * item)

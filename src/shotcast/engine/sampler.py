"""What requests ask of their draws, slot by slot, and the draws of a step.

The noise of a draw is keyed by the request's seed and the place in its output, so what a request draws depends on no
more: not on the batch, the slot, the rank, or whether it was pre-empted. On a CPU, ``engine/draw.py`` draws; on a GPU
``kernels/triton/sampling.py``, to which a step is one copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from shotcast.engine.draw import draw, inverse_temperature, noise_of, penalise
from shotcast.engine.requests import SamplingParams, TokenLogprob
from shotcast.engine.transfer import uploaded
from shotcast.errors import ConfigError

MOST_VOCAB = 2**18
"""Tokens among which a GPU draws: sums of their weights, in integers, go no further."""


def row_key(seed: int, position: int) -> bytes:
    """64 bits that key the noise of one place of one output."""
    return blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()


def derived_seed(request_id: str, salt: int) -> int:
    """The seed of a request that names none."""
    digest = blake2b(request_id.encode(), digest_size=8, key=struct.pack("<q", salt)).digest()
    return struct.unpack("<q", digest)[0]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn, on the device still.

    Attributes:
        told: int64 [rows, 2], the token drawn, and 1 if all logits of the row are numbers, else 0.
        asked: of the rows whose requests want log-probabilities, their numbers, and how many alternatives each wants.
        logprobs: of these rows: float32 [asked], of the token drawn; int64 [asked], its rank; and of the likeliest,
            float32 and int64 [asked, alternatives], log-probabilities and tokens. Empty where nobody asks.
    """

    told: torch.Tensor
    asked: tuple[tuple[int, int], ...] = ()
    logprobs: tuple[torch.Tensor, ...] = ()


def logprobs_of(
    tokens: Sequence[int], asked: Sequence[tuple[int, int]], logprobs: Sequence[torch.Tensor]
) -> list[TokenLogprob | None]:
    """For each row of a :class:`Sampled` what its request is told, from tensors that have come to the host."""
    found: list[TokenLogprob | None] = [None] * len(tokens)
    columns = [tensor.tolist() for tensor in logprobs]
    for (row, count), *entry in zip(asked, *columns, strict=True):
        logprob, rank, values, indices = entry
        likeliest = sorted(zip(indices, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found[row] = TokenLogprob(tokens[row], logprob, rank, tuple(likeliest[:count]))
    return found


class Sampler:
    """Draws the next token of each sequence of a step, as its request asks. Nothing here waits for the device.

    Args:
        max_slots: slots are 0 to ``max_slots - 1``.
        vocab: columns of the logits.
        device: of the logits.
        salt: of 64 bits, signed; with it, requests without a seed draw. The same on ranks that are to draw the same.
        kernels: draw as on a GPU elsewhere too, by Triton's interpreter.

    Raises:
        ConfigError: more than MOST_VOCAB columns on a GPU.
    """

    def __init__(self, max_slots: int, vocab: int, device: torch.device | str, salt: int, kernels: bool = False):
        self.vocab = vocab
        self.device = torch.device(device)
        self._salt = salt
        self._requests: list[tuple[str, SamplingParams] | None] = [None] * max_slots
        self._seeds = [0] * max_slots
        self._positions = [0] * max_slots
        self._counts: torch.Tensor | None = None  # int32 [max_slots, vocab], once a request has penalties
        self._kernels = kernels or self.device.type == "cuda"
        if self._kernels and vocab > MOST_VOCAB:
            raise ConfigError(f"on a GPU, tokens are drawn from up to {MOST_VOCAB}, and this vocabulary has {vocab}")
        if self._kernels:
            # What ``kernels.triton.sampling.SamplingMetadata`` has of each slot.
            self._integers = np.zeros((max_slots, 4), np.int32)
            self._reals = np.zeros((max_slots, 5), np.float32)
            self._top_p = np.ones(max_slots)
        else:
            self._noise = noise_of(vocab)

    def warm(self) -> None:
        """Draw for nobody, so that no request waits for kernels to be compiled."""
        if self._kernels:
            nobody = Sampler(1, self.vocab, self.device, 0, kernels=True)
            nobody.assign(0, SamplingParams(top_k=1, presence_penalty=1.0), "", ())
            best = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
            nobody.sample(torch.zeros(1, self.vocab, device=self.device), [0], best, best.new_zeros(1), False)

    def assign(self, slot: int, params: SamplingParams, request_id: str, output: Sequence[int]) -> None:
        """A slot is a request's from now on, whose output holds ``output`` already."""
        self._requests[slot] = request_id, params
        self._seeds[slot] = derived_seed(request_id, self._salt) if params.seed is None else params.seed
        self._positions[slot] = len(output)
        if params.penalised:
            if self._counts is None:
                self._counts = torch.zeros(len(self._requests), self.vocab, dtype=torch.int32, device=self.device)
            counts = np.bincount(np.array(output, np.int64), minlength=self.vocab).astype(np.int32)
            self._counts[slot] = uploaded([counts], self.device)[0]
        if self._kernels:
            top_k, top_p = (params.top_k, params.top_p) if params.cuts else (0, 1.0)
            self._integers[slot, :2] = slot, 0 if top_k >= self.vocab else top_k
            self._top_p[slot] = top_p
            # Beyond, all weights together are less than 1 - top_p, even of as many tokens.
            beyond = math.log(self.vocab / (1 - top_p)) + 1 if top_p < 1 else math.inf
            penalties = params.presence_penalty, params.frequency_penalty
            self._reals[slot] = inverse_temperature(params), -params.floor, *penalties, beyond

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        best: torch.Tensor,
        drawn: torch.Tensor,
        best_is_entered: bool,
    ) -> Sampled:
        """Draw a token for each row, and enter it into ``drawn``.

        Args:
            logits: float32 [rows, vocab]; they are left as they are.
            slots: of the rows; each was assigned, none comes twice.
            best: int64 [rows, 2], as :class:`~shotcast.layers.batch.Logits` have it; left as it is.
            drawn: int64 [max_slots or more], of each slot the token drawn last.
            best_is_entered: ``drawn`` holds the tokens of ``best`` already.

        Raises:
            ConfigError: the logits have another shape or dtype, or a slot is nobody's.
        """
        if logits.shape != (len(slots), self.vocab) or logits.dtype != torch.float32:
            raise ConfigError(
                f"the logits of {len(slots)} slots are float32 {[len(slots), self.vocab]}, "
                f"not {str(logits.dtype).removeprefix('torch.')} {list(logits.shape)}"
            )
        params = [self._params(slot) for slot in slots]
        as_given = all(p.greedy and not p.penalised for p in params)
        if as_given:
            told = best
        elif self._kernels:
            told = self._by_kernels(logits, slots, params, best, drawn)
        else:
            told = torch.stack((self._by_torch(logits, slots, params, best[:, 0]), best[:, 1]), dim=1)
        if not (best_is_entered if as_given else self._kernels):
            drawn.index_copy_(0, self._index(slots), told[:, 0])
        for slot in slots:
            self._positions[slot] += 1
        return self._sampled(logits, told, params)

    def _params(self, slot: int) -> SamplingParams:
        request = self._requests[slot]
        if request is None:
            raise ConfigError(f"slot {slot} is nobody's: assign it first")
        return request[1]

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return uploaded([np.array(values, np.int64)], self.device)[0]

    def _noise_keys(self, slots: Sequence[int]) -> npt.NDArray[np.int32]:
        """int32 [rows, 2]."""
        keys = b"".join(row_key(self._seeds[slot], self._positions[slot]) for slot in slots)
        return np.frombuffer(keys, np.int32).reshape(-1, 2)

    # -- on a GPU -----------------------------------------------------------------------------------------------------

    def _by_kernels(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        params: list[SamplingParams],
        best: torch.Tensor,
        drawn: torch.Tensor,
    ) -> torch.Tensor:
        from shotcast.kernels.triton import sampling

        places = np.array(slots)
        integers = self._integers[places]
        integers[:, 2:] = self._noise_keys(slots)
        asked = integers, self._reals[places], self._top_p[places], np.array([sampling.INITIAL_STATE] * len(slots))
        counts = self._counts if any(p.penalised for p in params) else None
        metadata = sampling.SamplingMetadata(*uploaded(asked, self.device))
        return sampling.sample(logits, best, metadata, counts, drawn, any(p.cuts for p in params))

    # -- on a CPU -----------------------------------------------------------------------------------------------------

    def _by_torch(
        self, logits: torch.Tensor, slots: Sequence[int], params: list[SamplingParams], best: torch.Tensor
    ) -> torch.Tensor:
        keys = torch.tensor(self._noise_keys(slots))
        slow = [row for row, p in enumerate(params) if p.penalised]
        if not slow:
            return draw(logits, best, params, keys, self._noise)
        assert self._counts is not None
        places = self._index([slots[row] for row in slow])
        logits = penalise(logits, slow, params, self._counts[places])
        if any(p.greedy for p in params):
            best = logits.argmax(1)
        tokens = draw(logits, best, params, keys, self._noise)
        # A slot comes once, so no pair comes twice, and this adds as it says.
        self._counts[places, tokens[self._index(slow)]] += 1
        return tokens

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _sampled(self, logits: torch.Tensor, told: torch.Tensor, params: list[SamplingParams]) -> Sampled:
        asked = tuple((row, p.logprobs) for row, p in enumerate(params) if p.logprobs is not None)
        if not asked:
            return Sampled(told)
        index = self._index([row for row, _ in asked])
        logprobs = logits[index].log_softmax(1)
        own = logprobs.gather(1, told[index, :1])
        ranks = (logprobs > own).sum(1) + 1
        most = min(max(count for _, count in asked), self.vocab)
        top = logprobs.topk(most, dim=1)
        return Sampled(told, asked, (own[:, 0], ranks, top.values, top.indices))

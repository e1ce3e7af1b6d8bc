"""Tokens drawn from logits, for a batch at once.

A draw is a race: each token has a time, exponentially distributed with its probability as rate, and the first wins.
The times come from a hash of (seed, place in the output, token), so what a request draws depends on no more: not on
the batch, the slot, the rank, or whether it was pre-empted.

On a CPU that is PyTorch's work, below; on a GPU that of ``kernels/sampling.py``, to which a step is one copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from shotcast.engine.requests import SamplingParams, TokenLogprob
from shotcast.engine.transfer import uploaded
from shotcast.errors import ConfigError

FEW = 1024
"""Tokens among which top_p is looked for first."""

LEAST_TEMPERATURE = 1e-30
"""Lower ones, which float32 may not hold, draw the same."""

CACHED = 2**16
"""Logits that are worked on at once: no more than a CPU's caches hold."""

MOST_VOCAB = 2**18
"""Tokens among which a GPU draws: sums of their weights, in integers, go no further."""

Draw = Callable[[torch.Tensor, torch.Tensor, list[SamplingParams]], torch.Tensor]


def penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def cuts(params: SamplingParams) -> bool:
    """Whether what is drawn depends on the order of the tokens."""
    return not params.greedy and (params.top_k > 0 or params.top_p < 1)


def floor(params: SamplingParams) -> float:
    """p >= min_p p_max, as logits whose largest is 0."""
    return math.log(params.min_p) if params.min_p else -math.inf


def row_key(seed: int, position: int) -> bytes:
    """64 bits that key the noise of one place of one output."""
    return blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()


def derived_seed(request_id: str, salt: int) -> int:
    """The seed of a request that names none."""
    digest = blake2b(request_id.encode(), digest_size=8, key=struct.pack("<q", salt)).digest()
    return struct.unpack("<q", digest)[0]


def scramble(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits to 32 bits, one to one for each key; in place.

    Two rounds of multiply and shift with the constants of Chris Wellons' lowbias32, half of the key before each.

    Args:
        x: int32 [rows, columns].
        key: int32 [rows, 2].
    """
    # Shifts of int32 bring the sign in: the mask takes it out.
    x ^= key[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x ^= key[:, 1:]
    x *= 0xD35A2D97 - 2**32
    x ^= (x >> 15) & 0x1FFFF
    return x


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32 times, exponentially distributed with rate 1, of int32 bits that are uniform; never 0, never infinite.

    The race is won by small times, so those are the ones that float32 tells apart best: 2^-32 is the smallest.
    """
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest of each row, largest first, of equal ones the lower place first; and their places.

    Args:
        logits: float32 [rows, vocab].
    """
    vocab = logits.shape[1]
    if count == vocab:
        return logits.sort(dim=1, descending=True, stable=True)
    # topk leaves open which of equal ones it takes, so make them differ: integers in the order of the floats (-0.0
    # becomes 0.0 first), and below them the place.
    bits = (logits + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logits.device)
    tokens = vocab - 1 - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
    return logits.gather(1, tokens), tokens


def nucleus(
    values: torch.Tensor, total: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens top_k and top_p keep.

    top_k keeps exactly k; top_p, of what that leaves, the likeliest until their probabilities reach p.

    Args:
        values: float32 [rows, count], the largest logits of each row, at least top_k, largest first; the first is 0.
        total: float64 [rows], sums of exp(logit) over whole rows.
        top_k: int64 [rows], 0 keeps all.
        top_p: float64 [rows].

    Returns:
        What is kept, bool [rows, count], and whether no token beyond these would be, bool [rows].
    """
    weights = values.exp()
    upto = weights.cumsum(1, dtype=torch.float64)
    last = (top_k - 1).clamp(min=0)[:, None]
    reach = top_p * torch.where(top_k > 0, upto.gather(1, last)[:, 0], total)
    places = torch.arange(values.shape[1], device=values.device)
    keep = (places <= last) | (top_k == 0)[:, None]
    # Rounding must not cut off what top_p = 1 keeps.
    keep &= (upto - weights < reach[:, None]) | (top_p == 1)[:, None]
    return keep, (upto[:, -1] >= reach) | (top_k > 0)


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
            # What ``kernels.sampling.Rows`` has of each slot.
            self._integers = np.zeros((max_slots, 4), np.int32)
            self._reals = np.zeros((max_slots, 5), np.float32)
            self._top_p = np.ones(max_slots)
        else:
            # Neighbours in the vocabulary, made unlike each other once instead of at every draw.
            tokens = torch.arange(vocab, dtype=torch.int32)[None]
            self._noise = scramble(tokens, torch.zeros(1, 2, dtype=torch.int32))

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
        if penalised(params):
            if self._counts is None:
                self._counts = torch.zeros(len(self._requests), self.vocab, dtype=torch.int32, device=self.device)
            counts = np.bincount(np.array(output, np.int64), minlength=self.vocab).astype(np.int32)
            self._counts[slot] = uploaded([counts], self.device)[0]
        if self._kernels:
            top_k, top_p = (params.top_k, params.top_p) if cuts(params) else (0, 1.0)
            self._integers[slot, :2] = slot, 0 if top_k >= self.vocab else top_k
            self._top_p[slot] = top_p
            # Beyond, all weights together are less than 1 - top_p, even of as many tokens.
            beyond = math.log(self.vocab / (1 - top_p)) + 1 if top_p < 1 else math.inf
            temperature = 0.0 if params.greedy else max(params.temperature, LEAST_TEMPERATURE)
            penalties = params.presence_penalty, params.frequency_penalty
            self._reals[slot] = temperature, -floor(params), *penalties, beyond

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
        as_given = all(p.greedy and not penalised(p) for p in params)
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
        from shotcast.kernels.sampling import START, Rows, draw

        places = np.array(slots)
        integers = self._integers[places]
        integers[:, 2:] = self._noise_keys(slots)
        asked = integers, self._reals[places], self._top_p[places], np.array([START] * len(slots))
        counts = self._counts if any(penalised(p) for p in params) else None
        rows = Rows(*uploaded(asked, self.device))
        return draw(logits, best, rows, counts, drawn, any(cuts(p) for p in params))

    # -- on a CPU -----------------------------------------------------------------------------------------------------

    def _by_torch(
        self, logits: torch.Tensor, slots: Sequence[int], params: list[SamplingParams], best: torch.Tensor
    ) -> torch.Tensor:
        slow = [row for row, p in enumerate(params) if penalised(p)]
        if slow:
            logits = self._penalise(logits, slow, slots, params)
        tokens = logits.argmax(1) if slow and any(p.greedy for p in params) else best.clone()
        cut = [row for row, p in enumerate(params) if cuts(p)]
        whole = [row for row, p in enumerate(params) if not p.greedy and not cuts(p)]
        for rows, draw in ((cut, self._draw_cut), (whole, self._draw_whole)):
            if rows:
                tokens.index_copy_(0, self._index(rows), self._draw(logits, rows, slots, params, draw))
        if slow:
            assert self._counts is not None
            # A slot comes once, so no pair comes twice, and this adds as it says.
            self._counts[self._index([slots[row] for row in slow]), tokens[self._index(slow)]] += 1
        return tokens

    def _penalise(
        self, logits: torch.Tensor, rows: list[int], slots: Sequence[int], params: list[SamplingParams]
    ) -> torch.Tensor:
        assert self._counts is not None
        counts = self._counts[self._index([slots[row] for row in rows])]
        presence = torch.tensor([params[row].presence_penalty for row in rows])[:, None]
        frequency = torch.tensor([params[row].frequency_penalty for row in rows])[:, None]
        return logits.index_add(0, self._index(rows), (counts > 0) * presence + counts * frequency, alpha=-1)

    def _draw(
        self, logits: torch.Tensor, rows: list[int], slots: Sequence[int], params: list[SamplingParams], draw: Draw
    ) -> torch.Tensor:
        key = torch.tensor(self._noise_keys([slots[row] for row in rows]))
        if len(rows) < len(slots):
            logits = logits[self._index(rows)]
            params = [params[row] for row in rows]
        most = max(1, CACHED // self.vocab)
        drawn = []
        for part in (slice(first, first + most) for first in range(0, len(rows), most)):
            # The largest becomes 0, so that no temperature, however low, makes infinities of it.
            temperatures = torch.tensor([max(p.temperature, LEAST_TEMPERATURE) for p in params[part]])
            shifted = (logits[part] - logits[part].amax(1, keepdim=True)).div_(temperatures[:, None])
            drawn.append(draw(shifted, key[part], params[part]))
        return torch.cat(drawn)

    def _draw_whole(self, logits: torch.Tensor, key: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        if any(p.min_p for p in params):
            logits.masked_fill_(logits < self._floor(params), -torch.inf)
        time = exponential(scramble(self._noise.expand(len(params), -1).clone(), key))
        # The smallest of time / probability.
        return (logits - time.log_()).argmax(1)

    def _draw_cut(self, logits: torch.Tensor, key: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        ks = [min(p.top_k, self.vocab) for p in params]
        top_k = self._index(ks)
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        total = logits.exp().sum(1, dtype=torch.float64)
        most = max(k or self.vocab for k in ks)
        # Mostly few tokens make up top_p.
        few = max(FEW, *ks)
        for count in (few, most) if few < most else (most,):
            values, tokens = likeliest(logits, count)
            keep, complete = nucleus(values, total, top_k, top_p)
            if count == most or complete.all():
                break
        keep &= values >= self._floor(params)
        time = exponential(scramble(self._noise[0, tokens], key))
        scores = (values - time.log_()).masked_fill_(~keep, -torch.inf)
        return tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]

    def _floor(self, params: list[SamplingParams]) -> torch.Tensor:
        return torch.tensor([floor(p) for p in params])[:, None]

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

"""The sampler, which keeps the sampling parameters of each slot and samples the tokens of a step.

The noise of a sample is keyed by the request's seed and the position in its output, so a request's tokens do not depend
on the batch, the slot, the rank, or preemption. ``engine/torch_sampling.py`` samples on a CPU, and
``kernels/triton/sampling.py`` on a GPU; it gets the parameters of a step in one copy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shotcast.engine.outputs import TokenLogprob
from shotcast.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from shotcast.engine.token_constraints import Constraints, TokenConstraints, unpack
from shotcast.engine.torch_sampling import (
    PROMPT_TOKEN,
    apply_masks,
    apply_penalties,
    inverse_temperature,
    sample,
    token_noise,
)
from shotcast.engine.transfer import copy_to_device
from shotcast.errors import ConfigError

MAX_VOCAB = 2**18
"""The largest vocabulary on a GPU, where integer sums of the tokens' weights must not overflow."""


def noise_key(seed: int, position: int) -> bytes:
    """Return the 64-bit key of the noise at one position of an output."""
    return blake2b(struct.pack("<qq", seed, position), digest_size=8).digest()


def derived_seed(request_id: str, salt: int) -> int:
    """Derive the seed of a request without one."""
    digest = blake2b(request_id.encode(), digest_size=8, key=struct.pack("<q", salt)).digest()
    return struct.unpack("<q", digest)[0]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of a step, still on the device."""

    tokens: torch.Tensor  # int64 [rows, 2], the sampled token, and 1 if all logits of the row are numbers, else 0
    # for the rows whose requests want log-probabilities, the row and its number of alternatives
    logprob_rows: tuple[tuple[int, int], ...] = ()
    # the log-probabilities of these rows: float32 [wanted], of the sampled token; int64 [wanted], its rank; float32 and
    # int64 [wanted, alternatives], log-probabilities and ids of the likeliest tokens. Empty if no request wants them
    logprobs: tuple[torch.Tensor, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()  # rows whose constraints no token meets, and why


def token_logprobs(
    tokens: Sequence[int], logprob_rows: Sequence[tuple[int, int]], logprobs: Sequence[torch.Tensor]
) -> list[TokenLogprob | None]:
    """Return the log-probabilities of each row of a :class:`SamplerOutput` whose tensors are on the host."""
    found: list[TokenLogprob | None] = [None] * len(tokens)
    columns = [tensor.tolist() for tensor in logprobs]
    for (row, count), *entry in zip(logprob_rows, *columns, strict=True):
        logprob, rank, values, indices = entry
        top = sorted(zip(indices, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found[row] = TokenLogprob(tokens[row], logprob, rank, tuple(top[:count]))
    return found


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities of a token for each row, as in :class:`SamplerOutput`.

    Args:
        logits: float32 [rows, vocab].
        tokens: int64 [rows].
        alternatives: how many of the likeliest tokens to return.
    """
    logprobs = logits.log_softmax(1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(1) + 1
    top = logprobs.topk(min(alternatives, logits.shape[1]), dim=1)
    return chosen[:, 0], ranks, top.values, top.indices


class _Rows(NamedTuple):
    """The rows of a step: for each slot, one for its next token and one after each of its proposals."""

    slots: list[int]  # [rows], the slot of each row
    owners: list[int]  # [rows], the index of that slot in the step
    offsets: list[int]  # [rows], how many proposals of the slot precede the row
    firsts: list[int]  # [slots of the step], the first row of each slot
    drafts: Sequence[Sequence[int]]  # the proposals of each slot

    @classmethod
    def of(cls, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> _Rows:
        places = [(owner, offset) for owner, each in enumerate(drafts) for offset in range(len(each) + 1)]
        owners, offsets = [owner for owner, _ in places], [offset for _, offset in places]
        firsts = [row for row, offset in enumerate(offsets) if not offset]
        return cls([slots[owner] for owner in owners], owners, offsets, firsts, drafts)


class Sampler:
    """Samples the next token of each sequence of a step with its request's parameters.

    If a step has proposals for a sequence, it also samples the token after each of them, as if the earlier ones had
    been sampled. A proposal is accepted if it equals the token sampled in its place, and all before it are accepted;
    the token after the last accepted one is sampled as without proposals, with the same noise. So proposals change
    neither the distribution of an output nor, except for the rounding of logits, any of its tokens. A token proposed
    without knowledge of the noise is accepted as often as in rejection sampling: with its probability.

    It waits for the device only if a grammar needs the previous token.

    Raises ConfigError if there are more than MAX_VOCAB columns on a GPU.

    Args:
        salt: a signed 64-bit integer from which requests without a seed derive theirs. Ranks that must sample the same
            tokens need the same salt.
        kernels: sample with the GPU's kernels on other devices too, through Triton's interpreter.
    """

    def __init__(self, max_slots: int, vocab: int, device: torch.device | str, salt: int, kernels: bool = False):
        self.vocab = vocab
        self.device = torch.device(device)
        self._salt = salt
        self._params = [SamplingParams()] * max_slots
        self._seeds = [0] * max_slots
        self._positions = [0] * max_slots
        # int32 [max_slots, vocab] as in apply_penalties, once a request has penalties
        self._counts: torch.Tensor | None = None
        self.constraints = TokenConstraints(max_slots, vocab)
        self._kernels = kernels or self.device.type == "cuda"
        if self._kernels and vocab > MAX_VOCAB:
            raise ConfigError(f"on a GPU, a vocabulary may have {MAX_VOCAB} tokens; this one has {vocab}")
        if self._kernels:
            # for each slot, the fields of ``kernels.triton.sampling.SamplingMetadata``
            self._integers = np.zeros((max_slots, 5), np.int32)
            self._reals = np.zeros((max_slots, 6), np.float32)
            self._top_p = np.ones(max_slots)
        else:
            self._noise = token_noise(vocab)

    def warm_up(self, proposals: int = 0) -> None:
        """Sample once for all slots without requests, so that no request waits for kernel compilation and PyTorch has
        reserved all the memory that sampling may need; with ``proposals``, sample again with that many in the step."""
        if not self._kernels:
            return
        slots = range(len(self._params))
        sampler = Sampler(len(slots), self.vocab, self.device, 0, kernels=True)
        params = SamplingParams(top_k=1, presence_penalty=1.0, logprobs=MAX_LOGPROBS, logit_bias={0: 1.0})
        for slot in slots:
            sampler.assign(slot, params, "", ())
        for count in {0, proposals}:
            rows = len(slots) + count
            best = torch.zeros(rows, 2, dtype=torch.int64, device=self.device)
            logits = torch.zeros(rows, self.vocab, device=self.device)
            drafts = [(0,) * count, *[()] * (len(slots) - 1)]
            sampler.sample(logits, slots, best, best.new_zeros(len(slots)), False, drafts)

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        request_id: str,
        output: Sequence[int],
        prompt: Sequence[int] = (),
        end_tokens: Sequence[int] = (),
    ) -> None:
        """Assign a slot to a request whose output so far is ``output``.

        A repetition penalty also needs its prompt, and ``min_tokens`` the tokens that would end it.
        """
        self._params[slot] = params
        self.constraints.assign(slot, params, output, end_tokens)
        self._seeds[slot] = derived_seed(request_id, self._salt) if params.seed is None else params.seed
        self._positions[slot] = len(output)
        if params.has_penalties:
            if self._counts is None:
                self._counts = torch.zeros(len(self._params), self.vocab, dtype=torch.int32, device=self.device)
            counts = np.bincount(np.array(output, np.int64), minlength=self.vocab).astype(np.int32)
            counts[np.array(prompt, np.int64)] |= PROMPT_TOKEN
            self._counts[slot] = copy_to_device([counts], self.device)[0]
        if self._kernels:
            top_k, top_p = (params.top_k, params.top_p) if params.has_top_k_or_top_p else (0, 1.0)
            self._integers[slot, 1] = 0 if top_k >= self.vocab else top_k
            self._top_p[slot] = top_p
            # All weights beyond this distance from the largest logit add up to less than 1 - top_p.
            distance = math.log(self.vocab / (1 - top_p)) + 1 if top_p < 1 else math.inf
            penalties = params.presence_penalty, params.frequency_penalty
            reals = inverse_temperature(params), -params.min_p_logit, *penalties, distance, params.repetition_penalty
            self._reals[slot] = reals

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        best: torch.Tensor,
        last_tokens: torch.Tensor,
        best_is_stored: bool,
        drafts: Sequence[Sequence[int]] = (),
    ) -> SamplerOutput:
        """Sample a token for each row, and store each slot's last accepted one in ``last_tokens``.

        The position in an output moves by one; :meth:`advance` moves it by the accepted proposals.

        Args:
            logits: float32 [rows, vocab], contiguous if a row has a bias; restored on return.
            slots: distinct assigned slots.
            best: int64 [rows, 2], as in :class:`~shotcast.layers.batch.Logits`; not modified.
            last_tokens: int64 [max_slots or more], the last sampled token of each slot.
            best_is_stored: ``last_tokens`` already holds the tokens of ``best`` of slots without proposals.
            drafts: the proposals of each slot, which has one more row than proposals; () for one row per slot.
        """
        rows = _Rows.of(slots, drafts or [()] * len(slots))
        params = [self._params[slot] for slot in rows.slots]
        constraints = self.constraints.next(slots, self._positions, rows.drafts)
        takes_best = constraints is None and all(p.greedy and not p.has_penalties for p in params)
        verifies = len(rows.slots) > len(slots)
        in_place = self._kernels and not verifies  # the kernels also store tokens and count them
        penalized = [row for row, p in enumerate(params) if p.has_penalties]
        counts = None
        if penalized:
            counts = self._counts if in_place else self._row_counts(rows, penalized)
        if takes_best:
            tokens = best
        else:
            with self._biased(logits, constraints):
                if self._kernels:
                    places = rows.slots
                    if verifies:  # no two rows of one table may have the same place
                        places = [0] * len(params)
                        for place, row in enumerate(penalized):
                            places[row] = place
                    table = last_tokens if in_place else torch.empty_like(best[:, 0])
                    tokens = self._sample_with_kernels(logits, rows, params, places, counts, constraints, best, table)
                else:
                    sampled = self._sample_with_torch(logits, rows, params, penalized, counts, constraints, best[:, 0])
                    tokens = torch.stack((sampled, best[:, 1]), dim=1)
        accepted = self._accepted(rows, tokens) if verifies else None
        if verifies or not (best_is_stored if takes_best else self._kernels):
            last = tokens[:, 0] if accepted is None else tokens[self._index(rows.firsts) + accepted, 0]
            last_tokens.index_copy_(0, self._index(slots), last)
        if penalized and not in_place:
            self._count(rows, penalized, tokens, accepted)
        for slot in slots:
            self._positions[slot] += 1
        if constraints is not None:
            self.constraints.follow(slots, tokens, rows.drafts)
        return self._output(logits, tokens, params, () if constraints is None else constraints.failures)

    def advance(self, slot: int, count: int) -> None:
        """Advance the position in a slot's output by ``count`` tokens; negative counts move it back."""
        self._positions[slot] += count

    def _accepted(self, rows: _Rows, tokens: torch.Tensor) -> torch.Tensor:
        """Return how many proposals of each slot are accepted, int64 [slots]."""
        proposed = np.full((len(rows.firsts), max(map(len, rows.drafts))), -1, np.int64)
        for row, each in zip(proposed, rows.drafts, strict=True):
            row[: len(each)] = each
        places = np.minimum(np.array(rows.firsts)[:, None] + np.arange(proposed.shape[1]), len(tokens) - 1)
        drafts, indices = copy_to_device([proposed, places], self.device)
        return (tokens[:, 0][indices] == drafts).long().cumprod(1).sum(1)

    # -- counts for penalties -----------------------------------------------------------------------------------------

    def _row_counts(self, rows: _Rows, penalized: list[int]) -> torch.Tensor:
        """Return the counts of rows with penalties, int32 [penalized, vocab]; proposals before a row are counted."""
        assert self._counts is not None
        counts = self._counts[self._index([rows.slots[row] for row in penalized])]
        before = [
            (place, token)
            for place, row in enumerate(penalized)
            for token in rows.drafts[rows.owners[row]][: rows.offsets[row]]
        ]
        if before:
            places, tokens = (self._index(column) for column in zip(*before, strict=True))
            counts.index_put_((places, tokens), counts.new_ones(()), accumulate=True)
        return counts

    def _count(self, rows: _Rows, penalized: list[int], tokens: torch.Tensor, accepted: torch.Tensor | None) -> None:
        """Count the tokens of rows with penalties, except tokens after a rejected proposal."""
        assert self._counts is not None
        columns = [[values[row] for row in penalized] for values in (rows.slots, rows.offsets, rows.owners)]
        slots, offsets, owners = (self._index(column) for column in columns)
        kept = torch.ones_like(slots) if accepted is None else offsets <= accepted[owners]
        where = slots, tokens[self._index(penalized), 0]
        self._counts.index_put_(where, kept.int(), accumulate=True)

    @contextmanager
    def _biased(self, logits: torch.Tensor, constraints: Constraints | None) -> Iterator[None]:
        """Add the biases of constrained rows to the logits for the duration of the block."""
        if constraints is None or not len(constraints.biased[0]):
            yield
            return
        index, values = copy_to_device(constraints.biased, self.device)
        flat = logits.view(-1)
        before = flat[index]
        flat.index_copy_(0, index, before + values)
        yield
        flat.index_copy_(0, index, before)

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return copy_to_device([np.array(values, np.int64)], self.device)[0]

    def _noise_keys(self, rows: _Rows) -> npt.NDArray[np.int32]:
        """Return the noise keys of the rows' positions, int32 [rows, 2]."""
        places = zip(rows.slots, rows.offsets, strict=True)
        keys = b"".join(noise_key(self._seeds[slot], self._positions[slot] + offset) for slot, offset in places)
        return np.frombuffer(keys, np.int32).reshape(-1, 2)

    # -- on a GPU -----------------------------------------------------------------------------------------------------

    def _sample_with_kernels(
        self,
        logits: torch.Tensor,
        rows: _Rows,
        params: list[SamplingParams],
        places: list[int],
        counts: torch.Tensor | None,
        constraints: Constraints | None,
        best: torch.Tensor,
        last_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Sample with kernels, which update ``counts`` and ``last_tokens`` at the ``places`` of the rows."""
        from shotcast.kernels.triton import sampling

        indices = np.array(rows.slots)
        integers = self._integers[indices]
        integers[:, 0] = places
        integers[:, 2:4] = self._noise_keys(rows)
        integers[:, 4] = -1
        states = np.array([sampling.INITIAL_STATE] * len(indices))
        fields = [integers, self._reals[indices], self._top_p[indices], states]
        if constraints is not None:
            integers[constraints.rows, 4] = range(len(constraints.rows))
            fields.append(constraints.masks)
        columns = copy_to_device(fields, self.device)
        masks = None if constraints is None else columns.pop()
        metadata = sampling.SamplingMetadata(*columns)
        truncates = any(p.has_top_k_or_top_p for p in params)
        return sampling.sample(logits, best, metadata, counts, masks, last_tokens, truncates)

    # -- on a CPU -----------------------------------------------------------------------------------------------------

    def _sample_with_torch(
        self,
        logits: torch.Tensor,
        rows: _Rows,
        params: list[SamplingParams],
        penalized: list[int],
        counts: torch.Tensor | None,
        constraints: Constraints | None,
        best: torch.Tensor,
    ) -> torch.Tensor:
        keys = torch.tensor(self._noise_keys(rows))
        if constraints is not None:
            logits = apply_masks(logits, constraints.rows, torch.from_numpy(unpack(constraints.masks, self.vocab)))
            best = logits.argmax(1)
        if counts is not None:
            logits = apply_penalties(logits, penalized, params, counts)
            if any(p.greedy for p in params):
                best = logits.argmax(1)
        return sample(logits, best, params, keys, self._noise)

    # -- log-probabilities --------------------------------------------------------------------------------------------

    def _output(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        params: list[SamplingParams],
        failures: tuple[tuple[int, str], ...],
    ) -> SamplerOutput:
        """Return the tokens with the log-probabilities that requests ask for."""
        logprob_rows = tuple((row, p.logprobs) for row, p in enumerate(params) if p.logprobs is not None)
        if not logprob_rows:
            return SamplerOutput(tokens, failures=failures)
        index = self._index([row for row, _ in logprob_rows])
        alternatives = max(count for _, count in logprob_rows)
        logprobs = logprobs_of(logits[index], tokens[index, 0], alternatives)
        return SamplerOutput(tokens, logprob_rows, logprobs, failures)

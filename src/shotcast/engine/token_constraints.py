"""The tokens that each slot may sample next: packed masks from grammars, allowed tokens and the minimum length.

A mask has one bit per token. Threads compute grammar masks as soon as the previous token is on the host, during the
next step, whose sampling waits for them. Each rank that samples computes them from its tokens, which are the same on
all these ranks; so are the masks, since the library bounds its work by counts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shotcast import env
from shotcast.engine.grammar import MOST_MATCHERS, Grammar, GrammarCompiler, Vocabulary, mask_executor, reason_of
from shotcast.engine.sampling_params import SamplingParams
from shotcast.engine.speculation import num_accepted
from shotcast.engine.transfer import HostCopy
from shotcast.errors import ConfigError
from shotcast.hardware.detect import available_cores

Words = npt.NDArray[np.int32]

_NO_TOKENS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)

NO_TOKEN_LEFT = "no token may follow: grammar, allowed_token_ids and min_tokens together leave none"


class Constraints(NamedTuple):
    """The constrained rows of a step."""

    rows: list[int]  # their numbers, ascending
    masks: Words  # int32 [rows, words]: bit ``token % 32`` of word ``token // 32`` says that the token is allowed
    # indices of logits, counted through all rows of the step, and what is added to each
    biased: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
    failures: tuple[tuple[int, str], ...]  # rows whose output cannot continue, and why; all tokens are allowed there


@dataclass(slots=True)
class _SlotState:
    slot: int
    allowed: Words | None  # the mask of ``allowed_token_ids``; None allows all
    banned: Words  # the mask of the tokens that would end the output, for its first ``min_tokens``
    min_tokens: int
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]  # tokens and what is added to their logits
    grammar: Grammar | None  # its grammar
    matcher: Any = None  # where the output is in it; None until it is compiled
    lane: int = 0  # masks of the matchers of a lane are computed one by one
    failure: str = ""  # why the matcher cannot continue
    ready: Future[None] | None = None  # done once the mask of the next token is in the table

    def applies(self, position: int) -> bool:
        """Return whether the next token of an output with ``position`` tokens is constrained."""
        lasting = self.grammar is not None or self.allowed is not None or len(self.bias[0])
        return bool(lasting) or position < self.min_tokens


class TokenConstraints:
    """The constraints of all slots of a rank."""

    def __init__(self, slots: int, vocab: int):
        self.vocab = vocab
        self._every_token = pack(range(vocab), vocab)
        self._states: dict[int, _SlotState] = {}
        self._table = np.zeros((slots, len(self._every_token)), np.int32)
        self._compiler: GrammarCompiler | ConfigError = ConfigError("the model's tokenizer supports no grammars")
        self._executor: Any = None
        self._end_tokens: tuple[int, ...] = ()
        # Two threads, so that the outputs of other grammars go on while one is compiled.
        self._compiling = ThreadPoolExecutor(1, "shotcast-compile")
        self._masking = ThreadPoolExecutor(1, "shotcast-masks")

    def prepare(self, preparation: Vocabulary | Grammar) -> None:
        """Prepare for grammars over a vocabulary, or for requests with a grammar."""
        if isinstance(preparation, Vocabulary):
            self._compiling.submit(self._make_compiler, preparation)
        else:
            self._compiling.submit(self._compile, preparation)

    def close(self) -> None:
        self._compiling.shutdown()
        self._masking.shutdown()

    def assign(self, slot: int, params: SamplingParams, output: Sequence[int], end_tokens: Sequence[int]) -> None:
        """Assign a slot to a request with the known ``output``, which ``end_tokens`` would end."""
        before = self._states.pop(slot, None)
        if not params.is_constrained:
            return
        allowed = None if params.allowed_token_ids is None else pack(params.allowed_token_ids, self.vocab)
        tokens, values = zip(*params.biases, strict=True) if params.biases else ((), ())
        state = self._states[slot] = _SlotState(
            slot,
            allowed,
            pack([token for token in end_tokens if token < self.vocab], self.vocab),
            params.min_tokens,
            (np.array(tokens, np.int64), np.array(values, np.float32)),
            params.grammar,
        )
        if state.grammar is not None:
            state.ready = self._compiling.submit(
                self._start, state, list(output), None if before is None else before.ready
            )

    def next(
        self, slots: Sequence[int], positions: Sequence[int], drafts: Sequence[Sequence[int]] = ()
    ) -> Constraints | None:
        """Return the constraints of a step's rows; None if there are none. Waits for grammars.

        Args:
            positions: how many tokens the output of each slot has.
            drafts: the proposals of each slot of the step, which has one more row than proposals; () for none.
        """
        found = self._constrained(slots, drafts)
        masks = np.empty((sum(len(proposed) + 1 for _, _, proposed in found), len(self._every_token)), np.int32)
        rows: list[int] = []
        reasons: list[str] = []  # why the grammar of each row cannot go on
        tokens: list[npt.NDArray[np.int64]] = [_NO_TOKENS]
        values: list[npt.NDArray[np.float32]] = [_NO_VALUES]
        for state, first, proposed in found:
            position = positions[state.slot]
            offsets = [offset for offset in range(len(proposed) + 1) if state.applies(position + offset)]
            self._fill(state, proposed, masks, len(rows))
            for offset in offsets:
                mask = masks[len(rows)]
                if state.allowed is not None:
                    mask &= state.allowed
                if position + offset < state.min_tokens:
                    mask &= ~state.banned
                if len(state.bias[0]):
                    tokens.append((first + offset) * self.vocab + state.bias[0])
                    values.append(state.bias[1])
                rows.append(first + offset)
                reasons.append(state.failure)
        if not rows:
            return None
        masks = masks[: len(rows)]
        left = np.bitwise_or.reduce(masks, axis=1).tolist()
        failed = [place for place, reason in enumerate(reasons) if reason or not left[place]]
        masks[failed] = self._every_token
        failures = tuple((rows[place], reasons[place] or NO_TOKEN_LEFT) for place in failed)
        return Constraints(rows, masks, (np.concatenate(tokens), np.concatenate(values)), failures)

    def follow(self, slots: Sequence[int], tokens: torch.Tensor, drafts: Sequence[Sequence[int]] = ()) -> None:
        """Compute, on the thread, the masks of the tokens that follow the ones a step sampled.

        Args:
            tokens: int64 [rows, 2], the tokens of the rows in the first column.
        """
        found = [each for each in self._constrained(slots, drafts) if each[0].grammar is not None]
        if found:
            ready = self._masking.submit(self._follow, found, HostCopy([tokens]))
            for state, _, _ in found:
                state.ready = ready

    def _constrained(
        self, slots: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[tuple[_SlotState, int, Sequence[int]]]:
        """Return the constrained slots of a step, with the first row of each and its proposals."""
        if not self._states:
            return []
        drafts = drafts or [()] * len(slots)
        firsts = itertools.accumulate((len(proposed) + 1 for proposed in drafts), initial=0)
        found = zip(map(self._states.get, slots), firsts, drafts, strict=False)
        return [(state, first, proposed) for state, first, proposed in found if state is not None]

    def _fill(self, state: _SlotState, proposed: Sequence[int], masks: Words, row: int) -> None:
        """Fill the masks of a slot's grammar for its next token and after each proposal, starting at ``row``.

        They are 0 after a proposal that the grammar rejects.
        """
        own = masks[row : row + len(proposed) + 1]
        if state.grammar is None:
            own[:] = self._every_token
            return
        assert state.ready is not None
        state.ready.result()
        own[0], own[1:] = self._table[state.slot], 0
        if proposed and not state.failure:
            try:
                self._compute([(state, row, proposed)], masks)
            except BaseException as error:  # as in _start
                state.failure = str(error)

    # -- on the threads -----------------------------------------------------------------------------------------------

    def _make_compiler(self, vocabulary: Vocabulary) -> None:
        try:
            threads = max(1, min(MOST_MATCHERS, available_cores() // env.local_world_size()))
            self._compiler = GrammarCompiler(vocabulary)
            self._executor = mask_executor(threads)
            self._end_tokens = vocabulary.end_tokens
        except ConfigError as error:
            self._compiler = error

    def _compile(self, grammar: Grammar) -> None:
        if isinstance(self._compiler, GrammarCompiler):
            with contextlib.suppress(ConfigError):  # the requests with this grammar get the error
                self._compiler.compile(grammar)

    def _start(self, state: _SlotState, output: list[int], before: Future[None] | None) -> None:
        """Find the first mask of a request, after the writes ``before`` it to the slot's table row have finished."""
        assert state.grammar is not None
        if before is not None:
            wait([before])
        try:
            if isinstance(self._compiler, ConfigError):
                raise self._compiler
            state.matcher, state.lane = self._compiler.matcher(state.grammar)
            state.matcher.consume_tokens(output)
            self._compute([(state, state.slot, ())], self._table)
        except BaseException as error:  # a panic of the library, too, ends only its request
            state.failure = str(error)

    def _follow(self, found: Sequence[tuple[_SlotState, int, Sequence[int]]], copy: HostCopy) -> None:
        tokens = copy.wait()[0][:, 0].tolist()
        going = []
        for state, first, proposed in found:
            sampled = tokens[first : first + 1 + num_accepted(proposed, tokens[first:])]
            if not state.failure and not any(token in self._end_tokens for token in sampled):
                going.append((state, sampled))
        try:
            for state, sampled in going:
                state.matcher.consume_tokens(sampled)
            self._compute([(state, state.slot, ()) for state, _ in going], self._table)
        except BaseException as error:
            for state, _ in going:
                state.failure = str(error)

    def _compute(self, states: Sequence[tuple[_SlotState, int, Sequence[int]]], table: Words) -> None:
        """Compute the next mask of each state, and the masks after its proposals, in consecutive table rows.

        Either all states have proposals, or none.
        """
        if not states:
            return
        where = table.ctypes.data, table[0].nbytes, len(table)
        states = sorted(states, key=lambda each: each[0].lane)  # a thread of the library takes neighbors
        if states[0][2]:
            matchers = [(state.matcher, row, list(proposed)) for state, row, proposed in states]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(matchers, *where)
        else:
            self._executor.unsafe_compute_mask_ptr([(state.matcher, row) for state, row, _ in states], *where)
        first = self._end_tokens[0]  # the one that matchers know
        for state, row, proposed in states:
            for mask in table[row : row + len(proposed) + 1]:
                if mask[first // 32] >> first % 32 & 1:
                    mask |= pack(self._end_tokens, self.vocab)
            if state.matcher.is_error():
                state.failure = f"the output's grammar cannot be followed further: {reason_of(state.matcher)}"


def pack(tokens: Sequence[int] | range, vocab: int) -> Words:
    """Return the mask of ``tokens``: int32 [ceil(vocab / 32)]."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.array(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack(masks: Words, vocab: int) -> npt.NDArray[np.bool_]:
    """Return the allowed tokens of each mask: bool [rows, vocab]."""
    return np.unpackbits(masks.view(np.uint8), axis=1, count=vocab, bitorder="little").view(bool)

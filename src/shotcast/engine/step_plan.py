"""The scheduler's output: the work of every rank in one step."""

from __future__ import annotations

from typing import NamedTuple

from shotcast.engine.grammar import Grammar, Vocabulary
from shotcast.engine.sampling_params import SamplingParams

PENDING_TOKEN = -1
"""Placeholder of an unknown input token that an earlier step samples for the same sequence."""
INVALID_TOKEN = -1
"""Placeholder of a sampled token when the logits of its row are not valid numbers."""


class PromptTargets(NamedTuple):
    """The tokens of a prompt whose log-probabilities a step reports."""

    tokens: tuple[int, ...]  # the tokens that follow the first ones of the step's tokens of the sequence, one each
    alternatives: int  # how many of the likeliest tokens to report beside each


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step."""

    slot: int  # the sequence's row of the ranks' tables, which it keeps as long as it runs
    num_computed: int  # tokens whose keys and values are in the cache already
    # the tokens after these that the step computes; a single PENDING_TOKEN for one that is being sampled
    tokens: tuple[int, ...]
    # blocks of the paged cache to append to the slot's block table; with ``is_new`` they are its whole table
    blocks: tuple[int, ...]
    is_new: bool  # the slot is new to this sequence, so its previous contents are forgotten
    do_sample: bool  # the last of ``tokens`` is the sequence's last known token, so the step samples the next one
    params: SamplingParams | None = None  # with ``is_new``; otherwise None
    request_id: str = ""  # with ``is_new``
    output: tuple[int, ...] = ()  # with ``is_new``: what a sequence had sampled before it was preempted
    prompt: tuple[int, ...] = ()  # with ``is_new`` and a repetition penalty, the tokens of the prompt; otherwise ()
    # with ``is_new`` and ``min_tokens``, the tokens that would end the output; otherwise ()
    end_tokens: tuple[int, ...] = ()
    targets: PromptTargets | None = None  # None where the step reports no log-probabilities of the prompt
    # how many of ``tokens``, the last ones, are proposals for tokens that are not sampled yet. The step samples after
    # each of them, and after the token before them
    drafts: int = 0
    accepted: int = 0  # how many proposals of the step before were accepted, all of whose tokens are in the cache
    # how many tokens the draft model proposes after those that the step samples. Blocks for these may be among
    # ``blocks``
    propose: int = 0
    # what the draft model computes: tokens that it has left out before, or some of them, from a position on, and then
    # ``tokens``, if these follow; None if it leaves the sequence out
    drafted: tuple[int, tuple[int, ...]] | None = None

    @property
    def num_sampled(self) -> int:
        """The number of tokens of the step after which it samples."""
        return self.drafts + 1 if self.do_sample else 0

    @property
    def proposals(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.drafts :]


class StepPlan(NamedTuple):
    """One step: first the decoding sequences (one token, plus proposals to verify), then chunks of prompts."""

    number: int
    sequences: tuple[ScheduledSequence, ...]
    # on CUDA, if all sequences decode, the step's time and that of its communication are measured
    stamped: bool = False
    # in a plan without sequences, what ranks that sample need for grammars: first the vocabulary, then each grammar
    # before its first request
    prepares: Vocabulary | Grammar | None = None

    @property
    def do_sample(self) -> bool:
        """Return whether the step samples a token for any of its sequences."""
        return any(sequence.do_sample for sequence in self.sequences)

    @property
    def proposes(self) -> bool:
        return any(sequence.propose for sequence in self.sequences)

    @property
    def has_targets(self) -> bool:
        return any(sequence.targets is not None for sequence in self.sequences)

"""A request as the scheduler tracks it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from shotcast.engine.outputs import TokenLogprob
from shotcast.engine.requests import Request
from shotcast.engine.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class SequenceState:
    """The tokens of a request, and how many of them are computed."""

    request_id: str
    params: SamplingParams
    prompt_length: int  # tokens of the prompt
    tokens: list[int]  # the prompt and the known tokens of the output
    # tokens of prompt and output at which the sequence ends. It has one output token at least, which nobody gets if the
    # request wants none
    limit: int
    num_pending: int = 0  # tokens after ``tokens`` that outstanding plans sample
    num_computed: int = 0  # tokens whose keys and values are in the cache once all plans so far are done
    slot: int | None = None  # its row of the ranks' tables; None while it waits
    blocks: list[int] = field(default_factory=list)  # its blocks of the cache, in order
    # how many of ``blocks`` the plans so far have sent to the ranks; 0 if the ranks do not know either that it has the
    # slot
    num_sent_blocks: int = 0
    num_published_blocks: int = 0  # how many of ``blocks`` other sequences may find
    # digests of its full blocks, computed as far as they were needed
    digests: list[bytes] = field(default_factory=list)
    num_cached: int | None = None  # prompt tokens that were found in the prefix cache when it first ran; None before
    last_plan: int = -1  # the number of the last plan that contains it
    # those of the prompt's tokens after the first, as far as they are known
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False  # whether it has finished or was aborted
    # the proposals that an outstanding plan verifies; no later plan contains the sequence meanwhile
    drafts: tuple[int, ...] = ()
    # the first token that the draft model has left out; None if it has computed as many as the model
    undrafted_from: int | None = None
    num_accepted: int = 0  # how many of the last plan's proposals were accepted, until the ranks are told
    reported: tuple[int, ...] = ()  # proposals of the ranks for the tokens after ``tokens``
    guess: tuple[int, tuple[int, ...]] = (0, ())  # a number of ``tokens``, and what would have been proposed after them
    # the first of ``tokens``, as many as have been searched
    history: array[int] = field(default_factory=lambda: array("i"))

    @classmethod
    def from_request(cls, request: Request, max_model_len: int) -> SequenceState:
        limit = min(len(request.prompt) + max(request.params.max_tokens, 1), max_model_len)
        return cls(request.request_id, request.params, len(request.prompt), list(request.prompt), limit)

    @property
    def length(self) -> int:
        """Tokens that are known or being sampled."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be sampled; one if the sequence decodes."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_length :])

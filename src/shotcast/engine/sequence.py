"""A request as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shotcast.engine.requests import Request, SamplingParams


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request's tokens, and how far they are computed.

    Attributes:
        tokens: the prompt and what is known of the output.
        limit: tokens, prompt and output, at which it ends.
        drawing: tokens after ``tokens`` that outstanding plans draw.
        computed: tokens whose keys and values are in the cache once the plans so far are done.
        slot: its place in the ranks' tables; None while it waits.
        blocks: of the cache, in order.
        sent: how many of ``blocks`` the plans so far have told the ranks; 0: not even that it has the slot.
        published: how many of ``blocks`` others may find.
        digests: of its full blocks, as far as they were needed.
        cached: tokens of the prompt that were found computed when it first ran; None before.
        last_plan: number of the last plan that it is in.
        ended: finished or aborted.
    """

    request_id: str
    params: SamplingParams
    prompt_length: int
    tokens: list[int]
    limit: int
    drawing: int = 0
    computed: int = 0
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    sent: int = 0
    published: int = 0
    digests: list[bytes] = field(default_factory=list)
    cached: int | None = None
    last_plan: int = -1
    ended: bool = False

    @classmethod
    def of(cls, request: Request, max_model_len: int) -> SequenceState:
        limit = min(len(request.prompt) + request.params.max_tokens, max_model_len)
        return cls(request.request_id, request.params, len(request.prompt), list(request.prompt), limit)

    @property
    def length(self) -> int:
        """Tokens that are known or being drawn."""
        return len(self.tokens) + self.drawing

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next is drawn: one if it decodes."""
        return len(self.tokens) + self.drawing - self.computed

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_length :])

"""The comparison of headers between the two ends of a message that the vendor's library carries."""

from __future__ import annotations

import torch

from shotcast.collectives.interface import BoundCall
from shotcast.memory.operands import NormTensors


class Handshake:
    """Header messages in both directions: the sender's, and the receiver's answer. A BoundCall.

    Neither end enters the library before the other is there with the same call. No other rank takes part. An answer
    tells itself from a message, so two ranks that both send first are told, and do not wait in the library.

    Args:
        own: sends or receives the header of the message, as this rank does with its data.
        answer: the other direction.
    """

    def __init__(self, own: BoundCall, answer: BoundCall):
        self._in_turn = own, answer

    def run(
        self,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        norm: NormTensors | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Exchange the headers; the tensors are left alone."""
        for bound in self._in_turn:
            bound.run(None, None)

    def load(self) -> None:
        """Compile or load what both directions need."""
        for bound in self._in_turn:
            bound.load()

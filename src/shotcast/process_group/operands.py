"""The tensors of a call, in the memory layout that a communicator requires."""

from __future__ import annotations

from typing import Any

import torch

from shotcast import wire
from shotcast.collectives.calls.coalesced import flat
from shotcast.collectives.torch_private import Unseen


class CallOperands:
    """Contiguous tensors that stand in for a call's tensors, which may have other strides.

    The call reads ``inputs``, times ``factor`` if there is one, and writes ``outputs``; with ``keeps`` it also reads
    the outputs.
    """

    def __init__(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], factor: Any = None, keeps: bool = False
    ):
        self._factor = factor
        self.inputs = [_dense(x) for x in inputs]
        self.outputs: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for out in outputs:
            if is_dense(out):
                self.outputs.append(out)
                continue
            room = _dense(out) if keeps else torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self.outputs.append(room)
            self._copies.append((out, room))

    def all(self) -> list[torch.Tensor]:
        """Return every tensor that the call uses, including the factor of its inputs if that is a GPU tensor."""
        factors = [self._factor] if isinstance(self._factor, torch.Tensor) and self._factor.is_cuda else []
        return [*self.inputs, *self.outputs, *(out for out, _ in self._copies), *factors]

    def scaled(self) -> list[torch.Tensor]:
        """Return the inputs times the factor, in their original dtypes."""
        factor = self._factor
        if factor is None:
            return self.inputs
        if isinstance(factor, torch.Tensor):
            return [x * factor.to(x.device, x.dtype).reshape(()) for x in self.inputs]
        return [x * factor for x in self.inputs]

    def finish(self) -> None:
        """Copy results to the call's original tensors."""
        with Unseen():
            for out, room in self._copies:
                out.copy_(room)

    def receive(self, whole: torch.Tensor | list[torch.Tensor]) -> None:
        """Copy the parts of a result, which is flat and may be bytes, to all outputs."""
        if isinstance(whole, torch.Tensor):
            whole = list(whole.split([movable(out).numel() for out in self.outputs]))
        with Unseen():
            for out, part in zip(self.outputs, whole, strict=True):
                movable(out).copy_(part)


def movable(x: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor to a contiguous one with one dimension, as bytes if native kernels do not support its dtype."""
    known = str(x.dtype).removeprefix("torch.") in wire.DTYPES
    return flat(x) if known else flat(x).view(torch.uint8)


def joined(part: torch.Tensor, whole: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two contiguous tensors; the second has the parts of all ranks along its first dimension.

    If their shapes do not match that, they are flattened, and unknown dtypes become bytes.
    """
    known = str(part.dtype).removeprefix("torch.") in wire.DTYPES
    if known and part.dim() and whole.shape == (part.shape[0] * ranks, *part.shape[1:]):
        return part, whole
    return movable(part), movable(whole)


def is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor's memory layout suits a communicator."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _dense(x: torch.Tensor) -> torch.Tensor:
    if is_dense(x):
        return x
    return x.resolve_conj().resolve_neg().contiguous()

"""Many small tensors in one call, sent as one message per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shotcast.collectives.arguments import dense, output, rows_per_rank, valid, writable
from shotcast.collectives.calls.copies import CopyCalls
from shotcast.collectives.calls.sums import SumCalls
from shotcast.collectives.choice.select import LOSSLESS
from shotcast.collectives.reductions import Reduction
from shotcast.collectives.torch_private import is_traced
from shotcast.errors import ConfigError


class CoalescedCalls(SumCalls, CopyCalls):
    """Calls that join tensors, run once per dtype, and split the result."""

    def all_reduce_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        algorithm: str = "auto",
        reduction: Reduction = "sum",
        sms: int | None = None,
    ) -> list[torch.Tensor]:
        """Run :meth:`all_reduce` on each tensor of a list, in one call per dtype.

        Args:
            xs: tensors of any shapes and dtypes, the same on all ranks.
            outs: like ``xs``; ``xs`` for in place; None for new tensors, which are parts of one.
            algorithm, reduction, sms: as in :meth:`all_reduce`. All tensors form one message, so ``ring`` adds in
                another order than for single tensors, and ``two_shot_fp8`` rounds other blocks; the others give the
                same bits. ``auto`` means ``lossless`` here.

        Returns:
            ``outs``. Differentiable.
        """
        results = list(self._checked(xs, outs, "all_reduce_coalesced"))
        exact = LOSSLESS if algorithm == "auto" else algorithm
        for places in _by_dtype(results):
            joined = torch.cat([flat(results[place]) for place in places])
            whole = self.all_reduce(joined, algorithm=exact, reduction=reduction, sms=sms)
            parts = _parts(whole, [results[place].numel() for place in places], 0, outs is None)
            for place, part in zip(places, parts, strict=True):
                results[place] = part if results[place].dim() == 1 else part.view_as(results[place])
        return _copied(results, outs)

    def reduce_scatter_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        algorithm: str = "auto",
        reduction: Reduction = "sum",
        sms: int | None = None,
    ) -> list[torch.Tensor]:
        """Run :meth:`reduce_scatter` on each tensor of a list, in one call per dtype.

        Args:
            xs: [N * k, ...] each.
            outs: [k, ...] each; None for new tensors.
            algorithm, reduction, sms: as in :meth:`all_reduce_coalesced`.
        """
        name, parts = "reduce_scatter_coalesced", self.world_size
        results = list(self._checked(xs, outs, name, lambda x: (rows_per_rank(x, parts, name), *x.shape[1:])))
        for places in _by_dtype(results):
            joined = torch.cat([results[place].reshape(parts, -1) for place in places], 1)
            own = self.reduce_scatter(joined.view(-1), algorithm=algorithm, reduction=reduction, sms=sms)
            pieces = _parts(own, [results[place].numel() // parts for place in places], 0, outs is None)
            for place, piece in zip(places, pieces, strict=True):
                shape = results[place].shape
                results[place] = piece.view(shape[0] // parts, *shape[1:])
        return _copied(results, outs)

    def all_gather_coalesced(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None = None,
        algorithm: str = "auto",
        sms: int | None = None,
    ) -> list[torch.Tensor]:
        """Run :meth:`all_gather` on each tensor of a list, in one call per dtype.

        Args:
            xs: [k, ...] each.
            outs: [N * k, ...] each; None for new tensors.
            algorithm, sms: as in :meth:`all_gather`.
        """
        parts = self.world_size
        results = [
            x.view(1) if x.dim() == 0 else x
            for x in self._checked(xs, outs, "all_gather_coalesced", lambda x: (x.shape[0] * parts, *x.shape[1:]))
        ]
        for places in _by_dtype(results):
            joined = torch.cat([flat(results[place]) for place in places])
            whole = self.all_gather(joined, algorithm=algorithm, sms=sms).view(parts, -1)
            pieces = _parts(whole, [results[place].numel() for place in places], 1, outs is None)
            for place, piece in zip(places, pieces, strict=True):
                shape = results[place].shape
                results[place] = piece.contiguous().view(shape[0] * parts, *shape[1:])
        return _copied(results, outs)

    def all_to_all_list(
        self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], algorithm: str = "auto"
    ) -> list[torch.Tensor]:
        """Send ``xs[i]`` to rank i, and receive ``outs[i]`` from it, in one call.

        Args:
            xs, outs: N tensors each, of one dtype and any shapes; the sizes of sender and receiver must match.
            algorithm: as in :meth:`all_to_all`.

        Returns:
            ``outs``. Differentiable.
        """
        parts = self.world_size
        if not isinstance(xs, list | tuple) or not isinstance(outs, list | tuple) or {len(xs), len(outs)} != {parts}:
            raise ConfigError(f"all_to_all_list takes two lists of {parts} tensors, one for each rank")
        for x, out in zip(xs, outs, strict=True):
            valid(out, "out", self.device, "all_to_all_list")
            writable(out, "out", "all_to_all_list")
            if x.dtype != xs[0].dtype or out.dtype != xs[0].dtype:
                raise ConfigError(
                    f"all_to_all_list takes tensors of one dtype, not {xs[0].dtype}, {x.dtype}, {out.dtype}"
                )
        sent, received = [x.numel() for x in xs], [out.numel() for out in outs]
        joined = torch.cat([x.reshape(-1) for x in xs])
        whole = self.all_to_all(joined, algorithm=algorithm, input_sizes=sent, output_sizes=received)
        return _copied([part.view(out.shape) for part, out in zip(whole.split(received), outs, strict=True)], outs)

    def _checked(
        self,
        xs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
        name: str,
        shape_of: Callable[[torch.Tensor], tuple[int, ...]] = lambda x: tuple(x.shape),
    ) -> list[torch.Tensor]:
        """Return ``xs`` as contiguous tensors after checking them all, so that nothing is sent if one is wrong."""
        if not isinstance(xs, list | tuple) or (outs is not None and len(outs) != len(xs)):
            raise ConfigError(f"{name} takes a list of tensors, and as many outs or none")
        checked = [dense(x, f"x {number}", self.device, name) for number, x in enumerate(xs)]
        for number, x in enumerate(checked):
            shape = shape_of(x if x.dim() or name != "all_gather_coalesced" else x.view(1))
            if outs is not None:
                output(x, outs[number], shape, name)
        return checked


def flat(x: torch.Tensor) -> torch.Tensor:
    """Flatten a contiguous tensor, without a view if it already has one dimension: a view takes microseconds."""
    return x if x.dim() == 1 else x.view(-1)


def _parts(whole: torch.Tensor, sizes: list[int], dim: int, returned: bool) -> Sequence[torch.Tensor]:
    """Split the result of a call; the parts that are returned are separate tensors for autograd.

    Autograd forbids writing to one of several views, and counts the writes to all of them as one.
    """
    if not returned or not torch.is_grad_enabled():
        return whole.split(sizes, dim)
    if whole.requires_grad or is_traced():
        return [part.clone() for part in whole.split(sizes, dim)]
    return [part.data for part in whole.split(sizes, dim)]


def _by_dtype(xs: Sequence[torch.Tensor]) -> list[list[int]]:
    places: dict[torch.dtype, list[int]] = {}
    for place, x in enumerate(xs):
        places.setdefault(x.dtype, []).append(place)
    return list(places.values())


def _copied(results: list[torch.Tensor], outs: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    if outs is None:
        return results
    for out, result in zip(outs, results, strict=True):
        out.copy_(result)
    return list(outs)

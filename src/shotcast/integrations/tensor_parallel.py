"""The sums of a host program's tensor-parallel group, on our communicator."""

from __future__ import annotations

import collections
import functools
import logging
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shotcast import env
from shotcast.collectives.communicator import DEFAULT_MAX_BYTES, MAX_WORKSPACE_MESSAGE, Communicator
from shotcast.collectives.rendezvous import SETUP_TIMEOUT_S
from shotcast.errors import ShotcastError, UnsupportedError

logger = logging.getLogger(__name__)

_REASON_BYTES = 1024
"""Maximum bytes of the message in which a rank says why it has no communicator."""

_all: weakref.WeakSet[TensorParallelSums] = weakref.WeakSet()


class TensorParallelSums:
    """The sums and all-gathers of one group. Results are new tensors, as the host programs expect.

    The host program handles calls that :meth:`serves` declines. All ranks decline the same calls, since they all choose
    the same algorithm. Batch-invariant mode declines only tensors of other devices, so that no size leaves the numerics
    contract; unsupported calls raise.

    Calls can be captured in a CUDA graph once a call of that size has been made. Kernels read their operands in place
    and have separate workspaces, so a graph registers no buffers.

    Args:
        make: creates the group's communicator, which this object owns. Collective.
    """

    def __init__(self, make: Callable[[], Communicator], group_name: str):
        self._make = make
        self.communicator = communicator = make()
        self.group_name = group_name
        self._asleep = self._in_graphs = self._warm = False
        self._timeout_s = 0.0
        self.batch_invariant = communicator.topology.batch_invariant
        self.calls = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0, "all_reduce_rms_norm": 0, "declined": 0}
        """Calls by operation, and calls left to the host program. Graph replays do not count."""
        self._served: dict[tuple[str, int, torch.dtype], bool] = {}
        self._seen: dict[tuple[str, int, torch.dtype], tuple[int, Callable[[torch.Tensor], object]]] = {}
        self._modes = ("graph", "eager") if communicator.device.type == "cuda" else ("eager",)
        _all.add(self)

    def serves(self, x: torch.Tensor) -> bool:
        """Return whether :meth:`all_reduce` accepts ``x``, captured or not. All ranks get the same answer."""
        return self._serves("all_reduce", x)

    def gathers(self, x: torch.Tensor) -> bool:
        """Return whether :meth:`all_gather` accepts ``x``, captured or not. All ranks get the same answer."""
        return self._serves("all_gather", x)

    def _serves(self, op: str, x: torch.Tensor) -> bool:
        if self._asleep:
            self.wake_up()
        if x.device != self.communicator.device or x.layout is not torch.strided:
            return False
        if not self._in_graphs and x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._in_graphs = True
        if self.batch_invariant and op == "all_reduce":
            return True
        key = op, x.numel(), x.dtype
        served = self._served.get(key)
        if served is None:
            served = self._served[key] = self._own(op, x)
        if not served:
            self.calls["declined"] += 1
        return served

    def _own(self, op: str, x: torch.Tensor) -> bool:
        sized = x if op == "all_reduce" else x.expand(self.communicator.world_size, *x.shape)  # as long as the result
        try:
            return not any(self.communicator.explain(sized, op, mode=mode).by_library for mode in self._modes)
        except UnsupportedError:
            return False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks, in a new tensor with the strides of ``x``."""
        self.calls["all_reduce"] += 1
        self._see("all_reduce", x, self.all_reduce)
        out = torch.empty_like(x)
        if x.is_contiguous():
            return self.communicator.all_reduce(x, out=out)
        return out.copy_(self.communicator.all_reduce(x.contiguous()))

    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
        """Return this rank's part along ``dim`` of the sum of ``x``, with the bits of :meth:`all_reduce`.

        Parts are equal, or have the given ``sizes`` by rank.
        """
        self.calls["reduce_scatter"] += 1
        rank, ranks = self.communicator.rank, self.communicator.world_size
        total = self.communicator.all_reduce(x.contiguous())
        parts = total.chunk(ranks, dim) if sizes is None else total.split(sizes, dim)
        return parts[rank].contiguous()

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the tensors of all ranks along ``dim``."""
        self.calls["all_gather"] += 1
        dim %= x.dim()
        self._see("all_gather", x, lambda x: self.all_gather(x, dim))
        found = self.communicator.all_gather(x.contiguous())
        return found.view(-1, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(normed, new_residual)`` of the sum of ``x`` plus ``residual``, as new tensors."""
        self.calls["all_reduce_rms_norm"] += 1
        self._see("norm", x, lambda x: self.all_reduce_rms_norm(x, torch.zeros_like(x), weight, eps))
        return self.communicator.all_reduce_rms_norm(x, residual, weight, eps)

    def all_reduce_rms_norm_fp8(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(quantized, new_residual)``: the normalized sum in FP8 by ``scale``, one float32, as new tensors."""
        self.calls["all_reduce_rms_norm"] += 1
        self._see("fp8", x, lambda x: self.all_reduce_rms_norm_fp8(x, torch.zeros_like(x), weight, scale, eps))
        found = self.communicator.all_reduce_rms_norm_fp8(x, residual, weight, eps, scale=scale)
        return found.quantized, found.new_residual

    def _see(self, op: str, x: torch.Tensor, again: Callable[[torch.Tensor], object]) -> None:
        """Remember how to repeat a kind of call with other rows, until :meth:`warm_up`."""
        if not self._warm and x.dim() == 2:
            key = op, x.shape[1], x.dtype
            most, again = self._seen.get(key, (0, again))
            self._seen[key] = max(most, x.shape[0]), again

    def warm_up(self, rows: int) -> None:
        """Repeat each kind of call made so far with 1 to ``rows`` rows, so that none compiles a kernel later.

        All-gathers keep their largest number of rows so far: they have one per sequence of a batch, and sums have one
        per token. Collective: the ranks must have made the same kinds of calls in the same order.
        """
        self._warm, seen = True, list(self._seen.items())
        self._seen.clear()
        for (op, width, dtype), (most, again) in seen:
            most = most if op == "all_gather" else rows
            for count in sorted({1} | {min(part << bit, most) for bit in range(most.bit_length()) for part in (2, 3)}):
                x = torch.zeros(count, width, dtype=dtype, device=self.communicator.device)
                if self._serves("all_gather" if op == "all_gather" else "all_reduce", x):
                    again(x)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls, including after :meth:`wake_up`."""
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            if not self._asleep:
                self.communicator.set_timeout(timeout_s)

    def check(self) -> None:
        """Raise if a call has failed, including one in a replayed graph, as far as finished calls have noticed."""
        if not self._asleep:
            self.communicator.check()

    def interrupt(self) -> None:
        """Abort the calls of all ranks with an error that names this rank, which has failed."""
        self.communicator._interrupt()

    def sleep(self) -> None:
        """Release the workspace until :meth:`wake_up` or the next call. Not collective.

        A workspace used by captured graphs stays, since their replays use its addresses.
        """
        if self._in_graphs:
            logger.info("the workspace of group %s stays while it sleeps, as graphs use it", self.group_name)
        elif not self._asleep:
            self._asleep = True
            self.communicator.close()

    def wake_up(self) -> None:
        """Recreate the workspace if it was released. Collective."""
        if self._asleep:
            self.communicator = self._make()
            self._asleep = False
            if self._timeout_s:
                self.communicator.set_timeout(self._timeout_s)

    def close(self) -> None:
        """Release the workspace. Not collective; a second call does nothing."""
        self.communicator.close()
        _all.discard(self)


def make_sums(
    group: dist.ProcessGroup,
    device: torch.device,
    group_name: str,
    batch_invariant: bool,
    host: str,
    largest: int = MAX_WORKSPACE_MESSAGE,
) -> TensorParallelSums | None:
    """Create the sums of a group, or return None if the host program must serve it. Collective.

    Either all ranks get sums or none does: a rank that lacks something notifies the others, so that no rank waits in
    our kernels for one in the host program's. They log the reason and the rank.

    Raises UnsupportedError on all ranks if there are none although SHOTCAST_BATCH_INVARIANT requires them. Raises
    ShotcastError if a rank did not report, so this one cannot know what the others do.

    Args:
        group: the host program's group of CPU tensors, which connects the ranks while they set up.
        batch_invariant: the host program is in its batch-invariant mode; otherwise SHOTCAST_BATCH_INVARIANT decides.
        host: the name of the host program, for messages.
        largest: bytes of the host program's longest message, which limits the workspace.
    """
    try:
        ranks = dist.get_world_size(group)
    except (ValueError, RuntimeError, TypeError):
        leave_to_host(host, group_name, f"{host} makes it without torch.distributed")
        return None
    if ranks == 1:
        return None
    if group.group_desc in ("", "undefined"):
        group._set_group_desc(group_name)  # as errors name it
    sums, asked, why = None, False, ""
    capacity, invariant = min(largest, DEFAULT_MAX_BYTES[device.type]), batch_invariant or None
    make = functools.partial(Communicator, group, device, capacity, batch_invariant=invariant, exclusive=True)
    try:
        asked = env.batch_invariant()
        sums = TensorParallelSums(make, group_name)
        why = sums.communicator.topology.unsupported_reason
    except Exception as error:  # also what a compiler, the driver or the system raises on this rank alone
        why = f"{type(error).__name__}: {error}"
    try:
        any_asked, reasons = _unsupported_reasons(group, asked, why)
    except BaseException:
        if sums is not None:
            sums.close()
        raise
    if reasons:
        if sums is not None:
            sums.close()
        leave_to_host(host, group_name, reasons, any_asked)
        return None
    assert sums is not None
    mode = " in batch-invariant mode" if sums.batch_invariant else ""
    logger.info("shotcast serves group %s of %s%s: %r", group_name, host, mode, sums.communicator)
    return sums


def leave_to_host(host: str, group_name: str, why: str, asked: bool | None = None) -> None:
    """Log why the host program's all-reduce serves a group; raise if only our sums provide the requested mode.

    This applies if SHOTCAST_BATCH_INVARIANT requests batch-invariant mode. A host program in its batch-invariant mode
    provides its sums itself.

    Raises UnsupportedError if the mode was requested.

    Args:
        asked: whether a rank has the variable set; None reads it on this rank.
    """
    if env.batch_invariant() if asked is None else asked:
        text = f"SHOTCAST_BATCH_INVARIANT=1, and group {group_name} of {host} has no sums of ours"
        raise UnsupportedError(f"{text}: {why}")
    logger.warning("the all-reduce of %s itself serves group %s: %s", host, group_name, why)


def _unsupported_reasons(group: dist.ProcessGroup, asked: bool, why: str) -> tuple[bool, str]:
    """Return whether a rank requested batch-invariant mode, and why there are no sums; empty if all have them.

    Collective. The deadline is longer than for construction, in which ranks may wait for one that has failed.
    """
    text = why.encode()[: _REASON_BYTES - 2]
    own = torch.zeros(_REASON_BYTES, dtype=torch.uint8, device="cpu")
    own[0], own[1] = asked, bool(why)
    own[2 : 2 + len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, own, group=group, async_op=True)
    assert work is not None
    limit_s = 2 * SETUP_TIMEOUT_S
    try:
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError as error:
        what = f"a rank has ended, or has not told within {limit_s:g} s whether it has a communicator"
        raise ShotcastError(f"rank {dist.get_rank(group)}: {what}") from error
    reasons: dict[str, list[str]] = {}
    for rank, row in enumerate(rows):
        if row[1]:
            reason = bytes(row[2:].tolist()).rstrip(b"\0").decode(errors="replace")
            reasons.setdefault(reason, []).append(str(rank))
    named = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {reason}" for reason, ranks in reasons.items()]
    return any(bool(row[0]) for row in rows), "; ".join(named)


def all_sums() -> list[TensorParallelSums]:
    return list(_all)


def counts() -> dict[str, int]:
    """Return the calls of all groups in this process so far, by operation (see :attr:`TensorParallelSums.calls`)."""
    total: collections.Counter[str] = collections.Counter()
    for sums in all_sums():
        total.update(sums.calls)
    return dict(total)

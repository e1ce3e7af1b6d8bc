"""The ranks that a model is spread over, as its layers see them."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812

from shotcast.collectives import separate_norm
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.norm_operands import Fp8Normed, in_place_norm, norm_operands
from shotcast.layers.quantized import Float8Rows
from shotcast.layers.step_timer import HostStepTimer, StepTimer


class Parallel:
    """Tensor parallelism within a stage, and communication with the stages before and after.

    Layers divide their weights between the ``size`` ranks of ``comm``, and produce partial sums that this class adds
    up. ``timer`` times every call.

    Args:
        comm: the ranks of this stage.
        world: all ranks, stage by stage, for messages between stages; None if there is one stage.
        algorithm: the algorithm of the all-reduces, as for :meth:`Communicator.all_reduce`; ``auto`` replaces it if a
            step is too long for it or a stage is one rank.
    """

    def __init__(
        self,
        comm: Communicator,
        world: Communicator | None = None,
        stages: int = 1,
        algorithm: str = "auto",
        timer: StepTimer | None = None,
    ):
        self.comm, self.world, self.stages = comm, comm if world is None else world, stages
        self.rank, self.size = comm.rank, comm.world_size
        self.stage = self.world.rank // self.size
        self.algorithm = algorithm if self.size > 1 else "auto"
        self.timer = HostStepTimer() if timer is None else timer
        self._algorithms: dict[tuple[str, int], str] = {}
        # an algorithm that was named and has no fused form; the library's sum is fused by the communicator
        named = self.comm.topology.algorithms[self.algorithm] if self.algorithm != "auto" else None
        self._unfused = named is not None and not named.library and not named.is_fused

    def _algorithm(self, op: str, x: torch.Tensor) -> str:
        """Return the algorithm of an all-reduce of ``x``; calls differ only in their number of rows."""
        if self.algorithm in ("auto", "vendor"):
            return self.algorithm
        key = op, x.shape[0]
        if key not in self._algorithms:
            legal = self.algorithm in self.comm.candidates(x, op)
            self._algorithms[key] = self.algorithm if legal else "auto"
        return self._algorithms[key]

    def _timed(self) -> contextlib.AbstractContextManager[None]:
        """Return the timer's context for an operation between the ranks of a stage; a single rank has none."""
        return self.timer.communication() if self.size > 1 else contextlib.nullcontext()

    @property
    def first(self) -> bool:
        """True for the first stage, where tokens enter."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True for the last stage, which computes logits."""
        return self.stage == self.stages - 1

    def reduce_norm_float8(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, copy_engines: bool = False
    ) -> tuple[torch.Tensor | Float8Rows, torch.Tensor]:
        """Run :meth:`reduce_norm` with the norm in FP8, if that takes no further kernel.

        Only ``copy_engines`` modify ``x``, and overwrite it with the sum.
        """
        if self._unfused:
            return self.reduce_norm(x, residual, weight, eps, copy_engines)
        with self._timed():
            scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
            found = Fp8Normed(torch.empty_like(x, dtype=torch.float8_e4m3fn), scale, residual, None)
            if copy_engines:
                total = self.comm.all_reduce(x, out=x, sms=0)
                operands = total, residual, weight, eps, found
                norm, tensors = norm_operands("reduce_norm_float8", x.device, *operands, fp8=True, with_normed=False)
                separate_norm.norm_sum(total, tensors, norm, self.comm.topology.runs_grids)
            else:
                algorithm = self._algorithm("all_reduce_rms_norm", x)
                found = self.comm.all_reduce_rms_norm_fp8(x, residual, weight, eps, None, False, algorithm, found)
        return Float8Rows(found.quantized, found.scale), found.new_residual

    def reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, copy_engines: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum ``x`` over the ranks, add the residual and normalize. Returns the norm and the new residual.

        Args:
            x: [tokens, hidden], this rank's partial sums; overwritten with the norm.
            residual: [tokens, hidden]; overwritten with the new residual.
            weight: [hidden].
            eps: added to the mean square.
            copy_engines: copy engines of the GPU add up. The norm is then a separate kernel, with the same bits.
        """
        if self.size == 1 and x.device.type == "cpu" and not self.comm.topology.runs_grids:
            self._separate_norm(x, residual, weight, eps, x)
            return x, residual
        with self._timed():
            if copy_engines:
                self._separate_norm(self.comm.all_reduce(x, out=x, sms=0), residual, weight, eps, x)
                normed = x
            elif self._unfused:
                residual += self.comm.all_reduce(x, out=x, algorithm=self.algorithm)
                normed = F.rms_norm(residual.float(), weight.shape, weight.float(), eps).to(x.dtype)
            else:
                algorithm = self._algorithm("all_reduce_rms_norm", x)
                normed, residual = self.comm.all_reduce_rms_norm(x, residual, weight, eps, algorithm, out=(x, residual))
        return normed, residual

    def reduce_post_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum ``x`` over the ranks, normalize it with ``post``, add the residual and normalize that with ``weight``.

        Either norm may be None. Both tensors are overwritten.

        Returns the norm (the residual if ``weight`` is None), and the new residual.
        """
        total = self.all_reduce(x) if post is None else self.reduce_norm(x, torch.zeros_like(x), post, eps)[0]
        if weight is None:
            residual += total
            return residual, residual
        self._separate_norm(total, residual, weight, eps, total)
        return total, residual

    def _separate_norm(
        self, total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """Add the sum to the residual, in place, and write its norm to ``out``."""
        norm, tensors = in_place_norm(residual, weight, eps, out)
        separate_norm.norm_sum(total, tensors, norm, self.comm.topology.runs_grids)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks of the stage, in place."""
        with self._timed():
            self.comm.all_reduce(x, out=x, algorithm=self._algorithm("all_reduce", x))
        return x

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Gather ``[rows, widths[rank]]`` of every rank of the stage, concatenated: [rows * sum(widths)]."""
        if self.size == 1:
            return x.reshape(-1)
        with self.timer.communication():
            return self.comm.all_gather(x.reshape(-1), sizes=[x.shape[0] * width for width in widths])

    def can_send_back(self, x: torch.Tensor) -> bool:
        """Return whether the last stage can send such an ``x`` to the first after each step (:meth:`send_back`) without
        waiting for its receipt, with one more step in progress than there are stages."""
        return self.stages == 1 or self.world.waiting_messages(x) > self.stages

    def send_back(self, x: torch.Tensor) -> None:
        """Send ``x`` from the last stage to this rank's counterpart in the first one."""
        self.world.send(x, self.world.rank - (self.stages - 1) * self.size)

    def receive_back(self, x: torch.Tensor) -> None:
        """Fill ``x``, in the first stage, with the tensor that this rank's counterpart in the last stage sent."""
        self.world.recv(x, self.world.rank + (self.stages - 1) * self.size)

    def send(self, x: torch.Tensor) -> None:
        """Send ``x`` to this rank's counterpart in the next stage."""
        with self.timer.communication():
            self.world.send(x, self.world.rank + self.size)

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Fill ``x`` with the tensor that this rank's counterpart in the previous stage sent."""
        with self.timer.communication():
            self.world.recv(x, self.world.rank - self.size)
        return x

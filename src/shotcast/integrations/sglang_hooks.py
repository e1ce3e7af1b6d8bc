"""Hooks into SGLang's groups, and the object that serves as their custom all-reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shotcast.integrations.tensor_parallel import TensorParallelSums, leave_to_host, make_sums

SERVED = ("tp", "attention_tp", "moe_tp", "shared_experts_tp")
"""The names of SGLang's tensor-parallel groups."""

Normed = tuple[torch.Tensor | None, torch.Tensor | None]


class CustomAllReduce:
    """The ``ca_comm`` of a group: our sums, with SGLang's custom all-reduce for calls that they decline.

    Method and argument names follow SGLang.

    Args:
        host: SGLang's custom all-reduce of this group; None if it has none.
    """

    disabled = False
    original_disabled = False

    def __init__(self, sums: TensorParallelSums, host: Any):
        self.sums, self.host = sums, host

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Return whether :meth:`custom_all_reduce` accepts ``inp``."""
        return self.sums.serves(inp) or (self._host_serves() and bool(self.host.should_custom_ar(inp)))

    def _host_serves(self) -> bool:
        return self.host is not None and not self.host.disabled

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """Return the sum in a new tensor; None if nothing here accepts the input.

        Graph warm-up sums like any other call; SGLang's version returns zeros there, since it has no buffers yet.
        """
        if self.sums.serves(input):
            return self.sums.all_reduce(input)
        result: torch.Tensor | None = self.host.custom_all_reduce(input) if self._host_serves() else None
        return result

    def fused_allreduce_rmsnorm(
        self, input_: torch.Tensor, residual_inp_: torch.Tensor, weight_: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``(normed, new_residual)`` as new tensors, or None to let SGLang sum and normalize.

        Returns None in batch-invariant mode: SGLang normalizes batches beyond its limit itself, and its kernel rounds
        differently from ours, so a row would depend on the batch size.
        """
        if self.sums.batch_invariant or not self.sums.serves(input_):
            return None
        if not (input_.is_contiguous() and residual_inp_.is_contiguous() and weight_.is_contiguous()):
            return None
        return self.sums.all_reduce_rms_norm(input_, residual_inp_, weight_, eps)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture graphs. Our calls need no registration; SGLang's all-reduce registers its buffers at the end."""
        with self.host.capture() if self.host is not None else contextlib.nullcontext():
            yield

    def close(self) -> None:
        self.sums.close()


def after_construction(result: None, group: Any, *args: Any, **kwargs: Any) -> None:
    """Attach our sums to a tensor-parallel group. Runs after SGLang has constructed the group, on all its ranks."""
    name = group.unique_name.split(":")[0]
    if name not in SERVED or group.world_size == 1:
        return
    if dist.get_backend(group.cpu_group) != "gloo":
        leave_to_host("SGLang", group.unique_name, "its ranks may change")
        return
    from sglang.srt.environ import envs

    deterministic = envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get()
    sums = make_sums(group.cpu_group, group.device, group.unique_name, deterministic, "SGLang")
    if sums is not None:
        group.ca_comm = CustomAllReduce(sums, group.ca_comm)


def before_destruction(group: Any) -> None:
    """Close our sums while the groups still exist, and restore SGLang's."""
    if isinstance(group.ca_comm, CustomAllReduce):
        group.ca_comm.close()
        group.ca_comm = group.ca_comm.host


def around_flashinfer(host: Callable[[Any, torch.Tensor], bool], group: Any, input_: torch.Tensor) -> bool:
    """Return whether FlashInfer should sum for a group: not if the group has our sums, which SGLang tries second."""
    return False if isinstance(group.ca_comm, CustomAllReduce) else host(group, input_)


def around_fused_norm(host: Callable[..., Normed], *args: Any, **kwargs: Any) -> Normed:
    """Sum, add the residual and normalize if the group has our kernels; ``(None, None)`` lets SGLang do it."""
    from sglang.srt.layers.flashinfer_comm_fusion import resolve_fusion_group, resolve_fusion_world_size

    which = {"use_attn_tp_group": kwargs.get("use_attn_tp_group", True)}
    if args or resolve_fusion_world_size(**which) <= 1:  # SGLang passes names
        return host(*args, **kwargs)
    group = resolve_fusion_group(**which)[2]
    ours = group.ca_comm
    if not isinstance(ours, CustomAllReduce):
        return host(**kwargs)
    if (
        torch.compiler.is_compiling()
    ):  # the operator of SGLang's would bypass us; its all-reduce reaches us when it runs
        return None, None
    normed = ours.fused_allreduce_rmsnorm(
        kwargs["input_tensor"], kwargs["residual"], kwargs["weight"], kwargs.get("eps", 1e-6)
    )
    return normed if normed is not None else (None, None)

"""A vLLM communicator for CUDA groups that serves tensor-parallel sums and all-gathers with our kernels.

Importing it needs vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from vllm import envs
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE
from shotcast.integrations.tensor_parallel import TensorParallelSums, make_sums

logger = logging.getLogger(__name__)


def _largest_message() -> int:
    """Return the bytes of a sum of the largest batch; if unknown, the size that every workspace has room for."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return MAX_WORKSPACE_MESSAGE
    row = config.model_config.get_hidden_size() * config.model_config.dtype.itemsize
    return int(config.scheduler_config.max_num_batched_tokens * row)


def _take_fusion() -> None:
    """Route vLLM's fused norms to our kernels or disable them, since vLLM's kernel would bypass our sums."""
    config = get_current_vllm_config_or_none()
    try:
        from shotcast.integrations import vllm_fusion

        vllm_fusion.install(config)
    except Exception as error:
        if config is not None:
            config.compilation_config.pass_config.fuse_allreduce_rms = False
        logger.warning("fuse_allreduce_rms is off, as its kernel would bypass the all-reduce of shotcast: %s", error)


def _take_linear() -> None:
    """Give the linear layers of vLLM's batch-invariant mode our kernels."""
    try:
        from shotcast.integrations import vllm_linear

        vllm_linear.install()
    except Exception as error:
        logger.warning("vLLM computes the linear layers of its batch-invariant mode: %s", error)


class ShotcastCudaCommunicator(CudaCommunicator):
    """vLLM's communicator, with our kernels for supported sums and all-gathers of tensor-parallel groups.

    So every wait in a step of a dense model has a deadline, since vLLM gathers the logits of every step. It calls
    the methods inside operators that are opaque to its compiler, so nothing here is traced. In batch-invariant
    mode, set by VLLM_BATCH_INVARIANT or SHOTCAST_BATCH_INVARIANT, our kernels also compute ``reduce_scatter``;
    otherwise vLLM does.

    Attributes:
        sums: our sums; None for other groups, and if vLLM computes the sums.
    """

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(cpu_group, device, device_group, unique_name, *args, **kwargs)
        self.sums: TensorParallelSums | None = None
        if unique_name.split(":")[0] == "tp":
            modes = unique_name, envs.VLLM_BATCH_INVARIANT, "vLLM"
            self.sums = make_sums(cpu_group, self.device, *modes, _largest_message())
        if self.sums is not None:
            _take_fusion()
            if envs.VLLM_BATCH_INVARIANT:
                _take_linear()

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.sums is not None and self.sums.serves(input_):
            return self.sums.all_reduce(input_)
        return super().all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the tensors of all ranks along ``dim`` in a new tensor."""
        if self.sums is not None and self.sums.gathers(input_):
            return self.sums.all_gather(input_, dim)
        return super().all_gather(input_, dim)

    def _scattering(self, x: torch.Tensor) -> TensorParallelSums | None:
        """Return our sums if they compute the reduce-scatter of ``x``."""
        return self.sums if self.sums is not None and self.sums.batch_invariant and self.sums.serves(x) else None

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's part of the sum along ``dim``."""
        if (sums := self._scattering(input_)) is not None:
            return sums.reduce_scatter(input_, dim)
        return super().reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        """Return this rank's part of the sum along ``dim``, with the given part sizes by rank."""
        if (sums := self._scattering(input_)) is not None:
            return sums.reduce_scatter(input_, dim, sizes)
        return super().reduce_scatterv(input_, dim, sizes)

    def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's rows of the sum, or None if vLLM has no kernel for it (it asks from 0.33 on)."""
        if (sums := self._scattering(input_)) is not None:
            return sums.reduce_scatter(input_, 0)
        return super().custom_reduce_scatter(input_)

    def destroy(self) -> None:
        """Close our communicator while the groups still exist, then call vLLM's method."""
        if self.sums is not None:
            self.sums.close()
            self.sums = None
        super().destroy()

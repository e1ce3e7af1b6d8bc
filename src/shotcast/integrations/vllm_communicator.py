"""The communicator of a vLLM group on CUDA whose tensor-parallel sums and all-gathers our kernels serve.

The class is made when it is first asked for, as its base is vLLM's.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist

from shotcast.collectives.communicator import MAX_WORKSPACE_MESSAGE
from shotcast.integrations.tensor_parallel import TensorParallelSums, make_sums

logger = logging.getLogger(__name__)


def _largest_message() -> int:
    """Return the bytes that a sum of the largest batch has; those that every workspace has room for, if unknown."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return MAX_WORKSPACE_MESSAGE
    row = config.model_config.get_hidden_size() * config.model_config.dtype.itemsize
    return int(config.scheduler_config.max_num_batched_tokens * row)


def _take_fusion() -> None:
    """Let vLLM's fused norms be ours, or switch them off, as its kernel would bypass our sums."""
    from vllm.config.vllm import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    try:
        from shotcast.integrations import vllm_fusion

        vllm_fusion.install(config)
    except Exception as error:
        if config is not None:
            config.compilation_config.pass_config.fuse_allreduce_rms = False
        logger.warning("fuse_allreduce_rms is off, as its kernel would bypass the all-reduce of shotcast: %s", error)


@functools.cache
def _communicator() -> type:
    from vllm import envs
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    class ShotcastCudaCommunicator(CudaCommunicator):
        """vLLM's own communicator; of a tensor-parallel group, our kernels make what they serve: sums and all-gathers.

        So all that a step of a dense model waits for has a deadline: vLLM gathers the logits of every step. It calls
        the methods inside operators that are opaque to its compiler, so nothing here is traced. In
        batch-invariant mode, which vLLM's own flag VLLM_BATCH_INVARIANT or SHOTCAST_BATCH_INVARIANT sets, the sums of
        ``reduce_scatter`` are ours too; else they stay vLLM's.

        Attributes:
            sums: None for other groups, and where vLLM's own sums serve.
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

        def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
            if self.sums is not None and self.sums.serves(input_):
                return self.sums.all_reduce(input_)
            return super().all_reduce(input_)

        def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            """Return the tensors of all ranks along ``dim``, as a new tensor."""
            if self.sums is not None and self.sums.gathers(input_):
                return self.sums.all_gather(input_, dim)
            return super().all_gather(input_, dim)

        def _scatters(self, x: torch.Tensor) -> bool:
            return self.sums is not None and self.sums.batch_invariant and self.sums.serves(x)

        def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
            """Return this rank's part of the sum along ``dim``."""
            if self._scatters(input_):
                assert self.sums is not None
                return self.sums.reduce_scatter(input_, dim)
            return super().reduce_scatter(input_, dim)

        def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
            """Return this rank's part of the sum along ``dim``, where parts have the sizes of the ranks."""
            if self._scatters(input_):
                assert self.sums is not None
                return self.sums.reduce_scatter(input_, dim, sizes)
            return super().reduce_scatterv(input_, dim, sizes)

        def custom_reduce_scatter(self, input_: torch.Tensor) -> torch.Tensor | None:
            """Return this rank's rows of the sum, or None where vLLM has no kernel for it (from 0.33 on it asks)."""
            if self._scatters(input_):
                assert self.sums is not None
                return self.sums.reduce_scatter(input_, 0)
            return super().custom_reduce_scatter(input_)

        def destroy(self) -> None:
            """Close our communicator while the groups still exist, then call vLLM's method."""
            if self.sums is not None:
                self.sums.close()
                self.sums = None
            super().destroy()

    ShotcastCudaCommunicator.__module__ = __name__
    ShotcastCudaCommunicator.__qualname__ = ShotcastCudaCommunicator.__name__
    return ShotcastCudaCommunicator


def __getattr__(name: str) -> type:
    if name == "ShotcastCudaCommunicator":
        return _communicator()
    raise AttributeError(f"module {__name__} has no attribute {name}")

"""The platform of vLLM on CUDA, with our communicator for its groups.

The class is made when it is first asked for, as its base is vLLM's.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from typing import Any

from shotcast import env

logger = logging.getLogger(__name__)

WORKER = "shotcast.integrations.vllm_worker.ShotcastWorker"
WORKER_OF_VLLM = "vllm.v1.worker.gpu_worker.Worker"
COMMUNICATOR = "shotcast.integrations.vllm_communicator.ShotcastCudaCommunicator"


@functools.cache
def _platform() -> type:
    from vllm.platforms.cuda import CudaPlatform

    class ShotcastCudaPlatform(CudaPlatform):
        """vLLM's own platform, but for the class of communicators and a fusion that would pass them by."""

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            """Return the path of the class of communicators: vLLM's own for elastic groups, which check for it."""
            # vLLM asks for its platform while it imports its configuration
            from vllm.config.vllm import get_current_vllm_config_or_none

            config = get_current_vllm_config_or_none()
            why, asked = "", None
            if config is not None and config.parallel_config.enable_elastic_ep:
                why = "elastic expert parallelism compares the class of its communicators"
                asked = False if config.parallel_config.tensor_parallel_size == 1 else None
            else:
                try:
                    pkgutil.resolve_name(COMMUNICATOR)
                except Exception as error:
                    why = str(error)
            if not why:
                return COMMUNICATOR
            from shotcast.integrations.tensor_parallel import leave_to_host

            leave_to_host("vLLM", "tp", why, asked)
            return str(super().get_device_communicator_cls())

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """Do what vLLM does, take our worker, and in batch-invariant mode switch off what depends on the batch.

            That is sequence parallelism, which begins at a number of tokens and norms by other kernels than ours, and
            the product with reduce-scatter, which calls no communicator. Ranks and their GPUs are not known yet, so
            they stay off also where no communicator can be had later.
            """
            super().check_and_update_config(vllm_config)
            parallel = vllm_config.parallel_config
            if parallel.enable_elastic_ep or parallel.tensor_parallel_size == 1:
                return
            from vllm import envs

            if parallel.worker_cls == WORKER_OF_VLLM:
                parallel.worker_cls = WORKER
            passes = vllm_config.compilation_config.pass_config
            if envs.VLLM_BATCH_INVARIANT or env.batch_invariant():
                for name in ("enable_sp", "fuse_gemm_comms"):  # vLLM 0.24 has them, and 0.33 does not
                    if getattr(passes, name, False):
                        setattr(passes, name, False)
                        logger.warning("%s is off, as what it sums and norms would depend on the batch", name)

    ShotcastCudaPlatform.__module__, ShotcastCudaPlatform.__qualname__ = __name__, ShotcastCudaPlatform.__name__
    return ShotcastCudaPlatform


def __getattr__(name: str) -> type:
    if name == "ShotcastCudaPlatform":
        return _platform()
    raise AttributeError(f"module {__name__} has no attribute {name}")

"""The vLLM platform for CUDA, with our communicator for its groups. Importing it needs vLLM."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from vllm.platforms.cuda import CudaPlatform

from shotcast import env
from shotcast.integrations.vllm import WORKER_CLASS, WORKER_CLASS_OF_VLLM

logger = logging.getLogger(__name__)

COMMUNICATOR = "shotcast.integrations.vllm_communicator"


class ShotcastCudaPlatform(CudaPlatform):
    """vLLM's platform, with our communicator class and without a fusion that would bypass it."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the path of the communicator class: vLLM's for elastic groups, which check for it."""
        # vLLM asks for its platform while it imports its configuration
        from vllm.config.vllm import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        why, asked = "", None
        if config is not None and config.parallel_config.enable_elastic_ep:
            why = "elastic expert parallelism compares the class of its communicators"
            asked = False if config.parallel_config.tensor_parallel_size == 1 else None
        else:
            try:
                importlib.import_module(COMMUNICATOR)
            except Exception as error:
                why = str(error)
        if not why:
            return f"{COMMUNICATOR}.ShotcastCudaCommunicator"
        from shotcast.integrations.tensor_parallel import leave_to_host

        leave_to_host("vLLM", "tp", why, asked)
        return str(super().get_device_communicator_cls())

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Run vLLM's checks, set our worker, and in batch-invariant mode disable features that depend on the batch.

        These are sequence parallelism, which starts at a number of tokens and uses other norm kernels than ours, and
        the fused product with reduce-scatter, which bypasses the communicator. Ranks and their GPUs are not known yet,
        so both stay off even if no communicator can be created later.
        """
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.enable_elastic_ep or parallel.tensor_parallel_size == 1:
            return
        from vllm import envs

        if parallel.worker_cls == WORKER_CLASS_OF_VLLM:
            parallel.worker_cls = WORKER_CLASS
        passes = vllm_config.compilation_config.pass_config
        if envs.VLLM_BATCH_INVARIANT or env.batch_invariant():
            for name in ("enable_sp", "fuse_gemm_comms"):  # vLLM 0.24 has them, and 0.33 does not
                if getattr(passes, name, False):
                    setattr(passes, name, False)
                    logger.warning("%s is off, as what it sums and norms would depend on the batch", name)

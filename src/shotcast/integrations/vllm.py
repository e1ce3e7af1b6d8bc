"""The vLLM plug-in: the entry point ``shotcast`` of ``vllm.platform_plugins``."""

from __future__ import annotations

import importlib
import logging
import os

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.integrations.signatures import Expected, refusal

logger = logging.getLogger(__name__)

AT_LEAST, BELOW = (0, 24), (0, 34)
"""The supported versions. 0.24.0 and 0.33.0 were read."""

BASE = "vllm.distributed.device_communicators.base_device_communicator"
COMMUNICATOR = "vllm.distributed.device_communicators.cuda_communicator"
WORKER = "vllm.v1.worker.gpu_worker"
EXPECTED = (
    Expected(COMMUNICATOR, "CudaCommunicator.__init__", ("self", "cpu_group", "device", "device_group", "unique_name")),
    Expected(COMMUNICATOR, "CudaCommunicator.all_reduce", ("self", "input_"), whole=True),
    Expected(BASE, "DeviceCommunicatorBase.all_gather", ("self", "input_", "dim"), whole=True),
    Expected(COMMUNICATOR, "CudaCommunicator.reduce_scatter", ("self", "input_", "dim"), whole=True),
    Expected(COMMUNICATOR, "CudaCommunicator.reduce_scatterv", ("self", "input_", "dim", "sizes"), whole=True),
    Expected(COMMUNICATOR, "CudaCommunicator.destroy", ("self",), whole=True),
    Expected(
        "vllm.distributed.parallel_state", "GroupCoordinator._all_reduce_out_place", ("self", "input_"), whole=True
    ),
    Expected("vllm.platforms", "cuda_platform_plugin"),
    Expected("vllm.platforms.cuda", "CudaPlatform"),
    Expected("vllm.platforms.cuda", "CudaPlatformBase.get_device_communicator_cls", ("cls",), whole=True),
    Expected("vllm.platforms.cuda", "CudaPlatformBase.check_and_update_config", ("cls", "vllm_config"), whole=True),
    Expected("vllm.config.compilation", "CompilationConfig.compile_ranges_endpoints"),
    Expected("vllm.config.compilation", "PassConfig.flashinfer_max_size", ("self", "world_size"), whole=True),
    Expected("vllm.config.compilation", "PassConfig.fuse_allreduce_rms"),
    Expected("vllm.config.parallel", "ParallelConfig.enable_elastic_ep"),
    Expected("vllm.config.parallel", "ParallelConfig.tensor_parallel_size"),
    Expected("vllm.config.parallel", "ParallelConfig.worker_cls"),
    Expected("vllm.config.vllm", "get_current_vllm_config_or_none"),
    Expected("vllm.envs", "VLLM_BATCH_INVARIANT"),
    Expected("vllm.envs", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    Expected("vllm.v1.outputs", "AsyncModelRunnerOutput.get_output", ("self",), whole=True),
    Expected(WORKER, "Worker.compile_or_warm_up_model", ("self",), whole=True),
    Expected(WORKER, "Worker.execute_model", ("self", "scheduler_output"), whole=True),
    Expected(WORKER, "Worker.sample_tokens", ("self", "grammar_output"), whole=True),
    Expected(WORKER, "Worker.sleep", ("self", "level"), whole=True),
    Expected(WORKER, "Worker.wake_up", ("self", "tags"), whole=True),
)
PLATFORM = "shotcast.integrations.vllm_platform"
WORKER_CLASS, WORKER_CLASS_OF_VLLM = "shotcast.integrations.vllm_worker.ShotcastWorker", f"{WORKER}.Worker"


def unsupported_reason() -> str:
    """Return why the plug-in is not active in this environment; empty if it is. Does not import vLLM."""
    try:
        if not env.vllm():
            return "SHOTCAST_VLLM is not 1"
    except ConfigError as error:
        return str(error)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "shotcast" not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves it out"
    return refusal("vllm", "vLLM", AT_LEAST, BELOW, EXPECTED)


def register() -> str | None:
    """Return the platform that vLLM should use, or None to leave vLLM unchanged. vLLM may call this repeatedly."""
    try:
        if not env.vllm():
            return None
        if not (why := unsupported_reason()):
            from vllm.platforms import cuda_platform_plugin

            if cuda_platform_plugin() is not None:
                importlib.import_module(PLATFORM)  # now, as what it raises later would end vLLM
                return f"{PLATFORM}.ShotcastCudaPlatform"
            why = "vLLM finds no GPU of NVIDIA"
    except Exception as error:
        why = str(error)
    logger.warning("the plug-in of shotcast is off, and vLLM as without it: %s", why)
    return None

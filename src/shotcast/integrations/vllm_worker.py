"""The vLLM GPU worker, which raises errors from our sums after each step and releases their workspace during sleep.

Importing it needs vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from shotcast.errors import ShotcastError
from shotcast.integrations import tensor_parallel

_SHARE_OF_DEADLINE = 0.8
"""The fraction of vLLM's step deadline after which our calls fail, so that vLLM learns which rank was late."""


def _check() -> None:
    for sums in tensor_parallel.all_sums():
        sums.check()


class _CheckedOutput(AsyncModelRunnerOutput):
    """A step output that vLLM collects later. Collecting it reports errors from replayed graphs."""

    def __init__(self, output: Any):
        self._output = output

    def get_output(self) -> Any:
        """Return the output, or an error for vLLM to report: raising here would end a thread of vLLM 0.24."""
        output = self._output.get_output()
        try:
            _check()
        except ShotcastError as error:
            return error
        return output

    def get_kv_connector_output(self) -> Any:
        """Return the part of a failed step that vLLM 0.33 keeps."""
        return self._output.get_kv_connector_output()


class ShotcastWorker(Worker):
    """vLLM's worker, extended to handle errors, kernels and sleep of our sums."""

    def _step(self, step: Callable[[Any], Any], argument: Any) -> Any:
        for sums in tensor_parallel.all_sums():
            sums.set_timeout(_SHARE_OF_DEADLINE * envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        try:
            output = step(argument)
            if isinstance(output, AsyncModelRunnerOutput):
                return _CheckedOutput(output)
            _check()
        except ShotcastError:
            raise
        except Exception:
            for sums in tensor_parallel.all_sums():
                sums.interrupt()  # the other ranks go on to calls for which this one will not come
            raise
        return output

    def compile_or_warm_up_model(self) -> Any:
        """Run the sums of the profiled step at every size, then vLLM's warm-up. Collective.

        A kernel takes a second to compile, which would otherwise delay a step later.
        """
        for sums in sorted(tensor_parallel.all_sums(), key=lambda sums: sums.group_name):
            sums.warm_up(self.scheduler_config.max_num_batched_tokens)
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run vLLM's method. Raises errors of this step's calls, on this rank or another."""
        return self._step(super().execute_model, scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Run vLLM's method. Raises errors of this step's calls, on this rank or another."""
        return self._step(super().sample_tokens, grammar_output)

    def sleep(self, level: int = 1) -> None:
        """Release the workspaces that no graph uses, then run vLLM's sleep."""
        for sums in tensor_parallel.all_sums():
            sums.sleep()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Run vLLM's wake-up, and recreate the workspaces with the last part. Collective."""
        super().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            for sums in tensor_parallel.all_sums():
                sums.wake_up()

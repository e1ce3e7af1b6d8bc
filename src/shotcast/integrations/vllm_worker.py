"""The worker of vLLM's GPUs, which raises what our sums have met in a step, and gives their workspace back in sleep.

The class is made when it is first asked for, as its base is vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shotcast.errors import ShotcastError
from shotcast.integrations import tensor_parallel

_SHARE_OF_DEADLINE = 0.8
"""A step's calls fail after this part of the time that vLLM gives it, so that vLLM learns which rank was late."""


def _check() -> None:
    for sums in tensor_parallel.all_sums():
        sums.check()


@functools.cache
def _worker() -> type:
    from vllm import envs
    from vllm.v1.outputs import AsyncModelRunnerOutput
    from vllm.v1.worker.gpu_worker import Worker

    class _CheckedOutput(AsyncModelRunnerOutput):
        """The output of a step that vLLM takes later. It looks for what replayed graphs have met."""

        def __init__(self, output: Any):
            self._output = output

        def get_output(self) -> Any:
            """Return the output, or an error for vLLM to tell: raised here, it would end a thread of vLLM 0.24."""
            output = self._output.get_output()
            try:
                _check()
            except ShotcastError as error:
                return error
            return output

        def get_kv_connector_output(self) -> Any:
            """Return what vLLM 0.33 keeps of a step that has failed."""
            return self._output.get_kv_connector_output()

    class ShotcastWorker(Worker):
        """vLLM's own worker, but for faults of our sums, their kernels and sleep."""

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
            """Make the sums of the profiled step at every size, then do what vLLM does. Collective.

            A kernel takes a second to compile, which later would be one of a step.
            """
            for sums in sorted(tensor_parallel.all_sums(), key=lambda sums: sums.group_name):
                sums.warm_up(self.scheduler_config.max_num_batched_tokens)
            return super().compile_or_warm_up_model()

        def execute_model(self, scheduler_output: Any) -> Any:
            """Do what vLLM does. Raises what a call of this step has met, or another rank in it."""
            return self._step(super().execute_model, scheduler_output)

        def sample_tokens(self, grammar_output: Any) -> Any:
            """Do what vLLM does. Raises what a call of this step has met, or another rank in it."""
            return self._step(super().sample_tokens, grammar_output)

        def sleep(self, level: int = 1) -> None:
            """Give back the workspaces that no graph uses, then what vLLM gives back."""
            for sums in tensor_parallel.all_sums():
                sums.sleep()
            super().sleep(level)

        def wake_up(self, tags: list[str] | None = None) -> None:
            """Do what vLLM does, and make the workspaces when the last part wakes up. Collective."""
            super().wake_up(tags)
            if tags is None or "kv_cache" in tags:
                for sums in tensor_parallel.all_sums():
                    sums.wake_up()

    ShotcastWorker.__module__, ShotcastWorker.__qualname__ = __name__, ShotcastWorker.__name__
    return ShotcastWorker


def __getattr__(name: str) -> type:
    if name == "ShotcastWorker":
        return _worker()
    raise AttributeError(f"module {__name__} has no attribute {name}")

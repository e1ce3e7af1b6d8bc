"""The worker of vLLM's GPUs, which gives the workspace of our sums back in sleep.

The class is made when it is first asked for, as its base is vLLM's.
"""

from __future__ import annotations

import functools

from shotcast.integrations import tensor_parallel


@functools.cache
def _worker() -> type:
    from vllm.v1.worker.gpu_worker import Worker

    class ShotcastWorker(Worker):
        """vLLM's own worker, but for sleep."""

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

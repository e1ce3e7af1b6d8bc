"""vLLM's real executor with two worker processes of its real class, on CPU ranks. It prints what came of each case.

    python tests/integrations/vllm_engine.py FOLDER CASE [CASE ...]

The workers take another device, group and model runner than on GPUs. FOLDER has the entry points of the plug-in.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from typing import Any

import psutil
import torch
import torch.distributed as dist
import triton
from real_host_targets import _import_passes, _import_vllm, _vllm_group

_DEADLINE_S = 5
_CASE_S = 50
_IDLE_S = 2.5
"""vLLM's queues spin for a second after a message."""
_CULPRIT = 1
_ROWS, _HIDDEN, _SEQUENCES = 64, 64, 5


class Runner:
    """A model of three sums, between which rank 1 has the trouble that a request asks for, and of gathered logits."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.model.register_buffer("table", torch.ones(3))

    def execute_model(self, request: Any, _: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        rank, trouble = dist.get_rank(), request.trouble if dist.get_rank() == _CULPRIT else ""
        if request.trouble == "replayed":  # as replays of graphs: nothing is raised where a call has failed
            if rank != _CULPRIT:
                thread = threading.Thread(target=self._sums, args=("",))
                thread.start()
                thread.join()
            output = ModelRunnerOutput([], {})
            return _given_later(output) if request.later else output
        self._sums(trouble)
        if not request.trouble:
            _gather()
        return ModelRunnerOutput(["done"], {})

    def _sums(self, trouble: str) -> None:
        _sum(_ROWS)
        if trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif trouble == "late":
            time.sleep(3 * _DEADLINE_S)
        elif trouble == "raises":
            raise ValueError("this rank is out of luck")
        _sum(2 * _ROWS if trouble == "differs" else _ROWS)
        if trouble != "skips":
            _sum(_ROWS)

    def get_draft_model(self) -> None:
        pass

    def post_kv_cache_wake_up(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def _sum(rows: int) -> None:
    from vllm.distributed import get_tp_group

    x = torch.full((rows, _HIDDEN), dist.get_rank() + 1.0)
    assert get_tp_group().all_reduce(x).eq(3.0).all()


def _gather() -> None:
    from vllm.distributed import get_tp_group

    x = torch.full((_SEQUENCES, 8), float(dist.get_rank()))
    assert get_tp_group().all_gather(x).sum(0).tolist() == [0.0] * 8 + [float(_SEQUENCES)] * 8


def _given_later(output: Any) -> Any:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            return output

        def get_kv_connector_output(self) -> None:
            pass

    return Later()


@functools.cache
def _worker() -> type:
    from shotcast.integrations.vllm_worker import ShotcastWorker

    class CpuWorker(ShotcastWorker):  # type: ignore[misc, valid-type]
        def init_device(self) -> None:
            import vllm.distributed.parallel_state as groups

            os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": "2"}
            dist.init_process_group("gloo", self.distributed_init_method, rank=self.rank, world_size=2)
            groups._TP = _vllm_group(groups, "tp:0")
            self.use_v2_model_runner, self.model_runner = False, Runner()

        def load_model(self) -> None:
            pass

    return CpuWorker


def __getattr__(name: str) -> type:
    if name == "CpuWorker":
        return _worker()
    raise AttributeError(name)


def _held(worker: Any) -> tuple[int, int]:
    """Return the KiB of shared memory that this process maps, and the calls so far."""
    from shotcast.integrations import tensor_parallel

    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssShmem"))
    return int(line.split()[1]), tensor_parallel.counts()["all_reduce"]


def _request(trouble: str = "", later: bool = False) -> Any:
    return types.SimpleNamespace(total_num_scheduled_tokens=0, trouble=trouble, later=later)


def _sleeps(executor: Any) -> Any:
    """Return what each rank holds awake, asleep, with its weights awake, and awake again, for both levels."""
    found = []
    for level in (1, 2):
        executor.execute_model(_request())
        held = [executor.collective_rpc(_held)]
        executor.sleep(level)
        held.append(executor.collective_rpc(_held))
        executor.wake_up(["weights"])
        held.append(executor.collective_rpc(_held))
        executor.wake_up(["kv_cache"])
        held.append(executor.collective_rpc(_held))
        assert executor.execute_model(_request()).req_ids == ["done"]
        found.append(held)
    executor.sleep(1)
    assert executor.execute_model(_request()).req_ids == ["done"], "a call wakes it up"
    return found


def _compiles(executor: Any) -> Any:
    """Return how many rows the sums and gathers of each rank had as it warmed up, after one step."""
    executor.execute_model(_request())
    return executor.collective_rpc(_warmed_up)


def _warmed_up(worker: Any) -> tuple[list[int], list[int], list[int]]:
    from vllm.v1.worker.gpu_worker import Worker

    from shotcast.integrations import tensor_parallel

    (sums,) = tensor_parallel.all_sums()
    rows: list[int] = []
    gathered: list[int] = []
    make, gather = sums.communicator.all_reduce, sums.communicator.all_gather

    def noted(x: torch.Tensor, **others: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return make(x, **others)

    def noted_gather(x: torch.Tensor) -> torch.Tensor:
        gathered.append(x.shape[0])
        return gather(x)

    sums.communicator.all_reduce, sums.communicator.all_gather = noted, noted_gather
    Worker.compile_or_warm_up_model = lambda worker: len(rows)
    worker.worker.scheduler_config = types.SimpleNamespace(max_num_batched_tokens=100)
    before = worker.compile_or_warm_up_model()
    worker.compile_or_warm_up_model()
    return rows, gathered, [before, len(rows)]


def _fault(executor: Any, trouble: str) -> dict[str, Any]:
    """Return the error of a step in which rank 1 has trouble, its seconds, and what the ranks burn a second later."""
    ended = threading.Event()
    executor.register_failure_callback(ended.set)
    assert executor.execute_model(_request()).req_ids == ["done"]
    workers = [psutil.Process(one.proc.pid) for one in executor.workers]
    start, error = time.monotonic(), ""
    name, _, later = trouble.partition(" ")
    try:
        executor.execute_model(_request(name, bool(later)))
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    seconds = time.monotonic() - start
    if name == "killed":
        assert ended.wait(10), "vLLM does not see that its worker has ended"
        assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in workers)
        return {"error": error, "seconds": seconds, "burnt": 0.0}
    time.sleep(_IDLE_S)
    before = sum(sum(one.cpu_times()[:2]) for one in workers)
    time.sleep(1)
    burnt = sum(sum(one.cpu_times()[:2]) for one in workers) - before
    return {"error": error, "seconds": seconds, "burnt": burnt}


class _Model:
    """The answers to what a worker asks of a model's configuration: this one has nothing special."""

    dtype, sleep_mode_backend = torch.float32, "cumem"

    def __getattr__(self, name: str) -> bool:
        if name.startswith("__"):
            raise AttributeError(name)
        return False

    def get_hidden_size(self) -> int:
        return _HIDDEN


def _import_worker() -> None:
    """Import vLLM's worker, which asks compiled kernels that are not there what they can do."""
    from vllm.triton_utils import triton as stand_in

    stand_in.Config = triton.Config  # without a GPU, vLLM has one of its own
    while True:
        try:
            importlib.import_module("vllm.v1.worker.gpu_worker")
        except AttributeError as error:
            missing = re.search(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'", str(error))
            if missing is None:
                raise
            setattr(getattr(torch.ops, missing[1]), missing[2], lambda *_: False)
        else:
            return


def _begin(folder: str) -> Any:
    """Import vLLM, and return a function that makes its executor."""
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # with what is changed here
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(_DEADLINE_S),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
    _import_vllm(folder)
    _import_passes()
    _import_worker()
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.device_allocator import cumem
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from shotcast.integrations import vllm_worker

    cumem.cumem_available = True
    torch.cuda.mem_get_info = torch.accelerator.get_memory_info = lambda *_: (1 << 30, 1 << 31)
    torch.cuda.set_device = torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None

    def make() -> Any:
        parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp")
        config = VllmConfig(parallel_config=parallel)
        assert parallel.worker_cls == f"{vllm_worker.__name__}.ShotcastWorker"
        parallel.worker_cls = "vllm_engine.CpuWorker"
        assert config.scheduler_config.async_scheduling, "outputs are taken by another thread"
        object.__setattr__(config, "model_config", _Model())
        return MultiprocExecutor(config)

    return make


def _run(make: Any, case: str) -> None:
    executor = make()
    try:
        own = {"sleeps": _sleeps, "compiles": _compiles}.get(case)
        found = _fault(executor, case) if own is None else own(executor)
    finally:
        executor.shutdown()
    print(json.dumps({case: found}), flush=True)


def main() -> None:
    folder, *cases = sys.argv[1:]
    make = _begin(folder)
    for case in cases:  # from here, as a process with the threads of an executor cannot fork
        child = multiprocessing.get_context("fork").Process(target=_run, args=(make, case))
        child.start()
        child.join(_CASE_S)
        if child.exitcode is None:
            child.kill()


if __name__ == "__main__":
    main()

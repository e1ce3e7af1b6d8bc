"""Functions that the ranks of tests/integrations/test_plugins.py run, each with a host program in a folder."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shotcast
from shotcast.collectives import reference
from shotcast.integrations import tensor_parallel
from shotcast.integrations.vllm import WORKER_CLASS, WORKER_CLASS_OF_VLLM

LINEAR_USERS = "linear", "vocab_parallel_embedding"
"""The modules of vLLM that call its batch-invariant linear layer."""


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _begin(folder: str) -> list[str]:
    """Make the host program of a folder importable, and return the lines that the plug-ins will log."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    handler, logger = _Logged(), logging.getLogger("shotcast.integrations")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.init_process_group("gloo")
    return handler.lines


def _inputs(count: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    size = dist.get_world_size()
    return [torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]


def _vllm_group(name: str) -> Any:
    from vllm.distributed.parallel_state import GroupCoordinator

    ranks = list(range(dist.get_world_size()))
    options = {"use_device_communicator": True, "use_message_queue_broadcaster": False, "group_name": name}
    return GroupCoordinator([ranks], dist.get_rank(), "gloo", **options)


def _fusions(size: int, *names: str, elastic: bool = False) -> list[bool]:
    """Return which fusions are on after vLLM's platform has looked at a configuration with all of them."""
    from vllm.platforms import current_platform

    names = names or ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
    passes = types.SimpleNamespace(**dict.fromkeys(names, True))
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(pass_config=passes),
        parallel_config=types.SimpleNamespace(
            tensor_parallel_size=size, enable_elastic_ep=elastic, worker_cls=WORKER_CLASS_OF_VLLM
        ),
    )
    current_platform.check_and_update_config(config)
    assert config.checked
    ours = config.parallel_config.worker_cls == WORKER_CLASS
    assert ours == (size > 1 and not elastic)
    return [getattr(passes, name) for name in names]


def vllm(folder: str) -> list[str]:
    """Run sums through vLLM's groups. Return what was logged."""
    logged = _begin(folder)
    import vllm.config.vllm
    from vllm.platforms import current_platform

    assert vllm.config.vllm.platform is current_platform
    assert _fusions(1) == _fusions(2, elastic=True) == [True] * 3  # not ours to change
    assert _fusions(2) == [True] * 3
    assert _fusions(2, "fuse_allreduce_rms") == [True]  # vLLM 0.33 has no other
    passes = types.SimpleNamespace(fuse_allreduce_rms=True)
    vllm.config.vllm.current = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(pass_config=passes),
        model_config=types.SimpleNamespace(get_hidden_size=lambda: 64, dtype=torch.bfloat16),
        parallel_config=types.SimpleNamespace(enable_elastic_ep=False),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=2048),
    )
    tp, other = _vllm_group("tp"), _vllm_group("pp")
    assert type(tp.device_communicator).__name__ == "ShotcastCudaCommunicator"
    ours, theirs = tp.device_communicator, other.device_communicator
    assert not passes.fuse_allreduce_rms, "there is no pass in which ours could take the place of vLLM's"
    assert theirs.sums is None
    rank = dist.get_rank()
    for count in (1, 64, 4097, 1 << 20):
        xs = _inputs(count)
        before = xs[rank].clone()
        with torch.inference_mode():
            got = tp.all_reduce(xs[rank])
        assert got is not xs[rank]
        assert torch.equal(xs[rank], before)  # out of place
        assert torch.equal(got, reference.ordered_sum(xs))
    square = torch.arange(12.0).view(3, 4).t() + rank
    assert tp.all_reduce(square).stride() == square.stride()
    assert torch.equal(tp.all_reduce(square), sum(torch.arange(12.0).view(3, 4).t() + one for one in range(2)))
    assert (ours.sums.calls["all_reduce"], ours.host_calls) == (6, [])
    unserved = torch.ones(8).to(torch.float8_e4m3fn)
    assert tp.all_reduce(unserved).float().tolist() == [2.0] * 8  # native kernels have no sum of FP8
    assert ours.host_calls == ["all_reduce"]
    ours.reduce_scatter(torch.ones(4), 0)
    assert ours.host_calls == ["all_reduce", "reduce_scatter"]
    other.all_reduce(torch.ones(4))
    assert theirs.host_calls == ["all_reduce"]
    for dim in (-1, 0, 1):
        parts = [torch.arange(12.0).view(2, 3, 2) + 100 * one for one in range(2)]
        assert torch.equal(ours.all_gather(parts[rank], dim), torch.cat(parts, dim))
    assert ours.all_gather(square).shape == (4, 6)  # not contiguous
    assert ours.host_calls == ["all_reduce", "reduce_scatter"]
    assert theirs.all_gather(torch.ones(2)).tolist() == [1.0] * 4
    assert theirs.host_calls == ["all_reduce", "all_gather"]
    assert tensor_parallel.counts()["all_gather"] == 4
    assert tensor_parallel.counts()["all_reduce"] == 6
    assert tensor_parallel.counts()["declined"] == 1
    assert ours.sums.communicator.max_bytes == 2048 * 64 * 2, "the largest batch"
    assert ours.sums.communicator._host.members.group == "tp:0", "as errors name it"
    _sleep(ours.sums)
    communicator = ours.sums.communicator
    tp.destroy()
    assert "destroy" in ours.host_calls
    with pytest.raises(shotcast.ClosedError):
        communicator.check()
    assert tensor_parallel.counts() == {}
    other.destroy()
    return logged


def _sleep(sums: tensor_parallel.TensorParallelSums) -> None:
    """Let the sums sleep, and wake up by a call; but not where graphs have the addresses of the workspace."""
    first, x = sums.communicator, torch.ones(4)
    sums.sleep()
    sums.sleep()
    sums.set_timeout(30)
    sums.check()
    with pytest.raises(shotcast.ClosedError):
        first.check()
    assert sums.serves(x)
    assert sums.all_reduce(x).tolist() == [2.0] * 4
    second = sums.communicator
    assert second is not first
    assert second._timeout_s == 30
    sums.wake_up()
    assert sums.communicator is second
    sums._in_graphs = True
    sums.sleep()
    second.check()


def vllm_batch_invariant(folder: str) -> str:
    """Run parts of a batch through vLLM in its batch-invariant mode. Return the explanation of a sum."""
    _begin(folder)
    assert _fusions(1) == [True] * 3
    assert _fusions(2) == [True, False, False]
    tp, rank = _vllm_group("tp"), dist.get_rank()
    ours = tp.device_communicator
    xs = _inputs(1 << 16)
    whole = tp.all_reduce(xs[rank])
    for start, stop in ((0, 8), (100, 4196), (5000, 65536)):
        assert torch.equal(tp.all_reduce(xs[rank][start:stop].clone()), whole[start:stop])
    rows = [x.view(256, 256)[: 4 * len(xs)] for x in xs]
    total = reference.ordered_sum(rows)
    assert torch.equal(ours.reduce_scatter(rows[rank], 0), total.chunk(len(xs), 0)[rank])
    assert torch.equal(ours.reduce_scatter(rows[rank], -1), total.chunk(len(xs), -1)[rank])
    sizes = [3, 4 * len(xs) - 3]
    assert torch.equal(ours.reduce_scatterv(rows[rank], 0, sizes), total.split(sizes, 0)[rank])
    assert torch.equal(ours.custom_reduce_scatter(rows[rank]), total.chunk(len(xs), 0)[rank])
    with pytest.raises(shotcast.UnsupportedError, match="batch-invariant"):
        tp.all_reduce(torch.ones(8).to(torch.float8_e4m3fn))
    assert ours.host_calls == []
    explained = str(ours.sums.communicator.explain(whole))
    tp.destroy()
    return explained


def vllm_linear(folder: str) -> list[str]:
    """Compute linear layers in vLLM's batch-invariant mode. Return what was logged."""
    logged = _begin(folder)
    tp = _vllm_group("tp")
    own = importlib.import_module("vllm.model_executor.layers.batch_invariant").linear_batch_invariant
    layers = [importlib.import_module(f"vllm.model_executor.layers.{name}") for name in LINEAR_USERS]
    functions = [layer.linear_batch_invariant for layer in layers]
    tp.destroy()
    if own in functions:
        assert functions == [own] * 2
        return logged
    from shotcast.integrations import vllm_linear
    from shotcast.kernels.triton import batch_invariant_gemm

    assert functions == [vllm_linear.linear_batch_invariant] * 2
    linear = functions[0]
    x, weight, bias = torch.randn(2, 3, 32), torch.randn(6, 32), torch.randn(6)
    assert torch.equal(linear(x, weight, bias), own(x, weight, bias))  # a CPU's, which our kernel does not serve
    meta = torch.compile(linear, backend="eager", fullgraph=True)(x.to("meta"), weight.to("meta"))
    assert (meta.shape, meta.dtype) == ((2, 3, 6), torch.float32)
    served: list[tuple[int, ...]] = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        served.append(tuple(x.shape))
        return own(x, weight, bias)

    asked: list[tuple[int, ...]] = []

    def differs(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        asked.append((*weight.shape, bias is not None))
        return weight.shape[0] == 7

    replaced = mock.patch.multiple(batch_invariant_gemm, serves=lambda x, weight: True, differs=differs, linear=kernel)
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    with replaced, capturing:
        half, seven = weight.half(), torch.randn(7, 32)
        for _ in range(2):
            assert torch.equal(linear(x.half(), half), own(x.half(), half))
            assert torch.equal(linear(x.half(), half, bias.half()), own(x.half(), half, bias.half()))
            assert torch.equal(linear(x, seven), own(x, seven))
    assert served == [(6, 32)] * 4
    assert asked == [(6, 32, False), (6, 32, True), (7, 32, False)]
    return logged


def vllm_elastic(folder: str) -> list[str]:
    """Make a group under elastic expert parallelism, which compares the class. Return what was logged."""
    logged = _begin(folder)
    import vllm.config.vllm as config

    parallel = types.SimpleNamespace(enable_elastic_ep=True, tensor_parallel_size=2)
    config.current = types.SimpleNamespace(parallel_config=parallel)
    assert type(_vllm_group("tp").device_communicator).__name__ == "CudaCommunicator"
    os.environ["SHOTCAST_BATCH_INVARIANT"] = "1"
    with pytest.raises(shotcast.UnsupportedError, match="SHOTCAST_BATCH_INVARIANT=1, and group tp of vLLM has no sums"):
        _vllm_group("tp")
    parallel.tensor_parallel_size = 1  # there is nothing to sum
    assert type(_vllm_group("tp").device_communicator).__name__ == "CudaCommunicator"
    return logged


def vllm_without_kernels(folder: str) -> list[str]:
    """Make groups for which one rank, or each, has no communicator. Return what was logged."""
    logged = _begin(folder)

    def goes_by_vllm() -> None:
        tp = _vllm_group("tp")
        assert tp.device_communicator.sums is None
        assert tp.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
        assert tp.device_communicator.host_calls == ["all_reduce"]
        assert tensor_parallel.counts() == {}

    os.environ["SHOTCAST_ALLOW_FP8"] = str(dist.get_rank())  # ranks that do not agree cannot construct a communicator
    goes_by_vllm()
    del os.environ["SHOTCAST_ALLOW_FP8"]

    class FullMachine(tensor_parallel.TensorParallelSums):
        def __init__(self, *args: Any):
            super().__init__(*args)
            self.close()
            raise OSError("no space left")

    if dist.get_rank() == 1:  # after the construction, which all ranks end
        tensor_parallel.TensorParallelSums = FullMachine
    goes_by_vllm()
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = True  # vLLM's own mode has a way of its own
    goes_by_vllm()
    if dist.get_rank() == 0:  # the rank that could, and the other learns of it
        os.environ["SHOTCAST_BATCH_INVARIANT"] = "1"
    text = "SHOTCAST_BATCH_INVARIANT=1, and group tp:3 of vLLM has no sums of ours: rank 1: OSError: no space left"
    with pytest.raises(shotcast.UnsupportedError, match=text):
        _vllm_group("tp")
    tensor_parallel.SETUP_TIMEOUT_S = 0.1
    if dist.get_rank() == 1:
        time.sleep(0.6)  # it is late to tell, and the other does not wait for it without end
    else:
        with pytest.raises(shotcast.ShotcastError, match=r"a rank has ended, or has not told within 0\.2 s whether"):
            tensor_parallel._unsupported_reasons(dist.group.WORLD, False, "")
    return logged


def vllm_own_class(folder: str) -> list[str]:
    """Make a group with vLLM's own class. Return what was logged."""
    logged = _begin(folder)
    assert type(_vllm_group("tp").device_communicator).__name__ == "CudaCommunicator"
    return logged


def vllm_untouched(folder: str) -> tuple[list[str], str]:
    """Return what was logged, and the class of communicators, where the plug-in leaves vLLM as it is."""
    logged = _begin(folder)
    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "vllm.platforms.cuda"
    if dist.get_world_size() == 2:
        tp = _vllm_group("tp")
        tp.all_reduce(torch.ones(4))
        assert tp.device_communicator.host_calls == ["all_reduce"]
    assert not [name for name in os.environ if name.startswith("SHOTCAST_") and name != "SHOTCAST_VLLM"]
    return logged, current_platform.get_device_communicator_cls()


def _sglang_group(name: str, custom: bool = True) -> Any:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    ranks = list(range(dist.get_world_size()))
    flags = dict.fromkeys(
        ("use_pynccl", "use_mscclpp", "use_torch_symm_mem_all_reduce", "use_hpu_communicator", "use_xpu_communicator"),
        False,
    )
    return GroupCoordinator([ranks], dist.get_rank(), "gloo", **flags, use_custom_allreduce=custom, group_name=name)


def _fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    from sglang.srt.layers.flashinfer_comm_fusion import flashinfer_allreduce_residual_rmsnorm

    operands = {"input_tensor": x, "residual": residual, "weight": weight, "eps": 1e-5}
    return flashinfer_allreduce_residual_rmsnorm(**operands, max_token_num=2048, use_attn_tp_group=True)


def sglang(folder: str, deterministic: bool) -> list[str]:
    """Run sums and fused norms through SGLang's groups. Return what was logged."""
    logged = _begin(folder)
    os.environ["SGLANG_ENABLE_DETERMINISTIC_INFERENCE"] = str(int(deterministic))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    tp, bare, other = _sglang_group("tp"), _sglang_group("attention_tp", False), _sglang_group("pp", False)
    assert other.ca_comm is None
    rank = dist.get_rank()
    ours = tp.ca_comm
    for group in (tp, bare):
        assert (group.ca_comm.disabled, group.ca_comm.original_disabled) == (False, False)
        for count in (1, 64, 4097):
            xs = _inputs(count)
            assert torch.equal(group.all_reduce(xs[rank]), reference.ordered_sum(xs))
        with group.graph_capture():
            group.all_reduce(torch.ones(4))
    host = ours.host
    assert host.calls == ["capture"]
    if not deterministic:
        unserved = torch.ones(8).to(torch.float8_e4m3fn)
        assert tp.all_reduce(unserved).float().tolist() == [2.0] * 8
        assert host.calls == ["capture", "all_reduce"]
        assert not bare.ca_comm.should_custom_ar(unserved)
        assert bare.ca_comm.custom_all_reduce(unserved) is None

    fusion.groups.update(attn_tp=tp, moe=other)
    xs, weight = [x.view(4, 16) for x in _inputs(64)], torch.full((16,), 1.5, dtype=torch.bfloat16)
    residual = torch.ones(4, 16, dtype=torch.bfloat16)
    normed, new = _fused(xs[rank], residual, weight)
    direct = tp.fused_allreduce_rmsnorm(xs[rank], residual, weight, 1e-5)
    if deterministic:
        assert (normed, new, direct) == (None, None, None)  # SGLang sums by ours, and norms by its own
    else:
        wanted = reference.add_residual(reference.ordered_sum(xs), residual)
        assert torch.equal(new, wanted)
        assert new.data_ptr() != residual.data_ptr()
        root = torch.rsqrt(wanted.double().pow(2).mean(-1, keepdim=True) + 1e-5)
        torch.testing.assert_close(normed.double(), wanted.double() * root * 1.5, rtol=1e-2, atol=1e-2)
        assert torch.equal(direct[0], normed)
        assert torch.equal(direct[1], new)
    with pytest.MonkeyPatch.context() as compiling:
        compiling.setattr(torch.compiler, "is_compiling", lambda: True)
        assert _fused(xs[rank], residual, weight) == (None, None)  # SGLang sums, by ours when that runs, and norms
    assert fusion.calls == []
    fusion.groups.update(attn_tp=other)
    assert _fused(xs[rank], residual, weight) == (None, None)
    assert fusion.calls == ["fused"]
    assert ours.sums.batch_invariant == deterministic
    tp.destroy()
    assert tp.ca_comm is host
    bare.destroy()
    other.destroy()
    assert tensor_parallel.counts() == {}
    return logged


def sglang_untouched(folder: str) -> list[str]:
    """Return what was logged where the plug-in leaves SGLang as it is."""
    logged = _begin(folder)
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.plugins import hook_registry, load_plugins

    before = dict(vars(GroupCoordinator))
    load_plugins()
    assert hook_registry.hooks == []
    assert dict(vars(GroupCoordinator)) == before
    assert "shotcast.integrations.sglang_hooks" not in sys.modules
    return logged

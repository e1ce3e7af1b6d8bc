"""Functions that the ranks of tests/integrations/test_real_hosts.py run, in the real classes of vLLM and SGLang."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

_COMPILED = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C")


class _NoNccl:
    """A stand-in for vLLM's NCCL, which needs GPUs."""

    disabled, world_size = True, 2

    def __init__(self, group: Any, device: Any):
        pass

    def destroy(self) -> None:
        pass


def vllm(folder: str) -> tuple[str, dict[str, int], bool]:
    """Sum through the real group and communicator of vLLM. Return its version, the calls, and the mode."""
    sys.path.insert(0, folder)
    os.environ |= {"SHOTCAST_VLLM": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    for name in _COMPILED:  # sources that were unpacked have no compiled parts
        if importlib.util.find_spec(f"vllm.{name}") is None:
            sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    import vllm.platforms as platforms

    platforms._current_platform = None
    platforms.cuda_platform_plugin = lambda: "vllm.platforms.cuda.CudaPlatform"
    platforms.builtin_platform_plugins["cuda"] = platforms.cuda_platform_plugin
    import vllm.distributed.parallel_state as groups
    from vllm.distributed.device_communicators import pynccl
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.version import __version__

    pynccl.PyNcclCommunicator = _NoNccl
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    chosen = resolve_obj_by_qualname(platforms.current_platform.get_device_communicator_cls())
    made = {"cpu_group": group, "device": torch.device("cpu"), "device_group": group}
    ours, other = chosen(**made, unique_name="tp:0"), chosen(**made, unique_name="pp:0")
    assert other.sums is None
    coordinator = object.__new__(groups.GroupCoordinator)  # its construction takes GPUs, and its operator does
    coordinator.unique_name, coordinator.world_size, coordinator.device_communicator = "tp:0", 2, ours
    coordinator.use_custom_op_call = False
    with torch.inference_mode():
        for count in (4, 4096, 1 << 20):
            x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
            assert coordinator.all_reduce(x).eq(3.0).all()
            assert x.eq(rank + 1.0).all()
    calls, mode = dict(ours.sums.calls), ours.sums.batch_invariant
    ours.destroy()
    assert ours.sums is None
    other.destroy()
    return __version__, calls, mode


def sglang(folder: str) -> tuple[str, dict[str, int]]:
    """Sum and norm through the real groups and hooks of SGLang. Return its version and the calls."""
    sys.path.insert(0, folder)
    os.environ["SHOTCAST_SGLANG"] = "1"
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    from importlib.metadata import version

    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.distributed.parallel_state as groups
    import sglang.srt.layers.flashinfer_comm_fusion as fusion

    flags = dict.fromkeys(
        (
            "use_pynccl",
            "use_mscclpp",
            "use_custom_allreduce",
            "use_torch_symm_mem_all_reduce",
            "use_hpu_communicator",
            "use_xpu_communicator",
        ),
        False,
    )
    tp = groups.GroupCoordinator([[0, 1]], rank, "gloo", **flags, group_name="tp")
    other = groups.GroupCoordinator([[0, 1]], rank, "gloo", **flags, group_name="pp")
    assert other.ca_comm is None
    x = torch.full((4, 1024), rank + 1.0, dtype=torch.bfloat16)
    assert tp._resolve_outplace_all_reduce_method(x) == "ca"
    assert not tp._can_use_flashinfer_allreduce(x)
    assert tp._all_reduce_out_place(x, "auto").eq(3.0).all()
    residual, weight = torch.ones_like(x), torch.ones(1024, dtype=torch.bfloat16)
    assert tp.fused_allreduce_rmsnorm(x, residual, weight, 1e-6)[1].eq(4.0).all()
    fusion.resolve_fusion_group = lambda *, use_attn_tp_group: (2, rank, tp)
    fusion.resolve_fusion_world_size = lambda *, use_attn_tp_group: 2
    named = {"input_tensor": x, "residual": residual, "weight": weight, "eps": 1e-6, "max_token_num": 2048}
    normed, new = fusion.flashinfer_allreduce_residual_rmsnorm(**named, use_attn_tp_group=True)
    assert new.eq(4.0).all()
    assert normed.eq(1.0).all()
    calls = dict(tp.ca_comm.sums.calls)
    tp.destroy()
    assert tp.ca_comm is None
    other.destroy()
    return version("sglang"), calls

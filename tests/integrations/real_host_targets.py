"""Functions that the ranks of tests/integrations/test_real_hosts.py run, in the real classes of vLLM and SGLang."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

_NAMES = ("vllm.vllm_flash_attn", "xgrammar", "xgrammar.openai_tool_call_schema", "xgrammar.structural_tag")
_COMPILED = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C")


class _Names(types.ModuleType):
    """A module that vLLM imports names of, and does not use here."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


class _NoNccl:
    """A stand-in for vLLM's NCCL, which needs GPUs."""

    disabled = True

    def __init__(self, group: Any, device: Any):
        self.world_size = dist.get_world_size()

    def destroy(self) -> None:
        pass


def _import_vllm(folder: str) -> Any:
    """Import vLLM as on a machine with an H100, and return the module of its groups."""
    sys.path.insert(0, folder)
    os.environ |= {"SHOTCAST_VLLM": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    for name in _COMPILED:  # sources that were unpacked have no compiled parts
        if importlib.util.find_spec(f"vllm.{name}") is None:
            sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    sys.modules.update((name, _Names(name)) for name in _NAMES)
    import vllm.platforms as platforms

    platforms._current_platform = None
    platforms.cuda_platform_plugin = lambda: "vllm.platforms.cuda.CudaPlatform"
    platforms.builtin_platform_plugins["cuda"] = platforms.cuda_platform_plugin
    import vllm.distributed.parallel_state as groups
    from vllm.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = _NoNccl
    return groups


def _vllm_group(groups: Any, name: str) -> Any:
    """Return a group of vLLM, whose construction takes GPUs."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    group = dist.new_group(backend="gloo")
    chosen = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    made = object.__new__(groups.GroupCoordinator)
    made.unique_name, made.world_size, made.use_custom_op_call = name, dist.get_world_size(), False
    made.cpu_group, made.device_group = group, dist.new_group(backend="gloo")
    made.mq_broadcaster = None
    made.device_communicator = chosen(group, torch.device("cpu"), group, unique_name=name)
    return made


def vllm(folder: str) -> tuple[str, dict[str, int], bool]:
    """Sum through the real group and communicator of vLLM. Return its version, the calls, and the mode."""
    groups = _import_vllm(folder)
    from vllm.version import __version__

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    coordinator, other = _vllm_group(groups, "tp:0"), _vllm_group(groups, "pp:0").device_communicator
    ours = coordinator.device_communicator
    assert other.sums is None
    with torch.inference_mode():
        for count in (4, 4096, 1 << 20):
            x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
            assert coordinator.all_reduce(x).eq(3.0).all()
            assert x.eq(rank + 1.0).all()
        logits = [torch.randn(3, 8, generator=torch.Generator().manual_seed(one)) for one in range(2)]
        assert torch.equal(coordinator.all_gather(logits[rank]), torch.cat(logits, -1))
    calls, mode = dict(ours.sums.calls), ours.sums.batch_invariant
    ours.destroy()
    assert ours.sums is None
    other.destroy()
    return __version__, calls, mode


_QUANTIZE = "static_scaled_fp8_quant"


def _import_passes() -> Any:
    """Return vLLM's pass manager, in whose place a module stands, as it imports attention that needs GPUs.

    What our pass imports takes compiled kernels: one of them works, and the others are names.
    """
    name = "vllm.compilation.passes.pass_manager"
    manager = sys.modules[name] = types.ModuleType(name)
    manager.AllReduceFusionPass = None  # type: ignore[attr-defined]
    libraries = {"_C": torch.library.Library("_C", "FRAGMENT")}
    libraries["_C"].define(
        f"{_QUANTIZE}(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()"
    )

    def quantize(result: torch.Tensor, input: torch.Tensor, scale: torch.Tensor, group_shape: Any = None) -> None:
        result.copy_((input.float() * (1 / scale.float())).clamp(-448, 448).to(torch.float8_e4m3fn))

    libraries["_C"].impl(_QUANTIZE, quantize, "CompositeExplicitAutograd")
    while True:
        try:
            import vllm.compilation.passes as passes

            importlib.import_module("vllm.compilation.passes.fusion.matcher_utils")
        except AttributeError as error:
            missing = re.search(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'", str(error))
            if missing is None:
                raise
            library = libraries.setdefault(missing[1], torch.library.Library(missing[1], "FRAGMENT"))
            library.define(f"{missing[2]}() -> ()")
            _KERNELS.append(library)
        else:
            _KERNELS.extend(libraries.values())
            passes.pass_manager = manager  # type: ignore[attr-defined]
            return manager


_KERNELS: list[torch.library.Library] = []
"""They end with their libraries."""


def _begin_passes(folder: str) -> tuple[Any, Any, Any]:
    """Return vLLM's tensor-parallel group, a configuration, and the pass that its pass manager would take."""
    groups = _import_vllm(folder)
    pass_manager = _import_passes()
    dist.init_process_group("gloo")
    groups._TP = tp = _vllm_group(groups, "tp:0")
    tp.use_custom_op_call = True
    groups._register_group(tp)
    import vllm.config.vllm as configuration
    from vllm.config import CompilationConfig

    config = types.SimpleNamespace(
        compilation_config=CompilationConfig(custom_ops=["all"]),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
        device_config=types.SimpleNamespace(device="cpu"),
        compile_debug_dump_path=lambda: None,
    )
    configuration._current_vllm_config = config  # type: ignore[assignment]
    _KERNELS.append(torch.library.Library("vllm", "FRAGMENT"))
    _KERNELS[-1].impl("all_reduce", groups.all_reduce, "CPU")
    return tp, config, pass_manager.AllReduceFusionPass(config)


def _fused(ours: Any, layers: Any, operands: tuple[torch.Tensor, ...]) -> Any:
    """Return the graph of ``layers`` after our pass."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.inference_mode(), torch._subclasses.FakeTensorMode() as mode:
        traced = make_fx(layers)(*(mode.from_tensor(one) for one in operands))
    traced.graph.eliminate_dead_code()
    ours(traced.graph)
    traced.recompile()
    return traced


def vllm_fusion(folder: str) -> tuple[int, dict[str, int], list[str]]:
    """Let vLLM's pass manager fuse a graph, and run it. Return how many it fused, our calls, and its operators."""
    tp, _, ours = _begin_passes(folder)
    import vllm.ir
    from vllm.compilation.passes.fusion.matcher_utils import MatcherQuantFP8
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    rank = dist.get_rank()
    norms, quantize = vllm.ir.ops, MatcherQuantFP8(kFp8StaticTensorSym)

    def layers(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, scale: torch.Tensor) -> Any:
        first = tensor_model_parallel_all_reduce(x)
        normed = norms.rms_norm(first, weight, 1e-5)
        second = tensor_model_parallel_all_reduce(normed * 2)
        normed, residual = norms.fused_add_rms_norm(second, first, weight, 1e-6)
        third = tensor_model_parallel_all_reduce(normed)
        last, residual = norms.fused_add_rms_norm(third, residual, other, 1e-6)  # a weight of another dtype
        fourth = tensor_model_parallel_all_reduce(normed)
        normed, other_residual = norms.fused_add_rms_norm(fourth, residual, weight, 1e-5)
        return last, residual, quantize(normed, scale)[0], other_residual

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(7, 256, generator=generator).to(torch.bfloat16)
    weight = torch.linspace(0.5, 1.5, 256).to(torch.bfloat16)
    scale = torch.tensor([[0.02]])
    operands = x, weight, weight.float(), scale
    traced = _fused(ours, layers, operands)
    names = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    with torch.inference_mode():
        last, residual, quantized, _ = traced(*operands)
        xs = [torch.randn(7, 256, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16) for r in range(2)]
        wanted, wanted_residual, normed = _layers_in_float64(xs, weight.double())
    torch.testing.assert_close(residual.double(), wanted_residual, rtol=0.01, atol=0.03)  # a few roundings of bfloat16
    torch.testing.assert_close(last.double(), wanted, rtol=0.01, atol=0.03)
    again = _norm_in_float64(wanted_residual + 2 * normed, weight.double(), 1e-5)
    torch.testing.assert_close(quantized.double() * 0.02, again, rtol=0.07, atol=0.03)  # FP8 has three bits
    calls = dict(tp.device_communicator.sums.calls)
    tp.device_communicator.destroy()
    return ours.matched_count, calls, names


_HIDDEN = 256


def vllm_rows(folder: str) -> tuple[int, int, set[str], bool]:
    """Put a row into ten batches. Return how many different sums and norms it has, who chose, and the ranges' end.

    That is whether the graphs that vLLM compiles have one range, up to the largest batch.
    """
    tp, config, ours = _begin_passes(folder)
    import vllm.ir
    from vllm.config.vllm import VllmConfig
    from vllm.distributed import tensor_model_parallel_all_reduce

    from shotcast.integrations import vllm_fusion

    rank, communicator, norm = dist.get_rank(), tp.device_communicator.sums.communicator, vllm.ir.ops.fused_add_rms_norm

    def layers(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        normed, residual = norm(tensor_model_parallel_all_reduce(x), residual, weight, 1e-6)
        return norm(tensor_model_parallel_all_reduce(normed * (1 + rank)), residual, weight, 1e-6)

    generator = torch.Generator().manual_seed(rank)
    row, weight = torch.randn(_HIDDEN, generator=generator).to(torch.bfloat16), torch.ones(_HIDDEN).to(torch.bfloat16)
    traced = _fused(ours, layers, (row.repeat(7, 1), row.repeat(7, 1), weight))
    assert ours.matched_count == 2
    sums, norms, reasons = set(), set(), set()
    for tokens in (1, 2, 3, 7, 8, 33, 64, 255, 1000, 4096):
        batch = torch.randn(tokens, _HIDDEN, generator=generator).to(torch.bfloat16)
        for place in {0, tokens // 2, tokens - 1}:
            batch[place] = row
            with torch.inference_mode():
                sums.add(tp.all_reduce(batch)[place].view(torch.uint8).numpy().tobytes())
                found = traced(batch, batch.sign(), weight)
                norms.add(tuple(one[place].view(torch.uint8).numpy().tobytes() for one in found))
        reasons.add(communicator.explain(batch).algorithm)

    config.model_config.get_hidden_size = lambda: _HIDDEN
    config.parallel_config = types.SimpleNamespace(tensor_parallel_size=2)
    config.scheduler_config = types.SimpleNamespace(max_num_batched_tokens=8192)
    passes = config.compilation_config.pass_config
    passes.fuse_allreduce_rms, passes.fi_allreduce_fusion_max_size_mb = True, 1
    VllmConfig._set_compile_ranges(config)
    assert len(config.compilation_config.get_compile_ranges()) == 2
    vllm_fusion.install(config)
    (only,) = config.compilation_config.get_compile_ranges()
    tp.device_communicator.destroy()
    return len(sums), len(norms), reasons, (only.start, only.end) == (1, 8192)


def _norm_in_float64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _layers_in_float64(xs: list[torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the last norm, its residual, and the norm before; both ranks have the same after the first sum."""
    first = torch.stack(xs).double().sum(0)
    residual = first + 2 * 2 * _norm_in_float64(first, weight, 1e-5)
    normed = _norm_in_float64(residual, weight, 1e-6)
    residual = residual + 2 * normed
    return _norm_in_float64(residual, weight, 1e-6), residual, normed


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

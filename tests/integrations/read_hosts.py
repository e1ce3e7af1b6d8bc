"""Read the signatures that the plug-ins of vLLM and SGLang meet from their wheels into ``hosts.json``.

    pip download --no-deps --only-binary :all: -d DIR vllm==0.33.0
    PYTHONPATH=src python tests/integrations/read_hosts.py DIR/*.whl

A wheel takes the place of the host program of the same version in the file. Nothing of a wheel is imported, and nothing
but names, parameters and defaults is kept.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

from shotcast.integrations.signatures import defined

HOSTS = Path(__file__).parent / "hosts.json"

WANTED = {
    "vllm": {
        "vllm.config.compilation": [
            "CompilationConfig.compile_ranges_endpoints",
            "PassConfig.enable_sp",
            "PassConfig.flashinfer_max_size",
            "PassConfig.fuse_allreduce_rms",
            "PassConfig.fuse_gemm_comms",
        ],
        "vllm.config.parallel": [
            "ParallelConfig.enable_elastic_ep",
            "ParallelConfig.tensor_parallel_size",
            "ParallelConfig.worker_cls",
        ],
        "vllm.config.vllm": ["get_current_vllm_config_or_none"],
        "vllm.distributed.device_communicators.base_device_communicator": [
            "DeviceCommunicatorBase.__init__",
            "DeviceCommunicatorBase.all_gather",
        ],
        "vllm.distributed.device_communicators.cuda_communicator": [
            "CudaCommunicator.__init__",
            "CudaCommunicator.all_gather",
            "CudaCommunicator.all_reduce",
            "CudaCommunicator.custom_reduce_scatter",
            "CudaCommunicator.reduce_scatter",
            "CudaCommunicator.reduce_scatterv",
            "CudaCommunicator.destroy",
        ],
        "vllm.distributed.parallel_state": [
            "GroupCoordinator.__init__",
            "GroupCoordinator.all_reduce",
            "GroupCoordinator._all_reduce_out_place",
            "GroupCoordinator.destroy",
        ],
        "vllm.envs": ["VLLM_BATCH_INVARIANT", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_PLUGINS"],
        "vllm.platforms": ["cuda_platform_plugin", "resolve_current_platform_cls_qualname"],
        "vllm.platforms.cuda": [
            "CudaPlatform",
            "CudaPlatformBase.get_device_communicator_cls",
            "CudaPlatformBase.check_and_update_config",
        ],
        "vllm.v1.outputs": ["AsyncModelRunnerOutput.get_output"],
        "vllm.v1.worker.gpu_worker": [
            "Worker.compile_or_warm_up_model",
            "Worker.execute_model",
            "Worker.sample_tokens",
            "Worker.sleep",
            "Worker.wake_up",
        ],
    },
    "sglang": {
        "sglang.srt.distributed.parallel_state": [
            "GroupCoordinator.__init__",
            "GroupCoordinator.all_reduce",
            "GroupCoordinator.fused_allreduce_rmsnorm",
            "GroupCoordinator.graph_capture",
            "GroupCoordinator.destroy",
            "GroupCoordinator._can_use_flashinfer_allreduce",
            "GroupCoordinator._resolve_outplace_all_reduce_method",
        ],
        "sglang.srt.environ": ["Envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "envs"],
        "sglang.srt.layers.flashinfer_comm_fusion": [
            "flashinfer_allreduce_residual_rmsnorm",
            "resolve_fusion_group",
            "resolve_fusion_world_size",
        ],
        "sglang.srt.plugins": ["load_plugins"],
        "sglang.srt.plugins.hook_registry": ["HookRegistry.register", "HookRegistry.apply_hooks", "HookType"],
    },
}
"""Names that are kept, by distribution and module: those that the plug-ins expect, and that call them."""


def parameters(arguments: ast.arguments) -> str:
    """Return parameters as written, without annotations; a default that is no literal becomes None."""
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    arguments.defaults = [_literal(one) for one in arguments.defaults]
    arguments.kw_defaults = [one if one is None else _literal(one) for one in arguments.kw_defaults]
    return ast.unparse(arguments)


def _literal(default: ast.expr) -> ast.expr:
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.Constant(None)
    return default


def described(node: ast.AST) -> dict[str, Any]:
    if isinstance(node, ast.FunctionDef):
        found: dict[str, Any] = {"parameters": parameters(node.args)}
        decorators = [ast.unparse(one) for one in node.decorator_list]
        kept = [one for one in decorators if one in ("classmethod", "staticmethod", "contextmanager")]
        return found | ({"decorators": kept} if kept else {})
    if isinstance(node, ast.ClassDef):
        return {"bases": [ast.unparse(one) for one in node.bases], "members": {}}
    return {"variable": True}


def read(wheel: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and version of a wheel, and what is kept of it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        facts = Parser().parsestr(archive.read(metadata).decode())
        torch = [text for text in facts.get_all("Requires-Dist", []) if re.match(r"torch\b(?!-)", text)]
        modules: dict[str, Any] = {}
        for module, wanted in WANTED[facts["Name"]].items():
            path = module.replace(".", "/")
            file = f"{path}.py" if f"{path}.py" in names else f"{path}/__init__.py"
            tree, kept = ast.parse(archive.read(file)), modules.setdefault(module, {})
            for name in wanted:
                first, _, member = name.partition(".")
                node = defined(tree.body, first)
                if node is None:
                    continue
                kept.setdefault(first, described(node))
                if member and isinstance(node, ast.ClassDef) and (inner := defined(node.body, member)) is not None:
                    kept[first]["members"][member] = described(inner)
    return f"{facts['Name']} {facts['Version']}", {"torch": torch, "modules": modules}


def main() -> None:
    hosts = json.loads(HOSTS.read_text()) if HOSTS.exists() else {}
    hosts |= dict(read(Path(name)) for name in sys.argv[1:])
    HOSTS.write_text(json.dumps(hosts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

"""Packages that look like vLLM and SGLang to the plug-ins: real names and signatures, with little behind them.

The names come from ``hosts.json``, which ``read_hosts.py`` reads from wheels. The bodies are ours: what the tests need
of the host programs' behaviour, on CPU tensors.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOSTS: dict[str, Any] = json.loads((HERE / "hosts.json").read_text())
ROOT = HERE.parents[1]

VLLM_HEADERS = {
    # vLLM asks for its platform while it imports its configuration
    "vllm.config.vllm": "from vllm.platforms import current_platform\nplatform, current = current_platform, None",
    "vllm.distributed.device_communicators.base_device_communicator": "import torch, torch.distributed as dist",
    "vllm.distributed.device_communicators.cuda_communicator": """
        import torch, torch.distributed as dist
        from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
        """,
    "vllm.distributed.parallel_state": """
        import importlib
        import torch, torch.distributed as dist
        numbers = {}
        """,
    "vllm.envs": """
        import os
        VLLM_BATCH_INVARIANT = os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
        VLLM_PLUGINS = None
        """,
    "vllm.platforms": """
        import importlib
        from importlib.metadata import entry_points
        _current = None

        def __getattr__(name):
            global _current
            if name != "current_platform":
                raise AttributeError(name)
            if _current is None:
                module, _, cls = resolve_current_platform_cls_qualname().rpartition(".")
                _current = getattr(importlib.import_module(module), cls)()
            return _current
        """,
}
VLLM_BODIES = {
    "vllm.config.vllm:get_current_vllm_config_or_none": "return current",
    "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase.__init__": """
        self.cpu_group, self.device, self.device_group, self.unique_name = cpu_group, device, device_group, unique_name
        """,
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.__init__": """
        super().__init__(cpu_group, device, device_group, unique_name)
        self.host_calls = []
        """,
    "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase.all_gather": """
        self.host_calls.append("all_gather")
        parts = [torch.empty_like(input_) for _ in range(dist.get_world_size(self.cpu_group))]
        dist.all_gather(parts, input_, group=self.cpu_group)
        return torch.cat(parts, dim)
        """,
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.all_gather": """
        return super().all_gather(input_, dim)
        """,
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.all_reduce": """
        self.host_calls.append("all_reduce")
        out = input_.float()
        dist.all_reduce(out, group=self.cpu_group)
        return out.to(input_.dtype)
        """,
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.reduce_scatter": """
        self.host_calls.append("reduce_scatter")
        out = input_.clone()
        dist.all_reduce(out, group=self.cpu_group)
        return out.chunk(dist.get_world_size(self.cpu_group), dim)[dist.get_rank(self.cpu_group)]
        """,
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.destroy": """
        self.host_calls.append("destroy")
        """,
    # as vLLM makes it: the class by its path, and arguments by their names
    "vllm.distributed.parallel_state:GroupCoordinator.__init__": """
        from vllm.platforms import current_platform

        numbers[group_name] = numbers.get(group_name, -1) + 1
        self.unique_name = f"{group_name}:{numbers[group_name]}"
        for ranks in group_ranks:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self.cpu_group = self.device_group = group
        path = current_platform.get_device_communicator_cls()
        module, _, cls = path.rpartition(".")
        more = {"use_all2all": False} if "use_all2all" in locals() else {}
        self.device_communicator = getattr(importlib.import_module(module), cls)(
            cpu_group=self.cpu_group,
            device=torch.device("cpu"),
            device_group=self.device_group,
            unique_name=self.unique_name,
            **more,
        )
        """,
    "vllm.distributed.parallel_state:GroupCoordinator.all_reduce": "return self._all_reduce_out_place(input_)",
    "vllm.distributed.parallel_state:GroupCoordinator._all_reduce_out_place": """
        return self.device_communicator.all_reduce(input_)
        """,
    "vllm.distributed.parallel_state:GroupCoordinator.destroy": """
        self.device_communicator.destroy()
        dist.destroy_process_group(self.cpu_group)
        """,
    "vllm.platforms:cuda_platform_plugin": 'return "vllm.platforms.cuda.CudaPlatform"',
    # as vLLM searches: what a plug-in raises is passed over, and the one that answers is asked again
    "vllm.platforms:resolve_current_platform_cls_qualname": """
        plugins = {one.name: one.load() for one in entry_points(group="vllm.platform_plugins")}
        active = []
        for name, plugin in plugins.items():
            try:
                if plugin() is not None:
                    active.append(name)
            except Exception:
                pass
        return plugins[active[0]]() if active else cuda_platform_plugin()
        """,
    "vllm.platforms.cuda:CudaPlatformBase.get_device_communicator_cls": """
        return "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
        """,
    "vllm.platforms.cuda:CudaPlatformBase.check_and_update_config": "vllm_config.checked = True",
}
VLLM_FOOTERS = {"vllm.platforms.cuda": "CudaPlatform = CudaPlatformBase"}

SGLANG_HEADERS = {
    "sglang.srt.distributed.parallel_state": """
        import torch, torch.distributed as dist
        from contextlib import contextmanager, nullcontext
        numbers = {}

        class HostAllReduce:
            disabled = False

            def __init__(self, group):
                self.group, self.calls = group, []

            def should_custom_ar(self, inp):
                return inp.numel() > 2

            def custom_all_reduce(self, input):
                self.calls.append("all_reduce")
                out = input.float()
                dist.all_reduce(out, group=self.group)
                return out.to(input.dtype)

            @contextmanager
            def capture(self):
                self.calls.append("capture")
                yield
        """,
    "sglang.srt.environ": """
        import os

        class EnvBool:
            def __init__(self, default):
                self.default = default

            def __set_name__(self, owner, name):
                self.name = name

            def get(self):
                return os.environ.get(self.name, "0") == "1"
        """,
    "sglang.srt.layers.flashinfer_comm_fusion": "groups = {}\ncalls = []",
    "sglang.srt.plugins": "from importlib.metadata import entry_points",
    "sglang.srt.plugins.hook_registry": """
        import functools, pkgutil
        from enum import Enum
        hooks = []

        def wrapped(original, hook, kind):
            @functools.wraps(original)
            def call(*args, **kwargs):
                if kind is HookType.AROUND:
                    return hook(original, *args, **kwargs)
                if kind is HookType.BEFORE:
                    changed = hook(*args, **kwargs)
                    args, kwargs = (args, kwargs) if changed is None else changed
                    return original(*args, **kwargs)
                result = original(*args, **kwargs)
                changed = hook(result, *args, **kwargs)
                return result if changed is None else changed
            return call
        """,
}
SGLANG_BODIES = {
    "sglang.srt.distributed.parallel_state:GroupCoordinator.__init__": """
        group_name = group_name or "anonymous"
        numbers[group_name] = numbers.get(group_name, -1) + 1
        self.unique_name = f"{group_name}:{numbers[group_name]}"
        self.device = torch.device("cpu")
        self.ca_comm, self._fi_workspace_hint = None, "attn_tp"
        for ranks in group_ranks:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                self.cpu_group, self.world_size, self.rank_in_group = group, len(ranks), ranks.index(dist.get_rank())
        if use_custom_allreduce:
            self.ca_comm = HostAllReduce(self.cpu_group)
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator.all_reduce": """
        if self._can_use_flashinfer_allreduce(input_):
            raise AssertionError("FlashInfer was asked")
        if self._resolve_outplace_all_reduce_method(input_) == "ca":
            return self.ca_comm.custom_all_reduce(input_)
        dist.all_reduce(input_, group=self.cpu_group)
        return input_
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator._resolve_outplace_all_reduce_method": """
        if self.ca_comm is not None and not self.ca_comm.disabled and self.ca_comm.should_custom_ar(input_):
            return "ca"
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator._can_use_flashinfer_allreduce": """
        return self._fi_workspace_hint is not None
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator.fused_allreduce_rmsnorm": """
        return self.ca_comm.fused_allreduce_rmsnorm(input_, residual_inp_, weight_, eps)
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator.graph_capture": """
        with nullcontext() if self.ca_comm is None else self.ca_comm.capture():
            yield
        """,
    "sglang.srt.distributed.parallel_state:GroupCoordinator.destroy": """
        dist.destroy_process_group(self.cpu_group)
        """,
    "sglang.srt.layers.flashinfer_comm_fusion:flashinfer_allreduce_residual_rmsnorm": """
        calls.append("fused")
        return None, None
        """,
    "sglang.srt.layers.flashinfer_comm_fusion:resolve_fusion_group": """
        group = groups["attn_tp" if use_attn_tp_group else "moe"]
        return group.world_size, group.rank_in_group, group
        """,
    "sglang.srt.layers.flashinfer_comm_fusion:resolve_fusion_world_size": """
        return groups["attn_tp" if use_attn_tp_group else "moe"].world_size
        """,
    "sglang.srt.plugins:load_plugins": """
        from sglang.srt.plugins.hook_registry import HookRegistry
        for plugin in {one.name: one.load() for one in entry_points(group="sglang.srt.plugins")}.values():
            plugin()
        HookRegistry.apply_hooks()
        """,
    "sglang.srt.plugins.hook_registry:HookRegistry.register": "hooks.append((target, hook, hook_type))",
    "sglang.srt.plugins.hook_registry:HookRegistry.apply_hooks": """
        for target, hook, kind in hooks:
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, wrapped(getattr(owner, name), hook, kind))
        """,
    "sglang.srt.plugins.hook_registry:HookType": "BEFORE, AFTER, AROUND, REPLACE = range(4)",
    "sglang.srt.environ:Envs": "SGLANG_ENABLE_DETERMINISTIC_INFERENCE = EnvBool(False)",
}
SGLANG_FOOTERS = {"sglang.srt.environ": "envs = Envs()"}

TEXTS = {
    "vllm": (VLLM_HEADERS, VLLM_BODIES, VLLM_FOOTERS),
    "sglang": (SGLANG_HEADERS, SGLANG_BODIES, SGLANG_FOOTERS),
}


def write_host(
    folder: Path,
    host: str,
    version: str = "",
    described: dict[str, Any] | None = None,
    footers_of: Mapping[str, str] | None = None,
) -> None:
    """Write the package of a host program and its metadata into a folder, with the entry points of this project.

    Args:
        host: a key of ``hosts.json``, such as ``vllm 0.33.0``.
        version: another version for the metadata.
        described: what the modules define, in place of what the file says.
        footers_of: lines at the end of modules.
    """
    package, real_version = host.split()
    headers, bodies, footers = TEXTS[package]
    for module, names in (described or HOSTS[host]["modules"]).items():
        lines = [textwrap.dedent(headers.get(module, "")).strip()]
        for name, one in names.items():
            lines += _lines(module, name, one, bodies)
        lines += [footers.get(module, ""), (footers_of or {}).get(module, "")]
        file = folder.joinpath(*module.split(".")) / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
        for parent in file.parent.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
    (folder / "__init__.py").unlink()
    _metadata(folder, package, version or real_version, "")
    write_entry_points(folder)


def write_entry_points(folder: Path) -> None:
    """Write metadata with the entry points of this project, which the installed one may have from before."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in points.items()
        if group in ("vllm.platform_plugins", "sglang.srt.plugins")
    )
    _metadata(folder, "shotcast_entry_points", "0", text)


def _metadata(folder: Path, name: str, version: str, entry_points: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _lines(module: str, name: str, one: dict[str, Any], bodies: dict[str, str]) -> list[str]:
    """Return the source of a function, a class or a variable."""
    if "parameters" in one:
        body = textwrap.dedent(bodies.get(f"{module}:{name}", "raise NotImplementedError")).strip()
        last = name.rpartition(".")[2]
        decorators = [f"@{decorator}" for decorator in one.get("decorators", ())]
        return [*decorators, f"def {last}({one['parameters']}):", textwrap.indent(body, "    "), ""]
    if "members" in one:
        lines = [textwrap.indent(textwrap.dedent(bodies.get(f"{module}:{name}", "pass")).strip(), "    ")]
        for member, inner in one["members"].items():
            if "parameters" in inner or f"{module}:{name}" not in bodies:
                lines += [textwrap.indent(line, "    ") for line in _lines(module, f"{name}.{member}", inner, bodies)]
        unknown = [f"class {base}: pass" for base in one["bases"] if base not in ("Enum", "DeviceCommunicatorBase")]
        return [*unknown, f"class {name}({', '.join(one['bases'])}):", *lines, ""]
    return [f"{name.rpartition('.')[2]} = None"] if not _in_header(module, name) else []


def _in_header(module: str, name: str) -> bool:
    headers, _, footers = TEXTS[module.split(".")[0]]
    return f"{name} = " in headers.get(module, "") + footers.get(module, "")

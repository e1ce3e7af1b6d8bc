"""The state of each integration in this environment: active, or why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shotcast.integrations import ray, sglang, vllm
from shotcast.process_group.names import BACKEND


@dataclass(frozen=True, slots=True)
class Integration:
    """The state of one integration in this environment."""

    name: str  # of the program
    use: str  # how its users get shotcast
    unsupported_reason: str  # why they would not; empty where the integration is active

    @property
    def active(self) -> bool:
        return not self.unsupported_reason

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "active": self.active}


def integrations() -> tuple[Integration, ...]:
    """List every integration with its state, without importing the host programs."""
    sums = "tensor-parallel sums on CUDA"
    return (
        Integration(
            "torch.distributed",
            f'init_process_group("{BACKEND}"): DDP, FSDP2, DTensor, Transformers, accelerate',
            _state("torch.backends", _torch_unsupported_reason),
        ),
        Integration("Ray", f'{ray.__name__}.register(), then backend="{ray.BACKEND}"', ray.unsupported_reason()),
        Integration("vLLM", sums, _state("vllm.platform_plugins", vllm.unsupported_reason, "vLLM")),
        Integration("SGLang", sums, _state("sglang.srt.plugins", sglang.unsupported_reason, "SGLang")),
    )


def _state(group: str, unsupported_reason: Callable[[], str], program: str = "") -> str:
    """Return why an integration is inactive: its entry point in ``group``, its program, or the reason it gives."""
    if BACKEND not in {point.name for point in importlib.metadata.entry_points(group=group)}:
        return f"this installation has no entry point in {group}: install shotcast again"
    if program and importlib.util.find_spec(program.lower()) is None:
        return f"{program} is not installed"
    return unsupported_reason()


def _torch_unsupported_reason() -> str:
    """Return why PyTorch does not know the backend; PyTorch is queried only if it has been imported."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1, so PyTorch loads no backends"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return ""
    if not dist.is_available():
        return "this PyTorch is built without torch.distributed"
    known = BACKEND in dist.Backend.backend_list
    return "" if known else "PyTorch was imported without loading it, which a warning of then explains"

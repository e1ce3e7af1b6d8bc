"""The SGLang plug-in: the entry point ``shotcast`` of ``sglang.srt.plugins``."""

from __future__ import annotations

import logging
import os

from shotcast import env
from shotcast.errors import ConfigError
from shotcast.integrations.signatures import Expected, refusal

logger = logging.getLogger(__name__)

AT_LEAST, BELOW = (0, 5, 23), (0, 5, 24)
"""The supported versions. 0.5.23 was read."""

GROUPS = "sglang.srt.distributed.parallel_state"
FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
EXPECTED = (
    Expected("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("cls", "target", "hook", "hook_type")),
    Expected("sglang.srt.plugins.hook_registry", "HookType"),
    Expected(GROUPS, "GroupCoordinator.__init__", ("self", "group_ranks", "local_rank", "torch_distributed_backend")),
    Expected(GROUPS, "GroupCoordinator.destroy", ("self",), whole=True),
    Expected(GROUPS, "GroupCoordinator.all_reduce", ("self", "input_"), whole=True),
    Expected(GROUPS, "GroupCoordinator._resolve_outplace_all_reduce_method", ("self", "input_")),
    Expected(GROUPS, "GroupCoordinator._can_use_flashinfer_allreduce", ("self", "input_"), whole=True),
    Expected(
        GROUPS,
        "GroupCoordinator.fused_allreduce_rmsnorm",
        ("self", "input_", "residual_inp_", "weight_", "eps"),
        whole=True,
    ),
    Expected(FUSION, "flashinfer_allreduce_residual_rmsnorm", ("input_tensor", "residual", "weight", "eps")),
    Expected(FUSION, "resolve_fusion_group"),
    Expected(FUSION, "resolve_fusion_world_size"),
    Expected("sglang.srt.environ", "Envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE"),
    Expected("sglang.srt.environ", "envs"),
)


def unsupported_reason() -> str:
    """Return why the plug-in is not active in this environment; empty if it is. Does not import SGLang."""
    try:
        if not env.sglang():
            return "SHOTCAST_SGLANG is not 1"
    except ConfigError as error:
        return str(error)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and "shotcast" not in (name.strip() for name in allowed.split(",")):
        return f"SGLANG_PLUGINS={allowed} leaves it out"
    return refusal("sglang", "SGLang", AT_LEAST, BELOW, EXPECTED)


def register() -> None:
    """Hook into SGLang's groups, or leave SGLang unchanged. SGLang calls this once in every process."""
    try:
        if not env.sglang():
            return
        if not (why := unsupported_reason()):
            _hook()
    except Exception as error:
        why = str(error)
    if why:
        logger.warning("the plug-in of shotcast is off, and SGLang as without it: %s", why)


def _hook() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from shotcast.integrations import sglang_hooks

    group = f"{GROUPS}.GroupCoordinator"
    HookRegistry.register(f"{group}.__init__", sglang_hooks.after_construction, HookType.AFTER)
    HookRegistry.register(f"{group}.destroy", sglang_hooks.before_destruction, HookType.BEFORE)
    HookRegistry.register(f"{group}._can_use_flashinfer_allreduce", sglang_hooks.around_flashinfer, HookType.AROUND)
    HookRegistry.register(
        f"{FUSION}.flashinfer_allreduce_residual_rmsnorm", sglang_hooks.around_fused_norm, HookType.AROUND
    )

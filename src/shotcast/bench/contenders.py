"""Who is measured, by name: own algorithms, and what they are compared with. Names and facts alone, no torch.

CPU: Gloo. CUDA: NCCL as it chooses (``nccl``), NCCL held to its ring or tree (``nccl_ring``, ``nccl_tree``) or to one
of its protocols (``nccl_ll``, ``nccl_ll128``, ``nccl_simple``), and the kernels that PyTorch builds on symmetric memory
(``torch_one_shot``, ``torch_two_shot``). On request only, ``nccl_symmetric``: NCCL on tensors in memory that was
registered with it. The best NCCL is the fastest of all that were measured.

A fused operation (``all_reduce_rms_norm``) also has ``unfused`` (own all-reduce, then a kernel for residual and norm),
``plain`` (own all-reduce alone: what the fusion adds is above that; ``plain_one_shot`` and ``plain_two_shot`` name its
algorithm), ``fp8_static`` and ``fp8_dynamic`` (the fused forms that quantize), and NCCL or Gloo followed by the same
kernel for residual and norm.
"""

from __future__ import annotations

from shotcast import wire

PLAIN_OPS = ("all_reduce", "reduce_scatter", "all_gather")
FUSED_OPS = ("all_reduce_rms_norm",)
OPS = PLAIN_OPS + FUSED_OPS

OWN = (*(name for name in wire.ALGORITHMS if name != "vendor"), "auto")
"""Own algorithms, and what the Communicator chooses by itself."""
PLAIN = {"plain": "auto", "plain_one_shot": "one_shot", "plain_two_shot": "two_shot"}
"""The own all-reduce without what is fused to it, with its algorithm."""
FP8 = {"fp8_static": "static", "fp8_dynamic": "dynamic"}
FUSED_ALGORITHMS = ("one_shot", "two_shot", "auto")
FUSED = ("unfused", *PLAIN, *FP8)
"""Contenders of fused operations beside the algorithms; all by the Communicator."""

NCCL_SETTINGS: dict[str, dict[str, str]] = {
    "nccl_ring": {"NCCL_ALGO": "Ring"},
    "nccl_tree": {"NCCL_ALGO": "Tree"},
    "nccl_ll": {"NCCL_PROTO": "LL"},
    "nccl_ll128": {"NCCL_PROTO": "LL128"},
    "nccl_simple": {"NCCL_PROTO": "Simple"},
}
"""NCCL reads these variables when a communicator starts, so each has ranks of its own."""
NCCL_SYMMETRIC = "nccl_symmetric"

_LABELS = {
    "one_shot": "one-shot",
    "two_shot": "two-shot",
    "two_shot_fp8": "two-shot FP8",
    "nccl": "NCCL (default)",
    "nccl_ring": "NCCL ring",
    "nccl_tree": "NCCL tree",
    "nccl_ll": "NCCL LL",
    "nccl_ll128": "NCCL LL128",
    "nccl_simple": "NCCL Simple",
    "nccl_symmetric": "NCCL symmetric",
    "torch_one_shot": "torch one-shot",
    "torch_two_shot": "torch two-shot",
    "gloo": "Gloo",
    "plain_one_shot": "plain one-shot",
    "plain_two_shot": "plain two-shot",
    "fp8_static": "FP8 static",
    "fp8_dynamic": "FP8 dynamic",
}


def baselines(op: str, device: str) -> tuple[str, ...]:
    """What an operation is compared with unless asked otherwise."""
    if device == "cpu":
        return ("gloo",)
    if op in FUSED_OPS:
        return ("nccl",)
    protocols = tuple(name for name, setting in NCCL_SETTINGS.items() if "NCCL_PROTO" in setting)
    if op == "all_reduce":
        return ("nccl", "nccl_ring", "nccl_tree", *protocols, "torch_one_shot", "torch_two_shot")
    return ("nccl", "nccl_ring", *protocols)  # NCCL has no tree for these


def default(op: str, device: str) -> tuple[str, ...]:
    """All who are measured when nobody is named, in the order of the report."""
    own = (*FUSED_ALGORITHMS, *FUSED) if op in FUSED_OPS else OWN
    return (*own, *baselines(op, device))


def known(op: str, device: str) -> tuple[str, ...]:
    """All who can be named for an operation."""
    extra: tuple[str, ...] = ()
    if device == "cuda":
        settings = [name for name in NCCL_SETTINGS if name != "nccl_tree" or op not in ("reduce_scatter", "all_gather")]
        extra = (*settings, *((NCCL_SYMMETRIC,) if op == "all_reduce" else ()))
    return tuple(dict.fromkeys((*default(op, device), "vendor", *extra)))


def is_own(name: str) -> bool:
    """Made by the Communicator."""
    return name in OWN or name == "vendor" or name in FUSED


def is_nccl(name: str) -> bool:
    return name == "nccl" or name.startswith("nccl_")


def is_torch(name: str) -> bool:
    return name.startswith("torch_")


def is_library(name: str) -> bool:
    """NCCL in any of its forms, or Gloo."""
    return is_nccl(name) or name == "gloo"


def has_own_bits(name: str, world_size: int) -> bool:
    """An algorithm with the bits of the numerics contract, whatever the size; the ring has them with two ranks."""
    return name in ("one_shot", "two_shot") or (name == "ring" and world_size == 2)


def label(name: str) -> str:
    """The name as tables and pictures write it."""
    return _LABELS.get(name, name)

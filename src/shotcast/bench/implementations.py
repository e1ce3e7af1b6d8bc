"""Names of the measured implementations: native algorithms and baselines. Does not need torch.

CPU ranks have Gloo. CUDA has NCCL with its default choice (``nccl``), NCCL restricted to its ring or tree
(``nccl_ring``, ``nccl_tree``) or to one of its protocols (``nccl_ll``, ``nccl_ll128``, ``nccl_simple``), and the
kernels that PyTorch builds on symmetric memory (``torch_one_shot``, ``torch_two_shot``). "Best NCCL" is the fastest of
all measured NCCL variants.
"""

from __future__ import annotations

from shotcast.collectives import registry
from shotcast.collectives.algorithm import LIBRARY, Algorithms
from shotcast.wire import Op

_BY_MESSAGES = ("all_to_all", "gather", "scatter")
"""Operations that NCCL builds from messages, without a choice of algorithm."""

AUTO = "auto"
"""The Communicator's choice."""

NCCL_SETTINGS: dict[str, dict[str, str]] = {
    "nccl_ring": {"NCCL_ALGO": "Ring"},
    "nccl_tree": {"NCCL_ALGO": "Tree"},
    "nccl_ll": {"NCCL_PROTO": "LL"},
    "nccl_ll128": {"NCCL_PROTO": "LL128"},
    "nccl_simple": {"NCCL_PROTO": "Simple"},
}
"""Environment variables that NCCL reads when a communicator starts, so each of these names needs separate ranks."""


def algorithms() -> Algorithms:
    """Return the registered algorithms, including those from modules in SHOTCAST_ALGORITHMS."""
    registry.import_named()
    return registry.registered()


def own_algorithms(op: str, nodes: int = 1) -> tuple[str, ...]:
    """Return our algorithms for an operation on one node or between several, plus :data:`AUTO`.

    ``research/few_sms.py`` measures the SM-limited ones.
    """
    serving = [one for one in algorithms().serving(Op[op.upper()]) if not one.library and not one.keeps_to_sms]
    own = [one.name for one in serving if one.between_nodes == (nodes > 1)]
    return (*own, AUTO)


def lossy_algorithms() -> tuple[str, ...]:
    """Return the algorithms whose sums lose precision."""
    return tuple(name for name, algorithm in algorithms().items() if algorithm.lossy)


def baselines(op: str, device: str) -> tuple[str, ...]:
    """Return the baselines measured by default for an operation."""
    if device == "cpu":
        return ("gloo",)
    protocols = tuple(name for name, setting in NCCL_SETTINGS.items() if "NCCL_PROTO" in setting)
    if op == "all_reduce":
        return ("nccl", "nccl_ring", "nccl_tree", *protocols, "torch_one_shot", "torch_two_shot")
    if op in _BY_MESSAGES:
        return ("nccl",)
    return ("nccl", "nccl_ring", *protocols)  # NCCL has no tree for these


def default(op: str, device: str, nodes: int = 1) -> tuple[str, ...]:
    """Return the implementations measured by default, in report order."""
    return (*own_algorithms(op, nodes), *baselines(op, device))


def known(op: str, device: str) -> tuple[str, ...]:
    """Return all names that can be requested for an operation."""
    extra = tuple(one.name for one in algorithms().serving(Op[op.upper()]) if one.between_nodes)
    if device == "cuda":
        settings = [
            name for name in NCCL_SETTINGS if op not in _BY_MESSAGES and (name != "nccl_tree" or op == "all_reduce")
        ]
        extra = (*extra, *settings)
    return tuple(dict.fromkeys((*default(op, device), LIBRARY, *extra)))


def is_own(name: str) -> bool:
    """Return whether the Communicator runs this implementation."""
    return name in algorithms() or name == AUTO


def is_torch(name: str) -> bool:
    return name.startswith("torch_")

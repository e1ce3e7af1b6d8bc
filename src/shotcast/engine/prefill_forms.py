"""The choice between steps with prompts as a whole and in halves, one of which communicates while the other computes.

On GPUs of one node, copy engines sum the halves, which leaves the SMs to the matmuls; then sums are not fused with
norms. Halves can lose: their matmuls are smaller, each of them may read all weights, and their messages may be too
short for the algorithm of the whole. So both are measured when the engine starts, and each size of a step is decided
once, identically on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from shotcast.collectives.algorithms.copy_engines import COPY_ENGINES
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.layers.parallel import Parallel
from shotcast.models.causal_lm import CausalLM
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Decision, Way, agreed, decide

logger = logging.getLogger(__name__)

LEAST_TOKENS = {True: 512, False: 64}
"""The fewest tokens of a step that is divided, by whether memory is static: products of few rows take nearly as long as
products of twice as many, on GPUs up to a few hundred rows, where a product takes as long as reading its weights."""
WHOLE, HALVES = 1, 2
"""The number of parts that the tokens of a step are divided into."""
BY_COPIES = "copy engines"
"""The name of the mode whose halves copy engines sum, on GPUs of one node."""


def overlap_unsupported_reason(parallel: Parallel, overlap: str, static: bool) -> str:
    """Return why steps are never divided; empty if they may be."""
    if overlap == "off":
        return "overlap is off"
    if parallel.size == 1 or parallel.stages > 1:
        return "one stage of several ranks has sums to hide"
    comm = parallel.comm
    if comm.topology.network.name:
        return ""
    if static:
        return f"algorithm {parallel.algorithm} was named" if parallel.algorithm != "auto" else ""
    return "CPU ranks of one node wait for no network" if comm.device.type == "cpu" else ""


def _share_gpus(comm: Communicator) -> bool:
    """Return whether ranks of any machine share a GPU. Collective."""
    if comm.device.type != "cuda":
        return False
    return agreed(comm, [float(gpus_are_shared())])[0] > 0


class PrefillForms:
    """Decides whether to compute steps of each number of tokens in halves.

    Args:
        decisions: earlier decisions by number of tokens; later ones are added.
        static: steps have static memory.

    Attributes:
        controller: runs the halves of steps; None if no step is divided.
        decisions: as above. They are the same on all ranks.
    """

    def __init__(self, model: CausalLM, overlap: str, decisions: dict[int, Decision], static: bool = True):
        self._model, self.decisions, self._static = model, decisions, static
        self._reason = overlap_unsupported_reason(model.parallel, overlap, static) or model.overlap_unsupported_reason
        self.controller = None if self._reason else Controller(lanes_of(model.parallel.comm))

    @property
    def by_copies(self) -> bool:
        """Return whether copy engines sum the halves, which they do on GPUs of one node."""
        return self._static and not self._model.parallel.comm.topology.network.name

    def parts(self, size: int) -> int:
        """Return how many parts a step of ``size`` tokens is computed in: ``WHOLE`` or ``HALVES``."""
        decision = self.decisions.get(size)
        return WHOLE if decision is None or decision.way == SEQUENTIAL else HALVES

    def undecided(self, size: int) -> bool:
        """Return whether halves of a step of ``size`` tokens still need to be compared with the whole. Collective."""
        if size not in self.decisions and (why := self._reason or self._whole_reason(size)):
            self.decisions[size] = Decision(SEQUENTIAL, why, {}, {})
        return size not in self.decisions

    def _whole_reason(self, size: int) -> str:
        """Return why steps of a size are not divided; empty if they may be. Collective."""
        least, parallel = LEAST_TOKENS[self._static], self._model.parallel
        if size < least:
            return f"steps of fewer than {least} tokens are not divided"
        if self.by_copies and COPY_ENGINES not in parallel.comm.candidates(self._half(size), "all_reduce"):
            return "copy engines do not serve the sums of its halves"
        if _share_gpus(parallel.comm):
            return "ranks take turns on a GPU, so nothing runs at once"
        return ""

    def _half(self, size: int) -> torch.Tensor:
        """Return a tensor like what half a step of a size adds up."""
        model = self._model
        return torch.empty(size // 2, model.config.hidden, dtype=model.dtype, device=model.parallel.comm.device)

    def decide(self, size: int, run_of: Callable[[int], Callable[[], Any]]) -> None:
        """Decide on a size by measuring. Collective.

        Args:
            run_of: returns a function that computes a step of this size in so many parts.
        """
        ways = [Way(SEQUENTIAL, run_of(WHOLE)), Way(BY_COPIES if self.by_copies else PLAIN, run_of(HALVES))]
        self.decisions[size] = decide(self._model.parallel.comm, ways)
        logger.info("steps of %d tokens: %s", size, self.decisions[size])

    def close(self) -> None:
        if self.controller is not None:
            self.controller.lanes.close()

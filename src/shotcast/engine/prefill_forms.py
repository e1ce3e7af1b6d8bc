"""Ways to compute steps with prompts, and the choice between them.

A step is computed as a whole, or in halves, one of which communicates while the other computes. On GPUs the sum of a
half may use copy engines or a limited number of SMs; then it is not fused with the norm. Halves can lose: their
products are smaller, each of them may read all weights, and their messages may be too short for the algorithm of the
whole. So the forms are measured for each step size when the engine starts. Each size is decided once, identically on
all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from shotcast.collectives.algorithms.copy_engines import COPY_ENGINES
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.layers.parallel import Parallel
from shotcast.layers.shaping import UNSHAPED, Shaping
from shotcast.models.causal_lm import CausalLM
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of
from shotcast.overlap.policy import PLAIN, SEQUENTIAL, Decision, Way, agreed, decide, measure

logger = logging.getLogger(__name__)

LEAST_TOKENS = {True: 512, False: 64}
"""The fewest tokens of a step that is divided, by whether memory is static: products of few rows take nearly as long as
products of twice as many, on GPUs up to a few hundred rows, where a product takes as long as reading its weights."""
_SMS_BESIDE_OWN = 12
"""The SMs of sums that run during our matmuls, where a program of a sum begins when any tile ends. 12 fill the wires if
the sums are in mapped memory (docs/design/overlap.md)."""


@dataclass(frozen=True, slots=True)
class PrefillForm:
    """A way to compute a step."""

    name: str
    parts: int  # the number of parts that the tokens are divided into
    shaping: Shaping = UNSHAPED  # the part of a GPU that all-reduces and matmuls of the parts take


WHOLE, HALVES = PrefillForm(SEQUENTIAL, 1), PrefillForm(PLAIN, 2)
BY_COPIES = PrefillForm("copy engines", 2, Shaping(0))
BESIDE_OWN = PrefillForm(f"{_SMS_BESIDE_OWN} SMs beside own products", 2, Shaping(_SMS_BESIDE_OWN, True))
FORMS = {form.name: form for form in (WHOLE, HALVES, BY_COPIES, BESIDE_OWN)}


def overlap_unsupported_reason(parallel: Parallel, overlap: str, static: bool) -> str:
    """Return why steps are never divided; empty if they may be."""
    if overlap == "off":
        return "overlap is off"
    if parallel.size == 1 or parallel.stages > 1:
        return "one stage of several ranks has sums to hide"
    comm = parallel.comm
    if not static and overlap == "auto" and comm.device.type == "cpu" and not comm.topology.network.name:
        return "CPU ranks of one node wait for no network"
    return ""


def _share_gpus(comm: Communicator) -> bool:
    """Return whether ranks of any machine share a GPU. Collective."""
    if comm.device.type != "cuda":
        return False
    return agreed(comm, [float(gpus_are_shared())])[0] > 0


class PrefillForms:
    """Decides how to compute steps of each number of tokens.

    Args:
        decisions: earlier decisions by number of tokens; later ones are added.
        static: steps have static memory; without it, halves are tried only without SM limits.

    Attributes:
        controller: runs the parts of steps; None if no step is divided.
        overlap, decisions: as above. They are the same on all ranks.
    """

    def __init__(self, model: CausalLM, overlap: str, decisions: dict[int, Decision], static: bool = True):
        self._model, self.overlap, self.decisions, self._static = model, overlap, decisions, static
        self._reason = overlap_unsupported_reason(model.parallel, overlap, static) or model.overlap_unsupported_reason
        self.controller = None if self._reason else Controller(lanes_of(model.parallel.comm))

    def form(self, size: int) -> PrefillForm:
        decision = self.decisions.get(size)
        return WHOLE if decision is None else FORMS[decision.way]

    def undecided(self, size: int) -> bool:
        """Return whether the forms of a step of ``size`` tokens still need to be compared. Collective."""
        if size in self.decisions:
            return False
        why = self._reason
        least = LEAST_TOKENS[self._static]
        if not why and size < least:
            why = f"steps of fewer than {least} tokens are not divided"
        if not why and self.overlap == "auto" and _share_gpus(self._model.parallel.comm):
            why = "ranks take turns on a GPU, so nothing runs at once"
        if why:
            self.decisions[size] = Decision(SEQUENTIAL, why, {}, {}, {})
        elif self.overlap == PLAIN:
            self.decisions[size] = Decision(PLAIN, "overlap is plain", {}, {}, {})
        return size not in self.decisions

    def decide(self, size: int, run_of: Callable[[PrefillForm], Callable[[], Any]]) -> None:
        """Decide on a size by measuring. Collective.

        Args:
            run_of: returns a function that computes a step of this size in a form; called once for each form.
        """
        forms, left_out = self._forms(size)
        if self.overlap == "shaped":
            forms = [form for form in forms if form.shaping != UNSHAPED]
        comm = self._model.parallel.comm
        ways = [Way(form.name, run_of(form)) for form in forms]
        if self.overlap == "auto":
            found = decide(comm, [Way(SEQUENTIAL, run_of(WHOLE)), *ways])
        elif ways:
            times = measure(comm, ways) if len(ways) > 1 else {}
            best = min(times, key=lambda name: times[name], default=ways[0].name)
            found = Decision(best, f"overlap is {self.overlap}", times, {}, {})
        else:
            found = Decision(SEQUENTIAL, "no form takes few SMs or none for its sums", {}, {}, {})
        why = found.why + self._other_algorithm(size)
        self.decisions[size] = replace(found, why=why, left_out={**found.left_out, **left_out})
        logger.info("steps of %d tokens: %s", size, self.decisions[size])

    def close(self) -> None:
        if self.controller is not None:
            self.controller.lanes.close()

    def _forms(self, size: int) -> tuple[list[PrefillForm], dict[str, str]]:
        """Return the forms that compute a step in halves, and why others are excluded."""
        parallel, forms, shaped = self._model.parallel, [HALVES], [BY_COPIES]
        left_out: dict[str, str] = {}
        if not self._static:
            return forms, left_out
        if parallel.comm.device.type == "cuda":
            if self._model.dtype == torch.float32 or self._model.blocks[0].qkv.takes_float8(size):
                left_out[BESIDE_OWN.name] = "own products take 16 bits"
            else:
                shaped.append(BESIDE_OWN)
        half = self._message(size // 2)
        for form in shaped:
            name = "few_sms" if form.shaping.sms else COPY_ENGINES
            if parallel.algorithm != "auto":
                left_out[form.name] = f"algorithm {parallel.algorithm} was named"
            elif name not in parallel.comm.candidates(half, "all_reduce", form.shaping.sms or None):
                left_out[form.name] = f"{name} does not serve its sums"
            else:
                forms.append(form)
        return forms, left_out

    def _message(self, tokens: int) -> torch.Tensor:
        model = self._model
        return torch.empty(tokens, model.config.hidden, dtype=model.dtype, device=model.parallel.comm.device)

    def _other_algorithm(self, size: int) -> str:
        """Log if the sums of a half use another algorithm than the sums of the whole."""
        parallel = self._model.parallel
        if parallel.algorithm != "auto":
            return ""
        whole, half = (
            parallel.comm.explain(self._message(tokens), "all_reduce_rms_norm").algorithm
            for tokens in (size, size - size // 2)
        )
        return "" if whole == half else f"; the sum of a half takes {half}, that of the whole {whole}"

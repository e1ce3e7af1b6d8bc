"""The reductions of the machine lose nothing: with and without them, models get the same verdicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from . import test_abort as abort
from . import test_epoch_advance as epoch_advance
from . import test_flag_cells as flag_cells
from . import test_host_staging as host_staging
from . import test_multimem as multimem
from . import test_pipeline as pipeline
from . import test_send_recv as send_recv
from . import test_sentinel as sentinel
from .explore import explore
from .machine import Machine
from .words import Call, HeaderRules

ONE = Call("one_shot", (1,))
GATHER = Call("all_gather", (1,))
BROADCAST = Call("broadcast", (1,))
STREAM = [(0, 1, 2), (0, 1, 1), (0, 1, 1)]
NO_HEADERS = HeaderRules(exchanged=False)

MODELS: dict[str, Callable[[bool], Machine]] = {
    "one-shot": lambda r: sentinel.model(2, [ONE] * 2, reduced=r),
    "one-shot without headers": lambda r: sentinel.model(2, [ONE] * 4, sentinel.NO_HEADERS, reduced=r),
    "one-shot, two generations": lambda r: sentinel.model(
        2, [ONE] * 3, sentinel.Rules(generations=2, clears=1, headers=NO_HEADERS), reduced=r
    ),
    "one-shot, clears too early": lambda r: sentinel.model(
        2, [ONE] * 4, sentinel.Rules(clears=1, headers=NO_HEADERS), reduced=r
    ),
    "one-shot, clears what it read": lambda r: sentinel.model(
        2, [ONE] * 4, sentinel.Rules(generations=2, clears=None, headers=NO_HEADERS), reduced=r
    ),
    "broadcast": lambda r: sentinel.model(2, [BROADCAST] * 3, reduced=r),
    "broadcast without headers": lambda r: sentinel.model(
        2, [BROADCAST] * 5, sentinel.NO_HEADERS, check_starts=False, reduced=r
    ),
    "flag cells": lambda r: flag_cells.model(2, [GATHER] * 3, flag_cells.Rules(headers=NO_HEADERS), reduced=r),
    "flag cells, one generation": lambda r: flag_cells.model(
        2, [GATHER] * 2, flag_cells.Rules(generations=1, headers=NO_HEADERS), reduced=r
    ),
    "send_recv pushed": lambda r: send_recv.gpu_model(2, STREAM, reduced=r),
    "send_recv pushed without credits": lambda r: send_recv.gpu_model(
        2, STREAM, send_recv.Rules(credits=False), reduced=r
    ),
    "send_recv pulled": lambda r: send_recv.cpu_model(2, STREAM, reduced=r),
    "send_recv pulled, acknowledged early": lambda r: send_recv.cpu_model(
        2, STREAM, send_recv.Rules(copied_first=False), reduced=r
    ),
    "multimem": lambda r: multimem.model(2, [Call("multimem", (1, 1))], reduced=r),
    "multimem, flag first": lambda r: multimem.model(
        2, [Call("multimem", (1, 1))] * 2, multimem.Rules(fenced=False, headers=NO_HEADERS), reduced=r
    ),
    "host two-shot": lambda r: host_staging.model(2, ["two_shot"] * 2, reduced=r),
    "host ring": lambda r: host_staging.model(2, ["ring"] * 2, reduced=r),
    "host one-shot, one header": lambda r: host_staging.model(
        2, ["one_shot"] * 2, host_staging.Rules(header_cells=1), reduced=r
    ),
    "epoch advance": lambda r: epoch_advance.model(2, 3, reduced=r),
    "epoch advanced early": lambda r: epoch_advance.model(2, 2, epoch_advance.Rules(all_counted=False), reduced=r),
    "rank absent": lambda r: abort.model(abort.Scenario(2, "absent", before=0, stopped=0, after=0), reduced=r),
    "rank absent, no deadline": lambda r: abort.model(
        abort.Scenario(2, "absent", before=0), abort.Rules(deadlines=False), reduced=r
    ),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", list(MODELS))
def test_reduction_changes_no_verdict(name: str) -> None:
    reduced, plain = explore(MODELS[name](True)), explore(MODELS[name](False))
    kind = reduced.violation and reduced.violation.kind
    assert kind == (plain.violation and plain.violation.kind)
    assert reduced.states <= plain.states


def test_both_verdicts_are_compared() -> None:
    held = [explore(model(True)).violation is None for model in MODELS.values()]
    assert len(held) * 0.3 < sum(held) < len(held) * 0.7


@pytest.mark.full
def test_pipeline_is_compared_too() -> None:
    """One chunk less than the reuse of a generation needs: more takes too long without reduction."""
    for rules in (pipeline.Rules(), pipeline.Rules(fence=False)):
        for reduced in (True, False):
            assert explore(pipeline.model(2, rules, chunks=1, reduced=reduced)).violation is None

"""Functions that ranks of research/tests/test_overlap_forms.py run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import overlap_progress
from overlap_bench import library
from overlap_bench.config import OverlapConfig
from overlap_bench.form import Candidate, Candidates, Form
from overlap_bench.result import Measured
from overlap_bench.steps import Steps
from overlap_forms import measure_on_rank as _measure_on_rank  # which a test replaces


def with_bad_peers(config: OverlapConfig, sets: Sequence[str], left_out: dict[str, str], file: Path) -> Measured:
    """Measure with forms that raise, are wrong, end the process, and never end."""
    overlap_progress.LIMIT_S = 8.0
    forms = library.forms

    def more(steps: Steps, groups: library.Groups) -> Candidates:
        def raises() -> Form:
            raise RuntimeError("not on this machine\nsecond line")

        def form(run: Callable[[], None]) -> Callable[[], Form]:
            return lambda: Form(run, steps)

        yield Candidate("raises", raises)
        yield Candidate("wrong", form(lambda: None))
        yield Candidate("raises on one rank", raises if steps.comm.rank else form(lambda: None))
        yield Candidate("dies", form(lambda: os._exit(3)))
        yield Candidate("hangs", form(lambda: time.sleep(600)))
        yield from forms(steps, groups)

    library.forms = more
    return _measure_on_rank(config, sets, left_out, file)

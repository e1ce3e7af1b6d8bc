"""Functions that ranks run for the tests of documents and examples."""

from __future__ import annotations

import contextlib
import io
import runpy


def run_as_rank(path: str) -> str:
    """Run a script as torchrun would in this rank, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()

"""Functions that ranks run for the tests of code in documents."""

from __future__ import annotations

import contextlib
import io

import torch

import shotcast


def run_with_comm(pieces: list[tuple[str, str]]) -> str:
    """Run pieces of code one after another, each by its place, and return what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), shotcast.Communicator(device="cpu") as comm:
        names = {"comm": comm, "shotcast": shotcast, "torch": torch}
        for where, code in pieces:
            exec(compile(code, where, "exec"), names)
    return printed.getvalue()

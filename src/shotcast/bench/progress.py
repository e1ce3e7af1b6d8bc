"""Progress of long measurements on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_EVERY_S = 10.0
"""Seconds between progress lines if standard error is not a terminal."""


@contextlib.contextmanager
def progress(total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show progress over ``total`` parts of the work; the function it yields ends one part and names the next.

    It shows the elapsed seconds and an estimate of the remaining ones.
    """
    if not shown:
        yield lambda text: None
    elif sys.stderr.isatty():
        with _bar(total) as advance:
            yield advance
    else:
        with _lines(total) as advance:
            yield advance


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    begun = 0
    with Progress(*columns, *left, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield advance


@contextlib.contextmanager
def _lines(total: int) -> Iterator[Callable[[str], None]]:
    began, begun = time.monotonic(), 0
    last, written = "", began

    def advance(text: str) -> None:
        nonlocal begun, last, written
        now, begun = time.monotonic(), begun + 1
        if text == last and now < written + _EVERY_S:
            return
        last, written = text, now
        done = begun - 1
        left = f", about {(now - began) / done * (total - done):.0f} s left" if done else ""
        _write(f"[{begun}/{total}] {text} ({now - began:.0f} s{left})")

    yield advance
    _write(f"{last}: done after {time.monotonic() - began:.0f} s")


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

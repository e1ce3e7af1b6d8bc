"""Generate the parts of documents that come from stored results or from the sources again::

    python research/fill.py [--check] README.md docs/benchmarks.md

Each part is between comments: the command that makes it, and its end.

    <!-- research/result_tables.py --json benchmarks/data/h200/all_reduce_bf16_x4.json --sizes 1K,8K -->
    (the table)
    <!-- end of table -->

    ![a picture](images/all_reduce_h200.png)

    <!-- research/made_by.py --json benchmarks/data/h200/all_reduce_bf16_x4.json -->
    (whether earlier kernels made what the picture shows)
    <!-- end of kernels -->

    <!-- research/algorithm_table.py -->
    (the registered algorithms)
    <!-- end of algorithms -->

    <!-- research/bench_overlap.py --markdown --json benchmarks/data/cpu/overlap_hosts.json -->
    (results of chains)
    <!-- end of chains -->

Paths are relative to the current directory. A long command may continue over several lines of the comment.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import made_by
import result_tables
from algorithm_table import algorithm_table

_COMMANDS = {
    "table": "research/result_tables.py",
    "kernels": "research/made_by.py",
    "algorithms": "research/algorithm_table.py",
    "chains": "research/bench_overlap.py --markdown",
}
"""The command that makes a part, by the name that its end says."""
_ANY = "|".join(map(re.escape, _COMMANDS.values()))
_BEGIN = re.compile(rf"<!-- (?P<command>{_ANY}) (?P<arguments>.*?)-->\n", re.DOTALL)
_END = re.compile(rf"<!-- end of ({'|'.join(_COMMANDS)}) -->")


def fill(text: str, make: Callable[[str, list[str]], str]) -> str:
    """Return the document with every part generated again by ``make(name, arguments)``.

    Raises:
        SystemExit: a part has no end.
    """
    parts, at = [], 0
    while (begin := _BEGIN.search(text, at)) is not None:
        name = next(name for name, command in _COMMANDS.items() if command == begin["command"])
        end = _END.search(text, begin.end())
        if end is None or end[1] != name or _BEGIN.search(text, begin.end(), end.start()):
            break
        generated = make(name, shlex.split(begin["arguments"])).strip()
        parts += [text[at : begin.end()], f"\n{generated}\n\n" if generated else "", end[0]]
        at = end.end()
    if begin is not None or _END.search(text, at):
        raise SystemExit(
            "each generated part is between a comment that begins with a command, and one such as "
            "'<!-- end of table -->'; one has no such end"
        )
    return "".join([*parts, text[at:]])


def printed(name: str, arguments: list[str]) -> str:
    """Return what a command prints with these arguments."""
    if name == "algorithms":
        return algorithm_table()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        if name == "chains":
            import bench_overlap

            bench_overlap.app(["--markdown", *arguments], standalone_mode=False)
        else:
            {"table": result_tables, "kernels": made_by}[name].main(arguments)
    return text.getvalue()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+", help="Markdown files")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a part is out of date")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    asked = options().parse_args(arguments)
    stale = []
    for document in asked.documents:
        text = document.read_text()
        new = fill(text, printed)
        if new != text:
            stale.append(str(document))
            if not asked.check:
                document.write_text(new)
                print(f"wrote {document}")
    if asked.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python research/fill.py {' '.join(stale)}")


if __name__ == "__main__":
    main()

"""Say which stored results other kernels made, for documents to show below a table or a picture::

    python research/made_by.py --json benchmarks/data/h200/all_reduce_bf16_x4.json [--json FILE]

Nothing is printed if the kernels of today made all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from shotcast.bench import kernels
from shotcast.collectives import fingerprints
from shotcast.errors import ConfigError
from shotcast.transport.registry import usual


def note(paths: Sequence[Path]) -> str:
    """Return a sentence that says which of these results other kernels made; empty if the kernels of today made all.

    Raises:
        ConfigError: a file is no result.
    """
    said: dict[str, list[str]] = {}
    for path in paths:
        if sentence := _note(path):
            said.setdefault(sentence, []).append(f"`{path.name}`")
    if len(said) == 1 and len(next(iter(said.values()))) == len(paths):
        sentence = next(iter(said))
        return f"*{sentence[0].upper()}{sentence[1:]}.*"
    return "*" + " ".join(f"{', '.join(files)}: {sentence}." for sentence, files in said.items()) + "*" if said else ""


def with_note(table: str, paths: Sequence[Path]) -> str:
    """Return a table of these results, followed by the note where there is one."""
    return "\n\n".join(part for part in (table.rstrip("\n"), note(paths)) if part)


def _note(path: Path) -> str:
    try:
        document = json.loads(path.read_text())
        recorded, rows, commit = document.get("kernels"), document["rows"], document.get("recorded_in")
        if recorded is None:
            return "made by kernels whose fingerprints were not recorded"
        first = rows[0] if rows else {}
        transport = usual(first.get("device", "cuda"), first.get("nodes", 1))
        other = fingerprints.changed(recorded, kernels.now(recorded, transport))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, StopIteration) as error:
        raise ConfigError(f"{path} is not a benchmark result: {error}") from error
    if not other:
        return ""
    made = f"made by the kernels of commit {commit}" if commit else "made by earlier kernels"
    if len(other) > 3 or len(other) == len(recorded):  # a long list would be another one with every edit of a kernel
        return made
    names = [name.removeprefix("kernels.triton.").removeprefix("kernels.cpu.") for name in other]
    return f"{made} ({', '.join(names)})"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, action="append", required=True, help="a result; repeat it for several")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    print(note(options().parse_args(arguments).json))


if __name__ == "__main__":
    main()

"""Write into results which commit first had their rows: documents name it once the kernels have changed.

    python research/recorded_in.py benchmarks/data/h200/*.json

Results that say so already, and those that no commit has, stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def rows_of(text: str) -> Any:
    """Return the rows of a result; None for another file."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document.get("rows") if isinstance(document, dict) else None


def first_commit(path: Path) -> str:
    """Return the commit that first had these rows, under this name or an earlier one; empty if none has."""
    rows, commit, found = rows_of(path.read_text()), "", ""
    shown = "--follow", "--diff-filter=d", "--format=commit %h", "--name-only"
    for line in git("log", *shown, "--", str(path)).split("\n"):
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif line:
            if rows_of(git("show", f"{commit}:{line}")) != rows:
                break
            found = commit
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args().results:
        text = path.read_text()
        before = re.search(r'^(\s*)"kernels": ', text, re.MULTILINE)
        if before is None or '"recorded_in"' in text or rows_of(text) is None:
            continue
        if commit := first_commit(path):
            start = before.start()
            path.write_text(f'{text[:start]}{before[1]}"recorded_in": "{commit}",\n{text[start:]}')
            print(path, commit)


if __name__ == "__main__":
    main()

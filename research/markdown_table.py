"""Tables and paragraphs in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Raises ValueError if a row has another number of cells than the header."""
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for cells in rows:
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells under a header of {len(header)}: {cells}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def folded(title: str, text: str) -> str:
    """Return a text that a reader unfolds."""
    return f"<details><summary>{title}</summary>\n\n{text}\n</details>\n"


def paragraph(text: str) -> str:
    """Return a paragraph in lines of up to 118 columns."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"

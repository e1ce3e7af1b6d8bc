"""Tables in documents that are generated from stored results: the command that makes each table, and its text.

    <!-- shotcast bench table --json benchmarks/data/h200/all_reduce_bf16_x4.json --sizes 1K,8K -->
    (the table)
    <!-- end of table -->

A long command may continue over several lines of the comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from shotcast.errors import ConfigError

_BEGIN, _END = "<!-- shotcast bench table ", "<!-- end of table -->"
_TABLE = re.compile(rf"{re.escape(_BEGIN)}(?P<arguments>.*?)-->\n(?P<table>.*?){re.escape(_END)}", re.DOTALL)


def fill(text: str, make: Callable[[list[str]], str]) -> str:
    """Return the document with every table generated again by ``make(arguments)``.

    Raises:
        ConfigError: a table has no end.
    """
    if text.count(_BEGIN) != text.count(_END) or len(_TABLE.findall(text)) != text.count(_BEGIN):
        raise ConfigError(f"each table must be between '{_BEGIN}... -->' and '{_END}'; one has no such end")

    def generate(match: re.Match[str]) -> str:
        table = make(shlex.split(match["arguments"])).strip()
        return f"{_BEGIN}{match['arguments']}-->\n\n{table}\n\n{_END}"

    return _TABLE.sub(generate, text)

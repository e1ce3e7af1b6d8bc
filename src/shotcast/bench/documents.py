"""Tables in documents that are made from kept results: which command makes each, and its text.

    <!-- shotcast bench table --json benchmarks/data/h200/all_reduce_bf16_x4.json --sizes 1K,8K -->
    (the table)
    <!-- end of table -->

Long commands go on over several lines of the comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from shotcast.errors import ConfigError

_BEGIN, _END = "<!-- shotcast bench table ", "<!-- end of table -->"
_TABLE = re.compile(rf"{re.escape(_BEGIN)}(?P<arguments>.*?)-->\n(?P<table>.*?){re.escape(_END)}", re.DOTALL)


def fill(text: str, make: Callable[[list[str]], str]) -> str:
    """The document with every table made anew by ``make(arguments)``.

    Raises:
        ConfigError: a table has no end.
    """
    if text.count(_BEGIN) != text.count(_END) or len(_TABLE.findall(text)) != text.count(_BEGIN):
        raise ConfigError(f"each table stands between '{_BEGIN}... -->' and '{_END}'; here one has no such end")

    def made(match: re.Match[str]) -> str:
        table = make(shlex.split(match["arguments"])).strip()
        return f"{_BEGIN}{match['arguments']}-->\n\n{table}\n\n{_END}"

    return _TABLE.sub(made, text)

"""Parts of documents that are generated from stored results: the command that makes each part, and its text.

    <!-- shotcast bench table --json benchmarks/data/h200/all_reduce_bf16_x4.json --sizes 1K,8K -->
    (the table)
    <!-- end of table -->

    ![a picture](images/all_reduce_h200.png)

    <!-- shotcast bench kernels --json benchmarks/data/h200/all_reduce_bf16_x4.json -->
    (whether earlier kernels made what the picture shows)
    <!-- end of kernels -->

A long command may continue over several lines of the comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from shotcast.errors import ConfigError

_BEGIN = re.compile(r"<!-- shotcast bench (?:table|kernels) ")
_END = re.compile(r"<!-- end of (?:table|kernels) -->")
_PART = re.compile(
    r"<!-- shotcast bench (?P<command>table|kernels) (?P<arguments>.*?)-->\n.*?<!-- end of (?P=command) -->", re.DOTALL
)


def fill(text: str, make: Callable[[str, list[str]], str]) -> str:
    """Return the document with every part generated again by ``make(command, arguments)``.

    Raises:
        ConfigError: a part has no end.
    """
    begun = len(_BEGIN.findall(text))
    if begun != len(_END.findall(text)) or len(_PART.findall(text)) != begun:
        raise ConfigError(
            "each generated part is between '<!-- shotcast bench table ... -->' and '<!-- end of table -->', or the "
            "same with 'kernels'; one has no such end"
        )

    def generate(match: re.Match[str]) -> str:
        command, arguments = match["command"], match["arguments"]
        generated = make(command, shlex.split(arguments)).strip()
        inside = f"\n{generated}\n\n" if generated else ""
        return f"<!-- shotcast bench {command} {arguments}-->\n{inside}<!-- end of {command} -->"

    return _PART.sub(generate, text)

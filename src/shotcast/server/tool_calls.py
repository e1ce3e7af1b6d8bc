"""Tool calls in a model's output: the formats of model families, their grammars, and a stream parser.

The format follows from the model's chat template, which tells the model how to call tools.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shotcast.engine.detokenizer import partial
from shotcast.engine.grammar import Grammar, lark_text, styled

MAX_CALLS = 16
"""The number of calls that a grammar allows in one output."""

_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\s*\[ARGS\]\s*(?=\S)")
_MAYBE_NAMED = re.compile(r"\s*[\w.-]*(?:\[[A-Z_]*\]?\w*)?\s*(?:\[[ARGS]*)?\]?\s*")
_OTHER_CALLS = "<function=", "<arg_key>"
"""Markers of non-JSON calls within ``<tool_call>``, as in Qwen3-Coder and GLM."""

_STRUCTURE = re.compile(r'["\\{}\[\]]')


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a family of models calls tools."""

    name: str  # the family
    begin: str  # the text before a call, or before a list of them; "" where a call may begin an output without it
    end: str = ""  # the text after a call
    key: str = "arguments"  # the key of a call's arguments
    separator: str = ""  # between two calls
    in_list: bool = False  # the calls form a JSON list
    arguments: str = ""  # the text between the name of a function and its arguments, where calls are no JSON objects
    tag: str = ""  # a text that may precede a call at the beginning of an output
    single: bool = False  # the template takes one call in a message, so no grammar allows more
    short_ids: bool = False  # the template wants ids of nine letters and digits

    def new_id(self) -> str:
        if not self.short_ids:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", separator="\n")
LLAMA = ToolFormat("llama", "", key="parameters", tag="<|python_tag|>", single=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", separator=", ", in_list=True, short_ids=True)
MISTRAL_ARGUMENTS = ToolFormat("mistral", "[TOOL_CALLS]", arguments="[ARGS]", short_ids=True)


def find_format(template: str) -> ToolFormat | None:
    """Return the tool call format that a chat template describes; None if it is not a known one."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGUMENTS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if any(mark in template for mark in _OTHER_CALLS) else HERMES
    return LLAMA if "ipython" in template and '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call: its name, and the schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


def calls_grammar(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    several: bool,
    special_tokens: Mapping[str, int],
    answer: Mapping[str, Any] | None = None,
) -> Grammar:
    """Return the grammar of outputs that call functions.

    Args:
        special_tokens: the tokenizer's special tokens, which are not spelled by any text.
        answer: the schema of an output without calls; None if a call is required.
    """

    def marker(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else lark_text(text)

    rules = []
    for number, function in enumerate(functions):
        arguments = f"%json {json.dumps(styled(function.parameters, function.strict))}"
        if tool_format.arguments:
            name = f"{lark_text(function.name)} {marker(tool_format.arguments)}"
            rules.append(f"call_{number}: {marker(tool_format.begin)} {name} args_{number}")
        else:
            opening = lark_text(f'{{"name": "{function.name}", "{tool_format.key}": ')
            rules.append(f'call_{number}: {opening} args_{number} "}}"')
        rules.append(f"args_{number}: {arguments}")
    call = " | ".join(f"call_{number}" for number in range(len(functions)))
    if tool_format.begin and not (tool_format.in_list or tool_format.arguments):
        rules.append(f"one: {marker(tool_format.begin)} {lark_text(chr(10))} object {lark_text(chr(10))} ")
        rules[-1] += marker(tool_format.end)
        rules.append(f"object: {call}")
    else:
        rules.append(f"one: {call}")
    separator = f"{lark_text(tool_format.separator)} " if tool_format.separator else ""
    more = f" ({separator}one){{0,{MAX_CALLS - 1}}}" if several and not tool_format.single else ""
    calls = f"one{more}"
    if tool_format.in_list:
        calls = f'{marker(tool_format.begin)} " "? "[" {calls} "]"'
    if answer is not None:
        rules += [f"calls: {calls}", f"answer: %json {json.dumps(answer)}"]
        calls = "answer | calls"
    return Grammar("\n".join([f"start: {calls}", *rules]))


# -- parsing ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ToolCall:
    """A call as far as known: an id, the function's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str = ""


class _JsonEnd:
    """Finds the end of a JSON value that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return where the object, list or string ends in ``text``, which continues the text so far; None if it does
        not.
        """
        place = 0
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = _STRUCTURE.search(text, place)
            if found is None:
                return None
            mark, place = found[0], found.end()
            if self._in_string:
                if mark == "\\":
                    self._escaped = True
                elif mark == '"':
                    self._in_string = False
            elif mark == '"':
                self._in_string = True
            elif mark != "\\":
                self._depth += 1 if mark in "{[" else -1
            if self._depth <= 0 and not self._in_string and mark in '"}]':
                return place
        return None


@dataclass(slots=True)
class ToolParser:
    """Splits the text of an output, which arrives in pieces, into content and calls.

    Text that begins like a call but is not one becomes content. The result does not depend on how the text is split
    into pieces. Spaces next to calls are dropped.
    """

    tool_format: ToolFormat
    names: frozenset[str]  # the functions that may be called, without which JSON that begins an output is content
    several: bool = True  # False drops all calls but the first
    content: str = ""  # the text outside calls so far
    # their arguments are as the model writes them, which need not be valid
    calls: list[ToolCall] = field(default_factory=list)
    _buffer: str = ""
    _state: str = "start"
    _spaces: str = ""
    _opening: str = ""
    _end: _JsonEnd = field(default_factory=_JsonEnd)
    _scanned: int = 0
    _call: ToolCall = field(default_factory=lambda: ToolCall("", ""))
    _outer: _JsonEnd | None = None

    def push(self, text: str, last: bool = False) -> None:
        """Add the next piece of the output. ``last`` marks the final piece."""
        self._buffer += text
        while getattr(self, f"_in_{self._state}")(last):
            pass
        if last:
            if self._state not in ("arguments", "tail"):
                self._add_content(self._opening + self._buffer)
            if not self.calls:
                self.content += self._spaces
            self._buffer = self._opening = self._spaces = ""

    def _add_content(self, text: str) -> None:
        """Add content, except trailing spaces, which may turn out to precede a call."""
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        if kept and self.calls and not self.content:
            kept = kept.lstrip()
        self.content += kept

    # Each of these looks at the buffer in one state, and returns whether there is more to do with what is there.

    def _in_start(self, last: bool) -> bool:
        """Initial state: only spaces so far."""
        text = self._buffer.lstrip()
        tag = self.tool_format.tag
        if self.tool_format.begin or (text and text[0] != "{" and not tag.startswith(text[: len(tag)])):
            self._state = "text"
            return True
        if text.startswith("{") or text.startswith(tag):
            opening = len(self._buffer) - len(text) + (0 if text.startswith("{") else len(tag))
            return self._begin_calls(opening)
        return False

    def _in_text(self, last: bool) -> bool:
        """Content, which may include the start of a marker."""
        marker = self.tool_format.begin or self.tool_format.tag
        place = self._buffer.find(marker)
        if place < 0:
            held = 0 if last else partial(self._buffer, marker)
            self._add_content(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        self._add_content(self._buffer[:place])
        self._buffer = self._buffer[place:]
        return self._begin_calls(len(marker))

    def _begin_calls(self, opening: int) -> bool:
        self._opening, self._buffer = self._buffer[:opening], self._buffer[opening:]
        self._state = "calls"
        return True

    def _in_calls(self, last: bool) -> bool:
        """Text between calls, after a marker."""
        text = self._buffer.lstrip(" \t\r\n" if self.tool_format.end else " \t\r\n,;]")
        for marker in filter(None, (self.tool_format.end, self.tool_format.begin, self.tool_format.tag)):
            if text.startswith(marker):
                if marker != self.tool_format.end:
                    consumed = len(self._buffer) - len(text) + len(marker)
                    self._opening = self._opening + self._buffer[:consumed] if self._opening else marker
                elif self._opening:
                    return self._no_call(self._opening + self._buffer)
                else:
                    self._state = "text"
                self._buffer = text[len(marker) :]
                return True
            if marker.startswith(text) and not last:
                return False
        if self.tool_format.in_list or self.tool_format.arguments:
            text = text.lstrip("[ \t\r\n")
        if text.startswith("{"):
            skipped = len(self._buffer) - len(text)
            self._opening, self._buffer = self._opening + self._buffer[:skipped], text
            self._state, self._end, self._scanned = "object", _JsonEnd(), 0
            return True
        if self.tool_format.name == "mistral" and (named := _NAMED.match(self._buffer)):
            self._buffer = self._buffer[named.end() :]
            self._start_call(named[1], None)
            return True
        if self.tool_format.name == "mistral" and _MAYBE_NAMED.fullmatch(self._buffer) and not last:
            return False
        if not text and not last:
            return False
        return self._no_call(self._opening + self._buffer if self._opening else text)

    def _in_object(self, last: bool) -> bool:
        """A JSON object in which name and arguments may not be adjacent."""
        if (header := _HEADER.match(self._buffer)) and (name := _loads(header[1])) is not None:
            if not self._is_call(name):
                return self._no_call(self._opening + self._buffer)
            outer = _JsonEnd()
            outer.feed(self._buffer[: header.end()])
            self._buffer = self._buffer[header.end() :]
            self._start_call(name, outer)
            return True
        end = self._end.feed(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return False
        whole = self._buffer[: self._scanned + end]
        call = _loads(whole)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not self._is_call(name):
            return self._no_call(self._opening + self._buffer)
        self._buffer = self._buffer[len(whole) :]
        self._start_call(name, None)
        arguments = call.get("arguments", call.get("parameters", {}))
        self._call.arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        self._state = "calls"
        return True

    def _is_call(self, name: object) -> bool:
        return name in self.names if not self.tool_format.begin else isinstance(name, str)

    def _start_call(self, name: str, outer: _JsonEnd | None) -> None:
        """Begin the arguments of a call within the object followed by ``outer``."""
        self._call = ToolCall(self.tool_format.new_id(), name)
        if self.several or not self.calls:
            self.calls.append(self._call)
        self._state, self._end, self._outer, self._scanned = "arguments", _JsonEnd(), outer, 0
        self._opening = self._spaces = ""

    def _in_arguments(self, last: bool) -> bool:
        """The JSON of arguments."""
        if not self._buffer:
            return False
        quoted = not self._call.arguments and self._buffer[0] == '"'
        if not self._call.arguments and self._buffer[0] not in '{["':  # such as null
            self._call.arguments = "{}"
            end: int | None = 0
        else:
            end = self._end.feed(self._buffer[self._scanned :])
            end = None if end is None else self._scanned + end
        if quoted and end is None:  # some models write the JSON of the arguments as a string
            self._scanned = len(self._buffer)
            return False
        piece = self._buffer if end is None else self._buffer[:end]
        self._call.arguments += _loads(piece) or "" if quoted else piece
        self._buffer, self._scanned = self._buffer[len(piece) :], 0
        if end is None:
            return False
        self._state = "calls" if self._outer is None else "tail"
        return True

    def _in_tail(self, last: bool) -> bool:
        """The rest of a call's object, after the arguments."""
        assert self._outer is not None
        end = self._outer.feed(self._buffer)
        if end is None:
            self._buffer = ""
            return False
        self._buffer = self._buffer[end:]
        self._state = "calls"
        return True

    def _no_call(self, text: str) -> bool:
        """Turn the beginning of an apparent call into content."""
        self._opening = self._buffer = ""
        marker = self.tool_format.begin or self.tool_format.tag
        skipped = len(marker) if text.startswith(marker) else 0
        self._add_content(text[:skipped])
        self._buffer, self._state = text[skipped:], "text"
        return bool(self._buffer)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

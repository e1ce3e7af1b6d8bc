"""The parts of a chat answer: thoughts, content and tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.engine.detokenizer import partial
from shotcast.server.tool_calls import ToolCall, ToolParser

BEGIN, END = "<think>", "</think>"
"""The markers around a model's thoughts, which start its output. Some chat templates write the first one themselves."""


@dataclass(slots=True)
class Thoughts:
    """Splits the text of an output, which arrives in pieces, into thoughts and the answer that follows.

    Spaces around thoughts are dropped. The result does not depend on how the text is split into pieces.
    """

    begun: bool  # the prompt ends with the first mark
    text: str = ""  # the thoughts so far
    _held: str = ""
    _ended: bool = False
    _answered: bool = False

    def push(self, text: str, last: bool = False) -> str:
        """Add the next piece of the output, and return what it adds to the answer. ``last`` marks the final piece."""
        self._held += text
        if not self.begun:
            start = self._held.lstrip()
            if BEGIN.startswith(start) and not last:
                return ""
            self.begun = True
            if start.startswith(BEGIN):
                self._held = start[len(BEGIN) :]
            else:
                self._ended = self._answered = True
        if not self._ended:
            place = self._held.find(END)
            self._ended = place >= 0
            kept = place if self._ended else len(self._held) - (0 if last else partial(self._held, END))
            thought = self._held[:kept].rstrip()
            self.text += thought if self.text else thought.lstrip()
            self._held = self._held[kept + len(END) :] if self._ended else self._held[len(thought) :]
            if not self._ended:
                return ""
        answer, self._held = self._held, ""
        if not self._answered:
            answer = answer.lstrip()
            self._answered = bool(answer)
        return answer


class Answer:
    """Splits one output into its parts as its text arrives.

    Args:
        thoughts: None for a model that does not think.
        tools: None if no tool may be called.
    """

    def __init__(self, thoughts: Thoughts | None, tools: ToolParser | None):
        self._thoughts, self._tools = thoughts, tools
        self._content = ""

    def push(self, text: str, last: bool = False) -> None:
        """Add the next piece of the output. ``last`` marks the final piece."""
        if self._thoughts is not None:
            text = self._thoughts.push(text, last)
        if self._tools is not None:
            self._tools.push(text, last)
        else:
            self._content += text

    @property
    def reasoning(self) -> str:
        return "" if self._thoughts is None else self._thoughts.text

    @property
    def content(self) -> str:
        return self._content if self._tools is None else self._tools.content

    @property
    def calls(self) -> list[ToolCall]:
        return [] if self._tools is None else self._tools.calls

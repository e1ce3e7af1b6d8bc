"""Outputs whose text is read as it grows, and those whose text is read at their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import EngineCoreOutput
from shotcast.engine.sampling_params import SamplingParams

END = 0


class Letters:
    """A tokenizer of letters, one a token; 0 is an end token and has none."""

    byte_tokens = frozenset[int]()

    def __init__(self) -> None:
        self.logprob_rows = 0

    def decode_continuation(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.decode(ids)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.logprob_rows += 1
        return "".join(chr(ord("a") + token) for token in ids)


def built(late: bool, tokens: list[int], stop: tuple[str, ...], ends: bool) -> tuple[Any, list[str], int]:
    """The output, its text as it grew, and how often the tokenizer had been asked before the last."""
    letters = Letters()
    builder = OutputProcessor("a", (1,), SamplingParams(stop=stop), letters, (END,), late)  # type: ignore[arg-type]
    grown, read = [], 0
    for number, token in enumerate(tokens):
        last = number == len(tokens) - 1
        read = letters.logprob_rows
        finish = None if not last else "stop" if ends else "length"
        one = EngineCoreOutput("a", (token,), None, finish, token if last and ends else None)  # type: ignore[arg-type]
        grown.append(builder.update(one, float(number)).text)
        if builder.copy().finished:
            break
    return builder.copy(), grown, read


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.booleans(), st.sampled_from([(), ("bc",)]))
def test_late_text_is_the_same_text(tokens: list[int], ends: bool, stop: tuple[str, ...]) -> None:
    (early, _, _), (late, grown, read) = (built(when, tokens, stop, ends) for when in (False, True))
    assert (early.text, early.tokens, early.finish_reason) == (late.text, late.tokens, late.finish_reason)
    if not stop:
        assert read == 0
        assert set(grown[:-1]) <= {""}


def test_a_stop_string_ends_an_output_when_it_comes() -> None:
    output, _, _ = built(True, [1, 2, 3, 4], ("c",), False)
    assert (output.text, output.finish_reason, output.stop_reason) == ("b", "stop", "c")


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_does_not_grow(late: bool) -> None:
    builder = OutputProcessor("a", (1,), SamplingParams(logprobs=0), None, (END,), late)
    builder.update(EngineCoreOutput("a", (3,), ()), 0.0)
    before = builder.copy()
    builder.update(EngineCoreOutput("a", (4,), ()), 1.0)
    assert (before.tokens, builder.copy().tokens) == ([3], [3, 4])

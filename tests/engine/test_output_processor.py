"""The output processor: text that is made as tokens arrive, or at the end of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.engine.output_processor import OutputProcessor
from shotcast.engine.outputs import EngineCoreOutput, TokenLogprob
from shotcast.engine.sampling_params import SamplingParams

END, SPECIAL = 0, 25


class Letters:
    """A tokenizer with one letter per token; 0 is an end token without text."""

    byte_tokens: ClassVar[dict[int, bytes]] = {}

    def __init__(self) -> None:
        self.calls = 0

    def decode_continuation(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.decode(ids, skip_special)

    def decode_token(self, token: int, skip_special: bool = True) -> str:
        return self.decode([token], skip_special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        self.calls += 1
        return "".join(chr(ord("a") + token) for token in ids if token != SPECIAL or not skip_special)


def process(
    at_end: bool, tokens: list[int], stop: tuple[str, ...], ends: bool, least: int = 0
) -> tuple[Any, list[str], int]:
    """Return the output, its text after each token, and the tokenizer's calls before the last token."""
    letters = Letters()
    params = SamplingParams(stop=stop, min_tokens=least)
    processor = OutputProcessor("a", (1,), params, letters, (END,), at_end)  # type: ignore[arg-type]
    grown, read = [], 0
    for number, token in enumerate(tokens):
        last = number == len(tokens) - 1
        read = letters.calls
        finish = None if not last else "stop" if ends else "length"
        step = EngineCoreOutput("a", (token,), None, finish, token if last and ends else None)  # type: ignore[arg-type]
        grown.append(processor.update(step, float(number)).text)
        if processor.copy().finished:
            break
    return processor.copy(), grown, read


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.booleans(), st.sampled_from([(), ("bc",)]))
def test_text_made_at_the_end_is_the_same(tokens: list[int], ends: bool, stop: tuple[str, ...]) -> None:
    (early, _, _), (at_end, grown, read) = (process(when, tokens, stop, ends) for when in (False, True))
    assert (early.text, early.tokens, early.finish_reason) == (at_end.text, at_end.tokens, at_end.finish_reason)
    if not stop:
        assert read == 0
        assert set(grown[:-1]) <= {""}


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("skip", "text"), [(True, "bc"), (False, "bzc")])
def test_special_tokens_are_shown_on_request(at_end: bool, skip: bool, text: str) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    processor = OutputProcessor("a", (1,), params, Letters(), (END,), at_end)  # type: ignore[arg-type]
    for token in (1, SPECIAL, 2):
        processor.update(EngineCoreOutput("a", (token,)), 0.0)
    assert processor.update(EngineCoreOutput("a", (END,), None, "stop", END), 0.0).text == text


def test_a_stop_string_ends_an_output_at_once() -> None:
    output, _, _ = process(True, [1, 2, 3, 4], ("c",), False)
    assert (output.text, output.finish_reason, output.stop_reason) == ("b", "stop", "c")


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
    st.sampled_from([(), ("bc",), ("c", "dd")]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_several_tokens_of_a_step_are_as_one_after_the_other(
    tokens: list[int], sizes: list[int], stop: tuple[str, ...], ends: bool, at_end: bool, least: int
) -> None:
    expected, grown, _ = process(at_end, tokens, stop, ends, least)
    letters: Any = Letters()
    params = SamplingParams(stop=stop, min_tokens=least, logprobs=0)
    processor = OutputProcessor("a", (1,), params, letters, (END,), at_end)
    text = ""
    while tokens and not processor.copy().finished:
        some, tokens = tokens[: sizes[0]], tokens[sizes.pop(0) :]
        entries = tuple(TokenLogprob(token, -1.0, 1, ()) for token in some)
        finish = None if tokens else "stop" if ends else "length"
        step = EngineCoreOutput("a", tuple(some), entries, finish, some[-1] if ends and not tokens else None)  # type: ignore[arg-type]
        text += processor.update(step, 1.0).delta
    found = processor.copy()
    assert (found.tokens, found.text, found.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
    assert found.stop_reason == expected.stop_reason
    assert text == found.text == grown[-1]
    assert [entry.token for entry in found.logprobs or ()] == found.tokens


def test_a_stop_string_of_bytes_ends_an_output_with_its_last_byte() -> None:
    letters = Letters()
    letters.byte_tokens = {10: b"\n", 11: b"\xc3", 12: b"\xa9"}  # type: ignore[misc]
    for ids, stop, text in (([1, 10, 10], "\n\n", "b"), ([1, 11, 12], "é", "b")):
        processor = OutputProcessor("a", (1,), SamplingParams(stop=stop), letters, (END,))  # type: ignore[arg-type]
        outputs = [processor.update(EngineCoreOutput("a", (token,)), 0.0).finish_reason for token in ids]
        assert outputs == [None, None, "stop"]
        assert (processor.copy().text, processor.copy().stop_reason) == (text, stop)


@pytest.mark.parametrize("at_end", [False, True])
def test_a_copy_does_not_grow(at_end: bool) -> None:
    processor = OutputProcessor("a", (1,), SamplingParams(logprobs=0), None, (END,), at_end)
    processor.update(EngineCoreOutput("a", (3,), ()), 0.0)
    before = processor.copy()
    processor.update(EngineCoreOutput("a", (4,), ()), 1.0)
    assert (before.tokens, processor.copy().tokens) == ([3], [3, 4])


def test_no_stop_string_is_looked_for_in_the_first_tokens() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert process(False, tokens, ("bc",), False)[0].text == ""
    assert process(False, tokens, ("bc",), False, 2)[0].text == "bcd"
    assert process(False, tokens, ("bc",), False, 4)[0].text == "bcdbcd", "the string begins in the first tokens"
    assert process(False, tokens, ("bc",), False, 9)[0].text == "bcdbcdbcd"

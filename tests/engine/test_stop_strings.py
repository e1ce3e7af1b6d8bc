"""Stop strings in a text that arrives in pieces, compared with a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shotcast.engine.detokenizer import StopStrings

letters = st.text("ab", max_size=12)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple)


def searched(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for start in range(len(text)):
        for stop in sorted(stops, key=len):
            if text.startswith(stop, start):
                return text[:start], stop
    return text, None


@given(st.lists(letters, min_size=1, max_size=6), stop_strings)
@example(["abb", "a"], ("abbb", "bb"))
def test_any_pieces_give_what_a_search_of_the_whole_text_gives(pieces: list[str], stops: tuple[str, ...]) -> None:
    whole, stop = searched("".join(pieces), stops)
    watch = StopStrings(stops)
    released = ""
    found = None
    for number, piece in enumerate(pieces):
        delta, found = watch.push(piece, last=number == len(pieces) - 1)
        released += delta
        assert whole.startswith(released)
    assert (released, found) == (whole, stop)


@given(letters, stop_strings)
def test_text_that_cannot_become_a_stop_string_is_released(text: str, stops: tuple[str, ...]) -> None:
    watch = StopStrings(stops)
    released, found = watch.push(text)
    if found is None:
        # A continuation can stop only at a beginning of a stop string that the text ends with.
        starts = [at for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert len(released) == min(starts, default=len(text))


def test_after_the_stop_string_nothing_is_released() -> None:
    watch = StopStrings(("\n\n",))
    assert watch.push("a\n") == ("a", None)
    assert watch.push("\nb") == ("", "\n\n")
    assert watch.push("c", last=True) == ("", "\n\n")


@pytest.mark.parametrize(("last", "released"), [(False, "a"), (True, "aEN")])
def test_the_end_releases_text_that_was_held_back(last: bool, released: str) -> None:
    assert StopStrings(("END",)).push("aEN", last) == (released, None)

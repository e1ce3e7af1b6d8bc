from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shotcast.errors import ConfigError
from shotcast.units import about, about_size, align_up, counted, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8", 8), ("0", 0), ("64K", 65536), ("64k", 65536), ("64KB", 65536), ("64 KiB", 65536), (" 1.5M ", 1572864),
        ("2G", 2 << 30), ("0.5K", 512), ("12B", 12), (4096, 4096),
    ],
)  # fmt: skip
def test_parse(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5", "0.3K", "1T", "1e3", "1 2", "0x10", "1KK", -1])
def test_parse_refuses(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_nouns_are_counted() -> None:
    assert [counted(number, "core") for number in (0, 1, 2)] == ["0 cores", "1 core", "2 cores"]


@given(st.integers(0, 1 << 50))
def test_format_is_exact(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1536 B"), (3 << 20, "3 MiB")])
def test_format(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (65536, "64 KiB"), (100 << 20, "100 MiB"),
        (10011474841, "9.32 GiB"), (99 << 20 | 1 << 19, "99.5 MiB"), ((1 << 30) - 1, "1024 MiB"),
        (756 << 30, "756 GiB"),
    ],
)  # fmt: skip
def test_for_reading(nbytes: int, text: str) -> None:
    assert about_size(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_what_is_read_is_off_by_a_two_hundredth_at_most(nbytes: int) -> None:
    number, unit = about_size(nbytes).split()
    factor = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert abs(float(number) * factor - nbytes) <= nbytes / 200


@pytest.mark.parametrize(
    ("number", "text"),
    [(54384.2, "54,380"), (2.01449, "2.014"), (1234567.0, "1,235,000"), (0.5526, "0.5526"), (355.0, "355"), (0, "0")],
)
def test_numbers_for_reading(number: float, text: str) -> None:
    assert about(number) == text


@given(st.integers(0, 1 << 62), st.integers(1, 1 << 20))
def test_align_up_is_the_least_multiple(value: int, multiple: int) -> None:
    aligned = align_up(value, multiple)
    assert aligned % multiple == 0
    assert value <= aligned < value + multiple

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.cache.base import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 2**26), ("1.5TB", 1_500_000_000_000), ("7", 7), (" 3 kb ", 3000), (12, 12)],
)
def test_sizes_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1.5 parsecs", "-3MB", 0, -1, "0", True, None, 1.5, "MiB"])
def test_nonsense_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        parse_size(text, what="max_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1.5 TiBB", "'TiBB' is no unit, wanted B, kB"),
        ("1.5T", "'T' is no unit"),
        ("1.5", "the unit missing"),
        ("9" * 400 + "TB", "wanted a positive number"),
        (2**63, "wanted a positive number"),
    ],
)
def test_a_size_that_is_no_size_says_why(text: int | str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_size(text, what="max_bytes")


@given(st.integers(1, 2**60))
def test_a_formatted_size_names_its_unit(size: int) -> None:
    assert format_size(size).split(" ")[1] in ("B", "KiB", "MiB", "GiB", "TiB")

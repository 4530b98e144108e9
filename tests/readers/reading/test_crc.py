"""The CRC-32C of joined bytes is computed from those of the parts."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.readers.reading import joined_crc


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_joined_crcs_of_parts_are_the_crc_of_all_bytes(parts: list[bytes]) -> None:
    crc = crc32c(parts[0])
    for part in parts[1:]:
        crc = joined_crc(crc, crc32c(part), second_bytes=len(part))
    assert crc == crc32c(b"".join(parts))


def test_long_parts() -> None:
    first, second = bytes(range(256)) * 10_000, b"\xff" * (2**24 + 1)
    joined = joined_crc(crc32c(first), crc32c(second), second_bytes=len(second))
    assert joined == crc32c(first + second)

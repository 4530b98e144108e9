"""Test that checksums of ranges are right, and that as few as possible are computed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.disk import BLOCK_BYTES, crcs_of, crcs_of_file
from penstock.cache.peers import crc_of_file, noted_crc, stretches

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3 * BLOCK_BYTES + 12_345
DATA = np.random.default_rng(7).bytes(SIZE)
BLOCKS = crcs_of(memoryview(DATA))
NEAR = [n * BLOCK_BYTES + d for n in range(4) for d in (-1, 0, 1) if n or d >= 0]
PLACES = st.one_of(st.integers(0, SIZE), st.sampled_from([*NEAR, SIZE - 1, SIZE]))


@given(st.sets(PLACES, min_size=2, max_size=8).map(sorted))
def test_what_the_books_know_of_stretches_is_theirs_and_all_that_they_can(
    places: list[int],
) -> None:
    spans = list(zip(places[::2], places[1::2], strict=False))
    wanted = stretches(spans)
    assert b"".join(DATA[a:b] for a, b in wanted) == b"".join(DATA[a:b] for a, b in spans)
    assert all(a // BLOCK_BYTES == (b - 1) // BLOCK_BYTES for a, b in wanted)
    unknown = 0
    for start, end in wanted:
        noted = noted_crc(BLOCKS, SIZE, (start, end))
        assert noted in (None, crc32c(DATA[start:end]))
        is_block = start % BLOCK_BYTES == 0 and end in (start + BLOCK_BYTES, SIZE)
        assert is_block == (noted is not None)
        unknown += 0 if is_block else end - start
        assert noted_crc(None, SIZE, (start, end)) is None
    assert unknown < 2 * BLOCK_BYTES * len(spans)


def test_blocks_whose_checksums_are_known_are_not_computed() -> None:
    first = int.from_bytes(BLOCKS[:4], "little")
    assert crcs_of(memoryview(DATA), known={0: first}) == BLOCKS
    assert crcs_of(memoryview(DATA), known={0: 7})[4:] == BLOCKS[4:]
    assert crcs_of(memoryview(DATA), known={0: 7})[:4] == (7).to_bytes(4, "little")


def test_a_files_checksums(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(DATA)
    fd = os.open(place, os.O_RDONLY)
    try:
        assert crcs_of_file(fd) == BLOCKS
        assert crc_of_file(fd, 5, SIZE) == crc32c(DATA[5:])
        with pytest.raises(EOFError):
            crc_of_file(fd, 0, SIZE + 1)
        # Not every file system drops pages, or reports which ones it has in memory.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert crc_of_file(fd, 5, SIZE, waits=False) in (None, crc32c(DATA[5:]))
        assert crc_of_file(fd, 5, SIZE) == crc32c(DATA[5:])
    finally:
        os.close(fd)

"""Checksums of ranges from those of blocks are the checksums of their bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.disk.block_crcs import BLOCK_BYTES, crcs_of, crcs_of_file
from penstock.cache.peers.crcs import (
    bytes_to_read,
    combine,
    crc_of_file,
    crc_of_range,
    shift_over,
)

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 3 * BLOCK_BYTES + 12_345
DATA = np.random.default_rng(7).bytes(SIZE)
BLOCKS = crcs_of(memoryview(DATA))
NEAR = [n * BLOCK_BYTES + d for n in range(4) for d in (-1, 0, 1) if n or d >= 0]
PLACES = st.one_of(st.integers(0, SIZE), st.sampled_from([*NEAR, SIZE - 1, SIZE]))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_the_checksum_of_two_stretches_follows_from_theirs(first: bytes, second: bytes) -> None:
    found = combine(crc32c(first), crc32c(second), shift=shift_over(len(second)))
    assert found == crc32c(first + second)


@given(PLACES, PLACES, st.booleans())
def test_a_ranges_checksum_is_that_of_its_bytes(one: int, other: int, known: bool) -> None:
    start, end = sorted((one, other))
    blocks = BLOCKS if known else None
    read = []

    def compute(low: int, high: int, crc: int) -> int:
        assert start <= low < high <= end
        read.append(high - low)
        return int(crc32c(DATA[low:high], crc))

    if start == end:
        return
    assert crc_of_range(blocks, SIZE, start, end, compute) == crc32c(DATA[start:end])
    assert sum(read) == bytes_to_read(blocks, SIZE, start, end)
    if known:
        assert sum(read) < 2 * BLOCK_BYTES
    if known and start % BLOCK_BYTES == 0 and (end % BLOCK_BYTES == 0 or end == SIZE):
        assert not read


def test_a_files_checksums(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(DATA)
    fd = os.open(place, os.O_RDONLY)
    try:
        assert crcs_of_file(fd) == BLOCKS
        assert crc_of_file(fd, 5, SIZE) == crc32c(DATA[5:])
        assert crc_of_file(fd, 100, 200, crc32c(DATA[:100])) == crc32c(DATA[:200])
        with pytest.raises(EOFError):
            crc_of_file(fd, 0, SIZE + 1)
    finally:
        os.close(fd)

"""The index of a shard: parsing it, and rejecting hostile ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zarr.codecs as v3
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers.formats.zarr import Sharding
from tests.readers.formats.zarr.zarr_files import metadata_of, read, written

NOTHING = 2**64 - 1


def sharding(count: int, **changes: Any) -> Sharding:
    options: dict[str, Any] = {
        "counts": (count,),
        "is_at_end": True,
        "has_checksum": True,
        "byte_order": "<",
        **changes,
    }
    return Sharding(**options)


def index_of(pairs: list[tuple[int, int]]) -> np.ndarray:
    data = np.array(pairs, "<u8").tobytes()
    return np.frombuffer(data + crc32c(data).to_bytes(4, "little"), np.uint8)


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_shards_are_read_as_zarr_reads_them(location: str, endian: str, has_checksum: bool) -> None:
    index: list[Any] = [v3.BytesCodec(endian=endian)]
    serializer = v3.ShardingCodec(
        chunk_shape=(2, 3),
        codecs=[v3.BytesCodec(), v3.ZstdCodec()],
        index_codecs=[*index, v3.Crc32cCodec()] if has_checksum else index,
        index_location=location,
    )
    values = np.arange(77, dtype="i4").reshape(11, 7)
    values[:4, :3] = 0  # inner chunks of fill values aren't written
    files, wanted = written(values, chunks=(4, 6), serializer=serializer, compressors=None)
    found, _ = read(files)
    assert (found == wanted).all()
    layout = metadata_of(files).sharding
    assert layout is not None
    assert layout.counts == (2, 2)
    data = np.frombuffer(files["c/0/0"], np.uint8)
    begin, end = layout.index_range(len(data))
    index_found = layout.parse_index(data[begin:end], len(data))
    assert index_found.shape == (4, 2)
    assert (index_found[::2] == -1).all()
    assert (index_found[1::2] >= 0).all()


@given(
    sizes=st.lists(st.none() | st.integers(0, 50), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
    is_at_end=st.booleans(),
)
def test_an_index_locates_chunks_in_any_order(
    sizes: list[int | None], seed: int, is_at_end: bool
) -> None:
    layout = sharding(len(sizes), is_at_end=is_at_end)
    pairs = [(NOTHING, NOTHING)] * len(sizes)
    at = 0 if is_at_end else layout.index_bytes
    for number in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        size = sizes[number]
        if size is not None:
            pairs[number] = (at, size)
            at += size
    file_bytes = at + (layout.index_bytes if is_at_end else 0)
    found = layout.parse_index(index_of(pairs), file_bytes)
    wanted = [(-1, -1) if pair[0] == NOTHING else pair for pair in pairs]
    assert found.tolist() == [list(pair) for pair in wanted]


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([(0, 101), (NOTHING, NOTHING)], "outside"),
        ([(2**63, 1), (0, 1)], "outside"),
        ([(NOTHING, 1), (0, 1)], "outside"),
        ([(1, NOTHING), (0, 1)], "outside"),
        ([(2**64 - 5, 10), (0, 1)], "outside"),
        ([(0, 50), (49, 5)], "same bytes"),
        ([(0, 50), (0, 50)], "same bytes"),
        ([(60, 10), (0, 1)], "same bytes"),
    ],
)
def test_an_index_with_invalid_locations_is_rejected(
    pairs: list[tuple[int, int]], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        sharding(2).parse_index(index_of(pairs), 100)


def test_a_damaged_index_is_rejected() -> None:
    good = index_of([(0, 10), (10, 10)])
    for at in range(len(good)):
        flipped = good.copy()
        flipped[at] ^= 1
        with pytest.raises(ValueError, match="CRC-32C"):
            sharding(2).parse_index(flipped, 100)
    with pytest.raises(ValueError, match="its index alone"):
        sharding(2).index_range(35)

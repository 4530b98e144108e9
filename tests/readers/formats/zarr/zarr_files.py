"""Write Zarr hierarchies in memory, and read whole arrays with our metadata and codecs."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from penstock.readers.formats.zarr import (
    ArrayMetadata,
    decoder_of,
    parse_array,
    read_document,
    read_node,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats import ChunkDecoder

Files = dict[str, bytes]


def written(values: NDArray[Any], **options: Any) -> tuple[Files, NDArray[Any]]:
    """Write an array with zarr-python; return its files, and what zarr-python reads from them."""
    store = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = zarr.create_array(store, shape=values.shape, dtype=values.dtype, **options)
        array[...] = values
        found = np.asarray(array[...])
    return {name: data.to_bytes() for name, data in store._store_dict.items()}, found


def metadata_of(files: Mapping[str, bytes], name: str = "") -> ArrayMetadata:
    def read(file: str) -> dict[str, Any] | None:
        data = files.get(f"{name}/{file}" if name else file)
        return None if data is None else read_document(data, name=name)

    node = read_node(name, read)
    assert node is not None
    found = parse_array(node)
    assert isinstance(found, ArrayMetadata)
    return found


def key_of(metadata: ArrayMetadata, coordinates: Sequence[int]) -> str:
    """Return the name of a chunk's file, or of its shard's file, below the array's folder."""
    parts = [*([metadata.prefix] if metadata.prefix else []), *map(str, coordinates)]
    return metadata.separator.join(parts)


def chunks(
    files: Mapping[str, bytes], metadata: ArrayMetadata
) -> Iterator[tuple[tuple[int, ...], NDArray[np.uint8]]]:
    """Yield the stored chunks, encoded, with their coordinates."""
    prefix = f"{metadata.name}/" if metadata.name else ""
    for place in itertools.product(*map(range, metadata.files.counts)):
        found = files.get(prefix + key_of(metadata, place))
        if found is None:
            continue
        data = np.frombuffer(found, np.uint8)
        sharding = metadata.sharding
        if sharding is None:
            yield place, data
            continue
        begin, end = sharding.index_range(len(data))
        index = sharding.parse_index(data[begin:end], len(data))
        places = itertools.product(*map(range, sharding.counts))
        for inner, (start, size) in zip(places, index.tolist(), strict=True):
            if start >= 0:
                offset = np.multiply(place, sharding.counts) + inner
                yield tuple(offset.tolist()), data[start : start + size]


def read(files: Mapping[str, bytes], name: str = "") -> tuple[NDArray[Any], ChunkDecoder]:
    """Read a whole array; decode each chunk into a new array and into a given one."""
    metadata = metadata_of(files, name)
    decoder = decoder_of(metadata)
    chunk = metadata.grid.chunk
    shape = np.multiply(metadata.grid.counts, chunk)
    whole = np.full(shape, metadata.fill_value, metadata.dtype)
    for place, data in chunks(files, metadata):
        buffer = np.empty(chunk, metadata.dtype)
        assert decoder.decode(data, buffer) is buffer
        found = decoder.decode(data)
        assert found.dtype.newbyteorder("=") == metadata.dtype
        np.testing.assert_array_equal(found, buffer)
        corner = np.multiply(place, chunk)
        if np.all(corner < shape):
            whole[tuple(map(slice, corner, corner + chunk))] = found
    return whole[tuple(map(slice, metadata.shape))], decoder


def uses_zarr(decoder: Any) -> bool:
    """Return True if zarr's own pipeline decodes the chunks."""
    return any(step.args[0] == "zarr" for step in decoder.steps)

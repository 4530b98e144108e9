"""Write Zarr arrays with other libraries, for tests: run it where these are installed.

    pip install 'zarr<3' 'numcodecs<0.16' tensorstore
    python tests/readers/formats/zarr/make_fixtures.py

Each library's arrays go into one zip file in this folder. All arrays hold `values(dtype)`.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

SHAPE, CHUNKS = (7, 5, 6), (3, 2, 6)


def values(dtype: str) -> np.ndarray[Any, Any]:
    """Return the numbers of every array, in its dtype."""
    numbers = (np.arange(np.prod(SHAPE)) * 7 % 120).reshape(SHAPE)
    numbers[:3, :2] = 0  # a chunk of fill values
    return numbers.astype(dtype)


def zarr_2(root: Path) -> None:
    """Write version 2 with zarr-python 2."""
    import numcodecs
    import zarr

    group = zarr.open_group(str(root), mode="w")
    blosc = [numcodecs.Blosc(name, 5, shuffle) for name in ("lz4", "zstd") for shuffle in (1, 2)]
    codecs = [None, numcodecs.Zstd(), numcodecs.Zlib(), numcodecs.LZ4(), numcodecs.GZip(), *blosc]
    for number, codec in enumerate(codecs):
        dtype = ("<f4", ">i2", "|u1", "<i8", ">f8")[number % 5]
        group.create_dataset(
            f"codec{number}",
            data=values(dtype),
            chunks=CHUNKS,
            compressor=codec,
            order="CF"[number % 2],
            fill_value=0,
            write_empty_chunks=False,
            dimension_separator="./"[number % 2],
        )
    for name, filters in {
        "delta": [numcodecs.Delta("<i4")],
        "shuffle": [numcodecs.Shuffle(4)],
        "scaled": [numcodecs.FixedScaleOffset(0, 10, "<f8", "<i2")],
    }.items():
        dtype = "<f8" if name == "scaled" else "<i4"
        group.create_dataset(name, data=values(dtype), chunks=CHUNKS, filters=filters)
    group.create_dataset("times", data=values("<i8").view("<M8[s]"), chunks=CHUNKS)
    group["delta"].attrs["_ARRAY_DIMENSIONS"] = ["t", "y", "x"]
    zarr.consolidate_metadata(group.store)


def tensorstore(root: Path) -> None:
    """Write versions 2 and 3 with tensorstore."""
    import tensorstore as ts  # type: ignore[import-not-found]

    def write(name: str, driver: str, metadata: dict[str, Any], dtype: str) -> None:
        spec = {
            "driver": driver,
            "kvstore": {"driver": "file", "path": str(root / name)},
            "metadata": {"shape": list(SHAPE), **metadata},
            "create": True,
        }
        ts.open(spec).result().write(values(dtype)).result()

    for number, codec in enumerate(
        (None, {"id": "zstd", "level": 1}, {"id": "blosc", "cname": "zstd", "shuffle": 2})
    ):
        metadata: dict[str, Any] = {
            "chunks": list(CHUNKS),
            "dtype": "<f4",
            "compressor": codec,
            "fill_value": 0.0,
        }
        write(f"v2-{number}", "zarr", {**metadata, "order": "CF"[number % 2]}, "f4")
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}]
    chains: dict[str, list[Any]] = {
        "plain": inner,
        "big": [{"name": "bytes", "configuration": {"endian": "big"}}],
        "zstd": [*inner, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
        "gzip": [*inner, {"name": "gzip", "configuration": {"level": 1}}],
        "blosc": [
            *inner,
            {
                "name": "blosc",
                "configuration": {
                    "cname": "lz4",
                    "clevel": 5,
                    "shuffle": "bitshuffle",
                    "typesize": 4,
                    "blocksize": 0,
                },
            },
        ],
        "transpose": [{"name": "transpose", "configuration": {"order": [2, 0, 1]}}, *inner],
    }
    for location in ("start", "end"):
        chains[f"shards-{location}"] = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [1, 2, 3],
                    "codecs": chains["zstd"][:2],
                    "index_codecs": [*inner, {"name": "crc32c"}],
                    "index_location": location,
                },
            }
        ]
    for name, codecs in chains.items():
        grid = {"name": "regular", "configuration": {"chunk_shape": list(CHUNKS)}}
        metadata = {"data_type": "int32", "chunk_grid": grid, "codecs": codecs, "fill_value": 0}
        keys: Any = {"name": "v2" if name == "plain" else "default"}
        write(f"v3-{name}", "zarr3", {**metadata, "chunk_key_encoding": keys}, "i4")


def main() -> None:
    """Write both zip files."""
    for make in (zarr_2, tensorstore):
        folder = Path(tempfile.mkdtemp())
        make(folder)
        target = Path(__file__).with_name(f"{make.__name__}.zip")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    name = zipfile.ZipInfo(path.relative_to(folder).as_posix())
                    archive.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""Write the hierarchies of others.zip: `python write_others.py zarr2 | xarray | tensorstore DIR`.

Run it by hand, each command where its library is installed (zarr 2.18, also with xarray 2026.9;
tensorstore 0.1), and put the files into others.zip, one folder for each hierarchy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np


def values(shape: tuple[int, ...], dtype: str) -> Any:
    """Return the same numbers as `values` in hierarchies.py."""
    count = int(np.prod(shape))
    return (np.arange(count) * 7 % 251).reshape(shape).astype(dtype)


def by_zarr2(root: Path) -> None:
    """Write version 2 with the library that defined it: its defaults and rare features."""
    zarr: Any = import_module("zarr")
    codecs: Any = import_module("numcodecs")
    group = zarr.open_group(str(root / "zarr2.zarr"), mode="w")
    x = values((7, 3, 8, 6), "u1")
    group.array("blosc", x, chunks=(2, 3, 5, 6))
    group.array("order", x, chunks=(3, 2, 8, 4), order="F", compressor=codecs.Zstd(5))
    delta = [codecs.Delta(dtype="<i4"), codecs.Shuffle(elementsize=4)]
    group.array("delta", x.astype("<i4"), chunks=(2, 3, 8, 6), filters=delta)
    group.array("big", x.astype(">f8"), chunks=(7, 1, 8, 6), compressor=codecs.LZ4())
    group.array("bare", x, chunks=(4, 3, 8, 6), compressor=None, dimension_separator="/")
    sparse = group.full("sparse", shape=(7, 4), chunks=(2, 2), fill_value=5, dtype="u2")
    sparse[2:4] = 1
    group.array("when", np.arange(7).astype("M8[s]"), chunks=(3,))
    group.array("names", np.array(list("abcdefg"), object), object_codec=codecs.VLenUTF8())
    zarr.consolidate_metadata(str(root / "zarr2.zarr"))


def by_xarray(root: Path) -> None:
    """Write a dataset with coordinates."""
    xarray: Any = import_module("xarray")
    t2m = values((6, 4, 8), "f4")
    data = xarray.Dataset(
        {"t2m": (("time", "lat", "lon"), t2m), "level": 850},
        coords={
            "time": np.arange(6).astype("M8[D]"),
            "lat": np.linspace(-90, 90, 4),
            "lon": np.linspace(0, 315, 8),
        },
    )
    data.to_zarr(str(root / "xarray.zarr"), encoding={"t2m": {"chunks": (2, 4, 3)}})


def by_tensorstore(root: Path) -> None:
    """Write versions 2 and 3 with the C++ implementation; shards with their index at the start."""
    ts: Any = import_module("tensorstore")
    x = values((9, 3, 8, 8), "u2")
    inner = [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]
    blosc = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "typesize": 2, "blocksize": 0}
    specs = {
        "ts2": {"driver": "zarr", "metadata": {"chunks": [2, 3, 8, 5], "dtype": "<u2"}},
        "ts3": {
            "driver": "zarr3",
            "metadata": {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3, 5, 8]}},
                "codecs": [
                    {"name": "transpose", "configuration": {"order": [3, 0, 2, 1]}},
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "blosc", "configuration": blosc},
                ],
            },
        },
        "shards": {
            "driver": "zarr3",
            "metadata": {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 3, 8, 8]}},
                "codecs": [
                    {
                        "name": "sharding_indexed",
                        "configuration": {
                            "chunk_shape": [1, 3, 4, 8],
                            "codecs": inner,
                            "index_location": "start",
                        },
                    }
                ],
            },
        },
    }
    for name, spec in specs.items():
        place = {"kvstore": {"driver": "file", "path": str(root / "tensorstore.zarr" / name)}}
        shape = {"shape": list(x.shape), "dtype": "uint16"}
        store = ts.open({**spec, **place}, create=True, delete_existing=True, **shape).result()
        store[...] = x
    (root / "tensorstore.zarr/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')


if __name__ == "__main__":
    {"zarr2": by_zarr2, "xarray": by_xarray, "tensorstore": by_tensorstore}[sys.argv[1]](
        Path(sys.argv[2])
    )

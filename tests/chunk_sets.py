"""Small datasets in chunked formats and of native arrays, with the expected values of
each sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

COUNT = 41
FRAMES, SIDE = 60, 24
SEQUENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSet:
    """A dataset: how it is written below a folder, and how it is opened.

    write: returns the path of the dataset below that folder. wanted: returns the fields of a sample
    by its id, each as an array or bytes. options: of `Dataset`. count: samples.
    """

    write: Callable[[Path], str]
    wanted: Callable[[int], Mapping[str, Any]]
    count: int = COUNT
    options: Mapping[str, Any] = field(default_factory=dict)


def row(number: int) -> dict[str, Any]:
    """Return one sample of fields of fixed shape."""
    rng = np.random.default_rng(number)
    return {
        "image": rng.integers(0, 255, (3, 6, 5), dtype=np.uint8),
        "depth": rng.standard_normal((4, 4)).astype(np.float32),
        "label": np.int64(number % 7),
    }


def column(name: str) -> NDArray[Any]:
    """Return all samples of one of these fields."""
    return np.stack([row(number)[name] for number in range(COUNT)])


def _zarr(version: int, *, shards: bool = False) -> Callable[[Path], str]:
    def write(root: Path) -> str:
        import zarr

        group = zarr.open_group(root / "set.zarr", mode="w", zarr_format=version)
        for name, chunks in (("image", (4, 3, 6, 5)), ("depth", (3, 2, 4)), ("label", (10,))):
            values = column(name)
            more: dict[str, Any] = {"chunks": chunks}
            if shards and name != "label":
                more["shards"] = (chunks[0] * 3, *values.shape[1:])
            array = group.create_array(name, shape=values.shape, dtype=values.dtype, **more)
            array[:] = values
        return "set.zarr"

    return write


def movie() -> NDArray[Any]:
    """Return a long array from which windows are taken."""
    return np.arange(FRAMES * SIDE * SIDE, dtype=np.int32).reshape(FRAMES, SIDE, SIDE)


def _write_movie(root: Path) -> str:
    import zarr

    array = zarr.create_array(
        root / "movie.zarr", shape=(FRAMES, SIDE, SIDE), chunks=(7, 10, 24), dtype="int32"
    )
    array[:] = movie()
    return "movie.zarr"


WINDOW, STRIDE = (5, 12, 24), (3, 12, 24)
_TIMES, _BANDS = (FRAMES - WINDOW[0]) // STRIDE[0] + 1, SIDE // STRIDE[1]


def _window(number: int) -> dict[str, Any]:
    time, band = divmod(number, _BANDS)
    begin, top = time * STRIDE[0], band * STRIDE[1]
    return {"array": movie()[begin : begin + WINDOW[0], top : top + WINDOW[1]]}


def _tokens(number: int) -> NDArray[Any]:
    """Return the tokens of one file of a corpus of three files."""
    return np.random.default_rng(number).integers(0, 999, 110 + number).astype(np.uint16)


def _write_tokens(root: Path) -> str:
    (root / "corpus").mkdir()
    for number in range(3):
        _tokens(number).tofile(root / "corpus" / f"{number}.bin")
    return "corpus"


def _sequences() -> list[NDArray[Any]]:
    return [
        tokens[at : at + SEQUENCE].astype(np.int64)
        for tokens in map(_tokens, range(3))
        for at in range(0, len(tokens) - SEQUENCE + 1, SEQUENCE)
    ]


def record(number: int) -> dict[str, Any]:
    """Return one sample whose fields have the types of table columns."""
    rng = np.random.default_rng(number)
    return {
        "vector": rng.standard_normal(3).astype(np.float32),
        "tokens": rng.integers(0, 99, number % 5).astype(np.int32),
        "text": f"sample {number} é",
        "score": np.float64(number / 4),
        "flag": np.bool_(number % 3 == 0),
    }


def _table(numbers: range) -> Any:
    import pyarrow as pa

    rows = [record(number) for number in numbers]
    vectors = np.concatenate([each["vector"] for each in rows])
    return pa.table(
        {
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors), 3),
            "tokens": pa.array([each["tokens"] for each in rows], pa.list_(pa.int32())),
            "text": [each["text"] for each in rows],
            "score": [float(each["score"]) for each in rows],
            "flag": [bool(each["flag"]) for each in rows],
        }
    )


def _parts(folder: Path) -> list[tuple[Path, Any]]:
    """Write a table as two files."""
    folder.mkdir()
    half = COUNT // 2
    return [
        (folder / f"part-{number}", _table(rows))
        for number, rows in enumerate((range(half), range(half, COUNT)))
    ]


def _write_parquet(root: Path) -> str:
    import pyarrow.parquet as pq

    for path, table in _parts(root / "table"):
        pq.write_table(table, path.with_suffix(".parquet"), row_group_size=6, compression="zstd")
    return "table"


def _arrow(*, compression: str | None) -> Callable[[Path], str]:
    def write(root: Path) -> str:
        import pyarrow as pa

        options = pa.ipc.IpcWriteOptions(compression=compression)
        for path, table in _parts(root / "table"):
            with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema, options=options) as file:
                file.write_table(table, max_chunksize=6)
        return "table"

    return write


def _write_npy(root: Path) -> str:
    np.save(root / "movie.npy", movie())
    return "movie.npy"


def _npz(*, is_compressed: bool) -> Callable[[Path], str]:
    def write(root: Path) -> str:
        save = np.savez_compressed if is_compressed else np.savez
        save(root / "set.npz", **{name: column(name) for name in row(0)})
        return "set.npz"

    return write


SETS: dict[str, ChunkSet] = {
    "zarr 2": ChunkSet(write=_zarr(2), wanted=row),
    "zarr 3": ChunkSet(write=_zarr(3), wanted=row),
    "zarr shards": ChunkSet(write=_zarr(3, shards=True), wanted=row),
    "zarr windows": ChunkSet(
        write=_write_movie,
        wanted=_window,
        count=_TIMES * _BANDS,
        options={"sample": WINDOW, "stride": STRIDE},
    ),
    "npy": ChunkSet(
        write=_write_npy, wanted=lambda number: {"array": movie()[number]}, count=FRAMES
    ),
    "npy windows": ChunkSet(
        write=_write_npy,
        wanted=_window,
        count=_TIMES * _BANDS,
        options={"sample": WINDOW, "stride": STRIDE},
    ),
    "npz": ChunkSet(write=_npz(is_compressed=False), wanted=row),
    "npz deflated": ChunkSet(write=_npz(is_compressed=True), wanted=row),
    "parquet": ChunkSet(write=_write_parquet, wanted=record),
    "arrow": ChunkSet(write=_arrow(compression=None), wanted=record),
    "arrow zstd": ChunkSet(write=_arrow(compression="zstd"), wanted=record),
    "tokens": ChunkSet(
        write=_write_tokens,
        wanted=lambda number: {"tokens": _sequences()[number]},
        count=len(_sequences()),
        options={"format": "tokens", "dtype": "uint16", "sample": (SEQUENCE,)},
    ),
}

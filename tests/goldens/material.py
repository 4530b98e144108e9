"""Make the datasets, packs and loaders of the goldens, all through public names.

If a public name changes on purpose, change `loader` and the tables; the records stay. The source
files come from `inputs.tar.xz`, since other versions of Pillow, pyarrow and zarr would write other
bytes of the same data. It contains `write_inputs.py`, the program that wrote them.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib
import io
import json
import lzma
import os
import tarfile
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

import penstock
from penstock import DataLoader, Dataset, DiskCache, World

HERE = Path(__file__).parent
INPUTS, WRITTEN = HERE / "inputs.tar.xz", HERE / "written.tar.xz"
Case = Callable[["Material"], Any]
TIME_S = 1_700_000_000
"""Every source file's time: indexes note the times of what they are of."""

SCHEMA = {
    "boxes": penstock.Boxes(of="image", format="xyxy"),
    "corners": penstock.Keypoints(of="image"),
    "tags": penstock.MultiLabel(("sea", "city")),
}
TOKENS, PACKED = "--format=tokens --dtype=uint16 --sample=16", "--documents=pack --sample=16"
WINDOWS, NPY = "--fields=x=image --sample=3,-,4", "--format=npy --fields=x=x.npy,y=label.npy"
# Where each lies, how it is opened, and the same for the command line, which has no schema.
SOURCES: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "folder": ("in/photos", {}, ""),
    "table": ("in/street", {"schema": SCHEMA}, ""),
    "tar": ("in/tars", {}, ""),
    "parquet": ("in/parquet", {}, ""),
    "arrow": ("in/arrow", {}, ""),
    "zarr": ("in/cells.zarr", {}, ""),
    "zarr-windows": ("in/cells.zarr", {"fields": {"x": "image"}, "sample": (3, None, 4)}, WINDOWS),
    "pair": ("in/pair", {"fields": {"a": "left", "b": "right"}}, "--fields=a=left,b=right"),
    "npy": ("in/npy", {"format": "npy", "fields": {"x": "x.npy", "y": "label.npy"}}, NPY),
    "npz": ("in/npz", {}, ""),
    "tokens": ("in/tokens", {"format": "tokens", "dtype": "uint16", "sample": (16,)}, TOKENS),
    "documents": ("in/megatron", {"documents": "within"}, "--documents=within"),
    "packed-documents": ("in/megatron", {"documents": "pack", "sample": (16,)}, PACKED),
    "pack": ("photos-pack", {}, ""),
    "table-pack": ("street-pack", {}, ""),
    "wide-pack": ("wide-pack", {}, ""),
}
PACKS: Mapping[str, dict[str, Any]] = {
    "photos-pack": {"src": "in/photos", "seed": 3, "shard_bytes": 2500},
    "plain-pack": {"src": "in/photos", "shuffle": False, "shard_bytes": "64KiB"},
    "street-pack": {"src": "in/street", "seed": 4, "schema": SCHEMA, "shard_bytes": 4000},
    "tokens-pack": {"src": "in/megatron", "shuffle": False},
    "parquet-pack": {"src": "in/parquet", "seed": 2, "shard_bytes": 1500},
    "zarr-pack": {"src": "in/cells.zarr", "seed": 2, "shard_bytes": 4000},
    "wide-pack": {"src": "in/wide.npy", "seed": 5, "shard_bytes": 75},
}
KEYED_BY_DATA = {"left_out", "labels", "passed_over"}


class Material:
    """A folder with the inputs and the files made from them.

    The process works in that folder: of a relative path a pack notes the same everywhere.
    """

    def __init__(self, root: Path, *, store: str = "golden") -> None:
        self.root, self._store = root, store
        extract(INPUTS, root / "in")
        self.packs: set[str] = set()
        self._opened: list[Dataset] = []

    def path(self, name: str) -> str:
        """Return where a source lies; make a pack at its first use."""
        if name in PACKS and name not in self.packs:
            with quiet():
                penstock.pack(dst=name, workers=1, **PACKS[name])
            self.packs.add(name)
        return str(self.root / name)

    def open(self, name: str, *fields: str, cache: Path | None = None) -> Dataset:
        """Open a source by its name; with a cache folder that of the store in memory."""
        found = self._open(name, fields, cache)
        self._opened.append(found)
        return found

    def close(self) -> None:
        """Close all datasets that were opened, whose threads would change how later tests run."""
        while self._opened:
            self._opened.pop().close()

    def _open(self, name: str, fields: tuple[str, ...], cache: Path | None) -> Dataset:
        place, settings, _ = SOURCES[name]
        url = f"{self.remote}/{place}" if cache else self.path(place)
        kept = DiskCache(cache, max_bytes="64MiB") if cache else None
        if places := settings.get("fields"):
            mapped = {**settings, "fields": {**dict.fromkeys(fields), **places}}
            return Dataset(url, cache=kept, **mapped).select(*(fields or places))
        return Dataset(url, cache=kept, fields=fields or None, **settings)

    @cached_property
    def remote(self) -> str:
        """Copy inputs and packs to a store in memory, whose address and times are fixed."""
        files = fsspec.filesystem("memory")
        when = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
        places = [*map(Path, map(self.path, PACKS)), *(self.root / "in").iterdir()]
        for file in (each for place in places for each in (place, *place.rglob("*"))):
            if file.is_file() and ".penstock" not in str(file):
                path = f"/{self._store}/{file.relative_to(self.root)}"
                files.pipe_file(path, file.read_bytes())
                files.store[path].created = files.store[path].modified = when
        return f"memory://{self._store}"


def loader(dataset: Any, *, world: tuple[int, int] = (0, 1), **arguments: Any) -> DataLoader[Any]:
    """Make a loader. Order settings are given by name, wherever the constructor takes them."""
    return DataLoader(dataset, world=World(*world), **arguments)


def run(*arguments: object) -> tuple[int, str]:
    """Run the `penstock` command as the project declares it; return its exit code and stdout."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["penstock"].partition(":")
    main, out = getattr(importlib.import_module(module), name), io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()), quiet():
        return main([str(each) for each in arguments]), out.getvalue()


@contextmanager
def quiet() -> Iterator[None]:
    """Pass over warnings: they are texts, which may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compress(folder: Path, archive: Path) -> None:
    """Write the files below a folder into an archive, without owners and with one time."""
    plain_tar = io.BytesIO()
    with tarfile.open(fileobj=plain_tar, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            info.type = tarfile.DIRTYPE if path.is_dir() else tarfile.REGTYPE
            info.mtime, info.mode = TIME_S, 0o700 if path.is_dir() else 0o600
            data = b"" if path.is_dir() else path.read_bytes()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    archive.write_bytes(lzma.compress(plain_tar.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def extract(archive: Path, folder: Path) -> None:
    """Write an archive's files below a folder, with one time."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        os.utime(path, (TIME_S, TIME_S))


def plain(value: Any) -> Any:
    """Turn a batch, or a part of one, into JSON types; fractions to a thousandth."""
    if isinstance(value, penstock.Ragged):
        return {"values": plain(value.values), "lengths": plain(value.lengths)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return round(value, 3) + 0.0 if isinstance(value, float) else value


def spaced(numbers: Any) -> str:
    """Write numbers in a row, so that they take one line of a record."""
    return " ".join(map(str, np.asarray(numbers).ravel().tolist()))


def digest(value: Any) -> str:
    """Hash a nested value of JSON types, exactly."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def shape_of(value: Any) -> Any:
    """Return the keys and types of a value of JSON types and dataclasses.

    Numbers are one type, since a figure may come out whole. A list's items are one shape together,
    and so are values whose keys are data, such as reasons and URLs.
    """
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        found = {key: shape_of(each) for key, each in value.items()}
        for key in KEYED_BY_DATA & found.keys():
            if isinstance(found[key], dict):
                found[key] = {"*": merged(found[key].values())}
        return found
    if isinstance(value, list | tuple):
        return {"[]": merged(map(shape_of, value))}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if value is None else "number" if is_number else type(value).__name__


def merged(shapes: Iterable[Any]) -> Any:
    """Put the shapes of several values together; without any, None."""
    known = [each for each in shapes if each is not None]
    if known and all(isinstance(each, dict) for each in known):
        keys = {key for each in known for key in each}
        return {key: merged([each.get(key) for each in known]) for key in keys}
    return "|".join(sorted(set(map(str, known)))) or None

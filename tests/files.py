"""Write, read, damage and upload files of datasets."""

from __future__ import annotations

import contextlib
import io
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


def npy(values: Any, **options: Any) -> bytes:
    """Return an array as the bytes of an .npy file. options: those of `write_array`."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asanyarray(values), **options)
    return buffer.getvalue()


def files_below(root: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a root by their relative names."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Invert these bits of one byte in place: processes that have mapped the file see it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ bits]))


def quarantine(folder: str | bytes | os.PathLike[str]) -> dict[str, str]:
    """Return the reasons in the quarantine of an index by the names of the samples."""
    path = Path(folder.decode() if isinstance(folder, bytes) else folder) / "quarantine.jsonl"
    lines = map(json.loads, path.read_text().splitlines())
    return {line["name"]: line["reason"] for line in lines}


def upload(source: Path, filesystem: Any, root: str) -> None:
    """Copy a file, or all files below a folder, to a path of an fsspec file system."""
    if source.is_file():
        filesystem.pipe(root, source.read_bytes())
    for name, data in files_below(source).items():
        filesystem.pipe(f"{root}/{name}", data)


@contextlib.contextmanager
def uploaded(source: Path) -> Iterator[str]:
    """Copy a file or folder to a new place of fsspec's memory file system; yield its URL."""
    memory, place = fsspec.filesystem("memory"), f"/uploaded-{uuid.uuid4().hex}"
    upload(source, memory, f"{place}/{source.name}")
    try:
        yield f"memory:/{place}/{source.name}"
    finally:
        memory.rm(place, recursive=True)

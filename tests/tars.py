"""Small tar files, good and hostile, written by Python's tarfile or byte by byte."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from tests import images

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def archive(files: Mapping[str, bytes] | Sequence[tuple[str, bytes]], **options: object) -> bytes:
    """Return a tar of these members, in order. options: tarfile's, such as format."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:  # type: ignore[call-overload]
        for name, data in files.items() if hasattr(files, "items") else files:
            add(tar, name, data)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a regular member."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def special(name: str, kind: bytes, target: str = "/etc/passwd") -> bytes:
    """Add a member that has only a header, such as a link or a device."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info.tobuf(tarfile.USTAR_FORMAT)


def header(name: str, size: int, kind: bytes = b"0", *, size_field: bytes | None = None) -> bytes:
    """Return one ustar header with a correct checksum, whatever its contents."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size_field if size_field is not None else b"%011o\0" % size
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """Pad data to a whole block."""
    return data + bytes(-len(data) % 512)


END = bytes(1024)


def photographs(first: int, count: int, classes: int = 3) -> dict[str, bytes]:
    """Return `count` samples of jpg and cls."""
    files = {}
    for i in range(first, first + count):
        files[f"{i:05d}.jpg"] = images.jpeg(i, 16 + i % 7, 20 + i % 5)
        files[f"{i:05d}.cls"] = b"%d" % (i % classes)
    return files


def tar_folder(root: Path, samples: int = 24, archives: int = 3) -> Path:
    """Write train-000000.tar and so on, each with its share of the samples."""
    root.mkdir(parents=True, exist_ok=True)
    share = samples // archives
    for number in range(archives):
        data = archive(photographs(number * share, share))
        (root / f"train-{number:06d}.tar").write_bytes(data)
    return root

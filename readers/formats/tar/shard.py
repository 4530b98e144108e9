"""A shard that is a tar file, and the sidecar that says where in it each image lies.

Each archive is one shard, small ones too: a shard is then one map and one object to fetch. Images
are views of the mapped archive, as a pack's are.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.files.atomic import write_whole
from penstock.readers.files.ipc import write_batch
from penstock.readers.files.names import printable
from penstock.readers.files.pages import BROKEN, advise_willneed, map_buffer
from penstock.readers.formats.limits import VERSION
from penstock.readers.formats.local_files import changed, read_up_to, unreadable
from penstock.readers.formats.shard import check_rows, table
from penstock.readers.formats.sidecar_file import check_names, sidecar_batch, sidecar_etag, torn
from penstock.readers.origin.origin import Entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.origin.local import LocalFolder
    from penstock.readers.types import Encoded

_ARCHIVE = b"penstock.tar"
_COLUMNS = {
    "path": "large_binary",
    "key": "large_binary",
    "start": "int64",
    "bytes": "int64",
    "crc32c": "uint32",
    "height": "int32",
    "width": "int32",
    "channels": "int32",
    "codec": "string",
    "label": "int64",
}


class OpenTar:
    """An archive, open for reading at offsets; a file that changes meanwhile is found at close.

    Not mapped: headers are read here before anyone knows whether the file stands still. A context
    manager. Raises IndexChangedError (another size or time than listed), DatasetError.
    """

    def __init__(self, origin: LocalFolder, entry: Entry) -> None:
        self._entry = entry
        self._fd = _open(os.path.join(origin.root, entry.name), entry.name)
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> OpenTar:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            os.close(self._fd)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Bytes of the file, fewer where it ends."""
        try:
            return os.pread(self._fd, size_bytes, offset)
        except OSError as error:
            raise unreadable(self._entry.name, error) from error

    def read(self, start: int, size_bytes: int) -> Encoded:
        """One member's bytes."""
        data = np.empty(size_bytes, np.uint8)
        try:
            got = read_up_to(self._fd, data, start)
        except OSError as error:
            raise unreadable(self._entry.name, error) from error
        if got < size_bytes:
            raise changed(self._entry.name, f"it ends before byte {start + size_bytes}")
        data.flags.writeable = False
        return data

    def _check(self) -> None:
        found, wanted = os.fstat(self._fd), self._entry
        if found.st_size != wanted.size_bytes:
            raise changed(wanted.name, f"it had {wanted.size_bytes} bytes, now {found.st_size}")
        if wanted.mtime_ns and found.st_mtime_ns != wanted.mtime_ns:
            raise changed(wanted.name, "it was written to in the meantime")


def _open(path: bytes, name: bytes) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise changed(name, "it is gone") from None
    except OSError as error:
        raise unreadable(name, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSidecar:
    """What is known of one archive's n samples; arrays of shape (n,). starts, sizes: bytes of the
    images in the archive; names: of their members; keys: of the samples."""

    archive: Entry
    names: Sequence[bytes]
    keys: Sequence[bytes]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    heights: NDArray[np.int32]
    widths: NDArray[np.int32]
    channels: NDArray[np.int32]
    codecs: Sequence[str]
    labels: NDArray[np.int64] | None


def write_tar_sidecar(path: bytes, content: TarSidecar) -> str:
    """Write a sidecar whole; returns its etag (a checksum of the file). Raises WriteError."""
    columns = {
        "path": pa.array(list(content.names), pa.large_binary()),
        "key": pa.array(list(content.keys), pa.large_binary()),
        "start": pa.array(content.starts, pa.int64()),
        "bytes": pa.array(content.sizes, pa.int64()),
        "crc32c": pa.array(content.crcs, pa.uint32()),
        "height": pa.array(content.heights, pa.int32()),
        "width": pa.array(content.widths, pa.int32()),
        "channels": pa.array(content.channels, pa.int32()),
        "codec": pa.array(list(content.codecs), pa.string()),
    }
    if content.labels is not None:
        columns["label"] = pa.array(content.labels, pa.int64())
    archive = content.archive
    facts = {
        "name": os.fsdecode(archive.name),
        "size_bytes": archive.size_bytes,
        "mtime_ns": archive.mtime_ns,
        "version": archive.version,
    }
    metadata = {b"penstock.sidecar": str(VERSION).encode(), _ARCHIVE: json.dumps(facts).encode()}
    batch = pa.record_batch(columns).replace_schema_metadata(metadata)
    write_whole(path, lambda temp: write_batch(temp, batch))
    return sidecar_etag(path)


def read_tar_sidecar(path: bytes, *, etag: str) -> TarSidecar:
    """Map a sidecar; see `read_sidecar`."""
    batch = sidecar_batch(path, _COLUMNS, etag=etag)
    try:
        return _content(batch)
    except BROKEN as error:
        raise torn(path, error) from error


def _content(batch: Any) -> TarSidecar:
    facts = json.loads(batch.schema.metadata[_ARCHIVE])
    archive = Entry(
        name=os.fsencode(facts["name"]),
        size_bytes=int(facts["size_bytes"]),
        mtime_ns=int(facts["mtime_ns"]),
        version=str(facts["version"]),
    )
    check_names([archive.name])
    starts, sizes = batch.column("start").to_numpy(), batch.column("bytes").to_numpy()
    check_rows(sizes, batch.column("height").to_numpy(), batch.column("width").to_numpy())
    # In this order: a sum of two may pass 2^63.
    if not (
        len(starts)
        and starts.min() >= 0
        and starts.max() <= archive.size_bytes < 2**60
        and (starts + sizes).max() <= archive.size_bytes
    ):
        raise ValueError("its offsets lead out of the archive")
    return TarSidecar(
        archive=archive,
        names=batch.column("path").to_pylist(),
        keys=batch.column("key").to_pylist(),
        starts=starts,
        sizes=sizes,
        crcs=batch.column("crc32c").to_numpy(),
        heights=batch.column("height").to_numpy(),
        widths=batch.column("width").to_numpy(),
        channels=batch.column("channels").to_numpy(),
        codecs=batch.column("codec").to_pylist(),
        labels=batch.column("label").to_numpy() if "label" in batch.schema.names else None,
    )


def tar_table(sidecar: TarSidecar) -> NDArray[np.int64]:
    """The table of an archive; see penstock.readers.formats.shard.table."""
    return table(
        starts=sidecar.starts,
        ends=sidecar.starts + sidecar.sizes,
        heights=sidecar.heights,
        widths=sidecar.widths,
        labels=sidecar.labels,
        crcs=sidecar.crcs,
    )


class TarShard:
    """An archive, open as a shard. Holds a map and no descriptor; views keep the map alive."""

    is_mapped = True

    def __init__(self, root: bytes, sidecar: TarSidecar) -> None:
        """root: the dataset's folder. Raises IndexChangedError, DatasetError."""
        self._archive, self._names = sidecar.archive, sidecar.names
        archive = sidecar.archive
        self.path = os.path.join(root, archive.name)
        try:
            buffer = map_buffer(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise changed(archive.name, "it is gone") from None
        except ValueError:
            raise changed(archive.name, "it is empty now") from None
        except OSError as error:
            raise unreadable(archive.name, error) from error
        if buffer.size != archive.size_bytes:
            raise changed(archive.name, f"it had {archive.size_bytes} bytes, now {buffer.size}")
        self._data = np.frombuffer(buffer, np.uint8)
        self._address = buffer.address
        self.table = tar_table(sidecar)

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of the map; see OpenShard."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read past the map; see OpenShard."""
        del rows
        fd = _open(self.path, self._archive.name)
        try:
            for start, slot in zip(starts, slots, strict=True):
                wanted = slot[:-1]
                if read_up_to(fd, wanted, start) < len(wanted):
                    raise changed(self._archive.name, f"it ends before byte {start + len(wanted)}")
        except OSError as error:
            raise unreadable(self._archive.name, error) from error
        finally:
            os.close(fd)

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Start reading the pages; see OpenShard."""
        advise_willneed(self._address + starts, self._address + ends)

    def name(self, row: int) -> str:
        """Such as "train-000003.tar/dog.jpg"."""
        return printable(self._archive.name + b"/" + self._names[row])

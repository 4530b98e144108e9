"""Reading a folder's files before they are verified: what can't be an image isn't read whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.readers.fields.sniff import HEAD_BYTES, sniff
from penstock.readers.formats.local_files import changed, read_file, unreadable
from penstock.readers.origin.local import LocalFolder
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.origin.origin import Entry, Origin
    from penstock.readers.types import Encoded

# Of a remote file up to this size looking at its head first costs more than it saves.
_SMALL_BYTES = 2**20


def read_files(origin: Origin, files: Sequence[Entry]) -> list[Encoded | Rejection]:
    """Read whole files, or say why one can't be an image. Remote ones are kept nowhere: where they
    lie in a shard isn't known before they are verified.

    Raises IndexChangedError for a file that changed or vanished since it was listed, DatasetError,
    FetchError.
    """
    if isinstance(origin, RemoteFolder):
        return _read_remote(origin, files)
    if isinstance(origin, LocalFolder):
        return [_read_local(origin, file) for file in files]
    raise TypeError(f"unknown origin {origin!r}")


def _read_remote(origin: RemoteFolder, files: Sequence[Entry]) -> list[Encoded | Rejection]:
    """Over many files at once: of large ones the head is looked at first."""
    first = [f.size_bytes if f.size_bytes <= _SMALL_BYTES else HEAD_BYTES for f in files]
    samples: list[Encoded | Rejection] = []
    for data in origin.read(list(zip(files, first, strict=True))):
        codec = sniff(data[:HEAD_BYTES].tobytes())
        samples.append(codec if isinstance(codec, Rejection) else data)
    large = [
        i
        for i, sample in enumerate(samples)
        if not isinstance(sample, Rejection) and first[i] < files[i].size_bytes
    ]
    whole = origin.read([(files[i], files[i].size_bytes) for i in large]) if large else []
    for i, data in zip(large, whole, strict=True):
        samples[i] = data
    return samples


def _read_local(origin: LocalFolder, file: Entry) -> Encoded | Rejection:
    path = os.path.join(origin.root, file.name)
    try:
        with open(path, "rb", buffering=0) as opened:
            head = opened.read(HEAD_BYTES)
    except FileNotFoundError:
        raise changed(file.name, "it is gone") from None
    except PermissionError as error:
        return Rejection(f"can't be read ({error.strerror})")
    except OSError as error:
        raise unreadable(file.name, error) from error
    if len(head) != min(HEAD_BYTES, file.size_bytes):
        raise changed(file.name, f"it had {file.size_bytes} bytes and has another number")
    codec = sniff(head)
    if isinstance(codec, Rejection):
        return codec
    data = read_file(path, name=file.name, size_bytes=file.size_bytes)
    if file.mtime_ns and os.stat(path).st_mtime_ns != file.mtime_ns:
        raise changed(file.name, "it was written to in the meantime")
    return data

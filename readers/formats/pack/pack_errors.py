"""Report the errors of a pack's shards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cache import CorruptShardError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.byte_source import FileErrors
from penstock.readers.files import BROKEN, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.byte_source import ByteSource

REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class PackErrors(FileErrors):
    """The errors of a pack's shard file."""

    def changed(self, path: bytes, name: bytes, *, had: int, now: int | None) -> Exception:
        """Return the error for a shard that is missing, or has another size."""
        del name
        shown = printable(path)
        if now is None:
            return CorruptShardError(
                f"{shown}: the shard is missing, though the manifest names it. {REMEDY}"
            )
        kind, what = (
            (IndexChangedError, "changed") if now > had else (CorruptShardError, "truncated")
        )
        return kind(f"{shown}: {what}: got {now} bytes, the manifest promises {had}. {REMEDY}")

    def unreadable(self, path: bytes, error: OSError) -> Exception:
        """Return the error for a shard that can't be read."""
        return read_error(printable(path), error)


@contextmanager
def as_shard_errors(source: ByteSource) -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context."""
    try:
        yield
    except BROKEN as error:
        remedy = source.remedy or REMEDY
        raise no_shard(source.shown, error, remedy) from error


def no_shard(shown: str, error: Exception, remedy: str) -> CorruptShardError | ReadError:
    if machine_remedy(error) is not None:
        return read_error(shown, error)
    return CorruptShardError(
        f"{shown}: not a shard that Penstock wrote, or changed since then ({error}). {remedy}"
    )

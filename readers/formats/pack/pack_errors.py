"""Report the errors of a pack's shards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cache import CorruptShardError, IndexChangedError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.byte_source import FileErrors
from penstock.readers.files import BROKEN, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

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
def shard_errors(shown: str, remedy: str = "") -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context. shown:
    its name. remedy: what to do; "" means packing or fetching it again."""
    try:
        yield
    except BROKEN as error:
        if machine_remedy(error) is not None:
            raise read_error(shown, error) from error
        raise CorruptShardError(
            f"{shown}: not a shard that Penstock wrote, or changed since then ({error}). "
            f"{remedy or REMEDY}"
        ) from error

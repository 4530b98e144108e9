"""Report samples that can't be read."""

from __future__ import annotations

from penstock.cache import CorruptSampleError, IndexChangedError
from penstock.readers.byte_source import REINDEX
from penstock.readers.reading.row_reading import WRONG_CRC
from penstock.readers.types import UNFIT


def corruption(shown: str, sample_id: int, reason: str, *, is_pack: bool) -> Exception:
    """Return the error for a sample that can't be read. shown: the sample, for messages. reason:
    `WRONG_CRC`, or what its file or decoder said. is_pack: the dataset carries its index."""
    if reason == WRONG_CRC and not is_pack:
        return IndexChangedError(
            f"{shown}: its bytes aren't those that were indexed: the file was changed in place, or "
            f"the disk is failing. {REINDEX}"
        )
    if reason == WRONG_CRC:
        why = (
            "its checksum (CRC-32C) is wrong. The shard was changed, or the disk is failing: fetch "
            "or pack that shard again."
        )
    else:
        # Some reasons have their own remedy.
        remedy = "" if reason.endswith(UNFIT) else ". Get that file again, or leave the sample out"
        why = f"{reason}{remedy}; a loader replaces and counts such samples, up to max_bad=."
    return CorruptSampleError(f"{shown}: {why}", sample_id=sample_id)

"""How many threads read, how many batches they read in a turn, and how many they read ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base.limits import usable_cores
from penstock.readers.fields.arrays import array_form, number_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.pipeline.options.native_options import NativeOptions
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.source import Source

# Threads that read ahead. From a mapped pack one thread checks 4 GB/s of warm pages and reads cold
# ones ahead; a second spends a third more CPU time to be no faster. Files and downloads wait, and
# masks are decoded there, so then several work at once.
MAPPED_READ_THREADS = 1
READ_THREADS = 4
# A thread reads a batch; of a remote as many batches as hide its latency, up to so many.
REMOTE_READ_THREADS = 32

# Units are decoded on the reading threads: by as many as there are cores, up to so many; beside
# those that decode images, by two, as there one goes on while the other decodes.
MOST_UNIT_THREADS, UNIT_THREADS_BESIDE = 8, 2

# To read samples of so many bytes is to copy them, whatever holds them: a thread a core, as two do
# twice as much as one (2.8 MB on 2 cores: 2,500 against 1,600), and four no more than one.
LARGE_SAMPLE_BYTES = 2**20

# A thread reads batches of so few bytes several in a turn; more would only hold memory.
TURN_BYTES = 2**20
MOST_IN_A_TURN = 8

# Batches of local data that are read ahead take so many bytes at most, or are two: one that waits
# and one that is read.
AHEAD_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadScale:
    """What batches of a loader take to read. threads: that read; turn: batches that one reads in a
    go; most_ahead: batches that wait or are read at most, but for one that is always read."""

    threads: int
    turn: int
    most_ahead: int

    @classmethod
    def of(
        cls,
        dataset: Source,
        options: NativeOptions,
        *,
        fields: Iterable[str],
        are_slow: bool,
        is_plain: bool,
    ) -> ReadScale:
        """Of the fields that are read. are_slow: some are decoded there, and that takes longer than
        to read them. is_plain: nothing but reading is done with batches: no images, no Map."""
        sample_bytes = sample_bytes_of(dataset, fields)
        most_ahead = max(1, int(AHEAD_BYTES / max(1, sample_bytes * options.sizes.per_rank)))
        contents = dataset.contents
        turn, threads = 1, READ_THREADS
        if dataset.remote_shards is not None:
            threads = REMOTE_READ_THREADS
        elif contents.units is not None or contents.is_encoded:
            most = MOST_UNIT_THREADS if is_plain else UNIT_THREADS_BESIDE
            threads = min(most, options.world.threads(usable_cores()))
            if is_plain:
                turn = _turn(sample_bytes * options.sizes.per_rank)
        elif is_plain and sample_bytes >= LARGE_SAMPLE_BYTES:
            threads = max(2, min(READ_THREADS, options.world.threads(usable_cores())))
        elif not contents.is_file_per_sample and options.read != "pread" and not are_slow:
            threads = MAPPED_READ_THREADS
            # Threads that wait for files had better wait for a batch each.
            mean_bytes = float(contents.shard_bytes.sum()) / max(1, contents.samples)
            if is_plain:
                turn = _turn(mean_bytes * options.sizes.per_rank)
        return cls(threads=threads, turn=turn, most_ahead=most_ahead)


def _turn(batch_bytes: float) -> int:
    return max(1, min(MOST_IN_A_TURN, int(TURN_BYTES / max(1.0, batch_bytes))))


def sample_bytes_of(dataset: Source, fields: Iterable[str]) -> float:
    """Bytes of memory that a sample takes once it is read: as the schema says where arrays have one
    shape, and for what else is read what the files hold beside those."""
    contents = dataset.contents
    schema, fields = dataset.schema, [*fields]
    known = {name: _dense_bytes(type) for name, type in schema.items()}
    read = float(sum(known.get(name) or 0 for name in fields))
    if all(known.get(name) is not None for name in fields if name in schema):
        return read
    stored = float(contents.shard_bytes.sum()) / max(1, contents.samples)
    return read + max(0.0, stored - sum(size or 0 for size in known.values()))


def _dense_bytes(type: FieldType) -> int | None:
    """Bytes of a sample where all have the same."""
    number, form = number_dtype(type), array_form(type)
    if number is not None:
        return number.itemsize
    if form is None or form.is_ragged:
        return None
    return math.prod(form.fixed_shape) * form.dtype.itemsize

"""Hold weights of samples: how often each sample is expected in an epoch. Pure, except for files.

Counts are kept as integers, multiples of 2^-30: so the slots of a sample follow exactly from their
cumulative sums, and a whole expected count is delivered exactly. `WeightedPlan` orders the slots.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from penstock.readers.types import Bools, Floats, Ints, Numbers


BALANCED = "balanced"

WeightsOfSamples = str | os.PathLike[str] | Iterable[float]
"""Weights of samples as the user passes them; see `Source.subset`."""

_BITS = 30  # of the fraction of a count
_ONE = 1 << _BITS
_MOST_SAMPLES = 2**32  # of an epoch, so that sums fit into 64 bits
# A search in sums that no processor's cache holds costs 3.3 us a sample of 20 million, and 0.26 us
# from the entry of a table of every 8th to 16th sample.
_LEAST_GUIDED, _SAMPLES_AN_ENTRY = 2**21, 8
_KEPT, _KEPT_ARRAYS = 2, 3


class SampleSlots:
    """The slots of an epoch that each sample owns, given the epoch's offset u in [0, 1).

    With cumulative sums S of expected counts, sample i owns the slots ⌈S_i - u⌉ to ⌈S_(i+1) - u⌉ -
    1, floor or ceil of its count.
    """

    def __init__(self, weights: Floats, samples: int) -> None:
        """weights: in any scale, float64, shape (n,), not all 0. samples: of an epoch."""
        counts = np.rint(weights * (samples / float(weights.sum())) * _ONE).astype(np.int64)
        missing = samples * _ONE - int(counts.sum())
        if missing:  # by rounding; a whole count stays what it is
            places = np.flatnonzero(counts & (_ONE - 1))
            if not len(places):
                places = np.array([np.argmax(counts)])
            changed = counts[places] + np.diff(np.arange(len(places) + 1) * missing // len(places))
            counts[places] = np.maximum(changed, 0)
            counts[np.argmax(counts)] += samples * _ONE - int(counts.sum())
        self._sums = np.concatenate([[0], np.cumsum(counts)])  # in multiples of 2^-30
        self._guide: Ints | None = None
        total = samples * _ONE
        self._shift = (total // max(1, len(weights) // _SAMPLES_AN_ENTRY)).bit_length()
        if len(weights) >= _LEAST_GUIDED:
            starts = np.arange((total >> self._shift) + 2) << self._shift
            self._guide = np.searchsorted(self._sums, starts, side="right") - 1

    @property
    def least_and_most(self) -> tuple[int, int]:
        """The least and the largest number of slots that a sample may own."""
        counts = np.diff(self._sums)
        return int(counts.min()) >> _BITS, -(-int(counts.max()) >> _BITS)

    def before(self, samples: Ints, offset: float) -> Ints:
        """Return the first slot of samples, int64: the number of slots of those before them.

        offset: u. `samples` may contain the number of all samples."""
        return -((_fraction(offset) - self._sums[samples]) >> _BITS)

    def are_filled(self, sizes: Ints) -> Bools:
        """Return whether the samples of each shard are expected at all, shape (shards,)."""
        filled: Bools = np.diff(self._sums[np.concatenate([[0], np.cumsum(sizes)])]) > 0
        return filled

    def owners(self, slots: Ints, offset: float) -> Ints:
        """Return the sample that owns each slot, int64."""
        at = (slots << _BITS) + _fraction(offset)
        if self._guide is None:
            return np.searchsorted(self._sums, at, side="right") - 1
        # The search of all slots at once, between the entries of the guide.
        place = at >> self._shift
        low: Ints = self._guide[place]
        high = self._guide[place + 1] + 1
        while (high - low).max(initial=0) > 1:
            middle = (low + high) >> 1
            is_before = self._sums[middle] <= at
            low = np.where(is_before, middle, low)
            high = np.where(is_before, high, middle)
        return low

    def expanded(
        self, sizes: Ints, units: Sequence[Ints] | None, offset: float = 0.0
    ) -> tuple[Ints, list[Ints] | None]:
        """Return how many slots the samples of each shard own, int64, shape (shards,), and by shard
        how many those of each unit own, without units that own none; None without units."""
        slots = self.before(np.concatenate([[0], np.cumsum(sizes)]), offset)
        if units is None:
            return np.diff(slots), None
        own = np.diff(self.before(np.cumsum(np.concatenate(units)), offset), prepend=0)
        each = np.split(own, np.cumsum([len(rows) for rows in units])[:-1])
        return np.diff(slots), [counts[counts > 0] for counts in each]


def _fraction(offset: float) -> int:
    """Return an offset in multiples of 2^-30."""
    return int(offset * _ONE)


@dataclass(frozen=True, eq=False)
class SampleWeights:
    """Weights of the samples of a source, of which a job may use several, one after another.

    arrays: weights by fingerprint, in any scale, float64, shape (n,), in the order of the samples.
    first: the fingerprint of those with which a new job begins. samples: of an epoch of such a job.
    """

    arrays: Mapping[str, Floats]
    first: str
    samples: int
    _slots: dict[tuple[str, int], SampleSlots] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the weights without what follows from them."""
        return SampleWeights, (self.arrays, self.first, self.samples)

    @classmethod
    def of(cls, weights: Floats) -> SampleWeights:
        """Return weights that are expected counts. Raises ConfigError for too many samples."""
        total = round(float(weights.sum()))
        if total >= _MOST_SAMPLES:
            raise ConfigError(
                f"weights: their sum is {float(weights.sum()):.3g}, the number of samples of an "
                "epoch, wanted less than 2^32. Divide them by a number."
            )
        name = fingerprint_of(weights)
        return cls(arrays={name: weights}, first=name, samples=max(1, total))

    def slots(self, fingerprint: str, samples: int) -> SampleSlots:
        """Return the slots by one array, for epochs of a number of samples. The latest two are
        kept, for all readers."""
        key = fingerprint, samples
        with self._lock:
            found = self._slots.pop(key, None) or SampleSlots(self.arrays[fingerprint], samples)
            self._slots[key] = found
            while len(self._slots) > _KEPT:
                del self._slots[next(iter(self._slots))]
            return found

    @property
    def counts(self) -> Floats:
        """The expected counts of an epoch of a new job, float64, shape (n,)."""
        weights = self.arrays[self.first]
        return weights * (self.samples / float(weights.sum()))

    @property
    def latest(self) -> str:
        """The fingerprint of the array that was added last."""
        return next(reversed([*self.arrays]))

    def with_array(
        self, weights: Floats, *, is_first: bool, keeps: str | None = None
    ) -> SampleWeights:
        """Return the weights with one more array; epochs keep their number of samples. Of the other
        arrays, the latest ones are kept. is_first: a new job begins with the new one. keeps: the
        fingerprint of one that is kept."""
        name = fingerprint_of(weights)
        first = name if is_first else self.first
        others = [each for each in self.arrays if each != name]
        kept = {*others[-_KEPT_ARRAYS:], keeps, first}
        arrays = {each: self.arrays[each] for each in others if each in kept}
        return SampleWeights(arrays={**arrays, name: weights}, first=first, samples=self.samples)

    def take(self, places: Ints) -> SampleWeights:
        """Return the weights of some of the samples, with which a new job begins. Raises
        ConfigError if all of them are 0."""
        return SampleWeights.of(checked_weights(self.counts[places], len(places)))


def joined_weights(each: Sequence[tuple[SampleWeights | None, int]]) -> SampleWeights | None:
    """Return the weights of several sources end to end, each with its number of samples; those of
    a source without any are 1."""
    if all(weights is None for weights, _ in each):
        return None
    parts = [np.ones(count) if weights is None else weights.counts for weights, count in each]
    return SampleWeights.of(np.concatenate(parts))


def fingerprint_of(weights: Floats) -> str:
    """Return the hash of an array, 32 hex digits."""
    digest = hashlib.sha256(f"weights {len(weights)} ".encode())
    digest.update(np.ascontiguousarray(weights).astype("<f8", copy=False).data)
    return digest.hexdigest()[:32]


def checked_weights(weights: object, count: int) -> Floats:
    """Return weights of a number of samples as a new float64 array. Raises ConfigError for another
    number, for what is no number, for negative ones, and if all are 0."""
    try:
        given: Numbers = np.asarray(weights)
    except (RuntimeError, TypeError, ValueError):  # lists of several lengths; a tensor on a GPU
        given = np.empty((), object)
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        raise ConfigError(
            f"weights: got {weights!r:.80}, wanted one number for each sample, the name of a field "
            f'of numbers, "{BALANCED}", or a file of scores (.npy, .csv or .parquet).'
        )
    if len(given) != count:
        raise ConfigError(
            f"weights: got {len(given):,} of them, wanted one for each of the {count:,} samples, "
            "in the order of their ids (in `subset`, in the order of the ids that it got)."
        )
    array = given.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise ConfigError(
            f"weights: got {array[wrong[0]]:g} for the sample at index {int(wrong[0]):,}"
            f"{f' and {len(wrong) - 1:,} more like it' if len(wrong) > 1 else ''}, wanted finite "
            "numbers of 0 or more: how often each sample is expected in an epoch."
        )
    if not array.any():
        raise ConfigError("weights: all are 0, wanted at least one above 0.")
    if not np.isfinite(array.sum()):
        raise ConfigError("weights: their sum is infinite. Divide them by a large number.")
    return array


def balanced_weights(classes: Numbers) -> Floats:
    """Return weights with which each class that occurs is expected equally often, of the sum n.

    classes: of each sample, integers, shape (n,).
    """
    _, number, counts = np.unique(classes, return_inverse=True, return_counts=True)
    return len(classes) / len(counts) / counts[number.reshape(-1)]


_TABLES = (".csv", ".parquet")
_NAMES = ("weight", "weights", "score", "scores")


def is_score_file(name: str) -> bool:
    """Return True for the name of a file that may hold scores."""
    return name.lower().endswith((".npy", *_TABLES))


def read_scores(path: str | os.PathLike[str]) -> tuple[Numbers, Numbers | None]:
    """Read a file of scores, and the ids to which they belong; None: the order of the samples.

    A .npy file holds one array. A .csv or .parquet file has a column "weight" or "score", or only
    one column of numbers; a column "id" has the ids. Raises ConfigError.
    """
    shown = os.fspath(path)
    try:
        import fsspec

        with fsspec.open(shown, "rb") as file:
            data = io.BytesIO(file.read())
        if shown.lower().endswith(".npy"):
            return np.load(data, allow_pickle=False), None
        return _read_table(data, shown)
    except ConfigError:
        raise
    except Exception as error:  # of any file system and any parser
        raise ConfigError(
            f"weights: {shown} can't be read as a file of scores ({error!s:.200}). Wanted a .npy "
            'file of one array, or a .csv or .parquet file with a column "weight".'
        ) from error


def _read_table(data: io.BytesIO, shown: str) -> tuple[Numbers, Numbers | None]:
    import pyarrow as pa

    if shown.lower().endswith(".csv"):
        import pyarrow.csv

        table = pyarrow.csv.read_csv(data)
    else:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(data)
    kinds = (pa.types.is_integer, pa.types.is_floating)
    numbers = [
        column.name
        for column in table.schema
        if column.name != "id" and any(of(column.type) for of in kinds)
    ]
    found = [name for name in numbers if name in _NAMES] or numbers
    if len(found) != 1:
        raise ConfigError(
            f"weights: {shown} has the columns {table.column_names}, of which {numbers or 'none'} "
            'are numbers. Wanted one column "weight" or "score", and if the rows aren\'t in the '
            'order of the samples, a column "id".'
        )
    scores = table[found[0]].to_numpy(zero_copy_only=False)
    ids = table["id"].to_numpy(zero_copy_only=False) if "id" in table.column_names else None
    return scores, ids

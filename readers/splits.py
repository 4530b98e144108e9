"""Choose the samples of a subset, and assign samples to the parts of a split. Pure.

A split is decided by keyed hashes of the seed and the samples, so it is the same in every process
and on every machine, and nothing needs to be stored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import keyed_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.types import Ints, Numbers


LEFT_OUT = -1
"""Stands for a part's number if the shares add up to less than 1 and a sample belongs to the
rest."""

_SAMPLE, _GROUP = 0x5917, 0x5918  # keep these hashes apart from one another and from the order's
_EPSILON = 1e-9


def check_shares(shares: Sequence[float], *, seed: object) -> list[float]:
    """Check the shares of a split and return them, followed by the rest. Raises ConfigError for
    invalid ones, and for a seed that is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigError(f"split: got seed={seed!r}, wanted an integer.")
    if not shares:
        raise ConfigError("split: got no shares, wanted some such as split(0.9, 0.1, seed=0).")
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                f"split: got the share {share!r}, wanted fractions of the samples, above 0 and at "
                "most 1, such as split(0.9, 0.1, seed=0)."
            )
    total = math.fsum(shares)
    if total > 1 + _EPSILON:
        raise ConfigError(f"split: got shares that add up to {total:.6g}, wanted at most 1.")
    rest = 1 - total
    return [*map(float, shares), rest if rest > _EPSILON else 0.0]


def by_sample(ids: Ints, shares: list[float], *, seed: int, classes: Ints | None = None) -> Ints:
    """Return the part of each sample, int64, shape (n,), LEFT_OUT for the rest.

    shares: as `check_shares` returned them. classes: of each sample, so that each part has its
    share of each class; None ignores classes. Every part's size is exact to one sample, or to two
    with classes.
    """
    hashes = keyed_hash(seed, _SAMPLE, ids)
    classes = np.zeros(len(ids), np.int64) if classes is None else classes
    order = np.lexsort((hashes, classes))
    _, counts = np.unique(classes, return_counts=True)
    parts = np.empty(len(ids), np.int64)
    numbers = np.array([*range(len(shares) - 1), LEFT_OUT])
    parts[order] = np.repeat(np.tile(numbers, len(counts)), _deal(counts, shares).ravel())
    return parts


def _deal(counts: Ints, shares: list[float]) -> Ints:
    """Return how many samples of each class go to each part, shape (classes, parts): integers whose
    sums over the classes so far stay within one of the shares."""
    owed = np.zeros(len(shares))
    dealt = np.zeros((len(counts), len(shares)), np.int64)
    share = np.array(shares) / math.fsum(shares)
    for number, count in enumerate(counts.tolist()):
        owed += count * share
        given = np.floor(owed + _EPSILON).clip(0).astype(np.int64)
        while (missing := count - int(given.sum())) != 0:
            # Give to the part that is owed most; take from the one that is owed least.
            step = 1 if missing > 0 else -1
            left = np.where((given > 0) | (step > 0), step * (owed - given), -np.inf)
            given[int(np.argmax(left))] += step
        owed -= given
        dealt[number] = given
    return dealt


def by_group(keys: object, count: int, shares: list[float], *, seed: int) -> Ints:
    """Return the part of each of `count` samples, int64, shape (n,), LEFT_OUT for the rest; samples
    of one key are in one part.

    keys: integers or strings, one per sample. Groups are ordered by their hashes, and each goes to
    the part in which its middle falls, so sizes are exact except for the groups at the borders.
    Raises ConfigError for other keys.
    """
    number, hashes = _groups(keys, count, seed=seed)
    counts = np.bincount(number, minlength=len(hashes))
    if len(hashes) < len(shares) - 1:
        raise ConfigError(
            f"split: by= has {len(hashes)} group{'s' * (len(hashes) != 1)}, which can't fill "
            f"{len(shares) - 1} parts: a group is never divided. Ask for fewer parts."
        )
    # Equal hashes keep the order of their first samples: any order works if it is always the same.
    order = np.argsort(hashes, kind="stable")
    ends = np.cumsum(counts[order])
    middles = (ends - counts[order] / 2) / max(1, int(ends[-1]))
    of_group = np.empty(len(hashes), np.int64)
    of_group[order] = np.searchsorted(np.cumsum(shares)[:-1], middles, side="right")
    if shares[-1] == 0:  # the sum of the shares may be rounded down
        of_group = of_group.clip(0, len(shares) - 2)
    of_group[of_group == len(shares) - 1] = LEFT_OUT
    return of_group[number]


def _groups(keys: object, count: int, *, seed: int) -> tuple[Ints, NDArray[np.uint64]]:
    """Return the group of each sample, int64, shape (n,), and a hash for each group."""
    listed = keys if isinstance(keys, np.ndarray) else [*keys] if _is_list(keys) else [keys]
    if isinstance(listed, list) and len(listed) == count and {*map(type, listed)} <= {str, bytes}:
        return _groups_of_texts(listed, seed)
    array = _array(listed)
    if array.shape == (count,) and array.dtype.kind in "USO":
        texts = array.tolist()
        if {*map(type, texts)} <= {str, bytes}:
            return _groups_of_texts(texts, seed)
    if array.shape != (count,) or array.dtype.kind not in "biu":
        raise ConfigError(
            f"split: by= gave keys of {array.dtype} in shape {array.shape}, wanted an integer "
            f"or a string for each of the {count:,} samples, in the order of their ids."
        )
    groups, number = np.unique(array, return_inverse=True)
    return number.reshape(-1).astype(np.int64), keyed_hash(seed, _GROUP, groups)


def _is_list(keys: object) -> TypeGuard[Iterable[Any]]:
    """Return True for an iterable with a defined order; a mapping would give its keys."""
    return isinstance(keys, Iterable) and not isinstance(keys, str | bytes | Mapping | Set)


def _array(values: object) -> Numbers:
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        return np.asarray(None)


def _groups_of_texts(texts: list[str] | list[bytes], seed: int) -> tuple[Ints, NDArray[np.uint64]]:
    """Number texts with a dict, because an array would give each the length of the longest."""
    known: dict[str | bytes, int] = {}
    number = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
    # Names of files need not be UTF-8.
    names = (t.encode("utf-8", "surrogatepass") if isinstance(t, str) else t for t in known)
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
    return number, keyed_hash(seed, _GROUP, np.frombuffer(digests, "<u8"))


def check_choice(which: object, count: int, *, url: str) -> Numbers:
    """Return a choice of `count` samples as an array of integers or a mask of bools. Raises
    ConfigError."""
    is_sequence = hasattr(which, "__array__") or hasattr(which, "__getitem__")
    listed: Any = [*which] if not is_sequence and isinstance(which, Iterable) else which
    array = _array(listed)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise ConfigError(
            f"subset: got {array.dtype} of shape {array.shape}, wanted sample ids, or a mask of "
            "bools, one for each sample."
        )
    if array.dtype == np.bool_ and len(array) != count:
        raise ConfigError(
            f"subset: got a mask of {len(array):,} bools, and {url} has {count:,} samples: one "
            "each, in the order of ids."
        )
    return array

"""Derive each random number of augmentations from its key, without any state.

A number in [0, 1) is a keyed hash of (seed, epoch, sample id, occurrence, entry of the recipe,
place of the operation, number of the draw). `draw_base` alone makes the part of the key that the
operations of one entry share.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import keyed_hash, splitmix64, splitmix64_tensor, unit, unit_tensor

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from penstock.readers import Floats, Ints


_OCCURRENCE = 0x6F63637572  # keeps these hashes apart from places of operations, times 2^32
_OF_USER = 0x6B657965645F75  # keeps `keyed_uniform` apart from the draws of recipes


def draw_base(
    seed: int,
    epoch: int | Ints,
    ids: Ints,
    *,
    salt: int | NDArray[np.uint64] = 0,
    occurrences: Ints | None = None,
) -> NDArray[np.uint64]:
    """Return the keys of all draws of samples, uint64, shape (n,). No other function computes them.

    epoch: of all samples, or of each. salt: salt of the recipe's entry (`entry_salts`), or of each
    sample's view; 0 adds nothing. occurrences: how many earlier positions of the epoch deliver each
    id; 0 adds nothing, and None means zeros.
    """
    base = keyed_hash(seed, epoch, ids)
    if salt.any() if isinstance(salt, np.ndarray) else salt:
        base = splitmix64(base ^ np.asarray(salt, np.uint64))
    if occurrences is not None and occurrences.any():
        more = splitmix64(splitmix64(base ^ np.uint64(_OCCURRENCE)) ^ occurrences.astype(np.uint64))
        base = np.where(occurrences > 0, more, base)
    return base


def entry_salts(recipes: Any) -> dict[str, int]:
    """Return by field the salt that its entry in a mapping of recipes adds to the key of draws.

    A salt is a stable hash of the field's name, or of the sorted names of a tuple, whose fields
    share their draws. Empty for a list of operations and for a mapping with one entry.
    """
    if not isinstance(recipes, Mapping) or len(recipes) < 2:
        return {}
    salts: dict[str, int] = {}
    for key in recipes:
        names = sorted([key] if isinstance(key, str) else key)
        salts |= dict.fromkeys(names, _salt(names))
    return salts


def view_salts(name: str, views: int, *, salt: int | NDArray[np.uint64] = 0) -> NDArray[np.uint64]:
    """Return the salt of each view of an image, uint64, shape (views,). name: of the views' field.
    salt: of the recipe's entry."""
    own = np.array([_salt([name, view]) for view in range(views)], np.uint64)
    return splitmix64(own ^ np.asarray(salt, np.uint64)) if np.any(salt) else own


def _salt(names: Sequence[str | int]) -> int:
    digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Uniform:
    """The draws in [0, 1) of the operation at one place of a recipe, always the same ones.

    base: of the samples, from `draw_base`, uint64, (n,). index: the operation's place.
    """

    base: NDArray[np.uint64]
    index: int

    def __call__(self, count: int, /) -> Floats:
        """Return the draws 0 to count - 1, float64, shape (count, n)."""
        return self.numbered(range(count))

    def numbered(self, numbers: Sequence[int]) -> Floats:
        """Return the draws of these numbers, shape (numbers, n). Row k is
        unit(keyed_hash(seed, epoch, ids, index * 2^32 + numbers[k])) if salt and occurrence are
        0."""
        keys = np.array([(self.index << 32) + number for number in numbers], np.uint64)[:, None]
        return unit(splitmix64(self.base ^ keys))


@overload
def keyed_uniform(
    ids: torch.Tensor, *, epoch: Any, n: int, seed: int = 0, occurrences: Any = None
) -> torch.Tensor: ...
@overload
def keyed_uniform(
    ids: NDArray[np.integer[Any]] | Sequence[int],
    *,
    epoch: Any,
    n: int,
    seed: int = 0,
    occurrences: Any = None,
) -> Floats: ...
def keyed_uniform(
    ids: Any, *, epoch: Any, n: int, seed: int = 0, occurrences: Any = None
) -> torch.Tensor | Floats:
    """Return n random numbers in [0, 1) for each sample, which depend on nothing but the arguments.

    A sample has the same numbers in any batch, on any rank, in any world and after any restart.
    They are independent of those that the loader's recipe draws with the same seed.

    - ids: of the samples (the field "id" of a batch), integers, shape (k,): an array, a list or a
      tensor on any device. A tensor isn't copied to the CPU.
    - epoch: of all samples, or of each: an integer, or k of them.
    - n: numbers for each sample. The first numbers are the same for any n.
    - seed: any integer.
    - occurrences: how many earlier places of the epoch have each sample, integers, shape (k,), so
      that a repeated sample gets other numbers each time; None: 0 for all.

    Returns float64, shape (k, n): a tensor on the device of ids if they are a tensor, else an
    array. Raises ConfigError for other arguments.
    """
    if not isinstance(n, Integral) or isinstance(n, bool) or n < 0:
        raise ConfigError(f"keyed_uniform: got n={n!r}, wanted a number of draws a sample, ≥ 0.")
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ConfigError(f"keyed_uniform: got seed={seed!r}, wanted an integer.")
    torch = sys.modules.get("torch")  # a tensor exists only if it is loaded
    if torch is not None and isinstance(ids, torch.Tensor):
        return _uniform_tensor(ids, epoch=epoch, n=int(n), seed=int(seed), occurrences=occurrences)
    keys = _whole_numbers("ids", ids)
    epochs = _whole_numbers("epoch", epoch, count=len(keys))
    again = None
    if occurrences is not None:
        again = np.broadcast_to(
            _whole_numbers("occurrences", occurrences, count=len(keys)), keys.shape
        )
    base = draw_base(int(seed), epochs, keys, salt=_OF_USER, occurrences=again)
    return np.ascontiguousarray(Uniform(base, 0)(int(n)).T)


def _whole_numbers(name: str, values: Any, *, count: int | None = None) -> Ints:
    """Return an argument of `keyed_uniform` as int64, shape (k,). count: k, or also one number for
    all. Raises ConfigError for anything else."""
    array = np.asarray(values)
    if not array.size and array.dtype.kind == "f":  # an empty list
        array = array.astype(np.int64)
    _check_numbers(name, array, is_whole=array.dtype.kind in "iu", count=count)
    return array.astype(np.int64)


def _check_numbers(name: str, values: Any, *, is_whole: bool, count: int | None) -> None:
    """Raise ConfigError unless an array or a tensor has the shape that `_whole_numbers` wants."""
    fits = values.ndim == 1 and count in (None, len(values))
    if not is_whole or not (fits or (count is not None and values.ndim == 0)):
        wanted = "of shape (samples,)" if count is None else f"one, or {count} of them"
        raise ConfigError(
            f"keyed_uniform: got {name} of {values.dtype} and shape {tuple(values.shape)}, wanted "
            f"integers, {wanted}."
        )


def _uniform_tensor(
    ids: torch.Tensor, *, epoch: Any, n: int, seed: int, occurrences: Any
) -> torch.Tensor:
    """Return the numbers of `keyed_uniform` as a tensor, computed on the device of the ids."""
    import torch

    def numbers(name: str, values: Any, count: int | None) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):  # a number or an array on the CPU
            checked = _whole_numbers(name, values, count=count)
            return torch.from_numpy(np.array(checked)).to(ids.device, non_blocking=True)
        is_other = values.is_floating_point() or values.is_complex() or values.dtype == torch.bool
        _check_numbers(name, values, is_whole=not is_other, count=count)
        return values.to(ids.device, torch.int64, non_blocking=True)

    keys = numbers("ids", ids, None)
    if isinstance(epoch, Integral) and not isinstance(epoch, bool):
        base = splitmix64_tensor(keys ^ _signed(keyed_hash(seed, int(epoch))))
    else:
        first = splitmix64_tensor(numbers("epoch", epoch, len(keys)) ^ _signed(keyed_hash(seed)))
        base = splitmix64_tensor(first ^ keys)
    base = splitmix64_tensor(base ^ _OF_USER)
    if occurrences is not None:
        before = numbers("occurrences", occurrences, len(keys))
        again = splitmix64_tensor(splitmix64_tensor(base ^ _OCCURRENCE) ^ before)
        base = torch.where(before > 0, again, base)
    draws = torch.arange(n, device=ids.device)
    return unit_tensor(splitmix64_tensor(base[:, None] ^ draws))


def _signed(key: NDArray[np.uint64]) -> int:
    return int(key.astype(np.int64))

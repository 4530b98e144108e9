"""Compute keyed hashes: random numbers that depend on keys instead of a generator's history.

A draw is `unit(keyed_hash(seed, epoch, sample, number))`: the same on every rank and thread and in
any order, with no state to save. The order and the augmentation draws both come from here.

The mixer is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants as in Vigna's public-domain splitmix64.c). It passes BigCrush, it is a
bijection of 64 bits (keys that differ in the last place never collide), and it is nine numpy
operations, where a Philox generator for each sample would cost microseconds. Not for secrets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
# The same as numpy's scalars, which take longer to make than a small array takes to be shifted.
_ARRAY_GAMMA, _ARRAY_LAST_SHIFT = np.uint64(_GAMMA), np.uint64(_LAST_SHIFT)
_ARRAY_STEPS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in _STEPS)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of splitmix64 from state x: elementwise, a bijection of 64 bits.

    x: uint64, any shape (0-d too). Returns a new array of that shape. The generator seeded with x
    continues with splitmix64(x + GAMMA), splitmix64(x + 2 GAMMA), … for GAMMA = 0x9E3779B97F4A7C15.
    """
    z = np.asarray(x, dtype=np.uint64)
    # Ufuncs with out= wrap silently and keep 0-d arrays arrays; numpy's scalars would warn.
    z = np.add(z, _ARRAY_GAMMA, out=np.empty_like(z))
    shifted = np.empty_like(z)
    for shift, factor in _ARRAY_STEPS:
        np.right_shift(z, shift, out=shifted)
        np.bitwise_xor(z, shifted, out=z)
        np.multiply(z, factor, out=z)
    np.right_shift(z, _ARRAY_LAST_SHIFT, out=shifted)
    return np.bitwise_xor(z, shifted, out=z)


def splitmix64_tensor(x: torch.Tensor) -> torch.Tensor:
    """Return `splitmix64` of a tensor, on its device. x: int64, the bits of the states."""
    z = x + _signed(_GAMMA)
    for shift, factor in _STEPS:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, _LAST_SHIFT)


def keyed_hash(*keys: int | NDArray[Any]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of the keys in their order; arrays broadcast against each other.

    keys: at least one. Python ints of any size, or arrays of integers. Ints from -2^63 to 2^64-1
    and array elements count modulo 2^64, so -1 and np.int64(-1) are one key (and so is 2^64-1);
    ints beyond are hashed down to 64 bits first. Returns uint64 of the keys' common shape, 0-d if
    all are ints.

    The chain is keyed_hash(a, …, y, z) == splitmix64(keyed_hash(a, …, y) ^ z), from
    keyed_hash(a) == splitmix64(a): order and number of keys matter, a common prefix can be hashed
    once, and for one prefix different last keys never collide.

    Raises ConfigError for no keys and for keys that aren't integers.
    """
    if not keys:
        raise ConfigError("keyed_hash: got no keys, wanted at least one integer.")
    state: int | NDArray[np.uint64] = 0
    for key in keys:
        number = _as_uint64(key)
        if isinstance(state, int) and isinstance(number, int):
            state = _splitmix64_int(state ^ number)  # a scalar prefix: no array until one is needed
        else:
            state = splitmix64(np.bitwise_xor(_array(state), _array(number)))
    return _array(state)


def unit(h: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map hashes to float64 in [0, 1) by their top 53 bits: each k / 2^53 is equally likely."""
    top = np.right_shift(np.asarray(h, dtype=np.uint64), np.uint64(11))
    return np.asarray(np.multiply(top.astype(np.float64), 2.0**-53))


def unit_tensor(h: torch.Tensor) -> torch.Tensor:
    """Return `unit` of a tensor, on its device. h: int64, the bits of the hashes."""
    return _shifted(h, 11).double() * 2.0**-53


def _shifted(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift the 64 bits of numbers to the right, with zeros from the left."""
    return (x >> count) & (_MASK >> count)


def _signed(bits: int) -> int:
    """Return the number whose two's complement has these 64 bits."""
    return bits - (bits >> 63 << 64)


def _splitmix64_int(x: int) -> int:
    z = (x + _GAMMA) & _MASK
    for shift, factor in _STEPS:
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return z ^ (z >> _LAST_SHIFT)


def _as_uint64(key: object) -> int | NDArray[np.uint64]:
    """Convert a key to an int in [0, 2^64) or a uint64 array; negative values become their two's
    complement."""
    if isinstance(key, int):
        return key & _MASK if -(2**63) <= key <= _MASK else _fold(key)
    array = np.asarray(key)
    if array.dtype.kind not in "iub":
        raise ConfigError(
            f"keyed_hash: got a key of type {type(key).__name__} ({array.dtype}), wanted integers. "
            "Convert it, or pass an integer that identifies it."
        )
    return array.astype(np.uint64)


def _fold(key: int) -> int:
    """Hash the 64-bit limbs of a wide int (two's complement, low first) in turn, to 64 bits."""
    state = 0
    while True:
        state = _splitmix64_int(state ^ (key & _MASK))
        key >>= 64
        if key in (0, -1):
            return _splitmix64_int(state ^ (key & _MASK))


def _array(value: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.asarray(value, dtype=np.uint64)

"""CRC-32C of bytes whose parts were summed apart: arithmetic on polynomials over GF(2).

A CRC is a remainder modulo a polynomial; to put n bytes behind some is to multiply their remainder
by x to the power of 8 n. Bits are in the CRC's own order: x to the power of 0 is the highest one.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31


def joined_crc(first: int, second: int, *, second_bytes: int) -> int:
    """The CRC-32C of some bytes and `second_bytes` behind them, by that of each."""
    return _product(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=256)
def _shift(count: int) -> int:
    """x to the power of 8 count."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """a times b, modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product

"""Parse and format sizes and rates as people write them, such as "1.5TB" and "100Gb/s"."""

from __future__ import annotations

import re

from penstock.cache.errors import ConfigError

_UNITS = {"": 1, "b": 1, **{u + "b": 1000**i for i, u in enumerate("kmgtp", 1)}}
_UNITS |= {u + "ib": 1024**i for i, u in enumerate("kmgtp", 1)}
_MOST = 2**63  # the limit of SQLite's and the kernel's integers
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, *, what: str = "size", least: int = 1) -> int:
    """Return the bytes of a size: an int (bytes), or a text such as "64MiB" or "1.5TB".

    KiB to TiB are powers of 1024, kB to TB powers of 1000. what: the argument's name in the error.
    least: 0 allows no bytes. Raises ConfigError for anything else.
    """
    number, why = -1.0, ""
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str) and (match := _PATTERN.fullmatch(size)):
        factor = _UNITS.get(match[2].lower())
        if factor is None:
            why = f" ({match[2]!r} is no unit, wanted B, kB, MB, GB, TB, KiB, MiB, GiB or TiB)"
        elif factor == 1 and "." in match[1]:
            why = " (a fraction of a byte: is the unit missing?)"
        else:
            number = float(match[1]) * factor
    if not least <= number < _MOST:
        raise ConfigError(
            f"{what}: got {size!r}{why}, wanted a positive number of bytes such as 67108864, "
            '"64MiB" or "1.5TB".'
        )
    return int(number)


_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*((?:[kKMGTP]i?)?)(b|bit|B)(?:/s|ps)\s*")


def parse_rate(rate: str, *, what: str = "rate") -> float:
    """Return the bytes a second of a rate in bytes, "12.5GB/s", or in bits, "100Gb/s".

    what: the argument's name, for the error. Raises ConfigError for anything else, and for 0.
    """
    match = _RATE.fullmatch(rate)
    number = float(match[1]) * _UNITS[f"{match[2].lower()}b"] if match else 0.0
    if not match or not number:
        raise ConfigError(
            f'{what}: got {rate!r}, wanted bytes or bits a second such as "12.5GB/s", "800MiB/s" '
            'or "100Gb/s" (bits).'
        )
    return number if match[3] == "B" else number / 8


def format_size(size_bytes: float) -> str:
    """Format a size in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024 or unit == "TiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")

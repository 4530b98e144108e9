"""Data types and fill values of Zarr arrays, versions 2 and 3.

Source: the two specifications, and the extension types that zarr-python 3.1 writes. What can't be
a tensor is refused by name: NotImplementedError, with the reason. Damage is a ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

NUMBERS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""What a tensor can be made of, by numpy's name, which is version 3's name too."""

_V2 = re.compile(r"([<>|=]?)([biufcmMOSUV])(\d*)(?:\[(\d{0,9})([a-zA-Zμ]{1,7})\])?")
_TIMES = {"M": "datetime64", "m": "timedelta64"}
_V3_TIMES = {"numpy.datetime64": "datetime64", "numpy.timedelta64": "timedelta64"}
_TEXTS = {"string", "variable_length_utf8", "fixed_length_utf32"}
_RAW = {"bytes", "variable_length_bytes", "null_terminated_bytes", "raw_bytes"}
_KINDS = {"S": "byte strings", "U": "texts", "V": "raw bytes"}
_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
_NOT_A_TIME = -(2**63)
_HEX = re.compile(r"0x[0-9a-fA-F]{4,16}")
_MAX_TEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DataType:
    """The numbers of an array. stored: dtype in its chunks, of that byte order; in memory they are
    of the machine's. unit: of points or lengths of time, such as "datetime64[ns]", which are handed
    out as int64, how many units it is; else None."""

    stored: np.dtype[Any]
    unit: str | None = None

    @property
    def native(self) -> np.dtype[Any]:
        """Of what is handed out."""
        return self.stored.newbyteorder("=")


def v2_data_type(told: object) -> DataType:
    """A dtype of version 2. Raises ValueError, NotImplementedError."""
    if isinstance(told, list):
        raise NotImplementedError("records of named fields (a structured dtype) can't be a tensor")
    match = _V2.fullmatch(told) if isinstance(told, str) else None
    if match is None:
        raise ValueError(f"its dtype is {_short(told)}")
    order, kind, size, scale, unit = match.groups()
    if kind == "O":
        raise NotImplementedError(
            "Python objects or texts of any length (dtype object) can't be a tensor"
        )
    if kind in _KINDS:
        raise NotImplementedError(f"{_KINDS[kind]} (dtype {told!r}) can't be a tensor")
    if kind in _TIMES:
        if size != "8":
            raise ValueError(f"its dtype is {told!r}")
        return _time(_TIMES[kind], unit or "generic", scale or "1", ">" if order == ">" else "<")
    if unit is not None or not size:
        raise ValueError(f"its dtype is {told!r}")
    try:
        dtype = np.dtype(f"{order.replace('|', '') or '='}{kind}{size}")
    except TypeError:
        raise ValueError(f"its dtype is {told!r}") from None
    return _number(dtype, str(told))


def v3_data_type(told: object) -> DataType:
    """A data type of version 3, of the machine's byte order: the codec `bytes` says the stored one.

    Raises ValueError, NotImplementedError.
    """
    name: object = told
    configuration: dict[str, Any] = {}
    if isinstance(told, dict):
        name, configuration = told.get("name"), told.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"its data_type is {_short(told)}")
    if name in NUMBERS:
        return DataType(stored=np.dtype(name))
    if name in _V3_TIMES:
        unit, scale = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(scale) is not int:
            raise ValueError(f"its data_type is {_short(told)}")
        return _time(_V3_TIMES[name], unit, str(scale), "=")
    if name in _TEXTS:
        raise NotImplementedError(f"texts (data type {name!r}) can't be a tensor")
    if name in _RAW or re.fullmatch(r"r\d+", name):
        raise NotImplementedError(f"raw bytes (data type {name!r}) can't be a tensor")
    if name in ("structured", "struct"):
        raise NotImplementedError(f"records of named fields (data type {name!r}) can't be a tensor")
    raise NotImplementedError(f"numbers of data type {_short(name)} are none of numpy's")


def fill_value(told: object, type: DataType) -> np.generic[Any]:
    """What a missing chunk holds, of the type that is handed out; zero where nothing is told.

    Raises ValueError.
    """
    dtype = type.native
    if told is None:
        return _scalar(0, dtype)
    if type.unit is not None:
        return _integer(_NOT_A_TIME if told == "NaT" else told, dtype)
    if dtype.kind == "b":
        if told in (0, 1, False, True) and not isinstance(told, str):
            return np.bool_(told)
    elif dtype.kind in "iu":
        return _integer(told, dtype)
    elif dtype.kind == "f":
        return _float(told, dtype)
    elif dtype.kind == "c":
        half = np.dtype(f"f{dtype.itemsize // 2}")
        pair = told if isinstance(told, list) else [told, 0]
        if len(pair) == 2:
            parts = np.array([_float(part, half) for part in pair], half)
            return _scalar(parts.view(dtype)[0], dtype)
    raise _wrong_fill(told, dtype)


def _scalar(value: Any, dtype: np.dtype[Any]) -> np.generic[Any]:
    return cast("np.generic[Any]", np.array(value, dtype)[()])


def _integer(told: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = told
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_fill(told, dtype)
    info = np.iinfo(dtype)
    if not info.min <= value <= info.max:
        raise _wrong_fill(told, dtype)
    return _scalar(value, dtype)


def _float(told: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = told
    if isinstance(value, str):
        if value in _FLOATS:
            value = _FLOATS[value]
        elif _HEX.fullmatch(value) and len(value) == 2 + 2 * dtype.itemsize:
            bits = np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))
            return _scalar(bits.astype(dtype)[0], dtype)
        elif len(value) <= _MAX_TEXT:
            try:
                value = float(value)
            except ValueError:
                raise _wrong_fill(told, dtype) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_fill(told, dtype)
    try:
        with np.errstate(over="ignore"):
            return _scalar(float(value), dtype)
    except OverflowError:
        raise _wrong_fill(told, dtype) from None


def _number(dtype: np.dtype[Any], told: str) -> DataType:
    if dtype.name not in NUMBERS:
        raise NotImplementedError(f"numbers of dtype {told!r} can't be a tensor")
    return DataType(stored=dtype)


def _time(name: str, unit: str, scale: str, order: str) -> DataType:
    try:
        np.dtype(f"{name}[{scale}{unit.replace('μ', 'u')}]")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its unit of time is {_short(scale + unit)}") from None
    factor = "" if scale == "1" else scale
    return DataType(stored=np.dtype(f"{order}i8"), unit=f"{name}[{factor}{unit}]")


def _wrong_fill(told: object, dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"its fill value is {_short(told)}, which {dtype.name} can't hold")


def _short(value: object) -> str:
    return repr(value)[:80]

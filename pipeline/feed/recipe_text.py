"""A recipe as a text that is the same in all processes of a job, so that ranks can compare it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def recipe_text(value: object) -> str:
    """What operations are made of: their names and arguments; of a user's own functions and objects
    only what they are called, as anything else may differ between processes."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic):  # float64 is a float, and float32 isn't
        value = value.item()
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array({value.dtype}, {value.shape}, {digest[:16]})"
    if is_dataclass(value) and not isinstance(value, type):
        told = ", ".join(
            f"{one.name}={recipe_text(getattr(value, one.name))}" for one in _of(value)
        )
        return f"{type(value).__name__}({told})"
    if isinstance(value, Mapping):
        told = ", ".join(f"{recipe_text(key)}: {recipe_text(one)}" for key, one in value.items())
        return f"{{{told}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(recipe_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(recipe_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _of(value: Any) -> Any:
    return (one for one in fields(value) if one.compare)

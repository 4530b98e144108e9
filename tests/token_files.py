"""Write files of tokens: flat ones, and Megatron's, byte by byte."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def draw_documents(
    count: int, *, seed: int = 0, mean: float = 4.0, end: int = 50_000
) -> list[NDArray[np.int64]]:
    """Return documents of very different lengths, some empty."""
    rng = np.random.default_rng(seed)
    lengths = [0 if i % 17 == 3 else int(rng.lognormal(mean, 1.2)) for i in range(count)]
    return [rng.integers(0, end, length) for length in lengths]


def write_megatron(
    stem: Path,
    documents: Sequence[NDArray[Any]],
    *,
    dtype: str = "uint16",
    sentences: int = 1,
    modes: bool = False,
) -> None:
    """Write a .bin and its .idx. sentences: into which each document is cut."""
    parts = [np.array_split(each, sentences) for each in documents]
    flat = [part for some in parts for part in some]
    np.concatenate([*flat, np.empty(0)]).astype(dtype).tofile(f"{stem}.bin")
    sizes = np.array([len(part) for part in flat], "<i4")
    ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
    borders = np.arange(len(documents) + 1, dtype="<i8") * sentences
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sizes), len(borders))
    rest = [sizes, (ends - sizes * np.dtype(dtype).itemsize).astype("<i8"), borders]
    rest += [np.zeros(len(sizes), np.int8)] if modes else []
    with open(f"{stem}.idx", "wb") as file:
        file.write(head + b"".join(each.tobytes() for each in rest))

"""Functions for Maps that worker processes can import."""

from __future__ import annotations

import io
import os
import signal
import wave
from typing import Any

import numpy as np

from penstock.cache import BadSampleError


def tokens(text: str) -> list[int]:
    return list(text.encode())


def tokens_of_all(texts: list[str]) -> list[list[int]]:
    return [list(text.encode()) for text in texts]


def jitter(values: Any, number: Any, *, rng: np.random.Generator) -> tuple[Any, str]:
    noise = rng.standard_normal(values.shape).astype(np.float32)
    return values + noise, f"{number}-{rng.integers(1 << 40)}"


def jitter_all(values: Any, rngs: list[np.random.Generator]) -> Any:
    noise = [rng.standard_normal(values.shape[1:]) for rng in rngs]
    return values + np.stack(noise).astype(np.float32)


def odd_is_bad(number: Any) -> Any:
    if number % 2:
        raise BadSampleError(f"{number} is odd")
    return number


def odd_is_bad_of_all(numbers: Any) -> Any:
    for number in numbers.tolist():
        odd_is_bad(number)
    return numbers


def fail_at_seven(number: Any) -> Any:
    if number == 7:
        raise KeyError("seven")
    return number


def killed_at_seven(number: Any) -> Any:
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


class UnsendableError(Exception):
    """Pickles, but can't be made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_unsendably(number: Any) -> Any:
    raise UnsendableError(1, int(number))


def write_into(values: Any) -> Any:
    values += 1
    return values


_BUFFER = np.zeros(4, np.float32)


def reuse(values: Any) -> Any:
    """Returns the same memory each time, as code that saves allocations does."""
    _BUFFER[:] = values
    return _BUFFER


def wait_for_ever(number: Any) -> Any:
    signal.pause()
    return number


def draw(number: Any, sample_id: Any, *, rng: np.random.Generator) -> tuple[Any, str]:
    values = np.asarray([number, sample_id, 0], np.float32)
    values[2] = rng.random()
    return values, f"{sample_id}:{rng.integers(1000)}"


def third_is_bad(sample_id: Any) -> int:
    if sample_id % 3 == 0:
        raise BadSampleError("it is a third")
    return int(sample_id)


def sometimes_bad(sample_id: Any, *, rng: np.random.Generator) -> int:
    if rng.random() < 0.2:
        raise BadSampleError("unlucky")
    return int(sample_id)


def swap_classes(mask: Any) -> Any:
    return np.where(mask < 3, mask + 100, mask).astype(np.uint8)


def longer(vector: Any) -> Any:
    return np.append(vector, np.float32(-1))


def box_of_classes(mask: Any) -> Any:
    """Around class 3, as x, y, width, height."""
    rows, columns = np.nonzero(mask == 3)
    width, height = np.ptp(columns) + 1, np.ptp(rows) + 1
    return np.array([[columns.min(), rows.min(), width, height]], np.float32)


def frames(sound: bytes) -> Any:
    with wave.open(io.BytesIO(sound)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)

"""States of the three generators that samplers and datasets draw from, as bytes and as text."""

from __future__ import annotations

import base64
import random
import zlib
from typing import Any

import numpy as np
import torch

from penstock.cache.errors import ResumeError

_WORDS = 624  # of a Mersenne twister's state; its place among them follows
NAMES = {
    "rng": "torch's default generator",
    "python_rng": "python's `random`",
    "numpy_rng": "numpy's global generator",
}


def freeze(state: torch.Tensor) -> str:
    """A generator's state (uint8, shape (5056,), every other four bytes zeros) as text."""
    return _text(zlib.compress(state.numpy().tobytes()))


def thaw(text: str) -> torch.Tensor:
    """The state behind `freeze`. Raises ResumeError."""
    size = len(torch.get_rng_state())
    try:
        raw = zlib.decompressobj().decompress(_raw(text), size + 1)
    except zlib.error as error:
        raise ResumeError(f"State is damaged: a generator's state ({error}).") from error
    if len(raw) != size:
        raise ResumeError("State is damaged: a generator's state has another length.")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _raw(text: str) -> bytearray:
    try:
        return bytearray(base64.b64decode(text, validate=True))
    except (ValueError, TypeError) as error:
        raise ResumeError(
            f"State is damaged: a generator's state isn't base64 ({error})."
        ) from error


def _twister(text: str) -> tuple[Any, int]:
    raw = _raw(text)
    words = np.frombuffer(raw[: len(raw) // 4 * 4], np.uint32)
    if len(raw) != 4 * (_WORDS + 1) or words[-1] > _WORDS:
        raise ResumeError("State is damaged: a generator's state has another length.")
    return words[:-1], int(words[-1])


class _Torch:
    """torch's default generator."""

    @staticmethod
    def now() -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    @staticmethod
    def put(state: bytes) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    @staticmethod
    def freeze(state: bytes) -> str:
        return freeze(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    @staticmethod
    def thaw(text: str) -> bytes:
        return thaw(text).numpy().tobytes()


class _Python:
    """python's `random`, without what `random.gauss` keeps: indices aren't drawn by it."""

    @staticmethod
    def now() -> Any:
        return random.getstate()

    @staticmethod
    def put(state: Any) -> None:
        random.setstate(state)

    @staticmethod
    def freeze(state: Any) -> str:
        return _text(np.array(state[1], np.uint32).tobytes())

    @staticmethod
    def thaw(text: str) -> Any:
        words, place = _twister(text)
        return (3, (*map(int, words), place), None)


class _Numpy:
    """numpy's global generator; None: the program has put one of another kind in its place."""

    @staticmethod
    def now() -> Any:
        state: Any = np.random.get_state(legacy=False)
        if state["bit_generator"] != "MT19937":
            return None
        return state["state"]["key"].tobytes(), int(state["state"]["pos"])

    @staticmethod
    def put(state: Any) -> None:
        if state is not None:
            np.random.set_state(("MT19937", np.frombuffer(state[0], np.uint32), state[1], 0, 0.0))

    @staticmethod
    def freeze(state: Any) -> str:
        return _text(state[0] + np.uint32(state[1]).tobytes())

    @staticmethod
    def thaw(text: str) -> Any:
        words, place = _twister(text)
        return words.tobytes(), place


KINDS: dict[str, Any] = {"rng": _Torch, "python_rng": _Python, "numpy_rng": _Numpy}


def generator_states() -> dict[str, Any]:
    """The states of all three as they are now, by the names of `NAMES`."""
    return {name: kind.now() for name, kind in KINDS.items()}


def check_frozen(frozen: dict[str, str | None]) -> None:
    """Raise ResumeError for what `freeze` of some generator can't have given."""
    for name, text in frozen.items():
        if text is not None:
            KINDS[name].thaw(text)

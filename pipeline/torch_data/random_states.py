"""Save, restore and watch the three random generators that samplers and datasets draw from.

A sampler may shuffle with python's `random`, numpy's global generator or torch's, all at once or a
little for each batch. Its indices can be drawn again only from the same states. So those are noted
where they turn out to be used; a pass that resumes draws from them, apart from the process's own
generators, which the training loop uses. What can't be repeated is reported: draws for batches that
came between others' draws from the same generator.
"""

from __future__ import annotations

import base64
import random
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from penstock.cache import ResumeError

if TYPE_CHECKING:
    from collections.abc import Callable

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


T = TypeVar("T")


class WatchedDraws:
    """Draws indices one after the other, and knows what they were drawn from.

    seed: of all three generators, or None; frozen: states by the names of `NAMES`, which go before
    it. What is given is drawn from beside the process's own generators, which stay as they are;
    the rest from those, as torch does. noted: states by name, of what turned out to be used.
    mixed: the generator that others drew from in between, if any did: then no state repeats it.
    """

    def __init__(self, *, seed: int | None, frozen: dict[str, str | None]) -> None:
        self._own = {n: KINDS[n].thaw(text) for n, text in frozen.items() if text is not None}
        if seed is not None and not self._own:
            before = {name: kind.now() for name, kind in KINDS.items()}
            random.seed(seed)
            if before["numpy_rng"] is not None:
                np.random.seed([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF])
            torch.default_generator.manual_seed(seed)
            self._own = {name: kind.now() for name, kind in KINDS.items()}
            for name, kind in KINDS.items():
                kind.put(before[name])
        self._left: dict[str, Any] = {}  # as the latest draw left them
        self.noted: dict[str, str] = {}
        self.mixed: str | None = None

    def __call__(self, draw: Callable[[], T]) -> T:
        """What draw() gives."""
        before = {name: kind.now() for name, kind in KINDS.items()}
        for name, state in self._own.items():
            KINDS[name].put(state)
        try:
            return draw()
        finally:
            for name, kind in KINDS.items():
                after = kind.now()
                if name in self._own:
                    self._own[name] = after
                    kind.put(before[name])
                elif after != before[name]:
                    self._drew(name, before[name], after)

    def beside(self, draw: Callable[[], T]) -> T:
        """What draw() gives from the states that the next draw begins with; nothing is noted, and
        all states stay as they are."""
        before = generator_states()
        for name, state in self._own.items():
            KINDS[name].put(state)
        try:
            return draw()
        finally:
            for name, state in before.items():
                KINDS[name].put(state)

    def _drew(self, name: str, before: Any, after: Any) -> None:
        if name not in self.noted:
            self.noted[name] = KINDS[name].freeze(before)
        elif before != self._left[name]:
            self.mixed = name
        self._left[name] = after


class StreamDraws:
    """Random numbers of a stream that is replayed, from the states that it began with.

    frozen: those of a stream that goes on, by name. in_main: others draw from the generators too,
    so one that goes on draws beside them; a worker's are the stream's own.
    """

    def __init__(self, frozen: dict[str, str] | None, *, in_main: bool) -> None:
        self._frozen = frozen or {}
        self._draws = WatchedDraws(seed=None, frozen=dict(self._frozen)) if in_main else None
        if not in_main:
            for name, text in self._frozen.items():
                KINDS[name].put(KINDS[name].thaw(text))
        self._before = {} if in_main else generator_states()
        self._is_watched = in_main

    def __call__(self, draw: Callable[[], T]) -> T:
        """What draw() gives."""
        return self._draws(draw) if self._draws is not None and self._is_watched else draw()

    def ignore(self) -> None:
        """Watch no longer: nothing follows from its draws."""
        self._draws = None

    def noted(self, *, is_over: bool) -> dict[str, str] | None:
        """Frozen states of what was drawn from; to be asked for behind each batch.

        As it was at first, or in a worker's stream that is over as it is now.
        """
        if self._draws is not None:
            if not self._is_watched or is_over:
                return None
            noted = {**self._frozen, **self._draws.noted}
            self._is_watched = bool(noted)  # its first batch drew nothing: nor will the others
            return noted or None
        now = generator_states()
        wanted = now if is_over else self._before
        drawn = [name for name in now if now[name] != self._before[name]]
        return {
            name: KINDS[name].freeze(wanted[name]) for name in drawn if wanted[name] is not None
        } or None

    @property
    def mixed(self) -> str | None:
        """The generator that others drew from in between."""
        return None if self._draws is None else self._draws.mixed

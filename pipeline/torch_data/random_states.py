"""Save, restore and watch the three random generators that samplers and datasets draw from.

A sampler may shuffle with python's `random`, numpy's global generator or torch's, all at once or a
little for each batch. Its indices can be drawn again only from the same states. So the states of
the generators that it uses are recorded, and a pass that resumes draws from them, separately from
the process's own generators, which the training loop uses. Order that can't be repeated is
reported: draws for batches between which other code drew from the same generator.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import random
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from penstock.pipeline.torch_private import numpy_seed

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = 624  # of a Mersenne twister's state; the position among them follows
_TWISTER_BYTES = 4 * (_WORDS + 1)
_numpy: Any = np.random  # its types lack two functions
NAMES = {
    "rng": "torch's default generator",
    "python_rng": "python's `random`",
    "numpy_rng": "numpy's global generator",
}


def freeze(state: torch.Tensor) -> str:
    """Return a generator's state (uint8, shape (5056,), mostly zeros) as text."""
    return _text(zlib.compress(state.numpy().tobytes()))


def thaw(text: str) -> torch.Tensor:
    """Return the state of a `freeze`. Raises ValueError."""
    size = len(torch.get_rng_state())
    try:
        raw = zlib.decompressobj().decompress(_raw(text), size + 1)
    except zlib.error as error:
        raise ValueError(f"a generator's state: {error}") from error
    if len(raw) != size:
        raise ValueError(f"a generator's state has {len(raw)} bytes, wanted {size}")
    return _tensor(raw)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _raw(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))


def _twister(text: str) -> bytes:
    """Return the words and the position of a twister's text. Raises ValueError."""
    raw = bytes(_raw(text))
    if len(raw) != _TWISTER_BYTES or np.frombuffer(raw, np.uint32)[-1] > _WORDS:
        raise ValueError(f"a generator's state of {len(raw)} bytes, or a place beyond them")
    return raw


@functools.cache
def _is_in_memory() -> bool:
    """Return True if numpy keeps the words and the position of a twister one after the other."""
    twister: Any = np.random.MT19937(0)
    return ctypes.string_at(twister.ctypes.state_address, _TWISTER_BYTES) == _state_of(twister)


def _state_of(twister: Any) -> bytes:
    state = twister.state["state"]
    words: bytes = state["key"].tobytes()
    return words + np.uint32(state["pos"]).tobytes()


def _numpy_state() -> bytes | None:
    """Return the words and the position of numpy's global generator; None for another kind.

    numpy's functions return and set a state word by word, in 50 us; a copy takes 1 us.
    """
    twister = _numpy.get_bit_generator()
    if type(twister) is not np.random.MT19937:
        return None
    if not _is_in_memory():
        return _state_of(twister)
    return ctypes.string_at(twister.ctypes.state_address, _TWISTER_BYTES)


def _set_numpy_state(state: bytes | None, *, ahead: float | None = None) -> None:
    """Set the state of numpy's global generator; None changes nothing. ahead: the normal value that
    it drew ahead."""
    if state is None:
        return
    twister = _numpy.get_bit_generator()
    if ahead is None and type(twister) is np.random.MT19937 and _is_in_memory():
        _numpy.set_bit_generator(twister)  # drops a normal value that it drew ahead
        ctypes.memmove(twister.ctypes.state_address, state, _TWISTER_BYTES)
        return
    words, has_ahead = np.frombuffer(state, np.uint32), int(ahead is not None)
    np.random.set_state(("MT19937", words[:-1], int(words[-1]), has_ahead, ahead or 0.0))


def seed_all(key: int) -> None:
    """Seed python's, numpy's and torch's CPU generator. key: 64 bits."""
    random.seed(key)
    if type(_numpy.get_bit_generator()) is np.random.MT19937:  # the program may have replaced it
        np.random.seed([key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF])
    # Not torch.manual_seed, which queues a call for CUDA each time until CUDA is initialised.
    torch.default_generator.manual_seed(key)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed a worker as torch does from its loader's base seed."""
    random.seed(base_seed + worker)
    torch.manual_seed(base_seed + worker)
    np.random.seed(numpy_seed(base_seed, worker))


class MainDraws:
    """The exact states of the three generators, which the training loop draws from.

    restore() must follow: the constructor may move numpy's generator.
    """

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy, self._ahead = _numpy_state(), None
        if self._numpy is not None:
            # Only this shows a value that was drawn ahead; if there is none, it moves the state.
            value = np.random.standard_normal()
            self._ahead = value if _numpy_state() == self._numpy else None

    def restore(self) -> None:
        """Set the three generators to these states."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _set_numpy_state(self._numpy, ahead=self._ahead)


class _Kind(NamedTuple):
    """A kind of generator: returns and sets the state of the process's own, and writes and reads
    the text of a state."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    freeze: Callable[[Any], str]
    thaw: Callable[[str], Any]


# python's state is without the value that `random.gauss` keeps: no index is drawn from it. numpy's
# is None if the program has replaced the generator by another kind.
KINDS = {
    "rng": _Kind(
        get=lambda: torch.get_rng_state().numpy().tobytes(),
        set=lambda state: torch.set_rng_state(_tensor(state)),
        freeze=lambda state: freeze(_tensor(state)),
        thaw=lambda text: thaw(text).numpy().tobytes(),
    ),
    "python_rng": _Kind(
        get=random.getstate,
        set=random.setstate,
        freeze=lambda state: _text(np.array(state[1], np.uint32).tobytes()),
        thaw=lambda text: (3, tuple(np.frombuffer(_twister(text), np.uint32).tolist()), None),
    ),
    "numpy_rng": _Kind(get=_numpy_state, set=_set_numpy_state, freeze=_text, thaw=_twister),
}


def generator_states() -> dict[str, Any]:
    """Return the current states of all three, by the names of `NAMES`."""
    return {name: kind.get() for name, kind in KINDS.items()}


def _set_generators(states: dict[str, Any]) -> None:
    for name, state in states.items():
        KINDS[name].set(state)


def check_frozen(frozen: dict[str, str | None]) -> None:
    """Raise ValueError for texts that `freeze` of a generator can't have written."""
    for name, text in frozen.items():
        if text is not None:
            KINDS[name].thaw(text)


T = TypeVar("T")


class WatchedDraws:
    """Draws indices one after the other, and records the states from which they were drawn.

    seed: of all three generators, or None. frozen: states by the names of `NAMES`, used instead of
    the seed. Draws use these states if they are given, and leave the process's own generators
    unchanged; otherwise they use the process's generators, as torch does. recorded: states by name,
    of the generators that were used. mixed: the generator that other code drew from in between, if
    any; no state repeats it.
    """

    def __init__(self, *, seed: int | None, frozen: dict[str, str | None]) -> None:
        self._own = {n: KINDS[n].thaw(text) for n, text in frozen.items() if text is not None}
        if seed is not None and not self._own:
            before = generator_states()
            seed_all(seed)
            self._own = generator_states()
            _set_generators(before)
        self._left: dict[str, Any] = {}  # states behind the latest draw
        self.recorded: dict[str, str] = {}
        self.mixed: str | None = None

    def __call__(self, draw: Callable[[], T]) -> T:
        """Return draw(), and record what it drew from."""
        before = generator_states()
        _set_generators(self._own)
        try:
            return draw()
        finally:
            for name, kind in KINDS.items():
                after = kind.get()
                if name in self._own:
                    self._own[name] = after
                    kind.set(before[name])
                elif after != before[name]:
                    self._drew(name, before[name], after)

    def _drew(self, name: str, before: Any, after: Any) -> None:
        if name not in self.recorded:
            self.recorded[name] = KINDS[name].freeze(before)
        elif before != self._left[name]:
            self.mixed = name
        self._left[name] = after


class StreamDraws:
    """Random numbers of a stream that can be replayed from the states with which it began.

    frozen: the states of a stream that continues, by name. in_main: other code draws from the
    generators too, so a stream that continues draws from its own states; in a worker, the
    generators belong to the stream.
    """

    def __init__(self, frozen: dict[str, str] | None, *, in_main: bool) -> None:
        self._frozen = frozen or {}
        self._draws = WatchedDraws(seed=None, frozen=dict(self._frozen)) if in_main else None
        if not in_main:
            for name, text in self._frozen.items():
                KINDS[name].set(KINDS[name].thaw(text))
        self._before = {} if in_main else generator_states()
        self._is_watched = in_main

    def __call__(self, draw: Callable[[], T]) -> T:
        """Return draw()."""
        return self._draws(draw) if self._draws is not None and self._is_watched else draw()

    def ignore(self) -> None:
        """Stop watching, because nothing depends on the draws."""
        self._draws = None

    def recorded(self, *, is_over: bool) -> dict[str, str] | None:
        """Return the frozen states from which the stream drew; call it after each batch.

        They are those of its start or, if it is over in a worker, the current ones.
        """
        if self._draws is not None:
            if not self._is_watched or is_over:
                return None
            recorded = {**self._frozen, **self._draws.recorded}
            # If the first batch drew nothing, the others won't either.
            self._is_watched = bool(recorded)
            return recorded or None
        now = generator_states()
        wanted = now if is_over else self._before
        drawn = [name for name in now if now[name] != self._before[name]]
        kept = {name: wanted[name] for name in drawn if wanted[name] is not None}
        return {name: KINDS[name].freeze(state) for name, state in kept.items()} or None

    @property
    def mixed(self) -> str | None:
        """The generator that other code drew from in between, or None."""
        return None if self._draws is None else self._draws.mixed

"""Draws of a user's sampler or dataset, watched so that a resumed pass can repeat them.

A sampler may shuffle with python's `random`, numpy's global generator or torch's, all at once or a
little for each batch. Its indices can be drawn again only from the same states. So those are noted
where they turn out to be used; a pass that goes on from a state draws from them beside the
process's own, which the training loop has. What can't be repeated is named: draws for batches that
came between others' draws from the same generator.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from penstock.pipeline.foreign.generators import KINDS, generator_states

if TYPE_CHECKING:
    from collections.abc import Callable

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

"""Whether a server supports ranges at all, learnt from its answers."""

from __future__ import annotations

from penstock.cache.base.store import RequestError

_RANGES_UNSUPPORTED = 4
"""Whole answers to ranges in a row, with no right one ever, after which a server is believed not
to support ranges at all."""


class RangeSupport:
    """RangeSupport counts whole answers to ranges until a right one comes."""

    def __init__(self) -> None:
        self._was_answered = False
        self._wholes = 0

    def note_range(self) -> None:
        """Note that a range was answered as it should be."""
        self._was_answered = True

    def failure(self) -> RequestError:
        """Make the error for a whole answer: final from a server that never gave a range."""
        self._wholes += 1
        text = "the server answered a range with the whole object"
        if self._was_answered or self._wholes < _RANGES_UNSUPPORTED:
            return RequestError("transient", text)
        return RequestError(
            "refused",
            f"{text}; it doesn't support ranges: serve the files with one that does (nginx)",
        )

"""Large rows of one shape, each gathered by a thread that is free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.reading.movers import SHARED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.reading.movers import Movers
    from penstock.readers.reading.visit import Visit

LARGE_ROW_BYTES = 2**20
"""From so many bytes on a row is worth a call of its own: it takes 20 us more."""


def large_fields(outs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Those fields whose rows are shared out, of what a batch is gathered into."""
    return [
        name
        for name, out in outs.items()
        if len(out) > 1 and out.nbytes >= SHARED_BYTES and out.nbytes // len(out) >= LARGE_ROW_BYTES
    ]


def gather_large(
    visit: Visit, outs: Mapping[str, NDArray[Any]], *, movers: Movers
) -> list[dict[int, str]]:
    """Gather rows that can be had alone, by several threads. Returns what is wrong, for each piece
    of the visit by place in it. Raises what gathering raises."""
    pieces = list(visit.pieces())
    wrong: list[dict[int, str]] = [{} for _ in pieces]
    order = np.arange(len(visit.rows)) if visit.order is None else visit.order
    each = [(piece, row) for piece, (_, a, b) in enumerate(pieces) for row in range(a, b)]

    def gather(one: tuple[str, int, int]) -> None:
        name, piece, row = one
        shard, begin, _ = pieces[piece]
        place, found = int(order[row]), dict[int, str]()
        here = slice(place, place + 1)
        shard.gather(name, visit.rows[row : row + 1], outs[name], here, found)
        if found:
            wrong[piece].setdefault(row - begin, found[0])

    movers.run(gather, [(name, piece, row) for name in outs for piece, row in each])
    return wrong

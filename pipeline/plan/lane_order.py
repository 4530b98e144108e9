"""Which lane has which place in a job's batches: so which rank reads it, and nothing else. Pure.

Orders are decided and written over groups of lanes in a row, so that thousands of nodes have some
choice and a state stays small whatever the number of lanes.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError, ResumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

MOST_GROUPS = 2048
"""Groups of lanes that an order is made of, at most."""

_TEXT = re.compile(r"groups:(\d{1,10}):([A-Za-z0-9+/]*={0,2})", re.ASCII)
_MOST_TEXT = 9000  # characters; 2,048 groups take 5,500


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """The lanes of a job in groups of neighbours, which any lane order keeps together.

    lanes: at least 1. Groups are of equally many, as small as `MOST_GROUPS` allow; where that
    leaves fewer for the last group, it keeps the last place.
    """

    lanes: int

    @property
    def size(self) -> int:
        """Lanes of a group, but for a shorter last one."""
        return -(-self.lanes // MOST_GROUPS)

    def __len__(self) -> int:
        """How many groups there are."""
        return -(-self.lanes // self.size)

    @property
    def movable(self) -> int:
        """Groups that may have any place: those before a shorter last one."""
        return self.lanes // self.size


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The lane at each place of a job's batches: a permutation of 0, 1, 2, ….

    Raises PlanError for what isn't one.
    """

    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.places) != list(range(len(self.places))):
            raise PlanError(
                f"lane order: got {len(self.places)} places that don't hold each lane once."
            )

    @classmethod
    def of_groups(cls, groups: Sequence[int], *, lanes: int) -> LaneOrder:
        """The order that has a group of lanes at each place: a permutation of 0, 1, 2, ….

        Raises PlanError for what isn't one, or where a shorter group isn't last.
        """
        told = LaneGroups(lanes)
        given = np.asarray(groups, dtype=np.int64)
        if sorted(given.tolist()) != list(range(len(told))):
            raise PlanError(
                f"lane order: got {len(given)} groups, wanted each of the {len(told)} groups of "
                f"{lanes} lanes once."
            )
        if told.movable < len(told) and given[-1] != told.movable:
            raise PlanError(f"lane order: the shorter group {told.movable} isn't last.")
        lane = given[:, None] * told.size + np.arange(told.size)
        return cls(tuple(lane.ravel()[:lanes].tolist()))

    @property
    def groups(self) -> Ints:
        """The group of lanes at each place, int64, shape (groups,). Raises PlanError for an order
        that tears some apart."""
        told = LaneGroups(len(self.places))
        places = np.array(self.places, dtype=np.int64)
        groups: Ints = places[:: told.size] // told.size
        lane = groups[:, None] * told.size + np.arange(told.size)
        if not np.array_equal(lane.ravel()[: len(places)], places):
            raise PlanError(
                f"lane order: wanted groups of {told.size} lanes in a row, got one that tears some "
                f"apart. At most {MOST_GROUPS} groups of lanes can be put in another order."
            )
        return groups

    @property
    def text(self) -> str:
        """The order as a short text, at most 9,000 characters for any number of lanes. Raises
        PlanError for an order that isn't one of groups."""
        packed = binascii.b2a_base64(self.groups.astype("<u2").tobytes(), newline=False)
        return f"groups:{len(self.places)}:{packed.decode()}"

    @classmethod
    def parse(cls, text: object, *, lanes: int) -> LaneOrder:
        """Read an order of so many lanes back; ResumeError for what `text` can't have written."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
        if found is None or found[1] != str(lanes):
            raise ResumeError(
                f"lane order: got {_shown(text)}, wanted a text that begins with "
                f"'groups:{lanes}:' and goes on in base64, as a state of this job has it. {_REMEDY}"
            )
        try:
            data = binascii.a2b_base64(found[2], strict_mode=True)
            order = cls.of_groups(np.frombuffer(data, dtype="<u2").tolist(), lanes=lanes)
        except (binascii.Error, ValueError) as error:
            raise ResumeError(f"State is damaged: {error} {_REMEDY}") from None
        if order.text != text:  # bits that say nothing: nobody wrote them
            raise ResumeError(f"State is damaged: lane order {_shown(text)}. {_REMEDY}")
        return order

    @property
    def is_identity(self) -> bool:
        """Whether every lane has its own number's place."""
        return self.places == tuple(range(len(self.places)))

    def lanes_of(self, lanes: int) -> Ints:
        """The lane at each place, int64, shape (lanes,). Raises PlanError for an order of another
        number of lanes."""
        if len(self.places) != lanes:
            raise PlanError(f"lane order: got one of {len(self.places)} lanes, wanted {lanes}.")
        return np.array(self.places, dtype=np.int64)


_REMEDY = "Start from an older checkpoint, or without a state."


def _shown(text: object) -> str:
    if not isinstance(text, str):
        return f"a {type(text).__name__}"
    return repr(text) if len(text) <= 60 else f"{text[:40]!r}… ({len(text)} characters)"


def ordered_slots(
    position: int, count: int, lane_at: Ints, *, low: int, high: int
) -> tuple[Ints, Ints]:
    """Slots [low, high) of the positions [position, position + count) sorted by (place of the lane,
    offset).

    lane_at: the lane at each place, int64, shape (lanes,). Returns their lanes and offsets, int64,
    shape (high - low,). Costs O(high - low), and O(lanes) where some lanes have a sample more.
    """
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    slots = np.arange(low, high, dtype=np.int64)
    if not more:
        place, nth = np.divmod(slots, max(1, each))
    else:
        ends = np.cumsum(each + ((lane_at - start) % lanes < more))
        place = ends.searchsorted(slots, side="right")
        nth = slots - np.where(place > 0, ends[place - 1], 0)
    lane = lane_at[place]
    return lane, nth + turn + (lane < start)


def own_slots(position: int, count: int, lane_at: Ints) -> Ints:
    """The number that each slot of the positions [position, position + count), as `ordered_slots`
    has them, has in the plan's own order, where lane 0 comes first. int64, shape (count,)."""
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    lane, offset = ordered_slots(position, count, lane_at, low=0, high=count)
    numbers = np.arange(lanes, dtype=np.int64)
    rows = each + ((numbers - start) % lanes < more)
    first = np.cumsum(rows) - rows - turn - (numbers < start)
    slots: Ints = offset + first[lane]
    return slots

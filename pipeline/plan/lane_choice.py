"""Which lane order suits what the nodes' caches hold: slots follow the data. Pure, whole numbers.

A place of a batch is read by the node whose ranks have its slots, or by two and more in parts; a
lane there is worth what they hold of it, each by its part. The order that is worth most is taken,
if that gains something over the last one; what is worth as much anywhere stays where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError
from penstock.pipeline.plan.lane_order import LaneGroups, LaneOrder
from penstock.pipeline.plan.matching import best_bins

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

LEAST_GAIN = 0.01
"""Of the bytes that are held, that another order must have where they are read: less is noise (a
shard that one node has finished and its neighbour hasn't), and not worth other sums of floats."""

_ALIKE = 32
"""Lanes that are held but for one part in so many count as held alike, as whole lanes have a few
bytes more or less. By bytes alone a node would keep the largest of its lanes, here and there one,
and each that is torn from its neighbour leaves a shard that lies in both to two nodes."""

_VALUE_BITS = 24  # of the most that a group is worth: what differs by less is alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The order that was chosen, and what it is worth: all as bytes that nodes hold of what they
    read with it.

    held: if every group that a node holds were read by the one that holds most of it. last: with
    the last order. chosen: with `order`.
    """

    order: LaneOrder
    held: int
    last: int
    chosen: int


def choose_lane_order(
    held: NDArray[np.int64], *, nodes: Sequence[int], last: LaneOrder | None, lanes: int
) -> Choice:
    """Choose the order of lanes with which nodes hold the most bytes of what they read.

    held: bytes that each node holds of each group of lanes (`LaneGroups`), whole numbers, shape
    (nodes, groups); what is about as much counts as alike. nodes: how many ranks each has, in the
    order of their ranks; at least 1. last: the order so far, None for the identity; it stays unless
    another one gains `LEAST_GAIN` of what is held. Equal arguments give equal answers on every
    machine. Raises PlanError for what doesn't fit together.
    """
    groups = LaneGroups(lanes)
    _check(held, nodes, len(groups))
    held = held.astype(np.int64, copy=False)
    before = LaneOrder(tuple(range(lanes))) if last is None else last
    at = before.groups if len(before.places) == lanes else _wrong(before, lanes)
    worth = _Worth.of(held, nodes, groups)
    alike = _Worth.of(_alike(held), nodes, groups).value
    value, kind = worth.value, worth.kind
    kind_before = np.empty(len(at), np.int64)  # of the place that a group had
    kind_before[at] = kind
    movable = groups.movable
    stays = value[np.arange(len(at)), kind_before]
    room = np.bincount(kind[:movable], minlength=value.shape[1])
    # What is worth as much elsewhere stays: it counts for less than the least difference in value.
    wished = alike[:movable] * (movable + 1)
    wished[np.arange(movable), kind_before[:movable]] += 1
    taken = kind_before.copy()
    taken[:movable] = best_bins(wished, room)
    goes = value[np.arange(len(at)), taken]
    most = int(worth.most.sum())
    last_sum, sum_ = int(stays.sum()), int(goes.sum())
    is_gain = sum_ > last_sum and sum_ - last_sum >= LEAST_GAIN * most
    order = before
    if is_gain:
        order = LaneOrder.of_groups(_placed(at, kind, taken, movable).tolist(), lanes=lanes)
    scale = worth.bytes_each
    return Choice(
        order=order,
        held=int(most * scale),
        last=int(last_sum * scale),
        chosen=int((sum_ if is_gain else last_sum) * scale),
    )


def _alike(held: Ints) -> Ints:
    """What is held, where nearly all of the largest is as much as that."""
    most = int(held.max())
    return np.where(held >= most - most // _ALIKE, most, held)


def _placed(at: Ints, kind: Ints, taken: Ints, movable: int) -> Ints:
    """The group at each place, where places of a kind are alike: who has one of them keeps it, the
    others fill them in the order of the places that they had."""
    placed = np.full(len(at), -1, dtype=np.int64)
    stays = taken[at] == kind
    placed[stays] = at[stays]
    placed[movable:] = at[movable:]
    free = np.flatnonzero(placed < 0)
    moving = at[~stays]
    free = free[np.argsort(kind[free], kind="stable")]
    placed[free] = moving[np.argsort(taken[moving], kind="stable")]
    return placed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Worth:
    """What groups of lanes are worth at the places of a batch.

    value: of each group at each kind of place, int64, shape (groups, kinds): places that the same
    nodes read by the same parts are of one kind. kind: of each place, int64, shape (groups,). most:
    of each group where all of it were read by who holds most. bytes_each: of a value of 1.
    """

    value: Ints
    kind: Ints
    most: Ints
    bytes_each: float

    @classmethod
    def of(cls, held: Ints, nodes: Sequence[int], groups: LaneGroups) -> _Worth:
        # Slots in units that cut both lanes and ranks: lane x has [x·R, (x + 1)·R), and a rank L.
        ranks, lanes, count = int(sum(nodes)), groups.lanes, len(groups)
        node_end = np.cumsum(np.asarray(nodes, np.int64)) * lanes
        node_begin = node_end - np.asarray(nodes, np.int64) * lanes
        place_end = np.minimum(np.arange(1, count + 1) * groups.size, lanes) * ranks
        place_begin = np.concatenate([[0], place_end[:-1]])
        first = np.searchsorted(node_end, place_begin, side="right")
        end = np.searchsorted(node_begin, place_end, side="left")
        width = groups.size * ranks
        # Sums of value below 2^63: bytes lose what a group's largest holding has beyond that.
        lost_bits = max(0, int(held.max(initial=0)).bit_length() + width.bit_length() - 62)
        parts: dict[tuple[tuple[int, int], ...], int] = {}
        kind = np.empty(count, np.int64)
        columns: list[Ints] = []
        for place in range(count):
            readers = []
            for node in range(int(first[place]), int(end[place])):
                low = max(int(node_begin[node]), int(place_begin[place]))
                high = min(int(node_end[node]), int(place_end[place]))
                readers.append((node, high - low))
            key = tuple(readers)
            if key not in parts:
                parts[key] = len(parts)
                columns.append(sum((held[n] >> lost_bits) * part for n, part in readers))
            kind[place] = parts[key]
        value = np.stack(columns, axis=1)
        most = (held.max(axis=0) >> lost_bits) * width
        more_bits = max(0, int(most.max(initial=0)).bit_length() - _VALUE_BITS)
        bytes_each = 2.0 ** (lost_bits + more_bits) / width
        return cls(
            value=value >> more_bits, kind=kind, most=most >> more_bits, bytes_each=bytes_each
        )


def _check(held: NDArray[np.int64], nodes: Sequence[int], groups: int) -> None:
    if held.shape != (len(nodes), groups) or not len(nodes):
        raise PlanError(
            f"lane order: got held bytes of shape {held.shape}, wanted one row for each of the "
            f"{len(nodes)} nodes and one column for each of the {groups} groups of lanes."
        )
    if held.dtype.kind not in "iu" or int(held.min()) < 0 or int(held.max()) >= 2**62:
        raise PlanError(
            "lane order: wanted held bytes as whole numbers from 0 to 2^62, got "
            f"{held.dtype} from {held.min()} to {held.max()}."
        )
    if min(nodes) < 1:
        raise PlanError(f"lane order: got a node of {min(nodes)} ranks, wanted 1 or more.")


def _wrong(order: LaneOrder, lanes: int) -> Ints:
    raise PlanError(f"lane order: got one of {len(order.places)} lanes, wanted {lanes}.")

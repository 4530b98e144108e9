"""Divide the positions of a mixture's stream among its parts, by exact integer shares. Pure.

The parts are the leaves of a binary tree, balanced by weight. A node divides its first n positions:
the left child gets (n·a + s/2) // s of them, where a of its s shares are the left child's, and the
right child gets the rest. So each position belongs to one part, the count of a part never falls,
and the counts of any range follow from those at its two ends: nothing is as long as the stream.
Rounding errors are at most ½ at each node and shrink on the way down, as no child that is a node
has much more than half of its parent's weight: in trials a count was never 1.5 samples or more from
its share.

(An even interleaving of many sequences. Sampling parts at random would leave errors that grow with
the root of n. Earliest deadline first has errors of ½ too, but needs the whole history, or bursts
when many parts have equal shares. The sum of the shares is at most 2^31, so that all products of
a remainder and a share fit into 63 bits.)
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.types import Floats, Ints, Numbers


SHARE_BITS = 30
"""Integer shares of a mixture add up to about 2 to the power of this."""


def integer_shares(weights: Sequence[float]) -> Ints:
    """Return integer shares in proportion to weights, int64, shape (parts,).

    A part of any positive weight gets at least one share of about 2^30. Raises PlanError unless all
    weights are finite and none is negative, and at least one is positive.
    """
    given = np.asarray(weights, np.float64)
    if not len(given) or not np.isfinite(given).all() or given.min() < 0 or not given.max() > 0:
        raise PlanError(
            f"weights: got {list(weights)!r:.200}, wanted finite numbers of 0 or more, at least "
            "one of them above 0."
        )
    share = given / given.max()  # no overflow in the sum
    shares = np.rint(share / share.sum() * 2**SHARE_BITS).astype(np.int64)
    return np.where(given > 0, np.maximum(shares, 1), 0)


class ShareTree:
    """The division of a stream's first n positions among parts, for any n below 2^62.

    shares: integers, shape (parts,), of a sum below 2^31; a part without shares gets no position.
    owed: fractions of samples that each part lacks at position 0, float64, shape (parts,), from
    `owed_after` of the tree before; the first positions make up for them. most: largest count of
    each part, shape (parts,): the others get what exceeds it. n is at most their sum.
    """

    def __init__(
        self, shares: Ints, *, owed: Floats | None = None, most: Ints | None = None
    ) -> None:
        self.shares = shares
        self.total = int(shares.sum())
        self._owed, self._most = owed, most
        self._order = np.argsort(-shares, kind="stable").astype(np.int64)

    @cached_property
    def _levels(self) -> list[tuple[Ints, Ints, Ints]]:
        """The inner nodes by depth; the children of a node are prefix and suffix of its leaves.

        Each depth has the places of its nodes in the array of node values, those of their left
        children, which the right ones follow, and the splits, shape (5, nodes): shares of the left
        child, shares of the node, the number added before the division, and the largest counts of
        the left and of the right child.
        """
        parts = len(self.shares)
        ends = _sums(self.shares[self._order])
        owed = _sums(np.zeros(parts) if self._owed is None else self._owed[self._order])
        limits = np.full(parts, _MOST // parts) if self._most is None else self._most
        most = _sums(limits[self._order])
        levels: list[tuple[Ints, Ints, Ints]] = []
        first, end = np.zeros(1, np.int64), np.full(1, parts, np.int64)
        place, used = np.zeros(1, np.int64), 1
        leaf_place = np.zeros(parts, np.int64)
        while True:
            is_leaf = end - first == 1
            leaf_place[first[is_leaf]] = place[is_leaf]
            first, end, place = (each[~is_leaf] for each in (first, end, place))
            if not len(first):
                self._leaf_place, self._places = leaf_place, used
                return levels
            # The border between two leaves that is nearest to the middle of the node's shares.
            twice = ends[first] + ends[end]
            middle = np.searchsorted(2 * ends, twice, side="right") - 1
            middle += 2 * (ends[np.minimum(middle + 1, parts)] + ends[middle]) < 2 * twice
            middle = np.clip(middle, first + 1, end - 1)
            left = used + 2 * np.arange(len(first))
            used += 2 * len(first)
            share, total = ends[middle] - ends[first], np.maximum(1, ends[end] - ends[first])
            lacks = owed[middle] - owed[first] - (owed[end] - owed[first]) * (share / total)
            offset = np.clip(total // 2 + np.floor(lacks * total), 0, total - 1).astype(np.int64)
            of_children = most[middle] - most[first], most[end] - most[middle]
            levels.append((place, left, np.stack([share, total, offset, *of_children])))
            first, end = np.stack([first, middle], 1).ravel(), np.stack([middle, end], 1).ravel()
            place = np.stack([left, left + 1], 1).ravel()

    def counts(self, n: int) -> Ints:
        """Return how many of the first n positions each part has, int64, shape (parts,)."""
        found: Ints = self.counts_at(np.array([n]))[0]
        return found

    def counts_at(self, positions: Ints) -> Ints:
        """Return `counts` of several numbers of positions, int64, shape (n, parts)."""
        levels = self._levels  # sets the places
        value = np.zeros((self._places, len(positions)), np.int64)
        value[0] = positions
        for node, left, splits in levels:
            here = value[node]
            value[left] = of_left = self._left(here, splits[:, :, None])
            value[left + 1] = here - of_left
        counts = np.empty((len(positions), len(self.shares)), np.int64)
        counts[:, self._order] = value[self._leaf_place].T
        return counts

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the part of each position, and how many earlier positions that part has: int64,
        shape (n,) each."""
        child, splits, part_at = self._nodes
        node, index = np.zeros(len(positions), np.int64), positions.astype(np.int64)
        for _ in self._levels:
            here, left = splits[:, node], child[node]
            before = self._left(index, here)
            goes_left = self._left(index + 1, here) > before
            is_inner = left >= 0
            index = np.where(is_inner, np.where(goes_left, before, index - before), index)
            node = np.where(is_inner, left + ~goes_left, node)
        return part_at[node], index

    @cached_property
    def _nodes(self) -> tuple[Ints, Ints, Ints]:
        """The left child, the splits and the part of each place; -1 for leaves, and for parts of
        inner nodes."""
        levels = self._levels
        child, part = np.full((2, self._places), -1, np.int64)
        splits = np.ones((5, self._places), np.int64)
        for node, left, some in levels:
            child[node], splits[:, node] = left, some
        part[self._leaf_place] = self._order
        return child, splits, part

    def _left(self, n: Ints, splits: Ints) -> Ints:
        """Return how many of a node's first n positions its left child has."""
        share, total, offset, most_left, most_right = splits
        whole, rest = np.divmod(n, total)
        rest *= share
        rest += offset
        rest //= total
        whole *= share
        whole += rest
        if self._most is not None:
            whole = np.clip(whole, n - most_right, most_left)
        return whole

    def owed_after(self, n: int) -> Floats:
        """Return what each part lacks of its exact share of the first n positions, in samples, with
        what it lacked before: float64, shape (parts,)."""
        whole, rest = divmod(n, self.total)
        owed = rest * self.shares / self.total - (self.counts(n) - whole * self.shares)
        return owed if self._owed is None else owed + self._owed


_MOST = 2**62


def _sums(values: Numbers) -> Numbers:
    """Return the sums of the first 0, 1, … of the values, shape (n + 1,)."""
    return np.concatenate([values[:0].sum(keepdims=True), np.cumsum(values)])

"""The nodes of a job, as they told one another: whose ranks share a cache, and what it holds. Pure.

What a node is follows from its cache, not from a launcher's variables: ranks whose caches are one
folder are of one node. Each rank says one word; whoever has all of them knows the nodes.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_MOST_ABOUT = 4096  # characters that a node says of itself


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWord:
    """What one rank tells the others.

    cache: names the folder that it keeps blobs in, the same on all ranks of a node. held: bytes of
    each group of lanes that are there, int64, shape (groups,); None of a rank that doesn't speak
    for its node. about: what else the node says, such as its address.
    """

    cache: str
    held: Ints | None = None
    about: str = ""

    def text(self) -> str:
        """The word as others read it."""
        if len(self.about) > _MOST_ABOUT:
            raise PlanError(f"A node says at most {_MOST_ABOUT} characters, got {len(self.about)}.")
        held = None if self.held is None else _packed(self.held)
        return json.dumps({"cache": self.cache, "held": held, "about": self.about})

    @classmethod
    def parse(cls, text: str, *, groups: int) -> RankWord:
        """Read a word. Raises PlanError for what isn't one, or of another number of groups."""
        try:
            told = json.loads(text)
            held = None if told["held"] is None else _unpacked(told["held"], groups)
            return cls(cache=str(told["cache"]), held=held, about=str(told["about"])[:_MOST_ABOUT])
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise PlanError(
                f"A rank told something else than what its cache holds of {groups} groups of lanes "
                f"({error}). Run the same Penstock with the same arguments on every rank."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """A job's nodes in the order of their ranks, which are numbered in a row on each.

    first_ranks: of each node, ascending. ranks: of the job. held: bytes that each node's cache
    holds of each group of lanes, int64, shape (nodes, groups). about: what each says of itself.
    """

    first_ranks: tuple[int, ...]
    ranks: int
    held: Ints
    about: tuple[str, ...]

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self.first_ranks)

    def node_of(self, rank: int) -> int:
        """The number of a rank's node, counted from 0."""
        return int(np.searchsorted(self.first_ranks, rank, side="right")) - 1

    def ranks_of(self, node: int) -> tuple[int, int]:
        """Ranks [first, end) of a node."""
        ends = (*self.first_ranks[1:], self.ranks)
        return self.first_ranks[node], ends[node]

    @classmethod
    def of_words(cls, words: Sequence[RankWord], *, groups: int) -> Nodes | None:
        """The nodes of ranks 0, 1, 2, … by their words; None where ranks of one node aren't
        numbered in a row, as no order of lanes suits them."""
        first = [0]
        for rank, (before, word) in enumerate(itertools.pairwise(words), start=1):
            if word.cache != before.cache:
                first.append(rank)
        if len({words[rank].cache for rank in first}) < len(first):
            return None
        held = np.zeros((len(first), groups), dtype=np.int64)
        about = [""] * len(first)
        for node, (begin, end) in enumerate(zip(first, (*first[1:], len(words)), strict=True)):
            for word in words[begin:end]:
                if word.held is not None:
                    np.maximum(held[node], word.held, out=held[node])
                about[node] = about[node] or word.about
        return cls(first_ranks=tuple(first), ranks=len(words), held=held, about=tuple(about))

    def to_dict(self) -> dict[str, Any]:
        """The nodes as plain JSON types."""
        held = [_packed(one) for one in self.held] if any(self.about) else None  # else: no use
        return {
            "first": list(self.first_ranks),
            "ranks": self.ranks,
            "about": list(self.about),
            "held": held,
        }

    @classmethod
    def from_dict(cls, told: dict[str, Any], *, groups: int) -> Nodes:
        """Read nodes back; what their caches hold is 0 where none said anything else of itself.
        Raises PlanError for what isn't that."""
        try:
            first, held = tuple(int(rank) for rank in told["first"]), told["held"]
            matrix = np.zeros((len(first), groups), dtype=np.int64)
            if held is not None:
                matrix[:] = [_unpacked(one, groups) for one in held]
            about = tuple(str(one)[:_MOST_ABOUT] for one in told["about"])
            return cls(first_ranks=first, ranks=int(told["ranks"]), held=matrix, about=about)
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise PlanError(f"The list of the job's nodes can't be read ({error}).") from None


def _packed(held: Ints) -> str:
    """Bytes of groups as a short text: most caches hold nothing of most groups."""
    return base64.b64encode(zlib.compress(held.astype("<i8").tobytes())).decode()


def _unpacked(text: str, groups: int) -> Ints:
    if not isinstance(text, str) or len(text) > 64 + 16 * groups:
        raise ValueError("too long")
    unpack = zlib.decompressobj()
    data = unpack.decompress(base64.b64decode(text, validate=True), 8 * groups + 1)
    held = np.frombuffer(data, dtype="<i8").astype(np.int64)
    if len(held) != groups or (groups and int(held.min()) < 0):
        raise ValueError(f"{len(held)} groups")
    return held

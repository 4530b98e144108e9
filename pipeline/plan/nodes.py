"""The nodes of a job, as they told one another: whose ranks share a cache, and what it holds. Pure.

What a node is follows from its cache, not from a launcher's variables: processes whose caches are
one folder are of one node. Each says one word; whoever has all of them knows the nodes.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Word:
    """What one process of a job tells the others.

    rank: whose batches it gets. cache: names the folder that it keeps blobs in, the same for all
    processes of a node. goes_on: from where and how, which must be the same for all. held: bytes
    of each group of lanes that are there, int64, shape (groups,); None where another process speaks
    for the node.
    """

    rank: int
    cache: str
    goes_on: str = ""
    held: Ints | None = None

    def text(self) -> str:
        """The word as others read it."""
        held = None if self.held is None else _packed(self.held)
        told = {"rank": self.rank, "cache": self.cache, "goes_on": self.goes_on, "held": held}
        return json.dumps(told)

    @classmethod
    def parse(cls, text: str, *, groups: int) -> Word:
        """Read a word. Raises PlanError for what isn't one, or of another number of groups."""
        try:
            told = json.loads(text)
            return cls(
                rank=int(told["rank"]),
                cache=str(told["cache"]),
                goes_on=str(told["goes_on"]),
                held=None if told["held"] is None else _unpacked(told["held"], groups),
            )
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise PlanError(
                f"A rank told something else than what its cache holds of {groups} groups of lanes "
                f"({error}). Run the same Penstock with the same arguments on every rank."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """A job's nodes, by what each one's ranks read.

    ranks: [first, end) of each node; where a model is split over nodes, several have the same.
    held: bytes that each node's cache holds of each group of lanes, int64, shape (nodes, groups).
    """

    ranks: tuple[tuple[int, int], ...]
    held: Ints

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self.ranks)

    @classmethod
    def of_words(cls, words: Sequence[Word], *, size: int, groups: int) -> Nodes | None:
        """The nodes of processes 0, 1, 2, … by their words. size: ranks of the job. None where the
        ranks of nodes aren't numbered in a row, as no order of lanes suits them."""
        caches: dict[str, list[Word]] = {}
        for word in words:
            caches.setdefault(word.cache, []).append(word)
        ranks = [sorted({word.rank for word in told}) for told in caches.values()]
        if any(own != list(range(own[0], own[-1] + 1)) for own in ranks):
            return None
        runs = sorted({(own[0], own[-1] + 1) for own in ranks})
        ends = [0, *(end for _, end in runs)]
        if [first for first, _ in runs] != ends[:-1] or ends[-1] != size:
            return None
        held = np.zeros((len(caches), groups), dtype=np.int64)
        for node, told in enumerate(caches.values()):
            for word in told:
                if word.held is not None:
                    np.maximum(held[node], word.held, out=held[node])
        return cls(ranks=tuple((own[0], own[-1] + 1) for own in ranks), held=held)

    def shares(self) -> tuple[tuple[int, ...], Ints]:
        """The ranks that begin a run of a node's ranks, ascending, and what the caches of all nodes
        with these ranks hold of each group, int64, shape (runs, groups)."""
        runs = sorted(set(self.ranks))
        held = np.zeros((len(runs), self.held.shape[1]), dtype=np.int64)
        for own, bytes_held in zip(self.ranks, self.held, strict=True):
            held[runs.index(own)] += bytes_held
        return tuple(first for first, _ in runs), held


MOST_LEVEL = 3
"""Of what a node holds of a group of lanes: all of it."""


def level_text(held: Ints, whole: Ints) -> str:
    """What a node holds of each group of lanes, in thirds of it, as a short text for other nodes: a
    few characters for few groups, 1,600 at most. whole: bytes of the groups."""
    return _packed(-(-MOST_LEVEL * held // np.maximum(whole, 1)))


def levels_of(text: str, *, groups: int) -> Ints | None:
    """Read `level_text` back, int64, shape (groups,); None for what isn't one."""
    try:
        return _unpacked(text, groups)
    except (ValueError, zlib.error):
        return None


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

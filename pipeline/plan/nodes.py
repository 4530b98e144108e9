"""The nodes of a job, as they told one another: whose ranks share a cache, and what it holds. Pure.

What a node is follows from its cache, not from a launcher's variables: processes whose caches are
one folder are of one node. Each says one word; whoever has all of them knows the nodes.
"""

from __future__ import annotations

import base64
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
class Word:
    """What one process of a job tells the others.

    rank: whose batches it gets. cache: names the folder that it keeps blobs in, the same for all
    processes of a node. goes_on: from where and how, which must be the same for all. held: bytes
    of each group of lanes that are there, int64, shape (groups,); None where another process speaks
    for the node. about: what else the node says, such as its address.
    """

    rank: int
    cache: str
    goes_on: str = ""
    held: Ints | None = None
    about: str = ""

    def text(self) -> str:
        """The word as others read it."""
        if len(self.about) > _MOST_ABOUT:
            raise PlanError(f"A node says at most {_MOST_ABOUT} characters, got {len(self.about)}.")
        held = None if self.held is None else _packed(self.held)
        told = {"rank": self.rank, "cache": self.cache, "goes_on": self.goes_on, "held": held}
        return json.dumps({**told, "about": self.about})

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
                about=str(told["about"])[:_MOST_ABOUT],
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
    about: what each says of itself.
    """

    ranks: tuple[tuple[int, int], ...]
    held: Ints
    about: tuple[str, ...]

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
        about = [""] * len(caches)
        for node, told in enumerate(caches.values()):
            for word in told:
                if word.held is not None:
                    np.maximum(held[node], word.held, out=held[node])
                about[node] = about[node] or word.about
        return cls(
            ranks=tuple((own[0], own[-1] + 1) for own in ranks), held=held, about=tuple(about)
        )

    def shares(self) -> tuple[tuple[int, ...], Ints]:
        """The ranks that begin a run of a node's ranks, ascending, and what the caches of all nodes
        with these ranks hold of each group, int64, shape (runs, groups)."""
        runs = sorted(set(self.ranks))
        held = np.zeros((len(runs), self.held.shape[1]), dtype=np.int64)
        for own, bytes_held in zip(self.ranks, self.held, strict=True):
            held[runs.index(own)] += bytes_held
        return tuple(first for first, _ in runs), held

    def to_dict(self) -> dict[str, Any]:
        """The nodes as plain JSON types."""
        held = [_packed(one) for one in self.held] if any(self.about) else None  # else: no use
        return {"ranks": [list(own) for own in self.ranks], "about": list(self.about), "held": held}

    @classmethod
    def from_dict(cls, told: dict[str, Any], *, groups: int) -> Nodes:
        """Read nodes back; what their caches hold is 0 where none said anything else of itself.
        Raises PlanError for what isn't that."""
        try:
            ranks = tuple((int(first), int(end)) for first, end in told["ranks"])
            matrix = np.zeros((len(ranks), groups), dtype=np.int64)
            if told["held"] is not None:
                matrix[:] = [_unpacked(one, groups) for one in told["held"]]
            about = tuple(str(one)[:_MOST_ABOUT] for one in told["about"])
            return cls(ranks=ranks, held=matrix, about=about)
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

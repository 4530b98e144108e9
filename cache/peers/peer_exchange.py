"""Where the servers of a job's nodes listen, told through the job's store.

Each node tells once; the first one waits for all, for a while, and publishes the list in one text:
so the store answers one short question a node, whatever their number. Who comes later is on the
list when it is looked at again. What each holds is read once by each of the others.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base.peer_settings import check_address
from penstock.cache.errors import ConfigError, JobStoreError
from penstock.cache.peers.peer_directory import Peer

if TYPE_CHECKING:
    from penstock.cache.job_store import JobStore

_MOST_ENTRIES = 65_536
_NO_SERVER = ""
"""The address of a node whose cache can't be served, such as one with a full disk."""


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """The ranks [first, end) of a node, of so many in the job."""

    first: int
    end: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether it is the job's first node."""
        return self.first == 0

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other node."""
        return self.end - self.first == self.size


class PeerExchange:
    """Tells and hears addresses for one node. Safe for several threads, as one may still wait for
    the store when the next one looks for late nodes. Every method raises JobStoreError."""

    def __init__(self, store: JobStore, ranks: NodeRanks) -> None:
        """store: under a name that all nodes give alike."""
        self._store, self._ranks = store, ranks
        self._seen = 0  # entries that the first node has put on its list
        self._told: dict[int, tuple[int, str]] = {}  # end of a node's ranks, and its address
        self._listed: dict[int, int] = {}  # other nodes, and the first rank of each
        self._heard: set[int] = set()  # those whose words were heard

    def tell(self, address: str, *, held: str = "") -> None:
        """Tell where this node's server listens, "" where there is none, so that nobody waits for
        it; and in words for the pipeline what it holds. Telling the same again changes nothing."""
        first = self._ranks.first
        if self._store.heard(f"told-{first}") == address:
            return
        self._store.first(f"held-{first}", held or "-")
        number = self._store.add("entries", 1)
        self._store.tell(f"entry-{number}", json.dumps([first, self._ranks.end, address]))
        self._store.tell(f"told-{first}", address)

    def hear(self, *, timeout_s: float) -> list[Peer]:
        """The other nodes that have told; waits so long for those that haven't, or for the first
        node to list them."""
        until_s = time.monotonic() + timeout_s
        if self._ranks.leads:
            self._gather(until_s)
            told = sorted(self._told.copy().items())
            text = json.dumps([[first, *rest] for first, rest in told])
            self._store.tell("all", text)
        else:
            self._store.wait(["all"], timeout_s=max(0.0, until_s - time.monotonic()))
        return self._others(self._store.heard("all"))

    def new_words(self) -> dict[int, str]:
        """What nodes that were heard of said they hold, by node; each is told once."""
        new = {n: first for n, first in self._listed.items() if first not in self._heard}
        keys = [f"held-{first}" for first in new.values()]
        if not new or not self._store.are_told(keys):
            return {}
        self._heard.update(new.values())
        return dict(zip(new, self._store.all_heard(keys), strict=True))

    def _gather(self, until_s: float) -> None:
        """Put entries on the list until all ranks' nodes are there, or the time is over."""
        while (number := self._seen + 1) <= _MOST_ENTRIES:
            entry = f"entry-{number}"
            left_s = until_s - time.monotonic()
            ranks = sum(end - first for first, (end, _) in self._told.copy().items())
            is_full = ranks >= self._ranks.size
            if not is_full and left_s > 0:
                self._store.wait([entry], timeout_s=left_s)
            found = _entry(self._store.heard(entry))
            if found is None:
                return
            self._told[found[0]] = found[1:]
            self._seen = max(self._seen, number)  # another thread may be ahead

    def _others(self, text: str | None) -> list[Peer]:
        """The entries of other nodes. Nodes are numbered in the order of their ranks; where all
        have as many, so are those that are missing yet."""
        entries = [] if text is None else _entries(text)
        each = self._ranks.end - self._ranks.first
        alike = all(end - first == each and first % each == 0 for first, end, _ in entries)
        others = {
            first // each if alike else place: (first, address)
            for place, (first, _, address) in enumerate(entries)
            if first != self._ranks.first and address != _NO_SERVER
        }
        self._listed = {node: first for node, (first, _) in others.items()}
        return [Peer(node, address) for node, (_, address) in others.items()]


def _entry(text: str | None) -> tuple[int, int, str] | None:
    return None if text is None else _entries(f"[{text}]")[0]


def _entries(text: str) -> list[tuple[int, int, str]]:
    """What nodes told. Who can write to the store says whom this node asks, and nothing more."""
    try:
        found = [(first, end, address) for first, end, address in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise _damaged() from error
    for first, end, address in found:
        if type(first) is not int or type(end) is not int or not 0 <= first < end:
            raise _damaged()
        if address != _NO_SERVER:
            _check(address)
    return found


def _check(address: object) -> None:
    try:
        check_address(address, what="a node's address")
    except ConfigError as error:
        raise _damaged() from error


def _damaged() -> JobStoreError:
    return JobStoreError(
        "What the job's store says of the nodes' addresses isn't what Penstock writes: another "
        "program writes there, or some nodes run another version."
    )

"""Run one member of a trial job of `benchmarks.cluster_rejoin`, which rejoins instead of
restarting.

A store announces the members of the job from a step on (a quorum, like torchft's manager). Each
step is committed by all members of a quorum or by none. Started on a host of its own, the member
writes the ids of every step, whether it was committed, and the measurements of each quorum.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.cluster_child import make_loader, make_parser
from penstock import World

if TYPE_CHECKING:
    import argparse

    from penstock import DataLoader

_LIMIT = timedelta(seconds=240)


class Member:
    """A member, identified by the number of its node, until the job is over."""

    def __init__(self, options: argparse.Namespace, loader: DataLoader, report: TextIO) -> None:
        host, _, port = options.manager.rpartition(":")
        self._store = TCPStore(host, int(port), None, False, timeout=_LIMIT)
        self._node, self._step_s = options.node, options.step_s
        self._loader, self._told = loader, report

    def run(self) -> None:
        """Take part in the quorums that include this node."""
        self._store.set(f"ready-{self._node}", "")
        number = 0
        while quorum := json.loads(self._store.get(f"quorum-{number}")):
            if self._node in quorum["members"]:
                self._take_part(number, quorum)
            number += 1

    def _take_part(self, number: int, quorum: dict[str, Any]) -> None:
        members, step = quorum["members"], quorum["step"]
        began = time.monotonic()
        if self._node in quorum["new"]:
            state = self._store.get(f"state-{number}")
            self._loader.load_state_dict(json.loads(state))
        elif self._node == quorum["tells"]:
            self._store.set(f"state-{number}", json.dumps(self._loader.state_dict()))
        self._loader.rejoin(
            World(members.index(self._node), len(members)),
            step=step,
            store=PrefixStore(f"ranks-{number}", self._store),
        )
        rejoined, waits_s, errors = time.monotonic(), [], self._loader.statistics().peer_failed
        first = last = 0.0
        goes_on = True
        while goes_on:
            asked = time.monotonic()
            for data, id in self._loader:
                waits_s.append(time.monotonic() - asked)
                assert len(data) == len(id)
                time.sleep(self._step_s)
                goes_on = self._commit(number, self._loader.step - 1, len(members), id.tolist())
                last = time.monotonic()
                first = first or last
                if not goes_on:
                    break
                asked = time.monotonic()
        found = self._loader.statistics()
        self._tell(
            quorum=number,
            began=began,
            rejoin_s=rejoined - began,
            first_wait_s=waits_s[0],
            slowest_wait_s=max(waits_s[1:], default=0.0),
            first_step=first,
            last_step=last,
            steps=len(waits_s),
            remote=found.bytes_remote,
            peers=found.bytes_peers,
            peer_failed=found.peer_failed,
            errors=errors,
        )

    def _commit(self, number: int, step: int, size: int, ids: list[int]) -> bool:
        """Wait until all members have made a step; return True if the quorum continues."""
        self._tell(step=step, ids=ids, quorum=number)
        key = f"step-{number}-{step}"
        if self._store.add(f"{key}-count", 1) == size:
            ends = self._store.check([f"end-{number}"]) or step + 1 == self._last_step
            if self._store.compare_set(key, "", "last" if ends else "ok") == b"last":
                self._store.set(f"ended-{number}", str(step + 1))
        verdict = self._store.get(key)
        if verdict != b"broken":
            self._tell(committed=step, quorum=number)
        return verdict == b"ok"

    @property
    def _last_step(self) -> int:
        return int(self._store.get("steps"))

    def _tell(self, **words: Any) -> None:
        self._told.write(json.dumps({"at": time.monotonic(), **words}) + "\n")


def main() -> None:
    """Run a member until the job is over."""
    parser = make_parser()
    parser.add_argument("--manager", required=True, help="HOST:PORT of the store")
    parser.add_argument("--node", type=int, required=True)
    options = parser.parse_args()
    path = Path(options.out) / f"member-{options.node}-{os.getpid()}.jsonl"
    with make_loader(options, World(0, 1)) as loader, path.open("a", buffering=1) as report:
        Member(options, loader, report).run()


if __name__ == "__main__":
    main()

"""Run real processes of a job on loopback with a script and a gloo group, and return their output.

Importing torch in each would take most of a test's time, so they are forked from a warm process
(tests/warm.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.warm import ROOT, Warm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")


@dataclass
class Forked:
    """Running processes. pids: of each. done() waits for all."""

    processes: list[Warm]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def done(self) -> list[tuple[int, str, str]]:
        """Return the exit status, the output and the errors of each."""
        texts = [process.communicate() for process in self.processes]
        return [(p.wait(), *text) for p, text in zip(self.processes, texts, strict=True)]


def launched_alone() -> dict[str, str]:
    """Return this process's environment variables without a launcher's, with gloo on loopback."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    return {**kept, "GLOO_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def forked(script: str, children: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[Forked]:
    """Run a script in several processes, each with its arguments and variables."""
    kept = launched_alone()
    with contextlib.ExitStack() as running:
        yield Forked(
            [
                running.enter_context(
                    Warm(["-c", script, *words], cwd=ROOT, env={**kept, **report})
                )
                for words, report in children
            ]
        )


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(script: str, *arguments: str, size: int = 2) -> list[dict[str, Any]]:
    """Run a script as `size` ranks, and return the JSON object of each one's last line, by rank.

    The script has its rank in RANK and the address of a free port in MASTER_ADDR, MASTER_PORT.
    """
    port = free_port()
    children = [([*arguments], rank_variables(rank, size, port)) for rank in range(size)]
    found = []
    with forked(script, children) as running:
        for _, out, errors in running.done():
            assert out, errors
            found.append(json.loads(out.splitlines()[-1]))
    return found

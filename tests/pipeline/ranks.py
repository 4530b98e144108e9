"""Real processes of a job on loopback, each with a script and gloo's group; what they printed.

They are forked from one that has imported what all need, and has done nothing else: importing torch
in each would take most of a test's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")

_PARENT = """
import json, os, sys
import torch.distributed
from penstock import DataLoader, Dataset, DiskCache, Peers, World
from penstock.pipeline.feed import lane_agreement, handshake, job_waits, prefetch
import penstock.pipeline.loader, penstock.readers.dataset

script, folder, children = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
pids = []
for number, (arguments, told) in enumerate(children):
    pid = os.fork()
    if not pid:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), fd)
        os.environ.update(told)
        sys.argv[:] = ["-c", *arguments]
        break
    pids.append(pid)
else:
    print(json.dumps(pids), flush=True)
    script = f"codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in {pids}]\\n"
    script += "print(json.dumps(codes), flush=True)"
exec(compile(script, "the script", "exec"), {"__name__": "__main__", "os": os, "json": json})
"""


@dataclass
class Forked:
    """Processes that run. pids: of each. done() waits for all."""

    pids: list[int]
    _parent: subprocess.Popen[str]
    _folder: Path

    def done(self) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each."""
        out = self._parent.communicate(timeout=PATIENCE_S)[0]
        codes = json.loads(out.splitlines()[-1])
        return [
            (code, *((self._folder / f"{n}.{name}").read_text() for name in ("out", "err")))
            for n, code in enumerate(codes)
        ]


@contextlib.contextmanager
def forked(script: str, children: Sequence[tuple[list[str], dict[str, str]]]) -> Iterator[Forked]:
    """Run a script in several processes, each with its arguments and variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    with tempfile.TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [sys.executable, "-c", _PARENT, script, folder, json.dumps(children)],
            env={**kept, "GLOO_SOCKET_IFNAME": "lo"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        pids: list[int] = []
        try:
            assert parent.stdout is not None
            pids = json.loads(parent.stdout.readline())
            yield Forked(pids, parent, Path(folder))
        finally:
            if parent.poll() is None:  # else all have been waited for
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
            parent.kill()
            parent.communicate()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(script: str, *arguments: str, size: int = 2) -> list[dict[str, Any]]:
    """Run a script as `size` ranks; the JSON object in each one's last line, by rank.

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

"""Real processes of a job on loopback, each with a script and gloo's group; what they printed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX")


def run_ranks(script: str, *arguments: str, size: int = 2) -> list[dict[str, Any]]:
    """Run a script as `size` ranks; the JSON object in each one's last line, by rank.

    The script has its rank in RANK and the address of a free port in MASTER_ADDR, MASTER_PORT.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    ranks = []
    for rank in range(size):
        told = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**kept, **told},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    found = []
    try:
        for one in ranks:
            out, errors = one.communicate(timeout=PATIENCE_S)
            assert out, errors
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for one in ranks:
            one.kill()
    return found

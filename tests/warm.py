"""Start Python processes quickly: `run` and `Warm` replace functions of subprocess.

Importing torch, DALI and this package takes two seconds. These processes are forked from one that
has only imported them. A program runs as the main module, like under `python -c`, `-m` or `python
file`, and ends by the interpreter's own exit. The destructors of torch's, DALI's and other C++
libraries, which would take most of a short program's time, run with `destroys_libraries` only: for
tests of how a process ends. Tests of imports or of interpreter flags need subprocess.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
_lock = threading.Lock()
_parent: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def _ask(report: dict[str, Any], fds: list[int]) -> int:
    """Return the process id of a new child."""
    global _parent
    with _lock:
        if _parent is None:
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, str(ROOT / "tests" / "warm_parent.py")]
            # A Ctrl-C at a terminal is for who runs the tests: this one ends with its link.
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            _parent = (process, mine)
        link = _parent[1]
        socket.send_fds(link, [json.dumps(report).encode()], fds)
        return int(link.recv(64))


def close() -> None:
    """End the process that the others are forked from."""
    global _parent
    with _lock:
        if _parent is not None:
            process, link = _parent
            _parent = None
            link.close()
            process.wait(PATIENCE_S)


class Warm:
    """One process. words: the arguments of `python`: -c and code, -m and a module, or a file, then
    the program's own. stdout and stderr are pipes of text; otherwise like subprocess.Popen."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        destroys_libraries: bool = False,
    ) -> None:
        self.args = [str(word) for word in words]
        place = str(cwd or Path.cwd())
        first, *rest = self.args
        report: dict[str, Any] = {"module": None, "file": None, "code": None, "path": place}
        if first in ("-c", "-m"):
            report["code" if first == "-c" else "module"], *rest = rest
        else:
            report |= {"file": first, "code": Path(place, first).read_text()}
            report["path"] = str(Path(place, first).parent)
        report |= {"argv": [first, *rest], "cwd": place, "new_session": start_new_session}
        report["destroys_libraries"] = destroys_libraries
        report["env"] = dict(os.environ if env is None else env)
        self.returncode: int | None = None
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._status, theirs_status = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        theirs = [nothing, theirs_out, theirs_err, theirs_status]
        try:
            self.pid = _ask(report, theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None while it runs."""
        return self._look(0)

    def _look(self, timeout_s: float) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if poll.poll(timeout_s * 1000):
                report = os.read(self._status, 16)
                self.returncode = int(report) if report else -signal.SIGKILL
                os.close(self._status)
        return self.returncode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Wait until it ends and return its exit status."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Return the output of the process and its children, once all have ended."""
        texts = ["", ""]

        def read(number: int, stream: Any) -> None:
            texts[number] = stream.read()

        threads = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
            if not each[1].closed
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *reason: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def run(
    words: Sequence[object],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
    destroys_libraries: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end and return its result."""
    process = Warm(words, cwd=cwd, env=env, destroys_libraries=destroys_libraries)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)

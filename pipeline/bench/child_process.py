"""Run a Python module in a process of its own and exchange JSON lines with it.

It serves work that must not share the caller's process.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import penstock
from penstock.cache import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MARK = "penstock-says "  # libraries print to stdout, too; only lines with this prefix are ours
# The folder of our package; `python -m` puts it first, so that no file of the caller shadows it.
HOME = Path(str(penstock.__file__)).resolve().parents[1]


class ChildFailedError(PenstockError, RuntimeError):
    """A child process ended early; the message ends with the last lines of its stderr."""


def send_to_parent(message: Mapping[str, Any]) -> None:
    """Send a message from a child process to its parent."""
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


class Child:
    """A process that runs `python -m module arguments`. Leaving the context ends the process.

    title: what runs in it, for its error.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, title: str = "") -> None:
        self._module, self._title = module, title
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=HOME,
        )

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one JSON line to the child's stdin. Raises ChildFailedError if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the child's messages until it exits. Raises ChildFailedError if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        if self._process.wait():
            raise self._failed()

    def receive(self) -> dict[str, Any]:
        """Return the child's next message. Raises ChildFailedError if it ends instead."""
        message = next(self.messages(), None)
        if message is None:
            raise self._failed()
        return message

    def kill(self) -> None:
        """Kill the process with SIGKILL, without any clean-up of its own."""
        self._process.kill()
        self._process.wait()

    def _failed(self) -> ChildFailedError:
        code = self._process.wait()
        self._stderr.seek(0)
        return ChildFailedError(
            (f"{self._title} failed. " if self._title else "")
            + f"`python -m {self._module}` ended with exit code {code} before it answered. The end "
            "of its stderr:\n" + self._stderr.read()[-2000:]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

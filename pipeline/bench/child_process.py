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
from typing import TYPE_CHECKING, Any

import penstock
from penstock.cache import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MARK = "penstock-says "  # libraries print to stdout too; only lines that begin so are ours
# Where our package is; `python -m` puts it first, so that no file of the caller's hides it.
HOME = Path(str(penstock.__file__)).resolve().parents[1]


class ChildFailedError(PenstockError, RuntimeError):
    """A child ended unasked; the message carries the end of what it wrote to stderr."""


def send_to_parent(message: Mapping[str, Any]) -> None:
    """Say one thing to the parent; a child calls this."""
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


class Child:
    """`python -m module arguments`. Leaving the context ends the process."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=HOME,
        )

    def say(self, message: Mapping[str, Any]) -> None:
        """Write one JSON line to the child's stdin. Raises ChildFailedError if it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed() from error

    def hear(self) -> Iterator[dict[str, Any]]:
        """Yield the child's messages until it exits. Raises ChildFailedError if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
        if self._process.wait():
            raise self._failed()

    def answer(self) -> dict[str, Any]:
        """The next thing that the child tells. Raises ChildFailedError if it ends instead."""
        message = next(self.hear(), None)
        if message is None:
            raise self._failed()
        return message

    def kill(self) -> None:
        """SIGKILL: the process gets no chance to tidy up."""
        self._process.kill()
        self._process.wait()

    def _failed(self) -> ChildFailedError:
        code = self._process.wait()
        self._stderr.seek(0)
        return ChildFailedError(
            f"`python -m {self._module}` ended with {code}, wanted an answer. Its stderr ends:\n"
            + self._stderr.read()[-2000:]
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, which is what is wanted
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()
        self._stderr.close()

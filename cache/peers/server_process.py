"""Find or start the server of this node's cache, watch it, and start another when it dies.

One process a node, cache folder, address and secret serves all of them. It isn't this process,
whose GIL is the training loop's, and no fork of it, whose threads it would lack.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from multiprocessing import connection
from typing import TYPE_CHECKING

from penstock.cache.base import ByteLocks
from penstock.cache.errors import ConfigError, PenstockWarning, StalledError, WorkerError
from penstock.cache.forks import check_process, watch
from penstock.cache.peers.certificates import credentials_of
from penstock.cache.peers.server_control import (
    SERVERS_FOLDER,
    START_BYTE,
    ServerLine,
    ServerSpec,
    not_local,
    server_name,
)
from penstock.cache.peers.tokens import SECRET_VARIABLE
from penstock.cache.processes import describe_exit
from penstock.cache.threads import Workers, end_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import Folder, Peers
    from penstock.cache.disk import DiskCache
    from penstock.cache.peers.tokens import PeerSecret

_log = logging.getLogger("penstock")

START_TIMEOUT_S = 60.0
_LEAVE_S = 1.0
_MOST_DEATHS, _DEATHS_WITHIN_S = 6, 120.0
"""A server that dies so often, while it starts or later, isn't started again."""
_FIRST_PAUSE_S = 0.25
"""Before a second start; each further pause is twice as long. The first start follows at once."""
_MOST_STDERR, _STDERR_LINES = 4000, 3
"""Bytes and lines of a dead server's last words that a message quotes."""
# Its modules are this process's: what the working folder holds is none of them by chance.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from penstock.cache.peers.server import main
sys.exit(main())
"""


class PeerServer:
    """This process's use of the node's server, until close() or its end, whatever ends it.

    cache: whose folder is served; it is opened. moved: called with the new address, on another
    thread, where a server that had to be started again didn't get its port.

    Raises ConfigError for an address that isn't this node's, and such TlsFiles; WorkerError where
    the server doesn't start; StalledError; OSError where the cache can't be used.
    """

    def __init__(
        self,
        cache: DiskCache,
        peers: Peers,
        secret: PeerSecret,
        *,
        moved: Callable[[str], object] | None = None,
    ) -> None:
        self._peers, self._secret, self._moved = peers, secret, moved
        self._credentials = credentials_of(peers, secret)
        self._name = server_name(peers, secret)
        folder = cache.use(lambda folder: folder.layout.top.folder(SERVERS_FOLDER, make=True))
        if folder is None:
            raise OSError(f"{cache.path}: the cache can't be used, so it isn't served to others.")
        self._root, self._mode = cache.path, cache.mode
        self._folder: Folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = -1
        self._ended = threading.Event()
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._changing = threading.Lock()
        self._pid = os.getpid()
        self._line = self._find_or_start_patiently(peers.port)
        self._watcher = Workers(1, name="peer-server")
        self._watcher.submit(self._watch, None)
        end_at_exit(self)
        watch(self)

    @property
    def address(self) -> str:
        """Where the others reach it: "HOST:PORT"."""
        return f"{self._peers.address.rpartition(':')[0]}:{self._line.port}"

    @property
    def is_encrypted(self) -> bool:
        """Whether it speaks TLS."""
        return self._credentials is not None

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._line.pid

    # -- finding and starting

    def _find_or_start_patiently(self, port: int, died: str | None = None) -> ServerLine:
        """Find a server, or start one as often as it dies. died: how the one before ended; then
        everything else that fails is tried again, too.

        Raises as the class says, WorkerError after too many deaths."""
        retried = WorkerError if died is None else (OSError, ConfigError, WorkerError)
        while True:
            if died is not None:
                self._note_death(died)
            try:
                return self._find_or_start(port)
            except retried as error:
                died = str(error)

    def _note_death(self, died: str) -> None:
        """Count a death, and pause before the next start. Raises WorkerError after too many, and
        where nobody wants another start."""
        now_s = time.monotonic()
        while self._deaths and now_s - self._deaths[0] > _DEATHS_WITHIN_S:
            self._deaths.popleft()
        self._deaths.append(now_s)
        count = len(self._deaths)
        if count >= _MOST_DEATHS:
            raise WorkerError(
                f"{died} It is not started again, as {count} servers died within "
                f"{_DEATHS_WITHIN_S:.0f} s: other nodes get nothing from here."
            )
        if self._ended.wait(0.0 if count == 1 else _FIRST_PAUSE_S * 2.0 ** (count - 2)):
            raise WorkerError(died)

    def _find_or_start(self, port: int) -> ServerLine:
        if (found := self._find()) is not None:
            return found
        locks = ByteLocks(self._folder.open_or_create(f"{self._name}.lock"))
        what = f"{self._root}: starting the server of the cache"
        try:
            with locks.holding(START_BYTE, timeout_s=START_TIMEOUT_S, what=what):
                return self._find() or self._start(port)
        finally:
            locks.close()

    def _find(self) -> ServerLine | None:
        try:
            return ServerLine(self._folder, self._name, self._secret)
        except (OSError, ValueError) as error:
            if isinstance(error, StalledError):
                raise
            return None

    def _start(self, port: int) -> ServerLine:
        spec = ServerSpec(
            root=self._root,
            mode=self._mode,
            host=self._peers.host,
            port=port,
            secret=self._secret,
            credentials=self._credentials,
        )
        told = self._run(spec)
        if "error" in told:
            self._reap()
            if told["is_address"]:
                raise not_local(self._peers, str(told["error"]))
            raise OSError(f"{self._root}: the server of the cache can't serve: {told['error']}.")
        if "port" not in told:
            raise self._death("while it started")
        if told["is_taken"]:
            warnings.warn(
                f"peers: port {port} of {self._peers.host} is taken, by another job's server or "
                f"another program, so this job's listens at {told['port']}. Pass port 0, which "
                "always takes a free one, or the same token_file to jobs that shall share one.",
                PenstockWarning,
                stacklevel=5,
            )
        try:
            return ServerLine(self._folder, self._name, self._secret)
        except StalledError:
            raise
        except (OSError, ValueError) as error:
            raise self._death(f"as soon as it served ({error})") from error

    def _run(self, spec: ServerSpec) -> dict[str, object]:
        """Start the process; what it tells."""
        # What the environment tells this process is nobody else's.
        command = ["env", "-u", SECRET_VARIABLE, sys.executable, "-P", "-c", _PROGRAM]
        command += ["penstock-peer-server", self._peers.address]
        self._close_stderr()
        self._stderr = os.memfd_create("penstock-peer-server", os.MFD_CLOEXEC)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        paths = [path for path in sys.path if isinstance(path, str)]
        given = [json.dumps(paths).encode(), self._name.encode(), spec.dump()]
        with process.stdin, process.stdout, contextlib.suppress(BrokenPipeError, ValueError):
            process.stdin.write(b"\n".join(given))
            process.stdin.close()
            if not connection.wait([process.stdout.fileno()], timeout=START_TIMEOUT_S):
                process.kill()
                self._reap()
                raise StalledError(
                    f"{self._root}: the server of the cache (pid {process.pid}) didn't begin "
                    f"within {START_TIMEOUT_S:.0f} s and was ended. Look whether this machine is "
                    "overloaded."
                )
            told = json.loads(process.stdout.readline())
            return told if isinstance(told, dict) else {}
        return {}

    def _reap(self) -> int | None:
        """Clear up behind a server that this process started, if it has ended; its exit status,
        None where that isn't known."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            process.returncode = 0  # others use it: nobody here waits for it, or warns of it
            return None

    def _death(self, when: str, *, pid: int = 0) -> WorkerError:
        """The error for a server that has ended: how, with its last words where this process
        started it."""
        process, said = self._process, ""
        code = self._reap()
        if process is not None and self._stderr >= 0:
            size = os.lseek(self._stderr, 0, os.SEEK_END)
            text = os.pread(self._stderr, _MOST_STDERR, max(0, size - _MOST_STDERR))
            lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
            said = " | ".join([line for line in lines if line][-_STDERR_LINES:])
        self._close_stderr()
        how = "ended" if code is None else describe_exit(code)
        pid = pid if process is None else process.pid
        last = f" Its last words: {said}" if said else ""
        look = " If it wasn't you, the machine may lack memory: see `dmesg`."
        remedy = look if code == -signal.SIGKILL else ""
        return WorkerError(
            f"{self._root}: the server of the cache (pid {pid}) {how} {when}.{remedy}{last}"
        )

    def _close_stderr(self) -> None:
        stderr, self._stderr = self._stderr, -1
        if stderr >= 0:
            os.close(stderr)

    # -- watching

    def _watch(self, _: None) -> None:
        """Log what the server says, and start another when it is gone."""
        while not self._ended.is_set():
            try:
                told = self._line.hear()
            except ValueError:
                continue
            if told is None:
                if self._ended.is_set() or not self._start_again():
                    return
            elif isinstance(told.get("log"), str) and isinstance(told.get("level"), int):
                _log.log(told["level"], "%s", told["log"])

    def _start_again(self) -> bool:
        before = self._line
        died = str(self._death("while it served", pid=before.pid))
        try:
            line = self._find_or_start_patiently(before.port, died)
        except WorkerError as error:
            if not self._ended.is_set():
                _log.warning("%s", error)
            return False
        with self._changing:
            before.close()
            self._line = line
            if self._ended.is_set():
                line.close()
        _log.warning("%s Another serves on (pid %d).", died, line.pid)
        if line.port != before.port and self._moved is not None:
            self._moved(self.address)
        return True

    # -- ending

    def end(self) -> None:
        """Let the watching thread go, at once."""
        self._ended.set()
        with self._changing:
            self._line.end()

    def close(self) -> None:
        """Use it no more; with its last user it ends. Safe to call twice."""
        check_process(self._pid, "The server of the cache")
        self.end()
        self._watcher.close(timeout_s=_LEAVE_S)
        self._line.close()
        self._reap()
        self._close_stderr()

    def disown(self) -> None:
        """Be no user, in a forked child: the parent's end mustn't wait for its."""
        self._ended.set()
        self._line.close()
        self._close_stderr()

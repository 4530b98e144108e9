"""The server of this node's cache as one process uses it: found or started, watched, started again.

One process a node, cache folder, address and secret serves all of them. It isn't this process,
whose GIL is the training loop's, and no fork of it, whose threads it would lack.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from multiprocessing import connection
from typing import TYPE_CHECKING

from penstock.cache.base.locks import ByteLocks
from penstock.cache.errors import ConfigError, PenstockWarning, StalledError, WorkerError
from penstock.cache.forks import check_process, watch
from penstock.cache.peers.certificates import credentials_of
from penstock.cache.peers.own_settings import not_local
from penstock.cache.peers.server_spec import FOLDER, START_BYTE, ServerSpec, server_name
from penstock.cache.peers.tokens import SECRET_VARIABLE
from penstock.cache.peers.users import ServerLine
from penstock.cache.threads import Workers, end_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.folders import Folder
    from penstock.cache.base.peer_settings import Peers
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.peers.tokens import PeerSecret

_log = logging.getLogger("penstock")

START_TIMEOUT_S = 60.0
_LEAVE_S = 1.0
_MOST_DEATHS, _DEATHS_WITHIN_S = 3, 60.0
"""A server that dies more often isn't started again."""
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
        folder = cache.use(lambda shelf: shelf.layout.top.folder(FOLDER, make=True))
        if folder is None:
            raise OSError(f"{cache.path}: the cache can't be used, so it isn't served to others.")
        self._root, self._mode = cache.path, cache.mode
        self._folder: Folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self._changing = threading.Lock()
        self._pid = os.getpid()
        self._line = self._find_or_start(peers.port)
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
        if "port" not in told:
            self._reap(wait_s=_LEAVE_S)
            raise not_local(self._peers, str(told.get("error", "it ended before it served")))
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
            raise WorkerError(
                f"{self._root}: the server of the cache ended as soon as it had begun ({error})."
            ) from error

    def _run(self, spec: ServerSpec) -> dict[str, object]:
        """Start the process; what it tells."""
        # What the environment tells this process is nobody else's.
        command = ["env", "-u", SECRET_VARIABLE, sys.executable, "-P", "-c", _PROGRAM]
        command += ["penstock-peer-server", self._peers.address]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
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
                self._reap(wait_s=1.0)
                raise StalledError(
                    f"{self._root}: the server of the cache didn't begin within "
                    f"{START_TIMEOUT_S:.0f} s. Look whether this machine is overloaded."
                )
            told = json.loads(process.stdout.readline())
            return told if isinstance(told, dict) else {}
        return {}

    def _reap(self, *, wait_s: float) -> None:
        """Clear up behind a server that this process started, if it has ended."""
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.returncode = 0  # others use it: nobody here waits for it, or warns of it

    # -- watching

    def _watch(self, _: None) -> None:
        """Log what the server says, and start another when it is gone."""
        while not self._closed:
            try:
                told = self._line.hear()
            except ValueError:
                continue
            if told is None:
                self._reap(wait_s=_LEAVE_S)
                if self._closed or not self._start_again():
                    return
            elif isinstance(told.get("log"), str) and isinstance(told.get("level"), int):
                _log.log(told["level"], "%s", told["log"])

    def _start_again(self) -> bool:
        now_s = time.monotonic()
        if len(self._deaths) == _MOST_DEATHS and now_s - self._deaths[0] < _DEATHS_WITHIN_S:
            _log.warning(
                "%s: the server of the cache died %d times within a minute, and isn't started "
                "again: other nodes get nothing from here. See what ends it (memory: `dmesg`).",
                self._root,
                _MOST_DEATHS + 1,
            )
            return False
        self._deaths.append(now_s)
        before = self._line
        try:
            line = self._find_or_start(before.port)
        except (OSError, ConfigError, WorkerError) as error:
            _log.warning("%s: the server of the cache is gone: %s", self._root, error)
            return False
        with self._changing:
            before.close()
            self._line = line
            if self._closed:
                line.close()
        _log.warning(
            "%s: the server of the cache (pid %d) died; another serves on (pid %d).",
            self._root,
            before.pid,
            line.pid,
        )
        if line.port != before.port and self._moved is not None:
            self._moved(self.address)
        return True

    # -- ending

    def end(self) -> None:
        """Let the watching thread go, at once."""
        self._closed = True
        with self._changing:
            self._line.end()

    def close(self) -> None:
        """Use it no more; with its last user it ends. Safe to call twice."""
        check_process(self._pid, "The server of the cache")
        self.end()
        self._watcher.close(timeout_s=_LEAVE_S)
        self._line.close()
        self._reap(wait_s=_LEAVE_S)

    def disown(self) -> None:
        """Be no user, in a forked child: the parent's end mustn't wait for its."""
        self._closed = True
        self._line.close()

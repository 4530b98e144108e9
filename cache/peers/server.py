"""The process that serves a node's cache to the other nodes.

It is started by server_process.py, reads a spec from its standard input, says on its standard
output when it serves, and ends when nobody of its node uses it any more. It loads neither torch nor
numpy: 30 MB. One thread does all but waiting for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from asyncio.sslproto import SSLProtocol
from typing import TYPE_CHECKING, Any

from penstock.cache.base.folders import Folder
from penstock.cache.base.locks import ByteLocks, wait_for
from penstock.cache.peers.answers import Replies
from penstock.cache.peers.connection import Connection, Office
from penstock.cache.peers.doors import Doors, Limits
from penstock.cache.peers.held_files import HeldFiles
from penstock.cache.peers.server_spec import FOLDER, LIFE_BYTE, ServerSpec
from penstock.cache.peers.users import LogToUsers, UserConnection, Users, socket_path
from penstock.cache.secrets import SafeLog
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("penstock")

_FIRST_USER_S = 20.0
"""Who started the server is its first user, or it was killed meanwhile."""
_LIFE_S = 15.0
_READERS = 4
_BACKLOG = 1024
_TELL_EVERY_S = 60.0
_OF_ADDRESS = frozenset(
    {errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EACCES, errno.EINVAL, errno.EAFNOSUPPORT}
)
"""Errors of listening that an address has, and not the machine."""


class AddressError(OSError):
    """The server can't listen at its address."""


class Refusals:
    """Counts connections and requests of strangers, and says so once a minute at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._next_s = 0, 0.0

    def note(self, address: str) -> None:
        """Count one."""
        self._count += 1
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + _TELL_EVERY_S
            _log.warning(
                "The server of the cache refused requests that weren't correctly signed or "
                "encrypted (%d so far, the last from %s). Give every node of the job the same "
                "token, and keep others off the port.",
                self._count,
                address,
            )


def listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """Listen at one address; any free port where the wanted one is taken: whether it was.

    Raises OSError.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        # By a name's record; Peers refuses it where it is written.
        raise OSError(errno.EADDRNOTAVAIL, f"{place[0]} is every network of the node")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        is_taken = False
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not port:
                raise
            is_taken = True
            listener.bind((place[0], 0, *place[2:]))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener, is_taken


def _listen_to_users(folder: Folder, name: str) -> socket.socket:
    # Whoever held it before is dead: the life's lock is ours.
    folder.remove(f"{name}.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(socket_path(folder, name))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


async def serve(spec: ServerSpec, name: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Serve until nobody uses it. tell: what who started it is told. Raises OSError."""
    loop = asyncio.get_running_loop()
    folder = Folder.at(spec.root, mode=spec.mode).folder(FOLDER)
    life = ByteLocks(folder.open_or_create(f"{name}.lock"))
    # A forerunner whose last user has just left is about to end.
    wait_for(lambda: life.lock(LIFE_BYTE), timeout_s=_LIFE_S, what=f"the server {name}")
    held = HeldFiles(spec.root, mode=spec.mode)
    done = asyncio.Event()
    try:
        listener, is_taken = listen(spec.host, spec.port)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        if is_name or error.errno in _OF_ADDRESS:
            raise AddressError(error.errno, error.strerror) from error
        raise
    port = listener.getsockname()[1]
    users = Users(spec.secret, port=port, gone=done.set)
    handler = LogToUsers(users)
    handler.addFilter(SafeLog())
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
    loop.set_exception_handler(_log_trouble)
    # Each encrypted connection would have 256 KiB to read into, for requests of 300 bytes.
    SSLProtocol.max_size = 2**14
    tls = None if spec.credentials is None else spec.credentials.server_context()
    doors = Doors(Limits())
    readers = Workers(_READERS, name="peer-read")
    replies = Replies(held, {spec.secret.job: spec.secret})
    office = Office(replies, doors, readers=readers, tls=tls, refused=Refusals().note)
    to_users = await loop.create_unix_server(
        lambda: UserConnection(users), sock=_listen_to_users(folder, name)
    )
    to_peers = await loop.create_server(lambda: Connection(office), sock=listener)
    tell({"port": port, "is_taken": is_taken})
    try:
        loop.call_later(_FIRST_USER_S, lambda: None if users.count else done.set())
        await done.wait()
    finally:
        # From here on who looks for a server finds none.
        folder.remove(f"{name}.sock")
        to_users.close()
        to_peers.close()
        doors.clear()
        readers.close(timeout_s=0.0)


def _log_trouble(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong with one connection is that one's end: told, without its traceback."""
    del loop
    error = context.get("exception")
    if not isinstance(error, OSError):
        _log.warning("The server of the cache: %s (%r)", context.get("message"), error)


def main() -> int:
    """Read the spec and serve. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the job's, and it ends with that
    output = sys.stdout

    def tell(what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            output.write(json.dumps(what) + "\n")
            output.close()

    name = sys.stdin.buffer.readline().decode("ascii").strip()
    spec = ServerSpec.load(sys.stdin.buffer.readline())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        asyncio.run(serve(spec, name, tell))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        tell({"error": reason, "is_address": isinstance(error, AddressError)})
        return 1
    return 0

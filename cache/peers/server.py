"""Serve a node's cache to the other nodes of the job, in a separate process.

server_process.py starts the process. It reads a spec from its standard input, reports its port on
its standard output, and ends when no process of its node uses it any more. It loads neither torch
nor numpy and needs 30 MB. One thread does all work except waiting for the disk.

The requests of a connection are answered one after another, each with limits in bytes and time.
Plain bodies go from the file to the socket with sendfile, as much as the socket accepts at once; a
task sends encrypted bodies and those that wait for the disk. No request is read while one is being
answered, and only a small part of a body is in memory.

The number of connections is limited, in total and per address. A connection is unknown until it
carries a correctly signed request. At the limit, the oldest unknown connection is closed, so silent
connections can't block the job's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.cache.base import ByteLocks, Folder, wait_for
from penstock.cache.peers.answers import (
    AT_ONCE_BYTES,
    END,
    Responder,
    add_crcs,
    add_crcs_at_once,
    read_head,
)
from penstock.cache.peers.held_files import HeldFiles
from penstock.cache.peers.protocol import MOST_HEAD_BYTES
from penstock.cache.peers.server_control import (
    LIFE_BYTE,
    SERVERS_FOLDER,
    LogToUsers,
    ServerSpec,
    UserConnection,
    Users,
    socket_path,
)
from penstock.cache.secrets import SafeLog
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from penstock.cache.peers.answers import ServerReply


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits of a server.

    connections, of_one_address: the most connections, in total and from one address. head_s:
    seconds for a TLS handshake, and for receiving the head of a request. idle_s: seconds between
    requests. write_s: seconds for sending each MiB.
    """

    connections: int = 512
    of_one_address: int = 256
    head_s: float = 10.0
    idle_s: float = 75.0
    write_s: float = 20.0


class CountedConnection(Protocol):
    """The interface of a connection that `ConnectionCounter` uses."""

    @property
    def address(self) -> str: ...

    def abort(self) -> None:
        """Close the connection at once, and call `ConnectionCounter.leave`."""


class ConnectionCounter:
    """The connections of a server; at its limits the oldest unknown one is closed. Does no I/O."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._unknown: dict[CountedConnection, None] = {}  # the oldest first
        self._known: set[CountedConnection] = set()
        self._of: Counter[str] = Counter()

    def enter(self, connection: CountedConnection) -> bool:
        """Add a new connection, closing an older unknown one if necessary; return False if there is
        none to close."""
        limits, address = self.limits, connection.address
        is_address_full = self._of[address] >= limits.of_one_address
        if is_address_full or self.count >= limits.connections:
            unknown = (
                each for each in self._unknown if not is_address_full or each.address == address
            )
            if (victim := next(unknown, None)) is None:
                return False
            self.leave(victim)
            victim.abort()
        self._unknown[connection] = None
        self._of[address] += 1
        return True

    def mark_known(self, connection: CountedConnection) -> None:
        """Record that a connection belongs to the job."""
        if connection in self._unknown:
            del self._unknown[connection]
            self._known.add(connection)

    def leave(self, connection: CountedConnection) -> None:
        """Record that a connection has ended. Safe to call twice."""
        if connection in self._unknown or connection in self._known:
            self._unknown.pop(connection, None)
            self._known.discard(connection)
            self._of[connection.address] -= 1
            if not self._of[connection.address]:
                del self._of[connection.address]

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._unknown) + len(self._known)

    def clear(self) -> None:
        """Close all connections."""
        for connection in [*self._unknown, *self._known]:
            connection.abort()


_STEP = 2**20
_TLS_STEP = 2**16
"""With larger steps the C library allocates and frees pages for each step, for twice the CPU
time."""
_WAITING_BYTES = 2**15
"""The most encrypted bytes that wait for the socket; asyncio's own limit is 512 KiB."""
_TLS_SHUTDOWN_S = 1.0
_HANDSHAKE = b"\x16"


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The objects that the connections of one server share.

    tls: None if connections are plain. readers: threads that wait for the disk. refused: called
    with the address of each refused client.
    """

    replies: Responder
    connections: ConnectionCounter
    readers: Workers
    tls: ssl.SSLContext | None
    refused: Callable[[str], None]

    async def in_thread(self, act: Callable[[], object]) -> None:
        """Call `act`, which may wait for the disk, in a thread. Raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def run(_: None) -> None:
            error: Exception | None = None
            try:
                act()
            except (OSError, EOFError) as failed:
                error = failed
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, error)

        self.readers.submit(run, None)
        await done


class PlainBody:
    """The unencrypted body of an answer while it is sent. at: the number of sent bytes.

    The head is sent together with the first bytes, so that the client wakes once. Raises OSError,
    EOFError.
    """

    def __init__(self, reply: ServerReply, raw: socket.socket) -> None:
        assert reply.file is not None
        self.reply, self._file, self._raw = reply, reply.file, raw
        self._head = memoryview(reply.head())
        self.at, self._length = 0, reply.length
        self._in_memory_bytes = AT_ONCE_BYTES
        self._is_corked = len(reply.spans) > 1
        if self._is_corked:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)

    def is_in_memory(self) -> bool:
        """Return True if the next part needn't wait for the disk; checked once per MiB."""
        if self.at >= self._in_memory_bytes:
            parts = self.reply.parts(self.at, 2 * _STEP)
            if not all([self._file.is_in_memory(*part) for part in parts]):
                self.uncork()
                return False
            self._in_memory_bytes = self.at + _STEP
        return True

    def send(self) -> bool:
        """Send as much as the socket accepts; return True if the whole body is sent."""
        with contextlib.suppress(BlockingIOError):
            if self._head:
                sent = self._raw.send(self._head, socket.MSG_MORE)
                self._head = self._head[sent:]
            parts = () if self._head else self.reply.parts(self.at, _STEP)
            for start, end in parts:
                sent = os.sendfile(self._raw.fileno(), self._file.fd, start, end - start)
                if not sent:
                    raise EOFError("the file is shorter than it was")
                self.at += sent
                if sent < end - start:  # the socket is full
                    break
        if self.at < self._length:
            return False
        self.uncork()
        return True

    def uncork(self) -> None:
        """Send the bytes that the kernel holds back."""
        if self._is_corked:
            self._is_corked = False
            self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)


class ServerConnection(asyncio.BufferedProtocol):
    """One connection of the server, whose requests are answered one after another."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._limits = context.connections.limits
        self._loop = asyncio.get_running_loop()
        self._plain: asyncio.Transport | None = None
        self._transport: asyncio.Transport | None = None
        # asyncio's own buffer of 256 KiB would be allocated and freed each time.
        self._received = memoryview(bytearray(MOST_HEAD_BYTES))
        self._buffer = bytearray()
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._raw: socket.socket | None = None  # the same socket, used without the transport
        self._body: PlainBody | None = None
        self.address = ""

    # -- callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = plain = cast("asyncio.Transport", transport)
        peer = plain.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._context.connections.enter(self):
            plain.abort()
            return
        self._wait(self._limits.head_s)
        if self._context.tls is None:
            self._transport = plain
            self._raw = socket.socket(fileno=os.dup(plain.get_extra_info("socket").fileno()))
        else:
            plain.pause_reading()
            self._task = self._loop.create_task(self._secure(plain, self._context.tls))

    async def _secure(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self._loop.start_tls(
                plain,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.head_s,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
            )
        except OSError as error:  # no TLS, or an untrusted certificate: closed without an answer
            # The traceback's frames and the handshake's objects form a cycle, which would keep 50
            # KB of OpenSSL's memory per client until the garbage collector runs.
            error.__traceback__ = error.__context__ = None
            self._task = None
            self._context.refused(self.address)
            self.abort()
            return
        if secured is None or secured.is_closing():
            self.abort()
            return
        secured.set_write_buffer_limits(high=_WAITING_BYTES)
        self._transport = secured
        self._task = None
        self._wait(self._limits.head_s)
        self._next()  # a request may have come with the handshake's end

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._buffer += self._received[:nbytes]
        if not self._is_busy:
            self._next()
        elif len(self._buffer) > MOST_HEAD_BYTES:
            self.abort()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._context.connections.leave(self)
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._end_body()
        if self._raw is not None:
            self._raw.close()

    def abort(self) -> None:
        """Close the connection at once."""
        # The loop doesn't call connection_lost for an aborted handshake.
        self._context.connections.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        for transport in (self._transport, self._plain):
            if transport is not None:
                transport.abort()

    def _wait(self, limit_s: float) -> None:
        """Close the connection unless it makes progress within limit_s seconds."""
        self._due_s = due_s = self._loop.time() + limit_s
        # A timer that fires too early is set again; a new one for each request would cost more.
        if self._timer is None or self._timer.when() > due_s:
            self._set_timer(due_s)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due_s <= self._loop.time():
            self.abort()
        elif self._due_s < math.inf:
            self._set_timer(self._due_s)

    # -- one request after another

    def _next(self) -> None:
        at = self._buffer.find(END)
        if self._is_busy or self._transport is None or self._transport.is_closing():
            return
        # A TLS handshake is refused at once, because its client would wait for its time limit.
        is_tls = self._buffer[:1] == _HANDSHAKE
        if at < 0 and len(self._buffer) <= MOST_HEAD_BYTES and not is_tls:
            return
        request = read_head(self._buffer[:at]) if at >= 0 else None
        del self._buffer[: at + len(END) if at >= 0 else len(self._buffer)]
        self._is_busy = True
        self._due_s = math.inf
        self._answer(self._transport, self._context.replies.answer(request))

    def _answer(self, transport: asyncio.Transport, reply: ServerReply) -> None:
        if reply.is_known:
            self._context.connections.mark_known(self)
        elif not reply.keeps:
            self._context.refused(self.address)
        try:
            if not add_crcs_at_once(reply):
                self._begin_task(transport, reply, -1)
                return
            if self._raw is None or reply.file is None or transport.get_write_buffer_size():
                at = self._send_head(transport, reply)
                if at < reply.length:
                    self._begin_task(transport, reply, at)
                else:
                    self._finish(transport, reply)
                return
            body = PlainBody(reply, self._raw)
            if body.send():
                self._finish(transport, reply)
                return
        except (OSError, EOFError):
            reply.close()
            self.abort()
            return
        transport.pause_reading()
        self._body = body
        self._wait(self._limits.write_s)
        self._loop.add_writer(self._raw.fileno(), self._send_on, transport, body)

    def _send_on(self, transport: asyncio.Transport, body: PlainBody) -> None:
        """Continue a plain body when the socket accepts more."""
        before = body.at // _STEP
        try:
            if not body.is_in_memory():
                self._end_body(keep=True)
                self._begin_task(transport, body.reply, body.at)
                return
            is_sent = body.send()
        except (OSError, EOFError):
            self.abort()
            return
        if is_sent:
            self._end_body(keep=True)
            self._finish(transport, body.reply)
        elif body.at // _STEP > before:
            self._wait(self._limits.write_s)

    def _end_body(self, *, keep: bool = False) -> None:
        """Stop sending a plain body. keep: leave its file open."""
        body, self._body = self._body, None
        if body is not None:
            assert self._raw is not None
            self._loop.remove_writer(self._raw.fileno())
            if not keep:
                body.reply.close()

    def _begin_task(self, transport: asyncio.Transport, reply: ServerReply, at: int) -> None:
        transport.pause_reading()
        self._due_s = math.inf
        self._task = self._loop.create_task(self._send(transport, reply, at))

    def _send_head(self, transport: asyncio.Transport, reply: ServerReply) -> int:
        """Send the head, together with a small body; return the number of body bytes sent."""
        is_small = reply.file is None and reply.length <= _WAITING_BYTES
        transport.write(reply.head() + reply.body if is_small else reply.head())
        return reply.length if is_small else 0

    def _finish(self, transport: asyncio.Transport, reply: ServerReply) -> None:
        reply.close()
        self._is_busy, self._task = False, None
        if not reply.keeps:
            transport.close()
            self._wait(self._limits.write_s)  # for what is still to be sent
            return
        self._wait(self._limits.idle_s)
        transport.resume_reading()
        if self._buffer:
            self._wait(self._limits.head_s)
            self._loop.call_soon(self._next)

    async def _send(self, transport: asyncio.Transport, reply: ServerReply, at: int) -> None:
        """Send the rest of an answer from byte `at` of its body on; -1 sends its head, too."""
        context = self._context
        try:
            if at < 0:
                await context.in_thread(lambda: add_crcs(reply))
                at = self._send_head(transport, reply)
            while at < reply.length:
                async with asyncio.timeout(self._limits.write_s):
                    at += await self._send_step(transport, reply, at)
            self._finish(transport, reply)
        # The client is gone or too slow, the server is closing, or the file was truncated.
        except (OSError, EOFError, RuntimeError):
            self.abort()
        finally:
            reply.close()

    async def _send_step(self, transport: asyncio.Transport, reply: ServerReply, at: int) -> int:
        """Send a part of a body; return its number of bytes."""
        file = reply.file
        if file is None:
            step = min(_WAITING_BYTES, reply.length - at)
            transport.write(memoryview(reply.body)[at : at + step])
            await self._drain(transport)
            return step
        is_plain = self._context.tls is None
        first, end = next(reply.parts(at, _STEP if is_plain else _TLS_STEP))
        if not file.is_in_memory(first, end):
            await self._context.in_thread(lambda: file.load(first, end))
        if is_plain:
            # sendfile only calls fileno() of the file.
            like_file = cast("Any", file)
            await self._loop.sendfile(transport, like_file, first, end - first, fallback=False)
            return end - first
        data = os.pread(file.fd, end - first, first)
        if not data:
            raise EOFError("the file is shorter than it was")
        transport.write(data)
        await self._drain(transport)
        return len(data)

    async def _drain(self, transport: asyncio.Transport) -> None:
        """Wait until most of what was written is sent. Raises ConnectionError."""
        assert self._plain is not None
        # A TLS transport doesn't notice that the client has closed, and accepts all data.
        if transport.is_closing() or self._plain.is_closing():
            raise ConnectionResetError
        if self._drained is not None:
            await asyncio.shield(self._drained)


_log = logging.getLogger("penstock")

_FIRST_USER_S = 20.0
"""Seconds within which the process that started the server must connect as its first user."""
_LIFE_S = 15.0
_READERS = 4
_BACKLOG = 1024
_WARN_EVERY_S = 60.0
_OF_ADDRESS = frozenset(
    {errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EACCES, errno.EINVAL, errno.EAFNOSUPPORT}
)
"""Errors of listening that are caused by the address, not by the machine."""


class AddressError(OSError):
    """The server can't listen at its address."""


class RefusalCounter:
    """A counter of refused connections and requests, which warns at most once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count, self._next_s = 0, 0.0

    def note(self, address: str) -> None:
        """Count one refusal."""
        self._count += 1
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + _WARN_EVERY_S
            _log.warning(
                "The server of the cache refused requests that weren't correctly signed or "
                "encrypted (%d so far, the last from %s). Give every node of the job the same "
                "token, and block other clients from the port.",
                self._count,
                address,
            )


def listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """Listen at one address, or at another free port if that one is taken. Return the socket, and
    True if the port was taken. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        # The host's name resolves to it; Peers refuses it if written directly.
        raise OSError(errno.EADDRNOTAVAIL, f"{place[0]} stands for all networks of the node")
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
    # The socket's former owner is dead, as this process holds the life lock.
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


async def serve(spec: ServerSpec, name: str, report: Callable[[dict[str, Any]], None]) -> None:
    """Serve until the last user has left. report: sends a report to the process that started the
    server. Raises OSError."""
    loop = asyncio.get_running_loop()
    folder = Folder.at(spec.root, mode=spec.mode).folder(SERVERS_FOLDER)
    life = ByteLocks(folder.open_or_create(f"{name}.lock"))
    # A previous server whose last user has just left is about to end.
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
    loop.set_exception_handler(_log_error)
    # Otherwise each encrypted connection has a buffer of 256 KiB, for requests of 300 bytes.
    SSLProtocol.max_size = 2**14
    tls = None if spec.credentials is None else spec.credentials.server_context()
    connections = ConnectionCounter(ServerLimits())
    readers = Workers(_READERS, name="peer-read")
    context = ServerContext(
        replies=Responder(held, {spec.secret.job: spec.secret}),
        connections=connections,
        readers=readers,
        tls=tls,
        refused=RefusalCounter().note,
    )
    to_users = await loop.create_unix_server(
        lambda: UserConnection(users), sock=_listen_to_users(folder, name)
    )
    to_peers = await loop.create_server(lambda: ServerConnection(context), sock=listener)
    report({"port": port, "is_taken": is_taken})
    try:
        loop.call_later(_FIRST_USER_S, lambda: None if users.count else done.set())
        await done.wait()
    finally:
        # Without the socket no new user finds this server.
        folder.remove(f"{name}.sock")
        to_users.close()
        to_peers.close()
        connections.clear()
        readers.close(timeout_s=0.0)


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an unexpected error of one connection, without its traceback."""
    del loop
    error = context.get("exception")
    if not isinstance(error, OSError):
        _log.warning("The server of the cache: %s (%r)", context.get("message"), error)


def main() -> int:
    """Read the spec and serve. Return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job handles Ctrl-C; the server ends after it
    output = sys.stdout

    def report(facts: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            output.write(json.dumps(facts) + "\n")
            output.close()

    name = sys.stdin.buffer.readline().decode("ascii").strip()
    spec = ServerSpec.load(sys.stdin.buffer.readline())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        asyncio.run(serve(spec, name, report))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        report({"error": reason, "is_address": isinstance(error, AddressError)})
        return 1
    return 0

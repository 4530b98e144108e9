"""Serve a node's cache to the other nodes of the job, in a separate process.

server_process.py starts the process and sends it a spec over a pipe, because that contains secrets.
It ends when no process of its node uses it any more. It loads neither torch nor numpy and needs
30 MB.

The main thread accepts connections, ends those that exceed a time limit, and serves them as long as
no call blocks: with a thread for each connection, threads that compete for the GIL take twice the
CPU time for ranges of 100 KB, on both sides. Another thread continues with blocking system calls
where the server may wait for something other than the client: TLS handshakes, ranges that aren't in
the page cache, lists, requests outside the protocol. It also encrypts large bodies, in parallel to
others. Plain bodies go from the file to the socket with sendfile. No request of a connection is
read while one is being answered, and only a small part of a body is in memory.

The number of connections is limited, in total and per address. A connection is unknown until it
carries a correctly signed request. At the limit, the oldest unknown connection is closed, so silent
connections can't block the job's.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import resource
import selectors
import signal
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.base import ByteLocks, Folder, wait_for
from penstock.cache.errors import log
from penstock.cache.peers.answers import END, HeldFiles, Responder, is_cached, read_head
from penstock.cache.peers.protocol import MOST_HEAD_BYTES, Span
from penstock.cache.peers.trust import Credentials, PeerSecret, prove_server
from penstock.cache.secrets import SafeLog
from penstock.cache.threads import Outcome, Workers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

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


_AT_ONCE_BYTES, _AT_ONCE_TLS_BYTES = 2**23, 2**17
"""The most bytes of a plain and of an encrypted answer that the main thread sends."""
_SEND_BYTES = 2**20
_TLS_STEP = 2**16
"""With larger steps the C library allocates and frees pages for each step, for twice the CPU
time."""
_HANDSHAKE = b"\x16"
_STACK_BYTES = 2**20
_PAUSE_S = 0.01
_BACKLOG = 1024
_WARN_EVERY_S = 60.0


def dispatch(selector: selectors.BaseSelector, timeout_s: float) -> None:
    """Wait for at most so many seconds until sockets are readable, and call what was registered for
    them, with the socket."""
    for key, _ in selector.select(timeout_s):
        try:
            key.data(key.fileobj)
        except OSError:  # the client is gone, or there are too many files
            time.sleep(_PAUSE_S)


class NodeServer:
    """The connections of a server. Call `dispatch` with its selector, and `end_late` from time to
    time, both on one thread.

    selector: waits for the sockets of the server. replies: answers requests. tls: None if
    connections are plain. It owns the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        replies: Responder,
        *,
        selector: selectors.BaseSelector,
        limits: ServerLimits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener, self.replies, self._tls = listener, replies, tls
        self.selector, self.limits = selector, limits or ServerLimits()
        self._lock = threading.Lock()
        self._connections: dict[ServerConnection, None] = {}  # the oldest first
        self._refused, self._next_warning_s = 0, 0.0
        self._threads = Workers(self.limits.connections, name="peer-serve")
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self._connections)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection; at the limits, end the oldest unknown one, or the new one if there
        is none. Raises OSError."""
        sock, place = listener.accept()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the client is gone
            sock.close()
            return
        connection = ServerConnection(self, sock, str(place[0]))
        if self._is_added(connection):
            connection.wait_for(_READABLE)
        else:
            connection.close()

    def _is_added(self, connection: ServerConnection) -> bool:
        victim = None
        with self._lock:
            same = [one for one in self._connections if one.address == connection.address]
            rivals = same if len(same) >= self.limits.of_one_address else self._connections
            if rivals is same or self.count >= self.limits.connections:
                victim = next((one for one in rivals if not one.is_known), None)
                if victim is None:
                    return False
                del self._connections[victim]
            self._connections[connection] = None
        if victim is not None:
            victim.end()
        return True

    def continue_on_thread(self, connection: ServerConnection) -> Outcome[None]:
        """Let another thread serve a connection. Raises RuntimeError if there are too many."""
        return self._threads.submit(ServerConnection.continue_on_thread, connection)

    def leave(self, connection: ServerConnection) -> None:
        """Record that a connection has ended. Safe to call twice."""
        with self._lock:
            self._connections.pop(connection, None)

    def refuse(self, address: str) -> None:
        """Count a refused connection or request; warn at most once a minute."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _WARN_EVERY_S
            log.warning(
                "The server of the cache refused requests that weren't correctly signed or "
                "encrypted (%d so far, the last from %s). Give every node of the job the same "
                "token, and block other clients from the port.",
                self._refused,
                address,
            )

    def end_late(self, now_s: float) -> None:
        """End the connections that have exceeded a time limit."""
        with self._lock:
            late = [one for one in self._connections if one.due_s <= now_s]
        for connection in late:
            connection.abort()

    def close(self) -> None:
        """End all connections."""
        self.selector.unregister(self._listener)
        self._listener.close()
        self.end_late(math.inf)
        self._threads.close(timeout_s=0.5)
        for connection in list(self._connections):
            connection.end()


_READABLE, _WRITABLE, _THREAD = selectors.EVENT_READ, selectors.EVENT_WRITE, 0
"""The event for which a connection waits: bytes from the client, room in the socket's buffer, or a
thread, because its next call may block."""


class ServerConnection:
    """One connection of a server, whose requests are answered one after another: on the selector's
    thread, with a socket that doesn't block, or on another thread, with one that blocks.

    due_s: the time of the monotonic clock at which the server ends it. is_known: True if it has
    carried a correctly signed request.
    """

    def __init__(self, server: NodeServer, sock: socket.socket, address: str) -> None:
        self.address, self._server, self._limits = address, server, server.limits
        self._sock = sock
        self._buffer = bytearray()
        self._steps = self._serve()
        self._awaited = _READABLE
        self._on_thread: Outcome[None] | None = None
        self.is_known = False
        self._allow(self._limits.head_s)

    def wait_for(self, step: int) -> None:
        """Continue on the selector's thread when the socket is ready."""
        self._awaited = step
        self._server.selector.register(self._sock, step, self._continue)

    def _continue(self, _: socket.socket) -> None:
        step, selector = self._step(), self._server.selector
        if step == _THREAD:
            selector.unregister(self._sock)
            try:
                self._on_thread = self._server.continue_on_thread(self)
            except RuntimeError:  # there are too many threads
                self.close()
        elif step is not None and step != self._awaited:
            self._awaited = step
            selector.modify(self._sock, step, self._continue)

    def continue_on_thread(self) -> None:
        """Serve on this thread until the client must send another request."""
        self._sock.setblocking(True)
        while (step := self._step()) == _THREAD:
            pass
        if step is not None:
            self._sock.setblocking(False)
            self.wait_for(step)

    def _step(self) -> int | None:
        """Serve until something must be waited for; return None if the connection has ended."""
        try:
            return next(self._steps)
        # The client is gone or too slow, the server is closing, or the file was truncated.
        except (StopIteration, OSError, EOFError):
            pass
        except Exception as error:
            log.warning("The server of the cache: a connection failed (%r)", error)
        self.close()
        return None

    def abort(self) -> None:
        """End the connection at once, from any thread; the one that serves it then closes it."""
        with contextlib.suppress(OSError):
            # The plain socket's method, because that of a TLS socket isn't thread-safe.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def end(self) -> None:
        """End the connection at once, on the selector's thread."""
        self.abort()
        if self._on_thread is None or self._on_thread.done():
            self.close()

    def close(self) -> None:
        """Close the connection, on the thread that serves it. Safe to call twice."""
        self._server.leave(self)
        with contextlib.suppress(KeyError, ValueError):  # it isn't registered
            self._server.selector.unregister(self._sock)
        self._steps.close()  # it refers to this object, and may have a file open
        self._sock.close()

    def _allow(self, seconds: float) -> None:
        """End the connection unless this is called again within so many seconds."""
        self.due_s = time.monotonic() + seconds

    def _serve(self) -> Generator[int, None, None]:
        """Answer requests until the client ends the connection or one was refused; yield what must
        be waited for."""
        sock, most_bytes = self._sock, _AT_ONCE_BYTES
        if isinstance(sock, ssl.SSLSocket):
            most_bytes = _AT_ONCE_TLS_BYTES
            yield _THREAD
            try:
                sock.do_handshake()
            except OSError:
                self._server.refuse(self.address)
                return
            self._allow(self._limits.head_s)
        while True:
            # Requests ahead of their turn must not delay other clients.
            is_ahead = self._buffer or (isinstance(sock, ssl.SSLSocket) and sock.pending())
            yield _THREAD if is_ahead else _READABLE
            head = yield from self._read_head()
            request = None if head is None else read_head(head)
            if request is None or not 0 < request.range_bytes <= most_bytes:
                yield _THREAD
            reply = self._server.replies.answer(request)
            self.is_known = self.is_known or reply.is_known
            self.due_s = math.inf
            try:
                if not reply.add_crcs(waits=False):
                    yield _THREAD
                    reply.add_crcs(waits=True)
                yield from self._send(reply)
            finally:
                reply.close()
            if not reply.keeps:
                if not reply.is_known:
                    self._server.refuse(self.address)
                return
            self._allow(self._limits.head_s if self._buffer else self._limits.idle_s)

    def _read_head(self) -> Generator[int, None, bytes | None]:
        """Return the next request's head; None if it has no end. Raises EOFError if the client has
        ended the connection."""
        buffer = self._buffer
        while (at := buffer.find(END)) < 0:
            # A TLS handshake is refused at once, because its client would wait for its time limit.
            if len(buffer) > MOST_HEAD_BYTES or buffer[:1] == _HANDSHAKE:
                return None
            try:
                received = self._sock.recv(MOST_HEAD_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield _READABLE
                continue
            if not received:
                raise EOFError
            if not buffer:
                self._allow(self._limits.head_s)
            buffer += received
        head = bytes(buffer[:at])
        del buffer[: at + len(END)]
        return head

    def _send(self, reply: ServerReply) -> Generator[int, None, None]:
        sock, head = self._sock, reply.head()
        if reply.file is None:
            message = head + reply.body
            for at in range(0, len(message), _SEND_BYTES):
                yield from self._send_all(message[at : at + _SEND_BYTES])
        elif isinstance(sock, ssl.SSLSocket):
            for start, size in _steps(reply.spans, _TLS_STEP):
                data = os.pread(reply.file.fd, size, start)
                if len(data) < size:
                    raise EOFError("the file is shorter than it was")
                yield from self._send_all(head + data)
                head = b""
        else:
            is_corked = len(reply.spans) > 1  # for one span it would cost twice the CPU time
            if is_corked:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            # The head is sent together with the first bytes, so that the client wakes once.
            yield from self._send_all(head, socket.MSG_MORE)
            for start, size in _steps(reply.spans, _SEND_BYTES):
                self._allow(self._limits.write_s)
                while size:
                    try:
                        sent = os.sendfile(sock.fileno(), reply.file.fd, start, size)
                    except BlockingIOError:
                        yield _WRITABLE
                        if not is_cached(reply.file.fd, start, start + size):
                            yield _THREAD
                        continue
                    if not sent:
                        raise EOFError("the file is shorter than it was")
                    start, size = start + sent, size - sent
            if is_corked:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    def _send_all(self, data: bytes, flags: int = 0) -> Generator[int, None, None]:
        """Send at most a MiB."""
        self._allow(self._limits.write_s)
        left = memoryview(data)
        while left:
            try:
                left = left[self._sock.send(left, flags) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                yield _WRITABLE


def _steps(spans: Sequence[Span], most: int) -> Iterator[Span]:
    """Yield the start and the size of parts of spans, each of at most `most` bytes."""
    for start, end in spans:
        for at in range(start, end, most):
            yield at, min(most, end - at)


_OF_ADDRESS = frozenset(
    {errno.EADDRNOTAVAIL, errno.EADDRINUSE, errno.EACCES, errno.EINVAL, errno.EAFNOSUPPORT}
)
"""Errors of listening that are caused by the address, not by the machine."""


def listen(host: str, port: int) -> tuple[socket.socket, bool]:
    """Listen at one address, or at another free port if that one is taken. Return the socket, and
    True if the port was taken. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        # The host's name resolves to it; Peers refuses it if written directly.
        raise OSError(errno.EADDRNOTAVAIL, f"{place[0]} stands for all networks of the node")
    try:
        listener, is_taken = socket.create_server(place, family=family, backlog=_BACKLOG), False
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise
        place = (place[0], 0, *place[2:])
        listener, is_taken = socket.create_server(place, family=family, backlog=_BACKLOG), True
    listener.setblocking(False)
    return listener, is_taken


# -- the processes of the node that use the server

SERVERS_FOLDER = "peers"
"""The subfolder of a cache that holds the lock and the socket of each server."""
LIFE_BYTE, START_BYTE = 0, 1
"""Bytes of a server's lock file. A running server locks the first, and a process that starts a
server the second."""
_MOST_LOG = 2000
_CREDENTIALS = struct.Struct("3i")


def socket_path(folder: Folder, name: str) -> str:
    """Return the path of a server's socket, which is short even in a folder with a long path."""
    return f"/proc/self/fd/{folder.fd}/{name}.sock"


class Users(logging.Handler):
    """The server's ends of its users' connections. As a log handler, it sends messages to the
    oldest user, which logs them.

    A user is a process that holds a connection: the one that started the server, which passes it
    the connection, or another one, through the server's socket in the cache folder. The system
    closes the connection when the process ends, however it dies: the server ends after its last
    user, and a user notices the server's death in the same way. connected: these connections, the
    oldest first. name: of the socket, whose former server is dead. selector: calls this object when
    a connection is readable.
    """

    def __init__(
        self,
        first: socket.socket,
        folder: Folder,
        name: str,
        secret: PeerSecret,
        *,
        port: int,
        selector: selectors.BaseSelector,
    ) -> None:
        super().__init__(logging.INFO)
        self._folder, self._file = folder, f"{name}.sock"
        self._secret, self._port = secret, port
        self._selector = selector
        self.connected: list[socket.socket] = []
        folder.remove(self._file)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            self._listener.bind(socket_path(folder, name))
        finally:
            os.umask(before)
        self._listener.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._add(first)

    def _accept(self, listener: socket.socket) -> None:
        user, _ = listener.accept()
        found = user.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(found)
        if uid in (0, os.geteuid()):
            self._add(user)
        else:
            user.close()

    def _add(self, user: socket.socket) -> None:
        user.setblocking(False)
        self.connected.append(user)
        self._selector.register(user, selectors.EVENT_READ, self._receive)

    def _receive(self, user: socket.socket) -> None:
        """Prove to a new user that the server knows the secret, or remove one that has left."""
        try:
            nonce = user.recv(100).decode("ascii", "replace")
        except OSError:
            nonce = ""
        if nonce:
            proof = prove_server(self._secret, nonce, str(self._port))
            send_message(user, port=self._port, pid=os.getpid(), proof=proof)
            return
        self._selector.unregister(user)
        self.connected.remove(user)
        user.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log message to the oldest user."""
        for user in self.connected[:1]:
            send_message(user, level=record.levelno, log=self.format(record)[:_MOST_LOG])

    def close(self) -> None:
        """Accept no users any more."""
        self._folder.remove(self._file)
        self._listener.close()
        super().close()


def send_message(user: socket.socket, **message: Any) -> None:
    """Send a message to a user, as one packet of JSON."""
    with contextlib.suppress(OSError):  # it doesn't read, or has left
        user.send(json.dumps(message).encode())


# -- the process

_LIFE_S = 15.0
_TICK_S = 0.5
"""Seconds between looks for connections that have exceeded a time limit."""


def serve(
    first: socket.socket,
    *,
    name: str,
    root: str,
    mode: int,
    host: str,
    port: int,
    secret: PeerSecret,
    credentials: Credentials | None,
) -> None:
    """Serve a cache folder until the last user has left, and send the first user a report.

    name: of the server's files. root, mode: the path and the permission bits of the cache folder.
    host, port: the address at which the server listens; port 0 stands for any free port. Raises
    OSError.
    """
    folder = Folder.at(root, mode=mode).folder(SERVERS_FOLDER)
    life = ByteLocks(folder.open_or_create(f"{name}.lock"))
    # A previous server whose last user has just left is about to end.
    wait_for(lambda: life.lock(LIFE_BYTE), timeout_s=_LIFE_S, what=f"the server {name}")
    held = HeldFiles(root, mode=mode)
    try:
        listener, is_taken = listen(host, port)
    except OSError as error:
        is_address = isinstance(error, socket.gaierror) or error.errno in _OF_ADDRESS
        send_message(first, error=error.strerror, is_address=is_address)
        return
    port = listener.getsockname()[1]
    tls = None if credentials is None else credentials.server_context()
    with selectors.DefaultSelector() as selector:
        server = NodeServer(listener, Responder(held, secret), selector=selector, tls=tls)
        users = Users(first, folder, name, secret, port=port, selector=selector)
        users.addFilter(SafeLog())
        log.addHandler(users)
        log.setLevel(logging.INFO)
        log.propagate = False
        send_message(first, port=port, pid=os.getpid(), is_taken=is_taken)
        late_s = 0.0
        try:
            while users.connected:
                dispatch(selector, _TICK_S)
                if (now_s := time.monotonic()) >= late_s:
                    server.end_late(now_s)
                    late_s = now_s + _TICK_S
        finally:
            # Without the socket no new user finds this server.
            users.close()
            server.close()


def main(first: socket.socket, spec: dict[str, Any]) -> None:
    """Serve as the process that started this one specified, over its connection as a user."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the job handles Ctrl-C; the server ends after it
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    secret, tls = PeerSecret(spec.pop("secret").encode("latin-1")), spec.pop("credentials")
    try:
        credentials = None if tls is None else Credentials(**tls)
        serve(first, secret=secret, credentials=credentials, **spec)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        send_message(first, error=reason, is_address=False)

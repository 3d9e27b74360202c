"""A loopback HTTP server that sends exactly the bytes of a script and records when it really sent them.

    def reply(number, request):            # the number-th request since the start
        return [b"HTTP/1.1 200 OK\r\n", Wait(0.05), b"...", FIN]

    with GoldenServer(reply) as server:
        ...                                # load server.url
        server.answers[0].sent[1]          # Sent(before_ns, after_ns, size): the second piece of bytes

Stamps are ns of CLOCK_MONOTONIC. Over loopback the kernel hands a segment to the receiver inside the send call, so a
kernel receive stamp lies between before_ns and after_ns however busy the machine is. One thread per connection, in
the process of the test; scripted_server.py has one in a process of its own for whole runs.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Wait(NamedTuple):
    seconds: float  # after the step before


FIN = "fin"  # close the sending side, then the connection
RST = "rst"  # reset the connection
Step = bytes | Wait | str


class Received(NamedTuple):
    """One request as it came."""

    connection: int  # counts from 0
    head: bytes
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.head.decode("latin-1").split("\r\n")[1:] if line)
        return {name.lower(): value.strip() for name, _, value in pairs}


class Sent(NamedTuple):
    before_ns: int
    after_ns: int
    size: int


@dataclass
class Answer:
    request: Received
    complete_ns: int  # the request was read
    sent: list[Sent] = field(default_factory=list)
    client_left: bool = False  # it closed, or reset, before the script was over


Reply = Callable[[int, Received], Iterable[Step]]


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def event(text: str, finish: str | None = None) -> bytes:
    """A token of /v1/completions as one server-sent event."""
    reason = b"null" if finish is None else b'"%b"' % finish.encode()
    return b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n' % (text.encode(), reason)


DONE = b"data: [DONE]\n\n"


def stream(tokens: int, wait_s: float = 0.0, head: bytes = SSE_HEAD) -> list[Step]:
    """A whole good answer, an event a chunk."""
    steps: list[Step] = [head]
    for index in range(tokens):
        steps += [Wait(wait_s), chunk(event(" w", "length" if index == tokens - 1 else None))]
    return [*steps, chunk(DONE), END]


class GoldenServer:
    """Context manager.

    nodelay=False leaves Nagle's algorithm on. tls: a server context. rest_s: close a connection that rests so long.
    """

    def __init__(
        self,
        reply: Reply,
        *,
        family: socket.AddressFamily = socket.AF_INET,
        nodelay: bool = True,
        tls: ssl.SSLContext | None = None,
        rest_s: float | None = None,
        port: int = 0,
    ) -> None:
        self.answers: list[Answer] = []
        self.num_connections = 0
        self._reply = reply
        self._nodelay = nodelay
        self._tls = tls
        self._rest_s = rest_s
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self._listener = socket.create_server((self._host, port), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}"

    @property
    def num_open(self) -> int:
        """Connections that neither side has closed."""
        with self._lock:
            return len(self._open)

    def __enter__(self) -> GoldenServer:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Reset what is open, stop listening, and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                _reset_on_close(sock)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), "a thread of the golden server hangs"

    def _spawn(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.num_connections += 1  # before it can be answered, so that a client's view is never ahead
                self._spawn(self._serve, sock, self.num_connections - 1)

    def _serve(self, sock: socket.socket, connection: int) -> None:
        # over loopback, Nagle's algorithm would make "sent" a lie: the kernel holds a small segment for the last ACK
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(self._nodelay))
        with self._lock:
            self._open.add(sock)
        try:
            if self._tls is not None:
                with self._lock:
                    self._open.discard(sock)
                sock = self._tls.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open.add(sock)
            while (received := self._receive(sock, connection)) is not None:
                with self._lock:
                    number = len(self.answers)
                    answer = Answer(received, time.monotonic_ns())
                    self.answers.append(answer)
                if not self._follow(sock, answer, self._reply(number, received)):
                    return
        except OSError:  # the client left, or kill(); a TLS client that did not like the certificate
            pass
        finally:
            with self._lock:
                self._open.discard(sock)
                sock.close()

    def _receive(self, sock: socket.socket, connection: int) -> Received | None:
        sock.settimeout(self._rest_s)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = sock.recv(65536)
            if not more:
                return None
            data += more
            sock.settimeout(None)
        head, body = data[:end], [data[end + 4 :]]
        left = int(Received(connection, head, b"").headers.get("content-length", 0)) - len(body[0])
        while left > 0:
            body.append(sock.recv(min(left, 1 << 20)))
            if not body[-1]:
                return None
            left -= len(body[-1])
        return Received(connection, head, b"".join(body))

    def _follow(self, sock: socket.socket, answer: Answer, steps: Iterable[Step]) -> bool:
        """Whether the connection can take another request."""
        due = time.monotonic()
        for step in steps:
            if isinstance(step, Wait):
                due += step.seconds  # absolute, so that delays do not add up
                time.sleep(max(0.0, due - time.monotonic()))
            elif isinstance(step, str):
                if step == RST:
                    _reset_on_close(sock)
                else:
                    sock.shutdown(socket.SHUT_WR)
                    sock.settimeout(10)
                    with contextlib.suppress(OSError):
                        while sock.recv(65536):  # unread bytes would turn the close into a reset
                            pass
                return False
            else:
                before_ns = time.monotonic_ns()
                try:
                    sock.sendall(step)
                except OSError:
                    answer.client_left = True
                    return False
                answer.sent.append(Sent(before_ns, time.monotonic_ns(), len(step)))
        return True


def _reset_on_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

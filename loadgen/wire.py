"""The transport for plain http: non-blocking sockets with kernel receive stamps.

All streams sit in one private epoll set; the event loop watches that one descriptor, so a read costs no callback of its
own. The kernel stamps each segment as it arrives (SO_TIMESTAMPNS), so it does not matter for the figures when Python
gets round to reading: with many streams the set is drained every 2 ms, which halves the CPU per event. Only two events
of one stream within one drain would share a stamp; when streams turn out to be that fast, the set is drained at once.

While a request runs, a read appends (stamp, bytes) and looks at the bytes for a possible end; nothing is parsed. A
possible end (a last chunk, or [DONE]) is confirmed by a real parser, so bytes that merely look like one end nothing.

Acknowledgements: the kernel answers small segments at once ("quick ACK"), which is a third of all CPU here. Without
them an ACK may come 40 ms late, which is invisible unless the server's socket has Nagle's algorithm on: then it would
hold the next token back for the ACK. Quick ACKs are therefore turned off only for servers whose HTTP stack sets
TCP_NODELAY, known by their Server header (uvicorn and aiohttp run on asyncio or uvloop, which set it on every TCP
transport), and turned on again for good when an answer shows the signature of such a stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import sys
import time
import zlib
from array import array
from heapq import heappop, heappush
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from loadgen.clock import NS_PER_MS, NS_PER_S, now_ns
from loadgen.http1 import MAX_BODY_BYTES, Deframer, DoneScanner, Framing, Head, NotHttp, TooLarge, parse_head
from loadgen.record import Failure, FailureKind
from loadgen.transport import Exchange, Target, TransportUsage

SUPPORTED = sys.platform == "linux"

_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TCP_QUICKACK = 12  # linux/tcp.h
_TIMESPEC = struct.Struct("qq")
_READ_BYTES = 65536
_CONTROL_BYTES = 64
_DRAIN_S = 0.002
_OVERDUE_NS = 4 * NS_PER_MS
_MANY_STREAMS = 16  # from here on drain by the timer
_PACE_NS = 50 * NS_PER_MS  # over this long the time between two reads of a stream is estimated
_FAST_NS = 6 * NS_PER_MS  # streams faster than this are not left to the timer
_SWEEP_S = 0.25  # how often timeouts are looked for
_LINGER_S = 0.001  # how long a request waits behind its [DONE] for the end of the message, to use its connection again
_REST_NS = NS_PER_S  # how long a connection may wait for that end, without its request
_OPEN_AT_ONCE = 256
_STALL_NS = (38 * NS_PER_MS, 46 * NS_PER_MS)  # a delayed ACK holds a Nagle sender back for 40 ms
_STALLS = 4  # so many of them are no chance, in one answer or in one of two answers
_EPOLLIN = select.EPOLLIN if SUPPORTED else 1
_EPOLLOUT = select.EPOLLOUT if SUPPORTED else 4


class WireExchange(Exchange):
    """Keeps the body as it came, in its framing; unframed when it is read."""

    __slots__ = ("head", "_body")

    def __init__(self) -> None:
        super().__init__()
        self.head: Head | None = None
        self._body: tuple[list[bytes], array[int]] | None = None

    def body_pieces(self) -> tuple[list[bytes], array[int]]:
        if self._body is None:
            self._body = _unframe(self)
        return self._body

    def framed_pieces(self) -> tuple[list[bytes], array[int]] | None:
        if self.head is None or self.head.framing is not Framing.CHUNKED or "content-encoding" in self.headers:
            return None
        return self.pieces, self.stamps


def _unframe(exchange: WireExchange) -> tuple[list[bytes], array[int]]:
    """Body bytes per read; reads that brought framing alone are dropped. What came before a fault is kept."""
    pieces: list[bytes] = []
    stamps: array[int] = array("q")
    if exchange.head is None:
        return pieces, stamps
    deframer = Deframer(exchange.head.framing, exchange.head.length)
    decode = _decoder(exchange.headers.get("content-encoding", "identity").lower())
    for raw, stamp_ns in zip(exchange.pieces, exchange.stamps, strict=True):
        fault = False
        try:
            body = deframer.feed(raw)
        except (NotHttp, TooLarge) as error:
            body, fault = getattr(error, "before", b""), True
        try:
            body = decode(body)
        except zlib.error as error:
            raise ValueError(f"content-encoding: {error}") from None
        if body:
            pieces.append(body)
            stamps.append(stamp_ns)
        if fault:
            break
    return pieces, stamps


def _decoder(coding: str) -> Any:
    """A function of body bytes; identity was asked for, but some servers compress all the same."""
    if coding in ("gzip", "x-gzip", "deflate"):
        return zlib.decompressobj(47 if coding != "deflate" else 15).decompress
    if coding in ("", "identity"):
        return lambda body: body
    raise ValueError(f"content-encoding {coding!r} is not supported")


class _Connection:
    """One socket: what it is doing, and for whom."""

    __slots__ = (
        "sock", "fd", "recvmsg", "exchange", "future", "stamps", "pieces", "num_read", "deframer", "scanner", "scanned",
        "head_bytes", "unsent", "answers", "nodelay_server", "deadline_ns", "all_kernel", "linger", "done_ns",
    )  # fmt: skip

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.recvmsg = sock.recvmsg
        self.answers = 0  # completed on this connection: above 0 it is a kept-alive one
        self.nodelay_server = False
        self.reset()

    def reset(self) -> None:
        self.exchange: WireExchange | None = None
        self.future: asyncio.Future[None] | None = None
        self.stamps: array[int] = array("q")
        self.pieces: list[bytes] = []
        self.num_read = 0
        self.deframer: Deframer | None = None
        self.scanner: DoneScanner | None = None
        self.scanned = 0  # pieces the deframer has seen
        self.head_bytes = b""
        self.unsent: memoryview | None = None
        self.deadline_ns: int | None = None
        self.all_kernel = True
        self.linger: asyncio.TimerHandle | None = None
        self.done_ns: int | None = None  # when [DONE] arrived, if the message is not over


class _Pace:
    """Chooses how to drain: at once with few streams, every 2 ms with many, and at once again when the streams are so
    fast that two events of one would often meet within a drain."""

    __slots__ = ("_since_ns", "_reads", "_fast")

    def __init__(self) -> None:
        self._since_ns = 0
        self._reads = 0
        self._fast = False

    def by_timer(self, now: int, num_reads: int, num_active: int) -> bool:
        self._reads += num_reads
        elapsed_ns = now - self._since_ns
        if elapsed_ns > _PACE_NS:
            apart_ns = elapsed_ns * num_active / self._reads if self._reads else elapsed_ns
            self._fast = apart_ns < _FAST_NS
            self._since_ns = now
            self._reads = 0
        return num_active >= _MANY_STREAMS and not self._fast


class Wire:
    """loadgen.transport.Transport on plain sockets. Make it inside a running event loop's thread; see the module."""

    name = "wire"

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the wire transport speaks plain http, not {target.base_url}")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path
        self._timeouts = target.timeouts
        fixed = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",
            **target.headers,
        }
        self._fixed_head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items()).encode("latin-1")
        self._addresses: list[tuple[int, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._free: list[_Connection] = []
        self._active = 0
        self._next_drain: asyncio.TimerHandle | None = None  # set while draining by the timer
        self._pace = _Pace()
        self._offset_ns = _realtime_offset_ns()
        self._drained_ns = now_ns()
        self._quick_acks = False  # True: stalls were seen, leave the kernel's default alone
        self._watched = self._stalled = 0  # answers without quick ACKs, and those with a stall
        self._reads = 0
        self._opened = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._timer = _Timer()

    # ------------------------------------------------------------------ the seam

    async def open(self, connections: int) -> None:
        wanted = connections - len(self._free)
        for start in range(0, wanted, _OPEN_AT_ONCE):
            batch = [self._connect() for _ in range(min(_OPEN_AT_ONCE, wanted - start))]
            for result in await asyncio.gather(*batch):
                if isinstance(result, Failure):
                    return  # the requests themselves will say so
                self._free.append(result)

    async def exchange(
        self, method: str, path: str, request_id: str | None, body: bytes, *, planned_ns: int | None = None
    ) -> WireExchange:
        exchange = WireExchange()
        request = self._serialize(method, path, request_id, body)
        connection = await self._acquire(exchange)
        if planned_ns is not None:
            while planned_ns > now_ns():
                try:
                    await self._timer.sleep_until_ns(planned_ns)
                except asyncio.CancelledError:
                    if connection is not None:
                        self._release(connection)
                    raise
            if connection is not None and connection.fd < 0:  # the server closed it meanwhile
                connection = await self._acquire(exchange)
        if connection is None:
            return exchange
        reused = connection.answers > 0
        await self._converse(connection, exchange, request)
        if reused and exchange.first_byte_ns is None and _is_dead(exchange):
            again = WireExchange()
            again.reopened = True
            fresh = await self._acquire(again, fresh=True)
            if fresh is not None:
                await self._converse(fresh, again, request)
            return again
        return exchange

    async def sleep_until_ns(self, when_ns: int) -> None:
        while when_ns > now_ns():
            await self._timer.sleep_until_ns(when_ns)

    def usage(self) -> TransportUsage:
        unread = 0
        for connection in self._connections.values():
            if connection.exchange is not None:
                unread += _bytes_waiting(connection.fd)
        return TransportUsage(reads=self._reads, unread_bytes=unread, num_connections=self._opened)

    async def close(self) -> None:
        for handle in (self._sweeper, self._next_drain):
            if handle is not None:
                handle.cancel()
        for connection in list(self._connections.values()):
            self._drop(connection)
        if self._loop is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._loop = None
        self._timer.close()
        self._epoll.close()

    # ------------------------------------------------------------------ connections

    def _serialize(self, method: str, path: str, request_id: str | None, body: bytes) -> bytes:
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        name = f"X-Request-Id: {request_id}\r\n".encode("latin-1") if request_id else b""
        return b"%b%b%bContent-Length: %d\r\n\r\n%b" % (line, self._fixed_head, name, len(body), body)

    async def _acquire(self, exchange: WireExchange, fresh: bool = False) -> _Connection | None:
        """A connection to use, or None with the exchange's failure set."""
        while self._free and not fresh:
            connection = self._free.pop()
            if connection.fd >= 0:
                return connection
        result = await self._connect()
        if isinstance(result, Failure):
            exchange.failure = result
            exchange.end_ns = now_ns()
            return None
        return result

    async def _connect(self) -> _Connection | Failure:
        loop = self._attach()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                if not self._addresses:
                    found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                    self._addresses = [(family, address) for family, _, _, _, address in found]
                error: OSError | None = None
                for family, address in self._addresses:
                    sock = None
                    try:
                        sock = socket.socket(family, socket.SOCK_STREAM)
                        sock.setblocking(False)
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        with contextlib.suppress(OSError):
                            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                        await loop.sock_connect(sock, address)
                    except OSError as problem:
                        if sock is not None:
                            sock.close()
                        error = problem
                    except BaseException:
                        if sock is not None:
                            sock.close()
                        raise
                    else:
                        return self._adopt(sock)
                assert error is not None
                return _connect_failure(error)
        except TimeoutError:
            return Failure(
                FailureKind.CONNECT_TIMEOUT,
                f"no connection to {self._host}:{self._port} in {self._timeouts.connect_s} s",
            )
        except OSError as problem:  # the name cannot be resolved
            return _connect_failure(problem)

    def _adopt(self, sock: socket.socket) -> _Connection:
        connection = _Connection(sock)
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, _EPOLLIN)
        self._opened += 1
        return connection

    def _attach(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._epoll.fileno(), self._drain)
            self._timer.attach(self._loop)
            self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)
        return self._loop

    def _release(self, connection: _Connection) -> None:
        if connection.fd >= 0:
            connection.reset()
            self._free.append(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.fd < 0:
            return
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(connection.fd)
        del self._connections[connection.fd]
        connection.fd = -1
        connection.sock.close()
        if connection.linger is not None:
            connection.linger.cancel()

    # ------------------------------------------------------------------ one request

    async def _converse(self, connection: _Connection, exchange: WireExchange, request: bytes) -> None:
        loop = self._attach()
        connection.reset()
        connection.exchange = exchange
        connection.future = future = loop.create_future()
        total_s = self._timeouts.total_s
        self._active += 1
        exchange.sent_ns = now_ns()
        if exchange.sent_ns - self._drained_ns > _OVERDUE_NS and self._active >= _MANY_STREAMS:
            # many requests start in one turn of the event loop: the streams under way must not wait for all of them
            self._read_ready()
            exchange.sent_ns = now_ns()
        if total_s is not None:
            connection.deadline_ns = exchange.sent_ns + round(total_s * NS_PER_S)
        try:
            sent = connection.sock.send(request)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._fail(connection, FailureKind.CUT_OFF, f"the connection broke while sending: {error.strerror}")
            sent = len(request)
        if sent < len(request):
            connection.unsent = memoryview(request)[sent:]
            self._epoll.modify(connection.fd, _EPOLLIN | _EPOLLOUT)
        try:
            await future
        except asyncio.CancelledError:
            if connection.exchange is exchange:
                self._active -= 1
                connection.exchange = None
                self._drop(connection)
            raise

    def _send_rest(self, connection: _Connection) -> None:
        if connection.unsent is None:
            return
        try:
            sent = connection.sock.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(connection, FailureKind.CUT_OFF, f"the connection broke while sending: {error.strerror}")
            return
        connection.unsent = connection.unsent[sent:]
        if not connection.unsent:
            connection.unsent = None
            self._epoll.modify(connection.fd, _EPOLLIN)

    def _finish(self, connection: _Connection, end_ns: int | None = None) -> None:
        """The answer is over, at its [DONE] or at end_ns; the connection is used again when the message, too, has ended
        cleanly."""
        exchange, future, deframer = connection.exchange, connection.future, connection.deframer
        assert exchange is not None and future is not None
        self._watch_for_stalls(connection)
        self._settle(connection, exchange, connection.done_ns or end_ns or now_ns())
        connection.answers += 1
        head = exchange.head
        if head is None or not head.keep_alive or deframer is None or deframer.excess:
            self._drop(connection)
        elif deframer.over:
            self._release(connection)
        else:
            connection.reset()
            connection.deframer = deframer
            connection.deadline_ns = now_ns() + _REST_NS
        if not future.done():
            future.set_result(None)

    def _fail(self, connection: _Connection, kind: FailureKind, detail: str, end_ns: int | None = None) -> None:
        exchange, future = connection.exchange, connection.future
        if exchange is None or future is None:
            self._drop(connection)
            return
        status = exchange.head.status if exchange.head is not None else None
        exchange.failure = Failure(kind, detail, status)
        self._settle(connection, exchange, end_ns if end_ns is not None else now_ns())
        self._drop(connection)
        if not future.done():
            future.set_result(None)

    def _settle(self, connection: _Connection, exchange: WireExchange, end_ns: int) -> None:
        exchange.pieces, exchange.stamps = connection.pieces, connection.stamps
        exchange.end_ns = end_ns
        exchange.kernel_stamps = connection.all_kernel and connection.num_read > 0
        if exchange.head is not None:
            exchange.status, exchange.headers = exchange.head.status, exchange.head.headers
        connection.exchange = None
        if connection.linger is not None:
            connection.linger.cancel()
            connection.linger = None
        self._active -= 1

    # ------------------------------------------------------------------ reading

    def _drain(self) -> None:
        """The event loop's call: read, and choose when to read next."""
        num_reads = self._read_ready()
        self._schedule(self._pace.by_timer(self._drained_ns, num_reads, self._active))

    def _read_ready(self) -> int:
        """Read every ready stream once; gives how many. The hot path: some 5 us an event, most of it in the kernel."""
        begin_ns = now_ns()
        offset_ns = self._offset_ns
        fresh_ns = _realtime_offset_ns()
        stepped = abs(fresh_ns - offset_ns) > NS_PER_MS  # the wall clock was set
        self._offset_ns = fresh_ns
        if not stepped:
            offset_ns = fresh_ns
        connections = self._connections
        unpack = _TIMESPEC.unpack
        ready = self._epoll.poll(0, 4096)
        for fd, mask in ready:
            connection = connections.get(fd)
            if connection is None:
                continue
            if mask & _EPOLLOUT:
                self._send_rest(connection)
                if not mask & _EPOLLIN:
                    continue
            try:
                data, control, _, _ = connection.recvmsg(_READ_BYTES, _CONTROL_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                self._on_error(connection, error)
                continue
            if not data:
                self._on_eof(connection)
                continue
            if control:
                seconds, nanoseconds = unpack(control[0][2])
                stamp_ns = seconds * 1_000_000_000 + nanoseconds - offset_ns
                if stepped:
                    stamp_ns = self._stamp_over_step(stamp_ns, offset_ns, fresh_ns)
            else:
                stamp_ns = now_ns()
                connection.all_kernel = False
            if connection.num_read == 0:
                self._on_first(connection, data, stamp_ns)
                continue
            connection.stamps.append(stamp_ns)
            connection.pieces.append(data)
            connection.num_read += 1
            if connection.num_read == 2 and connection.nodelay_server:
                self._delay_acks(connection)
            if data[-5:] == b"0\r\n\r\n" or b"[DONE]" in data or connection.deframer is not None:
                self._look_for_end(connection)
        self._reads += len(ready)
        self._drained_ns = begin_ns
        return len(ready)

    def _schedule(self, by_timer: bool) -> None:
        loop = self._attach()
        if by_timer:
            if self._next_drain is None:
                loop.remove_reader(self._epoll.fileno())
            self._next_drain = loop.call_later(_DRAIN_S, self._drain)
        elif self._next_drain is not None:
            self._next_drain = None
            loop.add_reader(self._epoll.fileno(), self._drain)

    def _stamp_over_step(self, stamp_ns: int, old_offset_ns: int, new_offset_ns: int) -> int:
        """The wall clock was set between two drains: take the offset that puts the arrival between them."""
        for candidate in (stamp_ns, stamp_ns + old_offset_ns - new_offset_ns):
            if self._drained_ns - NS_PER_MS <= candidate <= now_ns():
                return candidate
        return now_ns()

    def _on_first(self, connection: _Connection, data: bytes, stamp_ns: int) -> None:
        """Bytes of the head. The body bytes behind it are the first piece."""
        exchange = connection.exchange
        if exchange is None:
            self._on_rest(connection, data)
            return
        if exchange.first_byte_ns is None:
            exchange.first_byte_ns = stamp_ns
        connection.head_bytes += data
        try:
            head = parse_head(connection.head_bytes)
        except NotHttp as error:
            self._fail(connection, FailureKind.PROTOCOL, str(error), stamp_ns)
            return
        except TooLarge as error:
            self._fail(connection, FailureKind.TOO_LARGE, str(error), stamp_ns)
            return
        if head is None:
            return
        exchange.head = head
        connection.num_read = 1
        rest = connection.head_bytes[head.body_start :]
        connection.head_bytes = b""
        if rest:
            connection.stamps.append(stamp_ns)
            connection.pieces.append(rest)
        connection.nodelay_server = not self._quick_acks and _sets_nodelay(head.headers.get("server", ""))
        if connection.nodelay_server:
            self._delay_acks(connection)
        if head.framing is not Framing.CHUNKED or rest[-5:] == b"0\r\n\r\n" or b"[DONE]" in rest:
            self._look_for_end(connection, stamp_ns)

    def _on_rest(self, connection: _Connection, data: bytes) -> None:
        """The rest of a message whose [DONE] was seen; or bytes that nobody asked for."""
        deframer = connection.deframer
        if deframer is not None:
            with contextlib.suppress(NotHttp, TooLarge):
                deframer.feed(data)
                if not deframer.over:
                    return
                if not deframer.excess:
                    self._release(connection)
                    return
        self._drop(connection)

    def _look_for_end(self, connection: _Connection, stamp_ns: int | None = None) -> None:
        """Confirm a possible end with a real parser: over the last piece alone where that is whole chunks (nearly
        always), else over all pieces that the parser has not seen."""
        exchange = connection.exchange
        if exchange is None or exchange.head is None:
            self._drop(connection)
            return
        head = exchange.head
        if connection.deframer is None:
            if head.framing is Framing.CHUNKED and self._ends_with_whole_chunks(connection):
                return
            connection.deframer = Deframer(head.framing, head.length)
            connection.scanner = DoneScanner() if _is_event_stream(head) else None
        deframer, scanner = connection.deframer, connection.scanner
        pieces, stamps = connection.pieces, connection.stamps
        try:
            while connection.scanned < len(pieces) and not deframer.over:
                index = connection.scanned
                connection.scanned += 1
                body = deframer.feed(pieces[index])
                if scanner is not None and body and scanner.feed(body):
                    connection.scanner = scanner = None
                    self._on_done(connection, stamps[index], deframer.over)
        except (NotHttp, TooLarge) as error:
            kind = FailureKind.TOO_LARGE if isinstance(error, TooLarge) else FailureKind.PROTOCOL
            self._fail(connection, kind, str(error), stamps[-1])
            return
        if deframer.over:
            self._finish(connection, stamps[connection.scanned - 1] if stamps else stamp_ns)

    def _ends_with_whole_chunks(self, connection: _Connection) -> bool:
        """Settle the common end, a last piece of whole chunks behind pieces that end a chunk; False: not this case."""
        pieces = connection.pieces
        if len(pieces) < 2 or not pieces[-2].endswith(b"\r\n"):
            return False
        deframer = Deframer(Framing.CHUNKED)
        try:
            body = deframer.feed(pieces[-1])
        except (NotHttp, TooLarge):
            return False
        done = connection.exchange is not None and _is_event_stream(connection.exchange.head)
        done = done and DoneScanner().feed(body)
        if not deframer.over and not (done and deframer.between_chunks):
            return False
        connection.deframer, connection.scanned = deframer, len(pieces)
        if done:
            self._on_done(connection, connection.stamps[-1], deframer.over)
        if deframer.over:
            self._finish(connection, connection.stamps[-1])
        return True

    def _on_done(self, connection: _Connection, stamp_ns: int, over: bool) -> None:
        """The answer is over; the rest of its message should be here at once, and its end does not wait for it."""
        connection.done_ns = stamp_ns
        if not over:
            connection.linger = self._attach().call_later(_LINGER_S, self._finish, connection)

    def _on_eof(self, connection: _Connection) -> None:
        exchange = connection.exchange
        if exchange is None:
            self._drop(connection)
            return
        if exchange.head is None:
            self._fail(connection, FailureKind.CUT_OFF, "the connection was closed before the answer")
            return
        self._look_for_end(connection)
        if connection.exchange is not exchange:
            return
        if connection.linger is not None or exchange.head.framing is Framing.CLOSE:
            if connection.deframer is not None:
                connection.deframer.over = True
            self._finish(connection, connection.stamps[-1] if connection.stamps else now_ns())
            return
        self._fail(connection, FailureKind.CUT_OFF, "the connection was closed in the middle of the answer")

    def _on_error(self, connection: _Connection, error: OSError) -> None:
        if connection.exchange is None:
            self._drop(connection)
            return
        where = "before" if connection.exchange.head is None else "in the middle of"
        if connection.linger is not None:
            self._finish(connection)
            return
        self._fail(connection, FailureKind.CUT_OFF, f"the connection broke {where} the answer: {error.strerror}")

    # ------------------------------------------------------------------ acknowledgements

    def _delay_acks(self, connection: _Connection) -> None:
        if not self._quick_acks:
            with contextlib.suppress(OSError):
                connection.sock.setsockopt(socket.IPPROTO_TCP, _TCP_QUICKACK, 0)

    def _watch_for_stalls(self, connection: _Connection) -> None:
        """A server that waits for our ACKs shows gaps of 40 ms, each followed by several events in one read. Some
        kernels end that after the first stall of an answer, others do not."""
        if not connection.nodelay_server or self._quick_acks or len(connection.pieces) < 3 * _STALLS:
            return
        stamps, pieces = connection.stamps, connection.pieces
        self._watched += 1
        if stamps[-1] - stamps[0] < _STALL_NS[0]:
            return
        gaps = np.diff(np.asarray(stamps))
        late = np.flatnonzero((gaps >= _STALL_NS[0]) & (gaps <= _STALL_NS[1])) + 1
        if not len(late):
            return
        usual = sorted(map(len, pieces))[len(pieces) // 2]
        stalls = sum(len(pieces[index]) > 1.5 * usual for index in late)
        self._stalled += stalls > 0
        if stalls >= _STALLS or self._stalled >= max(_STALLS, self._watched / 2):
            self._quick_acks = True
            for other in self._connections.values():
                other.nodelay_server = False
                with contextlib.suppress(OSError):
                    other.sock.setsockopt(socket.IPPROTO_TCP, _TCP_QUICKACK, 1)

    # ------------------------------------------------------------------ timeouts

    def _sweep(self) -> None:
        now = now_ns()
        idle_s = self._timeouts.idle_s
        for connection in list(self._connections.values()):
            exchange = connection.exchange
            if exchange is None or exchange.sent_ns is None:
                if exchange is None and connection.deadline_ns is not None and now >= connection.deadline_ns:
                    self._drop(connection)
                continue
            last_ns = connection.stamps[-1] if connection.stamps else exchange.first_byte_ns or exchange.sent_ns
            if connection.deadline_ns is not None and now >= connection.deadline_ns:
                detail = f"not over after {self._timeouts.total_s:g} s"
                self._fail(connection, FailureKind.TOTAL_TIMEOUT, detail)
            elif idle_s is not None and now - last_ns >= idle_s * NS_PER_S:
                what = "no byte of an answer" if exchange.first_byte_ns is None else "nothing more"
                self._fail(connection, FailureKind.SILENCE, f"{what} for {idle_s:g} s")
            elif connection.num_read > 4096 and sum(map(len, connection.pieces)) > MAX_BODY_BYTES:
                self._fail(connection, FailureKind.TOO_LARGE, f"a body of more than {MAX_BODY_BYTES >> 20} MiB")
            elif connection.num_read > 1 and now - last_ns > _SWEEP_S * NS_PER_S:
                self._look_for_end(connection)  # an end mark that was cut in two by the network
        assert self._loop is not None
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)


def _is_event_stream(head: Head | None) -> bool:
    return (
        head is not None
        and "event-stream" in head.headers.get("content-type", "")
        and ("content-encoding" not in head.headers)
    )


def _sets_nodelay(server: str) -> bool:
    """Server headers of stacks that set TCP_NODELAY themselves: uvicorn, and aiohttp ("Python/3.11 aiohttp/3.9")."""
    return server.startswith("uvicorn") or " aiohttp/" in server


def _is_dead(exchange: WireExchange) -> bool:
    return exchange.failure is not None and exchange.failure.kind is FailureKind.CUT_OFF


def _connect_failure(error: OSError) -> Failure:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
        return Failure(FailureKind.OUT_OF_DESCRIPTORS, error.strerror or str(error))
    if error.errno == errno.ETIMEDOUT:
        return Failure(FailureKind.CONNECT_TIMEOUT, error.strerror or str(error))
    return Failure(FailureKind.REFUSED, error.strerror or str(error))


def _realtime_offset_ns() -> int:
    """CLOCK_REALTIME - CLOCK_MONOTONIC, from readings with nothing in between (a pre-empted one is retaken)."""
    for _ in range(4):
        before = time.monotonic_ns()
        realtime = time.time_ns()
        after = time.monotonic_ns()
        if after - before < 5_000:
            break
    return realtime - (before + after) // 2


def _bytes_waiting(fd: int) -> int:
    import fcntl
    import termios

    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"), sys.byteorder)
    except OSError:
        return 0


class _Timer:
    """Waits to the microsecond: one timerfd for all waiters. asyncio's own timers round to a millisecond."""

    def __init__(self) -> None:
        self._fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._libc = ctypes.CDLL(None, use_errno=True)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._wake)

    async def sleep_until_ns(self, when_ns: int) -> None:
        loop = self._loop or asyncio.get_running_loop()
        if self._loop is None:
            self.attach(loop)
        if self._fd < 0:
            await asyncio.sleep((when_ns - now_ns()) / NS_PER_S)
            return
        future: asyncio.Future[None] = loop.create_future()
        self._count += 1
        heappush(self._waiting, (when_ns, self._count, future))
        if self._waiting[0][2] is future:
            self._arm(when_ns)
        await future

    def _arm(self, when_ns: int) -> None:
        spec = struct.pack("qqqq", 0, 0, *divmod(max(when_ns, 1), NS_PER_S))
        self._libc.timerfd_settime(self._fd, 1, spec, None)  # 1 = TFD_TIMER_ABSTIME

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        now = now_ns()
        while self._waiting and self._waiting[0][0] <= now:
            future = heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        while self._waiting and self._waiting[0][2].done():
            heappop(self._waiting)
        if self._waiting:
            self._arm(self._waiting[0][0])

    def close(self) -> None:
        if self._fd >= 0 and self._loop is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

"""The transport for https, proxies and anything unusual, on aiohttp. The only file that imports it.

The same seam as wire.py and the same records from the same bytes; a stamp is taken right after the read returns, so a
busy event loop shows in it (the audit says so).
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from types import SimpleNamespace
from urllib.parse import urlsplit

import aiohttp

from loadgen.clock import NS_PER_S, now_ns
from loadgen.http1 import MAX_BODY_BYTES, MAX_HEAD_BYTES, DoneScanner
from loadgen.record import Failure, FailureKind
from loadgen.transport import Exchange, Target, TransportUsage

_MAX_HEADERS = 1 << 16
_SWEEP_S = 0.25


class _BrokenFraming(aiohttp.ClientPayloadError):
    """The body's chunks cannot be read on."""


class ViaAiohttp:
    """loadgen.transport.Transport on aiohttp."""

    name = "aiohttp"

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: aiohttp.ClientSession | None = None
        self._reads = 0
        self._reading: set[aiohttp.ClientResponse] = set()
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, connections: int) -> None:
        """aiohttp opens connections with the requests: nothing to do before the clock but the session itself."""
        self._opened_session()

    def _opened_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeouts = self._target.timeouts
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_reuseconn.append(_note_reuse)
            self._sweeper = asyncio.ensure_future(self._sweep())
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
                # explicit in every part: aiohttp's own default is five minutes for the whole request
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=None, sock_connect=timeouts.connect_s, sock_read=timeouts.idle_s
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=MAX_HEAD_BYTES,
                max_field_size=MAX_HEAD_BYTES,
                max_headers=_MAX_HEADERS,
                trace_configs=[tracing],
                trust_env=False,  # a proxy comes from the Target or not at all
                headers={
                    "Content-Type": "application/json",
                    "Accept": "text/event-stream, application/json",
                    "Accept-Encoding": "identity",
                    **self._target.headers,
                },
            )
        return self._session

    async def exchange(
        self, method: str, path: str, request_id: str | None, body: bytes, *, planned_ns: int | None = None
    ) -> Exchange:
        if planned_ns is not None:
            await self.sleep_until_ns(planned_ns)
        reuse = _Reuse()
        exchange = await self._once(method, path, request_id, body, reuse)
        failure = exchange.failure
        # a kept-alive connection that the server had closed: sent once more, on another one
        if failure and failure.kind is FailureKind.CUT_OFF and exchange.first_byte_ns is None and reuse.reused:
            exchange = await self._once(method, path, request_id, body, reuse)
            exchange.reopened = True
        return exchange

    async def _once(self, method: str, path: str, request_id: str | None, body: bytes, reuse: _Reuse) -> Exchange:
        exchange = Exchange()
        try:
            async with asyncio.timeout(self._target.timeouts.total_s):
                await self._converse(exchange, method, path, request_id, body, reuse)
        except TimeoutError as error:
            exchange.failure = self._timeout(exchange, error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            exchange.failure = _failure(exchange, error)
        if exchange.end_ns is None:
            exchange.end_ns = now_ns()
        return exchange

    async def _converse(
        self, exchange: Exchange, method: str, path: str, request_id: str | None, body: bytes, reuse: _Reuse
    ) -> None:
        headers = {"X-Request-Id": request_id} if request_id else {}
        request = self._opened_session().request(
            method,
            self._target.base_url + path,
            data=body,
            headers=headers,
            proxy=self._target.proxy,
            allow_redirects=False,
            trace_request_ctx=reuse,
        )
        exchange.sent_ns = now_ns()
        async with request as response:
            exchange.first_byte_ns = now_ns()
            exchange.status = response.status
            exchange.headers = {name.lower(): value for name, value in response.headers.items()}
            if (length := response.content_length or 0) > MAX_BODY_BYTES:
                detail = f"a body of {length} bytes; the client keeps at most {MAX_BODY_BYTES >> 20} MiB"
                exchange.failure = Failure(FailureKind.TOO_LARGE, detail, response.status)
                response.close()
                return
            self._reading.add(response)
            try:
                await self._read(exchange, response)
            finally:
                self._reading.discard(response)

    async def _read(self, exchange: Exchange, response: aiohttp.ClientResponse) -> None:
        scanner = DoneScanner() if "event-stream" in exchange.headers.get("content-type", "") else None
        size = 0
        while piece := await response.content.readany():
            stamp_ns = now_ns()
            self._reads += 1
            exchange.pieces.append(piece)
            exchange.stamps.append(stamp_ns)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                detail = f"a body of more than {MAX_BODY_BYTES >> 20} MiB"
                exchange.failure = Failure(FailureKind.TOO_LARGE, detail, exchange.status)
                response.close()
                return
            if scanner is not None and scanner.feed(piece):
                exchange.end_ns = stamp_ns
                await _end_of_message(response)
                return
        exchange.end_ns = exchange.stamps[-1] if exchange.stamps else now_ns()

    async def _sweep(self) -> None:
        """Wake those who read a body whose framing broke: aiohttp (seen in 3.14) closes its connection and tells nobody
        else. An end of which it does tell takes no more than a turn of the loop, so what is seen twice is no race."""
        seen: set[aiohttp.ClientResponse] = set()
        while True:
            await asyncio.sleep(_SWEEP_S)
            stuck = {response for response in self._reading if _is_stuck(response)}
            for response in stuck & seen:
                protocol = response.connection.protocol if response.connection else None
                why = protocol.exception() if protocol else None
                response.content.set_exception(_BrokenFraming(f"the body's framing is broken: {why}"))
            seen = stuck

    def _timeout(self, exchange: Exchange, error: TimeoutError) -> Failure:
        timeouts = self._target.timeouts
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            parts = urlsplit(self._target.base_url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            what = f"no connection to {parts.hostname}:{port} in {timeouts.connect_s} s"
            return Failure(FailureKind.CONNECT_TIMEOUT, what)
        if isinstance(error, aiohttp.SocketTimeoutError):
            what = "no byte of an answer" if exchange.first_byte_ns is None else "nothing more"
            return Failure(FailureKind.SILENCE, f"{what} for {timeouts.idle_s:g} s", exchange.status)
        return Failure(FailureKind.TOTAL_TIMEOUT, f"not over after {timeouts.total_s:g} s", exchange.status)

    async def sleep_until_ns(self, when_ns: int) -> None:
        while (left := when_ns - now_ns()) > 0:
            await asyncio.sleep(left / NS_PER_S)

    def usage(self) -> TransportUsage:
        return TransportUsage(reads=self._reads)

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Reuse:
    """Whether a request went out on a connection that had carried one before."""

    reused = False


async def _note_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, _: object) -> None:
    context.trace_request_ctx.reused = True


def _is_stuck(response: aiohttp.ClientResponse) -> bool:
    protocol = response.connection.protocol if response.connection else None
    return protocol is not None and not protocol.is_connected() and not response.content.is_eof()


async def _end_of_message(response: aiohttp.ClientResponse) -> None:
    """[DONE] ended the answer; give the rest of the message a moment, so that the connection can be used again."""
    try:
        async with asyncio.timeout(0.001):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        response.close()


def _failure(exchange: Exchange, error: Exception) -> Failure:
    """Foreign exceptions become ours here. What came before the failure is kept in the exchange."""
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return Failure(FailureKind.TLS, str(error))
    if isinstance(error, aiohttp.ClientConnectorError):
        if error.os_error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL):
            return Failure(FailureKind.OUT_OF_DESCRIPTORS, str(error.os_error))
        return Failure(FailureKind.REFUSED, error.os_error.strerror or str(error))
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return Failure(FailureKind.STATUS, f"proxy: {error.status} {error.message}", error.status)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Failure(FailureKind.CUT_OFF, "the connection was closed before the answer")
    if isinstance(error, _BrokenFraming):
        return Failure(FailureKind.PROTOCOL, str(error), exchange.status)
    if isinstance(error, aiohttp.ClientPayloadError):
        detail = "the connection was closed in the middle of the answer"
        kind = FailureKind.PROTOCOL if "decode" in str(error).lower() else FailureKind.CUT_OFF
        return Failure(kind, detail if kind is FailureKind.CUT_OFF else str(error), exchange.status)
    if isinstance(error, aiohttp.ClientResponseError):
        if error.message.startswith(("Got more than", "Too many headers")):
            return Failure(FailureKind.TOO_LARGE, f"response headers of more than {MAX_HEAD_BYTES >> 10} KiB")
        return Failure(FailureKind.PROTOCOL, error.message or str(error), exchange.status)
    if isinstance(error, OSError):
        where = "before" if exchange.first_byte_ns is None else "in the middle of"
        return Failure(FailureKind.CUT_OFF, f"the connection broke {where} the answer: {error.strerror or error}")
    return Failure(FailureKind.PROTOCOL, str(error), exchange.status)

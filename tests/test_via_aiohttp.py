"""The aiohttp transport: the same records as the wire's from the same bytes; https, proxies, its own faults."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen.protocol import read_exchange
from loadgen.record import FailureKind, Phase, Request, RequestRecord
from loadgen.transport import Exchange, Target, Timeouts, Transport, make_transport
from loadgen.via_aiohttp import ViaAiohttp
from loadgen.workers import run_async
from tests.golden_server import (
    DONE,
    END,
    FIN,
    RST,
    SSE_HEAD,
    GoldenServer,
    Received,
    Reply,
    Step,
    Wait,
    chunk,
    event,
    stream,
)
from tests.test_wire import FRAMINGS, LENGTH_HEAD, PATH

BUSY_NS = 250_000_000  # a read of a busy machine may be so late


def talk(url: str, work: Callable[[Transport], Awaitable[Any]], name: str = "aiohttp", **target: Any) -> Any:
    async def main() -> Any:
        transport = make_transport(name, Target(url, **target))
        try:
            return await work(transport)
        finally:
            await transport.close()

    return run_async(asyncio.wait_for(main(), 60))


async def ask(transport: Transport) -> Exchange:
    return await transport.exchange("POST", PATH, "r1", b"{}")


def read(exchange: Exchange) -> RequestRecord:
    return read_exchange(Request("r1", Phase.MEASURED, PATH, b"{}"), exchange, 0, keep_text=True)


def told(record: RequestRecord) -> tuple[Any, ...]:
    """Everything but times, and the reads that two events shared."""
    failure = record.failure and (record.failure.kind, record.failure.status, record.failure.retry_after)
    return (
        record.status, failure, record.num_events, record.output_tokens, record.tokens_from, record.prompt_tokens,
        record.finish_reason, record.text, record.tool_calls, record.reopened,
    )  # fmt: skip


def in_a_process(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=root, env={**os.environ, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def status(line: str, body: bytes = b"", headers: str = "") -> list[Step]:
    return [f"HTTP/1.1 {line}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body]


ANSWERS: dict[str, list[Step]] = {
    **FRAMINGS,
    "503 with Retry-After": status("503 Busy", b'{"error":{"message":"busy"}}', "Retry-After: 3\r\n"),
    "404 without a body": status("404 Not Found"),
    "204": [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "a redirect": status("308 Moved", b"", "Location: http://127.0.0.1:1/\r\n"),
    "an error inside the stream": [SSE_HEAD, chunk(event("a")), chunk(b'data: {"error":{"message":"e"}}\n\n'), END],
    "cut behind a token": [SSE_HEAD, chunk(event("a")), FIN],
    "reset behind a token": [SSE_HEAD, chunk(event("a")), Wait(0.05), RST],
    "a body shorter than it said": [LENGTH_HEAD % 5000, event("a"), FIN],
    "closed before the answer": [FIN],
    "closed behind the headers": [SSE_HEAD, FIN],
    "cut behind the finish_reason": [SSE_HEAD, chunk(event("a", "stop")), FIN],
    "cut in the middle of the headers": [SSE_HEAD[:40], FIN],
    "a broken chunk": [SSE_HEAD, chunk(event("a")), Wait(0.05), b"no size\r\n", FIN],
    "no HTTP": [b"220 mail.example ESMTP\r\n\r\n", FIN],
    "html": status("200 OK", b"<html>", "Content-Type: text/html\r\n"),
    "gzip that is none": [SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n", chunk(b"no gzip"), END],
    "no token, no [DONE]": [SSE_HEAD, chunk(b": ping\n\n"), END],
    "[DONE] alone": [SSE_HEAD, chunk(DONE), END],
    "not JSON": [SSE_HEAD, chunk(b"data: {\n\n"), END],
    "a head of 100 KiB": [SSE_HEAD[:-2] + b"X: " + b"x" * 100_000 + b"\r\n\r\n", chunk(event("a", "stop")), END],
    "a head of two thousand lines": [SSE_HEAD[:-2] + b"X: x\r\n" * 2000 + b"\r\n", chunk(event("a", "stop")), END],
    "a head without end": [SSE_HEAD[:-2] + b"X: " + b"x" * (1200 << 10) + b"\r\n\r\n", FIN],
}


@pytest.mark.parametrize("steps", ANSWERS.values(), ids=ANSWERS)
def test_both_transports_make_the_same_record_of_the_same_bytes(steps: list[Step]) -> None:
    records = []
    for name in ("wire", "aiohttp"):
        with GoldenServer(lambda number, request: steps) as server:
            records.append(read(talk(server.url, ask, name)))
            assert len(server.answers) == 1
    by_wire, by_aiohttp = map(told, records)
    assert by_aiohttp == by_wire


def test_a_body_that_will_be_too_large_is_not_waited_for() -> None:
    for name in ("wire", "aiohttp"):
        with GoldenServer(lambda number, request: [LENGTH_HEAD % 10**12, event("a"), Wait(0.5), FIN]) as server:
            failure = read(talk(server.url, ask, name)).failure
            assert failure is not None and failure.kind is FailureKind.TOO_LARGE
            assert "1000000000000 bytes; the client keeps at most 256 MiB" in failure.detail


def test_stamps_follow_what_the_server_sent() -> None:
    with GoldenServer(lambda number, request: stream(10, 0.02)) as server:
        exchange = talk(server.url, ask)
        answer = server.answers[0]
    record = read(exchange)
    assert record.ok and not record.kernel_stamps and record.num_events == 10
    assert exchange.sent_ns <= answer.complete_ns
    for stamp, sent in zip(record.event_stamps_ns, answer.sent[1:11], strict=True):
        assert sent.before_ns <= stamp < sent.after_ns + BUSY_NS
    assert 0 <= exchange.end_ns - answer.sent[11].before_ns < BUSY_NS


def test_done_ends_the_answer_though_the_message_goes_on() -> None:
    steps: list[Step] = [SSE_HEAD, chunk(event("a", "stop")), chunk(DONE), Wait(1.0), END]
    with GoldenServer(lambda number, request: steps) as server:
        began = time.monotonic()
        record = read(talk(server.url, ask))
        took_s = time.monotonic() - began
        assert record.ok and took_s < 0.9


def test_a_connection_is_used_again_and_again() -> None:
    async def work(transport: Transport) -> list[Exchange]:
        return [await ask(transport) for _ in range(20)]

    with GoldenServer(lambda number, request: stream(3)) as server:
        assert all(read(exchange).ok for exchange in talk(server.url, work))
        assert server.num_connections <= 2  # the message behind a [DONE] may come a moment too late


def test_a_kept_alive_connection_found_dead_is_reopened_once_and_said_so() -> None:
    def reply(number: int, request: Received) -> list[Step]:
        return [FIN] if number in (1, 3, 4) else FRAMINGS["content-length"]

    async def work(transport: Transport) -> list[RequestRecord]:
        return [read(await ask(transport)) for _ in range(4)]

    for name in ("wire", "aiohttp"):
        with GoldenServer(reply) as server:
            records = talk(server.url, work, name)
        assert [record.ok for record in records] == [True, True, False, True]
        assert [record.reopened for record in records] == [False, True, True, False]
        assert len(server.answers) == 6


def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    """Two at once: one is on the kept-alive connection, the other on a new one."""

    async def work(transport: Transport) -> list[RequestRecord]:
        first = read(await ask(transport))
        return [first, *map(read, await asyncio.gather(ask(transport), ask(transport)))]

    def reply(number: int, request: Received) -> list[Step]:
        return FRAMINGS["content-length"] if number == 0 else [Wait(0.1), FIN]

    for name in ("wire", "aiohttp"):
        with GoldenServer(reply) as server:
            records = talk(server.url, work, name)
            assert [record.ok for record in records] == [True, False, False]
            assert sorted(record.reopened for record in records) == [False, False, True], name
            assert len(server.answers) == 4


def test_ipv6() -> None:
    with GoldenServer(lambda number, request: stream(3), family=socket.AF_INET6) as server:
        assert read(talk(server.url, ask)).ok


# ---------------------------------------------------------------- https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    with open(path, "ab") as file:
        file.write(path.with_suffix(".crt").read_bytes())
    return path


def tls_server(certificate: Path, reply: Reply) -> GoldenServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return GoldenServer(reply, tls=context)


def test_https_with_a_certificate_that_is_trusted(certificate: Path) -> None:
    """In a process of its own, since the certificates are read once."""
    code = "import sys; from tests.test_via_aiohttp import *; r = read(talk(sys.argv[1], ask, 'auto'))"
    code += "; print(r.ok, r.num_events)"
    with tls_server(certificate, lambda number, request: stream(5, 0.01)) as server:
        result = in_a_process(code, server.url, SSL_CERT_FILE=str(certificate))
    assert result.stdout == "True 5\n", result.stderr


def test_https_with_a_certificate_that_is_not(certificate: Path) -> None:
    with tls_server(certificate, lambda number, request: stream(5)) as server:
        exchange = talk(server.url, ask, "auto")
        assert server.answers == []
    assert exchange.failure is not None and exchange.failure.kind is FailureKind.TLS
    assert "certificate" in exchange.failure.detail


# ---------------------------------------------------------------- proxies


def test_a_proxy_that_is_asked_for_is_used() -> None:
    with GoldenServer(lambda number, request: stream(2)) as proxy:
        record = read(talk("http://server.invalid:8000", ask, "auto", proxy=proxy.url))
        assert record.ok
        assert proxy.answers[0].request.head.startswith(b"POST http://server.invalid:8000/v1/completions HTTP/1.1\r\n")


def test_a_proxy_that_says_no() -> None:
    with GoldenServer(lambda number, request: status("502 Bad Gateway", b"no such host")) as proxy:
        failure = talk("http://server.invalid:8000", ask, "auto", proxy=proxy.url).failure
        record = read(talk("http://server.invalid:8000", ask, "auto", proxy=proxy.url))
    assert failure is None and record.failure is not None
    assert (record.failure.kind, record.failure.status) == (FailureKind.STATUS, 502)


def test_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with GoldenServer(lambda number, request: stream(2)) as server:
        assert read(talk(server.url, ask)).ok


# ---------------------------------------------------------------- limits and other ends


def test_each_limit_has_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    failure = talk(url, ask).failure
    assert failure is not None and failure.kind is FailureKind.REFUSED

    release = threading.Event()

    def stalls(number: int, request: Received) -> Any:
        yield SSE_HEAD
        yield chunk(event("a"))
        release.wait(20)

    for timeouts, kind in [
        (Timeouts(idle_s=0.2), FailureKind.SILENCE),
        (Timeouts(total_s=0.2), FailureKind.TOTAL_TIMEOUT),
    ]:
        with GoldenServer(stalls) as server:
            release.clear()
            exchange = talk(server.url, ask, timeouts=timeouts)
            release.set()
        assert exchange.failure is not None and exchange.failure.kind is kind
        assert read(exchange).num_events == 1  # what came is kept


def test_out_of_descriptors_is_no_failure_of_the_server() -> None:
    """The limit is lowered in a process of its own."""
    code = """
import resource, sys
from tests.test_via_aiohttp import ask, stream, talk
from tests.golden_server import GoldenServer
with GoldenServer(lambda number, request: stream(1)) as server:
    async def work(transport):
        await transport.open(1)
        used = [open("/dev/null") for _ in range(4)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used[-1].fileno() + 1, 4096))
        failure = (await ask(transport)).failure
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        return failure
    async def fresh(transport):
        transport.open = lambda connections: __import__("asyncio").sleep(0)
        return await work(transport)
    print(talk(server.url, fresh, sys.argv[1]).kind)
"""
    for name in ("wire", "aiohttp"):
        result = in_a_process(code, name)
        assert result.stdout.strip() == "out-of-descriptors", result.stderr


def test_a_session_is_made_by_the_first_request_if_need_be() -> None:
    with GoldenServer(lambda number, request: stream(1)) as server:

        async def main() -> Exchange:
            transport = ViaAiohttp(Target(server.url))
            exchange = await ask(transport)
            await transport.close()
            await transport.close()
            return exchange

        assert read(run_async(main())).ok

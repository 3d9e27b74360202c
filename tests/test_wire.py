"""The wire transport against a server that records what it really sent: stamps, framings, connections, ends."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from loadgen import wire
from loadgen.clock import now_ns
from loadgen.protocol import read_exchange
from loadgen.record import FailureKind, Phase, Request, RequestRecord
from loadgen.transport import Exchange, Target, Timeouts
from loadgen.wire import Wire, WireExchange
from loadgen.workers import run_async
from tests.golden_server import (
    DONE,
    END,
    FIN,
    RST,
    SSE_HEAD,
    Answer,
    GoldenServer,
    Received,
    Reply,
    Step,
    Wait,
    chunk,
    event,
    stream,
)

pytestmark = pytest.mark.skipif(not wire.SUPPORTED, reason="Linux only")

SLACK_NS = 300_000  # between the kernel's stamp of the wall clock and the monotonic clock; microseconds in truth
PATH = "/v1/completions"
LENGTH_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
CLOSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def talk(server: GoldenServer, work: Callable[[Wire], Awaitable[Any]], **target: Any) -> Any:
    """Run `work` with a transport to the server, on uvloop as a run does."""

    async def main() -> Any:
        transport = Wire(Target(server.url, **target))
        try:
            return await work(transport)
        finally:
            await transport.close()

    return run_async(asyncio.wait_for(main(), 60))


async def ask(transport: Wire, body: bytes = b"{}", **more: Any) -> WireExchange:
    return await transport.exchange("POST", PATH, "r1", body, **more)


def one(reply: Reply, **options: Any) -> tuple[WireExchange, Answer]:
    with GoldenServer(reply) as server:
        exchange = talk(server, ask, **options)
        return exchange, server.answers[0]


def read(exchange: Exchange) -> RequestRecord:
    return read_exchange(Request("r1", Phase.MEASURED, PATH, b"{}"), exchange, exchange.sent_ns or 0, keep_text=True)


def between(stamps: Sequence[int], answer: Answer, steps: Sequence[int]) -> None:
    """Each stamp lies within the send call of its step, by the server's own account: none is earlier, and half of them
    are not later by more than 5 ms. A kernel whose core is busy may deliver some time after the call returned."""
    assert len(stamps) == len(steps)
    for stamp, step in zip(stamps, steps, strict=True):
        assert answer.sent[step].before_ns - SLACK_NS <= stamp
    late = sorted(stamp - answer.sent[step].after_ns for stamp, step in zip(stamps, steps, strict=True))
    assert late[(len(late) - 1) // 2] <= 5_000_000 and late[-1] <= 100_000_000, late


# ---------------------------------------------------------------- stamps


def test_a_stamp_lies_within_the_servers_send_call() -> None:
    exchange, answer = one(lambda number, request: stream(20, 0.004))
    record = read(exchange)
    assert record.ok and record.kernel_stamps
    between(record.event_stamps_ns, answer, range(1, 21))
    between([exchange.first_byte_ns or 0], answer, [0])
    between([exchange.end_ns or 0], answer, [21])  # [DONE]
    assert (exchange.sent_ns or 0) <= answer.complete_ns


def test_a_client_that_stood_still_stamps_right_all_the_same() -> None:
    """The loop sleeps while the first token arrives; the bytes wait in the socket with their stamp."""

    async def work(transport: Wire) -> WireExchange:
        await transport.open(1)
        asking = asyncio.ensure_future(ask(transport))
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # noqa: ASYNC251
        return await asking

    def reply(number: int, request: Received) -> list[Step]:
        return [Wait(0.1), SSE_HEAD + chunk(event("a")), Wait(0.4), chunk(event("b", "stop")) + chunk(DONE) + END]

    with GoldenServer(reply) as server:
        exchange = talk(server, work)
    between(read(exchange).event_stamps_ns, server.answers[0], [0, 1])


def test_many_streams_are_drained_by_the_timer_and_stamps_stay_right() -> None:
    """40 streams at once: from 16 on they are read every 2 ms."""

    async def work(transport: Wire) -> list[WireExchange]:
        await transport.open(40)
        return list(await asyncio.gather(*(transport.exchange("POST", PATH, f"r{i}", b"{}") for i in range(40))))

    with GoldenServer(lambda number, request: stream(5, 0.02)) as server:
        exchanges = talk(server, work)
        by_id = {answer.request.headers["x-request-id"]: answer for answer in server.answers}
    for number, exchange in enumerate(exchanges):
        record = read(exchange)
        assert record.ok and record.num_events == 5
        between(record.event_stamps_ns, by_id[f"r{number}"], range(1, 6))


def test_a_step_of_the_wall_clock_does_not_bend_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = wire._realtime_offset_ns
    shift = 0
    monkeypatch.setattr(wire, "_realtime_offset_ns", lambda: real() + shift)

    async def work(transport: Wire) -> WireExchange:
        nonlocal shift
        asking = asyncio.ensure_future(ask(transport))
        await asyncio.sleep(0.1)
        shift = 3600 * 10**9  # as if the clock had been set an hour ahead, between two reads
        await asyncio.sleep(0)
        shift = 0
        return await asking

    with GoldenServer(lambda number, request: stream(20, 0.01)) as server:
        exchange = talk(server, work)
        answer = server.answers[0]
    stamps = list(exchange.stamps)
    assert stamps == sorted(stamps)
    for stamp in stamps:
        assert answer.sent[0].before_ns - 10**7 < stamp < answer.sent[-1].after_ns + 10**8


def test_planned_sends_leave_at_their_time_and_never_before() -> None:
    async def work(transport: Wire) -> list[tuple[int, WireExchange]]:
        await transport.open(8)
        planned = [now_ns() + 30_000_000 + 7_000_000 * i for i in range(8)]
        exchanges = await asyncio.gather(*(ask(transport, planned_ns=at) for at in planned))
        return list(zip(planned, exchanges, strict=True))

    with GoldenServer(lambda number, request: stream(2)) as server:
        for planned_ns, exchange in talk(server, work):
            assert planned_ns <= exchange.sent_ns < planned_ns + 200_000_000
            assert read(exchange).ok
        assert server.num_connections == 8


# ---------------------------------------------------------------- framings


BODY = event("a") + event("b") + event("c", "stop") + DONE
FRAMINGS: dict[str, list[Step]] = {
    "content-length": [LENGTH_HEAD % len(BODY), BODY],
    "content-length in one write": [LENGTH_HEAD % len(BODY) + BODY],
    "content-length, byte by byte": [
        *[bytes([byte]) for byte in LENGTH_HEAD % len(BODY)],
        *[bytes([byte]) for byte in BODY],
    ],
    "chunked": [SSE_HEAD, *[chunk(part) for part in (event("a"), event("b"), event("c", "stop"), DONE)], END],
    "chunked in one write": [SSE_HEAD + chunk(BODY) + END],
    "chunk extensions, upper case, trailers": [
        SSE_HEAD,
        b"%X;name=value\r\n%b\r\n" % (len(BODY), BODY),
        b"0\r\nX-Trailer: 1\r\n\r\n",
    ],
    "chunks that are not events": [SSE_HEAD, *[chunk(BODY[at : at + 7]) for at in range(0, len(BODY), 7)], END],
    "chunks cut anywhere": [SSE_HEAD + chunk(BODY)[:9], chunk(BODY)[9:50], chunk(BODY)[50:] + END[:2], END[2:]],
    "until the connection closes": [CLOSE_HEAD, BODY[:60], BODY[60:], FIN],
    "http/1.0": [CLOSE_HEAD.replace(b"1.1", b"1.0") + BODY, FIN],
    "an interim answer before": [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SSE_HEAD, chunk(BODY), END],
    "bare line feeds in the head": [SSE_HEAD.replace(b"\r\n", b"\n"), chunk(BODY), END],
    "gzip that nobody asked for": [
        SSE_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n",
        chunk(gzip.compress(BODY)[:20]),
        chunk(gzip.compress(BODY)[20:]),
        END,
    ],
}


@pytest.mark.parametrize("steps", FRAMINGS.values(), ids=FRAMINGS)
def test_every_framing_of_a_body_says_the_same(steps: list[Step]) -> None:
    exchange, answer = one(lambda number, request: steps)
    record = read(exchange)
    assert record.ok and (record.text, record.num_events, record.finish_reason) == ("abc", 3, "stop")
    # a burst of tiny writes is held back by the sender's kernel, so "sent" is no exact truth here
    assert exchange.end_ns is not None and exchange.end_ns <= answer.sent[-1].after_ns + 250_000_000


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([LENGTH_HEAD % (len(BODY) + 5), BODY[:60], FIN], FailureKind.CUT_OFF),
        ([SSE_HEAD, chunk(BODY[:60]), FIN], FailureKind.CUT_OFF),
        ([SSE_HEAD, chunk(BODY[:60]), END], FailureKind.CUT_OFF),
        ([SSE_HEAD, chunk(BODY[:60]), RST], FailureKind.CUT_OFF),
        ([SSE_HEAD[:30], FIN], FailureKind.CUT_OFF),
        ([CLOSE_HEAD, BODY[:60], FIN], FailureKind.CUT_OFF),
        ([FIN], FailureKind.CUT_OFF),
        ([SSE_HEAD, b"xyz\r\n", FIN], FailureKind.PROTOCOL),
        ([SSE_HEAD, b"5\r\nabcdefgh\r\n", FIN], FailureKind.PROTOCOL),
        ([b"220 mail.example ESMTP\r\n", FIN], FailureKind.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"], FailureKind.PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n"], FailureKind.TOO_LARGE),
    ],
)
def test_a_message_that_is_not_whole(steps: list[Step], kind: FailureKind) -> None:
    record = read(one(lambda number, request: steps)[0])
    assert record.failure is not None and record.failure.kind is kind, record.failure


def test_what_merely_looks_like_an_end_is_none() -> None:
    """Texts with [DONE] and with the bytes of a last chunk in them."""
    texts = ["0\\r\\n\\r\\n", "data: [DONE]", "[DONE]"]
    steps: list[Step] = [SSE_HEAD]
    for text in texts:
        steps += [chunk(event(text)), Wait(0.03)]
    raw = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n: 0\r\n\r\n'
    steps += [chunk(raw), Wait(0.03), chunk(event("z", "stop")), chunk(DONE), END]
    record = read(one(lambda number, request: steps)[0])
    assert record.ok and record.text == "0\r\n\r\ndata: [DONE][DONE]xz" and record.num_events == 5


def test_done_ends_the_answer_though_the_message_goes_on() -> None:
    def reply(number: int, request: Received) -> list[Step]:
        return [SSE_HEAD, chunk(event("a", "stop")), chunk(DONE), Wait(1.0), END]

    async def work(transport: Wire) -> tuple[int, WireExchange, WireExchange]:
        began = now_ns()
        first = await ask(transport)
        took = now_ns() - began
        return took, first, await ask(transport)

    with GoldenServer(reply) as server:
        took_ns, first, second = talk(server, work)
        between([first.end_ns], server.answers[0], [2])
        assert took_ns < 900_000_000
        assert server.num_connections == 2  # what is in the middle of a message cannot be used again
        assert server.answers[0].client_left or read(second).ok


# ---------------------------------------------------------------- connections


def test_a_connection_is_used_again_and_again() -> None:
    async def work(transport: Wire) -> list[WireExchange]:
        return [await ask(transport) for _ in range(30)]

    kinds = ("content-length", "chunked in one write", "gzip that nobody asked for")
    with GoldenServer(lambda number, request: FRAMINGS[kinds[number % 3]]) as server:
        exchanges = talk(server, work)
        assert all(read(exchange).ok for exchange in exchanges)
        assert server.num_connections == 1


def test_a_connection_whose_message_ends_late_is_used_again_when_it_has_ended() -> None:
    async def work(transport: Wire) -> list[WireExchange]:
        exchanges = []
        for _ in range(3):
            exchanges.append(await ask(transport))
            await asyncio.sleep(0.3)
        return exchanges

    def reply(number: int, request: Received) -> list[Step]:
        return [SSE_HEAD, chunk(event("a", "stop")), chunk(DONE), Wait(0.05), END[:2], Wait(0.02), END[2:]]

    with GoldenServer(reply) as server:
        exchanges = talk(server, work)
        assert all(read(exchange).ok for exchange in exchanges)
        assert server.num_connections == 1
    # and one whose end never comes is closed
    endless: list[Step] = [SSE_HEAD, chunk(event("a", "stop")), chunk(DONE), Wait(20)]

    async def wait_for_its_end(transport: Wire) -> int:
        await ask(transport)
        await asyncio.sleep(1.6)
        return len(transport._connections)

    with _Patient(lambda number, request: endless) as server:
        assert talk(server, wait_for_its_end) == 0


@pytest.mark.parametrize(
    "steps",
    [
        [SSE_HEAD[:-2] + b"Connection: close\r\n\r\n", chunk(BODY), END, FIN],
        FRAMINGS["until the connection closes"],
        FRAMINGS["http/1.0"],
        [SSE_HEAD, chunk(BODY), END + b"bytes behind the end"],
    ],
)
def test_a_connection_that_cannot_be_used_again_is_not(steps: list[Step]) -> None:
    async def work(transport: Wire) -> list[WireExchange]:
        return [await ask(transport) for _ in range(3)]

    with GoldenServer(lambda number, request: steps) as server:
        exchanges = talk(server, work)
        assert [read(exchange).ok for exchange in exchanges] == [True] * 3
        assert not any(exchange.reopened for exchange in exchanges)
        assert server.num_connections == 3


def test_a_kept_alive_connection_found_dead_is_reopened_once_and_said_so() -> None:
    def reply(number: int, request: Received) -> list[Step]:
        return [RST] if number in (1, 3, 4) else list(stream(2))

    async def work(transport: Wire) -> list[WireExchange]:
        return [await ask(transport) for _ in range(4)]

    with GoldenServer(reply) as server:
        first, second, third, fourth = talk(server, work)
    # 0 good; 1 dies, again as 2: good; 3 dies, again as 4: dies for good; 5 good, on a fresh connection
    assert [read(e).ok for e in (first, second, third, fourth)] == [True, True, False, True]
    assert [e.reopened for e in (first, second, third, fourth)] == [False, True, True, False]
    assert len(server.answers) == 6


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    def reply(number: int, request: Received) -> list[Step]:
        return [*stream(2), Wait(0.02), b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"]

    async def work(transport: Wire) -> list[WireExchange]:
        exchanges = []
        for _ in range(3):
            exchanges.append(await ask(transport))
            await asyncio.sleep(0.1)
        return exchanges

    with GoldenServer(reply) as server:
        assert all(read(exchange).ok for exchange in talk(server, work))
        assert server.num_connections == 3


def test_connections_are_opened_before_the_clock_starts_and_closed_in_the_end() -> None:
    async def work(transport: Wire) -> int:
        await transport.open(300)
        return transport.usage().num_connections

    with GoldenServer(lambda number, request: stream(1)) as server:
        assert talk(server, work) == 300
        deadline = time.monotonic() + 20
        while server.num_open or server.num_connections < 300:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def work(transport: Wire) -> None:
        asking = asyncio.ensure_future(ask(transport))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert read(await ask(transport)).ok

    with GoldenServer(lambda number, request: [SSE_HEAD, Wait(0.5), END] if number == 0 else stream(2)) as server:
        talk(server, work)
        assert server.num_connections == 2


def test_a_large_body_goes_out_whole_though_the_server_is_slow_to_read() -> None:
    body = b'{"prompt":"' + b"x" * (8 << 20) + b'"}'

    with GoldenServer(lambda number, request: stream(2)) as server:
        exchange = talk(server, lambda transport: ask(transport, body))
        assert read(exchange).ok and server.answers[0].request.body == body


def test_ipv6() -> None:
    with GoldenServer(lambda number, request: stream(3), family=socket.AF_INET6) as server:
        assert read(talk(server, ask)).ok
        assert server.answers[0].request.headers["host"] == f"[::1]:{server.port}"


def test_a_name_of_two_addresses_is_reached_on_the_one_that_listens() -> None:
    async def work(transport: Wire) -> WireExchange:
        port = transport._port
        transport._addresses = [(socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("127.0.0.1", port))]
        return await ask(transport)

    for family in (socket.AF_INET, socket.AF_INET6):
        with GoldenServer(lambda number, request: stream(3), family=family) as server:
            assert read(talk(server, work)).ok


def test_the_request_as_it_goes_out() -> None:
    with GoldenServer(lambda number, request: stream(1)) as server:
        talk(server, lambda t: ask(t, b'{"a":1}'), headers={"Authorization": "Bearer k", "X-Mine": "1"})
        request = server.answers[0].request
    assert request.head.splitlines()[0] == b"POST /v1/completions HTTP/1.1"
    assert request.body == b'{"a":1}'
    expected = {
        "host": f"127.0.0.1:{server.port}",
        "content-type": "application/json",
        "content-length": "7",
        "accept-encoding": "identity",
        "authorization": "Bearer k",
        "x-mine": "1",
        "x-request-id": "r1",
    }
    assert expected.items() <= request.headers.items()


# ---------------------------------------------------------------- limits


def test_silence_and_the_limit_of_the_whole_request() -> None:
    stall: list[Step] = [SSE_HEAD, chunk(event("a")), Wait(30)]
    drip: list[Step] = [SSE_HEAD, *[step for byte in chunk(event("a")) * 9 for step in (Wait(0.05), bytes([byte]))]]
    for steps, timeouts, kind in [
        (stall, Timeouts(idle_s=0.3), FailureKind.SILENCE),
        ([Wait(30)], Timeouts(idle_s=0.3), FailureKind.SILENCE),
        (drip, Timeouts(idle_s=5, total_s=0.5), FailureKind.TOTAL_TIMEOUT),
    ]:
        began = time.monotonic()
        with _Patient(lambda number, request: steps) as server:  # noqa: B023
            failure = talk(server, ask, timeouts=timeouts).failure
        assert failure is not None and failure.kind is kind
        assert time.monotonic() - began < 10


class _Patient(GoldenServer):
    """Ends its waits when the client has left, so that a test need not wait for the script."""

    def _follow(self, sock: socket.socket, answer: Answer, steps: Any) -> bool:
        def interruptible() -> Any:
            for step in steps:
                if isinstance(step, Wait):
                    sock.settimeout(step.seconds)
                    try:
                        if not sock.recv(1, socket.MSG_PEEK):
                            return
                    except TimeoutError:
                        pass
                    finally:
                        sock.settimeout(None)
                else:
                    yield step

        return super()._follow(sock, answer, interruptible())


def test_an_end_mark_cut_in_two_by_the_network_is_found() -> None:
    """The last piece does not look like an end by itself; the sweep finds it, or the next bytes do."""
    last = chunk(DONE)
    for at in range(len(last)):
        steps: list[Step] = [SSE_HEAD, chunk(event("a", "stop")), Wait(0.005), last[:at], Wait(0.005), last[at:] + END]
        record = read(one(lambda number, request: steps)[0])  # noqa: B023
        assert record.ok


def test_the_last_chunk_cut_in_two() -> None:
    for at in range(1, len(END)):
        steps: list[Step] = [SSE_HEAD, chunk(event("a", "stop")), Wait(0.005), END[:at], Wait(0.005), END[at:]]
        began = time.monotonic()
        record = read(one(lambda number, request: steps, timeouts=Timeouts(idle_s=20))[0])  # noqa: B023
        assert record.ok and time.monotonic() - began < 10


# ---------------------------------------------------------------- acknowledgements


def nagle_reply(number: int, request: Received) -> list[Step]:
    """As a server that leaves Nagle's algorithm on, under the name of one that does not."""
    return stream(24, 0.008, SSE_HEAD[:-2] + b"Server: uvicorn\r\n\r\n")


def stalls(record: RequestRecord) -> int:
    stamps = record.event_stamps_ns
    return sum(38e6 <= after - before <= 60e6 for before, after in zip(stamps, stamps[1:], strict=False))


def test_a_server_with_nagle_on_is_found_out_and_stalls_no_more() -> None:
    """Quick ACKs are off for uvicorn; with Nagle's algorithm that holds small segments back for 40 ms, until the client
    sees the pattern and turns them on again."""

    async def work(transport: Wire) -> list[RequestRecord]:
        records = []
        while not transport._quick_acks and len(records) < 40:
            records.append(read(await ask(transport)))
        return [*records, read(await ask(transport)), read(await ask(transport))]

    with GoldenServer(nagle_reply, nodelay=False) as server:
        records = talk(server, work)
    assert all(record.ok and record.num_events == 24 for record in records)
    if sum(map(stalls, records[:-2])):  # else this kernel holds nothing back, and there is nothing to find out
        assert len(records) < 40
    assert stalls(records[-1]) <= 1  # a busy machine may show one that is none


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([[8, 42, 8, 42, 8, 42, 8, 42]], True),  # four in one answer
        ([[8, 42, 8]] * 4, True),  # one in each
        ([[8, 42, 8]] * 3, False),
        ([[8, 42, 8], [8, 8, 8], [8, 8, 8]] * 20, False),  # now and then
        ([[42] * 20] * 20, False),  # a server of 42 ms a token: its events come one by one
    ],
)
def test_the_signature_of_a_stall(answers: list[list[int]], found: bool) -> None:
    async def work(transport: Wire) -> bool:
        for gaps in answers:
            connection = wire._Connection(socket.socket())
            connection.nodelay_server = True
            usual = 8 in gaps
            for gap_ms in [*gaps, *[8] * 12]:
                connection.stamps.append((connection.stamps or [0])[-1] + gap_ms * 1_000_000)
                connection.pieces.append(b"x" * (500 if usual and gap_ms == 42 else 100))
            transport._watch_for_stalls(connection)
            connection.sock.close()
        return transport._quick_acks

    with GoldenServer(nagle_reply) as server:
        assert talk(server, work) is found


def test_quick_acks_stay_off_for_a_server_that_sends_at_once() -> None:
    async def work(transport: Wire) -> tuple[bool, RequestRecord]:
        return transport._quick_acks, read(await ask(transport))

    with GoldenServer(nagle_reply) as server:
        quick, record = talk(server, work)
    assert not quick and record.ok

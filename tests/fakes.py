"""Fakes of the two seams: a clock that jumps, and a transport that follows a script. No waiting, no sockets.

clock = FakeClock()
transport = FakeTransport(clock, lambda number, body: answer(token_ms=[100, 110], number_of_tokens=2))
"""

from __future__ import annotations

import asyncio
import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from loadgen.clock import NS_PER_MS
from loadgen.record import Failure
from loadgen.transport import Exchange, TransportUsage

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class FakeClock:
    """loadgen.clock.Clock whose time stands still until every task waits, and then jumps to the next waiter."""

    def __init__(self, start_ns: int = 7_000_000_000_003) -> None:
        self._now = start_ns
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._checking = False

    def now_ns(self) -> int:
        return self._now

    async def sleep_until_ns(self, when_ns: int) -> None:
        if when_ns <= self._now:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._count += 1
        heapq.heappush(self._waiting, (when_ns, self._count, future))
        if not self._checking:
            self._checking = True
            loop.call_soon(self._jump_if_idle)
        await future

    def _jump_if_idle(self) -> None:
        loop = asyncio.get_running_loop()
        if loop._ready:  # type: ignore[attr-defined]  # somebody still runs
            loop.call_soon(self._jump_if_idle)
            return
        self._checking = False
        while self._waiting and self._waiting[0][2].done():
            heapq.heappop(self._waiting)
        if not self._waiting:
            return
        self._now = max(self._now, self._waiting[0][0])
        while self._waiting and self._waiting[0][0] <= self._now:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        if self._waiting:
            self._checking = True
            loop.call_soon(self._jump_if_idle)


@dataclass(frozen=True)
class Script:
    """One answer: (delay_ns after the step before, body bytes or the Failure that ends it)."""

    steps: Sequence[tuple[int, bytes | Failure]]
    status: int | None = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(EVENT_STREAM))
    head_delay_ns: int = 0


@dataclass
class Sent:
    """What the transport was asked to send, and when it did."""

    at_ns: int
    path: str
    id: str | None
    body: bytes
    in_flight: int


class FakeTransport:
    """loadgen.transport.Transport on a FakeClock. script(number, body) gives the answer to the number-th request."""

    name = "fake"

    def __init__(self, clock: FakeClock, script: Callable[[int, bytes], Script]) -> None:
        self.clock = clock
        self.sent: list[Sent] = []
        self.opened = 0
        self.closed = False
        self._script = script
        self._active = 0
        self._reads = 0

    async def open(self, connections: int) -> None:
        self.opened = connections

    async def exchange(
        self, method: str, path: str, request_id: str | None, body: bytes, *, planned_ns: int | None = None
    ) -> Exchange:
        if planned_ns is not None:
            await self.clock.sleep_until_ns(planned_ns)
        self._active += 1
        try:
            return await self._answer(path, request_id, body)
        finally:
            self._active -= 1

    async def _answer(self, path: str, request_id: str | None, body: bytes) -> Exchange:
        clock = self.clock
        script = self._script(len(self.sent), body)
        self.sent.append(Sent(clock.now_ns(), path, request_id, body, self._active))
        exchange = Exchange(sent_ns=clock.now_ns(), kernel_stamps=True)
        at_ns = clock.now_ns() + script.head_delay_ns
        if script.status is not None:
            await clock.sleep_until_ns(at_ns)
            exchange.first_byte_ns = clock.now_ns()
            exchange.status, exchange.headers = script.status, dict(script.headers)
        for delay_ns, what in script.steps:
            at_ns += delay_ns
            await clock.sleep_until_ns(at_ns)
            if isinstance(what, Failure):
                exchange.failure = what
                break
            exchange.pieces.append(what)
            exchange.stamps.append(clock.now_ns())
            self._reads += 1
        exchange.end_ns = clock.now_ns()
        return exchange

    async def sleep_until_ns(self, when_ns: int) -> None:
        await self.clock.sleep_until_ns(when_ns)

    def usage(self) -> TransportUsage:
        return TransportUsage(reads=self._reads, num_connections=self.opened)

    async def close(self) -> None:
        self.closed = True


# ---------------------------------------------------------------- answers as vLLM sends them


def event(payload: object) -> bytes:
    """One SSE event of a JSON value."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def chunk(text: str | None = None, finish: str | None = None, **delta: object) -> dict[str, object]:
    """A completions event with text, or a chat event with any delta (content=..., reasoning=..., ...)."""
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    kind = "text_completion" if text is not None else "chat.completion.chunk"
    choice |= {"text": text} if text is not None else {"delta": delta}
    return {"id": "x-1", "object": kind, "created": 1, "model": "m", "choices": [choice]}


def usage(completion_tokens: int, prompt_tokens: int = 4, **more: object) -> dict[str, object]:
    """The trailing usage event."""
    total = prompt_tokens + completion_tokens
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total, **more}
    return {"id": "x-1", "object": "text_completion", "created": 1, "model": "m", "choices": [], "usage": counts}


DONE = b"data: [DONE]\n\n"


def answer(token_ms: Sequence[float], finish: str = "length") -> Script:
    """A complete answer: a token so many ms after the one before, then usage and [DONE] at once."""
    last = len(token_ms) - 1
    steps: list[tuple[int, bytes | Failure]] = [
        (round(ms * NS_PER_MS), event(chunk(f" w{i}", finish if i == last else None))) for i, ms in enumerate(token_ms)
    ]
    return Script([*steps, (0, event(usage(len(token_ms)))), (0, DONE)])


def exchange_of(
    pieces: Sequence[bytes],
    stamps: Sequence[int] | None = None,
    *,
    status: int | None = 200,
    headers: dict[str, str] | None = None,
    failure: Failure | None = None,
) -> Exchange:
    """An Exchange of these body pieces, stamped 10, 20, 30, ... ns unless stamps are given."""
    stamps = [10 * (i + 1) for i in range(len(pieces))] if stamps is None else stamps
    return Exchange(
        sent_ns=1,
        first_byte_ns=stamps[0] if stamps else None,
        end_ns=stamps[-1] if stamps else 1,
        status=status,
        headers=dict(EVENT_STREAM) if headers is None else headers,
        pieces=list(pieces),
        stamps=array("q", stamps),
        failure=failure,
    )

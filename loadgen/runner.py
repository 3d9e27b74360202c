"""Requests x clock x transport -> records: closed loop, open loop, sessions. One event loop, one process.

    cold request alone -> warm-up -> start -> measured requests -> Outcome

While the clock runs nothing is parsed in a request's path: a finished Exchange goes into a queue, and a reducer turns
it into a RequestRecord in slices of under a millisecond between reads (kernel stamps do not mind a late read). The
queue holds at most `_BACKLOG_BYTES` of raw answers; above that the slices grow, so memory stays bounded.

Closed loop: N slots; a slot asks for its next request the moment its answer is over, and latency counts from there.
Open loop: every request has an absolute due time; a slow answer delays no other request. With a cap on what is in
flight a request may wait for its turn, and that wait is in its latency, because latency counts from the plan.
Sessions: a later turn is due when the turns before it have ended and its think time is over. In a closed loop it holds
no slot meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loadgen.clock import NS_PER_MS, Clock, MonotonicClock
from loadgen.plan import Plan, Planned
from loadgen.protocol import read_exchange
from loadgen.record import ClientUsage, FailureKind, Phase, Request, RequestRecord
from loadgen.transport import Exchange, Transport

_LEAD_NS = 50 * NS_PER_MS  # a task is made, and a connection found, this long before its request is due
_SLICE_NS = NS_PER_MS  # the reducer yields to the reads after this long
_BACKLOG_BYTES = 64 << 20
_LAG_PERIOD_S = 0.02
_MOST_ASIDE = 4096  # turns of a closed loop that may wait for their predecessors before no more are read
_REFUSED_PAUSE_NS = 100 * NS_PER_MS  # a refused slot waits, or a dead server would be asked 10,000 times/s


@dataclass(slots=True)
class Snapshot:
    """Live counts for a progress line; ttft_ns is of the last answer read."""

    total: int | None = None
    started: int = 0
    finished: int = 0
    failed: int = 0
    events: int = 0
    ttft_ns: int | None = None

    @property
    def in_flight(self) -> int:
        return self.started - self.finished


@dataclass(frozen=True, slots=True)
class Outcome:
    """records by position in the plan; start_ns is the measured phase's; unfinished were started and stopped."""

    records: tuple[tuple[int, RequestRecord], ...]
    start_ns: int
    end_ns: int
    usage: ClientUsage
    interrupted: bool
    unfinished: int
    skipped: int
    trace: Mapping[str, Any] | None = None  # what became of the rows of a trace, as far as this worker read it


StartAt = Callable[[], Awaitable[int]]  # awaited when the warm-up is over; gives the common absolute start


@dataclass(slots=True)
class _State:
    """What the measured phase counts while it runs."""

    records: dict[int, RequestRecord] = field(default_factory=dict)
    by_id: dict[str, RequestRecord] = field(default_factory=dict)  # only of requests that another one waits for
    ended: dict[str, asyncio.Event] = field(default_factory=dict)


@dataclass(slots=True)
class _Aside:
    """Turns of a closed loop that could not start when they were read."""

    ripe: deque[Planned] = field(default_factory=deque)  # their time has come
    num_waiting: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Runner:
    """Runs one Plan once. stop() may be called from a signal handler: no new request, what is in flight is dropped."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        clock: Clock | None = None,
        *,
        snapshot: Snapshot | None = None,
        start_at: StartAt | None = None,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._clock = clock or MonotonicClock()
        self.snapshot = snapshot or Snapshot()
        self.snapshot.total = plan.total
        self._start_at = start_at or self._start_soon
        self._state = _State()
        self._queue: deque[tuple[int, Request, Exchange, int]] = deque()
        self._queue_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None
        self._bug: BaseException | None = None  # of a request's task: nothing a server can cause

    def stop(self) -> None:
        """Ask for an early end (from the loop's thread)."""
        self._stopping = True
        if self._main is not None:
            self._main.cancel()

    async def run(self) -> Outcome:
        """Run the plan. Raises what the transport raises for a plan that cannot be sent; nothing for a bad server."""
        with _quiet_gc():
            lags: list[int] = []
            start_ns = end_ns = self._clock.now_ns()
            cpu_start = time.process_time()
            sampler = asyncio.ensure_future(_sample_loop_lag(lags))
            reducer = asyncio.ensure_future(self._reduce_in_slices())
            try:
                self._main = asyncio.ensure_future(self._warm_up())
                await self._settle(self._main)
                if not self._stopping:
                    start_ns = await self._start_at()
                if not self._stopping:  # it may have been stopped while it waited for the others
                    cpu_start = time.process_time()
                    lags.clear()
                    self._main = asyncio.ensure_future(self._measure(start_ns))
                    await self._settle(self._main)
                end_ns = self._clock.now_ns()
            finally:
                cpu_s = time.process_time() - cpu_start
                for task in (sampler, reducer, *self._tasks):
                    task.cancel()
                await asyncio.gather(sampler, reducer, *self._tasks, return_exceptions=True)
            cpu_s += self._reduce_rest()
            return self._outcome(start_ns, end_ns, cpu_s, tuple(lags))

    # ------------------------------------------------------------------ phases

    async def _settle(self, task: asyncio.Task[None]) -> None:
        """Wait for a phase; when stop() cancelled it, take its requests down too."""
        try:
            await task
        except asyncio.CancelledError:
            if self._bug is not None:
                raise self._bug from None
            if not self._stopping:
                raise
            for request_task in self._tasks:
                request_task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _warm_up(self) -> None:
        await self._transport.open(self._plan.connections)
        cold = [planned for planned in self._plan.before if planned[1].phase is Phase.COLD]
        warm = iter([planned for planned in self._plan.before if planned[1].phase is not Phase.COLD])
        for index, request in cold:
            await self._send_now(index, request)
        await self._in_slots(warm, self._plan.warmup_concurrency)

    async def _start_soon(self) -> int:
        return self._clock.now_ns() + (_LEAD_NS if self._plan.open_loop else 0)

    async def _measure(self, start_ns: int) -> None:
        feed = self._announced(self._plan.measured)
        if self._plan.open_loop:
            await self._open_loop(feed, start_ns)
        else:
            await self._transport.sleep_until_ns(start_ns)
            await self._in_slots(feed, self._plan.concurrency or 1, self._deadline(start_ns))

    def _deadline(self, start_ns: int) -> int | None:
        return None if self._plan.duration_ns is None else start_ns + self._plan.duration_ns

    async def _in_slots(self, feed: Iterator[Planned], slots: int, deadline_ns: int | None = None) -> None:
        aside = _Aside()

        async def slot() -> None:
            while deadline_ns is None or self._clock.now_ns() < deadline_ns:
                planned = await self._next_ready(feed, aside, deadline_ns)
                if planned is None:
                    return
                exchange = await self._send_now(*planned)
                if exchange.failure is not None and exchange.failure.kind is FailureKind.REFUSED and deadline_ns:
                    await self._clock.sleep_until_ns(self._clock.now_ns() + _REFUSED_PAUSE_NS)

        for _ in range(slots):
            self._spawn(slot())
        await self._all_over()

    async def _next_ready(self, feed: Iterator[Planned], aside: _Aside, deadline_ns: int | None) -> Planned | None:
        """The next request that may start now; a turn that must wait is set aside, and comes first when it is ripe."""
        while True:
            if aside.ripe:
                return aside.ripe.popleft()
            planned = next(feed, None) if aside.num_waiting < _MOST_ASIDE else None
            if planned is not None and not planned[1].after:
                return planned
            if planned is not None:
                aside.num_waiting += 1
                self._spawn(self._ripen(planned, aside, deadline_ns))
            elif aside.num_waiting:
                aside.changed.clear()
                await aside.changed.wait()
            else:
                return None

    async def _ripen(self, planned: Planned, aside: _Aside, deadline_ns: int | None) -> None:
        due_ns = await self._predecessors(planned[1])
        if deadline_ns is None or due_ns < deadline_ns:
            await self._transport.sleep_until_ns(due_ns)
            aside.ripe.append(planned)
        else:
            self._never_starts(planned[1])
        aside.num_waiting -= 1
        aside.changed.set()

    async def _open_loop(self, feed: Iterator[Planned], start_ns: int) -> None:
        deadline_ns = self._deadline(start_ns)
        cap = asyncio.Semaphore(self._plan.concurrency) if self._plan.concurrency else contextlib.nullcontext()
        for index, request in feed:
            due_ns = start_ns + (request.planned_ns or 0)
            if request.planned_ns is not None:
                if deadline_ns is not None and due_ns >= deadline_ns:
                    break
                if due_ns - _LEAD_NS > self._clock.now_ns():
                    await self._transport.sleep_until_ns(due_ns - _LEAD_NS)
            self._spawn(self._send_at(index, request, due_ns, cap, deadline_ns))
        await self._all_over()

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = self._bug or bug
            if self._main is not None:
                self._main.cancel()  # the run ends, loudly

    async def _all_over(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ------------------------------------------------------------------ one request

    async def _send_now(self, index: int, request: Request) -> Exchange:
        return await self._send(index, request, self._clock.now_ns(), None)

    async def _send_at(
        self,
        index: int,
        request: Request,
        due_ns: int,
        cap: contextlib.AbstractAsyncContextManager[object],
        deadline_ns: int | None,
    ) -> None:
        if request.after:
            due_ns = max(due_ns, await self._predecessors(request))
            if deadline_ns is not None and due_ns >= deadline_ns:
                self._never_starts(request)
                return
        async with cap:
            await self._send(index, request, due_ns, due_ns)

    async def _send(self, index: int, request: Request, planned_ns: int, hold_ns: int | None) -> Exchange:
        snapshot = self.snapshot
        body = request.body
        if request.make_body is not None:
            ended = self._state.by_id
            body = request.make_body({name: ended[name] for name in request.after if name in ended})
        measured = request.phase is Phase.MEASURED
        if measured:
            snapshot.started += 1
        try:
            exchange = await self._transport.exchange("POST", request.path, request.id, body, planned_ns=hold_ns)
        except asyncio.CancelledError:
            if measured and hold_ns is not None and self._clock.now_ns() < hold_ns:
                snapshot.started -= 1  # it was held until its time, and never sent
            raise
        if measured:
            snapshot.finished += 1
            snapshot.failed += exchange.failure is not None
        if request.id in self._state.ended:  # another turn waits for this answer: read it at once
            record = self._reduce(index, request, exchange, planned_ns)
            self._state.by_id[request.id] = record
            if not self._plan.keep_text:  # it was read for the next turn only
                self._state.records[index] = replace(record, text=None, tool_calls=None)
            self._state.ended[request.id].set()
        else:
            self._queue.append((index, request, exchange, planned_ns))
            self._queue_bytes += sum(map(len, exchange.pieces))
        return exchange

    def _announced(self, feed: Iterable[Planned]) -> Iterator[Planned]:
        """The feed, with an Event for each request that a later one waits for, made before either can start."""
        for planned in feed:
            if planned[1].session_open:
                self._state.ended[planned[1].id] = asyncio.Event()
            yield planned

    def _never_starts(self, request: Request) -> None:
        """Let go what waits for a request that is due after the end."""
        if (ended := self._state.ended.get(request.id)) is not None:
            ended.set()

    async def _predecessors(self, request: Request) -> int:
        """Wait until all of `after` have ended; gives the due time: the end of the first and the think time, and not
        before the others' ends. Returns shortly before it."""
        for name in request.after:
            if (ended := self._state.ended.get(name)) is not None:
                await ended.wait()
        ends = [
            record.end_ns + (0 if place else request.delay_ns)
            for place, name in enumerate(request.after)
            if (record := self._state.by_id.get(name)) is not None and record.end_ns is not None
        ]
        due_ns = max(ends, default=self._clock.now_ns())
        await self._transport.sleep_until_ns(due_ns - _LEAD_NS)
        return due_ns

    # ------------------------------------------------------------------ reading the answers

    def _reduce(self, index: int, request: Request, exchange: Exchange, planned_ns: int) -> RequestRecord:
        record = read_exchange(request, exchange, planned_ns, keep_text=self._plan.keep_text or request.session_open)
        self._state.records[index] = record
        if record.phase is Phase.MEASURED:
            self.snapshot.failed += record.failure is not None and exchange.failure is None
            self.snapshot.events += record.num_events
            if record.first_token_ns is not None:
                self.snapshot.ttft_ns = record.first_token_ns - planned_ns
        return record

    def _reduce_one(self) -> None:
        index, request, exchange, planned_ns = self._queue.popleft()
        self._queue_bytes -= sum(map(len, exchange.pieces))
        self._reduce(index, request, exchange, planned_ns)

    async def _reduce_in_slices(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            end_ns = time.monotonic_ns() + _SLICE_NS * (1 + 8 * (self._queue_bytes > _BACKLOG_BYTES))
            while self._queue and time.monotonic_ns() < end_ns:
                self._reduce_one()

    def _reduce_rest(self) -> float:
        cpu_start = time.process_time()
        while self._queue:
            self._reduce_one()
        return time.process_time() - cpu_start

    def _outcome(self, start_ns: int, end_ns: int, cpu_s: float, lags: tuple[int, ...]) -> Outcome:
        records = tuple(sorted(self._state.records.items()))
        ends = [r.end_ns for _, r in records if r.phase is Phase.MEASURED and r.end_ns is not None]
        if ends and not self._stopping:
            end_ns = max(ends)
        facts = self._transport.usage()
        usage = ClientUsage(
            cpu_s=cpu_s,
            wall_s=(end_ns - start_ns) / 1e9,
            loop_lag_ns=lags,
            transport=self._transport.name,
            kernel_stamps=all(r.kernel_stamps for _, r in records if r.status is not None),
            reads=facts.reads,
            unread_bytes=facts.unread_bytes,
            num_connections=facts.num_connections,
            notes=self._plan.notes(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )
        total, snapshot = self._plan.total, self.snapshot
        return Outcome(
            records=records,
            start_ns=start_ns,
            end_ns=end_ns,
            usage=usage,
            interrupted=self._stopping,
            unfinished=snapshot.in_flight,
            skipped=max(0, total - snapshot.started) if total is not None and self._stopping else 0,
            trace=self._plan.trace_counts() if self._plan.trace_counts is not None else None,
        )


@contextlib.contextmanager
def _quiet_gc() -> Iterator[None]:
    """No garbage collection while measuring: what exists is frozen, cycles made meanwhile wait for the end."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


async def _sample_loop_lag(lags: list[int]) -> None:
    """How late the event loop runs a timer, every 20 ms: the audit's evidence of a client that stood still."""
    while True:
        before = time.monotonic_ns()
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(max(0, time.monotonic_ns() - before - round(_LAG_PERIOD_S * 1e9)))

"""One load, in this process, in N processes, or on a Ray cluster: always one plan, one start, one merged Run.

Every worker makes the same plan from the same seeds and takes each N-th request of it, so the merged arrivals are those
of a single process exactly, and the bodies do not depend on the number of workers. Records are merged as they are:
no sketch, no average of percentiles.

    run_load(options) -> Run
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from loadgen.clock import NS_PER_MS, now_ns, utc_at
from loadgen.limits import ensure_descriptors, ensure_ports
from loadgen.options import Options, UnusableServer, UsageError
from loadgen.plan import make_plan, needed_connections
from loadgen.record import ClientUsage, Phase, RequestRecord, Run, most_in_flight
from loadgen.runner import Outcome, Runner, Snapshot
from loadgen.scrape import Scraper
from loadgen.target import ServerInfo, base_url, make_target, probe
from loadgen.transport import Transport, make_transport

Result = TypeVar("Result")

_PROGRESS_S = 0.2
_SECRET_CHARS = 8  # shorter words of a header value are no secrets, and would hide harmless text
_START_LEAD_NS = 200 * NS_PER_MS  # from the last worker's "ready" to the common start


class Progress(Protocol):
    """Told of the live counts a few times a second."""

    def update(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class _Silent:
    def update(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


def run_load(options: Options, *, progress: Progress | None = None) -> Run:
    """Run one load and give its records. Ctrl-C ends it early and gives what is complete (`interrupted`).

    Raises UnusableServer when there is no server or no model, UsageError when this machine's limits are too low or the
    options do not fit the server.
    """
    if options.concurrency is not None and options.workers > options.concurrency:
        raise UsageError(
            f"--workers must be at most --concurrency ({options.concurrency}), not {options.workers}: "
            "a worker needs a slot of its own"
        )
    if options.seed is None:
        options = options.replace(seed=secrets.randbits(31))
    progress = progress or _Silent()
    if options.ray is None:  # on a cluster each worker checks its own host
        connections = needed_connections(options)
        ensure_descriptors(-(-connections // options.workers))
        ensure_ports(connections)
    try:
        if options.ray is not None:
            from loadgen.on_ray import run_on_ray

            return run_on_ray(options, progress)
        if options.workers > 1:
            return _run_in_processes(options, progress)
        return run_async(_run_alone(options, progress))
    finally:
        progress.close()


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run on uvloop where there is one."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:  # Windows
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(coroutine)


# ---------------------------------------------------------------- in this process


async def _run_alone(options: Options, progress: Progress) -> Run:
    transport = make_transport(options.transport, make_target(options))
    try:
        info = await probe(transport, options)
        plan = await make_plan(options, info, transport)
        runner = Runner(plan, transport)
        scraper = Scraper()
        if options.scrape:
            scraper.start(base_url(options.url), make_target(options).headers)
        ticker = asyncio.ensure_future(_tick(progress, runner.snapshot))
        try:
            with _stop_on_signals(runner.stop):
                outcome = await runner.run()
        finally:
            ticker.cancel()
            scrapes = await scraper.stop()
        progress.update(runner.snapshot)
        return merge(options, info, plan.info, [outcome], scrapes)
    finally:
        await transport.close()


async def _tick(progress: Progress, snapshot: Snapshot) -> None:
    while True:
        progress.update(snapshot)
        await asyncio.sleep(_PROGRESS_S)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops the run, the second leaves at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    seen = 0

    def on_signal() -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(130)
        stop()

    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


# ---------------------------------------------------------------- N workers, wherever they are


class Channel(Protocol):
    """A worker's end of its talk with the conductor. Messages are (kind, value).

    Worker to conductor: ready, progress (Snapshot), done (Outcome), error (text). Conductor to worker: start (absolute
    ns of the worker's clock), stop.
    """

    def send(self, kind: str, value: Any = None) -> None: ...

    def listen(self, on_message: Callable[[str, Any], None]) -> None:
        """From now on call on_message in the running event loop; ("stop", None) when the conductor is gone."""

    def close(self) -> None:
        """Stop listening."""


class Crew(Protocol):
    """The conductor's end: all workers of a load. Stamps that go in and out are of this process's clock."""

    size: int

    def start(self) -> None:
        """Give every worker the one common start; all of them are ready."""

    def stop(self) -> None:
        """Ask every worker that is still there for an early end."""

    def receive(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        """(worker, kind, value) of what has come; empty after timeout_s. Raises UnusableServer when one has died."""


async def prepare(options: Options) -> tuple[ServerInfo, dict[str, Any]]:
    """What the server says of itself, and what run.json says of the plan; one look for all workers."""
    transport = make_transport(options.transport, make_target(options))
    try:
        info = await probe(transport, options)
        return info, dict((await make_plan(options, info, transport)).info)
    finally:
        await transport.close()


def conduct(crew: Crew, progress: Progress) -> list[Outcome]:
    """Give the common start once all are ready; collect the outcomes. Ctrl-C: stop all; again: leave."""
    outcomes: dict[int, Outcome] = {}
    snapshots: dict[int, Snapshot] = {}
    ready = 0
    stopping = False
    while len(outcomes) < crew.size:
        try:
            for worker, kind, value in crew.receive(_PROGRESS_S):
                if kind == "ready":
                    ready += 1
                    if ready == crew.size:
                        crew.start()
                elif kind == "progress":
                    snapshots[worker] = value
                elif kind == "done":
                    outcomes[worker] = value
                else:
                    raise UsageError(value)
            progress.update(_sum(list(snapshots.values())))
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            crew.stop()
    return [outcomes[worker] for worker in range(crew.size)]


def _sum(snapshots: Sequence[Snapshot]) -> Snapshot:
    total = Snapshot(total=0)
    for snapshot in snapshots:
        total.total = None if total.total is None or snapshot.total is None else total.total + snapshot.total
        total.started += snapshot.started
        total.finished += snapshot.finished
        total.failed += snapshot.failed
        total.events += snapshot.events
        total.ttft_ns = snapshot.ttft_ns or total.ttft_ns
    return total


async def run_share(channel: Channel, options: Options, info: ServerInfo, worker: int) -> Outcome:
    """One worker's part of the plan, from "ready" and the common start to its Outcome."""
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_message(kind: str, value: Any) -> None:
        if kind == "stop":
            runner.stop()
            value = now_ns()  # a worker that waits for the start must not wait on
        if not started.done():
            started.set_result(value)

    async def start_at() -> int:
        channel.send("ready")
        return await started

    async def tell() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            channel.send("progress", runner.snapshot)

    transport = make_transport(options.transport, make_target(options))
    try:
        runner = Runner(await make_plan(options, info, transport, worker), transport, start_at=start_at)
        channel.listen(on_message)
        teller = asyncio.ensure_future(tell())
        try:
            return await runner.run()
        finally:
            teller.cancel()
            channel.close()
    finally:
        await transport.close()


# ---------------------------------------------------------------- N processes


def _run_in_processes(options: Options, progress: Progress) -> Run:
    info, plan_info = run_async(prepare(options))
    crew = _Processes(options, info)
    scraper = Scraper()
    if options.scrape:
        scraper.start(base_url(options.url), make_target(options).headers)
    try:
        outcomes = conduct(crew, progress)
    finally:
        crew.end()
        scrapes = run_async(scraper.stop())
    return merge(options, info, plan_info, outcomes, scrapes)


class _Processes:
    """A Crew of processes on this machine, a pipe to each."""

    def __init__(self, options: Options, info: ServerInfo) -> None:
        self.size = options.workers
        self._pipes: dict[Connection, int] = {}  # to those that have not ended
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for worker in range(options.workers):
            here, there = context.Pipe()
            process = context.Process(target=_worker, args=(there, options, info, worker), daemon=True)
            process.start()
            there.close()
            self._pipes[here] = worker
            self._processes.append(process)

    def start(self) -> None:
        self._tell("start", now_ns() + _START_LEAD_NS)

    def stop(self) -> None:
        self._tell("stop", None)

    def _tell(self, kind: str, value: Any) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((kind, value))

    def receive(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        messages = []
        for pipe in wait(list(self._pipes), timeout=timeout_s):
            assert isinstance(pipe, Connection)
            worker = self._pipes[pipe]
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise UnusableServer(f"client process {worker} died: see its message above") from None
            messages.append((worker, kind, value))
            if kind == "done":
                del self._pipes[pipe]
        return messages

    def end(self) -> None:
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()


class _Pipe:
    """A Channel over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._close: Callable[[], object] = lambda: None

    def send(self, kind: str, value: Any = None) -> None:
        self._pipe.send((kind, value))

    def listen(self, on_message: Callable[[str, Any], None]) -> None:
        loop, number = asyncio.get_running_loop(), self._pipe.fileno()

        def on_readable() -> None:
            try:
                kind, value = self._pipe.recv()
            except EOFError:  # the parent is gone
                kind, value = "stop", None
                loop.remove_reader(number)
            on_message(kind, value)

        self._close = lambda: loop.remove_reader(number)
        loop.add_reader(number, on_readable)

    def close(self) -> None:
        self._close()


def _worker(pipe: Connection, options: Options, info: ServerInfo, worker: int) -> None:
    """A client process: it ignores Ctrl-C (the parent tells it) and ends with its Outcome in the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send(("done", run_async(run_share(_Pipe(pipe), options, info, worker))))
    except (UsageError, UnusableServer) as error:
        pipe.send(("error", str(error)))
    finally:
        pipe.close()


# ---------------------------------------------------------------- merging


def merge(
    options: Options,
    info: ServerInfo,
    plan_info: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    scrapes: Sequence[dict[str, Any]],
) -> Run:
    """One Run of the workers' outcomes: records in order of plan, counts added, the client's evidence side by side."""
    pairs = sorted((pair for outcome in outcomes for pair in outcome.records), key=lambda pair: pair[0])
    secrets = _secrets(options)
    records = tuple(_without_secrets(record, secrets) for _, record in pairs)
    unfinished = sum(outcome.unfinished for outcome in outcomes)
    usages = [outcome.usage for outcome in outcomes]
    start_ns = min(outcome.start_ns for outcome in outcomes)
    end_ns = max(outcome.end_ns for outcome in outcomes)
    usage = ClientUsage(
        cpu_s=sum(u.cpu_s for u in usages),
        wall_s=(end_ns - start_ns) / 1e9,
        loop_lag_ns=tuple(lag for u in usages for lag in u.loop_lag_ns),
        transport=usages[0].transport,
        kernel_stamps=all(u.kernel_stamps for u in usages),
        num_workers=len(usages),
        max_in_flight=max(unfinished, most_in_flight(r for r in records if r.phase is Phase.MEASURED)),
        reads=sum(u.reads for u in usages),
        unread_bytes=sum(u.unread_bytes for u in usages),
        num_connections=sum(u.num_connections for u in usages),
        cores=max(u.cores for u in usages),
        notes=tuple(dict.fromkeys((*info.notes, *(note for u in usages for note in u.notes)))),
    )
    return Run(
        options={**options_to_save(options), "model": info.model},
        records=records,
        start_ns=start_ns,
        start_utc=utc_at(start_ns),
        end_ns=end_ns,
        usage=usage,
        interrupted=any(outcome.interrupted for outcome in outcomes),
        unfinished=unfinished,
        skipped=sum(outcome.skipped for outcome in outcomes),
        server={"url": base_url(options.url), **{k: v for k, v in asdict(info).items() if v not in (None, {}, ())}},
        plan=_with_trace(plan_info, outcomes, sum(r.phase is Phase.MEASURED for r in records) + unfinished),
        scrapes=tuple(scrapes),
    )


def _with_trace(plan_info: Mapping[str, Any], outcomes: Sequence[Outcome], started: int) -> dict[str, Any]:
    counts = [outcome.trace for outcome in outcomes if outcome.trace is not None]
    if not counts:
        return dict(plan_info)
    from loadgen.trace_plan import settled

    return {**plan_info, "trace": settled(counts, started)}


def _secrets(options: Options) -> list[str]:
    """What a server may repeat in an error and nobody may write down: the key and the values of --header."""
    words = [word for value in options.headers.values() for word in value.split() if len(word) >= _SECRET_CHARS]
    key = os.environ.get("OPENAI_API_KEY", "")
    return [key, *words] if len(key) > 3 else words


def _without_secrets(record: RequestRecord, secrets: Sequence[str]) -> RequestRecord:
    if record.failure is None:
        return record
    detail = record.failure.detail
    for secret in secrets:
        detail = detail.replace(secret, "***")
        for size in range(len(secret) - 1, 3, -1):  # the detail was cut in the middle of it
            if detail.endswith(f"{secret[:size]}…"):
                detail = f"{detail[: -size - 1]}***…"
    if detail == record.failure.detail:
        return record
    return replace(record, failure=replace(record.failure, detail=detail))


def options_to_save(options: Options) -> dict[str, Any]:
    """The flags as plain data, header values masked."""
    plain = asdict(options)
    plain["headers"] = {name: "***" for name in options.headers}
    return plain


async def with_transport(options: Options, work: Callable[[Transport], Coroutine[Any, Any, Result]]) -> Result:
    """Run `work` with a transport to the server of these options, closed in any case."""
    transport = make_transport(options.transport, make_target(options))
    try:
        return await work(transport)
    finally:
        await transport.close()

"""The workers of a load on a Ray cluster: the same shares, one common start, records on this machine's clock.

    run_on_ray(options, progress) -> Run          # options.ray: "local", "auto" or HOST:PORT; options.workers actors

An actor is the client process of workers.py in another place: it talks to the conductor by the same messages, which
here go through Ray calls instead of a pipe. What is added is time. CLOCK_MONOTONIC means nothing on another host, so
the offset of every actor's clock is measured by round trips, right before the common start and again when the actor
has ended (clocks drift: 50 ppm are 3 ms a minute); in between it is interpolated. A record is moved as a whole, so
what it says of one request (TTFT, gaps) is exact; only times between workers carry the residual, which is reported as
`plan.clock_residual_ms` in run.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import tempfile
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadgen.clock import NS_PER_MS, now_ns
from loadgen.limits import ensure_descriptors, ensure_ports
from loadgen.options import Options, UnusableServer, UsageError
from loadgen.plan import needed_connections
from loadgen.record import RequestRecord, Run
from loadgen.runner import Outcome
from loadgen.scrape import Scraper
from loadgen.target import ServerInfo, base_url, is_loopback, make_target
from loadgen.workers import Progress, conduct, merge, prepare, run_async, run_share

_START_LEAD_NS = 500 * NS_PER_MS  # from the last "ready" to the common start: a Ray call to every actor
_ROUND_TRIPS = 50
_POLL_S = 0.2
_PLACED_S = 60.0  # until every actor has its CPU
_CONNECT_S = 5.0
_FILES = ("prompts", "trace")  # options that name a file of this host

# ---------------------------------------------------------------- clocks


@dataclass(frozen=True, slots=True)
class Offset:
    """The other clock minus this one, ns, as it was at `at_ns` of this clock; off by at most `residual_ns`."""

    at_ns: int
    offset_ns: int
    residual_ns: int


def measure_offset(
    read_other: Callable[[], int], round_trips: int = _ROUND_TRIPS, now: Callable[[], int] = now_ns
) -> Offset:
    """The offset by the quickest of several round trips (Cristian 1989).

    read_other gives a reading of the other clock. That reading was taken between the call and its return, so its
    distance from the middle of the two is at most half of the round trip, however unequal the two ways were.
    """
    best: Offset | None = None
    for _ in range(round_trips):
        before = now()
        reading = read_other()
        after = now()
        if best is None or (after - before + 1) // 2 < best.residual_ns:
            middle = (before + after) // 2
            best = Offset(middle, reading - middle, (after - before + 1) // 2)
    assert best is not None
    return best


@dataclass(frozen=True, slots=True)
class Alignment:
    """Another clock's offset over a run: straight between two measurements, level outside of them."""

    before: Offset
    after: Offset

    @property
    def residual_ns(self) -> int:
        return max(self.before.residual_ns, self.after.residual_ns)

    def offset_ns(self, other_ns: int) -> int:
        """What to take off a stamp of the other clock to have it on this one."""
        first, last = self.before, self.after
        start = first.at_ns + first.offset_ns
        span = last.at_ns + last.offset_ns - start
        share = min(1.0, max(0.0, (other_ns - start) / span)) if span > 0 else 0.0
        return first.offset_ns + round((last.offset_ns - first.offset_ns) * share)

    def to_here(self, outcome: Outcome) -> Outcome:
        """The Outcome with all stamps on this clock. Each record is moved by one offset: its durations stay exact."""
        return replace(
            outcome,
            records=tuple(
                (index, _moved(record, self.offset_ns(record.planned_ns))) for index, record in outcome.records
            ),
            start_ns=outcome.start_ns - self.offset_ns(outcome.start_ns),
            end_ns=outcome.end_ns - self.offset_ns(outcome.end_ns),
        )


def _moved(record: RequestRecord, offset_ns: int) -> RequestRecord:
    def moved(stamp: int | None) -> int | None:
        return None if stamp is None else stamp - offset_ns

    return replace(
        record,
        planned_ns=record.planned_ns - offset_ns,
        sent_ns=moved(record.sent_ns),
        first_byte_ns=moved(record.first_byte_ns),
        first_event_ns=moved(record.first_event_ns),
        first_token_ns=moved(record.first_token_ns),
        first_answer_ns=moved(record.first_answer_ns),
        last_token_ns=moved(record.last_token_ns),
        end_ns=moved(record.end_ns),
        event_stamps_ns=array("q", (stamp - offset_ns for stamp in record.event_stamps_ns)),
    )


# ---------------------------------------------------------------- the actor's side


@dataclass(frozen=True, slots=True)
class Place:
    node: str  # Ray's id of the machine
    host: str


class Mailbox:
    """A workers.Channel between the threads of an actor: the load's event loop in one, Ray's calls in the others."""

    def __init__(self) -> None:
        self.out: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._early: list[tuple[str, Any]] = []
        self._deliver: Callable[[str, Any], None] | None = None

    def send(self, kind: str, value: Any = None) -> None:
        self.out.put((kind, value))

    def listen(self, on_message: Callable[[str, Any], None]) -> None:
        loop = asyncio.get_running_loop()

        def deliver(kind: str, value: Any) -> None:
            loop.call_soon_threadsafe(on_message, kind, value)

        with self._lock:
            self._deliver = deliver
            for kind, value in self._early:
                deliver(kind, value)

    def put(self, kind: str, value: Any) -> None:
        """A message of the conductor; kept until somebody listens."""
        with self._lock:
            if self._deliver is None:
                self._early.append((kind, value))
            else:
                self._deliver(kind, value)

    def close(self) -> None:
        with self._lock:
            self._deliver = lambda kind, value: None


class Actor:
    """One client process on some host of the cluster. Ray runs its methods in threads of their own."""

    def __init__(self) -> None:
        self._box = Mailbox()

    def place(self) -> Place:
        import ray

        return Place(ray.get_runtime_context().get_node_id(), socket.gethostname())

    def clock_ns(self) -> int:
        return now_ns()

    def run(self, options: Options, info: ServerInfo, worker: int, key: str | None, files: Mapping[str, bytes]) -> None:
        """Run a share; its last message is "done" or "error". The key travels here and nowhere else.

        files: what this host does not have of _FILES, by the name of its option.
        """
        if key is not None:
            os.environ["OPENAI_API_KEY"] = key
        try:
            share = -(-needed_connections(options) // options.workers)
            ensure_descriptors(share)
            ensure_ports(share)
            with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
                for name, data in files.items():
                    path = Path(folder, f"{name}-{Path(getattr(options, name)).name}")
                    path.write_bytes(data)
                    options = options.replace(**{name: str(path)})
                self._box.send("done", run_async(run_share(self._box, options, info, worker)))
        except (UsageError, UnusableServer) as error:
            self._box.send("error", f"worker {worker} on {socket.gethostname()}: {error}")
        except Exception as error:
            self._box.send(
                "error", f"worker {worker} on {socket.gethostname()} failed: {type(error).__name__}: {error}"
            )

    def tell(self, kind: str, value: Any = None) -> None:
        self._box.put(kind, value)

    def poll(self, timeout_s: float) -> list[tuple[str, Any]]:
        """What the load has to say; waits up to timeout_s for the first message."""
        messages: list[tuple[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            messages.append(self._box.out.get(timeout=timeout_s))
            while True:
                messages.append(self._box.out.get_nowait())
        return messages


# ---------------------------------------------------------------- the conductor's side


def run_on_ray(options: Options, progress: Progress) -> Run:
    """Run one load with options.workers actors on the cluster options.ray.

    Raises UsageError, in one line, when Ray is not installed, when there is no cluster at the address, when it has too
    few free CPUs, or when the server's address means another machine to some worker.
    """
    assert options.ray is not None
    ray = _connect(options.ray, options.workers)
    info, plan_info = run_async(prepare(options))
    crew = Actors(ray, options, info)
    scraper = Scraper()
    try:
        crew.place(options)
        if options.scrape:
            scraper.start(base_url(options.url), make_target(options).headers)
        crew.begin(options, info)
        outcomes = conduct(crew, progress)
    finally:
        crew.end()
        scrapes = run_async(scraper.stop())
    plan_info["clock_residual_ms"] = crew.residual_ns / NS_PER_MS
    return merge(options, replace(info, notes=(*info.notes, crew.note())), plan_info, outcomes, scrapes)


def _connect(address: str, workers: int) -> Any:
    """The ray module, connected. The connection stays for the next load of this process; Ray ends it at exit."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a measurement tells nobody else
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'loadgen[ray]'") from None
    if not ray.is_initialized():
        _must_answer(address)
        local = {"include_dashboard": False} if address == "local" else {}
        package = str(Path(__file__).parent)  # the workers run this very code, whatever is installed there
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"py_modules": [package], "excludes": ["__pycache__"]},
                **local,
            )
        except ConnectionError:
            raise UsageError(
                f"--ray {address}: no Ray cluster found: start one with `ray start --head`, or use --ray local"
            ) from None
        except (RuntimeError, ValueError, ImportError, OSError) as error:
            raise UsageError(f"--ray {address}: {_last_line(error)}") from None
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < workers:
        raise UsageError(
            f"--workers {workers} needs as many CPUs, but the Ray cluster {address} has {cpus}: "
            f"use --workers {max(1, cpus)}, or add a host with `ray start --address`"
        )
    return ray


def _must_answer(address: str) -> None:
    """Ray itself tries a dead address for a minute and then ends the process."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if address in ("local", "auto"):
        return
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise UsageError(f"--ray must be local, auto or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--ray {address}: no Ray cluster answers there ({reason}): see `ray status`") from None


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class Actors:
    """A workers.Crew of Ray actors. What comes out is on this process's clock."""

    def __init__(self, ray: Any, options: Options, info: ServerInfo) -> None:
        self._ray = ray
        self.size = options.workers
        actor = ray.remote(Actor).options(num_cpus=1, max_concurrency=4, scheduling_strategy="SPREAD")
        self._actors = [actor.remote() for _ in range(self.size)]
        self._node = ray.get_runtime_context().get_node_id()
        self._places: list[Place] = []
        self._before: list[Offset] = []
        self._polls: dict[Any, int] = {}
        self.residual_ns = 0

    def place(self, options: Options) -> None:
        """Wait until every actor lives, and check that the server's address means the same server to all."""
        refs = [actor.place.remote() for actor in self._actors]
        ready, waiting = self._ray.wait(refs, num_returns=len(refs), timeout=_PLACED_S)
        try:
            placed = self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise UsageError(f"--ray {options.ray}: a worker could not start: {_last_line(error)}") from None
        if waiting:
            raise UsageError(
                f"--ray {options.ray}: {len(ready)} of {self.size} workers found a free CPU within {_PLACED_S:g} s: "
                f"the cluster is busy; use fewer --workers"
            )
        self._places = placed
        away = [place.host for place in placed if place.node != self._node]
        if away and is_loopback(base_url(options.url)):
            raise UsageError(
                f"--url {options.url} means another machine to the worker on {away[0]}: "
                f"give the server's address in the network"
            )

    def begin(self, options: Options, info: ServerInfo) -> None:
        """Let every worker make its plan and warm up."""
        key = os.environ.get("OPENAI_API_KEY")
        paths = {name: Path(path).absolute() for name in _FILES if (path := getattr(options, name)) is not None}
        options = options.replace(**{name: str(path) for name, path in paths.items()})  # actors have another folder
        away = {worker for worker, place in enumerate(self._places) if place.node != self._node}
        shipped = self._ray.put({name: path.read_bytes() for name, path in paths.items()} if away else {})
        for worker, actor in enumerate(self._actors):
            actor.run.remote(options, info, worker, key, shipped if worker in away else {})
            self._poll(worker)

    def _poll(self, worker: int) -> None:
        self._polls[self._actors[worker].poll.remote(_POLL_S)] = worker

    def _offset(self, worker: int) -> Offset:
        clock = self._actors[worker].clock_ns
        return measure_offset(lambda: int(self._ray.get(clock.remote())))

    def start(self) -> None:
        self._before = [self._offset(worker) for worker in range(self.size)]
        start_ns = now_ns() + _START_LEAD_NS
        for actor, offset in zip(self._actors, self._before, strict=True):
            actor.tell.remote("start", start_ns + offset.offset_ns)

    def stop(self) -> None:
        for actor in self._actors:
            actor.tell.remote("stop")

    def receive(self, timeout_s: float) -> list[tuple[int, str, Any]]:
        messages: list[tuple[int, str, Any]] = []
        ready, _ = self._ray.wait(list(self._polls), timeout=timeout_s)
        for ref in ready:
            worker = self._polls.pop(ref)
            try:
                said = dict(self._ray.get(ref))  # of several snapshots the last
                if "done" in said:
                    said["done"] = self._on_this_clock(worker, said["done"])
                else:
                    self._poll(worker)
            except self._ray.exceptions.RayError as error:
                host = self._places[worker].host
                raise UnusableServer(f"Ray worker {worker} on {host} died: {_last_line(error)}") from None
            messages += [(worker, kind, value) for kind, value in said.items()]
        return messages

    def _on_this_clock(self, worker: int, outcome: Outcome) -> Outcome:
        after = self._offset(worker)
        alignment = Alignment(self._before[worker] if self._before else after, after)
        self.residual_ns = max(self.residual_ns, alignment.residual_ns)
        return alignment.to_here(outcome)

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def note(self) -> str:
        hosts = list(dict.fromkeys(place.host for place in self._places))
        return (
            f"{self.size} Ray workers on {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} ({', '.join(hosts)}); "
            f"their clocks agree with this one within {self.residual_ns / NS_PER_MS:.3f} ms"
        )

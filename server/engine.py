"""Who runs when: requests wait in order of arrival, leave in batches, and a batch runs until its last row is over.

    engine = Engine(model, batch_size=8, batch_wait_s=0.05, deliver=print)
    engine.add_request(request)      # any thread
    engine.step()                    # the generation thread: run the batch that is due, if one is
    engine.abort(request)            # any thread; the row is free at the next token

A batch width of 1 is the serial mode. In a static batch a row that is over stays until the others are: it is stepped
on as dead weight and counted as such; new requests wait for the next batch. `ContinuousEngine` leaves the scheduling
to the model (transformers' continuous batching) and keeps the same interface and account.
No HTTP, no asyncio, no torch: a Model is anything that can generate (generate.py, fake_model.py).
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.accounting import Accounting, BatchRecord
from server.text import TextStream

STRETCH_STEPS = 256  # a continuous batch never ends, so its account is cut into pieces of so many steps


class QueueFull(Exception):
    """More requests wait than the server was told to hold. HTTP status 429."""


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when an answer ends. Ranges are checked in schema.py."""

    max_tokens: int = 16
    min_tokens: int = 0  # no eos before so many tokens
    ignore_eos: bool = False  # eos does not end the answer (it does end one under a constraint)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One row: what was asked, and what has become of it."""

    id: str
    prompt_ids: list[int]
    sampling: Sampling = Sampling()
    constraint: Any = None  # of constrain.py, opaque here
    state: State = State.WAITING
    arrival_s: float = 0.0
    aborted: bool = False  # set by any thread, obeyed at the next token
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop string or stop token that ended it
    text: TextStream | None = None

    @property
    def over(self) -> bool:
        return self.state is State.DONE


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request. The last one has a finish_reason or an error."""

    request: Request
    text: str
    num_tokens: int  # of the request so far
    finish_reason: str | None = None  # "stop", "length"
    error: str | None = None

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


OnStep = Callable[[Sequence[int]], Sequence[bool]]


class Model(Protocol):
    """What an engine needs of a model."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    def decode(self, ids: list[int]) -> str: ...

    def generate(self, requests: Sequence[Request], on_step: OnStep) -> None:
        """Prefill, then step until every row is over. After the prefill and after each step on_step gets the newest
        token of every row and says which rows are over; a row that is over goes on until all are."""


class Engine:
    """Serial (batch_size 1) and static batching.

    batch_wait_s: how long an unfilled batch waits for more, counted from when the engine is free and a request waits.
    deliver: called in the generation thread, once a step, with all the outputs of that step.
    """

    def __init__(
        self,
        model: Model,
        deliver: Callable[[list[Output]], None],
        batch_size: int = 1,
        batch_wait_s: float = 0.0,
        max_waiting: int = 1024,
        accounting: Accounting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.accounting = accounting or Accounting()
        self.batch_size = batch_size
        self.batch_wait_s = batch_wait_s if batch_size > 1 else 0.0
        self.max_waiting = max_waiting
        self._deliver = deliver
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._free_since_s = clock()
        self._num_running = 0
        self._closing = False

    # any thread

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises QueueFull."""
        with self._changed:
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests are waiting already (--max-waiting)")
            request.arrival_s = self._clock()
            self._waiting.append(request)
            self._gauge()
            self._changed.notify()

    def abort(self, request: Request) -> None:
        """Nobody wants the answer any more. A waiting request leaves at once, a running one at its next token."""
        with self._changed:
            request.aborted = True
            if request.state is State.WAITING and request in self._waiting:
                self._waiting.remove(request)
                request.state = State.DONE
                self.accounting.outcome("aborted")
                self._gauge()
                self._changed.notify()

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + self._num_running

    def close(self) -> None:
        """Let run() return once nothing waits."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # the generation thread

    def warm_up(self, prompt_ids: list[int]) -> None:
        """Pay the first-use costs of every batch width (kernels, memory) before a request does; uncounted."""
        deliver, self._deliver = self._deliver, lambda outputs: None
        wait_s, self.batch_wait_s = self.batch_wait_s, 0.0
        for width in range(self.batch_size, 0, -1):
            for request in _warm_up_requests(prompt_ids, width):
                self.add_request(request)
            self.step()
        self._deliver, self.batch_wait_s = deliver, wait_s
        self.accounting.reset()

    def run(self) -> None:
        """Serve until close(): the body of the generation thread."""
        while True:
            with self._changed:
                while (wait_s := self.wait_s()) != 0:
                    if self._closing and not self._waiting:
                        return
                    self._changed.wait(wait_s)
            self.step()

    def wait_s(self) -> float | None:
        """Seconds until a batch is due: 0 = now, None = not before a request comes."""
        if not self._waiting:
            return None
        if len(self._waiting) >= self.batch_size or self._closing:
            return 0.0
        return max(0.0, self._filling_since_s() + self.batch_wait_s - self._clock())

    def step(self) -> bool:
        """Run the batch that is due, whole. False when none is."""
        with self._changed:
            if self.wait_s() != 0:
                return False
            filling_since_s = self._filling_since_s()
            requests = [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]
            self._num_running = len(requests)
            for request in requests:
                request.state = State.RUNNING
            self._gauge()
        start_s = self._clock()
        batch = _Batch(self.model, requests, self._deliver, self.accounting, self._clock, start_s)
        batch.record.mode = "serial" if self.batch_size == 1 else "static"
        batch.record.idle_s = filling_since_s - self._free_since_s
        batch.record.fill_wait_s = start_s - filling_since_s
        batch.run()
        self._free_since_s = start_s + batch.record.wall_s
        with self._changed:
            self._num_running = 0
            self._gauge()
        return True

    def _filling_since_s(self) -> float:
        return max(self._free_since_s, self._waiting[0].arrival_s)

    def _gauge(self) -> None:
        self.accounting.gauges["reference_num_requests_running"] = self._num_running
        self.accounting.gauges["reference_num_requests_waiting"] = len(self._waiting)


class _Batch:
    """One batch from its forming to its end, with its account."""

    def __init__(
        self,
        model: Model,
        requests: list[Request],
        deliver: Callable[[list[Output]], None],
        accounting: Accounting,
        clock: Callable[[], float],
        start_s: float,
    ) -> None:
        self.model = model
        self.requests = requests
        self.deliver = deliver
        self.accounting = accounting
        self.clock = clock
        self.last_s = start_s  # of the newest step
        lengths = [len(request.prompt_ids) for request in requests]
        self.record = BatchRecord(
            started_s=start_s,
            requests=len(requests),
            width=len(requests),
            longest_prompt=max(lengths),
            prompt_tokens=sum(lengths),
            padding_tokens=max(lengths) * len(lengths) - sum(lengths),
            queue_wait_s=sum(start_s - request.arrival_s for request in requests),
        )
        self.prefilled = False

    def run(self) -> None:
        record = self.record
        try:
            self.model.generate(self.requests, self.on_step)
            error = "the model stopped before the answer was complete"
        except Exception as exception:  # whatever it was, these requests are over and the next batch is not
            error = f"generation failed: {type(exception).__name__}: {exception}"
        left = [request for request in self.requests if not request.over]
        self.deliver([_fail(request, error) for request in left if not request.aborted])
        for request in left:
            request.state = State.DONE
            self.accounting.outcome("aborted" if request.aborted else "error")
        record.aborted += sum(request.aborted for request in left)
        record.failed = sum(not request.aborted for request in left)
        record.wall_s = self.clock() - record.started_s
        record.rest_s = record.wall_s - record.prefill_s - record.decode_s
        rows = [len(request.prompt_ids) + len(request.output_ids) for request in self.requests]
        per_token = self.model.kv_bytes_per_token
        record.kv_bytes_used = sum(rows) * per_token
        record.kv_bytes_reserved = record.width * (record.longest_prompt + record.steps + self.prefilled) * per_token
        self.accounting.add(record, [(record.width, record.steps, record.decode_s)] if record.steps else [])

    def on_step(self, tokens: Sequence[int]) -> list[bool]:
        record = self.record
        outputs = []
        num_useful = 0
        for request, token in zip(self.requests, tokens, strict=True):
            if request.over:
                continue
            if request.aborted:
                request.state = State.DONE
                record.aborted += 1
                self.accounting.outcome("aborted")
                continue
            num_useful += 1
            outputs.append(advance(request, token, self.model))
            if request.over:
                self.accounting.outcome("ok")
        if outputs:
            self.deliver(outputs)
        now_s = self.clock()
        if self.prefilled:
            record.steps += 1
            record.row_steps += record.width
            record.useful_row_steps += num_useful
            record.dead_row_steps += record.width - num_useful
            record.decode_s += now_s - self.last_s
        else:
            record.first_tokens = num_useful
            record.prefill_s = now_s - self.last_s
            self.prefilled = True
        record.output_tokens += num_useful
        self.last_s = now_s
        return [request.over for request in self.requests]


StepItem = tuple[Request, Sequence[int], str | None]  # a request, its new tokens, an error or None


class SchedulingModel(Model, Protocol):
    """A model that schedules by itself and calls back once a step."""

    page_tokens: int

    def start(self, on_step: Callable[[Sequence[StepItem]], None]) -> None: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def stop(self) -> None: ...


class ContinuousEngine:
    """The engine's interface and account around a model that schedules by itself: rows join and leave at any step.

    A step that gives any row a token that is not its first is a decode step, also when it prefills others.
    A request waits until its first token: what the scheduler does before is not seen from here.
    """

    def __init__(
        self,
        model: SchedulingModel,
        deliver: Callable[[list[Output]], None],
        batch_size: int = 8,
        max_waiting: int = 1024,
        accounting: Accounting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.accounting = accounting or Accounting()
        self.batch_size = batch_size
        self.max_waiting = max_waiting
        self._deliver = deliver
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._open: set[Request] = set()  # not over
        self._new: list[Request] = []
        self._cancelled: list[Request] = []
        self._closing = False
        self._free_since_s = clock()
        self._last_s = self._free_since_s
        self._record: BatchRecord | None = None
        self._by_width: dict[int, list[float]] = {}  # width -> [steps, seconds]

    # any thread

    def add_request(self, request: Request) -> None:
        with self._changed:
            if sum(r.state is State.WAITING for r in self._open) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests are waiting already (--max-waiting)")
            request.arrival_s = self._clock()
            if not self._open:
                self._begin(request.arrival_s)
            self._open.add(request)
            self._new.append(request)
            self._gauge()
            self._changed.notify_all()

    def abort(self, request: Request) -> None:
        with self._changed:
            request.aborted = True
            self._cancelled.append(request)
            self._changed.notify_all()

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # the engine's thread

    def warm_up(self, prompt_ids: list[int]) -> None:
        """As Engine.warm_up, at the full width and alone."""
        deliver, self._deliver = self._deliver, lambda outputs: None
        self.model.start(self.on_step)
        for width in (self.batch_size, 1):
            for request in _warm_up_requests(prompt_ids, width):
                self.add_request(request)
            self._hand_over()
            with self._changed:
                self._changed.wait_for(lambda: not self._open)
        self._deliver = deliver
        self.accounting.reset()

    def run(self) -> None:
        """Hand requests and cancellations to the model until close()."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._new or self._cancelled or (self._closing and not self._open), timeout=1.0
                )
                if self._closing and not self._open:
                    break
            self._hand_over()
        self.model.stop()

    def _hand_over(self) -> None:
        with self._changed:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        for request in new:
            try:
                self.model.submit(request)
            except Exception as exception:
                self.on_step([(request, (), f"generation failed: {type(exception).__name__}: {exception}")])
        for request in cancelled:
            self.model.cancel(request)
            with self._changed:
                if not request.over:
                    self._over(request, "aborted")
                    if self._record is not None:
                        self._record.aborted += 1
                    self._close_if_idle(self._clock())

    # the model's thread

    def on_step(self, items: Sequence[StepItem]) -> None:
        """Called by the model once a step, with every row that got a token in it."""
        now_s = self._clock()
        outputs: list[Output] = []
        num_first = num_useful = num_dead = 0
        with self._changed:
            record = self._record or self._begin(now_s)
            for request, tokens, error in items:
                if request.over or request.aborted:
                    num_dead += len(tokens)
                    continue
                for token in tokens:
                    if request.state is State.WAITING:
                        self._count_start(record, request, now_s)
                        num_first += 1
                    else:
                        num_useful += 1
                    outputs.append(advance(request, token, self.model))
                    if request.over:
                        self.model.cancel(request)
                        self._over(request, "ok")
                        break
                if error is not None and not request.over:
                    outputs.append(_fail(request, error))
                    record.failed += 1
                    self._over(request, "error")
            self._count_step(record, now_s, num_first, num_useful, num_dead)
            self._count_kv(record, [request for request, _, _ in items])
            if record.steps >= STRETCH_STEPS and self._open:
                self._end(now_s)
                self._begin(now_s)
            self._close_if_idle(now_s)
        if outputs:
            self._deliver(outputs)

    # the account; the lock is held

    def _begin(self, now_s: float) -> BatchRecord:
        self._record = BatchRecord(mode="continuous", started_s=now_s, idle_s=now_s - self._free_since_s)
        self._last_s = now_s
        self._by_width = {}
        return self._record

    def _count_start(self, record: BatchRecord, request: Request, now_s: float) -> None:
        request.state = State.RUNNING
        record.requests += 1
        record.prompt_tokens += len(request.prompt_ids)
        record.longest_prompt = max(record.longest_prompt, len(request.prompt_ids))
        record.queue_wait_s += now_s - request.arrival_s

    def _count_step(self, record: BatchRecord, now_s: float, num_first: int, num_useful: int, num_dead: int) -> None:
        width = num_first + num_useful + num_dead
        if not width:
            return
        step_s = now_s - self._last_s
        self._last_s = now_s
        record.width = max(record.width, width)
        record.first_tokens += num_first
        record.output_tokens += num_first + num_useful
        if num_useful + num_dead:
            record.steps += 1
            record.row_steps += num_useful + num_dead
            record.useful_row_steps += num_useful
            record.dead_row_steps += num_dead
            record.decode_s += step_s
            steps = self._by_width.setdefault(num_useful + num_dead, [0, 0.0])
            steps[0] += 1
            steps[1] += step_s
        else:
            record.prefill_s += step_s

    def _count_kv(self, record: BatchRecord, requests: Sequence[Request]) -> None:
        """The largest use of any step: whole pages against the tokens in them."""
        lengths = [len(request.prompt_ids) + len(request.output_ids) for request in requests]
        page = self.model.page_tokens
        used = sum(lengths) * self.model.kv_bytes_per_token
        if used > record.kv_bytes_used:
            record.kv_bytes_used = used
            record.kv_bytes_reserved = sum(-(-n // page) * page for n in lengths) * self.model.kv_bytes_per_token

    def _over(self, request: Request, outcome: str) -> None:
        request.state = State.DONE
        self._open.discard(request)
        self.accounting.outcome(outcome)
        self._gauge()
        self._changed.notify_all()

    def _close_if_idle(self, now_s: float) -> None:
        if not self._open and self._record is not None:
            self._end(now_s)

    def _end(self, now_s: float) -> None:
        record = self._record
        if record is None:
            return
        record.wall_s = now_s - record.started_s
        record.rest_s = record.wall_s - record.prefill_s - record.decode_s
        self.accounting.add(record, [(width, int(n), s) for width, (n, s) in self._by_width.items()])
        self._record = None
        self._free_since_s = now_s

    def _gauge(self) -> None:
        waiting = sum(request.state is State.WAITING for request in self._open)
        self.accounting.gauges["reference_num_requests_running"] = len(self._open) - waiting
        self.accounting.gauges["reference_num_requests_waiting"] = waiting


def _warm_up_requests(prompt_ids: list[int], width: int) -> list[Request]:
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    return [Request(f"warm-up-{width}-{i}", list(prompt_ids), sampling) for i in range(width)]


def advance(request: Request, token: int, model: Model) -> Output:
    """Give a request its next token: its text, and whether that ends it (then its state is DONE).

    An eos or stop token counts as a token and has no text. The first of stop string, eos, stop token and
    max_tokens decides.
    """
    sampling = request.sampling
    if request.text is None:
        request.text = TextStream(model.decode, sampling.stop)
    request.output_ids.append(token)
    num_tokens = len(request.output_ids)
    may_stop = num_tokens > sampling.min_tokens or request.constraint is not None
    is_eos = token in model.eos_ids and (not sampling.ignore_eos or request.constraint is not None)
    text = ""
    if may_stop and (is_eos or token in sampling.stop_token_ids):
        request.finish_reason = "stop"
        request.stop_reason = None if is_eos else token
    else:
        text = request.text.push(token)
        if request.text.stopped_by is not None:
            request.finish_reason, request.stop_reason = "stop", request.text.stopped_by
        elif num_tokens >= sampling.max_tokens:
            request.finish_reason = "length"
    if request.finish_reason is not None:
        text += request.text.finish()
        request.state = State.DONE
    return Output(request, text, num_tokens, request.finish_reason)


def _fail(request: Request, error: str) -> Output:
    return Output(request, "", len(request.output_ids), error=error)

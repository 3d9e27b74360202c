"""Options to the requests of a run: how many, when, how long, with which bodies. The same seed gives the same plan.

    cold (alone) -> warm-up -> measured

Separate seeds for arrivals, lengths and prompts are spawned from the one seed, so that a change of the rate does not
change the prompts. Worker k of n gets every n-th measured request of the one common plan; the cold and the warm-up
requests belong to worker 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from loadgen.arrival import offsets_ns
from loadgen.options import Options, Span
from loadgen.prompt import Prompts, make_prompts
from loadgen.protocol import Body
from loadgen.record import Phase, Request
from loadgen.target import ServerInfo
from loadgen.transport import Transport

Planned = tuple[int, Request]  # position in the plan, request

_BUILT_AHEAD = 20_000  # requests serialised before the clock starts; longer plans are made as they are needed
_MAX_PREOPENED = 4096
_OPEN_LOOP_CONNECTIONS = 64  # opened before an open loop without a cap; more are opened as they are needed


@dataclass(frozen=True, slots=True)
class Plan:
    """What one process is to send. `measured` may be lazy: it is read just ahead of time."""

    before: tuple[Planned, ...]  # cold first (alone), then warm-up
    measured: Iterable[Planned]
    total: int | None  # how many `measured` will yield, if known
    open_loop: bool
    concurrency: int | None  # closed loop: the slots; open loop: a cap, or None
    warmup_concurrency: int = 1
    connections: int = 1  # opened before the clock starts
    duration_ns: int | None = None  # no request starts later than this after the start
    keep_text: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # how it was made; goes into run.json
    notes: Callable[[], tuple[str, ...]] = tuple  # doubts for the report; asked when the run is over
    trace_counts: Callable[[], Mapping[str, Any]] | None = None  # what became of a trace's rows; asked likewise


def num_requests(options: Options) -> int | None:
    """Measured requests; None when a duration or a trace ends the run instead."""
    if options.requests is not None:
        return options.requests
    if options.duration_s is not None or options.trace is not None:
        return None
    return max(100, 4 * (options.concurrency or 1))


def num_warmup(options: Options) -> int:
    return max(1, options.concurrency or 1) if options.warmup is None else options.warmup


def needed_connections(options: Options) -> int:
    """Connections the run may hold at once, as far as it can be known: what the limits are checked against."""
    if options.concurrency is not None:
        return options.concurrency
    total = num_requests(options)
    return min(total, _MAX_PREOPENED) if total is not None else 1024


def _worker_share(total: int | None, worker: int, workers: int) -> int | None:
    return None if total is None else len(range(worker, total, workers))


async def make_plan(options: Options, info: ServerInfo, transport: Transport, worker: int = 0) -> Plan:
    """The plan of worker `worker` of options.workers. Raises UsageError where options and server do not fit."""
    assert options.seed is not None
    if options.trace is not None:
        return await _trace_plan(options, info, transport, worker)
    arrival_seed, length_seed, prompt_seed = np.random.SeedSequence(options.seed).spawn(3)
    total = num_requests(options)
    warmup = num_warmup(options) if worker == 0 else 0
    prompts = await make_prompts(options, info, transport, prompt_seed)
    bodies = _Bodies(options, info, prompts)
    lengths = _lengths(options, length_seed)
    before = tuple(_before(bodies, lengths, options, warmup))
    offsets: Iterator[int | None] = iter(lambda: None, 0)
    if options.rate is not None:
        offsets = offsets_ns(
            options.arrival,
            rate_per_s=options.rate,
            seed=arrival_seed,
            count=total,
            duration_s=options.duration_s,
            burstiness=options.burstiness,
        )
    # position 0 is the cold request, then the warm-up: the same positions for every worker
    first = num_warmup(options)
    everything = zip(range(total) if total is not None else iter(range(1 << 62)), lengths, offsets, strict=False)
    mine = islice(everything, worker, None, options.workers)
    measured: Iterable[Planned] = (
        (first + n, bodies.request(first + n, Phase.MEASURED, size, due)) for n, size, due in mine
    )
    share = _worker_share(total, worker, options.workers)
    if share is not None and share <= _BUILT_AHEAD:
        measured = list(measured)
        share = len(measured)
    slots = options.concurrency
    if slots is not None:
        slots = max(1, _worker_share(slots, worker, options.workers) or 0)
    return Plan(
        before=before,
        measured=measured,
        total=share,
        open_loop=options.rate is not None,
        concurrency=slots,
        warmup_concurrency=options.concurrency or 1,
        connections=min(slots or _OPEN_LOOP_CONNECTIONS, share or _MAX_PREOPENED, _MAX_PREOPENED),
        duration_ns=None if options.duration_s is None else round(options.duration_s * 1e9),
        keep_text=options.save_text,
        info={
            "seed": options.seed,
            "requests": total,
            "arrival": options.arrival if options.rate is not None else "closed loop",
            "prompts": prompts.info,
        },
    )


async def _trace_plan(options: Options, info: ServerInfo, transport: Transport, worker: int) -> Plan:
    from loadgen.trace_plan import make_trace_plan

    arrival_seed, _, prompt_seed = np.random.SeedSequence(options.seed).spawn(3)
    trace = await make_trace_plan(
        options,
        info,
        transport,
        arrival_seed=arrival_seed,
        prompt_seed=prompt_seed,
        warmup=num_warmup(options) if worker == 0 else 0,
        first=num_warmup(options),
        worker=worker,
    )
    slots = options.concurrency
    if slots is not None:
        slots = max(1, _worker_share(slots, worker, options.workers) or 0)
    return Plan(
        before=trace.before,
        measured=trace.measured,
        total=trace.total,
        open_loop=options.rate is not None or options.concurrency is None,
        concurrency=slots,
        warmup_concurrency=options.concurrency or 1,
        connections=min(slots or _OPEN_LOOP_CONNECTIONS, trace.total or _MAX_PREOPENED, _MAX_PREOPENED),
        duration_ns=None if options.duration_s is None else round(options.duration_s * 1e9),
        keep_text=options.save_text,
        info={"seed": options.seed, "requests": options.requests, **trace.info},
        notes=trace.notes,
        trace_counts=trace.counts,
    )


Size = tuple[int, int]  # prompt tokens, answer tokens


def _lengths(options: Options, seed: np.random.SeedSequence) -> Iterator[Size]:
    """Uniform lengths for ever; drawn in order, so that every worker sees the same ones."""
    generator = np.random.default_rng(seed)

    def draws(span: Span) -> list[int]:
        return [int(n) for n in generator.integers(span.low, span.high + 1, 1024)]

    while True:
        yield from zip(draws(options.input_tokens), draws(options.output_tokens), strict=True)


def _before(bodies: _Bodies, lengths: Iterator[Size], options: Options, count: int) -> Iterator[Planned]:
    """The cold request and the warm-up, of the same kind as what is measured."""
    for index in range(count):
        size = (options.input_tokens.low, options.output_tokens.low)
        yield index, bodies.request(index, Phase.WARMUP if index else Phase.COLD, size, None)


class _Bodies:
    def __init__(self, options: Options, info: ServerInfo, prompts: Prompts) -> None:
        self._seed = options.seed or 0
        self._prompts = prompts
        self._fixed_output = options.prompts is None
        self._body = Body(options, info.model)

    def request(self, index: int, phase: Phase, size: Size, due_ns: int | None) -> Request:
        prompt = self._prompts.prompt(index, size[0])
        output_tokens = prompt.output_tokens or size[1]
        return Request(
            id=f"{self._seed:08x}-{index:06d}",
            phase=phase,
            path=self._body.path,
            body=self._body.serialize(prompt.content, output_tokens),
            planned_ns=due_ns,
            input_tokens=prompt.input_tokens,
            output_tokens=output_tokens,
        )

"""Traces of our own making, in the canonical format: seeded arrivals, drawn lengths, sessions with shared prefixes.

    generate(Recipe(arrival="gamma", burstiness=0.3, rate=5, duration_s=600,
                    input=Draw.parse("lognormal:1500,1"), output=Draw.parse("10:60"), seed=1))

The same recipe gives the same bytes. Arrivals, lengths and sessions have seeds of their own, so another rate keeps the
lengths. With turns, an arrival is the start of a session; a later turn carries the whole conversation, and its recorded
time assumes _ASSUMED_FIRST_NS and _ASSUMED_TOKEN_NS of service for the turn before.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

import numpy as np

from loadgen.arrival import offsets_ns
from loadgen.options import UsageError
from loadgen.trace import SCHEMA, TraceRow, line_of, row_fields

ARRIVALS = ("poisson", "constant", "gamma", "none")  # none: no times, for --rate and --concurrency
_RESOLUTION_NS = 100_000  # times are written in ms with one decimal
_ASSUMED_FIRST_NS = 200_000_000
_ASSUMED_TOKEN_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Draw:
    """How a number is drawn: N; LO:HI, uniform; lognormal:MEDIAN,SIGMA or lognormal:MEDIAN,SIGMA,MAX."""

    text: str
    low: float
    high: float
    sigma: float | None = None  # of a lognormal, whose median is `low` and whose largest value is `high`

    @staticmethod
    def parse(text: str) -> Draw:
        """Raises UsageError for another form, or values below 0."""
        number = r"(\d+(?:\.\d+)?)"
        if match := re.fullmatch(rf"{number}(?::{number})?", text):
            low = float(match[1])
            high = float(match[2]) if match[2] else low
            if low <= high:
                return Draw(text, low, high)
        if match := re.fullmatch(rf"lognormal:{number},{number}(?:,{number})?", text):
            median, high = float(match[1]), float(match[3]) if match[3] else math.inf
            if 0 < median <= high:
                return Draw(text, median, high, float(match[2]))
        raise UsageError(f"must be N, LO:HI (LO <= HI) or lognormal:MEDIAN,SIGMA[,MAX], not {text!r}")

    def values(self, generator: np.random.Generator) -> Iterator[float]:
        while True:
            if self.sigma is not None:
                drawn = self.low * np.exp(self.sigma * generator.standard_normal(256))
                yield from np.minimum(drawn, self.high).tolist()
            else:
                yield from generator.uniform(self.low, self.high, 256).tolist()

    def whole(self, generator: np.random.Generator) -> Iterator[int]:
        """Whole numbers of 1 or more; LO and HI as likely as those between."""
        if self.sigma is None:
            while True:
                yield from np.maximum(1, generator.integers(int(self.low), int(self.high) + 1, 256)).tolist()
        for value in self.values(generator):
            yield max(1, round(value))


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `loadgen trace generate` takes. Lengths are tokens; input is what is new in a turn."""

    input: Draw
    output: Draw
    seed: int
    arrival: str = "poisson"
    burstiness: float = 1.0
    rate: float | None = None  # requests/s, or sessions/s with turns; None with arrival none
    duration_s: float | None = None
    requests: int | None = None  # or sessions
    turns: Draw | None = None
    think_s: Draw | None = None
    shared_prefix_tokens: int = 0  # before every prompt (of every session)
    block_size: int | None = None  # hash_ids are written where prefixes are shared
    max_input: int | None = None  # a session ends before its context would be longer
    name: str = "generated"


def generate(recipe: Recipe) -> Iterator[bytes]:
    """The lines of the trace, header first. Raises UsageError for a recipe that contradicts itself."""
    _check(recipe)
    rows = list(_Maker(recipe).rows())
    header: dict[str, Any] = {"schema": SCHEMA, "name": recipe.name}
    if any(row.hash_ids for row in rows):
        header["block_size"] = recipe.block_size
    if recipe.arrival != "none":
        header["time_resolution_ms"] = _RESOLUTION_NS / 1e6
    header |= {"rows": len(rows), "sorted": True, "source": {"generator": "loadgen trace generate", **_said(recipe)}}
    yield line_of(header)
    for row in rows:
        yield line_of(row_fields(row))


def _check(recipe: Recipe) -> None:
    if recipe.arrival not in ARRIVALS:
        raise UsageError(f"--arrival must be one of {', '.join(ARRIVALS)}, not {recipe.arrival!r}")
    if recipe.arrival == "none":
        if recipe.requests is None or recipe.rate is not None or recipe.duration_s is not None:
            raise UsageError("--arrival none has no times: give --requests N, without --rate and --duration")
    elif recipe.rate is None:
        raise UsageError("--rate R (requests/s) is needed, or --arrival none")
    elif recipe.requests is None and recipe.duration_s is None:
        raise UsageError("say how long: --duration S or --requests N")
    if recipe.burstiness != 1 and recipe.arrival != "gamma":
        raise UsageError("--burstiness needs --arrival gamma")
    if recipe.think_s is not None and recipe.turns is None:
        raise UsageError("--think needs --turns: it is the time between the turns of a session")
    if recipe.max_input is not None and recipe.turns is None:
        raise UsageError("--max-input needs --turns: it ends sessions; give --input a MAX instead")


def _said(recipe: Recipe) -> dict[str, Any]:
    values = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__ if name != "name"}
    return {name: v.text if isinstance(v, Draw) else v for name, v in values.items() if v is not None}


@dataclass(slots=True)
class _Session:
    number: int
    turns: int
    turn: int = 0
    context: int = 0  # tokens so far
    blocks: list[int] = field(default_factory=list)  # ids of the full blocks of it


class _Maker:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._arrival_seed, length_seed, session_seed = np.random.SeedSequence(recipe.seed).spawn(3)
        inputs, outputs = length_seed.spawn(2)
        self._inputs = recipe.input.whole(np.random.default_rng(inputs))
        self._outputs = recipe.output.whole(np.random.default_rng(outputs))
        turns, thinks = session_seed.spawn(2)
        self._turns = (recipe.turns or Draw.parse("1")).whole(np.random.default_rng(turns))
        self._thinks = (recipe.think_s or Draw.parse("0")).values(np.random.default_rng(thinks))
        self._block = recipe.block_size or 0
        hashed = recipe.turns is not None or recipe.shared_prefix_tokens > 0
        if not hashed:
            self._block = 0
        elif not self._block:
            raise UsageError("--turns and --shared-prefix-tokens share prefixes: give --block-size N (tokens an id)")
        self._prefix = list(range(recipe.shared_prefix_tokens // self._block)) if self._block else []
        self._next_id = len(self._prefix)

    def rows(self) -> Iterator[TraceRow]:
        """In order of time: sessions are merged, and block ids are numbered as they appear."""
        due: list[tuple[int, int, _Session, int | None]] = []  # time, tie-break, session, think time before
        starts = enumerate(self._starts())
        upcoming = next(starts, None)
        line = 1
        while due or upcoming is not None:
            if upcoming is not None and (not due or (upcoming[1] or 0) <= due[0][0]):
                number, start_ns = upcoming
                heapq.heappush(due, (start_ns or 0, number, _Session(number, next(self._turns)), None))
                upcoming = next(starts, None)
                continue
            time_ns, number, session, think_ns = heapq.heappop(due)
            row = self._turn(session, time_ns, think_ns, line + 1)
            if row is None:
                continue
            line += 1
            yield row
            if session.turn < session.turns:
                think = round(next(self._thinks) * 1e9 / _RESOLUTION_NS) * _RESOLUTION_NS
                service = _ASSUMED_FIRST_NS + (row.output_length or 0) * _ASSUMED_TOKEN_NS
                heapq.heappush(due, (time_ns + service + think, number, session, think))

    def _starts(self) -> Iterator[int | None]:
        recipe = self._recipe
        if recipe.arrival == "none":
            return islice(repeat(None), recipe.requests)
        assert recipe.rate is not None
        offsets = offsets_ns(
            recipe.arrival,
            rate_per_s=recipe.rate,
            seed=self._arrival_seed,
            count=recipe.requests,
            duration_s=recipe.duration_s,
            burstiness=recipe.burstiness,
        )
        return (round(offset / _RESOLUTION_NS) * _RESOLUTION_NS for offset in offsets)

    def _turn(self, session: _Session, time_ns: int, think_ns: int | None, line: int) -> TraceRow | None:
        """The next turn; None when the context would be too long."""
        recipe = self._recipe
        before = session.context if session.turn else recipe.shared_prefix_tokens
        length = before + next(self._inputs)
        if session.turn and recipe.max_input is not None and length > recipe.max_input:
            return None
        output = next(self._outputs)
        session.turn += 1
        ids = None
        if self._block:
            known = session.blocks if session.turn > 1 else self._prefix
            full, partial = divmod(length, self._block)
            new = range(self._next_id, self._next_id + full + bool(partial) - len(known))
            self._next_id = new.stop
            ids = [*known, *new]
            session.blocks = ids[:full]
            session.context = length + output
        timed = recipe.arrival != "none"
        return TraceRow(
            line=line,
            timestamp_ns=time_ns if timed else None,
            input_length=length,
            output_length=output,
            hash_ids=ids,
            delay_ns=think_ns,
            session_id=f"s{session.number}" if recipe.turns is not None else None,
            turn=session.turn if recipe.turns is not None else None,
        )

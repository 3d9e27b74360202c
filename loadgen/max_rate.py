"""The highest rate at which a server keeps a promise: bracket, bisect, and then trials until it is decided. Pure.

A trial is a load of its own at one rate, and it meets the limits or it does not. A rate *holds* when at least the share
`keep` of its trials meet them, *breaks* when fewer do; either is said with `confidence`.

The trial is the unit, not the request: requests that miss come in clumps, because all of a queue is late together. In a
simulated queue at the rate where 5 % of the requests miss a limit, a third of all trials of 299 requests has not one
that does; of 299 independent requests with 1 % that would be one trial in 20. A binomial interval over requests would
promise p99 there, "with 95 % confidence". docs/compare.md has the figures.

Rates are start * (1 + precision)^i. Single trials bracket the rate by doubling and bisect it to neighbours; these
choose where to look and count for nothing. Then fresh trials decide, rate by rate, until one holds and one close above
breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from loadgen.options import Slo

_DOUBLINGS = 20
_HALVINGS = 4
_LEVELS = 16  # rates that are decided, at most


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for; shares in 0..1."""

    slo: Slo
    at: float = 0.99  # of a trial's requests that must meet every limit
    keep: float = 0.8  # of the trials that must do so
    precision: float = 0.2  # between neighbouring rates
    trials: int = 30  # of one rate, at most
    confidence: float = 0.95


@dataclass(slots=True)
class Level:
    """One rate and the trials that decided it. holds: None when they did not."""

    rate: float
    met: int = 0
    missed: int = 0
    holds: bool | None = None


@dataclass(slots=True)
class Search:
    """What was found: the highest rate that holds below all that break, and the lowest that breaks."""

    start: float
    wanted: Wanted
    levels: dict[int, Level] = field(default_factory=dict)

    @property
    def breaks(self) -> int | None:
        return min((i for i, level in self.levels.items() if level.holds is False), default=None)

    @property
    def holds(self) -> int | None:
        below = self.breaks
        return max((i for i, v in self.levels.items() if v.holds and (below is None or i < below)), default=None)

    @property
    def resolved(self) -> bool:
        """Both are known, with at most one undecided rate between them."""
        return self.holds is not None and self.breaks is not None and self.breaks - self.holds <= 2

    def rate(self, index: int) -> float:
        return float(self.start * (1 + self.wanted.precision) ** index)

    def as_dict(self) -> dict[str, Any]:
        holds, breaks, wanted = self.holds, self.breaks, self.wanted
        return {
            "holds_per_s": None if holds is None else self.rate(holds),
            "breaks_per_s": None if breaks is None else self.rate(breaks),
            "resolved": self.resolved,
            "confidence": wanted.confidence,
            "at": wanted.at,
            "keep": wanted.keep,
            "precision": wanted.precision,
            "slo": {key: getattr(wanted.slo, key) for key in ("ttft_ms", "tpot_ms", "e2e_ms")},
            "rates": [
                {"rate_per_s": v.rate, "trials": v.met + v.missed, "met": v.met, "holds": v.holds}
                for _, v in sorted(self.levels.items())
            ],
        }


def search(meets: Callable[[float], bool], search: Search) -> None:
    """Fill search.levels. meets: one trial at a rate. Whatever `meets` raises leaves what was decided until then."""
    index, bracketed = _bracket(meets, search)
    for _ in range(_LEVELS if bracketed else 1):
        level = search.levels[index] = Level(search.rate(index))
        _decide(meets, level, search.wanted)
        following = _next(search)
        if following is None:
            return
        index = following


def _bracket(meets: Callable[[float], bool], search: Search) -> tuple[int, bool]:
    """(i, True): a single trial met the limits at rate i, and did not at i + 1. (i, False): no end, up or down."""
    stride = max(1, round(math.log(2) / math.log1p(search.wanted.precision)))
    low: int | None = None
    high: int | None = None
    index = 0
    while low is None or high is None:
        if meets(search.rate(index)):
            low = index
            index += stride
            if high is None and index > _DOUBLINGS * stride:
                return low, False
        else:
            high = index
            index -= stride
            if low is None and index < -_HALVINGS * stride:
                return high, False
    while high - low > 1:
        middle = (low + high) // 2
        if meets(search.rate(middle)):
            low = middle
        else:
            high = middle
    return low, True


def _next(search: Search) -> int | None:
    """The next rate to decide: up from one that holds, down from one that breaks, both ways from an undecided one."""
    holds, breaks = search.holds, search.breaks
    if holds is None:
        return min(search.levels) - 1
    if breaks is None:
        return max(search.levels) + 1
    unknown = [i for i in range(holds + 1, breaks) if i not in search.levels]
    return unknown[0] if unknown else None


def _decide(meets: Callable[[float], bool], level: Level, wanted: Wanted) -> None:
    holding = stopping(wanted.keep, 1 - wanted.confidence, wanted.trials)
    breaking = stopping(1 - wanted.keep, 1 - wanted.confidence, wanted.trials)
    for _ in range(wanted.trials):
        if meets(level.rate):
            level.met += 1
        else:
            level.missed += 1
        trials = level.met + level.missed
        if level.missed < len(holding) and trials == holding[level.missed]:
            level.holds = True
        elif level.met < len(breaking) and trials == breaking[level.met]:
            level.holds = False
        if level.holds is not None:
            return


@cache
def stopping(p: float, level: float, most: int) -> tuple[int, ...]:
    """Trials after which to stop and call it "more than p": entry j is for j trials that went the other way.

    For trials that go one way with probability p exactly, the chance of ever stopping is at most `level`: half of it is
    spent on j = 0, a quarter on j = 1, and so on. Exact, by counting the paths; entries are at most `most`.

    >>> stopping(0.5, 0.05, 20)[:2]
    (6, 9)
    """
    entries: list[int] = []
    alive = [1.0]  # probability of having had j trials the other way, and not stopped
    for n in range(1, most + 1):
        alive = [x * p + y * (1 - p) for x, y in zip([*alive, 0.0], [0.0, *alive], strict=True)]
        j = len(entries)
        if j < len(alive) and alive[j] <= level / 2 ** (j + 1):
            entries.append(n)
            alive[j] = 0.0
    return tuple(entries)

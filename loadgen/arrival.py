"""When requests are due: seeded schedules of integer ns offsets, made before anything is sent.

    >>> list(offsets_ns("constant", rate_per_s=4, seed=0, count=3))
    [0, 250000000, 500000000]

A schedule is absolute (offsets from the start, never gaps to sleep), so a late send delays no other. The same seed
gives the same schedule, however many workers share it: worker k of n takes the offsets k, k + n, k + 2n, ... of the
one common schedule, so the merged arrivals are those of a single process, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ARRIVALS = ("poisson", "constant", "gamma")
_BLOCK = 4096  # gaps drawn at a time; part of the schedule's definition only through the generator's order of draws


def offsets_ns(
    arrival: str,
    *,
    rate_per_s: float,
    seed: int | np.random.SeedSequence,
    count: int | None = None,
    duration_s: float | None = None,
    burstiness: float = 1.0,
) -> Iterator[int]:
    """Offsets of arrivals from the start, in ns, ascending; the first is 0 for constant, one gap late otherwise.

    arrival: "constant" (gap exactly 1 / rate), "poisson" (exponential gaps, independent), or "gamma" (gaps with
    shape `burstiness` and mean 1 / rate: shape 1 is Poisson, below 1 is burstier (CV = 1 / sqrt(shape)), above is
    smoother). rate_per_s > 0. Ends after `count` arrivals or before `duration_s`; at least one must be given.
    Raises ValueError for an unknown arrival or a value out of range.
    """
    if arrival not in ARRIVALS:
        raise ValueError(f"arrival must be one of {', '.join(ARRIVALS)}, not {arrival!r}")
    if not rate_per_s > 0:
        raise ValueError(f"rate must be above 0 requests/s, not {rate_per_s}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0, not {burstiness}")
    if count is None and duration_s is None:
        raise ValueError("a schedule needs a count or a duration")
    end_ns = None if duration_s is None else round(duration_s * 1e9)
    made = 0
    for offset in _constant(rate_per_s) if arrival == "constant" else _renewal(arrival, rate_per_s, seed, burstiness):
        if (count is not None and made >= count) or (end_ns is not None and offset >= end_ns):
            return
        yield offset
        made += 1


def _constant(rate_per_s: float) -> Iterator[int]:
    index = 0
    while True:
        yield round(index * 1e9 / rate_per_s)  # from the index, so that no rounding adds up
        index += 1


def _renewal(arrival: str, rate_per_s: float, seed: int | np.random.SeedSequence, burstiness: float) -> Iterator[int]:
    generator = np.random.default_rng(seed)
    total_s = 0.0
    while True:
        if arrival == "poisson":
            gaps_s = generator.exponential(1.0 / rate_per_s, _BLOCK)
        else:
            gaps_s = generator.gamma(burstiness, 1.0 / (rate_per_s * burstiness), _BLOCK)
        times_s = total_s + np.cumsum(gaps_s)
        total_s = float(times_s[-1])
        yield from np.rint(times_s * 1e9).astype(np.int64).tolist()

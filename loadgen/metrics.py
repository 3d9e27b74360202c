"""Records to numbers: the one place where the terms are defined. Pure functions; no printing, no clock.

    start           the planned time in open loop and traces; in closed loop the moment the slot asked for the request
    first token     the first event with a token of any channel: text, reasoning, tool call
    last token      the last token-bearing event; not usage, not [DONE], not the end of the body
    output tokens   the server's usage; else the number of token-bearing events (estimated). Never max_tokens
    ttft            first token - start                     ttft_sent      first token - first byte written
    e2e             last token - start                      e2e_sent       last token - first byte written
    first_answer    first visible text - start              lag            first byte written - start
    tpot            (last token - first token) / (output tokens - 1); null below two tokens
    gap             time between consecutive token-bearing events of a request, all of them pooled
    throughput      tokens of successful requests / (last end - first start) of the measured window
    goodput         requests that ended well and met every SLO / the same window
    offered         arrivals of the plan per second; achieved: sends per second (between the first and the last)

Distributions are over successful measured requests (lag: over all that were sent). Beside them,
`*_failures_as_infinity` counts a failure as one that never came: there null is infinity. Elsewhere null is "no value";
nothing is ever NaN, and 0 is a measured 0. Cold and warm-up requests enter no statistic. Unfinished requests (an
interrupted run) are counted and enter none either; the window of an interrupted run lasts until the interrupt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.clock import NS_PER_S
from loadgen.doubts import warnings_of
from loadgen.options import Slo
from loadgen.record import Phase, RequestRecord, Run
from loadgen.stats import (
    cv,
    exponential_fit_p_value,
    order_statistic_interval,
    quantile,
    quantile_with_infinities,
    student_t_quantile,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MISSING = np.iinfo(np.int64).min  # in a column: did not happen
PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
LATENCIES = ("ttft_ms", "ttft_sent_ms", "first_answer_ms", "tpot_ms", "gap_ms", "e2e_ms", "e2e_sent_ms", "lag_ms")
_INFINITE = ("ttft_ms", "ttft_sent_ms", "tpot_ms", "e2e_ms", "e2e_sent_ms")  # a failure counts as infinite in these
NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Columns:
    """Records as columns of int64, one entry a request, MISSING for None. Stamps in absolute ns."""

    planned_ns: Ints
    sent_ns: Ints
    first_byte_ns: Ints
    first_token_ns: Ints
    first_answer_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    num_events: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    ok: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ok)


def columns(records: Sequence[RequestRecord]) -> Columns:
    """The records as Columns, in their order."""

    def column(name: str) -> Ints:
        values = (getattr(record, name) for record in records)
        return np.fromiter((MISSING if v is None else v for v in values), np.int64, len(records))

    names = [name for name in Columns.__slots__ if name != "ok"]
    return Columns(
        **{name: column(name) for name in names}, ok=np.fromiter((r.ok for r in records), bool, len(records))
    )


def span_ms(start_ns: Ints, end_ns: Ints) -> Floats:
    """end - start in ms, NaN where either is MISSING (NaN stays inside: summaries drop it)."""
    there = (start_ns != MISSING) & (end_ns != MISSING)
    return np.where(there, (end_ns - np.where(there, start_ns, end_ns)) / 1e6, np.nan)


def latencies_ms(table: Columns) -> dict[str, Floats]:
    """Every latency of DESIGN but the gap, one entry a request, NaN where there is none (failed or not)."""
    tokens = table.output_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens >= 2, span_ms(table.first_token_ns, table.last_token_ns) / (tokens - 1.0), np.nan)
    return {
        "ttft_ms": span_ms(table.planned_ns, table.first_token_ns),
        "ttft_sent_ms": span_ms(table.sent_ns, table.first_token_ns),
        "first_answer_ms": span_ms(table.planned_ns, table.first_answer_ns),
        "tpot_ms": tpot,
        "e2e_ms": span_ms(table.planned_ns, table.last_token_ns),
        "e2e_sent_ms": span_ms(table.sent_ns, table.last_token_ns),
        "lag_ms": span_ms(table.planned_ns, table.sent_ns),
    }


def pooled_events(records: Iterable[RequestRecord]) -> tuple[Ints, Ints]:
    """All token-bearing events: (stamps_ns [events], offsets [requests + 1]); request i has stamps[o[i]:o[i + 1]]."""
    arrays = [np.frombuffer(r.event_stamps_ns, np.int64) for r in records]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64), offsets


def pooled_gaps_ms(records: Sequence[RequestRecord]) -> tuple[Floats, Ints]:
    """Gaps between consecutive events of each request, pooled: (gaps_ms, offsets [requests + 1])."""
    stamps, offsets = pooled_events(records)
    counts = np.diff(offsets)
    if not len(stamps):
        return np.empty(0), np.zeros(len(counts) + 1, np.int64)
    gaps = np.diff(stamps)
    inside = np.ones(len(gaps), bool)
    borders = offsets[1:-1] - 1  # the step from one request's last event to the next one's first is no gap
    inside[borders[(borders >= 0) & (borders < len(gaps))]] = False
    gap_offsets = np.zeros_like(offsets)
    np.cumsum(np.maximum(counts - 1, 0), out=gap_offsets[1:])
    return gaps[inside] / 1e6, gap_offsets


# ---------------------------------------------------------------- one distribution


def distribution(values: Floats, groups: Ints | None = None) -> dict[str, Any]:
    """{n, mean, min, max, p50.. p999, p50_interval.. p999_interval, too_few} of the values that are not NaN.

    Intervals: 95 %, from order statistics, whatever the shape. too_few: the percentiles whose interval would reach
    beyond the sample, so that the figure is little more than its largest (or smallest) value.
    groups: offsets of values that hang together (the gaps of one request); intervals are then Woodruff's.
    """
    if groups is None:
        values = values[~np.isnan(values)]
    ordered = np.sort(values)
    there = len(ordered) > 0
    result: dict[str, Any] = {
        "n": len(ordered),
        "mean": float(ordered.mean()) if there else None,
        "min": float(ordered[0]) if there else None,
        "max": float(ordered[-1]) if there else None,
        "too_few": [],
    }
    for name, q in PERCENTILES.items():
        interval = order_statistic_interval(ordered, q) if groups is None else _woodruff(values, ordered, groups, q)
        result[name] = quantile(ordered, q)
        result[f"{name}_interval"] = interval
        if there and interval is None:
            result["too_few"].append(name)
    return result


def _woodruff(values: Floats, ordered: Floats, groups: Ints, q: float) -> tuple[float, float] | None:
    """95 % interval of a quantile of grouped values (Woodruff 1952): the gaps of one request are not independent.

    The share of values at or below the quantile has a standard error, estimated from the groups' residuals; the values
    at share +- 1.96 errors are the interval. None where that is outside the sample, or with fewer than two groups.
    """
    n, sizes = len(ordered), np.diff(groups)
    num_groups = int((sizes > 0).sum())
    if num_groups < 2 or n * min(q, 1 - q) < 1:
        return None
    below = np.zeros(n + 1, np.int64)
    np.cumsum(values <= ordered[round(q * (n - 1))], out=below[1:])
    residuals = np.diff(below[groups]) - below[-1] / n * sizes
    reach = student_t_quantile(0.975, num_groups - 1) if num_groups <= 100 else 1.96
    error = reach * np.sqrt(num_groups / (num_groups - 1) * np.sum(residuals**2)) / n
    low, high = np.floor((q - error) * (n - 1)), np.ceil((q + error) * (n - 1))
    return (float(ordered[int(low)]), float(ordered[int(high)])) if low >= 0 and high < n else None


def with_failures(values: Floats, ok: NDArray[np.bool_]) -> dict[str, Any]:
    """{n, p50..p999} of the successes' values and one infinity a failure; a percentile that is infinite is null."""
    finite, failures = values[ok & ~np.isnan(values)], int((~ok).sum())
    percentiles = {name: quantile_with_infinities(finite, failures, q) for name, q in PERCENTILES.items()}
    return {"n": len(finite) + failures, **percentiles}


# ---------------------------------------------------------------- a run


def summarize(run: Run, slo: Slo = NO_SLO) -> dict[str, Any]:
    """The numbers of a run: {"counts", "metrics", "cold", "warmup", "server_counters", "warnings"}, ready for run.json.

    metrics: LATENCIES as of `distribution` (ms), `<latency>_failures_as_infinity` as of `with_failures`, rates
    (1/s), token counts. warnings: [{what, remedy}]. Cost: about 4 s for 100,000 requests of 256 events.
    """
    records = run.measured
    table = columns(records)
    good = [record for record in records if record.ok]
    latencies = latencies_ms(table)
    metrics: dict[str, Any] = {}
    for name in LATENCIES:
        if name == "gap_ms":
            metrics[name] = distribution(*pooled_gaps_ms(good))
        else:
            metrics[name] = distribution(latencies[name] if name == "lag_ms" else latencies[name][table.ok])
    metrics |= {f"{name}_failures_as_infinity": with_failures(latencies[name], table.ok) for name in _INFINITE}
    window_s = _window_s(run, table)
    metrics |= _tokens(records, table)
    metrics |= _rates(run, table, latencies, metrics, window_s, slo)
    summary = {
        "counts": _counts(run),
        "metrics": metrics,
        "cold": _cold(run),
        "warmup": _warmup(run),
        "server_counters": server_counters(run),
    }
    return summary | {"warnings": warnings_of(run, summary)}


def _counts(run: Run) -> dict[str, Any]:
    records = run.measured
    failures = [record.failure for record in records if record.failure is not None]
    reasons = Counter((str(f.kind), f.status, f.detail) for f in failures)
    return {
        "started": len(records) + run.unfinished,
        "ok": len(records) - len(failures),
        "failed": len(failures),
        "unfinished": run.unfinished,
        "skipped": run.skipped,
        "failures": dict(Counter(str(f.kind) for f in failures)),
        "failure_reasons": [
            {"kind": kind, "status": status, "detail": detail, "n": n}
            for (kind, status, detail), n in reasons.most_common(20)
        ],
        "reopened": sum(record.reopened for record in records),
    }


def _window_s(run: Run, table: Columns) -> float | None:
    """Seconds from the first start to the last end of the measured window; None when nothing ran."""
    if run.interrupted:
        ends = run.end_ns
    elif (table.end_ns != MISSING).any():
        ends = int(table.end_ns.max())
    else:
        return None
    begin = int(table.planned_ns.min()) if len(table) else run.start_ns
    return (ends - begin) / NS_PER_S if ends > begin else None


def _tokens(records: Sequence[RequestRecord], table: Columns) -> dict[str, Any]:
    """Token counts of the successes: asked, as the server counted, estimated; partial ones of failures apart."""
    good = [record for record in records if record.ok]
    by_server = [r for r in good if r.tokens_from == "server" and r.output_tokens is not None]
    events = sum(r.num_events for r in by_server)

    def each(values: Ints) -> dict[str, Any]:
        known = values[table.ok & (values != MISSING)]
        if not len(known):
            return {"n": 0, "mean": None, "p50": None, "min": None, "max": None}
        return {
            "n": len(known),
            "mean": float(known.mean()),
            "p50": float(np.median(known)),
            "min": int(known.min()),
            "max": int(known.max()),
        }

    return {
        "input_tokens": _total(r.prompt_tokens for r in good),
        "input_tokens_asked": _total(r.asked_input_tokens for r in good),
        "input_tokens_cached": _total(r.cached_tokens for r in good),
        "output_tokens": sum(r.output_tokens or 0 for r in good),
        "output_tokens_asked": _total(r.asked_output_tokens for r in good),
        "output_tokens_estimated": sum(r.output_tokens or 0 for r in good if r.tokens_from == "events"),
        "reasoning_tokens": _total(r.reasoning_tokens for r in good),
        "partial_tokens_of_failures": sum(r.num_events for r in records if not r.ok),
        "input_tokens_per_request": each(table.prompt_tokens),
        "output_tokens_per_request": each(table.output_tokens),
        "tokens_per_event": _ratio(sum(r.output_tokens or 0 for r in by_server), events),
        "shared_stamp_share": _ratio(sum(r.shared_stamps for r in good), sum(r.num_events for r in good)),
        "finish_reasons": dict(Counter(r.finish_reason or "none" for r in good)),
    }


def _total(values: Iterable[int | None]) -> int | None:
    """The sum of what is known; None when there is something and nothing of it is known."""
    everything = list(values)
    known = [value for value in everything if value is not None]
    return sum(known) if known or not everything else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _rates(
    run: Run,
    table: Columns,
    latencies: Mapping[str, Floats],
    tokens: Mapping[str, Any],
    window_s: float | None,
    slo: Slo,
) -> dict[str, Any]:
    num_ok = int(table.ok.sum())
    output = tokens["output_tokens"]
    prompt = tokens["input_tokens"] if tokens["input_tokens"] is not None else tokens["input_tokens_asked"]
    met = int((table.ok & meets(latencies, slo)).sum()) if slo else None
    open_loop = run.options.get("rate") is not None or (
        run.options.get("trace") is not None and run.options.get("concurrency") is None
    )
    in_flight = table.end_ns - np.where(table.sent_ns == MISSING, table.end_ns, table.sent_ns)
    return {
        "window_s": window_s,
        "output_tokens_per_s": _ratio(output, window_s),
        "input_tokens_per_s": _ratio(prompt, window_s),
        "total_tokens_per_s": _ratio(None if prompt is None else output + prompt, window_s),
        "requests_per_s": _ratio(num_ok, window_s),
        "goodput_per_s": _ratio(met, window_s),
        "slo_met": met,
        "error_share": _ratio(len(table) - num_ok, len(table)),
        "requested_per_s": run.options.get("rate"),
        "offered_per_s": _pace_per_s(table.planned_ns) if open_loop else None,
        "achieved_per_s": _pace_per_s(table.sent_ns),
        "arrivals": _arrivals(run, table) if open_loop else None,
        "in_flight_mean": _ratio(float(in_flight[table.end_ns != MISSING].sum()) / NS_PER_S, window_s),
        "in_flight_max": run.usage.max_in_flight,
    }


def meets(latencies: Mapping[str, Floats], slo: Slo) -> NDArray[np.bool_]:
    """Per request: within every limit. Without a first token ttft and e2e are missed; below two tokens tpot is not."""
    within = np.ones(len(latencies["ttft_ms"]), bool)
    if slo.ttft_ms is not None:
        within &= latencies["ttft_ms"] <= slo.ttft_ms  # NaN compares False
    if slo.e2e_ms is not None:
        within &= latencies["e2e_ms"] <= slo.e2e_ms
    if slo.tpot_ms is not None:
        within &= ~(latencies["tpot_ms"] > slo.tpot_ms)
    return within


def _pace_per_s(stamps: Ints) -> float | None:
    """(n - 1) / (last - first): the rate of a stream of arrivals, free of the idle time before and after it."""
    known = stamps[stamps != MISSING]
    if len(known) < 2 or known.max() == known.min():
        return None
    return float((len(known) - 1) * NS_PER_S / (known.max() - known.min()))


def _arrivals(run: Run, table: Columns) -> dict[str, Any]:
    """The gaps between sends, and how likely a Poisson stream of the asked rate is to look at least as odd."""
    gaps_s = np.diff(np.sort(table.sent_ns[table.sent_ns != MISSING])) / NS_PER_S
    rate, kind = run.options.get("rate"), run.options.get("arrival")
    free = not run.options.get("trace") and not run.options.get("concurrency")  # nothing else shaped the sends
    return {
        "asked": "trace" if run.options.get("trace") else kind,
        "gap_mean_s": float(gaps_s.mean()) if len(gaps_s) else None,
        "gap_cv": cv(gaps_s),
        "poisson_p_value": exponential_fit_p_value(gaps_s, 1 / rate) if rate and free and kind == "poisson" else None,
    }


def _one(record: RequestRecord) -> dict[str, Any]:
    table = latencies_ms(columns([record]))
    values = {name: None if np.isnan(value[0]) else float(value[0]) for name, value in table.items()}
    return {
        "ok": record.ok,
        "failure": None if record.failure is None else str(record.failure),
        "ttft_ms": values["ttft_ms"],
        "tpot_ms": values["tpot_ms"],
        "e2e_ms": values["e2e_ms"],
        "output_tokens": record.output_tokens,
    }


def _cold(run: Run) -> dict[str, Any] | None:
    cold = next((record for record in run.records if record.phase is Phase.COLD), None)
    return None if cold is None else _one(cold)


def _warmup(run: Run) -> dict[str, Any]:
    """How many warm-up requests (the cold one not counted) and what they took."""
    records = [record for record in run.records if record.phase is Phase.WARMUP]
    table = columns(records)
    latencies = latencies_ms(table)
    ends = table.end_ns[table.end_ns != MISSING]
    return {
        "requests": len(records),
        "failed": sum(not record.ok for record in records),
        "took_s": float(ends.max() - table.planned_ns.min()) / NS_PER_S if len(ends) else None,
        "ttft_ms": _brief(latencies["ttft_ms"][table.ok]),
        "e2e_ms": _brief(latencies["e2e_ms"][table.ok]),
    }


def _brief(values: Floats) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {"n": 0, "p50": None, "max": None}
    return {"n": len(known), "p50": float(np.median(known)), "max": float(known.max())}


def server_counters(run: Run) -> dict[str, float]:
    """How much each counter of the server's /metrics grew, from the last read before the measured phase to the last.

    Counters are the names that end in _total, _sum, _count. One that shrank was restarted in between: left out.
    """
    before: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in run.scrapes:
        for name, value in line.items():
            if name.endswith(("_total", "_sum", "_count")):
                if line["t_ns"] <= run.start_ns or name not in before:
                    before[name] = value
                last[name] = value
    return {name: value - before[name] for name, value in last.items() if value >= before[name]}

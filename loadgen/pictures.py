"""The pictures of report.html: percentiles, throughput against latency, the timeline of requests, series over time.

Each function takes Arms (runs with a name and a colour) and gives HTML with inline SVG, or "" where there is nothing to
draw. Lines are thinned out to 240 points and a timeline to 120 requests; what was left out is said under the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from loadgen.metrics import MISSING, Columns, Floats, columns, latencies_ms, pooled_events, pooled_gaps_ms
from loadgen.record import RequestRecord, Run
from loadgen.report import load_name, number
from loadgen.svg import BOTTOM, LEFT, RIGHT, TOP, Scale, Series, chart, scale_for

_POINTS = 240
_BINS = 60
_TIMELINE_ROWS = 120
_TIMELINE_TICKS = 20_000

# Gauges of servers, by the ends of their names (a prefix names the server): first match wins.
_GAUGES = {
    "running": ("num_requests_running", "requests_running", "rows_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "requests_waiting", "queue_length", "num_queue_reqs"),
    "KV cache used": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_used_ratio", "token_usage"),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One run on the page: its name, its run.json, its records, and its colour's index."""

    name: str
    document: Mapping[str, Any]
    run: Run
    colour: int

    @property
    def metrics(self) -> Mapping[str, Any]:
        result: Mapping[str, Any] = self.document["metrics"]
        return result


def remark(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


# ---------------------------------------------------------------- distributions


def distributions(arms: Sequence[Arm]) -> str:
    """Percentile plots: every percentile of TTFT, gap and e2e, the tail stretched, failures never reached."""
    charts = []
    for metric, label in (("ttft_ms", "TTFT"), ("gap_ms", "Gap between events"), ("e2e_ms", "End to end")):
        series = []
        for arm in arms:
            values, failures = _values(arm.run, metric)
            if len(values):
                x, y = percentile_curve(values, failures)
                series.append(Series(arm.name, x, y, arm.colour))
        if series:
            x_scale = Scale(0, min(0.99999, max(float(one.x[-1]) for one in series)), "percentile", "nines")
            charts.append(chart(label, series, x_scale, scale_for([one.y for one in series], "ms")))
    notes = "Read: 99 of 100 are below the line's height at 99."
    if any(arm.document["counts"]["failed"] for arm in arms):
        notes += " A failure counts as never answered, so the lines of TTFT and end to end stop at the share that was."
    return f'<div class="charts">{"".join(charts)}</div>{remark(notes)}' if charts else ""


def _values(run: Run, metric: str) -> tuple[Floats, int]:
    """(sorted values of successes in ms, how many failed): what a percentile curve needs."""
    good = [record for record in run.measured if record.ok]
    if metric == "gap_ms":
        return np.sort(pooled_gaps_ms(good)[0]), 0
    values = latencies_ms(columns(good))[metric]
    return np.sort(values[~np.isnan(values)]), len(run.measured) - len(good)


def percentile_curve(ordered: Floats, failures: int = 0) -> tuple[Floats, Floats]:
    """(shares, values) of at most _POINTS points: as many in each tenfold of the tail as in the one before."""
    n = len(ordered) + failures
    nines = np.linspace(0, np.log10(n), _POINTS) if n > 1 else np.zeros(1)
    ranks = np.unique(np.minimum(np.floor((1 - 10**-nines) * n), n - 1).astype(np.int64))
    ranks = ranks[ranks < len(ordered)]
    return ranks / n, ordered[ranks]


# ---------------------------------------------------------------- throughput against latency


def throughput_latency(arms: Sequence[Arm]) -> str:
    """A point a run; runs of the same server under different loads are joined in the order of the loads."""
    charts = []
    groups: dict[str, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(str(arm.document["server"]), []).append(arm)
    for metric, p, label in (
        ("ttft_ms", "p50", "TTFT p50"),
        ("ttft_ms", "p99", "TTFT p99"),
        ("gap_ms", "p99", "Gap p99"),
    ):
        series = []
        for group in groups.values():
            known = [a for a in group if a.metrics["output_tokens_per_s"] and a.metrics[metric][p] is not None]
            known.sort(key=_load)
            x = np.array([arm.metrics["output_tokens_per_s"] for arm in known])
            y = np.array([arm.metrics[metric][p] for arm in known])
            if len(known) > 1 and len(set(map(_load, known))) == len(known):
                series.append(Series("", x, y, known[0].colour))
            for i, arm in enumerate(known):
                text = f"{arm.name}: {load_name(arm.document)}, {number(x[i])} tokens/s, {number(y[i])} ms"
                series.append(Series(arm.name, x[i : i + 1], y[i : i + 1], arm.colour, "points", (text,)))
        if series:
            x_scale = scale_for([one.x for one in series], "output tokens/s")
            charts.append(chart(label, series, x_scale, scale_for([one.y for one in series], "ms")))
    return f'<div class="charts">{"".join(charts)}</div>{remark("Down and to the right is better.")}' if charts else ""


def _load(arm: Arm) -> float:
    options = arm.document["options"]
    return float(options.get("rate") or options.get("concurrency") or 0)


# ---------------------------------------------------------------- timeline


def timeline_key() -> str:
    parts = (
        ("wait", "not sent yet"),
        ("queue", "sent, no byte of the answer"),
        ("prefill", "answer begun, no token"),
        ("tokens", "tokens (a stroke each)"),
        ("failed", "failed"),
    )
    keys = " ".join(f'<span><span class="key {css}"></span>{text}</span>' for css, text in parts)
    note = "A bar a request. Blocks that begin and end together are static batches; stairs are continuous batching."
    return f'<p class="legend">{keys}</p>{remark(note)}'


def timeline(arm: Arm) -> str:
    records = sorted(arm.run.measured, key=lambda r: r.planned_ns)
    shown = records[:_TIMELINE_ROWS]
    if not shown:
        return ""
    begin = shown[0].planned_ns
    end = max((r.end_ns or r.planned_ns for r in shown), default=begin)
    width, row = 940, max(4.0, min(14.0, 420 / len(shown)))
    height = TOP + row * len(shown) + BOTTOM
    x = Scale(0, max((end - begin) / 1e9, 1e-6), "s since the first of them")
    right = width - RIGHT

    def at(stamp_ns: int) -> float:
        return LEFT + float(x.at((stamp_ns - begin) / 1e9)) * (right - LEFT)

    out = [
        f'<svg class="timeline" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="timeline {escape(arm.name)}">'
    ]
    out.append(f'<text class="title" x="{LEFT}" y="15">{escape(arm.name)}: {escape(load_name(arm.document))}</text>')
    for value, text in x.ticks():
        tick = LEFT + float(x.at(value)) * (right - LEFT)
        out.append(f'<path class="grid" d="M{tick:.1f} {TOP}V{height - BOTTOM:.0f}"/>')
        out.append(
            f'<text class="tick" x="{tick:.1f}" y="{height - BOTTOM + 14:.0f}" text-anchor="middle">{text}</text>'
        )
    out.append(f'<text class="label" x="{right}" y="{height - 6:.0f}" text-anchor="end">{x.label}</text>')
    strokes: list[str] = []
    budget = _TIMELINE_TICKS // len(shown)
    for i, record in enumerate(shown):
        top = TOP + i * row
        out.append(f"<g><title>{escape(_bar_title(record))}</title>")
        for css, start, stop in _segments(record):
            left, wide = at(start), max(at(stop) - at(start), 0.5)
            out.append(
                f'<rect class="{css}" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{row * 0.8:.1f}"/>'
            )
        if not record.ok and record.end_ns is not None:
            left = at(record.end_ns) - 1.5
            out.append(f'<rect class="failed" x="{left:.1f}" y="{top:.1f}" width="3" height="{row * 0.8:.1f}"/>')
        out.append("</g>")
        stamps = record.event_stamps_ns[:: max(1, len(record.event_stamps_ns) // budget)]
        strokes += [f"M{at(stamp):.1f} {top:.1f}v{row * 0.8:.1f}" for stamp in stamps]
    out.append(f'<path class="stroke" d="{"".join(strokes)}"/></svg>')
    rest = len(records) - len(shown)
    note = remark(f"The first {len(shown)} of {len(records)} requests.") if rest else ""
    return f'<div class="wide">{"".join(out)}</div>{note}'


def _segments(record: RequestRecord) -> Iterable[tuple[str, int, int]]:
    """(css class, from, to) of one bar: what was being waited for."""
    over = record.end_ns if record.end_ns is not None else record.planned_ns
    sent = record.sent_ns if record.sent_ns is not None else over
    first_byte = record.first_byte_ns if record.first_byte_ns is not None else over
    first_token = record.first_token_ns if record.first_token_ns is not None else over
    yield "wait", record.planned_ns, sent
    yield "queue", sent, min(first_byte, first_token)
    yield "prefill", min(first_byte, first_token), first_token
    if record.last_token_ns is not None:
        yield "tokens", first_token, record.last_token_ns


def _bar_title(record: RequestRecord) -> str:
    if record.failure is not None:
        return f"{record.id}: failed, {record.failure}"
    if record.first_token_ns is None or record.last_token_ns is None:
        return f"{record.id}: no token"
    first, last = (record.first_token_ns - record.planned_ns) / 1e6, (record.last_token_ns - record.planned_ns) / 1e6
    return f"{record.id}: {record.output_tokens} tokens, from {number(first)} to {number(last)} ms after its start"


# ---------------------------------------------------------------- time series


def time_series(arms: Sequence[Arm]) -> str:
    duration_s = max(_duration_s(arm.run) for arm in arms)
    if duration_s <= 0:
        return ""
    x = Scale(0, duration_s, "s")
    kinds: dict[str, list[Series]] = {"Output tokens per second": [], "Requests in flight (client)": []}
    for arm in arms:
        edges = np.linspace(0, _duration_s(arm.run), _BINS + 1)
        kinds["Output tokens per second"].append(_tokens_over_time(arm, edges))
        kinds["Requests in flight (client)"].append(_in_flight(arm, columns(arm.run.measured)))
        for label, series in _scraped(arm):
            kinds.setdefault(label, []).append(series)
    charts = [
        chart(label, series, x, scale_for([one.y for one in series], _UNITS.get(label, ""), log=False))
        for label, series in kinds.items()
        if any(len(one.x) for one in series)
    ]
    scraped = any(arm.run.scrapes for arm in arms)
    note = (
        ""
        if scraped
        else remark("No /metrics were read from the server, so there is nothing of its queue or its KV cache.")
    )
    return f'<div class="charts">{"".join(charts)}</div>{note}'


_UNITS = {"Output tokens per second": "tokens/s", "Server: KV cache used": "share"}


def _duration_s(run: Run) -> float:
    return max(0.0, (run.end_ns - run.start_ns) / 1e9)


def _tokens_over_time(arm: Arm, edges: Floats) -> Series:
    """Tokens in each bin over its width; an event carries output tokens / events of all answers."""
    good = [record for record in arm.run.measured if record.ok]
    stamps, _ = pooled_events(good)
    counts, _ = np.histogram((stamps - arm.run.start_ns) / 1e9, edges)
    width = edges[1] - edges[0]
    per_event = arm.metrics["tokens_per_event"] or 1.0
    rate = counts * per_event / width if width > 0 else counts * 0.0
    return Series(arm.name, edges[:-1], rate, arm.colour, "steps")


def _in_flight(arm: Arm, table: Columns) -> Series:
    """Requests sent and not over, at each change, thinned to bins."""
    there = (table.sent_ns != MISSING) & (table.end_ns != MISSING)
    sent, ends = table.sent_ns[there], table.end_ns[there]
    times = np.concatenate((sent, ends))
    change = np.concatenate((np.ones(len(sent)), -np.ones(len(ends))))
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(change[order])
    settled = np.flatnonzero(np.append(np.diff(times) > 0, True)) if len(times) else np.empty(0, np.int64)
    keep = settled[np.unique(np.linspace(0, len(settled) - 1, 8 * _BINS).astype(np.int64))] if len(times) else settled
    return Series(arm.name, (times[keep] - arm.run.start_ns) / 1e9, level[keep], arm.colour, "steps")


def _scraped(arm: Arm) -> Iterable[tuple[str, Series]]:
    """The server's own gauges, where /metrics has them, and GPUs."""
    lines = [line for line in arm.run.scrapes if line["t_ns"] >= arm.run.start_ns]
    names = sorted({name for line in lines for name in line if name != "t_ns"})
    wanted = {
        f"Server: {label}": next((n for end in ends for n in names if n.endswith(end)), None)
        for label, ends in _GAUGES.items()
    }
    for gpu in (name for name in names if name.startswith("gpu")):
        device, _, reading = gpu.partition(":")
        wanted[f"{device.upper()}: {reading.replace('_', ' ')}"] = gpu
    for label, name in wanted.items():
        points = [((line["t_ns"] - arm.run.start_ns) / 1e9, line[name]) for line in lines if name and name in line]
        if points:
            points = points[:: max(1, len(points) // _POINTS)]
            x, y = np.array(points, dtype=np.float64).T
            yield label, Series(arm.name, x, y, arm.colour)

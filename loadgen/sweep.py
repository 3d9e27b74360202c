"""`loadgen sweep`: a server under one load after another, and the highest rate that keeps a promise.

    loadgen sweep --concurrency 1,2,4,8,16                       a run each; table, curve, knee
    loadgen sweep --rate 1,2,4,8
    loadgen sweep --find-max-rate --slo ttft=500ms,tpot=50ms --at p99

Knee: the load with the most output tokens/s per second of e2e p50 (Kleinrock's power, 1979): beyond it latency grows
faster than throughput. At the first or last load it may lie outside of what was tried, and that is said.

The highest rate: the search is in max_rate.py. A trial is a run of its own at one rate, with other prompts and arrivals
than all others; it meets the limits when at least the share --at of its requests met every one of them (a failure never
does), and when its queue was not growing at its end: it would be missed, had the trial lasted. A trial in which the
client was the bottleneck is repeated; at the third time it is the client that cannot go faster, and the search ends.

The folder: sweep.json (`"format": "loadgen.sweep/1"`), report.html, a run folder a load.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadgen import max_rate, run_folder
from loadgen.audit import audit
from loadgen.max_rate import Search, Wanted
from loadgen.metrics import Ints, columns, summarize
from loadgen.options import Options, UnusableServer, UsageError
from loadgen.page import write_page
from loadgen.progress import Bar
from loadgen.record import Run
from loadgen.report import columns_of, number
from loadgen.run import INTERRUPTED, INVALID, OK, REQUESTS_FAILED, describe_load, new_folder
from loadgen.workers import run_load

FORMAT = "loadgen.sweep/1"
_ALONE = 8  # requests, one after the other, before a rate is tried
_TRIES = 3  # of a trial whose client was the bottleneck
_PAGE_RUNS = 8  # of a search: of the rates around the border
_LATENCIES = ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")
_RATES = ("output_tokens_per_s", "requests_per_s", "goodput_per_s")


class _ClientLimit(Exception):
    """At this rate the client, not the server, was measured, however often it was tried."""


@dataclass(slots=True)
class Point:
    """One run and where it is kept."""

    load: str
    folder: Path
    document: dict[str, Any]

    @property
    def valid(self) -> bool:
        return bool(self.document["validity"]["valid"])


# ---------------------------------------------------------------- loads in turn


def sweep(options: Options, loads: Sequence[Mapping[str, Any]]) -> int:
    """A run for each of `loads` (changes of options: concurrency or rate); the exit status of the worst."""
    options = _seeded(options)
    folder = new_folder(options.out, "sweep")
    points: list[Point] = []
    interrupted = False
    error: UnusableServer | UsageError | None = None
    try:
        for n, changes in enumerate(loads):
            run = _run(options.replace(**changes, seed=(options.seed or 0) + n), folder, points)
            if run.interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    except (UnusableServer, UsageError) as stopped:
        if not points:
            raise
        error = stopped
    if not points:
        return INTERRUPTED
    document = {**_document(options, points, interrupted), "knee": knee(points)}
    _finish(options, folder, points, document)
    if error is not None:
        raise error
    failed = sum(point.document["counts"]["failed"] for point in points)
    return _status(interrupted, points, failed > options.max_failures)


def knee(points: Sequence[Point]) -> dict[str, Any] | None:
    """{load, at_the_end}: the load of the greatest power, output tokens/s over e2e p50; None without figures.

    at_the_end: it is the first or the last load, so the knee may lie outside of them.
    """
    power = [
        (metrics["output_tokens_per_s"] or 0) / metrics["e2e_ms"]["p50"] if metrics["e2e_ms"]["p50"] else 0.0
        for metrics in (point.document["metrics"] for point in points)
    ]
    if not any(power):
        return None
    best = max(range(len(points)), key=power.__getitem__)
    return {"load": points[best].load, "at_the_end": best in (0, len(points) - 1)}


def _seeded(options: Options) -> Options:
    return options if options.seed is not None else options.replace(seed=secrets.randbits(30))


def _run(load: Options, folder: Path, points: list[Point]) -> Run:
    name = describe_load(load)
    run = run_load(load, progress=None if load.quiet else Bar(name))
    before = sum(point.load == name for point in points)
    path = folder / (f"{name}-{before + 1}" if before else name)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = run_folder.save(path, run, summarize(run, load.slo), audit(run).as_dict())
    points.append(Point(name, path, document))
    return run


# ---------------------------------------------------------------- the highest rate


def find_max_rate(options: Options, wanted: Wanted, start: float | None) -> int:
    """Print the rate that holds and the one that breaks. start: requests/s of the first trial; None: one over the time
    that a request takes alone. Raises UsageError without limits."""
    if not wanted.slo:
        raise UsageError("--find-max-rate needs the limits to keep: --slo ttft=500ms,tpot=50ms")
    options = _seeded(options).replace(slo=wanted.slo)
    folder = new_folder(options.out, "max-rate")
    points: list[Point] = []
    requests = options.requests or trial_requests(wanted.at)

    def load(**changes: Any) -> Run:
        run = _run(options.replace(**changes, seed=(options.seed or 0) + len(points)), folder, points)
        if run.interrupted:
            raise KeyboardInterrupt
        return run

    def trial(rate: float) -> bool:
        for _ in range(_TRIES):
            run = load(rate=rate, requests=requests)
            if points[-1].valid:
                return meets(run, points[-1].document, wanted.at)
        raise _ClientLimit

    search = Search(start or 1.0, wanted)
    alone: dict[str, Any] | None = None
    interrupted = client_limit = False
    error: UnusableServer | UsageError | None = None
    try:
        if start is None:
            load(rate=None, concurrency=1, requests=_ALONE)
            alone = _alone(points[-1].document)
            search.start = 1e3 / alone["e2e_p50_ms"] if alone["e2e_p50_ms"] else 1.0
        if alone is None or not alone["misses"]:
            max_rate.search(trial, search)
    except KeyboardInterrupt:
        interrupted = True
    except _ClientLimit:
        client_limit = True
    except (UnusableServer, UsageError) as stopped:
        if not points:
            raise
        error = stopped
    if not points:
        return INTERRUPTED
    limit = None
    if client_limit:
        last = points[-1].document
        limit = {"rate_per_s": last["options"]["rate"], "tries": _TRIES, **last["validity"]["reasons"][0]}
    found = {**search.as_dict(), "requests_per_trial": requests, "alone": alone, "client_limit": limit}
    _finish(options, folder, points, {**_document(options, points, interrupted), "max_rate": found})
    if error is not None:
        raise error
    # beyond the highest rate requests may fail
    return INTERRUPTED if interrupted else INVALID if client_limit else OK


def trial_requests(at: float) -> int:
    """Requests of a trial where --requests does not say: so many that two of them may miss, at least 50."""
    return max(50, math.ceil(2 / (1 - at) - 1e-9))


def meets(run: Run, document: Mapping[str, Any], at: float) -> bool:
    """Whether a trial met the limits: enough of its requests did, and its queue was not growing."""
    counts, table = document["counts"], columns(run.measured)
    within = document["metrics"]["slo_met"] >= at * counts["started"] - 1e-9
    return bool(within) and not growing(table.planned_ns, table.end_ns)


def growing(start_ns: Ints, end_ns: Ints) -> bool:
    """Whether more requests were in flight at the last starts than half way, beyond what chance does.

    Means over a tenth of the starts; in a stable queue they differ by a few requests, in an overloaded one the number
    in flight grows with every second. Below 40 requests that cannot be told: False.
    """
    n = len(start_ns)
    if n < 40:
        return False
    in_flight = np.arange(1, n + 1) - np.searchsorted(np.sort(end_ns), np.sort(start_ns), side="right")
    tenth = n // 10
    middle, last = in_flight[n // 2 - tenth : n // 2].mean(), in_flight[-tenth:].mean()
    return bool(last > 1.5 * middle + 5)


def _alone(document: Mapping[str, Any]) -> dict[str, Any]:
    """What requests do one after the other. misses: nearly all of them (7 of 8 is no chance) miss a limit."""
    started, met = document["counts"]["started"], document["metrics"]["slo_met"] or 0
    return {
        "requests": started,
        "met": met,
        "misses": started - met >= 7 / 8 * started,
        "e2e_p50_ms": document["metrics"]["e2e_ms"]["p50"],
    }


# ---------------------------------------------------------------- what is left behind


def _document(options: Options, points: Sequence[Point], interrupted: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "seed": options.seed,
        "interrupted": interrupted,
        "points": [
            {
                "load": point.load,
                "folder": point.folder.name,
                "counts": point.document["counts"],
                "valid": point.valid,
                **{key: point.document["metrics"][key] for key in (*_RATES, *_LATENCIES, "slo_met")},
            }
            for point in points
        ],
    }


def text_of(document: Mapping[str, Any]) -> str:
    """The table of loads with the knee, or of the rates that were decided with the highest that holds."""
    cut = ["interrupted: what was complete"] if document["interrupted"] else []
    if "max_rate" in document:
        return "\n".join([*cut, *_rate_lines(document["max_rate"])])
    return "\n".join([*cut, *_load_lines(document)])


def _load_lines(document: Mapping[str, Any]) -> list[str]:
    found = document["knee"]
    goodput = any(point["goodput_per_s"] is not None for point in document["points"])
    heads = ["load", "ok", "failed", "output tok/s", "req/s", *(["goodput/s"] if goodput else [])]
    rows = [[*heads, "TTFT p50", "p99 ms", "gap p50", "p99 ms", "e2e p50", "p99 ms"]]
    marks = [""]
    for point in document["points"]:
        rates = [point[key] for key in _RATES if key != "goodput_per_s" or goodput]
        latencies = [point[key][p] for key in ("ttft_ms", "gap_ms", "e2e_ms") for p in ("p50", "p99")]
        counts = point["counts"]
        rows.append([point["load"], str(counts["ok"]), str(counts["failed"]), *map(number, [*rates, *latencies])])
        mark = "  <- knee" if found and point["load"] == found["load"] else ""
        marks.append(mark + ("" if point["valid"] else "  INVALID: the client was measured"))
    lines = [line + mark for line, mark in zip(columns_of(rows), marks, strict=True)]
    if found:
        where = "; it may lie outside of these loads" if found["at_the_end"] else ""
        lines += ["", f"knee: {found['load']}, the most output tokens/s per second of e2e p50{where}"]
    return lines


def _rate_lines(found: Mapping[str, Any]) -> list[str]:
    slo = found["slo"]
    limits = ", ".join(f"{k.removesuffix('_ms')} <= {number(v)} ms" for k, v in slo.items() if v is not None)
    lines = [f"a trial: {found['requests_per_trial']} requests, of which {found['at']:.4g} must have {limits}"]
    lines += [
        f"a rate holds when {found['keep']:.0%} of its trials or more are like that, with "
        f"{found['confidence']:.0%} confidence",
        "",
    ]
    if found["alone"] and found["alone"]["misses"]:
        alone = found["alone"]
        return [
            *lines,
            f"no rate holds: of {alone['requests']} requests one after the other {alone['met']} met the limits",
        ]
    said = {True: "holds", False: "breaks", None: "not decided"}
    rows = [["requests/s", "trials", "met", ""]]
    rows += [
        [number(rate["rate_per_s"]), str(rate["trials"]), str(rate["met"]), said[rate["holds"]]]
        for rate in found["rates"]
    ]
    lines += columns_of(rows) if found["rates"] else ["no rate was decided"]
    low, high = found["holds_per_s"], found["breaks_per_s"]
    if limit := found["client_limit"]:
        lines += [
            "",
            f"stopped: INVALID at {number(limit['rate_per_s'])} requests/s, {limit['tries']} times: the client,",
        ]
        lines += [f"not the server, was measured: {limit['what']}", f"    -> {limit['remedy']}"]
    if found["resolved"]:
        return [*lines, "", f"highest rate: {number(low)} requests/s holds, {number(high)} breaks"]
    what = f"{number(low)} requests/s holds" if low is not None else "no rate was seen to hold"
    what += f", {number(high)} breaks" if high is not None else ", none was seen to break"
    return [*lines, "", f"not resolved: {what}; more --trials, longer ones (--requests), or a wider --precision"]


def _finish(options: Options, folder: Path, points: Sequence[Point], document: Mapping[str, Any]) -> None:
    run_folder.write_document(folder / "sweep.json", document)
    text = text_of(document)
    shown = points if "knee" in document else _around_the_border(points, document["max_rate"])
    write_page(
        [point.folder for point in shown],
        folder / "report.html",
        names=[point.folder.name for point in shown],
        texts={"Sweep" if "knee" in document else "The highest rate": text},
        title="loadgen sweep",
    )
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        return
    if not options.quiet:
        click.echo(text)
    click.echo(f"{'' if options.quiet else 'records and report: '}{folder}")


def _around_the_border(points: Sequence[Point], found: Mapping[str, Any]) -> list[Point]:
    """The last trial of each rate, of the rates nearest to the one that holds; in order of rate."""
    last = {point.document["options"]["rate"]: point for point in points if point.document["options"]["rate"]}
    centre = found["holds_per_s"] or found["breaks_per_s"] or 1.0
    nearest = sorted(last, key=lambda rate: abs(math.log(rate / centre)))[:_PAGE_RUNS]
    return [last[rate] for rate in sorted(nearest)] or list(points[-1:])


def _status(interrupted: bool, points: Sequence[Point], failed: bool) -> int:
    if interrupted:
        return INTERRUPTED
    if not all(point.valid for point in points):
        return INVALID
    return REQUESTS_FAILED if failed else OK

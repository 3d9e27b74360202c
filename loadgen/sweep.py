"""`loadgen sweep`: a server under one load after another, and the highest rate that keeps a promise.

    loadgen sweep --concurrency 1,2,4,8,16                       a run each; table, curve, knee
    loadgen sweep --rate 1,2,4,8
    loadgen sweep --find-max-rate --slo ttft=500ms,tpot=50ms --at p99

Knee: the load with the most output tokens/s per second of e2e p50 (Kleinrock's power, 1979): beyond it latency grows
faster than throughput.

The highest rate: a rate keeps the promise when, with 95 % confidence, at least the share --at of its requests met every
limit (failures never do), by the exact binomial bound of Clopper and Pearson (1934): 0 of 299 may miss p99. Trials of a
rate are added up until that is decided either way, at most --trials times. A trial in which the queue was still growing
at its end breaks the promise: it would be broken, had the trial lasted. Rates are doubled (or halved) until one holds
and one breaks, then bisected until they are --precision apart.

The folder: sweep.json (`"format": "loadgen.sweep/1"`), report.html, a run folder a load.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadgen import run_folder
from loadgen.audit import audit
from loadgen.metrics import columns, latencies_ms, summarize
from loadgen.options import Options, Slo, UsageError
from loadgen.page import write_page
from loadgen.progress import Bar
from loadgen.record import Run
from loadgen.report import columns_of, number
from loadgen.run import INTERRUPTED, INVALID, OK, REQUESTS_FAILED, describe_load, new_folder
from loadgen.stats import binomial_bounds
from loadgen.workers import run_load

FORMAT = "loadgen.sweep/1"
_MAX_STEPS = 12  # doublings, and then bisections


@dataclass(frozen=True, slots=True)
class MaxRate:
    """What --find-max-rate is asked for."""

    slo: Slo
    at: float = 0.99  # share of the requests that must meet the limits
    precision: float = 0.1  # the rates that hold and break end up at most so far apart, as a share
    trials: int = 5  # of a rate, until it is decided
    start: float = 1.0  # requests/s


@dataclass(frozen=True, slots=True)
class Trial:
    """One rate, all its trials added up. holds: None when they did not decide it."""

    rate: float
    requests: int
    missed: int
    growing: bool
    holds: bool | None


@dataclass(slots=True)
class Point:
    load: str
    folder: Path
    document: dict[str, Any]


# ---------------------------------------------------------------- loads in turn


def sweep(options: Options, loads: Sequence[Mapping[str, Any]]) -> int:
    """A run for each of `loads` (changes of options: concurrency or rate); the exit status of the worst."""
    options = _seeded(options)
    folder = new_folder(options.out, "sweep")
    points: list[Point] = []
    interrupted = False
    for n, changes in enumerate(loads):
        load = options.replace(**changes, seed=(options.seed or 0) + n)
        run = _run(load, folder, points)
        if run.interrupted:
            interrupted = True
            break
    document: dict[str, Any] = _document(options, points, interrupted) | {"knee": knee(points)}
    return _finish(options, folder, points, document, interrupted)


def knee(points: Sequence[Point]) -> str | None:
    """The load of the greatest power: output tokens/s over e2e p50."""
    known = [
        (point.document["metrics"]["output_tokens_per_s"] / point.document["metrics"]["e2e_ms"]["p50"], point.load)
        for point in points
        if point.document["metrics"]["output_tokens_per_s"] and point.document["metrics"]["e2e_ms"]["p50"]
    ]
    return max(known)[1] if known else None


def _seeded(options: Options) -> Options:
    return options if options.seed is not None else options.replace(seed=secrets.randbits(30))


def _run(load: Options, folder: Path, points: list[Point]) -> Run:
    name = describe_load(load)
    run = run_load(load, progress=None if load.quiet else Bar(name))
    number_of = sum(point.load == name for point in points)
    path = folder / (name if not number_of else f"{name}-{number_of + 1}")
    path.parent.mkdir(parents=True, exist_ok=True)
    document = run_folder.save(path, run, summarize(run, load.slo), audit(run).as_dict())
    points.append(Point(name, path, document))
    return run


# ---------------------------------------------------------------- the highest rate


def find_max_rate(options: Options, wanted: MaxRate) -> int:
    """Bracket and bisect; prints the rate that holds and the one that breaks. Raises UsageError without limits."""
    if not wanted.slo:
        raise UsageError("--find-max-rate needs the limits to keep: --slo ttft=500ms,tpot=50ms")
    options = _seeded(options)
    folder = new_folder(options.out, "max-rate")
    points: list[Point] = []
    per_trial = options.requests or needed_requests(wanted.at)

    def measure(rate: float) -> tuple[int, int, bool]:
        load = options.replace(rate=rate, requests=per_trial, seed=(options.seed or 0) + len(points))
        run = _run(load, folder, points)
        if run.interrupted:
            raise KeyboardInterrupt
        return misses(run, wanted.slo)

    interrupted = False
    trials: list[Trial] = []
    try:
        search(measure, wanted, trials)
    except KeyboardInterrupt:
        interrupted = True
    document = _document(options, points, interrupted) | result_of(wanted, trials)
    return _finish(options, folder, points, document, interrupted)


def needed_requests(at: float, confidence: float = 0.95) -> int:
    """Requests of which none may miss, so that `at` is met with this confidence: n with at^n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(at))


def misses(run: Run, slo: Slo) -> tuple[int, int, bool]:
    """(requests, those that failed or missed a limit, whether the queue was growing at the end)."""
    table = columns(run.measured)
    met = table.ok.copy()
    latencies = latencies_ms(table)
    for key, limit in (("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms), ("e2e_ms", slo.e2e_ms)):
        if limit is not None:
            values = latencies[key]
            met &= np.where(np.isnan(values), key == "tpot_ms", values <= limit)  # one token has no tpot
    return len(met), int((~met).sum()), _growing(table.planned_ns, table.end_ns)


def _growing(start_ns: Any, end_ns: Any) -> bool:
    """Whether more requests were in flight at the last starts than half way, beyond what chance does.

    Means over a tenth of the starts; in a stable queue they differ by a few requests, in an overloaded one the number
    in flight grows with every second.
    """
    n = len(start_ns)
    if n < 40:
        return False
    ends = np.sort(end_ns)
    in_flight = np.arange(1, n + 1) - np.searchsorted(ends, np.sort(start_ns), side="right")
    tenth = n // 10
    middle, last = in_flight[n // 2 - tenth : n // 2].mean(), in_flight[-tenth:].mean()
    return bool(last > 1.5 * middle + 5)


def search(measure: Callable[[float], tuple[int, int, bool]], wanted: MaxRate, trials: list[Trial]) -> None:
    """Append a Trial a rate until one that holds and one that breaks are close, or no decision can be had."""

    def holds(rate: float) -> bool | None:
        requests = missed = 0
        growing = False
        decision: bool | None = None
        for _ in range(wanted.trials):
            more, bad, grew = measure(rate)
            requests, missed, growing = requests + more, missed + bad, growing or grew
            low, high = binomial_bounds(missed, requests)
            decision = False if growing or low > 1 - wanted.at else True if high <= 1 - wanted.at else None
            if decision is not None:
                break
        trials.append(Trial(rate, requests, missed, growing, decision))
        return decision

    rate, good, bad = wanted.start, 0.0, math.inf
    for _ in range(_MAX_STEPS):
        decision = holds(rate)
        if decision is None:
            return
        if decision:
            good = rate
        else:
            bad = rate
        if good and bad < math.inf:
            break
        rate = rate * 2 if decision else rate / 2
    for _ in range(_MAX_STEPS):
        if not good or bad == math.inf or bad / good <= 1 + wanted.precision:
            return
        rate = math.sqrt(good * bad)
        decision = holds(rate)
        if decision is None:
            return
        if decision:
            good = rate
        else:
            bad = rate


def result_of(wanted: MaxRate, trials: Sequence[Trial]) -> dict[str, Any]:
    """{max_rate: {holds_per_s, breaks_per_s, resolved, at, confidence, slo, trials}}: null where none was found."""
    holding = [trial.rate for trial in trials if trial.holds]
    breaking = [trial.rate for trial in trials if trial.holds is False]
    low, high = max(holding, default=None), min(breaking, default=None)
    return {
        "max_rate": {
            "holds_per_s": low,
            "breaks_per_s": high,
            "resolved": low is not None and high is not None and high / low <= 1 + wanted.precision + 1e-9,
            "at": wanted.at,
            "confidence": 0.95,
            "precision": wanted.precision,
            "slo": {key: getattr(wanted.slo, key) for key in ("ttft_ms", "tpot_ms", "e2e_ms")},
            "trials": [
                {
                    "rate_per_s": trial.rate,
                    "requests": trial.requests,
                    "missed": trial.missed,
                    "growing": trial.growing,
                    "holds": trial.holds,
                }
                for trial in trials
            ],
        }
    }


# ---------------------------------------------------------------- what is left behind


def _document(options: Options, points: Sequence[Point], interrupted: bool) -> dict[str, Any]:
    keys = ("output_tokens_per_s", "requests_per_s", "goodput_per_s", "ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")
    return {
        "format": FORMAT,
        "seed": options.seed,
        "interrupted": interrupted,
        "points": [
            {
                "load": point.load,
                "folder": point.folder.name,
                "counts": point.document["counts"],
                "valid": point.document["validity"]["valid"],
                **{key: point.document["metrics"][key] for key in keys},
            }
            for point in points
        ],
    }


def text_of(document: Mapping[str, Any]) -> str:
    rows = [["load", "ok", "failed", "output tok/s", "req/s", "TTFT p50", "p99 ms", "gap p50", "p99 ms", "e2e p50 ms"]]
    for point in document["points"]:
        ttft, gap = point["ttft_ms"], point["gap_ms"]
        values = (
            point["output_tokens_per_s"],
            point["requests_per_s"],
            ttft["p50"],
            ttft["p99"],
            gap["p50"],
            gap["p99"],
        )
        mark = "" if point["valid"] else " INVALID: the client was the bottleneck"
        if point["load"] == document.get("knee"):
            mark = " <- knee" + mark
        counts = point["counts"]
        rows.append(
            [
                point["load"],
                str(counts["ok"]),
                str(counts["failed"]),
                *map(number, values),
                number(point["e2e_ms"]["p50"]),
            ]
            + ([mark] if mark else [])
        )
    lines = columns_of(rows)
    if document.get("knee"):
        lines += ["", f"knee: {document['knee']}, the most output tokens/s per second of e2e p50"]
    if found := document.get("max_rate"):
        limits = ", ".join(
            f"{key.removesuffix('_ms')} {number(v)} ms" for key, v in found["slo"].items() if v is not None
        )
        low, high = found["holds_per_s"], found["breaks_per_s"]
        lines += ["", f"{found['at']:.2%} of the requests within {limits}, with {found['confidence']:.0%} confidence:"]
        for trial in found["trials"]:
            said = {True: "holds", False: "breaks", None: "not decided"}[trial["holds"]]
            growing = ", the queue was growing" if trial["growing"] else ""
            missed = f"{trial['missed']} of {trial['requests']} missed{growing}"
            lines.append(f"  {number(trial['rate_per_s'])} requests/s: {said} ({missed})")
        if found["resolved"]:
            lines.append(f"highest rate: {number(low)} requests/s holds, {number(high)} breaks")
        else:
            lines.append(
                f"not resolved: {number(low)} requests/s holds, {number(high)} breaks; more --requests or --trials, "
                "or a wider --precision"
            )
    return "\n".join(lines)


def _finish(
    options: Options, folder: Path, points: Sequence[Point], document: Mapping[str, Any], interrupted: bool
) -> int:
    if not points:
        return INTERRUPTED
    path = folder / "sweep.json"
    partial = path.with_name(f".{path.name}.part")
    run_folder.write_synced(partial, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    partial.replace(path)
    text = text_of(document)
    folders = [point.folder for point in points]
    write_page(
        folders, folder / "report.html", names=[p.name for p in folders], texts={"Sweep": text}, title="loadgen sweep"
    )
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    elif not options.quiet:
        click.echo(text)
    if not options.json:
        click.echo(f"{'' if options.quiet else 'records and report: '}{folder}")
    if interrupted:
        return INTERRUPTED
    if any(not point.document["validity"]["valid"] for point in points):
        return INVALID
    failed = sum(point.document["counts"]["failed"] for point in points)
    return REQUESTS_FAILED if failed > options.max_failures else OK

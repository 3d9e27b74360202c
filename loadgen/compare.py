"""`loadgen compare`: is B faster than A, by how much, and is that more than noise?

    loadgen compare A=http://127.0.0.1:8000 B=http://127.0.0.1:8100 --concurrency 16 --rounds 5
    loadgen compare A=http://127.0.0.1:8000 B=http://127.0.0.1:8000 --start A='...' --start B='...' --concurrency 16

A round loads every arm once, with the same requests; the order turns round every time (A B, B A, ...), so that drift
falls on both. Every round has a seed of its own: a prefix cache that has seen a prompt must not help. Arms with
--start are started for their turn and stopped after it; the others are up all the time. The round is the unit of
replication: what is compared is each round's figure with the same round's figure of the baseline, the first arm.

The folder: compare.json (`"format": "loadgen.compare/1"`), report.html, round-N/ARM with a run folder each, logs/.

Verdicts, out of the 95 % interval of the ratio: `same within x %` when it lies inside of +- x %; `faster` or `slower`
when it leaves 1 out; else `not resolved`, with the smallest difference that these rounds would have found in four of
five repeats, and the rounds that would settle the ratio that was found. Each verdict by itself errs in one of twenty.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import orjson

from loadgen import run_folder
from loadgen.audit import audit
from loadgen.metrics import summarize
from loadgen.options import Options, UsageError
from loadgen.page import write_page
from loadgen.progress import Bar
from loadgen.record import Run
from loadgen.report import number
from loadgen.run import INTERRUPTED, INVALID, OK, REQUESTS_FAILED, new_folder
from loadgen.servers import Server
from loadgen.stats import log_ratio_interval
from loadgen.workers import run_load

FORMAT = "loadgen.compare/1"
METRICS: Mapping[str, tuple[str, str | None, bool]] = {  # name -> key of metrics, percentile, higher is better
    "output_tokens_per_s": ("output_tokens_per_s", None, True),
    "requests_per_s": ("requests_per_s", None, True),
    "goodput_per_s": ("goodput_per_s", None, True),
    "ttft_p50_ms": ("ttft_ms", "p50", False),
    "ttft_p99_ms": ("ttft_ms", "p99", False),
    "tpot_p50_ms": ("tpot_ms", "p50", False),
    "gap_p50_ms": ("gap_ms", "p50", False),
    "gap_p99_ms": ("gap_ms", "p99", False),
    "e2e_p50_ms": ("e2e_ms", "p50", False),
    "e2e_p99_ms": ("e2e_ms", "p99", False),
}


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    url: str
    start: str | None = None  # a command that serves at url, started for each turn


@dataclass(frozen=True, slots=True)
class Plan:
    arms: Sequence[Arm]
    load: Options
    rounds: int = 5
    same_within: float = 0.03  # as a share: 0.03 = 3 %
    start_timeout_s: float = 600.0


@dataclass(slots=True)
class Rounds:
    """What came out of one arm, a summary a round."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def values(self, metric: str, count: int) -> list[float | None]:
        key, percentile, _ = METRICS[metric]
        found = [document["metrics"].get(key) for document in self.documents[:count]]
        return [value[percentile] if percentile and value is not None else value for value in found]


def parse_arms(pairs: Sequence[tuple[str, str]], starts: Sequence[tuple[str, str]]) -> list[Arm]:
    """NAME=URL and NAME=COMMAND to arms. Raises UsageError for fewer than two, a name twice, a --start without arm."""
    names = [name for name, _ in pairs]
    if len(pairs) < 2:
        raise UsageError("compare needs two or more servers: loadgen compare A=URL B=URL")
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two servers have the name {twice.pop()}")
    for name in names:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise UsageError(f"name {name!r}: letters, digits, - _ . only (it becomes a folder)")
    commands = dict(starts)
    for name in commands:
        if name not in names:
            raise UsageError(f"--start {name}=...: there is no server of that name (there are {', '.join(names)})")
    return [Arm(name, url, commands.get(name)) for name, url in pairs]


def compare(plan: Plan) -> int:
    """Run the rounds, print the table; the exit status of a run. Raises UsageError, UnusableServer."""
    options = plan.load
    if options.seed is None:
        options = options.replace(seed=secrets.randbits(30))
    folder = new_folder(options.out, "compare-" + "-".join(arm.name for arm in plan.arms))
    results = {arm.name: Rounds() for arm in plan.arms}
    complete = 0
    interrupted = False
    try:
        for number_ in range(1, plan.rounds + 1):
            turn = plan.arms if number_ % 2 else list(reversed(plan.arms))
            for arm in turn:
                run = _turn(plan, options, arm, number_, folder, results[arm.name])
                if run.interrupted:
                    raise KeyboardInterrupt
            complete = number_
    except KeyboardInterrupt:
        interrupted = True
    if not folder.exists():
        return INTERRUPTED
    document = document_of(plan, results, complete, interrupted, options.seed or 0)
    _write(folder / "compare.json", document)
    text = text_of(document)
    shown = [(name, rounds.folders[-1]) for name, rounds in results.items() if rounds.folders]
    write_page(
        [path for _, path in shown],
        folder / "report.html",
        names=[name for name, _ in shown],
        comparison=document if complete else None,
        texts={"Compared": text},
        title=f"loadgen compare: {', '.join(results)}",
    )
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    elif not options.quiet:
        click.echo(text)
    if not options.json:
        click.echo(f"{'' if options.quiet else 'records and report: '}{folder}")
    if interrupted:
        return INTERRUPTED
    if any(not arm["valid"] for arm in document["arms"].values()):
        return INVALID
    failed = sum(arm["failed"] for arm in document["arms"].values())
    return REQUESTS_FAILED if failed > options.max_failures else OK


def _turn(plan: Plan, options: Options, arm: Arm, number_: int, folder: Path, rounds: Rounds) -> Run:
    """Load one arm once; its run folder is the record."""
    warm = bool(rounds.folders) and arm.start is None  # the same server was loaded in the round before
    load = options.replace(
        url=arm.url,
        seed=(options.seed or 0) + number_,
        warmup=min(1, options.warmup) if warm and options.warmup is not None else 1 if warm else options.warmup,
    )
    with contextlib.ExitStack() as stack:
        if arm.start is not None:
            log = folder / "logs" / f"{arm.name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            server = Server(arm.name, arm.start, arm.url, log, timeout_s=plan.start_timeout_s, quiet=options.quiet)
            stack.enter_context(server)
        run = run_load(load, progress=None if options.quiet else Bar(f"round {number_}/{plan.rounds} {arm.name}"))
        path = folder / f"round-{number_}" / arm.name
        path.parent.mkdir(parents=True, exist_ok=True)
        document = run_folder.save(path, run, summarize(run, options.slo), audit(run).as_dict())
    rounds.documents.append(document)
    rounds.folders.append(path)
    return run


# ---------------------------------------------------------------- the document


def document_of(
    plan: Plan, results: Mapping[str, Rounds], complete: int, interrupted: bool, seed: int
) -> dict[str, Any]:
    """compare.json of the complete rounds."""
    baseline = plan.arms[0].name
    arms = {name: _work(rounds.documents) for name, rounds in results.items()}
    metrics = {}
    for metric, (_, _, higher) in METRICS.items():
        base = results[baseline].values(metric, complete)
        entries = {
            name: _entry(base, rounds.values(metric, complete), higher, plan.same_within, name == baseline)
            for name, rounds in results.items()
        }
        if any(entry["value"] is not None for entry in entries.values()):
            metrics[metric] = entries
    return {
        "format": FORMAT,
        "arms": arms,
        "rounds": complete,
        "baseline": baseline,
        "same_within": plan.same_within,
        "seed": seed,
        "interrupted": interrupted,
        "different_work": different_work(arms, baseline),
        "metrics": metrics,
    }


def _work(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an arm was asked for and did, over all its rounds."""

    def total(key: str) -> int | None:
        values = [document["metrics"].get(key) for document in documents]
        return None if any(value is None for value in values) else sum(values)

    server = dict(documents[0]["server"]) if documents else {}
    return {
        "server": {key: server.get(key) for key in ("url", "model", "owned_by", "version")},
        "requests": sum(document["counts"]["started"] for document in documents),
        "failed": sum(document["counts"]["failed"] for document in documents),
        "input_tokens": total("input_tokens"),
        "output_tokens": total("output_tokens"),
        "output_tokens_asked": total("output_tokens_asked"),
        "valid": all(document["validity"]["valid"] for document in documents),
    }


def different_work(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> list[str]:
    """What makes the ratios unfair, in words; empty when all did the same."""
    base, found = arms[baseline], []
    for name, arm in arms.items():
        if arm["failed"]:
            found.append(f"{name}: {arm['failed']} of {arm['requests']} requests failed; they are in no figure")
        if name == baseline:
            continue
        for key, label in (("requests", "requests"), ("input_tokens", "input"), ("output_tokens", "output")):
            here, there = arm[key], base[key]
            if here is None or there is None:
                found.append(f"{name} or {baseline} does not count its {label.removesuffix('s')} tokens")
            elif abs(here - there) > 0.01 * there:
                unit = "" if key == "requests" else " tokens"
                found.append(f"{name} did {here} {label}{unit}, {baseline} {there}")
        if arm["server"]["model"] != base["server"]["model"]:
            found.append(f"{name} served {arm['server']['model']}, {baseline} {base['server']['model']}")
    return found


def _entry(
    base: Sequence[float | None], values: Sequence[float | None], higher: bool, same_within: float, is_base: bool
) -> dict[str, Any]:
    """{value, rounds, ratio, low, high, verdict, detectable, rounds_needed}: null for what cannot be said."""
    known = [value for value in values if value is not None and value > 0]
    whole = len(known) == len(values) and bool(known)
    entry: dict[str, Any] = {
        "value": math.exp(sum(map(math.log, known)) / len(known)) if whole else None,
        "rounds": list(values),
        "ratio": 1.0 if is_base and whole else None,
        "low": None,
        "high": None,
        "verdict": "baseline" if is_base else "unknown",
        "detectable": None,
        "rounds_needed": None,
    }
    there = [value for value in base if value is not None and value > 0]
    if is_base or not whole or len(there) != len(known):
        return entry
    entry["ratio"] = math.exp(sum(math.log(v / b) for v, b in zip(known, there, strict=True)) / len(known))
    estimate = log_ratio_interval(there, known)
    if estimate is None:
        entry["verdict"] = "one round: no interval"
        return entry
    entry |= {"low": estimate.low, "high": estimate.high, "detectable": estimate.detectable}
    entry["verdict"] = verdict(estimate.low, estimate.high, higher, same_within)
    if entry["verdict"] == "not resolved":
        entry["rounds_needed"] = estimate.rounds_needed
    return entry


def verdict(low: float, high: float, higher_is_better: bool, same_within: float) -> str:
    """What the 95 % interval low..high of arm / baseline says."""
    if 1 / (1 + same_within) <= low and high <= 1 + same_within:
        return f"same within {100 * same_within:g} %"
    if low > 1:
        return "faster" if higher_is_better else "slower"
    if high < 1:
        return "slower" if higher_is_better else "faster"
    return "not resolved"


# ---------------------------------------------------------------- as text


def text_of(document: Mapping[str, Any]) -> str:
    """The table: a ratio stands beside both values and the baseline's name."""
    baseline = document["baseline"]
    lines = [
        f"{name}: {arm['server']['model']} at {arm['server']['url']}, {arm['requests']} requests, "
        f"{arm['failed']} failed, {number(arm['input_tokens'])} tokens in, {number(arm['output_tokens'])} out"
        for name, arm in document["arms"].items()
    ]
    lines += [f"! not the same work: {text}" for text in document["different_work"]]
    lines += [
        f"! {name}: INVALID in a round, the client was the bottleneck: see its report"
        for name, arm in document["arms"].items()
        if not arm["valid"]
    ]
    if not document["rounds"]:
        return "\n".join([*lines, "no round was complete: nothing to compare"])
    rows = [["metric", "arm", "value", f"{baseline} (baseline)", "ratio", "95 % interval", "verdict"]]
    for metric, entries in document["metrics"].items():
        for name, entry in entries.items():
            if name == baseline:
                continue
            interval = f"{number(entry['low'])} to {number(entry['high'])}" if entry["low"] is not None else "-"
            said = entry["verdict"]
            if said == "not resolved":
                said += f": {(entry['detectable'] - 1):.1%} would have been seen"
                if entry["rounds_needed"]:
                    said += f", {entry['rounds_needed']} rounds would settle it"
            rows.append(
                [
                    metric,
                    name,
                    number(entry["value"]),
                    number(entries[baseline]["value"]),
                    f"{number(entry['ratio'])} x",
                    interval,
                    said,
                ]
            )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    table = [
        "  ".join(
            cell.ljust(w) if i in (0, 1) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        )
        + f"  {row[6]}"
        for row in rows
    ]
    rounds = document["rounds"]
    return "\n".join(
        [
            *lines,
            "",
            *table,
            "",
            f"{rounds} rounds{' (interrupted)' if document['interrupted'] else ''}; values are geometric means of the "
            "rounds, ratios of the same rounds; intervals by Student t of their logs; each verdict errs in 1 of 20",
        ]
    )


def _write(path: Path, document: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.part")
    run_folder.write_synced(partial, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    partial.replace(path)

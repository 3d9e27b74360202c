"""`loadgen compare`: is B faster than A, by how much, and is that more than noise?

    loadgen compare A=http://127.0.0.1:8000 B=http://127.0.0.1:8100 --concurrency 16 --rounds 5
    loadgen compare old=http://127.0.0.1:8000 new=http://127.0.0.1:8100 --start old='...' --start new='...' --rate 2

A round loads every arm twice, forth and back (A B B A), so that a machine which slowly warms up or fills up favours
nobody; who begins a round is drawn by lot, so that no rhythm of the machine can. A round's figure of an arm is the
geometric mean of its two loads. The round is the unit of replication: it is compared with the same round of the
baseline, the first arm. docs/compare.md has what other orders do to the intervals.

All arms get the same requests, and every load of an arm gets other ones: a prefix cache that has seen a prompt must
not help. (Arms up at one address are one server: there each gets its own, of the same kind.) Arms with --start are
started for their turn and stopped after it; the others are up all the time.

The folder: compare.json (`"format": "loadgen.compare/1"`), report.html, round-N/ARM-1 and ARM-2 with a run folder each,
logs/. Verdicts are in verdicts.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadgen import run_folder
from loadgen.audit import audit
from loadgen.metrics import summarize
from loadgen.options import Options, UnusableServer, UsageError
from loadgen.page import write_page
from loadgen.progress import Bar
from loadgen.record import Run
from loadgen.report import columns_of, number
from loadgen.run import INTERRUPTED, INVALID, OK, REQUESTS_FAILED, new_folder
from loadgen.servers import Server
from loadgen.target import base_url
from loadgen.verdicts import NOT_RESOLVED, judge
from loadgen.workers import run_load

FORMAT = "loadgen.compare/1"
LOADS = 2  # of an arm in a round
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
    rounds: int = 5  # of two loads of each arm
    same_within: float = 0.03  # as a share: 0.03 = 3 %
    start_timeout_s: float = 600.0


@dataclass(slots=True)
class Rounds:
    """What came out of one arm: the run.json of each load, LOADS a round."""

    documents: list[dict[str, Any]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def values(self, metric: str, count: int) -> list[float | None]:
        """A figure for each of the first `count` rounds; None where a load had none."""
        key, percentile, _ = METRICS[metric]
        loads = [document["metrics"].get(key) for document in self.documents[: LOADS * count]]
        figures = [value[percentile] if percentile and value is not None else value for value in loads]
        return [_geometric_mean(figures[i : i + LOADS]) for i in range(0, len(figures), LOADS)]


def _geometric_mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None and figure > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known and len(known) == len(figures) else None


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


def order_of(arms: int, round_number: int, seed: int) -> list[int]:
    """The turns of a round: the arms in an order drawn by lot, and back."""
    generator = np.random.default_rng([seed, round_number])
    forth = [int(arm) for arm in generator.permutation(arms)]
    return [*forth, *reversed(forth)]


def seed_of(plan: Plan, seed: int, arm: int, round_number: int, load: int) -> int:
    """The seed of an arm's load: the same for all arms, never twice; of its own where two arms are one server (servers
    that are started in turn may share an address)."""
    servers = [base_url(other.url) if other.start is None else other.name for other in plan.arms]
    number_ = LOADS * (round_number - 1) + load
    return seed + number_ + LOADS * plan.rounds * servers[:arm].count(servers[arm])


# ---------------------------------------------------------------- the command


def compare(plan: Plan) -> int:
    """Run the rounds, print the table; the exit status of a run.

    Raises UsageError or UnusableServer; when rounds were complete by then, after writing and printing them.
    """
    options = plan.load
    seed = options.seed if options.seed is not None else secrets.randbits(30)
    folder = new_folder(options.out, "compare-" + "-".join(arm.name for arm in plan.arms))
    results = {arm.name: Rounds() for arm in plan.arms}
    complete = 0
    interrupted = False
    error: UnusableServer | UsageError | None = None
    try:
        for round_number in range(1, plan.rounds + 1):
            _round(plan, seed, round_number, folder, results)
            complete = round_number
    except KeyboardInterrupt:
        interrupted = True
    except (UnusableServer, UsageError) as stopped:
        if not complete:
            raise
        error = stopped
    if not any(rounds.folders for rounds in results.values()):
        return INTERRUPTED
    document = document_of(plan, results, complete, interrupted, seed)
    run_folder.write_document(folder / "compare.json", document)
    _show(options, folder, document, results)
    if error is not None:
        raise error
    if interrupted:
        return INTERRUPTED
    if any(arm["invalid_loads"] for arm in document["arms"].values()):
        return INVALID
    failed = sum(arm["failed"] for arm in document["arms"].values())
    return REQUESTS_FAILED if failed > options.max_failures else OK


def _show(options: Options, folder: Path, document: Mapping[str, Any], results: Mapping[str, Rounds]) -> None:
    shown = [(name, rounds.folders[-1]) for name, rounds in results.items() if rounds.folders]
    write_page(
        [path for _, path in shown],
        folder / "report.html",
        names=[f"{name}, last load" for name, _ in shown],
        comparison=document if document["rounds"] else None,
        texts={"Was it the same work?": "\n".join(work_lines(document))},
        title=f"loadgen compare: {', '.join(results)}",
    )
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        return
    if not options.quiet:
        click.echo(text_of(document))
    click.echo(f"{'' if options.quiet else 'records and report: '}{folder}")


def _round(plan: Plan, seed: int, round_number: int, folder: Path, results: Mapping[str, Rounds]) -> None:
    """Every arm forth and back. Raises KeyboardInterrupt when a load was interrupted."""
    loads = dict.fromkeys(range(len(plan.arms)), 0)
    turns = order_of(len(plan.arms), round_number, seed)
    for index, turn in itertools.groupby(turns):  # the arm at the turning point goes twice on one start
        arm = plan.arms[index]
        with _started(plan, arm, folder):
            for _ in turn:
                loads[index] += 1
                options = plan.load.replace(
                    url=arm.url, seed=seed_of(plan, seed, index, round_number, loads[index] - 1)
                )
                if arm.start is None and results[arm.name].folders:  # warm since the round before
                    options = options.replace(warmup=1 if options.warmup is None else min(1, options.warmup))
                label = f"round {round_number}/{plan.rounds} {arm.name} {loads[index]}/{LOADS}"
                path = folder / f"round-{round_number}" / f"{arm.name}-{loads[index]}"
                if _load(options, label, path, results[arm.name]).interrupted:
                    raise KeyboardInterrupt


@contextlib.contextmanager
def _started(plan: Plan, arm: Arm, folder: Path) -> Iterator[None]:
    if arm.start is None:
        yield
        return
    log = folder / "logs" / f"{arm.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with Server(arm.name, arm.start, arm.url, log, timeout_s=plan.start_timeout_s, quiet=plan.load.quiet):
        yield


def _load(options: Options, label: str, path: Path, rounds: Rounds) -> Run:
    """One load of one arm; its run folder is the record."""
    run = run_load(options, progress=None if options.quiet else Bar(label))
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds.documents.append(run_folder.save(path, run, summarize(run, options.slo), audit(run).as_dict()))
    rounds.folders.append(path)
    return run


# ---------------------------------------------------------------- the document


def document_of(
    plan: Plan, results: Mapping[str, Rounds], complete: int, interrupted: bool, seed: int
) -> dict[str, Any]:
    """compare.json of the complete rounds; where there is none, it says what was done until then."""
    baseline = plan.arms[0].name
    arms = {name: _work(rounds.documents[: LOADS * complete or None]) for name, rounds in results.items()}
    figures = {}
    for metric in METRICS:
        values = {name: rounds.values(metric, complete) for name, rounds in results.items()}
        if any(value is not None for rounds in values.values() for value in rounds):
            figures[metric] = values
    different = different_work(arms, baseline) if complete else {}
    for name, arm in arms.items():
        arm["same_work"] = not different.get(name) and not arms[baseline]["failed"]
    return {
        "format": FORMAT,
        "arms": arms,
        "rounds": complete,
        "loads_per_round": LOADS,
        "baseline": baseline,
        "same_within": plan.same_within,
        "seed": seed,
        "interrupted": interrupted,
        "different_work": [text for found in different.values() for text in found],
        "metrics": judge(
            figures,
            baseline=baseline,
            higher_is_better={metric: higher for metric, (_, _, higher) in METRICS.items()},
            same_within=plan.same_within,
        ),
    }


def _work(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an arm was asked for and did, over all loads of the complete rounds."""

    def total(key: str) -> int | None:
        values = [document["metrics"].get(key) for document in documents]
        return None if any(value is None for value in values) else sum(values)

    server = dict(documents[0]["server"]) if documents else {}
    return {
        "server": {key: server.get(key) for key in ("url", "model", "owned_by", "version")},
        "requests": sum(document["counts"]["started"] for document in documents),
        "failed": sum(document["counts"]["failed"] for document in documents),
        "input_tokens": total("input_tokens"),
        "input_tokens_cached": total("input_tokens_cached"),
        "output_tokens": total("output_tokens"),
        "output_tokens_asked": total("output_tokens_asked"),
        "output_tokens_estimated": total("output_tokens_estimated"),
        "loads": len(documents),
        "invalid_loads": sum(not document["validity"]["valid"] for document in documents),
    }


def different_work(arms: Mapping[str, Mapping[str, Any]], baseline: str) -> dict[str, list[str]]:
    """By arm, what makes its ratios unfair, in words; empty when all did the same. Lengths may differ by 1 %."""
    base = arms[baseline]
    result: dict[str, list[str]] = {}
    for name, arm in arms.items():
        found = result[name] = []
        if arm["failed"]:
            found.append(f"{name}: {arm['failed']} of {arm['requests']} requests failed; they are in no figure")
        if arm["output_tokens_estimated"]:
            found.append(f"{name} gave no token counts: its output tokens are counted events")
        if name == baseline:
            continue
        for key, label in (("requests", "requests"), ("input_tokens", "input"), ("output_tokens", "output")):
            here, there = arm[key], base[key]
            unit = "" if key == "requests" else " tokens"
            if here is None or there is None:
                found.append(f"{name} or {baseline} does not count its {label}{unit}")
            elif abs(here - there) > 0.01 * there:
                found.append(f"{name} did {here} {label}{unit}, {baseline} {there}")
        here, there = arm["input_tokens_cached"] or 0, base["input_tokens_cached"] or 0
        if abs(here - there) > 0.05 * (base["input_tokens"] or 0):
            found.append(f"{name} took {here} prompt tokens from its prefix cache, {baseline} {there}")
        if arm["server"]["model"] != base["server"]["model"]:
            found.append(f"{name} served {arm['server']['model']}, {baseline} {base['server']['model']}")
    return {name: found for name, found in result.items() if found}


# ---------------------------------------------------------------- as text


def text_of(document: Mapping[str, Any]) -> str:
    """The work first, then the table: a ratio stands beside both values and the baseline's name."""
    lines = work_lines(document)
    if not document["rounds"]:
        return "\n".join([*lines, "no round was complete: nothing to compare"])
    baseline = document["baseline"]
    rows = [["metric", f"{baseline} (baseline)", "value", "arm", "ratio", "95 % interval"]]
    verdicts = ["verdict"]
    for metric, entries in document["metrics"].items():
        for name, entry in entries.items():
            if name == baseline:
                continue
            interval = f"{number(entry['low'])} to {number(entry['high'])}" if entry["low"] is not None else "-"
            ratio = f"{number(entry['ratio'])} x {baseline}" if entry["ratio"] is not None else "-"
            rows.append([metric, number(entries[baseline]["value"]), number(entry["value"]), name, ratio, interval])
            verdicts.append(_said(entry, document["arms"][name]["same_work"]))
    table = [f"{line}  {said}" for line, said in zip(columns_of(rows), verdicts, strict=True)]
    return "\n".join([*lines, "", *table, "", *_notes(document)])


def work_lines(document: Mapping[str, Any]) -> list[str]:
    """What every arm did, and what was not the same."""
    arms = document["arms"]
    lines = []
    for name, arm in arms.items():
        if arm["loads"]:
            server, tokens = arm["server"], [number(arm[key]) for key in ("input_tokens", "output_tokens")]
            done = f"{arm['requests']} requests, {arm['failed']} failed, {tokens[0]} tokens in, {tokens[1]} out"
            lines.append(f"{name}: {server['model']} at {server['url']}, {done}")
    lines += [f"! not the same work: {text}" for text in document["different_work"]]
    lines += [
        f"! {name}: {arm['invalid_loads']} of {arm['loads']} loads are INVALID, the client was measured: see run.json"
        for name, arm in arms.items()
        if arm["invalid_loads"]
    ]
    return lines


def _said(entry: Mapping[str, Any], same_work: bool) -> str:
    said = str(entry["verdict"])
    if said == NOT_RESOLVED:
        if entry["low"] > 1 or entry["high"] < 1:
            said += ": by itself it would be, but among so many figures one looks so by chance"
        else:
            said += f": {entry['detectable'] - 1:.1%} would have been seen"
        needed = entry["rounds_needed"]
        said += f"; {needed} rounds would settle it" if needed else "; more than 1000 rounds would settle it"
    return said if same_work else f"{said} (! not the same work)"


def _notes(document: Mapping[str, Any]) -> list[str]:
    rounds = "1 round" if document["rounds"] == 1 else f"{document['rounds']} rounds"
    cut = " (interrupted)" if document["interrupted"] else ""
    return [
        f"{rounds}{cut} of {document['loads_per_round']} loads of each arm; values are geometric means of the rounds.",
        "Intervals: Student t of the rounds' log ratios, 95 % for each line by itself. faster and slower are said for",
        "the table as a whole: where nothing differs, 95 tables of 100 say neither.",
    ]

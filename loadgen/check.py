"""`loadgen check`: what this client can do on this machine, against a mock server that logs the truth.

    ceiling    64 streams as fast as they go: events/s, and the client's CPU time an event
    accuracy   many streams of 20 ms a token: TTFT and gaps as measured minus as sent, the stamp of every event
    lateness   an open loop of 200 requests/s: send - plan

Errors are against the server's own stamps (CLOCK_MONOTONIC, taken right before each send), matched by request id; TTFT
counts from the moment the server had read the request. The server is a Python process: the ceiling may be its own, and
then the client's CPU share of a core is below 1. On a machine with more than one core the server gets one to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import click
import numpy as np
import orjson

from loadgen.audit import audit
from loadgen.options import Options, Span, UnusableServer
from loadgen.record import Run
from loadgen.report import columns_of, number
from loadgen.run import INVALID, OK
from loadgen.workers import run_load

FORMAT = "loadgen.check/1"
_TOKENS = 128


@contextlib.contextmanager
def mock_server(ttft_ms: float, jitter_ms: float, itl_ms: float) -> Iterator[str]:
    """A mock server process, on a core of its own where there are two or more; gives its URL."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "loadgen.mock_server", "--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)]
    command += ["--ttft-jitter-ms", str(jitter_ms)]
    if len(cores) > 1:
        command += ["--core", str(cores[0])]
        os.sched_setaffinity(0, cores[1:])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise UnusableServer("the mock server did not start: see its message above")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.sched_setaffinity(0, cores)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def truth_of(url: str) -> dict[str, dict[str, Any]]:
    """What the mock server says it did since it was last asked, by request id."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/__truth", timeout=60) as answer:
        return {entry["id"]: entry for entry in json.loads(answer.read())}


def errors_ms(run: Run, truth: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Measured minus true, ms: {ttft_p50, ttft_p99, gap_p99, stamp_p99, stamp_max, matched, missing_events}.

    ttft_*, gap_p99: the difference of the two percentiles, what a reader of the report gets wrong. stamp_*: of each
    event, the client's stamp minus the server's right before its send.
    """
    ttft, true_ttft, gaps, true_gaps, stamps = [], [], [], [], []
    matched = missing = 0
    for record in run.measured:
        entry = truth.get(record.id)
        if entry is None or not record.ok or record.sent_ns is None:
            continue
        matched += 1
        seen, sent = np.frombuffer(record.event_stamps_ns, np.int64), np.array(entry["sent_ns"], np.int64)
        if len(seen) != len(sent):
            missing += 1
            continue
        ttft.append(seen[0] - record.sent_ns)
        true_ttft.append(sent[0] - entry["read_ns"])
        gaps.append(np.diff(seen))
        true_gaps.append(np.diff(sent))
        stamps.append(seen - sent)
    if not stamps:
        return {"matched": matched, "missing_events": missing}

    def apart(values: Any, true: Any, q: float) -> float:
        return float(np.quantile(values, q) - np.quantile(true, q)) / 1e6

    every, all_gaps, all_true = np.concatenate(stamps), np.concatenate(gaps), np.concatenate(true_gaps)
    return {
        "matched": matched,
        "missing_events": missing,
        "ttft_p50": apart(ttft, true_ttft, 0.5),
        "ttft_p99": apart(ttft, true_ttft, 0.99),
        "gap_p99": apart(all_gaps, all_true, 0.99) if len(all_gaps) else None,
        "stamp_p99": float(np.quantile(every, 0.99)) / 1e6,
        "stamp_max": float(every.max()) / 1e6,
    }


def check(streams: int, rate: float, as_json: bool) -> int:
    """Run the three loads and print what came out; INVALID when the client could not keep to the plan of one."""
    load = Options(input_tokens=Span(32, 32), output_tokens=Span(_TOKENS, _TOKENS), warmup=1, scrape=False, seed=1)
    rows = []
    with mock_server(0, 0, 0) as url:
        rows.append(_measure("ceiling", load.replace(url=url, concurrency=64, requests=2048), url))
    with mock_server(50, 20, 20) as url:
        rows.append(_measure("accuracy", load.replace(url=url, concurrency=streams, requests=2 * streams), url))
    with mock_server(50, 20, 20) as url:
        lengths = Span(32, 32)
        open_loop = load.replace(url=url, rate=rate, requests=round(5 * rate), output_tokens=lengths)
        rows.append(_measure("lateness", open_loop, url))
    document = {
        "format": FORMAT,
        "cores": len(os.sched_getaffinity(0)),
        "loads": {row.pop("name"): row for row in rows},
    }
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    else:
        click.echo(_text(document))
    return OK if all(row["valid"] for row in rows) else INVALID


def _measure(name: str, options: Options, url: str) -> dict[str, Any]:
    truth_of(url)
    run = run_load(options)
    validity = audit(run)
    events = sum(record.num_events for record in run.measured)
    seconds = (run.end_ns - run.start_ns) / 1e9
    lags = [r.sent_ns - r.planned_ns for r in run.measured if r.sent_ns is not None]
    return {
        "name": name,
        "streams": run.usage.max_in_flight,
        "requests": len(run.measured),
        "failed": sum(not record.ok for record in run.measured),
        "events_per_s": events / seconds,
        "cpu_us_per_event": run.usage.cpu_s / events * 1e6 if events else None,
        "core_share": run.usage.cpu_s / run.usage.wall_s,
        "lag_p99_ms": float(np.quantile(lags, 0.99)) / 1e6 if lags else None,
        "error_ms": errors_ms(run, truth_of(url)),
        "kernel_stamps": run.usage.kernel_stamps,
        "valid": validity.valid,
        "reasons": [reason.what for reason in validity.reasons],
    }


def _text(document: Mapping[str, Any]) -> str:
    head = ["load", "streams", "events/s", "CPU us/event", "of a core", "send lag p99 ms", "TTFT error p50", "p99"]
    rows = [[*head, "gap error p99", "stamp error p99 ms"]]
    lines = []
    for name, row in document["loads"].items():
        error = row["error_ms"]
        keys = ("ttft_p50", "ttft_p99", "gap_p99", "stamp_p99")
        rows.append(
            [
                name,
                str(row["streams"]),
                f"{row['events_per_s']:.0f}",
                number(row["cpu_us_per_event"]),
                f"{row['core_share']:.0%}",
                number(row["lag_p99_ms"]),
                *(number(error.get(key)) for key in keys),
            ]
        )
        lines += [f"! {name}: INVALID: {reason}" for reason in row["reasons"]]
        if row["failed"] or error.get("missing_events"):
            lines.append(f"! {name}: {row['failed']} requests failed, {error.get('missing_events')} lost events")
    if not all(row["kernel_stamps"] for row in document["loads"].values()):
        lines.append("! the kernel gives no receive stamps here: read times are used")
    return "\n".join([*columns_of(rows), *lines, "errors: measured minus what the server's own stamps say"])

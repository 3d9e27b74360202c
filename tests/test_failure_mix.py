"""Thousands of requests with 5 % of each kind of failure mixed in: every one is counted, and in its own place.

python -m tests.test_failure_mix 10000 wire        the same at full size, with what was counted printed
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from loadgen.audit import audit
from loadgen.metrics import summarize
from loadgen.options import Options, Span
from loadgen.record import FailureKind, Run
from loadgen.workers import run_load
from tests.scripted_server import (
    CLOSE,
    DONE,
    END,
    HEAD,
    RESET,
    Asked,
    ScriptedServer,
    delta,
    good,
    in_chunk,
    plain,
    sse,
    usage,
)

Steps = Sequence[tuple[float, bytes | str]]
IDLE_S = 1.0
TOTAL_S = 2.5
TOKENS = 4

# what the server does, and what must become of it; each in 5 % of the requests
FAULTS = (
    "status 500", "status 429", "error in the stream", "cut off", "reset", "closed behind the head", "empty", "silence",
    "endless", "no json", "no http", "broken chunk", "too large",
)  # fmt: skip
KIND = {
    "status 500": FailureKind.STATUS,
    "status 429": FailureKind.STATUS,
    "error in the stream": FailureKind.STREAM_ERROR,
    "cut off": FailureKind.CUT_OFF,
    "reset": FailureKind.CUT_OFF,
    "closed behind the head": FailureKind.CUT_OFF,
    "empty": FailureKind.EMPTY,
    "silence": FailureKind.SILENCE,
    "endless": FailureKind.TOTAL_TIMEOUT,
    "no json": FailureKind.PROTOCOL,
    "no http": FailureKind.PROTOCOL,
    "broken chunk": FailureKind.PROTOCOL,
    "too large": FailureKind.TOO_LARGE,
}


def fate(request_id: str) -> str:
    """What becomes of a request, by its id alone: the same in the server and in the test."""
    share = random.Random(request_id).random()
    return FAULTS[int(share / 0.05)] if share < 0.05 * len(FAULTS) else "good"


def reply(number: int, a: Asked) -> Steps:
    def text(wait_ms: float = 1) -> tuple[float, bytes]:
        return wait_ms, delta(a, content="w")

    match fate(a.headers["x-request-id"]):
        case "good":
            return good(a, 5, TOKENS, 2)
        case "status 500":
            return [(0, plain(500, {"error": {"message": "x"}}))]
        case "status 429":
            return [(0, plain(429, {"error": {"message": "slow down"}}, "Retry-After: 9\r\n"))]
        case "error in the stream":
            return [(0, HEAD), text(), text(), (0, in_chunk(sse({"error": {"message": "engine died"}}))), (0, END)]
        case "cut off":
            return [(0, HEAD), text(), (0, END)]
        case "reset":
            return [(0, HEAD), text(), text(), text(), (20, RESET)]
        case "closed behind the head":
            return [(0, HEAD), (1, CLOSE)]
        case "empty":
            return [(0, HEAD), (0, usage(a, 0)), (0, DONE), (0, END)]
        case "silence":
            return [(0, HEAD), text(), (60_000, END)]
        case "endless":
            return [(0, HEAD), *[text(100)] * 600, (0, END)]
        case "no json":
            return [(0, HEAD), text(), (0, in_chunk(b"data: {no json\n\n")), (0, DONE), (0, END)]
        case "no http":
            return [(0, b"220 mail.example ESMTP\r\n\r\n"), (0, CLOSE)]
        case "too large":
            return [(0, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"), (0, CLOSE)]
        case _:
            return [(0, HEAD), text(), (20, b"no size\r\n"), (0, CLOSE)]


def load(requests: int, transport: str) -> Run:
    with ScriptedServer(reply) as server:
        return run_load(
            Options(
                url=server.url,
                requests=requests,
                concurrency=min(256, requests // 4),
                warmup=0,
                transport=transport,
                seed=requests,
                scrape=False,
                input_tokens=Span(8, 8),
                idle_timeout_s=IDLE_S,
                request_timeout_s=TOTAL_S,
            )
        )


def check(run: Run, requests: int) -> Counter[str]:
    """Every request is where it belongs; gives how many had which fate."""
    fates = Counter(fate(record.id) for record in run.records)
    summary = summarize(run)
    counts, metrics = summary["counts"], summary["metrics"]
    wanted: Counter[str] = Counter()
    for name, count in fates.items():
        if name != "good":
            wanted[str(KIND[name])] += count
    for record in run.records:
        kind = record.failure.kind if record.failure else None
        assert kind is KIND.get(fate(record.id)), (fate(record.id), record.failure)
    assert dict(counts["failures"]) == dict(wanted)
    assert counts["started"] == requests == counts["ok"] + counts["failed"] and counts["unfinished"] == 0
    assert counts["ok"] == fates["good"] and counts["failed"] == sum(wanted.values())
    assert sum(reason["n"] for reason in counts["failure_reasons"]) == counts["failed"]

    # the figures are of the successes alone
    good_ones = [record for record in run.records if record.ok]
    ttft_ms = np.array([(r.first_token_ns - r.planned_ns) / 1e6 for r in good_ones if r.first_token_ns is not None])
    assert metrics["ttft_ms"]["n"] == metrics["e2e_ms"]["n"] == len(ttft_ms) == counts["ok"]
    assert metrics["ttft_ms"]["mean"] == pytest.approx(ttft_ms.mean())
    assert metrics["gap_ms"]["n"] == (TOKENS - 1) * counts["ok"]
    assert metrics["output_tokens"] == TOKENS * counts["ok"]
    partial = metrics["partial_tokens_of_failures"]
    assert partial == sum(record.num_events for record in run.records if not record.ok) > 0
    assert metrics["error_share"] == pytest.approx(counts["failed"] / requests)

    # and beside them those with failures as +infinity: a percentile beyond the share of successes is not known
    infinite = metrics["ttft_ms_failures_as_infinity"]
    everything = np.sort(np.concatenate([ttft_ms, np.full(counts["failed"], np.inf)]))
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        if share * requests > counts["ok"] + 1:
            assert infinite[name] is None
        elif share * requests < counts["ok"] - 1:
            assert infinite[name] == pytest.approx(np.quantile(everything, share, method="hazen"), rel=0.2)
    return fates


@pytest.mark.parametrize("transport", ["wire", "aiohttp"])
def test_every_failure_is_counted_in_its_own_place(transport: str) -> None:
    fates = check(load(400, transport), 400)
    assert all(fates[name] for name in FAULTS)


if __name__ == "__main__":
    size, name = int(sys.argv[1]), sys.argv[2]
    began = time.monotonic()
    done = load(size, name)
    told = check(done, size)
    print(f"{size:,} requests through {name} in {time.monotonic() - began:.1f} s: {dict(told)}")
    totals = summarize(done)["counts"]
    print({key: totals[key] for key in ("started", "ok", "failed", "unfinished", "reopened", "failures")})
    print("valid" if (verdict := audit(done)).valid else [reason.what for reason in verdict.reasons])

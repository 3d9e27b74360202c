"""Runs made by hand for tests of metrics, reports and pages: a record is its stamps in ms after the run's start."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from loadgen.record import ClientUsage, Failure, FailureKind, Phase, RequestRecord, Run

START_NS = 5_000_000_000_000_001  # odd, so that an absolute stamp taken for a relative one shows


def ns(ms: float) -> int:
    return START_NS + round(ms * 1e6)


def record(
    number: int,
    start_ms: float,
    token_ms: Sequence[float] = (),
    *,
    sent_ms: float | None = None,
    end_ms: float | None = None,
    output_tokens: int | None = None,
    phase: Phase = Phase.MEASURED,
    failure: Failure | None = None,
    **changes: Any,
) -> RequestRecord:
    """A request of events at token_ms (after the run's start); usage of the server when output_tokens is given."""
    last = token_ms[-1] if token_ms else None
    end = end_ms if end_ms is not None else last if last is not None else start_ms
    values: dict[str, Any] = {
        "id": f"r{number}",
        "phase": phase,
        "planned_ns": ns(start_ms),
        "sent_ns": ns(start_ms if sent_ms is None else sent_ms),
        "first_byte_ns": ns(token_ms[0]) if token_ms else None,
        "first_token_ns": ns(token_ms[0]) if token_ms else None,
        "first_event_ns": ns(token_ms[0]) if token_ms else None,
        "first_answer_ns": ns(token_ms[0]) if token_ms else None,
        "last_token_ns": None if last is None else ns(last),
        "end_ns": ns(end),
        "event_stamps_ns": array("q", map(ns, token_ms)),
        "shared_stamps": 0,
        "prompt_tokens": 4,
        "output_tokens": len(token_ms) if output_tokens is None else output_tokens,
        "tokens_from": "events" if output_tokens is None else "server",
        "finish_reason": "length",
        "status": 200,
        "failure": failure,
        "text": None,
        "kernel_stamps": True,
        "reopened": False,
        "asked_input_tokens": 4,
        "asked_output_tokens": len(token_ms) if output_tokens is None else output_tokens,
    }
    return RequestRecord(**{**values, **changes})


def failed(
    number: int, start_ms: float, end_ms: float, kind: FailureKind, detail: str, **changes: Any
) -> RequestRecord:
    """A request that failed; status and events by `changes`."""
    status = changes.pop("status", None)
    nothing = {"prompt_tokens": None, "output_tokens": None, "tokens_from": None, "finish_reason": None}
    failure = Failure(kind, detail, status)
    token_ms = changes.pop("token_ms", ())
    return record(
        number, start_ms, token_ms, end_ms=end_ms, failure=failure, **{"status": status, **nothing, **changes}
    )


def make_run(records: Sequence[RequestRecord], **changes: Any) -> Run:
    ends = [r.end_ns for r in records if r.phase is Phase.MEASURED and r.end_ns is not None]
    values: dict[str, Any] = {
        "options": {"url": "http://127.0.0.1:8000", "concurrency": 1, "rate": None, "trace": None, "headers": {}},
        "records": tuple(records),
        "start_ns": START_NS,
        "start_utc": "2026-01-02T03:04:05.000006+00:00",
        "end_ns": max(ends, default=START_NS),
        "usage": ClientUsage(
            cpu_s=0.1, wall_s=1.0, loop_lag_ns=(1000, 2000), transport="wire", kernel_stamps=True, max_in_flight=1
        ),
        "server": {"url": "http://127.0.0.1:8000", "model": "m"},
        "plan": {"seed": 7},
    }
    return Run(**{**values, **changes})

"""What is sent, and what happened. run_folder.py writes and reads the files that keep both.

Request is the plan of one request; RequestRecord is what became of it, built once at its end. None stands for
what did not happen, never 0. All times are integer ns of one monotonic clock; in a Run they are absolute, in the
files they count from the run's start (`start_monotonic_ns` in run.json).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

FORMAT = "loadgen.run/1"


class Phase(enum.StrEnum):
    COLD = "cold"  # the very first request, alone
    WARMUP = "warmup"
    MEASURED = "measured"


class FailureKind(enum.StrEnum):
    """Why a request failed. The line beside each is what the report prints, with the remedy."""

    REFUSED = "refused"
    CONNECT_TIMEOUT = "connect-timeout"
    TLS = "tls"
    STATUS = "status"
    STREAM_ERROR = "stream-error"
    CUT_OFF = "cut-off"
    EMPTY = "empty"
    SILENCE = "silence"
    TOTAL_TIMEOUT = "total-timeout"
    PROTOCOL = "protocol"
    TOO_LARGE = "too-large"
    ABORTED = "aborted"
    OUT_OF_DESCRIPTORS = "out-of-descriptors"


REMEDY: Mapping[FailureKind, str] = {
    FailureKind.REFUSED: "nobody listens there, or the connection was reset before an answer: is the server up?",
    FailureKind.CONNECT_TIMEOUT: "no connection within --connect-timeout: wrong address, firewall, or a full backlog",
    FailureKind.TLS: "the TLS handshake failed: check the certificate, or use http:// for a local server",
    FailureKind.STATUS: "the server answered with an error status: its message is in the detail",
    FailureKind.STREAM_ERROR: "the server reported an error inside a 200 stream: see its log",
    FailureKind.CUT_OFF: "the stream ended without finish_reason or [DONE]: the server or a proxy cut it",
    FailureKind.EMPTY: "[DONE] came without a token: the answer is empty and no reason was given",
    FailureKind.SILENCE: "nothing arrived within --idle-timeout: the server is stuck or the limit is too low",
    FailureKind.TOTAL_TIMEOUT: "not over within --request-timeout: raise it, or ask for fewer tokens",
    FailureKind.PROTOCOL: "the answer is not HTTP, or its events are not JSON: is this an OpenAI-compatible server?",
    FailureKind.TOO_LARGE: "a line or a body was larger than the client keeps: see the detail for the limit",
    FailureKind.ABORTED: "the client stopped before the answer was complete",
    FailureKind.OUT_OF_DESCRIPTORS: "the client ran out of file descriptors or local ports: raise `ulimit -n`",
}


@dataclass(frozen=True, slots=True)
class Failure:
    kind: FailureKind
    detail: str
    status: int | None = None  # HTTP status where there is one
    retry_after: str | None = None  # the Retry-After header as sent; never obeyed

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the plan. `body` is the JSON as it goes out, serialised before its time.

    planned_ns: ns after the start of its phase (open loop), or None (closed loop: when a slot asks for it).
    after, delay_ns: session pacing: start when all of these ids have ended, delay_ns after the end of the first of
        them, and not before planned_ns.
    make_body: for turns whose body needs the earlier answers; called with the records of `after` when it is due.
    """

    id: str
    phase: Phase
    path: str  # "/v1/completions" or "/v1/chat/completions"
    body: bytes
    planned_ns: int | None = None
    input_tokens: int | None = None  # asked for; None when unknown
    output_tokens: int | None = None  # max_tokens asked for
    after: tuple[str, ...] = ()
    delay_ns: int = 0
    make_body: Callable[[Mapping[str, RequestRecord]], bytes] | None = None
    session_open: bool = False  # a later request waits for this one
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request. Stamps are absolute monotonic ns; None = did not happen."""

    id: str
    phase: Phase
    planned_ns: int  # the start that latency counts from: the plan (open loop) or when the slot asked (closed loop)
    sent_ns: int | None  # just before the first byte was written
    first_byte_ns: int | None  # first byte of the answer
    first_token_ns: int | None  # first event with a token of any channel
    first_answer_ns: int | None  # first event with visible text (content), not reasoning or tool call
    last_token_ns: int | None
    end_ns: int | None  # the answer was known to be over ([DONE], end of body, or the failure)
    event_stamps_ns: array[int]  # array('q'): every token-bearing event
    shared_stamps: int  # of these, how many share a read with an earlier event of the same answer
    prompt_tokens: int | None  # the server's usage
    output_tokens: int | None  # the server's usage, else num_events
    tokens_from: str | None  # "server", "events" or None
    finish_reason: str | None
    status: int | None
    failure: Failure | None
    text: str | None  # all visible text; None unless it was asked for
    kernel_stamps: bool  # the kernel stamped every read
    reopened: bool  # a dead kept-alive connection was reopened once
    asked_input_tokens: int | None
    asked_output_tokens: int | None
    cached_tokens: int | None = None  # usage.prompt_tokens_details.cached_tokens
    reasoning_tokens: int | None = None
    first_event_ns: int | None = None  # first event with choices, a role-only one too: where some tools stop for TTFT
    tool_calls: str | None = None  # JSON text of the assembled tool calls; None unless text is kept
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def num_events(self) -> int:
        return len(self.event_stamps_ns)


def most_in_flight(records: Iterable[RequestRecord]) -> int:
    """The most requests that were sent and not over at any one time."""
    spans = [(r.sent_ns, r.end_ns) for r in records if r.sent_ns is not None and r.end_ns is not None]
    steps = [step for sent_ns, end_ns in spans for step in ((sent_ns, 1), (end_ns, -1))]
    return max(accumulate(change for _, change in sorted(steps)), default=0)


@dataclass(frozen=True, slots=True)
class ClientUsage:
    """What the client itself did while it measured: the raw material of audit.py."""

    cpu_s: float  # user + system, all workers
    wall_s: float
    loop_lag_ns: tuple[int, ...]  # sampled lateness of the event loop, ns
    transport: str  # "wire" or "aiohttp"
    kernel_stamps: bool
    num_workers: int = 1
    max_in_flight: int = 0  # requests that were sent and not over, at most
    reads: int = 0  # reads that brought bytes
    unread_bytes: int = 0  # left in sockets at the end
    num_connections: int = 0
    cores: int = 1  # cores this client may use
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """All that one load left behind: what metrics, audit, report and the run folder read."""

    options: Mapping[str, Any]  # the flags as used; no key, no secret header
    records: tuple[RequestRecord, ...]  # in order of plan; cold and warm-up first
    start_ns: int  # monotonic; the measured phase starts here (warm-up stamps are smaller)
    start_utc: str
    end_ns: int  # last measured record over, or the interrupt
    usage: ClientUsage
    interrupted: bool = False
    unfinished: int = 0  # started, not over when the run was stopped
    skipped: int = 0  # in the plan, never started
    server: Mapping[str, Any] = field(default_factory=dict)  # model, version, headers, as far as it says
    plan: Mapping[str, Any] = field(default_factory=dict)  # arrival, seeds, trace counters, prompt hash
    scrapes: tuple[Mapping[str, Any], ...] = ()  # lines of server_metrics.jsonl

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        return tuple(r for r in self.records if r.phase is Phase.MEASURED)

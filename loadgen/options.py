"""Options of one load: what every command that sends requests has in common. cli.py makes them from flags.

The key is not in here (it is read from OPENAI_API_KEY when a Target is made), so Options may be saved whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class UsageError(ValueError):
    """Flags that make no sense together, or a value out of range: one line that names the flag. Exit status 2."""


class UnusableServer(Exception):
    """The server could not be used at all: one line with the address that was tried. Exit status 2."""


@dataclass(frozen=True, slots=True)
class Span:
    """A length in tokens, drawn uniformly from low..high (both included); low == high is a fixed length."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits a request must meet, in ms; None = no limit. All that are set must hold."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))


@dataclass(frozen=True, slots=True)
class Options:
    url: str = "http://127.0.0.1:8000"  # as given; with or without /v1
    model: str | None = None  # None: the one that /v1/models lists
    endpoint: str = "completions"  # or "chat"
    concurrency: int | None = None  # closed loop; beside rate or trace: a cap on what is in flight
    rate: float | None = None  # requests/s, open loop
    arrival: str = "poisson"  # poisson, constant, gamma (with rate)
    burstiness: float = 1.0  # shape of the gamma; 1 = Poisson
    trace: str | None = None  # file
    trace_options: Mapping[str, Any] = field(default_factory=dict)  # see trace.py
    requests: int | None = None  # None with duration or trace: as many as fit
    duration_s: float | None = None  # stop starting requests after this
    warmup: int | None = None  # None: the concurrency, at least 1
    input_tokens: Span = Span(128, 128)
    output_tokens: Span = Span(128, 128)
    shared_prefix_tokens: int = 0
    prompts: str | None = None  # file: one prompt a line, or JSONL
    prompt_kind: str = "auto"  # auto, ids (token ids on /v1/completions), text
    seed: int | None = None  # None: drawn anew for each run, and recorded
    temperature: float = 0.0
    stop_at_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # merged into every body (constraints, top_p, ...)
    slo: Slo = Slo()
    workers: int = 1
    ray: str | None = None
    transport: str = "auto"
    connect_timeout_s: float | None = 10.0
    idle_timeout_s: float | None = 300.0
    request_timeout_s: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # from --header; values are masked when saved
    out: str | None = None
    save_text: bool = False
    json: bool = False
    quiet: bool = False
    max_failures: int = 0
    scrape: bool = True  # read /metrics of the server beside the load

    def replace(self, **changes: Any) -> Options:
        return dataclasses.replace(self, **changes)

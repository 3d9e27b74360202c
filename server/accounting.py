"""Where the server's time, tokens and rows went: one BatchRecord a batch, summed into Prometheus counters.

The generation thread is always in exactly one of these states, so per batch

    idle_s + fill_wait_s + wall_s  =  time since the batch before ended
    wall_s  =  prefill_s + decode_s + rest_s

and the rows and tokens add up exactly:

    row_steps  =  useful_row_steps + dead_row_steps
    prompt_tokens + padding_tokens  =  width * longest_prompt            (serial and static)
    output_tokens  =  useful_row_steps + first_tokens

With t = decode_s / steps (one decode step), rows = row_steps / steps, live = useful_row_steps / row_steps and
d = decode_s / (idle_s + fill_wait_s + wall_s), all of them sums over batches, by definition

    output_tokens per second  =  rows * live * d / t * (output_tokens / useful_row_steps)

The last factor is N / (N - 1) for answers of N tokens (the first comes out of the prefill), the same in every mode.
docs/reference-server.md lists the fields for readers outside. No torch, no HTTP: the standard library alone.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

KEPT_RECORDS = 1000


@dataclass(slots=True)
class BatchRecord:
    """One batch: serial and static from its forming to its last row; continuous: a stretch of at most 256 steps."""

    index: int = 0
    mode: str = ""
    started_s: float = 0.0  # monotonic clock of the server, s
    requests: int = 0  # rows that were requests; in continuous mode those that began in this stretch
    width: int = 0  # rows of the tensor; in continuous mode the largest number of rows in a step
    longest_prompt: int = 0  # tokens
    prompt_tokens: int = 0  # without padding
    padding_tokens: int = 0  # added on the left to make the prompts as long as the longest
    steps: int = 0  # decode steps; the prefill, which yields each row's first token, is none of them
    row_steps: int = 0  # sum over the decode steps of the rows in them
    useful_row_steps: int = 0  # those that gave a waiting request a token
    dead_row_steps: int = 0  # those of rows that were over, or whose client had gone
    first_tokens: int = 0  # tokens out of the prefill
    output_tokens: int = 0  # all tokens given to requests; eos counts as one
    aborted: int = 0  # rows whose client went away
    failed: int = 0  # rows ended by an exception
    idle_s: float = 0.0  # before the batch: nothing was waiting
    fill_wait_s: float = 0.0  # before the batch: waiting for more requests to fill it
    queue_wait_s: float = 0.0  # sum over the rows of (start - arrival)
    prefill_s: float = 0.0  # start of generate to the first token
    decode_s: float = 0.0  # first token to last token
    rest_s: float = 0.0  # the rest of wall_s: set-up and clearing away
    wall_s: float = 0.0  # start to end of the batch
    kv_bytes_reserved: int = 0  # at the end of the batch: the rectangle rows x longest row (or the paged pool in use)
    kv_bytes_used: int = 0  # of these, positions that some request's own tokens fill

    @property
    def step_s(self) -> float | None:
        """Mean time of a decode step, s; None without one."""
        return self.decode_s / self.steps if self.steps else None

    def as_dict(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "step_s": self.step_s}


# name of the counter -> (field of BatchRecord, help)
_COUNTERS = {
    "reference_rows_total": ("requests", "Rows of batches that were requests"),
    "reference_prompt_tokens_total": ("prompt_tokens", "Prompt tokens without padding"),
    "reference_padding_tokens_total": ("padding_tokens", "Padding tokens in front of shorter prompts"),
    "reference_output_tokens_total": ("output_tokens", "Tokens given to requests, eos included"),
    "reference_first_tokens_total": ("first_tokens", "Tokens that came out of a prefill"),
    "reference_decode_steps_total": ("steps", "Decode steps (the prefill is none)"),
    "reference_row_steps_total": ("row_steps", "Rows times decode steps"),
    "reference_useful_row_steps_total": ("useful_row_steps", "Row-steps that gave a waiting request a token"),
    "reference_dead_row_steps_total": ("dead_row_steps", "Row-steps of rows that were over already"),
    "reference_queue_wait_seconds_total": ("queue_wait_s", "Sum over requests of the wait before their batch"),
    "reference_idle_seconds_total": ("idle_s", "No request was waiting"),
    "reference_fill_wait_seconds_total": ("fill_wait_s", "Waiting for a batch to fill"),
    "reference_prefill_seconds_total": ("prefill_s", "Start of generate to the first token"),
    "reference_decode_seconds_total": ("decode_s", "First to last token of the batches"),
    "reference_rest_seconds_total": ("rest_s", "Time of batches that is neither prefill nor decode"),
    "reference_batch_seconds_total": ("wall_s", "Start to end of the batches"),
}


class Accounting:
    """Sums of all batches, the last 1000 records, and gauges. Written by the generation thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.gauges: dict[str, float] = {"reference_num_requests_running": 0, "reference_num_requests_waiting": 0}
        self.reset()

    def reset(self) -> None:
        """Forget everything but the gauges: called once the server is warm, so that warm-up is not counted."""
        with self._lock:
            self._records: deque[BatchRecord] = deque(maxlen=KEPT_RECORDS)
            self._sums: dict[str, float] = defaultdict(float)
            self._outcomes: dict[str, int] = {"ok": 0, "aborted": 0, "error": 0}
            self._step_s: dict[int, float] = defaultdict(float)
            self._steps: dict[int, int] = defaultdict(int)
            self._num_batches = 0

    def add(self, record: BatchRecord, step_s_by_width: Iterable[tuple[int, int, float]]) -> None:
        """Close a batch. step_s_by_width: (width, decode steps at that width, their seconds)."""
        with self._lock:
            record.index = self._num_batches
            self._num_batches += 1
            self._records.append(record)
            for name, (field, _) in _COUNTERS.items():
                self._sums[name] += getattr(record, field)
            for width, steps, seconds in step_s_by_width:
                self._steps[width] += steps
                self._step_s[width] += seconds
            self.gauges["reference_kv_bytes_reserved"] = record.kv_bytes_reserved
            self.gauges["reference_kv_bytes_used"] = record.kv_bytes_used

    def outcome(self, kind: str) -> None:
        """Count a request that is over: "ok", "aborted" or "error"."""
        with self._lock:
            self._outcomes[kind] += 1

    def records(self) -> list[dict[str, object]]:
        with self._lock:
            return [record.as_dict() for record in self._records]

    def prometheus(self) -> str:
        """All of it in the Prometheus text format 0.0.4."""
        with self._lock:
            lines: list[str] = []
            for name, value in self.gauges.items():
                lines += [f"# TYPE {name} gauge", f"{name} {value}"]
            for name, (_, text) in _COUNTERS.items():
                lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", f"{name} {self._sums[name]}"]
            lines += ["# TYPE reference_batches_total counter", f"reference_batches_total {self._num_batches}"]
            lines.append("# TYPE reference_requests_total counter")
            lines += [f'reference_requests_total{{outcome="{kind}"}} {n}' for kind, n in self._outcomes.items()]
            lines.append("# TYPE reference_steps_total counter")
            lines += [f'reference_steps_total{{width="{width}"}} {n}' for width, n in sorted(self._steps.items())]
            lines.append("# TYPE reference_step_seconds_total counter")
            lines += [
                f'reference_step_seconds_total{{width="{width}"}} {s}' for width, s in sorted(self._step_s.items())
            ]
        return "\n".join(lines) + "\n"

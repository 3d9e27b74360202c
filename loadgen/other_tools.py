"""The same records in the definitions of other tools, so that their numbers and ours can be set side by side.

Read from their sources; `SOURCES` says which versions. What differs from DESIGN's definitions:

             start   first token               end of e2e                  per token                       percentiles
    loadgen  plan    first token of any kind   last token                  (last - first) / (N - 1)        type 7
    vllm     send    first event with choices  last event with choices     (end - ttft) / (N - 1)          type 7
    guidellm send    first token of any kind   body read                   ITL (last - first) / (N - 1),   inverted CDF
                                                                           TPOT (last - send) / N
    aiperf   send    first token of any kind   last token                  (last - ttft) / (N - 1)         type 7
    sglang   send    first text                [DONE]                      (end - ttft) / (N - 1)          type 7

The records cannot tell apart what these tools do to the times themselves: they read the clock after parsing, on a busy
event loop. So this is what each would have printed with our stamps.

    reexpress(run, "vllm")["metrics"]["median_ttft_ms"]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from loadgen.clock import NS_PER_S
from loadgen.metrics import MISSING, Floats, Ints, columns, span_ms
from loadgen.options import UsageError
from loadgen.record import RequestRecord, Run

SOURCES = {
    "vllm": "vllm 0.32.0: vllm/benchmarks/serve.py (calculate_metrics), benchmarks/lib/endpoint_request_func.py",
    "guidellm": "guidellm ee7a774 (0.7.3+12): schemas/request_stats.py, schemas/statistics.py, backends/openai/http.py",
    "aiperf": "aiperf 58028d5: metrics/types/{ttft,ttst,inter_token_latency,request_latency,..}_metric.py",
    "sglang": "sglang 1291c7f: benchmark/metrics.py, benchmark/backends/oai_client.py, oai_chat_client.py",
}
TOOLS = tuple(SOURCES)

_Method = Literal["linear", "inverted_cdf"]


def reexpress(run: Run, tool: str) -> dict[str, Any]:
    """{"tool", "source", "notes": [...], "metrics": {the tool's own names: value}} of the measured successes.

    tool: one of TOOLS. Where the tool prints 0 or NaN for "no value" this gives None. Raises UsageError otherwise.
    """
    if tool not in TOOLS:
        raise UsageError(f"--as must be one of {', '.join(TOOLS)}, not {tool!r}")
    metrics, notes = _TOOLS[tool](_Successes(run))
    return {"tool": tool, "source": SOURCES[tool], "notes": notes, "metrics": metrics}


class _Successes:
    """The successes as columns, and the run's window: all that the four tools need."""

    def __init__(self, run: Run) -> None:
        measured = run.measured
        self.records = [record for record in measured if record.ok and record.num_events]
        self.failed = sum(not record.ok for record in measured)
        self.table = columns(self.records)
        ends = [r.end_ns for r in measured if r.end_ns is not None]
        starts = [r.sent_ns for r in measured if r.sent_ns is not None]
        # all four start their clock just before the first request and stop it after the last
        self.duration_s = (max(ends) - min(starts)) / NS_PER_S if ends and starts and max(ends) > min(starts) else None
        self.chat = run.options.get("endpoint") == "chat"
        counted = self.table.output_tokens
        self.output_tokens = np.where(counted == MISSING, self.table.num_events, counted)

    def from_send(self, stamps: Ints) -> Floats:
        return span_ms(self.table.sent_ns, stamps)

    def per_s(self, amount: float) -> float | None:
        return amount / self.duration_s if self.duration_s else None

    def column(self, of: Callable[[RequestRecord], int | None]) -> Ints:
        values = (of(record) for record in self.records)
        return np.fromiter((MISSING if v is None else v for v in values), np.int64, len(self.records))

    def prompt_tokens(self) -> int:
        """The server's count, else what was asked for."""
        return sum(r.prompt_tokens if r.prompt_tokens is not None else r.asked_input_tokens or 0 for r in self.records)


def _per_token(end_ms: Floats, first_ms: Floats, tokens: Ints) -> Floats:
    several = tokens > 1
    return (end_ms[several] - first_ms[several]) / (tokens[several] - 1)


def _moments(values: Floats, name: str, percentiles: tuple[int, ...] = (99,)) -> dict[str, float | None]:
    """mean_, median_, std_, p99_ of values under vllm's and sglang's names."""
    there = len(values) > 0
    return {
        f"mean_{name}": float(values.mean()) if there else None,
        f"median_{name}": float(np.median(values)) if there else None,
        f"std_{name}": float(values.std()) if there else None,
        **{f"p{p}_{name}": float(np.percentile(values, p)) if there else None for p in percentiles},
    }


def _spread(values: Floats, name: str, unit: str, method: _Method = "linear") -> dict[str, float | None]:
    """avg, min, max, std, percentiles under one name, as aiperf and guidellm group them."""
    values = values[~np.isnan(values)]
    there = len(values) > 0
    result: dict[str, float | None] = {
        f"{name}.avg ({unit})": float(values.mean()) if there else None,
        f"{name}.min ({unit})": float(values.min()) if there else None,
        f"{name}.max ({unit})": float(values.max()) if there else None,
        f"{name}.std ({unit})": float(values.std()) if there else None,
    }
    for p in (50, 90, 95, 99):
        result[f"{name}.p{p} ({unit})"] = float(np.percentile(values, p, method=method)) if there else None
    return result


Result = tuple[dict[str, float | None], list[str]]


def _vllm(ok: _Successes) -> Result:
    first = ok.column(lambda r: r.first_event_ns if r.first_event_ns is not None else r.first_token_ns)
    ttft, e2e = ok.from_send(first), ok.from_send(ok.table.last_token_ns)
    gaps = [_vllm_gaps_ms(r) for r in ok.records]
    output, prompt = int(ok.output_tokens.sum()), ok.prompt_tokens()
    metrics: dict[str, float | None] = {
        "completed": len(ok.records),
        "failed": ok.failed,
        "duration": ok.duration_s,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": ok.per_s(len(ok.records)),
        "output_throughput": ok.per_s(output),
        "total_token_throughput": ok.per_s(output + prompt),
        **_moments(ttft, "ttft_ms"),
        **_moments(_per_token(e2e, ttft, ok.output_tokens), "tpot_ms"),
        **_moments(np.concatenate(gaps) if gaps else np.empty(0), "itl_ms"),
        **_moments(e2e, "e2el_ms"),
    }
    return metrics, [
        "ttft stops at the first event with choices, a role-only one included; the itl list then begins there",
        "e2el ends at the last token here; an empty event with the finish_reason, sent later, would end it there",
        "a stream that was cut off, or an error inside of it, is a success there and a failure here",
    ]


def _vllm_gaps_ms(record: RequestRecord) -> Floats:
    """Gaps between events; the first starts at the first event with choices, also when it carried no token."""
    stamps = np.frombuffer(record.event_stamps_ns, np.int64)
    if record.first_event_ns is not None and record.first_event_ns != record.first_token_ns:
        stamps = np.concatenate(([record.first_event_ns], stamps))
    return np.diff(stamps) / 1e6


def _guidellm(ok: _Successes) -> Result:
    ttft, last = ok.from_send(ok.table.first_token_ns), ok.from_send(ok.table.last_token_ns)
    output, prompt = int(ok.output_tokens.sum()), ok.prompt_tokens()
    method: _Method = "inverted_cdf"
    metrics: dict[str, float | None] = {
        "successful": len(ok.records),
        "errored": ok.failed,
        "requests_per_second": ok.per_s(len(ok.records)),
        "output_tokens_per_second": ok.per_s(output),
        "total_tokens_per_second": ok.per_s(output + prompt),
        **_spread(ok.from_send(ok.table.end_ns) / 1e3, "request_latency", "s", method),
        **_spread(ttft, "time_to_first_token_ms", "ms", method),
        **_spread(_per_token(last, ttft, ok.output_tokens), "inter_token_latency_ms", "ms", method),
        **_spread(last / np.maximum(ok.output_tokens, 1), "time_per_output_token_ms", "ms", method),
    }
    return metrics, [
        "time_per_output_token has the time to the first token in it: last token - send, over all tokens",
        "inter_token_latency is one mean a request, not one value a gap: its tail hides stalls",
        "percentiles are values that occurred (inverted CDF); rates there are weighted over time, here plain totals",
    ]


def _aiperf(ok: _Successes) -> Result:
    ttft, last = ok.from_send(ok.table.first_token_ns), ok.from_send(ok.table.last_token_ns)
    itl = _per_token(last, ttft, ok.output_tokens)
    second = ok.column(lambda r: r.event_stamps_ns[1] if r.num_events > 1 else None)
    gaps = [np.diff(np.frombuffer(r.event_stamps_ns, np.int64)) / 1e6 for r in ok.records]
    output = int(ok.output_tokens.sum())
    with np.errstate(divide="ignore"):
        per_user = 1e3 / itl
    metrics: dict[str, float | None] = {
        "request_count": len(ok.records),
        "error_request_count": ok.failed,
        "request_throughput (requests/s)": ok.per_s(len(ok.records)),
        "output_token_throughput (tokens/s)": ok.per_s(output),
        **_spread(ttft, "time_to_first_token", "ms"),
        **_spread(span_ms(ok.table.first_token_ns, second), "time_to_second_token", "ms"),
        **_spread(last, "request_latency", "ms"),
        **_spread(itl, "inter_token_latency", "ms"),
        **_spread(np.concatenate(gaps) if gaps else np.empty(0), "inter_chunk_latency", "ms"),
        **_spread(per_user[np.isfinite(per_user)], "output_token_throughput_per_user", "tokens/s/user"),
    }
    return metrics, [
        "inter_token_latency is one mean a request; inter_chunk_latency is what loadgen calls gap",
        "output lengths are counted by a tokenizer in the client there, by the server here",
    ]


def _sglang(ok: _Successes) -> Result:
    first = ok.table.first_answer_ns if not ok.chat else ok.table.first_token_ns
    known = first != MISSING
    ttft, e2e = ok.from_send(first)[known], ok.from_send(ok.table.end_ns)
    asked = ok.column(lambda r: r.asked_output_tokens)
    tokens = np.where(asked == MISSING, ok.output_tokens, asked)
    gaps = [np.diff(np.frombuffer(r.event_stamps_ns, np.int64)) / 1e6 for r in ok.records]
    output, prompt = int(tokens.sum()), sum(r.asked_input_tokens or r.prompt_tokens or 0 for r in ok.records)
    itl = np.concatenate(gaps) if gaps else np.empty(0)
    metrics: dict[str, float | None] = {
        "completed": len(ok.records),
        "duration": ok.duration_s,
        "total_input": prompt,
        "total_output": output,
        "request_throughput": ok.per_s(len(ok.records)),
        "input_throughput": ok.per_s(prompt),
        "output_throughput": ok.per_s(output),
        "total_throughput": ok.per_s(output + prompt),
        **_moments(e2e, "e2e_latency_ms"),
        **_moments(ttft, "ttft_ms"),
        **_moments(_per_token(e2e[known], ttft, tokens[known]), "tpot_ms"),
        **_moments(itl, "itl_ms", (95, 99)),
        "max_itl_ms": float(itl.max()) if len(itl) else None,
        "concurrency": ok.per_s(float(e2e.sum()) / 1e3),
    }
    return metrics, [
        "usage is not asked for there, so the output length is the one that was requested",
        "e2e latency ends at [DONE], after the usage event, and so does tpot",
        "tool calls carry no text: an answer made of them has no ttft there",
    ]


_TOOLS: dict[str, Callable[[_Successes], Result]] = {
    "vllm": _vllm,
    "guidellm": _guidellm,
    "aiperf": _aiperf,
    "sglang": _sglang,
}

"""What a reader should not believe of a run's numbers without a second look: warnings as data, a remedy with each.

Whether the client was the bottleneck is audit.py's question; here it is about samples, failures and work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.record import Phase, Run


def warnings_of(run: Run, summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """[{what, remedy}] for the counts, metrics and server_counters of a run's summary."""
    found: list[dict[str, str]] = []

    def warn(what: str, remedy: str) -> None:
        found.append({"what": what, "remedy": remedy})

    metrics, counts = summary["metrics"], summary["counts"]
    too_few = {name: metrics[name]["too_few"] for name in ("ttft_ms", "e2e_ms") if metrics[name]["too_few"]}
    if too_few:
        name, percentiles = max(too_few.items(), key=lambda item: len(item[1]))
        unknown = ", ".join(percentiles).replace("p999", "p99.9")
        warn(
            f"{metrics[name]['n']} requests are too few to know {unknown}: these are near the largest value seen",
            "more --requests, or a longer --duration",
        )
    if not any(record.phase is not Phase.MEASURED for record in run.records) and run.records:
        warn("no warm-up: the first, cold request is among the measured ones", "--warmup N with N of at least 1")
    if counts["failed"]:
        warn(
            f"{counts['failed']} of {counts['started']} requests failed: latencies are of those that succeeded",
            "see failures; the figures with failures as infinity stand beside",
        )
    if metrics["output_tokens_estimated"]:
        warn(
            f"the server gave no token counts: {metrics['output_tokens_estimated']} output tokens are counted events",
            "a server that sends usage (stream_options.include_usage)",
        )
    p_value = (metrics["arrivals"] or {}).get("poisson_p_value")
    if p_value is not None and p_value < 0.001:
        warn(
            f"the sends do not look like the Poisson arrivals that were asked for (p = {p_value:.1g})",
            "see lag: a client that sends late bunches its requests; one run in a thousand looks so by chance",
        )
    asked, counted = metrics["output_tokens_asked"], metrics["output_tokens"]
    if asked and counted < 0.99 * asked:
        warn(
            f"{counted} output tokens came where {asked} were asked for: answers ended early",
            "without --stop-at-eos the server is asked to ignore EOS; a short answer is less work",
        )
    asked, counted = metrics["input_tokens_asked"], metrics["input_tokens"]
    if asked and counted is not None and abs(counted - asked) > 0.01 * asked:
        warn(
            f"the server counted {counted} input tokens where {asked} were asked for; rates use the server's count",
            "token ids on /v1/completions give exact lengths",
        )
    cached = _cached_share(run, summary)
    if cached is not None and cached > (0.5 if run.options.get("endpoint") == "chat" else 0.05):
        warn(
            f"{cached:.0%} of the prompt tokens came from the server's prefix cache; no shared prefix was asked for",
            "this server has seen these prompts: another --seed, or a restarted server",
        )
    if metrics["tokens_per_event"] is not None and metrics["tokens_per_event"] > 1.05:
        warn(
            f"{metrics['tokens_per_event']:.2f} tokens per event: gap is between events, not tokens",
            "compare tpot, which counts tokens",
        )
    return found


def _cached_share(run: Run, summary: Mapping[str, Any]) -> float | None:
    """Share of prompt tokens that were not computed anew, by usage or by the server's counters; None when that was
    wanted (a shared prefix, a trace) or is unknown. Half is usual in chat: the template is the same in all prompts."""
    if run.options.get("shared_prefix_tokens") or run.options.get("trace"):
        return None
    metrics, counters = summary["metrics"], summary["server_counters"]
    if metrics["input_tokens_cached"] is not None:
        return metrics["input_tokens_cached"] / metrics["input_tokens"] if metrics["input_tokens"] else None
    for name, hits in counters.items():
        if name.endswith(":prefix_cache_hits_total"):
            queries = counters.get(name.replace("_hits_", "_queries_"))
            return hits / queries if queries else None
    return None

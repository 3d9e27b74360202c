"""Saved runs to text, CSV and JSON. Pure functions of run.json documents; the one place that rounds and says "ms".

loadgen report runs/a                    the table that the run printed
loadgen report runs/a runs/b             side by side, ratios against the first
loadgen report runs/a --as vllm          the same records in another tool's definitions
loadgen report runs/a --csv              run,metric,statistic,value
loadgen report runs/a runs/b --html x.html
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from loadgen import run_folder
from loadgen.metrics import LATENCIES, PERCENTILES
from loadgen.options import UsageError
from loadgen.other_tools import TOOLS, reexpress
from loadgen.record import REMEDY, FailureKind

Document = Mapping[str, Any]

DEFINITIONS = (
    "start = {start}; ttft = first token of any channel - start; e2e = last token - start;\n"
    "tpot = (last token - first token) / (output tokens - 1); gap = between token events, pooled; lag = sent - start;\n"
    "throughput = tokens of successful requests / (last end - first start); latencies are of successful requests"
)
_SHOWN = ("ttft_ms", "first_answer_ms", "tpot_ms", "gap_ms", "e2e_ms", "lag_ms")  # *_sent and the rest: --json
_RATES = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "total tokens/s",
    "requests_per_s": "requests/s",
    "goodput_per_s": "goodput/s",
}


# ---------------------------------------------------------------- numbers as text


def number(value: float | None) -> str:
    """Four significant digits, never an exponent; - for no value."""
    if value is None:
        return "-"
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:g}" if not isinstance(value, int) else str(value)
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def ratio(value: float | None, base: float | None) -> str:
    """value / base as 2.51x, two digits below 0.1; - where there is none."""
    if value is None or not base:
        return "-"
    return f"{value / base:.2f}x" if abs(value / base) >= 0.1 or not value else f"{value / base:.2g}x"


def columns_of(rows: Iterable[Sequence[str]], gap: str = "  ") -> list[str]:
    """Rows as lines: the first column left, the others right, as wide as they need."""
    table = [list(row) for row in rows]
    widths = [max((len(row[i]) for row in table if i < len(row)), default=0) for i in range(max(map(len, table)))]
    return [
        gap.join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        )
        for row in table
    ]


# ---------------------------------------------------------------- one run


def load_name(document: Document) -> str:
    """How the server was loaded: "closed loop, 64 in flight", "8 requests/s, poisson", ..."""
    options = document["options"]
    cap = options.get("concurrency")
    if options.get("trace"):
        how = f"trace {Path(options['trace']).name}"
        if options.get("rate"):
            how += f" at {options['rate']:g} requests/s"
    elif options.get("rate"):
        how = f"open loop, {options['rate']:g} requests/s {options.get('arrival', '')}".rstrip()
    else:
        return f"closed loop, {cap} in flight"
    return f"{how}, at most {cap} in flight" if cap else how


def is_open_loop(document: Document) -> bool:
    options = document["options"]
    return options.get("rate") is not None or (options.get("trace") is not None and not options.get("concurrency"))


def text_report(documents: Document | Sequence[Document], names: Sequence[str] = ()) -> str:
    """What the terminal shows: one run in full, or several side by side. No line is longer than 110 characters
    unless a server's message is."""
    if isinstance(documents, Mapping):
        documents = [documents]
    if len(documents) == 1:
        return _one_run(documents[0])
    return _several_runs(documents, names or [f"run {i + 1}" for i in range(len(documents))])


def _one_run(document: Document) -> str:
    blocks = (
        [*_verdict(document), *_identity(document)],
        [*_counts(document), *_rates(document)],
        _latencies(document["metrics"], document["counts"]),
        _before(document),
        _failures(document["counts"]),
        _findings("warning", document["validity"]["warnings"]),
        _definitions(document),
    )
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _verdict(document: Document) -> list[str]:
    lines = []
    if not document["validity"]["valid"]:
        lines.append("INVALID: the client, not the server, was measured")
        lines += _findings("reason", document["validity"]["reasons"])
    if document["interrupted"]:
        lines.append("interrupted: the numbers are of what was complete, rates until the interrupt")
    return lines


def _findings(label: str, findings: Iterable[Mapping[str, str]]) -> list[str]:
    lines = []
    for finding in findings:
        lines.append(f"{label}: {finding['what']}")
        if finding.get("remedy"):
            lines.append(f"    -> {finding['remedy']}")
    return lines


def _identity(document: Document) -> list[str]:
    server, options, client = document["server"], document["options"], document["client"]
    software = " ".join(str(server[key]) for key in ("owned_by", "version") if server.get(key))
    model = server.get("model") or options.get("model") or "unknown model"
    lines = [f"{model} at {server.get('url') or options.get('url')}" + (f" ({software})" if software else "")]
    wanted = [load_name(document)]
    if not options.get("trace") and options.get("input_tokens") and options.get("output_tokens"):
        wanted.append(f"{_span(options['input_tokens'])} -> {_span(options['output_tokens'])} tokens")
    if (seed := document["plan"].get("seed")) is not None:
        wanted.append(f"seed {seed}")
    lines.append(", ".join(wanted))
    stamps = "kernel stamps" if client["kernel_stamps"] else "stamps after each read"
    share = f", {client['cpu_s'] / client['wall_s']:.0%} of a core" if client["wall_s"] > 0 else ""
    workers = f" x {client['num_workers']}" if client["num_workers"] > 1 else ""
    lines.append(f"client: {client['transport']}{workers}, {stamps}{share}; {document['start_utc'][:19]}Z")
    return lines


def _span(span: object) -> str:
    if isinstance(span, Mapping):
        return str(span["low"]) if span["low"] == span["high"] else f"{span['low']}:{span['high']}"
    return str(span)


def _counts(document: Document) -> list[str]:
    counts, metrics = document["counts"], document["metrics"]
    parts = [f"{counts['ok']} ok", f"{counts['failed']} failed"]
    parts += [f"{counts[name]} {name}" for name in ("unfinished", "skipped") if counts[name]]
    lines = [f"requests    {counts['started']} started: {', '.join(parts)}"]
    estimated = " (estimated: counted events)" if metrics["output_tokens_estimated"] else ""
    cached = f", {metrics['input_tokens_cached']} from the prefix cache" if metrics["input_tokens_cached"] else ""
    partial = metrics["partial_tokens_of_failures"]
    lines.append(
        f"tokens      {_of(metrics['input_tokens'], metrics['input_tokens_asked'])} in{cached}; "
        f"{_of(metrics['output_tokens'], metrics['output_tokens_asked'])} out{estimated}"
        + (f"; {partial} more in failed requests" if partial else "")
    )
    return lines


def _of(counted: int | None, asked: int | None) -> str:
    return f"{number_of(counted)} of {asked} asked" if asked is not None and asked != counted else number_of(counted)


def number_of(count: int | None) -> str:
    return "unknown" if count is None else str(count)


def _rates(document: Document) -> list[str]:
    metrics, options = document["metrics"], document["options"]
    shown = [f"{number(metrics[k])} {label}" for k, label in _RATES.items() if k != "goodput_per_s"]
    lines = [f"throughput  {', '.join(shown)} over {number(metrics['window_s'])} s"]
    lines.append(
        f"in flight   {number(metrics['in_flight_mean'])} on average, {metrics['in_flight_max']} at most"
        + (f"; {metrics['tokens_per_event']:.2f} tokens an event" if metrics["tokens_per_event"] is not None else "")
    )
    if is_open_loop(document):
        asked = f"{number(metrics['requested_per_s'])}/s asked, " if metrics["requested_per_s"] else ""
        p_value = (metrics["arrivals"] or {}).get("poisson_p_value")
        lines.append(
            f"arrivals    {asked}{number(metrics['offered_per_s'])}/s offered by the plan, "
            f"{number(metrics['achieved_per_s'])}/s sent"
            + (f"; Poisson fit p = {p_value:.2g}" if p_value is not None else "")
        )
    if metrics["slo_met"] is not None:
        slo = options.get("slo") or {}
        limits = ", ".join(f"{k.removesuffix('_ms')} <= {v:g} ms" for k, v in slo.items() if v is not None)
        lines.append(
            f"goodput     {number(metrics['goodput_per_s'])} requests/s: "
            f"{metrics['slo_met']} of {document['counts']['started']} met {limits}"
        )
    return lines


def _latencies(metrics: Mapping[str, Any], counts: Mapping[str, Any]) -> list[str]:
    """The table of latencies, the 95 % intervals under it; a star where the samples are too few."""
    heads = ("n", "mean", *PERCENTILES, "max")
    rows = [["ms", *("p99.9" if head == "p999" else head for head in heads)]]
    intervals = [["95 % interval", *(name for name in PERCENTILES if name != "p999")]]
    few = False
    for name in _SHOWN:
        d = metrics[name]
        if name == "first_answer_ms" and (d["n"] == 0 or _same(d, metrics["ttft_ms"])):
            continue
        cells = [str(d["n"])]
        for head in heads[1:]:
            cells.append(number(d[head]) + ("*" if head in d["too_few"] else ""))
        few |= bool(d["too_few"])
        rows.append([name.removesuffix("_ms").replace("_", " "), *cells])
        beside = metrics.get(f"{name}_failures_as_infinity")
        if counts["failed"] and beside is not None and d["n"]:
            cells = [number(beside[p]) if beside[p] is not None else "inf" for p in PERCENTILES]
            rows.append(["  failures as inf", str(beside["n"]), "inf", *cells, "inf"])
        if name != "lag_ms" and any(d[f"{p}_interval"] for p in PERCENTILES):
            intervals.append(
                [
                    name.removesuffix("_ms").replace("_", " "),
                    *(_interval(d[f"{p}_interval"]) for p in PERCENTILES if p != "p999"),
                ]
            )
    lines = columns_of(rows)
    if few:
        lines.append("* too few samples to know this percentile: it is near the largest value seen")
    if len(intervals) > 1:
        lines += ["", *columns_of(intervals)]
    return lines


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("n", "mean", "p50", "p99", "max"))


def _interval(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def _before(document: Document) -> list[str]:
    cold, warmup = document["cold"], document["warmup"]
    lines = []
    if cold is not None:
        what = f"ttft {number(cold['ttft_ms'])} ms, e2e {number(cold['e2e_ms'])} ms" if cold["ok"] else cold["failure"]
        lines.append(f"cold        the first request, alone: {what} (in no statistic)")
    if (n := warmup["requests"]) > 0:
        failed = f", {warmup['failed']} failed" if warmup["failed"] else ""
        what = "1 request" if n == 1 else f"{n} requests"
        lines.append(f"warm-up     {what} in {number(warmup['took_s'])} s{failed} (in no statistic)")
    return lines


def _failures(counts: Mapping[str, Any]) -> list[str]:
    if not counts["failed"]:
        return []
    lines = ["failures"]
    reasons = counts["failure_reasons"]
    for kind, n in sorted(counts["failures"].items(), key=lambda item: -item[1]):
        lines.append(f"{n:6d}  {kind}: {REMEDY[FailureKind(kind)]}")
        details = [r for r in reasons if r["kind"] == kind and r["detail"]]
        lines += [f"        {r['n']} x {r['detail']}" for r in details[:3]]
        if len(details) > 3:
            lines.append(f"        and {len(details) - 3} other messages: see requests.jsonl")
    return lines


def _definitions(document: Document) -> list[str]:
    start = "the planned time" if is_open_loop(document) else "when a slot asked for the request"
    return DEFINITIONS.format(start=start).split("\n")


# ---------------------------------------------------------------- several runs


def _several_runs(documents: Sequence[Document], names: Sequence[str]) -> str:
    base = names[0]
    heads = ["", *names, *(f"{name} / {base}" for name in names[1:])]
    rows = [heads]

    def add(label: str, values: Sequence[float | None], stars: Sequence[str] = (), ratios: bool = True) -> None:
        shown = [number(v) + (stars[i] if stars else "") for i, v in enumerate(values)]
        rows.append([label, *shown, *(ratio(v, values[0]) if ratios else "" for v in values[1:])])

    for label in ("ok", "failed"):
        rows.append([f"requests {label}", *(str(d["counts"][label]) for d in documents)])
    for name in ("input_tokens", "output_tokens"):
        rows.append([name.replace("_", " "), *(number_of(d["metrics"][name]) for d in documents)])
    add("seconds", [d["metrics"]["window_s"] for d in documents])
    for key, label in _RATES.items():
        if any(d["metrics"][key] is not None for d in documents):
            add(label, [d["metrics"][key] for d in documents])
    few = False
    for name in ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms"):
        for percentile in ("p50", "p99"):
            distributions = [d["metrics"][name] for d in documents]
            stars = ["*" if percentile in d["too_few"] else "" for d in distributions]
            few |= any(stars)
            add(f"{name.removesuffix('_ms')} {percentile}, ms", [d[percentile] for d in distributions], stars)
    rows.append(["cold ttft, ms", *(number((d["cold"] or {}).get("ttft_ms")) for d in documents)])
    lines = [f"{name}: {'; '.join(_identity(d)[:2])}" for name, d in zip(names, documents, strict=True)]
    lines += ["", *columns_of(rows)]
    if few:
        lines.append("* too few samples to know this percentile: it is near the largest value seen")
    lines.append(f"ratios are against {base}, from one run each, without an interval: `loadgen compare` gives one")
    different = _different_work(documents, names)
    lines += [f"different work: {text}" for text in different]
    for name, document in zip(names, documents, strict=True):
        notes = [*_verdict(document), *_failures(document["counts"])]
        notes += _findings("warning", document["validity"]["warnings"])
        if notes:
            lines += ["", f"{name}:", *notes]
    return "\n".join([*lines, "", *_definitions(documents[0])])


def _different_work(documents: Sequence[Document], names: Sequence[str]) -> list[str]:
    """What makes the ratios unfair: other loads, lengths or numbers of failures."""
    found = []
    for name, document in zip(names[1:], documents[1:], strict=True):
        if load_name(document) != load_name(documents[0]):
            found.append(f"{name} had {load_name(document)}, {names[0]} had {load_name(documents[0])}")
        for key, label in (("input_tokens_per_request", "input"), ("output_tokens_per_request", "output")):
            here, there = document["metrics"][key]["mean"], documents[0]["metrics"][key]["mean"]
            if here and there and abs(here / there - 1) > 0.01:
                found.append(f"{name} had {number(here)} {label} tokens a request, {names[0]} {number(there)}")
        if document["counts"]["failed"] != documents[0]["counts"]["failed"]:
            found.append(
                f"{name} had {document['counts']['failed']} failures, {names[0]} {documents[0]['counts']['failed']}"
            )
    return found


# ---------------------------------------------------------------- other forms


def csv_report(documents: Sequence[Document], names: Sequence[str]) -> str:
    """Long form, `run,metric,statistic,value`: one line a number; an empty value is "no value"."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "metric", "statistic", "value"])
    for name, document in zip(names, documents, strict=True):
        for key, value in document["counts"].items():
            if isinstance(value, int):
                writer.writerow([name, key, "count", value])
        for key, value in document["metrics"].items():
            if isinstance(value, Mapping):
                for statistic, figure in value.items():
                    if isinstance(figure, int | float) or figure is None:
                        writer.writerow([name, key, statistic, "" if figure is None else figure])
            elif isinstance(value, int | float) or value is None:
                writer.writerow([name, key, "value", "" if value is None else value])
    return out.getvalue()


def tool_report(result: Mapping[str, Any]) -> str:
    """What `reexpress` gave, as text."""
    rows = [[name, number(value)] for name, value in result["metrics"].items()]
    notes = [f"- {note}" for note in result["notes"]]
    return "\n".join([f"in the definitions of {result['source']}", "", *columns_of(rows), "", *notes])


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names of run folders: the last part of each path, more where that is not unique."""
    for parts in range(1, 5):
        names = ["/".join(folder.resolve().parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def main(
    folders: Sequence[str | Path],
    *,
    as_tool: str | None = None,
    as_csv: bool = False,
    as_json: bool = False,
    html: str | Path | None = None,
) -> int:
    """`loadgen report`: print what was asked for, give the exit status (0). Raises UsageError for a folder that is no
    run folder, or an unknown tool."""
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise UsageError("loadgen report needs at least one run folder")
    if as_tool is not None and as_tool not in TOOLS:
        raise UsageError(f"--as must be one of {', '.join(TOOLS)}, not {as_tool!r}")
    documents = [run_folder.load_document(path) for path in paths]
    names = names_of(paths)
    if as_tool is not None:
        results = [reexpress(run_folder.load(path), as_tool) for path in paths]
        if as_json:
            sys.stdout.write(_json(results))
        else:
            for name, result in zip(names, results, strict=True):
                print(f"{name}, {tool_report(result)}")
    elif as_json:
        sys.stdout.write(_json(documents))
    elif as_csv:
        sys.stdout.write(csv_report(documents, names))
    elif html is None:
        print(text_report(documents, names))
    if html is not None:
        from loadgen.page import write_page

        write_page(paths, Path(html), names=names)
        print(html, file=sys.stderr if as_json or as_csv else sys.stdout)
    return 0


def _json(values: Sequence[Any]) -> str:
    """One object for one run, a list for several."""
    value = values[0] if len(values) == 1 else list(values)
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n"


__all__ = ["LATENCIES", "TOOLS", "csv_report", "main", "reexpress", "text_report", "tool_report"]

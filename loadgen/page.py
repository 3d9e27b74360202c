"""Runs to one self-contained report.html: no script, no network, readable in light and dark, on a phone and printed.

    write_page(["runs/a"], "runs/a/report.html")
    write_page(["runs/serial", "runs/vllm"], "both.html", names=["serial", "vllm"])

Pictures are inline SVG, thinned out so that the file stays small whatever the run: 240 points a line, 120 requests a
timeline; what was left out is said under the picture. The tables hold all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson

from loadgen import run_folder
from loadgen.options import UsageError
from loadgen.page_style import STYLE
from loadgen.pictures import Arm, distributions, remark, throughput_latency, time_series, timeline, timeline_key
from loadgen.report import load_name, number, ratio, text_report


def write_page(
    folders: Sequence[str | Path],
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    comparison: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    title: str | None = None,
) -> None:
    """Write the page of these run folders to `path`, whole or not at all. The first run is the baseline.

    comparison: what compare.json holds; its ratios with intervals and verdicts come first.
    texts: heading to plain text, shown as it is before the figures (what explain prints, for example).
    Raises UsageError when a folder is no run folder or the page cannot be written.
    """
    names = list(names) if names is not None else [Path(folder).name for folder in folders]
    arms = [
        Arm(name, run_folder.load_document(folder), run_folder.load(folder), colour)
        for colour, (name, folder) in enumerate(zip(names, folders, strict=True))
    ]
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        run_folder.write_synced(partial, make_page(arms, comparison=comparison, texts=texts, title=title).encode())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"the page could not be written to {path}: {error.strerror or error}") from error


def make_page(
    arms: Sequence[Arm],
    *,
    comparison: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    title: str | None = None,
) -> str:
    """The page as text. Every string of a server or a user is escaped."""
    if title is None:
        title = f"loadgen: {', '.join(arm.name for arm in arms)}"
    body = [f"<h1>{escape(title)}</h1>", _verdicts(arms), _identities(arms)]
    if comparison is not None:
        body.append(_section("Comparison", _comparison(comparison)))
    body += [_section(heading, f"<pre>{escape(text)}</pre>") for heading, text in (texts or {}).items()]
    body.append(_section("Figures", _figures(arms)))
    body.append(_section("Latency distributions", _legend(arms), distributions(arms)))
    if len(arms) > 1:
        body.append(_section("Throughput against latency", _legend(arms), throughput_latency(arms)))
    body.append(_section("Requests over time", timeline_key(), *map(timeline, arms)))
    body.append(_section("Load over time", _legend(arms), time_series(arms)))
    body.append(_section("Tables, failures, warnings, definitions", *map(_details, arms)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>" if any(parts) else ""


# ---------------------------------------------------------------- what this is


def _verdicts(arms: Sequence[Arm]) -> str:
    boxes = []
    for arm in arms:
        validity, counts = arm.document["validity"], arm.document["counts"]
        if not validity["valid"]:
            reasons = "".join(
                f"<li>{escape(r['what'])}. {escape(r.get('remedy', ''))}</li>" for r in validity["reasons"]
            )
            boxes.append(
                f'<div class="box bad"><b>{escape(arm.name)}: INVALID, the client was measured, not the server</b>'
                f"<ul>{reasons}</ul></div>"
            )
        if arm.document["interrupted"]:
            text = f"interrupted: {counts['unfinished']} requests were not over"
            boxes.append(f'<div class="box">{escape(arm.name)}: {text}; rates count until then</div>')
        if counts["failed"]:
            kinds = ", ".join(f"{n} {kind}" for kind, n in counts["failures"].items())
            text = f"{counts['failed']} of {counts['started']} requests failed ({kinds})"
            boxes.append(f'<div class="box bad"><b>{escape(arm.name)}</b>: {escape(text)}</div>')
    return "".join(boxes)


def _identities(arms: Sequence[Arm]) -> str:
    rows = []
    for arm in arms:
        server, document = arm.document["server"], arm.document
        software = " ".join(str(server[key]) for key in ("owned_by", "version") if server.get(key))
        cells = (
            _name(arm),
            escape(str(server.get("model") or "unknown")),
            escape(f"{server.get('url') or document['options'].get('url')} {software}"),
            escape(load_name(document)),
            escape(f"{document['start_utc'][:19]}Z"),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{text}</th>" for text in ("run", "model", "server", "load", "started"))
    return f'<div class="wide"><table class="text"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _name(arm: Arm) -> str:
    return f'<span class="key c{arm.colour % 8}"></span>{escape(arm.name)}'


def _legend(arms: Sequence[Arm]) -> str:
    if len(arms) < 2:
        return ""
    return f'<p class="legend">{" ".join(f"<span>{_name(arm)}</span>" for arm in arms)}</p>'


# ---------------------------------------------------------------- figures


def _figures(arms: Sequence[Arm]) -> str:
    """One column a run, one row a figure: the value, its interval, its ratio to the first run, which is named."""
    base = arms[0]
    rows = []

    def add(
        label: str, unit: str, of: Callable[[Arm], float | None], note: Callable[[Arm], str] = lambda _: ""
    ) -> None:
        values = [of(arm) for arm in arms]
        if all(value is None for value in values):
            return
        cells = []
        for arm, value in zip(arms, values, strict=True):
            cell = f"<b>{number(value)}</b>"
            if arm is not base and value is not None and values[0]:
                cell += f' <span class="ratio">{ratio(value, values[0])[:-1]} &times; {escape(base.name)}</span>'
            if text := note(arm):
                cell += f'<br><span class="note">{escape(text)}</span>'
            cells.append(f"<td>{cell}</td>")
        rows.append(f"<tr><th>{label} <span class='unit'>{unit}</span></th>{''.join(cells)}</tr>")

    add("requests ok", "", lambda arm: arm.document["counts"]["ok"], _not_ok)
    add("output tokens", "", lambda arm: arm.metrics["output_tokens"], _estimated)
    add("measured window", "s", lambda arm: arm.metrics["window_s"])
    for key, label in (
        ("output_tokens_per_s", "output tokens"),
        ("total_tokens_per_s", "tokens in and out"),
        ("requests_per_s", "requests"),
        ("goodput_per_s", "goodput (SLO met)"),
    ):
        add(label, "1/s", lambda arm, key=key: arm.metrics[key])  # type: ignore[misc]
    for metric, label in (("ttft_ms", "TTFT"), ("gap_ms", "gap"), ("tpot_ms", "TPOT"), ("e2e_ms", "end to end")):
        for p in ("p50", "p99"):
            add(
                f"{label} {p}",
                "ms",
                lambda arm, m=metric, p=p: arm.metrics[m][p],  # type: ignore[misc]
                lambda arm, m=metric, p=p: _interval(arm.metrics[m], p),  # type: ignore[misc]
            )
    add("cold first request, TTFT", "ms", lambda arm: (arm.document["cold"] or {}).get("ttft_ms"))
    heads = "".join(f"<th>{_name(arm)}</th>" for arm in arms)
    notes = (
        "In brackets: 95 % interval of the percentile, within the run. The cold first request is in no other figure."
    )
    if len(arms) > 1:
        notes += f" Ratios are against {base.name}, from one run each: loadgen compare gives their intervals."
    return f'<div class="wide"><table><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>{remark(notes)}'


def _interval(distribution: Mapping[str, Any], percentile: str) -> str:
    interval = distribution[f"{percentile}_interval"]
    if interval is not None:
        return f"[{number(interval[0])}, {number(interval[1])}]"
    return f"n = {distribution['n']}: too few" if distribution["n"] else ""


def _not_ok(arm: Arm) -> str:
    counts = arm.document["counts"]
    return ", ".join(f"{counts[key]} {key}" for key in ("failed", "unfinished", "skipped") if counts[key])


def _estimated(arm: Arm) -> str:
    return "estimated: counted events" if arm.metrics["output_tokens_estimated"] else ""


def _comparison(comparison: Mapping[str, Any]) -> str:
    """compare.json as a table: both values, the ratio with its interval, the verdict, what could have been seen."""
    unequal = "".join(
        f'<div class="box bad"><b>not the same work</b>: {escape(text)}</div>'
        for text in comparison.get("different_work") or ()
    )
    baseline = str(comparison["baseline"])
    rows = []
    for metric, arms in comparison["metrics"].items():
        base = arms.get(baseline, {}).get("value")
        for name, entry in arms.items():
            if name == baseline:
                continue
            interval = f"{number(entry['low'])} to {number(entry['high'])}" if entry.get("low") is not None else "-"
            hint = f"smallest visible: {number(entry['detectable'])} &times;" if entry.get("detectable") else ""
            if entry.get("rounds_needed"):
                hint += f", {entry['rounds_needed']} rounds would settle it"
            rows.append(
                f"<tr><th>{escape(metric)}</th><td>{number(base)}</td>"
                f"<td>{escape(name)} <b>{number(entry['value'])}</b></td>"
                f"<td><b>{number(entry['ratio'])}</b> &times; {escape(baseline)}</td><td>{interval}</td>"
                f"<td>{escape(str(entry.get('verdict') or ''))}<br><span class='note'>{hint}</span></td></tr>"
            )
    heads = ("metric", f"{baseline} (baseline)", "value", "ratio", "95 % interval", "verdict")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    rounds = comparison.get("rounds")
    count = len(rounds) if isinstance(rounds, Sequence) else rounds
    note = remark(f"Intervals from the paired log ratios of {count} rounds.") if count else ""
    return f'{unequal}<div class="wide"><table class="text"><tr>{head}</tr>{"".join(rows)}</table></div>{note}'


# ---------------------------------------------------------------- the rest


def _details(arm: Arm) -> str:
    """The terminal's report, and run.json's description of the run, folded away."""
    about = {key: arm.document[key] for key in ("options", "plan", "server", "versions", "host", "client")}
    pretty = orjson.dumps(about, option=orjson.OPT_INDENT_2).decode()
    text = text_report(arm.document)
    return (
        f"<details open><summary>{_name(arm)}</summary><pre>{escape(text)}</pre></details>"
        f"<details><summary>{escape(arm.name)}: options, versions, host</summary><pre>{escape(pretty)}</pre></details>"
    )

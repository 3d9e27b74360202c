"""`loadgen constrained URL`: what constrained decoding guarantees and what it costs, kind by kind.

    none             the task alone: the baseline
    polite           the same, with the wished form asked for in words
    choice, regex, json      structured_outputs {choice | regex | json}, as vLLM takes them
    response_format  {"type": "json_schema", ...}, the OpenAI way
    tool             a named tool: its arguments must fit their schema

Every answer is judged by what it is, not by the status: membership in the list, a full match of the regex, jsonschema
for documents and for tool arguments. An answer cut off by --output-tokens is no valid answer, and is counted apart. A
constraint whose complete answers are not all valid was ignored by the server, and is called so.

Kinds are interleaved in rounds of the same tasks. Cost: `tpot` is per token, so it compares answers of different
lengths; `first use` is TTFT of the first request of a grammar the server has not seen (each run makes new ones) minus
the median of the later ones. The folder: constrained.json (`"format": "loadgen.constrained/1"`), a run folder a
kind and round.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadgen import run_folder
from loadgen.audit import audit
from loadgen.metrics import summarize
from loadgen.options import Options, UsageError
from loadgen.progress import Bar
from loadgen.record import RequestRecord, Run
from loadgen.report import columns_of, number
from loadgen.run import INTERRUPTED, INVALID, OK, REQUESTS_FAILED, new_folder
from loadgen.stats import log_ratio_interval
from loadgen.workers import run_load

FORMAT = "loadgen.constrained/1"
BASELINE = "none"
_CITIES = ("Paris", "Cairo", "Lima", "Oslo", "Delhi", "Quito", "Tokyo", "Accra")
_CHOICES = ("positive", "negative", "neutral")
_DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    task: Callable[[str], str]  # the prompt about a city
    body: Mapping[str, Any]  # what is merged into the request
    valid: Callable[[RequestRecord], bool] | None  # None: nothing was asked for


@dataclass(slots=True)
class Result:
    kind: Kind
    runs: list[Run] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)


def kinds_of(nonce: str, legacy: bool = False) -> list[Kind]:
    """All kinds; `nonce` makes the grammars new to the server. legacy: the guided_* fields of servers before them."""
    schema = {
        "title": f"city_{nonce}",
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "country": {"type": "string", "maxLength": 20},
            "millions": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "country", "millions"],
        "additionalProperties": False,
    }
    choices = [*_CHOICES, f"undecided-{nonce}"]
    pattern = f"{_DATE}|none-{nonce}"
    tool = {
        "type": "function",
        "function": {"name": f"save_{nonce}", "description": "Save what is known of a city.", "parameters": schema},
    }

    def constraint(name: str, value: Any) -> dict[str, Any]:
        return {f"guided_{name}": value} if legacy else {"structured_outputs": {name: value}}

    def plain(city: str) -> str:
        return f"Tell me the name, the country and the inhabitants in millions of the city {city}."

    wish = f" Answer with one JSON object and nothing else, of this schema: {orjson.dumps(schema).decode()}"
    wanted = {"type": "json_schema", "json_schema": {"name": f"city_{nonce}", "schema": schema, "strict": True}}
    in_schema = _fits(schema)
    return [
        Kind(BASELINE, plain, {}, None),
        Kind("polite", lambda city: plain(city) + wish, {}, lambda record: in_schema(record.text)),
        Kind(
            "choice",
            lambda city: f"What do people mostly feel about {city}? One word.",
            constraint("choice", choices),
            lambda record: record.text in choices,
        ),
        Kind(
            "regex",
            lambda city: f"Name a date of the history of {city} as YYYY-MM-DD.",
            constraint("regex", pattern),
            lambda record: re.fullmatch(pattern, record.text or "") is not None,
        ),
        Kind("json", plain, constraint("json", schema), lambda record: in_schema(record.text)),
        Kind("response_format", plain, {"response_format": wanted}, lambda record: in_schema(record.text)),
        Kind(
            "tool",
            plain,
            {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": f"save_{nonce}"}}},
            lambda record: in_schema(_arguments(record, f"save_{nonce}")),
        ),
    ]


def _fits(schema: Mapping[str, Any]) -> Callable[[str | None], bool]:
    try:
        import jsonschema
    except ImportError:
        raise UsageError("loadgen constrained needs jsonschema: pip install 'loadgen[schema]'") from None
    validator = jsonschema.Draft202012Validator(schema)

    def fits(text: str | None) -> bool:
        try:
            return bool(validator.is_valid(orjson.loads(text or "")))
        except ValueError:
            return False

    return fits


def _arguments(record: RequestRecord, name: str) -> str | None:
    """The arguments of the one call of the tool `name`; None for anything else."""
    try:
        calls = orjson.loads(record.tool_calls or "")
        return str(calls[0]["arguments"]) if len(calls) == 1 and calls[0]["name"] == name else None
    except (ValueError, LookupError, TypeError):
        return None


# ---------------------------------------------------------------- the command


def constrained(options: Options, names: Sequence[str] | None, rounds: int, legacy: bool) -> int:
    """Run all kinds in rounds, print the table; the exit status of a run. Raises UsageError, UnusableServer."""
    seed = options.seed if options.seed is not None else secrets.randbits(30)
    every = kinds_of(f"{seed:08x}", legacy)
    if names is not None:
        if unknown := set(names) - {kind.name for kind in every}:
            raise UsageError(f"--kinds: {unknown.pop()!r} is none of {', '.join(kind.name for kind in every)}")
        every = [kind for kind in every if kind.name in names or kind.name == BASELINE]
    folder = new_folder(options.out, "constrained")
    results = {kind.name: Result(kind) for kind in every}
    interrupted = False
    with tempfile.TemporaryDirectory() as work:
        for number_ in range(1, rounds + 1):
            for kind in every if number_ % 2 else reversed(every):
                load = _options(options, kind, Path(work), seed + number_)
                run = run_load(load, progress=None if options.quiet else Bar(f"round {number_}/{rounds} {kind.name}"))
                path = folder / kind.name / f"round-{number_}"
                path.parent.mkdir(parents=True, exist_ok=True)
                document = run_folder.save(path, run, summarize(run, options.slo), audit(run).as_dict())
                results[kind.name].runs.append(run)
                results[kind.name].documents.append(document)
                interrupted = interrupted or run.interrupted
            if interrupted:
                break
    document = document_of(results, seed, interrupted)
    run_folder.write_document(folder / "constrained.json", document)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    elif not options.quiet:
        click.echo(text_of(document))
    if not options.json:
        click.echo(f"{'' if options.quiet else 'records: '}{folder}")
    if interrupted:
        return INTERRUPTED
    if any(not d["validity"]["valid"] for result in results.values() for d in result.documents):
        return INVALID
    failed = sum(entry["failed"] for entry in document["kinds"].values())
    return REQUESTS_FAILED if failed > options.max_failures else OK


def _options(options: Options, kind: Kind, work: Path, seed: int) -> Options:
    """The load of a kind: its tasks as a prompt file, its fields in every body."""
    file = work / f"{kind.name}.jsonl"
    file.write_bytes(
        b"\n".join(
            orjson.dumps({"prompt": kind.task(city), "output_tokens": options.output_tokens.high}) for city in _CITIES
        )
    )
    return options.replace(
        prompts=str(file),
        endpoint="chat",
        stop_at_eos=True,
        save_text=True,
        seed=seed,
        warmup=1,
        extra_body={**options.extra_body, **kind.body},
    )


def document_of(results: Mapping[str, Result], seed: int, interrupted: bool) -> dict[str, Any]:
    """constrained.json: {format, kinds: {name: {requests, ok, failed, cut, valid, valid_share, ignored, ...}}}."""
    base = _rates(results[BASELINE])
    kinds = {}
    for name, result in results.items():
        records = [record for run in result.runs for record in run.measured]
        good = [record for record in records if record.ok]
        cut = sum(record.finish_reason == "length" for record in good)
        judge = result.kind.valid
        valid = None if judge is None else sum(judge(record) for record in good)
        wrong = None if judge is None else sum(not judge(r) for r in good if r.finish_reason != "length")
        rates = _rates(result)
        estimate = log_ratio_interval(base, rates) if name != BASELINE and len(base) == len(rates) else None
        ttft, tpot = _pooled(good, "ttft"), _pooled(good, "tpot")
        first = result.documents[0]["cold"] or {}
        middle = float(np.median(ttft)) if len(ttft) else None
        failure = next((record.failure for record in records if record.failure is not None), None)
        kinds[name] = {
            "requests": len(records),
            "ok": len(good),
            "failed": len(records) - len(good),
            "failure": None if failure is None else str(failure),
            "cut": cut,
            "valid": valid,
            "valid_share": None if valid is None or not good else valid / len(good),
            "ignored": bool(wrong) if judge is not None and name != "polite" and good else None,
            "output_tokens": sum(record.output_tokens or 0 for record in good),
            "ttft_p50_ms": middle,
            "tpot_p50_ms": float(np.median(tpot)) if len(tpot) else None,
            "first_use_ms": first["ttft_ms"] - middle if first.get("ttft_ms") and middle is not None else None,
            "tokens_per_s": math.exp(float(np.mean(np.log(rates)))) if rates else None,
            "baseline_tokens_per_s": math.exp(float(np.mean(np.log(base)))) if base else None,
            "ratio": None if estimate is None else estimate.ratio,
            "low": None if estimate is None else estimate.low,
            "high": None if estimate is None else estimate.high,
        }
    return {"format": FORMAT, "baseline": BASELINE, "seed": seed, "interrupted": interrupted, "kinds": kinds}


def _rates(result: Result) -> list[float]:
    found = [document["metrics"]["output_tokens_per_s"] for document in result.documents]
    return [rate for rate in found if rate] if all(found) else []


def _pooled(records: Sequence[RequestRecord], what: str) -> list[float]:
    """ms: first token - start, or (last - first) / (tokens - 1)."""
    values = []
    for record in records:
        if record.first_token_ns is None or record.last_token_ns is None:
            continue
        if what == "ttft":
            values.append((record.first_token_ns - record.planned_ns) / 1e6)
        elif (record.output_tokens or 0) > 1:
            values.append((record.last_token_ns - record.first_token_ns) / ((record.output_tokens or 0) - 1) / 1e6)
    return values


def text_of(document: Mapping[str, Any]) -> str:
    rows = [["kind", "ok", "failed", "valid", "cut", "tokens", "TTFT p50", "tpot p50 ms", "first use ms"]]
    rows[0] += ["output tok/s", f"ratio to {document['baseline']}", "95 % interval"]
    lines = []
    for name, kind in document["kinds"].items():
        valid = "-" if kind["valid"] is None else f"{kind['valid']} of {kind['ok']}"
        counts = [str(kind["ok"]), str(kind["failed"]), valid, str(kind["cut"]), str(kind["output_tokens"])]
        times = [number(kind[key]) for key in ("ttft_p50_ms", "tpot_p50_ms", "first_use_ms", "tokens_per_s")]
        base = kind["baseline_tokens_per_s"]
        ratio = f"{number(kind['ratio'])} x {number(base)}" if kind["ratio"] is not None else "-"
        interval = f"{number(kind['low'])} to {number(kind['high'])}" if kind["low"] is not None else "-"
        rows.append([name, *counts, *times, ratio, interval])
        if kind["ignored"]:
            lines.append(f"! {name}: IGNORED by the server: it took the constraint and gave answers that break it")
        if kind["failure"]:
            lines.append(f"! {name}: {kind['failure']}")
    return "\n".join([*columns_of(rows), *lines])

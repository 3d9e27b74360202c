"""Flags to a frozen Options; every error is one line that names the flag and the valid range."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from loadgen.arrival import ARRIVALS
from loadgen.options import Options, Slo, Span, UsageError

Command = Callable[..., Any]

# ---------------------------------------------------------------- values


class SpanType(click.ParamType[Any]):
    name = "N|LO:HI"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        if isinstance(value, Span):
            return value
        match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value))
        low = int(match[1]) if match else -1
        high = int(match[2]) if match and match[2] else low
        if not self.least <= low <= high:
            self.fail(f"must be N or LO:HI tokens with {self.least} <= LO <= HI, not {value!r}", param, ctx)
        return Span(low, high)


class SecondsType(click.ParamType[Any]):
    """A duration in seconds: 30, 30s, 500ms, 2m, 1h. Above 0, or 0 where zero_ok (= no limit)."""

    name = "SECONDS"
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}

    def __init__(self, zero_ok: bool = False) -> None:
        self.zero_ok = zero_ok

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)?", str(value))
        seconds = float(match[1]) * self.units[match[2] or ""] if match else -1.0
        if seconds < 0 or (seconds == 0 and not self.zero_ok):
            at_least = "0 (no limit) or more" if self.zero_ok else "above 0"
            self.fail(f"must be a time like 30, 500ms or 2m, {at_least}, not {value!r}", param, ctx)
        return seconds


class SloType(click.ParamType[Any]):
    """ttft=500ms,tpot=50ms,e2e=10s, any of them."""

    name = "LIMITS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Slo:
        if isinstance(value, Slo):
            return value
        limits: dict[str, float] = {}
        for part in str(value).split(","):
            name, _, limit = part.strip().partition("=")
            match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", limit)
            if name not in ("ttft", "tpot", "e2e") or not match or float(match[1]) <= 0:
                self.fail(f"must be like ttft=500ms,tpot=50ms,e2e=10s (above 0, with unit), not {value!r}", param, ctx)
            limits[f"{name}_ms"] = float(match[1]) * (1000 if match[2] == "s" else 1)
        return Slo(**limits)


class PairType(click.ParamType[Any]):
    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, sign, rest = str(value).partition("=")
        if not sign or not key.strip():
            self.fail(f"must be KEY=VALUE, not {value!r}", param, ctx)
        return key.strip(), rest.strip()


class ShareType(click.ParamType[Any]):
    """3% or 0.03; p99 or 0.99 where `percentile`."""

    name = "SHARE"

    def __init__(self, percentile: bool = False) -> None:
        self.percentile = percentile

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(p?)(\d+(?:\.\d+)?|\.\d+)(%?)", str(value))
        share = float(match[2]) / (100 if match[1] or match[3] else 1) if match else -1.0
        if not 0 < share < 1:
            like = "p99 or 0.99" if self.percentile else "3% or 0.03"
            self.fail(f"must be like {like}, above 0 and below 1, not {value!r}", param, ctx)
        return share


class ListType(click.ParamType[Any]):
    """1,2,4,8: numbers above 0."""

    name = "LIST"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        try:
            numbers = [self.kind(part) for part in str(value).split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            self.fail(f"must be numbers above 0, like 1,2,4,8, not {value!r}", param, ctx)
        return list(dict.fromkeys(numbers))


COUNT = click.IntRange(min=1)

# ---------------------------------------------------------------- flags that several commands share

URL_FLAG = click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="Server, with or without /v1."
)

SERVER_FLAGS = [
    click.option("--model", help="Model name. [default: the one that /v1/models lists]"),
    click.option(
        "--endpoint",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="/v1/completions or /v1/chat/completions.",
    ),
    click.option(
        "--header",
        "headers",
        type=PairType(),
        multiple=True,
        metavar="K=V",
        help="Header for every request; repeatable. The key comes from OPENAI_API_KEY.",
    ),
    click.option(
        "--transport",
        type=click.Choice(["auto", "wire", "aiohttp"]),
        default="auto",
        show_default=True,
        help="wire: plain http with kernel stamps; aiohttp: https and proxies.",
    ),
    click.option("--connect-timeout", "connect_timeout_s", type=SecondsType(True), default="10s", show_default=True),
    click.option(
        "--idle-timeout",
        "idle_timeout_s",
        type=SecondsType(True),
        default="300s",
        show_default=True,
        help="Longest silence within an answer; 0 = no limit.",
    ),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        type=SecondsType(True),
        default="0",
        show_default=True,
        help="Longest whole request; 0 = no limit.",
    ),
]

ARRIVAL_FLAGS = [
    click.option(
        "--arrival",
        type=click.Choice([*ARRIVALS, "recorded"]),
        help="Gaps between arrivals; recorded: the trace's own, stretched to --rate. [default: poisson]",
    ),
    click.option(
        "--burstiness",
        type=click.FloatRange(min=0, min_open=True),
        metavar="B",
        help="Shape of --arrival gamma: 1 = Poisson, below 1 = burstier. [default: 1]",
    ),
    click.option("--duration", "duration_s", type=SecondsType(), metavar="S", help="Start no request after S seconds."),
]

LOAD_FLAGS = [
    click.option(
        "--concurrency",
        "--max-concurrency",
        type=COUNT,
        metavar="N",
        help="Closed loop with N requests in flight. Beside --rate or --trace: a cap.",
    ),
    click.option(
        "--rate",
        "--request-rate",
        type=click.FloatRange(min=0, min_open=True),
        metavar="R",
        help="Open loop: R requests/s. With --trace: its rows in order, at this rate.",
    ),
    *ARRIVAL_FLAGS,
]

WORK_FLAGS = [
    click.option(
        "--requests",
        "--num-prompts",
        type=COUNT,
        metavar="N",
        help="Measured requests. [default: 4 x concurrency, at least 100]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        metavar="N",
        help="Requests before the measurement; the first goes alone and is the cold one. "
        "[default: the concurrency, at least 1]",
    ),
    click.option("--input-tokens", type=SpanType(1), metavar="N|LO:HI", help="Prompt length. [default: 128]"),
    click.option("--output-tokens", type=SpanType(1), metavar="N|LO:HI", help="Answer length. [default: 128]"),
    click.option(
        "--shared-prefix-tokens",
        type=click.IntRange(min=0),
        metavar="N",
        help="All prompts begin with the same N tokens. [default: 0]",
    ),
    click.option(
        "--prompts",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Prompts of your own: one a line, or JSON Lines.",
    ),
    click.option(
        "--prompt-kind",
        type=click.Choice(["auto", "ids", "text"]),
        default="auto",
        show_default=True,
        help="Token ids (exact length, completions only) or text.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        metavar="S",
        help="Same seed, same requests. [default: a new one each run, recorded]",
    ),
    click.option("--temperature", type=click.FloatRange(min=0, max=2), default=0.0, show_default=True, metavar="T"),
    click.option(
        "--stop-at-eos",
        is_flag=True,
        help="Let answers end early. By default EOS is ignored, so that servers do the same work.",
    ),
    click.option("--extra-body", metavar="JSON", help="JSON object merged into every request body."),
    click.option("--slo", type=SloType(), metavar="LIMITS", help="Goodput limits: ttft=500ms,tpot=50ms,e2e=10s."),
]

TRACE_FLAGS = [
    click.option(
        "--trace",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Replay a recorded trace: at its times, or at --rate or --concurrency.",
    ),
    click.option("--trace-format", metavar="NAME", help="Force the format instead of recognising it."),
    click.option("--block-size", type=COUNT, metavar="N", help="Tokens per hash id, where the file does not say."),
    click.option("--speedup", type=click.FloatRange(min=0, min_open=True), metavar="X", help="2 = twice as fast."),
    click.option("--speedup-delays", is_flag=True, help="Divide think times by --speedup, too."),
    click.option("--from", "from_s", type=SecondsType(True), metavar="S", help="Replay from S seconds of trace time."),
    click.option("--to", "to_s", type=SecondsType(), metavar="S", help="Replay up to (not including) S seconds."),
    click.option("--max-gap", "max_gap_s", type=SecondsType(), metavar="S", help="Shorten longer gaps to S seconds."),
    click.option("--max-model-len", type=COUNT, metavar="N", help="Longest prompt + answer that the model takes."),
    click.option(
        "--overflow",
        type=click.Choice(["skip", "clip-input", "clip-output", "fail"]),
        help="What to do with longer rows. [default: skip]",
    ),
    click.option("--zero-output", type=click.Choice(["skip", "one"]), help="Rows without output. [default: skip]"),
    click.option(
        "--pacing",
        type=click.Choice(["open", "session"]),
        help="open: every row at its time; session: a turn waits for the one before. [default: open]",
    ),
]

CLIENT_FLAGS = [
    click.option("--workers", type=COUNT, default=1, show_default=True, metavar="N", help="Client processes."),
    click.option("--ray", metavar="ADDRESS", help="Put the workers on this Ray cluster ('local' starts one)."),
]

OUTPUT_FLAGS = [
    click.option(
        "--out",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Run folder; must not exist or be empty. [default: runs/<UTC time>-<what>]",
    ),
    click.option("--save-text", is_flag=True, help="Keep the answers' text in requests.jsonl."),
    click.option("--json", "json_", is_flag=True, help="Print run.json instead of the table."),
    click.option("--quiet", is_flag=True, help="No progress, no table: errors and the folder only."),
    click.option(
        "--max-failures",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="Exit status 0 with up to N failed requests.",
    ),
    click.option("--no-scrape", is_flag=True, help="Do not read the server's /metrics beside the load."),
]

_TRACE_NAMES = (
    "trace_format",
    "block_size",
    "speedup",
    "speedup_delays",
    "from_s",
    "to_s",
    "max_gap_s",
    "max_model_len",
    "overflow",
    "zero_output",
    "pacing",
)


def flags(*groups: list[Any]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


LOAD_WITHOUT_URL = flags(SERVER_FLAGS, LOAD_FLAGS, WORK_FLAGS, TRACE_FLAGS, CLIENT_FLAGS, OUTPUT_FLAGS)
LOAD = flags([URL_FLAG], SERVER_FLAGS, LOAD_FLAGS, WORK_FLAGS, TRACE_FLAGS, CLIENT_FLAGS, OUTPUT_FLAGS)


def options_from(values: dict[str, Any], *, needs_load: bool = True) -> Options:
    """Options of the shared flags in `values`; what is refused raises UsageError with the flag's name."""
    import orjson

    given = {name: value for name, value in values.items() if value is not None and value != () and value is not False}
    trace_options = {name: given.pop(name) for name in _TRACE_NAMES if name in given}
    body: dict[str, Any] = {}
    if (text := given.pop("extra_body", None)) is not None:
        try:
            body = orjson.loads(text)
        except ValueError as error:
            raise UsageError(f"--extra-body must be a JSON object: {error}") from None
        if not isinstance(body, dict):
            raise UsageError(f"--extra-body must be a JSON object, not {text!r}")
    for name in ("connect_timeout_s", "idle_timeout_s", "request_timeout_s"):
        if name in given:
            given[name] = given[name] or None
    given["headers"] = dict(given.pop("headers", ()))
    given["json"] = bool(given.pop("json_", False))
    given["scrape"] = not given.pop("no_scrape", False)
    _refuse_ignored(given, trace_options, needs_load)
    return Options(**given, trace_options=trace_options, extra_body=body)


def _refuse_ignored(given: dict[str, Any], trace_options: dict[str, Any], needs_load: bool) -> None:
    """A combination in which a flag would do nothing is an error, not a surprise."""
    has = given.__contains__
    if needs_load and not any(map(has, ("concurrency", "rate", "trace"))):
        raise UsageError("say how to load the server: --concurrency N, --rate R (requests/s), or --trace FILE")
    if not has("trace") and trace_options:
        raise UsageError(f"--{flag_name(next(iter(trace_options)))} needs --trace FILE")
    if has("arrival") and not has("rate"):
        raise UsageError("--arrival needs --rate R (requests/s)")
    if given.get("arrival") == "recorded" and not has("trace"):
        raise UsageError("--arrival recorded needs --trace FILE")
    if has("burstiness") and given.get("arrival") != "gamma":
        raise UsageError("--burstiness needs --arrival gamma")
    if has("trace"):
        for name in ("prompts", "shared_prefix_tokens", "input_tokens", "output_tokens"):
            if has(name):
                raise UsageError(f"--{flag_name(name)} would be ignored: the lengths come from --trace")
        if has("speedup") and has("rate"):
            raise UsageError("--speedup and --rate both set the pace of --trace: give one")
    if has("prompts"):
        for name in ("input_tokens", "shared_prefix_tokens"):
            if has(name):
                raise UsageError(f"--{flag_name(name)} would be ignored: the prompts come from --prompts")
    if given.get("prompt_kind") == "ids" and given.get("endpoint") == "chat":
        raise UsageError("--prompt-kind ids needs --endpoint completions: chat takes text only")
    if given.get("shared_prefix_tokens", 0) and (span := given.get("input_tokens", Options().input_tokens)):
        if given["shared_prefix_tokens"] >= span.low:
            raise UsageError(
                f"--shared-prefix-tokens must be below --input-tokens ({span}), not {given['shared_prefix_tokens']}"
            )
    if has("ray") and given.get("workers", 1) < 1:
        raise UsageError("--ray needs --workers N")
    if out := given.get("out"):
        folder = Path(out)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--out {out} exists and is not empty: name a new folder")


def flag_name(name: str) -> str:
    return {"from_s": "from", "to_s": "to", "max_gap_s": "max-gap", "round_s": "round-seconds"}.get(
        name, name.replace("_", "-")
    )

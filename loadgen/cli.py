"""The commands: thin, they make Options (flags.py), import their module late (a run starts in a fraction of a second)
and hand over. `loadgen --concurrency 64` is `loadgen run --concurrency 64`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from loadgen import __version__
from loadgen.arrival import ARRIVALS
from loadgen.flags import (
    ARRIVAL_FLAGS,
    CLIENT_FLAGS,
    COUNT,
    LOAD,
    LOAD_WITHOUT_URL,
    OUTPUT_FLAGS,
    SERVER_FLAGS,
    URL_FLAG,
    WORK_FLAGS,
    ListType,
    PairType,
    SecondsType,
    ShareType,
    SpanType,
    flag_name,
    flags,
    options_from,
)
from loadgen.options import Span, UsageError


def refuse_given(why: str, *names: str) -> None:
    """UsageError when one of these was typed, and would do nothing."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--{flag_name(name)} would be ignored {why}")


class _Group(click.Group):
    """`loadgen --flag ...` is `loadgen run --flag ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="loadgen")
def cli() -> None:
    """A load generator for LLM servers that tells the truth, and explains every speed-up.

    \b
    loadgen --concurrency 64                 one run against http://127.0.0.1:8000
    loadgen --rate 8 --arrival poisson       open loop
    loadgen --trace traces/chat.jsonl        a recorded trace
    loadgen compare A=URL B=URL              which is faster, by how much, and is it more than noise?
    loadgen explain                          where does the factor come from?

    `loadgen run --help` shows the flags of a run. Exit status: 0 well; 1 requests failed; 2 wrong usage or no server;
    3 the run is INVALID (the client was measured); 130 interrupted.
    """


@cli.command("run")
@LOAD
def run_command(**values: Any) -> int:
    """Load one server, print what its users would feel, keep the records."""
    from loadgen.run import run_and_report

    return run_and_report(options_from(values))


@cli.command("report")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
@click.option(
    "--as",
    "as_tool",
    type=click.Choice(["vllm", "guidellm", "aiperf", "sglang"]),
    help="The same records in another tool's definitions.",
)
@click.option("--csv", "as_csv", is_flag=True, help="One line a metric and run.")
@click.option("--json", "as_json", is_flag=True, help="The run.json documents, or --as as JSON.")
@click.option("--html", metavar="FILE", help="Write the page of these runs.")
def report_command(folders: tuple[str, ...], as_tool: str | None, as_csv: bool, as_json: bool, html: str | None) -> int:
    """Tables and pages from saved run folders, any time later. The first is the baseline."""
    from loadgen.report import main

    return main([Path(folder) for folder in folders], as_tool=as_tool, as_csv=as_csv, as_json=as_json, html=html)


@cli.command("compare")
@click.argument("servers", nargs=-1, type=PairType(), metavar="NAME=URL...")
@click.option(
    "--start", "starts", type=PairType(), multiple=True, metavar="NAME=COMMAND", help="Start NAME for its turn."
)
@click.option(
    "--rounds", type=COUNT, default=5, show_default=True, metavar="N", help="Of two loads of each, forth and back."
)
@click.option("--same-within", type=ShareType(), default="3%", show_default=True, help="Smaller differences are none.")
@click.option("--start-timeout", "start_timeout_s", type=SecondsType(), default="600s", show_default=True)
@LOAD_WITHOUT_URL
def compare_command(
    servers: tuple[tuple[str, str], ...],
    starts: tuple[tuple[str, str], ...],
    rounds: int,
    same_within: float,
    start_timeout_s: float,
    **values: Any,
) -> int:
    """Which server is faster, by how much, and is it more than noise? The first is the baseline."""
    from loadgen.compare import Plan, compare, parse_arms

    arms = parse_arms(servers, starts)
    return compare(Plan(arms, options_from(values), rounds, same_within, start_timeout_s))


@cli.command("sweep")
@click.option("--concurrency", type=ListType(int), metavar="LIST", help="Closed loops in turn: 1,2,4,8.")
@click.option("--rate", type=ListType(float), metavar="LIST", help="Open loops in turn, requests/s: 1,2,4.")
@click.option("--find-max-rate", is_flag=True, help="The highest rate that keeps --slo.")
@click.option("--at", type=ShareType(True), default="p99", show_default=True, help="Requests of a trial within --slo.")
@click.option("--keep", type=ShareType(), default="80%", show_default=True, help="Trials that must be like that.")
@click.option("--precision", type=ShareType(), default="20%", show_default=True, help="How close the rates must come.")
@click.option("--trials", type=COUNT, default=30, show_default=True, metavar="N", help="Of a rate, at most.")
@click.option(
    "--start-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="R",
    help="First rate to try. [default: one over the time that a request takes alone]",
)
@flags([URL_FLAG], SERVER_FLAGS, ARRIVAL_FLAGS, WORK_FLAGS, CLIENT_FLAGS, OUTPUT_FLAGS)
def sweep_command(
    concurrency: list[int] | None,
    rate: list[float] | None,
    find_max_rate: bool,
    at: float,
    keep: float,
    precision: float,
    trials: int,
    start_rate: float | None,
    **values: Any,
) -> int:
    """Throughput and latency over load, the knee; or the highest rate that meets the SLOs."""
    from loadgen import sweep
    from loadgen.max_rate import Wanted

    if sum((concurrency is not None, rate is not None, find_max_rate)) != 1:
        raise UsageError("sweep needs one of --concurrency 1,2,4, --rate 1,2,4 or --find-max-rate")
    if not find_max_rate:
        refuse_given("without --find-max-rate", "at", "keep", "precision", "trials", "start_rate")
    if concurrency is not None:
        options = options_from({**values, "concurrency": 1}).replace(concurrency=None)
        return sweep.sweep(options, [{"concurrency": n} for n in concurrency])
    options = options_from({**values, "rate": 1.0}).replace(rate=None)
    if rate is not None:
        return sweep.sweep(options, [{"rate": r} for r in rate])
    return sweep.find_max_rate(options, Wanted(options.slo, at, keep, precision, trials), start_rate)


@cli.command("explain")
@click.option("--arms", metavar="LIST", help="serial,static-8,static-32,continuous-32,vllm-1,vllm-32,serial-no-kv.")
@click.option("--streams", type=click.IntRange(min=2), metavar="N", help="Many streams. [default: 32; --demo: 16]")
@click.option("--width", type=click.IntRange(min=2), default=8, show_default=True, metavar="W", help="Static batch.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, metavar="N", help="Loads of each arm.")
@click.option("--round-seconds", "round_s", type=SecondsType(), metavar="S", help="[default: 10s; --demo: 4s]")
@click.option("--model", metavar="M", help="Folder or hub name. [default: the packaged SmolLM2-135M-Instruct]")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    help="Of all arms. [default: as saved, or float32 where that is faster on this CPU]",
)
@click.option("--input-tokens", type=SpanType(1), metavar="N|LO:HI", help="Prompt length. [default: 16:96]")
@click.option("--output-tokens", type=SpanType(2), metavar="N|LO:HI", help="Answer length. [default: 16:48]")
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="[default: a new one, recorded]")
@click.option("--vllm-args", default="", metavar="ARGS", help="More flags for vLLM, in one string.")
@click.option("--reference-args", default="", metavar="ARGS", help="More flags for python -m server.")
@click.option(
    "--from-table",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Start nothing: ARM STREAMS TOKENS_PER_S a line.",
)
@click.option("--demo", is_flag=True, help="A small budget: serial, static-8, vllm-1 and vllm-N only.")
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", help="[default: runs/<UTC time>-explain]")
@click.option("--json", "json_", is_flag=True, help="Print explain.json instead of the text.")
@click.option("--quiet", is_flag=True, help="No progress.")
def explain_command(**values: Any) -> int:
    """Where does the factor come from? Starts transformers and vLLM in turn, loads each, takes the factor apart."""
    from loadgen import explain

    if values["from_table"]:
        names = (
            "arms",
            "rounds",
            "round_s",
            "model",
            "device",
            "dtype",
            "demo",
            "out",
            "input_tokens",
            "output_tokens",
        )
        refuse_given("beside --from-table, which measures nothing", *names)
        return explain.explain_table(values["from_table"], values["json_"])
    return explain.explain(explain.plan_from(values))


@cli.group("trace")
def trace_group() -> None:
    """Look at recorded traces, convert them, make new ones. `loadgen --trace FILE` replays one."""


_TRACE_FILE_FLAGS = flags(
    [
        click.argument("file", type=click.Path(exists=True, dir_okay=False)),
        click.option("--trace-format", metavar="NAME", help="Force the format instead of recognising it."),
        click.option("--block-size", type=COUNT, metavar="N", help="Tokens per hash id, where the file does not say."),
    ]
)


@trace_group.command("describe")
@_TRACE_FILE_FLAGS
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--plot", metavar="HTML", help="Write a page with the arrivals over time and the lengths.")
def describe_command(file: str, **values: Any) -> int:
    """Rows, rate, burstiness, lengths, prefix reuse, sessions, quirks."""
    from loadgen.trace_tools import describe_file

    return describe_file(file, **values)


@trace_group.command("convert")
@_TRACE_FILE_FLAGS
@click.argument("out", metavar="OUT")
@click.option(
    "--as",
    "target",
    type=click.Choice(["loadgen", "mooncake", "aiperf"]),
    default="loadgen",
    show_default=True,
    help="Format of OUT.",
)
@click.option("--tokenizer", metavar="JSON", help="A tokenizer.json, to count answers that the file has as text.")
def convert_command(file: str, out: str, **values: Any) -> int:
    """Any trace that is read here to loadgen.trace/1, or to Mooncake's or AIPerf's format. OUT - is standard output."""
    from loadgen.trace_tools import convert_file

    return convert_file(file, out, **values)


@trace_group.command("generate")
@click.option("--arrival", type=click.Choice([*ARRIVALS, "none"]), default="poisson", show_default=True)
@click.option(
    "--burstiness", type=click.FloatRange(min=0, min_open=True), default=1.0, help="Shape of gamma; 1 = Poisson."
)
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), metavar="R", help="Requests/s; sessions/s with --turns."
)
@click.option("--duration", "duration_s", type=SecondsType(), metavar="S")
@click.option("--requests", type=COUNT, metavar="N", help="Requests; sessions with --turns.")
@click.option(
    "--input", "input", required=True, metavar="DRAW", help="Tokens: N, LO:HI or lognormal:MEDIAN,SIGMA[,MAX]."
)
@click.option("--output", "output", required=True, metavar="DRAW", help="Tokens, likewise.")
@click.option("--seed", type=click.IntRange(min=0), required=True, metavar="S", help="Same seed, same bytes.")
@click.option("--turns", metavar="DRAW", help="Sessions of so many turns; --input is what each turn adds.")
@click.option("--think", "think_s", metavar="DRAW", help="Seconds between the turns of a session.")
@click.option("--shared-prefix-tokens", type=click.IntRange(min=0), default=0, metavar="N", help="Before all prompts.")
@click.option("--block-size", type=COUNT, metavar="N", help="Tokens per hash id.")
@click.option("--max-input", type=COUNT, metavar="N", help="A session ends before its prompt is longer.")
@click.option("--name", default="generated", show_default=True, help="In the header.")
@click.option("--out", default="-", show_default=True, metavar="FILE", help="- is standard output.")
def generate_command(out: str, **values: Any) -> int:
    """Write a trace of drawn arrivals and lengths in the canonical format; the same flags give the same bytes."""
    from loadgen.trace_tools import generate_file

    return generate_file(out, values)


@cli.command("check")
@click.option("--streams", type=COUNT, default=256, show_default=True, metavar="N", help="Streams of 20 ms a token.")
@click.option("--rate", type=click.FloatRange(min=1), default=200.0, show_default=True, metavar="R", help="Requests/s.")
@click.option("--json", "as_json", is_flag=True)
def check_command(streams: int, rate: float, as_json: bool) -> int:
    """What this client can do here: highest event rate and its cost, accuracy, lateness. About half a minute."""
    from loadgen.check import check

    return check(streams, rate, as_json)


@cli.command("constrained")
@click.argument("url")
@click.option("--kinds", metavar="LIST", help="Of none,polite,choice,regex,json,response_format,tool. [default: all]")
@click.option("--rounds", type=COUNT, default=3, show_default=True, metavar="N", help="Interleaved.")
@click.option("--requests", type=COUNT, default=16, show_default=True, metavar="N", help="Of each kind in a round.")
@click.option("--concurrency", type=COUNT, default=4, show_default=True, metavar="N")
@click.option("--output-tokens", type=COUNT, default=96, show_default=True, metavar="N", help="At most.")
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="[default: a new one: grammars are new, too]")
@click.option("--legacy-guided", is_flag=True, help="guided_* fields, for servers older than structured_outputs.")
@flags(SERVER_FLAGS, OUTPUT_FLAGS)
def constrained_command(url: str, kinds: str | None, rounds: int, legacy_guided: bool, **values: Any) -> int:
    """What constrained decoding costs and guarantees: choice, regex, JSON schema, response_format, tools."""
    from loadgen.constrained import constrained

    if (values.get("endpoint") or "") == "completions":
        refuse_given("here: constraints are asked for on chat", "endpoint")
    tokens = Span(values["output_tokens"], values["output_tokens"])
    options = options_from({**values, "url": url, "output_tokens": tokens})
    names = None if kinds is None else [name.strip() for name in kinds.split(",") if name.strip()]
    return constrained(options, names, rounds, legacy_guided)

"""`loadgen explain`: start the arms one after another, load each, and take the factor between the ends apart.

    serial        reference, one request at a time, 1 stream: the baseline
    static-W      reference, batches of W, W streams
    continuous-N  reference, transformers' continuous batching, N streams
    vllm-1        vLLM with 1 stream: engine against engine
    vllm-N        vLLM with N streams
    serial-no-kv  reference without its KV cache: what the cache is worth

Every arm is loaded in rounds of about --round-seconds on one start of its server; its first load is not counted (the
cold request, and a wave of all streams that warms up and tells how many waves make a round). The folder: explain.json,
report.html, a run folder per arm and round, the servers' logs. The arithmetic is in factors.py, the words in
explain_report.py.

Needs the clone (it starts server/); the servers get a free port of this machine each, one at a time.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson

from loadgen import factors, run_folder
from loadgen.audit import audit
from loadgen.explain_report import text_of
from loadgen.factors import REFERENCE, VLLM, Throughput
from loadgen.metrics import columns, distribution, latencies_ms, pooled_gaps_ms, summarize
from loadgen.options import Options, Span, UnusableServer, UsageError
from loadgen.page import write_page
from loadgen.progress import Bar
from loadgen.record import Run
from loadgen.run import INTERRUPTED, OK, REQUESTS_FAILED, new_folder
from loadgen.scrape import parse
from loadgen.servers import Server
from loadgen.workers import run_load

FORMAT = "loadgen.explain/1"
QUESTION = "What is the capital of France?"
_MAX_WAVES = 60  # waves of all streams in a round; at least one, however long it takes
_MIN_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    engine: str  # REFERENCE or VLLM
    mode: str  # serial, static, continuous, vllm
    streams: int
    kv_cache: bool = True

    @property
    def server(self) -> str:
        """Arms of one server share its start."""
        return VLLM if self.engine == VLLM else self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """What `explain` is asked to do; cli.py makes it."""

    arms: Sequence[Arm]
    load: Options  # lengths, seed, prompts, transport; its url, concurrency and requests are set per arm
    model: str | None = None
    device: str = "auto"  # auto, cpu, gpu
    dtype: str = "auto"  # the same for every arm
    rounds: int = 3
    round_s: float = 10.0
    vllm_args: str = ""  # more flags for vLLM
    eager_on_cpu: bool = False  # vLLM starts in a third of the time, and gives about 15 % less
    reference_args: str = ""
    start_timeout_s: float = 600.0
    out: str | None = None
    json: bool = False
    quiet: bool = False


@dataclass(slots=True)
class Measured:
    """What came out of one arm."""

    arm: Arm
    runs: list[Run] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)  # validity of each round
    sums: list[dict[str, float]] = field(default_factory=list)  # the reference server's account of each round
    cold: dict[str, Any] | None = None
    startup_s: float | None = None
    answer: str | None = None
    server: dict[str, Any] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------- arms


def parse_arms(names: str | None, streams: int, width: int) -> list[Arm]:
    """`serial,static-8,vllm-1,vllm-32` to arms; None: all of them. Raises UsageError that names the wrong one."""
    if names is None:
        wished = [
            "serial",
            f"static-{width}",
            f"static-{streams}",
            f"continuous-{streams}",
            "vllm-1",
            f"vllm-{streams}",
        ]
    else:
        wished = [name.strip() for name in names.split(",") if name.strip()]
    arms = [parse_arm(name) for name in dict.fromkeys(wished)]
    if not arms:
        raise UsageError("--arms names no arm")
    return arms


def parse_arm(name: str) -> Arm:
    if name == "serial":
        return Arm(name, REFERENCE, "serial", 1)
    if name == "serial-no-kv":
        return Arm(name, REFERENCE, "serial", 1, kv_cache=False)
    match = re.fullmatch(r"(static|continuous|vllm)-([1-9]\d{0,4})", name)
    if not match:
        raise UsageError(f"--arms: {name!r} is none of serial, serial-no-kv, static-N, continuous-N, vllm-N")
    return Arm(name, VLLM if match[1] == "vllm" else REFERENCE, match[1], int(match[2]))


def throughput_of(arm: Arm, rounds: Sequence[float]) -> Throughput | None:
    """The arm as factors.py takes it; None for the one without a KV cache, which is no part of the split."""
    if not arm.kv_cache:
        return None
    return Throughput(arm.name, arm.engine, arm.mode != "serial", arm.streams, tuple(rounds))


# ---------------------------------------------------------------- the command


def explain(plan: Plan) -> int:
    """Run it all; the exit status of a run. Raises UsageError or UnusableServer before anything is left behind."""
    wished = [throughput for arm in plan.arms if (throughput := throughput_of(arm, [1.0]))]
    factors.roles(wished)  # a missing arm is said before the first server starts
    clone = _clone()
    if plan.load.seed is None:
        plan = replace(plan, load=plan.load.replace(seed=int.from_bytes(os.urandom(4)) >> 1))
    folder = new_folder(plan.out, "explain")
    folder.mkdir(parents=True, exist_ok=True)
    model = plan.model or _packaged_model(clone)
    machine = _machine(clone, plan, model)
    plan = replace(
        plan,
        dtype=machine["dtype"] if plan.dtype == "auto" else plan.dtype,
        device="gpu" if machine["device"] == "cuda" else "cpu",
    )
    measured: list[Measured] = []
    interrupted = False
    try:
        servers: dict[str, list[Arm]] = {}
        for arm in plan.arms:
            servers.setdefault(arm.server, []).append(arm)
        for name, arms in servers.items():
            _measure_server(plan, clone, folder, model, name, arms, measured)
    except KeyboardInterrupt:
        interrupted = True
    document = _document(plan, model, measured, machine, interrupted)
    run_folder.write_document(folder / "explain.json", document)
    text = text_of(document)
    shown = [(m, m.folders[-1]) for m in measured if m.folders]
    if shown:
        write_page(
            [path for _, path in shown],
            folder / "report.html",
            names=[m.arm.name for m, _ in shown],
            texts={"Where the factor comes from": text},
            title="loadgen explain",
        )
    if plan.json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    else:
        click.echo(text)
        click.echo(f"records and report: {folder}")
    if interrupted:
        return INTERRUPTED
    return REQUESTS_FAILED if any(m["failed"] for m in document["arms"].values()) else OK


def explain_table(path: str, as_json: bool) -> int:
    """`--from-table`: the split of throughputs measured elsewhere. Raises UsageError with the line that is wrong."""
    arms = read_table(Path(path))
    document: dict[str, Any] = {
        "format": FORMAT,
        "source": str(path),
        "arms": {
            arm.name: {"engine": arm.engine, "streams": arm.streams, "tokens_per_s": arm.tokens_per_s} for arm in arms
        },
    } | factors.split(factors.roles(arms))
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    else:
        click.echo(text_of(document))
    return OK


def read_table(path: Path) -> list[Throughput]:
    """CSV, TSV or blank-separated lines `arm streams tokens_per_s`, # comments, an optional head line.

    Arms: serial, static (or static-8), continuous, vllm (or vllm-1); several lines of one arm are its rounds.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--from-table {path}: {error}") from None
    rounds: dict[tuple[str, int], list[float]] = {}
    for number, line in enumerate(lines, 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        cells = next(csv.reader([line])) if "," in line else line.split("\t") if "\t" in line else line.split()
        cells = [cell.strip() for cell in cells]
        if not rounds and not any(cell.replace(".", "", 1).isdigit() for cell in cells):
            continue  # a head line
        try:
            name, streams, rate = cells[0].lower(), int(cells[1]), float(cells[2])
            if len(cells) != 3 or streams < 1 or not rate > 0 or rate == float("inf"):
                raise ValueError
        except (ValueError, IndexError):
            raise UsageError(
                f"--from-table {path}, line {number}: must be ARM, STREAMS (1 or more), TOKENS_PER_S (above 0), "
                f"not {line!r}"
            ) from None
        kind = re.fullmatch(r"(serial|static|continuous|vllm)(?:[ _-]?\d+)?", name)
        if not kind:
            raise UsageError(
                f"--from-table {path}, line {number}: arm {cells[0]!r} is none of serial, static, continuous, vllm"
            )
        rounds.setdefault((kind[1], streams), []).append(rate)
    return [
        Throughput(
            mode if mode == "serial" else f"{mode}-{streams}",
            VLLM if mode == "vllm" else REFERENCE,
            mode != "serial",
            streams,
            tuple(rates),
        )
        for (mode, streams), rates in rounds.items()
    ]


# ---------------------------------------------------------------- one server


def _measure_server(
    plan: Plan, clone: Path, folder: Path, model: str, name: str, arms: Sequence[Arm], measured: list[Measured]
) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = _command(plan, clone, model, arms, port)
    log = folder / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    _say(plan, f"starting {name}: {shlex.join(command)}")
    environment = {**os.environ, "LOADGEN_PYTHON": sys.executable, "PYTHONPATH": _python_path(clone)}
    with Server(name, command, url, log, timeout_s=plan.start_timeout_s, env=environment) as server:
        answer = _ask(url)
        for arm in arms:
            result = Measured(arm, startup_s=server.startup_s, answer=answer)
            measured.append(result)
            _measure_arm(plan, folder, url, result)
        gauges = _gauges(url)
        for result in measured[-len(arms) :]:
            result.gauges = gauges


def _measure_arm(plan: Plan, folder: Path, url: str, result: Measured) -> None:
    arm = result.arm
    options = plan.load.replace(url=url, concurrency=arm.streams, requests=arm.streams, quiet=plan.quiet)
    first = _load(plan, options.replace(warmup=1), f"{arm.name} warm-up")
    result.cold = summarize(first)["cold"]
    result.server = dict(first.server)
    failed = next((record for record in first.measured if record.failure is not None), None)
    if failed is not None and all(record.failure for record in first.measured):
        raise UnusableServer(f"{arm.name}: every request of the warm-up failed: {failed.failure}")
    wave_s = max((first.end_ns - first.start_ns) / 1e9, 1e-3)
    waves = min(max(round(plan.round_s / wave_s), 1), _MAX_WAVES)
    for number in range(1, plan.rounds + 1):
        seed = (options.seed or 0) + number  # a prompt seen before would come out of a prefix cache
        run = _load(
            plan,
            options.replace(requests=waves * arm.streams, warmup=1, seed=seed),
            f"{arm.name} round {number}/{plan.rounds}",
        )
        summary = summarize(run)
        validity = audit(run).as_dict()
        path = folder / arm.name / f"round-{number}"
        path.parent.mkdir(exist_ok=True)
        run_folder.save(path, run, summary, validity)
        result.runs.append(run)
        result.folders.append(path)
        result.summaries.append(summary)
        result.valid.append(validity)
        if run.interrupted:
            raise KeyboardInterrupt
        if arm.engine == REFERENCE:
            batches = _get(f"{url}/debug/batches")["batches"]
            sums = factors.batch_sums(batches, run.start_ns / 1e9, run.end_ns / 1e9)
            if sums is not None:
                result.sums.append(sums)


def _load(plan: Plan, options: Options, label: str) -> Run:
    run = run_load(options, progress=None if plan.quiet else Bar(label))
    if run.interrupted and not run.measured:
        raise KeyboardInterrupt
    return run


def _command(plan: Plan, clone: Path, model: str, arms: Sequence[Arm], port: int) -> list[str]:
    longest = plan.load.input_tokens.high + plan.load.output_tokens.high + 64
    context = ["--max-model-len", str(max(_MIN_CONTEXT, longest)), "--dtype", plan.dtype]
    if arms[0].engine == VLLM:
        device = [] if plan.device == "auto" else [f"--{plan.device}"]
        script = ["bash", str(clone / "server" / "start_vllm.sh"), "--model", model, "--port", str(port)]
        return [*script, *context, *device, *shlex.split(_vllm_args(plan))]
    arm = arms[0]
    command = [sys.executable, "-m", "server", "--model", model, "--port", str(port), "--mode", arm.mode, *context]
    command += ["--device", {"auto": "auto", "cpu": "cpu", "gpu": "cuda"}[plan.device]]
    if arm.mode != "serial":
        command += ["--batch-size", str(arm.streams)]
    if not arm.kv_cache:
        command.append("--no-kv-cache")
    return [*command, *shlex.split(plan.reference_args)]


def _vllm_args(plan: Plan) -> str:
    eager = plan.eager_on_cpu and plan.device == "cpu" and "--enforce-eager" not in plan.vllm_args
    return f"{plan.vllm_args} --enforce-eager".strip() if eager else plan.vllm_args


def _ask(url: str) -> str | None:
    """What the model says to a plain question: a server that is fast and talks nonsense is not fast."""
    try:
        model = _get(f"{url}/v1/models")["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 16,
            "temperature": 0,
        }
        return str(_get(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"]).strip()
    except (OSError, ValueError, LookupError, TypeError):  # a model without a chat template answers 400
        return None


def _get(url: str, body: Mapping[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=120) as response:
        return json.loads(response.read())


def _gauges(url: str) -> dict[str, float]:
    """What the server says of its memory: bytes of weights, KV bytes a token, KV tokens that fit."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/metrics", timeout=30) as response:
            text = response.read()
    except OSError:
        return {}
    wanted = {}
    for name, value in parse(text).items():
        if name in ("reference_model_weight_bytes", "reference_kv_bytes_per_token"):
            wanted[name.removeprefix("reference_")] = value
    config = re.search(rb"vllm:cache_config_info\{([^}]*)\}", text)
    if config:
        labels = dict(re.findall(rb'(\w+)="([^"]*)"', config[1]))
        try:
            wanted["kv_tokens_that_fit"] = float(labels[b"num_gpu_blocks"]) * float(labels[b"block_size"])
        except (KeyError, ValueError):
            pass
    return wanted


def _machine(clone: Path, plan: Plan, model: str) -> dict[str, Any]:
    """{device, dtype, bytes_per_s}: the dtype that is fast here, so that all arms compute alike, and the memory's
    bandwidth, by `python -m server.machine` (this package does without torch)."""
    device = {"auto": "auto", "cpu": "cpu", "gpu": "cuda"}[plan.device]
    _say(plan, "measuring the machine: memory bandwidth, fast dtype")
    command = [sys.executable, "-m", "server.machine", "--device", device, "--model", model]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise UsageError(f"the machine could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return dict(json.loads(done.stdout))


# ---------------------------------------------------------------- the document


def _document(
    plan: Plan, model: str, measured: Sequence[Measured], machine: Mapping[str, Any], interrupted: bool
) -> dict[str, Any]:
    arms = {m.arm.name: _arm_document(m) for m in measured if m.runs}
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": model,
        "interrupted": interrupted,
        "rounds": plan.rounds,
        "seed": plan.load.seed,
        "input_tokens": str(plan.load.input_tokens),
        "output_tokens": str(plan.load.output_tokens),
        "dtype": plan.dtype,
        "vllm_args": _vllm_args(plan),
        "reference_args": plan.reference_args,
        "machine": machine,
        "arms": arms,
    }
    complete = [
        throughput
        for m in measured
        if m.runs and (throughput := throughput_of(m.arm, arms[m.arm.name]["rounds_tokens_per_s"]))
    ]
    if interrupted:
        return document
    if any(not all(rate and rate > 0 for rate in entry["rounds_tokens_per_s"]) for entry in arms.values()):
        return document  # an arm without a single token: the table says which
    chosen = factors.roles(complete)
    document |= factors.split(chosen)
    sums = {m.arm.name: factors.add_sums(m.sums) for m in measured if m.sums}
    accounts = {
        m.arm.name: factors.static_account(
            sums[chosen.base.name],
            sums[m.arm.name],
            serial_per_s=arms[chosen.base.name]["output_tokens"] / arms[chosen.base.name]["seconds"],
            static_per_s=arms[m.arm.name]["output_tokens"] / arms[m.arm.name]["seconds"],
        )
        for m in measured
        if m.arm.mode == "static" and m.arm.name in sums and chosen.base.name in sums
    }
    if accounts:
        document["static_account"] = {"arm": next(iter(accounts)), **next(iter(accounts.values()))}
        document["static_accounts"] = accounts
    if "serial-no-kv" in arms:
        with_cache, without = arms[chosen.base.name]["tokens_per_s"], arms["serial-no-kv"]["tokens_per_s"]
        document["kv_cache"] = {
            "with_tokens_per_s": with_cache,
            "without_tokens_per_s": without,
            "ratio": with_cache / without,
        }
    return document | {"memory": _memory(measured, sums, arms, machine["bytes_per_s"])}


def _arm_document(m: Measured) -> dict[str, Any]:
    records = [record for run in m.runs for record in run.measured]
    good = [record for record in records if record.ok]
    ttft = distribution(latencies_ms(columns(good))["ttft_ms"]) if good else distribution(np.empty(0))
    gaps = distribution(pooled_gaps_ms(good)[0]) if good else distribution(np.empty(0))
    rounds = [summary["metrics"]["output_tokens_per_s"] for summary in m.summaries]
    usable = all(rate and rate > 0 for rate in rounds)
    asked = sum(record.asked_output_tokens or 0 for record in good)
    return {
        "engine": m.arm.engine,
        "mode": m.arm.mode,
        "streams": m.arm.streams,
        "requests": len(records),
        "failed": len(records) - len(good),
        "input_tokens": sum(record.prompt_tokens or 0 for record in good),
        "output_tokens": sum(record.output_tokens or 0 for record in good),
        "output_tokens_asked": asked,
        "seconds": sum((run.end_ns - run.start_ns) / 1e9 for run in m.runs),
        "tokens_per_s": float(np.exp(np.mean(np.log(rounds)))) if usable else None,
        "rounds_tokens_per_s": rounds,
        "ttft_ms": {key: ttft[key] for key in ("n", "p50", "p99")},
        "gap_ms": {key: gaps[key] for key in ("n", "p50", "p99")},
        "cold": m.cold,
        "startup_s": m.startup_s,
        "answer": m.answer,
        "server": {key: m.server.get(key) for key in ("url", "model", "owned_by", "version")},
        "valid": all(validity["valid"] for validity in m.valid),
        "account": factors.add_sums(m.sums) | {"shares": factors.shares(factors.add_sums(m.sums))} if m.sums else None,
    }


def _memory(
    measured: Sequence[Measured],
    sums: Mapping[str, Mapping[str, float]],
    arms: Mapping[str, Mapping[str, Any]],
    bandwidth: float,
) -> dict[str, Any]:
    """Bytes of weights and KV, what is reserved and used, and the roofline of a decode step of each arm."""
    reference = next((m.gauges for m in measured if m.gauges.get("kv_bytes_per_token")), {})
    weights, per_token = reference.get("model_weight_bytes"), reference.get("kv_bytes_per_token")
    result: dict[str, Any] = {"weight_bytes": weights, "kv_bytes_per_token": per_token, "arms": {}}
    for m in measured:
        entry: dict[str, Any] = {}
        name, arm = m.arm.name, arms[m.arm.name]
        account = sums.get(name)
        if account:
            entry["kv_bytes_reserved"], entry["kv_bytes_used"] = account["kv_bytes_reserved"], account["kv_bytes_used"]
            step_s, rows = account["decode_s"] / account["steps"], account["row_steps"] / account["steps"]
        else:
            step_s, rows = (arm["gap_ms"]["p50"] or 0) / 1e3, float(m.arm.streams)
        if "kv_tokens_that_fit" in m.gauges:
            entry["kv_tokens_that_fit"] = m.gauges["kv_tokens_that_fit"]
        served = arm["requests"] - arm["failed"]
        if weights and per_token is not None and step_s and served:
            context = (arm["input_tokens"] + arm["output_tokens"] / 2) / served
            entry["roofline"] = factors.roofline(
                weight_bytes=weights,
                kv_bytes_per_token=per_token if m.arm.kv_cache else 0.0,
                rows=rows,
                context_tokens=context,
                step_s=step_s,
                bandwidth=bandwidth,
            )
        result["arms"][name] = entry
    return result


# ---------------------------------------------------------------- this machine


def _clone() -> Path:
    """The folder that has server/; UsageError when loadgen was installed without it."""
    for folder in (Path(__file__).resolve().parent.parent, Path.cwd()):
        if (folder / "server" / "__main__.py").exists():
            return folder
    raise UsageError("explain starts the servers of the clone: run it there (or use --from-table FILE)")


def _python_path(clone: Path) -> str:
    return os.pathsep.join(filter(None, (str(clone), os.environ.get("PYTHONPATH"))))


def _packaged_model(clone: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "server.packaged_model"], cwd=clone, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        raise UsageError(f"{done.stderr.strip().splitlines()[-1]} (bash setup.sh does it)")
    return done.stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(plan: Plan, text: str) -> None:
    if not plan.quiet:
        click.echo(text, err=True)


def plan_from(values: Mapping[str, Any]) -> Plan:
    """The flags of `loadgen explain` as a Plan. Raises UsageError.

    The demo's answers are equally long, so that every arm does the same work for a request; else lengths differ, and a
    static batch drags its dead rows along as it does in life.
    """
    demo = values["demo"]
    names = values["arms"]
    streams = values["streams"] or (16 if demo else 32)
    if demo:
        if names is not None:
            raise UsageError("--arms would be ignored: --demo has its own")
        names = f"serial,static-{values['width']},vllm-1,vllm-{streams}"
    if values["out"] and Path(values["out"]).exists() and any(Path(values["out"]).iterdir()):
        raise UsageError(f"--out {values['out']} exists and is not empty: name a new folder")
    load = Options(
        input_tokens=values["input_tokens"] or (Span(16, 64) if demo else Span(16, 96)),
        output_tokens=values["output_tokens"] or (Span(32, 32) if demo else Span(16, 48)),
        prompt_kind="text",
        seed=values["seed"],
    )
    return Plan(
        arms=parse_arms(names, streams, values["width"]),
        load=load,
        model=values["model"],
        device=values["device"],
        dtype=values["dtype"],
        rounds=values["rounds"],
        round_s=values["round_s"] or (4.0 if demo else 10.0),
        vllm_args=values["vllm_args"],
        eager_on_cpu=demo,
        reference_args=values["reference_args"],
        out=values["out"],
        json=values["json_"],
        quiet=values["quiet"],
    )

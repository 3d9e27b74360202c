"""What a load generator costs and how far off it is: clients against the mock server that logs the truth.

    python -m benchmarks.client                               ours on both transports, 1024 streams of 20 ms a token
    python -m benchmarks.client --clients wire,aiohttp,bare,vllm --streams 256 --repeats 3
    python -m benchmarks.client --unpaced --streams 64        as fast as it goes

CPU per event is user + system of the client and its children, less that client's own one-request run (start-up,
imports, report). Clients are interleaved inside each repeat; figures are medians (lowest to highest). The server has
core 0, the client the others. `bare` is the least that an aiohttp loop does; `vllm`: `vllm bench serve`, if installed.
TTFT and gap errors: what the client reports minus what the server says it sent, by percentile; peers do not say which
request is which, so theirs is the difference of the two percentiles, as it is for ours.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.check import mock_server, truth_of
from loadgen.run_folder import load

TOKENS = 128
INPUT = 32
BARE = """
import asyncio, json, sys, time
import aiohttp, uvloop
url, streams, requests, tokens, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
async def main():
    body = {"model": "mock-model", "prompt": "x " * 32, "max_tokens": tokens, "stream": True}
    ttfts, gaps, left = [], [], iter(range(requests))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async def slot():
            for _ in left:
                start = last = time.perf_counter()
                first = True
                async with session.post(url + "/v1/completions", json=body) as answer:
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        now = time.perf_counter()
                        if json.loads(line[6:])["choices"]:
                            (ttfts if first else gaps).append((now - last) * 1e3)
                            first, last = False, now
        await asyncio.gather(*(slot() for _ in range(streams)))
    json.dump([ttfts, gaps], open(out, "w"))
uvloop.run(main())
"""


@dataclass(frozen=True)
class Load:
    streams: int
    requests: int
    tokens: int


@dataclass
class Result:
    cpu_s: float
    wall_s: float
    peak_mib: float
    events: int
    ttft_ms: Any
    gap_ms: Any
    valid: bool | None = None


Client = Callable[[str, Load, Path], tuple[list[str], Callable[[], tuple[Any, Any, bool | None]]]]


def ours(transport: str) -> Client:
    def client(url: str, load_: Load, folder: Path) -> tuple[list[str], Callable[[], tuple[Any, Any, bool | None]]]:
        command = [sys.executable, "-m", "loadgen", "--url", url, "--model", "mock-model", "--transport", transport]
        command += ["--concurrency", str(load_.streams), "--requests", str(load_.requests), "--warmup", "0", "--quiet"]
        command += ["--input-tokens", str(INPUT), "--output-tokens", str(load_.tokens), "--no-scrape"]

        def read() -> tuple[Any, Any, bool | None]:
            run = load(folder / "o")
            stamps = [np.frombuffer(r.event_stamps_ns, np.int64) for r in run.measured if r.num_events]
            ttft = [(s[0] - r.sent_ns) / 1e6 for s, r in zip(stamps, run.measured, strict=True) if r.sent_ns]
            valid = json.loads((folder / "o" / "run.json").read_text())["validity"]["valid"]
            return np.array(ttft), np.concatenate([np.diff(s) for s in stamps]) / 1e6, valid

        return [*command, "--out", str(folder / "o")], read

    return client


def bare(url: str, load_: Load, folder: Path) -> tuple[list[str], Callable[[], tuple[Any, Any, bool | None]]]:
    out = folder / "bare.json"

    def read() -> tuple[Any, Any, bool | None]:
        ttft, gaps = json.loads(out.read_text())
        return np.array(ttft), np.array(gaps), None

    numbers = (load_.streams, load_.requests, load_.tokens)
    return [sys.executable, "-c", BARE, url, *map(str, numbers), str(out)], read


def vllm(url: str, load_: Load, folder: Path) -> tuple[list[str], Callable[[], tuple[Any, Any, bool | None]]]:
    from server.packaged_model import packaged_model

    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", "mock-model"]
    command += ["--tokenizer", str(packaged_model()), "--dataset-name", "random", "--random-input-len", str(INPUT)]
    command += ["--random-output-len", str(load_.tokens), "--num-prompts", str(load_.requests), "--ignore-eos"]
    command += ["--max-concurrency", str(load_.streams), "--disable-tqdm", "--ready-check-timeout-sec", "0"]
    command += ["--num-warmups", "0", "--save-result", "--save-detailed", "--result-dir", str(folder)]
    command += ["--result-filename", "vllm.json"]

    def read() -> tuple[Any, Any, bool | None]:
        result = json.loads((folder / "vllm.json").read_text())
        gaps = [np.array(x) for x in result["itls"] if x] or [np.zeros(0)]
        return np.array(result["ttfts"]) * 1e3, np.concatenate(gaps) * 1e3, None

    return command, read


CLIENTS: dict[str, Client] = {"wire": ours("wire"), "aiohttp": ours("aiohttp"), "bare": bare, "vllm": vllm}


def run_once(client: Client, url: str, load_: Load) -> tuple[Result, dict[str, dict[str, Any]]]:
    """Run the client to its end; what it reports, what it used, and what the server says."""
    truth_of(url)
    with tempfile.TemporaryDirectory() as folder:
        command, read = client(url, load_, Path(folder))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - begin
        if process.returncode not in (0, 3):  # 3: ours said INVALID, which the table shows
            raise SystemExit((Path(folder) / "log").read_text()[-2000:])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        ttft, gaps, valid = read()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    events = len(ttft) + len(gaps)
    return Result(cpu_s, wall_s, usage.ru_maxrss / 1024, events, ttft, gaps, valid), truth_of(url)


def errors(result: Result, truth: dict[str, dict[str, Any]]) -> tuple[float, float, float]:
    """TTFT p50, TTFT p99 and gap p99, measured minus true, ms."""
    sent = [np.array(entry["sent_ns"]) for entry in truth.values()]
    true_ttft = [(s[0] - entry["read_ns"]) / 1e6 for s, entry in zip(sent, truth.values(), strict=True)]
    true_gaps = np.concatenate([np.diff(s) for s in sent]) / 1e6

    def apart(seen: Any, true: Any, q: float) -> float:
        return float(np.quantile(seen, q) - np.quantile(true, q))

    return (
        apart(result.ttft_ms, true_ttft, 0.5),
        apart(result.ttft_ms, true_ttft, 0.99),
        apart(result.gap_ms, true_gaps, 0.99),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--clients", default="wire,aiohttp", help=f"of {','.join(CLIENTS)} [%(default)s]")
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--requests", type=int, help="[twice the streams]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--unpaced", action="store_true", help="no pauses between events")
    args = parser.parse_args()
    names = args.clients.split(",")
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"--clients: {unknown[0]} is none of {', '.join(CLIENTS)}")
    load_ = Load(args.streams, args.requests or 2 * args.streams, TOKENS)
    pace = (0, 0, 0) if args.unpaced else (50, 20, 20)
    rows: dict[str, list[list[float]]] = {name: [] for name in names}
    for repeat in range(args.repeats):
        for name in names:
            with mock_server(*pace) as url:
                alone, _ = run_once(CLIENTS[name], url, Load(1, 1, 8))
                result, truth = run_once(CLIENTS[name], url, load_)
            net = (result.cpu_s - alone.cpu_s) / result.events * 1e6
            row = [net, result.events / (result.wall_s - alone.wall_s), *errors(result, truth), result.peak_mib]
            rows[name].append([*row, alone.wall_s])
            print(f"  {repeat + 1}/{args.repeats} {name}: {net:.2f} us/event, valid: {result.valid}", file=sys.stderr)
    print(f"{load_.requests} requests of {TOKENS} tokens, {load_.streams} at once; medians of {args.repeats} (range)")
    heads = ["us/event", "events/s", "TTFT p50 err ms", "p99 err ms", "gap p99 err ms", "peak MiB", "one request s"]
    print("client".ljust(10) + "".join(head.rjust(26) for head in heads))
    for name, measured in rows.items():
        cells = []
        for column in zip(*measured, strict=True):
            digits = 0 if statistics.median(column) >= 1000 else 2
            middle, low, high = (f"{v:.{digits}f}" for v in (statistics.median(column), min(column), max(column)))
            cells.append(f"{middle} ({low} to {high})".rjust(26))
        print(name.ljust(10) + "".join(cells))


if __name__ == "__main__":
    main()

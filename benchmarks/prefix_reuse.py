"""Does a server find the prefixes that a trace shares? Its own counters against what the prompts hold.

python -m benchmarks.prefix_reuse http://127.0.0.1:8000 trace.jsonl --server-block 16 [--requests 100] [--seed 1]

The same rows are sent twice, one request in flight: with the prefixes of the trace, then with prompts of the same
lengths that share nothing. Before each, the expected share of hits is counted on the very tokens that will be sent: a
cache of blocks of --server-block tokens, without end, in which a request finds the leading full blocks that an earlier
one (the warm-up too) left, but never its whole prompt: the last token must always be computed. Beside it stands the
trace's own share (blocks of the trace). After each run the growth of the server's counters
(vllm:prefix_cache_hits_total / _queries_total, in tokens) gives the share that the server saw.

Exit status 0 when, with the prefixes, server and expectation are within --points (5), and without them below
--points. The server must be one that takes token ids, with a cache that was empty of this seed, and large enough:
blocks that were evicted count as missing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from loadgen.options import Options
from loadgen.plan import make_plan
from loadgen.scrape import parse
from loadgen.target import base_url, make_target, probe
from loadgen.trace import line_of
from loadgen.trace_describe import describe
from loadgen.transport import make_transport
from loadgen.workers import run_load

HITS, QUERIES = "prefix_cache_hits_total", "prefix_cache_queries_total"


def expected_share(prompts: Iterable[Sequence[int]], block: int) -> float:
    """Share of the prompts' tokens that a cache of such blocks, cold at the start and without end, holds already."""
    known: set[int] = set()
    hit_tokens = total = 0
    for prompt in prompts:
        chain, found, unbroken = 0, 0, True
        for start in range(0, len(prompt) - block + 1, block):
            chain = hash((chain, *prompt[start : start + block]))
            unbroken = unbroken and chain in known
            found += block * (unbroken and start + block < len(prompt))
            known.add(chain)
        hit_tokens += found
        total += len(prompt)
    return hit_tokens / total if total else 0.0


def counters(url: str) -> tuple[float, float]:
    """(hits, queries) of the server's prefix cache so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        values = parse(b"\n".join(line for line in answer.read().splitlines() if not line.startswith(b"#")) + b"\n")
    found = [next((v for name, v in values.items() if name.endswith(want)), None) for want in (HITS, QUERIES)]
    if found[0] is None or found[1] is None:
        sys.exit(f"{url}/metrics has no counters {HITS} and {QUERIES}: is this vLLM, with prefix caching on?")
    return found[0], found[1]


async def prompts_of(options: Options) -> list[list[int]]:
    """Every prompt in the order in which one slot sends them, warm-up first."""
    transport = make_transport(options.transport, make_target(options))
    try:
        plan = await make_plan(options, await probe(transport, options), transport)
    finally:
        await transport.close()
    bodies = [orjson.loads(request.body)["prompt"] for _, request in (*plan.before, *plan.measured)]
    if not all(isinstance(prompt, list) for prompt in bodies):
        sys.exit("the prompts are text: this needs a server that takes token ids on /v1/completions")
    return bodies


def without_prefixes(path: Path, out: Path) -> Path:
    """The rows of a canonical or Mooncake file with their lengths and nothing shared."""
    with open(path, "rb") as file, open(out, "wb") as written:
        for line in file:
            row: dict[str, Any] = orjson.loads(line)
            for name in ("hash_ids", "segments", "prefix_length"):
                row.pop(name, None)
            written.write(line_of(row))
    return out


def measure(name: str, options: Options, block: int) -> tuple[float, float]:
    """(expected share, the server's share)."""
    url = base_url(options.url)
    prompts = asyncio.run(prompts_of(options))
    expected = expected_share(prompts, block)
    before = counters(url)
    run = run_load(options)
    after = counters(url)
    failed = [record for record in run.measured if not record.ok]
    if failed:
        sys.exit(f"{len(failed)} of {len(run.measured)} requests failed: {failed[0].failure}")
    queries = after[1] - before[1]
    seen = (after[0] - before[0]) / queries if queries else 0.0
    said = sum(record.cached_tokens or 0 for record in run.measured)
    asked = sum(map(len, prompts))
    print(
        f"{name:<17} {len(run.measured)} requests, {asked:,} prompt tokens: expected {expected:.1%}, the server's "
        f"counters {seen:.1%} of {queries:,.0f} tokens; usage said {said:,} cached tokens"
    )
    return expected, seen


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefix_reuse", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("url")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--server-block", type=int, default=16, help="tokens per block of the server's cache (16)")
    parser.add_argument("--block-size", type=int, help="tokens per hash id, where the file does not say")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--max-output", type=int, default=4, help="the answers do not matter here (4)")
    parser.add_argument("--max-model-len", type=int, help="longer rows are skipped; [the server's own]")
    parser.add_argument("--seed", type=int, default=1, help="the second run takes the next one")
    parser.add_argument("--points", type=float, default=5.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "short.jsonl"
        with open(args.trace, "rb") as file, open(short, "wb") as out:
            for line in file:
                row = orjson.loads(line)
                if "schema" not in row:
                    row["output_length"] = min(row.get("output_length") or 1, args.max_output)
                out.write(line_of(row))
        described = describe(short, block_size=args.block_size)
        trace_options = {"block_size": described["block_size"]}
        if args.max_model_len is not None:
            trace_options["max_model_len"] = args.max_model_len
        options = Options(
            url=args.url,
            trace=str(short),
            trace_options={k: v for k, v in trace_options.items() if v is not None},
            concurrency=1,
            warmup=1,
            requests=args.requests,
            seed=args.seed,
        )
        share = described["prefix_hit_token_share"]
        print(
            f"trace: {described['rows']:,} rows, {share or 0:.1%} of the tokens in blocks of {described['block_size']}"
        )
        expected, seen = measure("with prefixes", options, args.server_block)
        unique = options.replace(trace=str(without_prefixes(short, Path(folder) / "unique.jsonl")), seed=args.seed + 1)
        nothing, unique_seen = measure("without prefixes", unique, args.server_block)
    good = abs(expected - seen) * 100 <= args.points and max(nothing, unique_seen) * 100 <= args.points
    print("agrees" if good else f"does NOT agree within {args.points:g} points")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

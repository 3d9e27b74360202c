"""What the reference server costs over a bare transformers generate, on the same prompts, in alternating rounds.

    python -m benchmarks.reference_overhead [--rounds 5] [--tokens 32] [--out FILE.json]

serial: tokens/s over HTTP at concurrency 1 against a loop of `model.generate`, one prompt at a time.
static 8: 8 streams in full batches against `model.generate` on the same prompts, 8 at a time, left-padded.
Ratio = HTTP / bare, median over the rounds; 1.0 is no overhead. Goal: 0.97 and 0.95.
The bare loop tokenizes, generates and stops there; the server decodes text and streams it, event by event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import aiohttp

from benchmarks.reference_common import Bare, in_turn, prompts, server, stream


async def over_http(url: str, texts: list[str], tokens: int, width: int) -> float:
    """tokens/s of all texts, `width` streams at a time."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=width)) as session:
        begin = time.perf_counter()
        await in_turn(width, [stream(session, f"{url}/v1/completions", {**body, "prompt": text}) for text in texts])
        return len(texts) * tokens / (time.perf_counter() - begin)


def without(bare: Bare, texts: list[str], tokens: int, width: int) -> float:
    begin = time.perf_counter()
    for i in range(0, len(texts), width):
        bare.generate(texts[i : i + width], tokens)
    return len(texts) * tokens / (time.perf_counter() - begin)


def compare(bare: Bare, mode: str, width: int, count: int, tokens: int, rounds: int) -> dict[str, object]:
    texts = prompts(count)
    flags = ("--mode", mode, "--model", bare.folder, "--batch-size", str(width))
    pairs = []
    with server(*flags) as url:
        for i in range(-1, rounds):  # round -1 is not counted
            both = {}
            for arm in ("http", "bare") if i % 2 else ("bare", "http"):
                if arm == "http":
                    both[arm] = asyncio.run(over_http(url, texts, tokens, width))
                else:
                    both[arm] = without(bare, texts, tokens, width)
            ratio = both["http"] / both["bare"]
            counted = "" if i >= 0 else "  (not counted)"
            rates = f"bare {both['bare']:7.2f}  http {both['http']:7.2f} tokens/s"
            print(f"{mode} {width}: {rates}  ratio {ratio:.3f}{counted}", flush=True)
            if i >= 0:
                pairs.append(both)
    ratio = statistics.median(p["http"] / p["bare"] for p in pairs)
    print(f"{mode} {width}: median ratio {ratio:.3f}")
    return {"mode": mode, "width": width, "tokens": tokens, "requests": count, "rounds": pairs, "median_ratio": ratio}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--dtype", default="auto")
    p.add_argument("--out")
    args = p.parse_args()
    bare = Bare(args.dtype)
    results = [
        compare(bare, "serial", 1, 8, args.tokens, args.rounds),
        compare(bare, "static", 8, 32, args.tokens, args.rounds),
    ]
    if args.out:
        with open(args.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()

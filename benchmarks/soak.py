"""A long mixed load on the reference server: does anything leak, stick, or not add up?

    python -m benchmarks.soak --minutes 30 --mode static

16 clients; a tenth of their requests are dropped after a few events (or while they wait), some are not streamed, some
carry a constraint, some are refused. Every 10 s the server's memory, threads and sockets are looked at. At the end
nothing may run or wait, the counters must add up, and memory must not have grown between the second and the last
sixth of the time by more than 5 % (the first sixth fills caches). Exit status 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import psutil

from benchmarks.reference_common import prompts, server_process

CLIENTS = 16


async def client(number: int, session: aiohttp.ClientSession, url: str, until: float, seen: Counter[str]) -> None:
    draw = random.Random(number)
    texts = prompts(64)
    while time.monotonic() < until:
        body: dict[str, Any] = {
            "prompt": draw.choice(texts) * draw.choice([1, 1, 1, 4, 16]),
            "max_tokens": draw.choice([1, 4, 16, 32, 64]),
            "temperature": draw.choice([0, 0, 0.8]),
            "ignore_eos": draw.random() < 0.5,
            "stream": draw.random() < 0.8,
        }
        if draw.random() < 0.1:
            body["structured_outputs"] = {"choice": ["yes", "no"]}
        if draw.random() < 0.02:
            body["max_tokens"] = 10**6  # refused
        drop_after = draw.choice([0, 1, 3, 8]) if draw.random() < 0.1 else None
        try:
            limit = aiohttp.ClientTimeout(total=draw.random() if drop_after == 0 else 300)
            async with session.post(f"{url}/v1/completions", json=body, timeout=limit) as response:
                if response.status != 200:
                    seen[f"status {response.status}"] += 1
                    continue
                events = 0
                async for line in response.content:
                    events += line.startswith(b"data: {")
                    if drop_after is not None and body["stream"] and events > drop_after:
                        response.close()
                        break
                seen["dropped" if drop_after else "ok"] += 1
        except TimeoutError:
            seen["dropped" if drop_after == 0 else "STUCK"] += 1
        except aiohttp.ClientError as error:
            seen["dropped" if drop_after is not None else f"ERROR {error!r}"] += 1


async def load(url: str, process: psutil.Process, minutes: float) -> tuple[Counter[str], list[dict[str, float]]]:
    seen: Counter[str] = Counter()
    samples: list[dict[str, float]] = []
    begin = time.monotonic()
    until = begin + minutes * 60
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [asyncio.create_task(client(i, session, url, until, seen)) for i in range(CLIENTS)]
        while not all(task.done() for task in clients):
            await asyncio.wait(clients, timeout=10)
            asked = time.monotonic()
            async with session.get(f"{url}/health") as response:
                await response.read()
            samples.append(
                {
                    "s": round(time.monotonic() - begin),
                    "rss_mb": process.memory_info().rss / 1e6,
                    "threads": process.num_threads(),
                    "fds": process.num_fds(),
                    "health_ms": (time.monotonic() - asked) * 1e3,
                }
            )
            if len(samples) % 6 == 0:
                print({k: round(v, 1) for k, v in samples[-1].items()}, dict(seen), flush=True)
        await asyncio.gather(*clients)
    return seen, samples


async def settled(url: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The account once nothing runs."""
    async with aiohttp.ClientSession() as session:
        for _ in range(200):
            async with session.get(f"{url}/metrics") as response:
                lines = (await response.text()).splitlines()
            metrics = {n: float(v) for n, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
            if not metrics["reference_num_requests_running"] + metrics["reference_num_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        async with session.get(f"{url}/debug/batches") as response:
            return (await response.json())["batches"], metrics


def problems(
    seen: Counter[str], samples: list[dict[str, float]], records: list[dict[str, Any]], m: dict[str, float]
) -> list[str]:
    found = [f"{kind}: {n}" for kind, n in seen.items() if kind.isupper() or kind.startswith(("ERROR", "status 5"))]
    if m["reference_num_requests_running"] or m["reference_num_requests_waiting"]:
        found.append("requests are left over")
    for r in records:
        if r["row_steps"] != r["useful_row_steps"] + r["dead_row_steps"]:
            found.append(f"row-steps of batch {r['index']}")
        if r["mode"] != "continuous" and r["prompt_tokens"] + r["padding_tokens"] != r["width"] * r["longest_prompt"]:
            found.append(f"prompt tokens of batch {r['index']}")
        if r["output_tokens"] != r["useful_row_steps"] + r["first_tokens"]:
            found.append(f"output tokens of batch {r['index']}")
    if m["reference_row_steps_total"] != m["reference_useful_row_steps_total"] + m["reference_dead_row_steps_total"]:
        found.append("row-steps in sum")
    if m['reference_requests_total{outcome="error"}']:
        found.append("generation failed for some")
    sixth = max(1, len(samples) // 6)
    early, late = samples[sixth : 2 * sixth] or samples[:1], samples[-sixth - 1 : -1] or samples[-1:]
    for key in ("rss_mb", "threads", "fds"):
        before, after = (statistics.median(s[key] for s in part) for part in (early, late))
        print(f"{key}: {before:.1f} in the second sixth, {after:.1f} in the last")
        if after > before * 1.05 + (CLIENTS if key == "fds" else 0):
            found.append(f"{key} grew")
    slow = sorted(s["health_ms"] for s in samples)
    print(f"health: median {statistics.median(slow):.1f} ms, largest {slow[-1]:.1f} ms of {len(slow)}")
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=30)
    p.add_argument("--mode", choices=("serial", "static", "continuous"), default="static")
    p.add_argument("--model")
    args = p.parse_args()
    model = ("--model", args.model) if args.model else ()
    with server_process("--mode", args.mode, "--batch-size", "8", *model) as (process, url):
        seen, samples = asyncio.run(load(url, psutil.Process(process.pid), args.minutes))
        records, metrics = asyncio.run(settled(url))
        print(f"{args.mode}, {args.minutes:g} min: {dict(seen)}")
        print({name: value for name, value in metrics.items() if "requests_total" in name or "row_steps" in name})
        found = problems(seen, samples, records, metrics)
        print("nothing wrong" if not found else f"WRONG: {found[:20]}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

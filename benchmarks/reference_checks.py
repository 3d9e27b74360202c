"""Is what the reference server says right? Three long checks on the packaged model, over HTTP.

python -m benchmarks.reference_checks greedy [--dtype float32]     50 prompts in every mode against a bare generate
python -m benchmarks.reference_checks constrained [--count 200]    every kind of constraint, validated apart
python -m benchmarks.reference_checks kv-cache                     time of a step against length, with and without
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.reference_common import Bare, events, in_turn, post, prompts, server, stream

MODES = {
    "serial": ("--mode", "serial"),
    "static 8": ("--mode", "static", "--batch-size", "8"),
    "continuous 8": ("--mode", "continuous", "--batch-size", "8"),
}


def greedy(args: argparse.Namespace) -> None:
    """Text of the server, streamed and not, against the decoded tokens of a bare generate, one prompt at a time."""
    bare = Bare(args.dtype)
    texts = prompts(50)
    wanted = [bare.text(bare.generate([text], args.tokens)[0]) for text in texts]
    for mode, flags in MODES.items():
        with server(*flags, "--dtype", args.dtype) as url:
            streamed, whole, broken, num_events = asyncio.run(
                _both(url, texts, args.tokens, 1 if mode == "serial" else 8)
            )
        differ = [i for i, text in enumerate(streamed) if text != wanted[i]]
        apart = sum(a != b for a, b in zip(streamed, whole, strict=True))
        print(
            f"{mode}, {args.dtype}: {50 - len(differ)} of 50 equal to bare generate; streamed != whole in {apart}; "
            f"events with U+FFFD that the whole lacks: {broken}; "
            f"{num_events / 50 / args.tokens:.2f} text events a token",
            flush=True,
        )
        for i in differ[:3]:
            at = next((k for k, (a, b) in enumerate(zip(streamed[i], wanted[i], strict=False)) if a != b), -1)
            print(
                f"   {texts[i]!r}: from character {at}: {streamed[i][at : at + 30]!r}, bare {wanted[i][at : at + 30]!r}"
            )


async def _both(url: str, texts: list[str], tokens: int, width: int) -> tuple[list[str], list[str], int, int]:
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    path = f"{url}/v1/completions"
    async with aiohttp.ClientSession() as session:
        raw = await in_turn(width, [stream(session, path, {**body, "prompt": text}) for text in texts])
        answers = await in_turn(width, [post(session, path, {**body, "prompt": text}) for text in texts])
    parts = [[event["choices"][0]["text"] for event in events(data)] for data in raw]
    streamed = ["".join(part) for part in parts]
    broken = sum("�" in piece for part, text in zip(parts, streamed, strict=True) for piece in part if "�" not in text)
    for answer in answers:
        assert answer["usage"]["completion_tokens"] == tokens, answer["usage"]
    return streamed, [a["choices"][0]["text"] for a in answers], broken, sum(bool(p) for part in parts for p in part)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "person", "description": "Note a person", "parameters": PERSON}},
]
REGEX = r"[A-Z][a-z]{2,8} [0-9]{1,3}%"
KINDS: dict[str, dict[str, Any]] = {
    "choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "json": {"structured_outputs": {"json": PERSON}},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "tools required": {"tools": TOOLS, "tool_choice": "required"},
    "tools named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
}


def valid(kind: str, choice: dict[str, Any]) -> bool:
    """By the standard library and jsonschema: nothing of the server's own."""
    import jsonschema

    message = choice["message"]
    try:
        if kind == "choice":
            return message["content"] in ("yes", "no", "perhaps")
        if kind == "regex":
            return re.fullmatch(REGEX, message["content"]) is not None
        if kind == "json_object":
            return isinstance(json.loads(message["content"]), dict)
        if kind in ("json", "json_schema"):
            jsonschema.validate(json.loads(message["content"]), PERSON)
            return True
        (call,) = message["tool_calls"]
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), CITY if call["function"]["name"] == "weather" else PERSON
        )
        return kind != "tools named" or call["function"]["name"] == "weather"
    except (ValueError, KeyError, TypeError, jsonschema.ValidationError):
        return False


async def _constrained(url: str, count: int, tokens: int, temperature: float) -> None:
    async with aiohttp.ClientSession() as session:
        for kind, fields in KINDS.items():
            jobs = [
                post(
                    session,
                    f"{url}/v1/chat/completions",
                    {
                        "messages": [{"role": "user", "content": f"{text} Answer."}],
                        "max_tokens": tokens,
                        "temperature": temperature,
                        "seed": i,
                        **fields,
                    },
                )
                for i, text in enumerate(prompts(count))
            ]
            choices = [answer["choices"][0] for answer in await in_turn(16, jobs)]
            good = [valid(kind, choice) for choice in choices]
            reasons = dict(Counter(choice["finish_reason"] for choice in choices))
            print(f"{kind}: {sum(good)} of {count} valid; finish reasons {reasons}", flush=True)
            for choice in [c for c, ok in zip(choices, good, strict=True) if not ok][:2]:
                print(f"   {choice['finish_reason']}: {json.dumps(choice['message'], ensure_ascii=False)[:200]}")


def constrained(args: argparse.Namespace) -> None:
    with server("--mode", "static", "--batch-size", "16") as url:
        asyncio.run(_constrained(url, args.count, args.tokens, args.temperature))


def kv_cache(args: argparse.Namespace) -> None:
    """Gaps between tokens of one long answer, averaged over stretches of its length."""
    for name, flags in {"with the cache": (), "without": ("--no-kv-cache",)}.items():
        with server("--mode", "serial", *flags) as url:
            gaps = asyncio.run(_gaps(url, 512))
        line = "  ".join(f"{at:4d}: {sum(gaps[at - 32 : at]) / 32 * 1e3:6.1f}" for at in (64, 128, 256, 384, 511))
        print(f"step time {name}, ms at length  {line}", flush=True)


async def _gaps(url: str, tokens: int) -> list[float]:
    loop = asyncio.get_running_loop()
    body = {"prompt": [1], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    stamps = []
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                stamps.append(loop.time())
    return [b - a for a, b in zip(stamps, stamps[1:], strict=False)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("check", choices=("greedy", "constrained", "kv-cache"))
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--tokens", type=int, help="an answer [default: greedy 32, constrained 256]")
    p.add_argument("--count", type=int, default=200)
    p.add_argument("--temperature", type=float, default=1.0)
    args = p.parse_args()
    args.tokens = args.tokens or {"greedy": 32, "constrained": 256}.get(args.check)
    {"greedy": greedy, "constrained": constrained, "kv-cache": kv_cache}[args.check](args)


if __name__ == "__main__":
    main()

"""Fuzzing: bytes that nobody would send, at everything here that reads what others wrote. No crash, no hang, no doubt.

    python -m tests.fuzz --seconds 600                      every target in turn
    python -m tests.fuzz --target stream --seconds 60
    python -m tests.fuzz --target stream --case 4711        one case again, with its traceback

Targets: stream (the body of an answer), http (heads and framings), exchange (whole answers over loopback, through both
transports), trace (files of every format), body (requests to the reference server). A case is made from its number
alone, so a finding names all that is needed to see it again. The suite runs each target briefly (test_fuzz.py).
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import random
import signal
import sys
import tempfile
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from loadgen.http1 import Deframer, DoneScanner, Framing, NotHttp, TooLarge, parse_head
from loadgen.protocol import read_exchange
from loadgen.record import FailureKind, Phase, Request, RequestRecord
from loadgen.trace import Rules, TraceError, replay
from loadgen.trace_formats import FORMATS, open_trace
from loadgen.transport import Exchange, Target, Timeouts, make_transport
from loadgen.wire import WireExchange
from server.schema import ApiError, parse_chat, parse_completion
from tests.fakes import DONE, chunk, event, exchange_of, usage

Rng = random.Random
HANG_S = 10.0  # a case takes well under a millisecond; exchange has limits of its own below this
REQUEST = Request("r1", Phase.MEASURED, "/v1/completions", b"{}")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Hang(Exception):
    """A case did not end in HANG_S."""


# ---------------------------------------------------------------- bytes

_BITS = [
    b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b":", b",", b'"', b"\\", b"{", b"}",
    b"[", b"]", b"data:", b"data: ", b"data: [DONE]\n\n", b"[DONE]", b"event: error\n", b": comment\n\n", b"id: 1\n",
    b"0\r\n\r\n", b"5\r\nhello\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"\\ud800", b"\\u0000", b"\xe4\xb8", b"null",
    b"true", b"1e999", b"-0", b"9" * 30, b"NaN", b'{"error":{"message":"x"}}', b'"finish_reason":"stop"', b" " * 40,
    b'"choices":[]', b'"usage":{}', b"HTTP/1.1 100 Continue\r\n\r\n", b"Content-Length: 5\r\n", b"[" * 200, b"1,2,3\n",
    b"Content-Length: -5\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"timestamp",
    b"Connection: close\r\n", b"0001-01-01",
]  # fmt: skip


def mutate(rng: Rng, data: bytes, times: int) -> bytes:
    """Flipped, cut, doubled, swapped and sprinkled."""
    for _ in range(times):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[: at + size] + data[at:]
        elif kind == 3:
            data = data[:at] + rng.choice(_BITS) + data[at:]
        elif kind == 4:
            data = data[:at] + rng.choice(_BITS) + data[at + size :]
        elif rng.random() < 0.2:
            data = data[:at]
    return data


def pieces_of(rng: Rng, data: bytes, most: int = 12) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(most)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def in_chunks(rng: Rng, body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces_of(rng, body) if p) + b"0\r\n\r\n"


def any_json(rng: Rng, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [any_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 8:
        return {rng.choice(_KEYS): any_json(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [None, True, rng.randrange(-2, 5), 10 ** rng.randrange(19), 10.0 ** rng.randrange(-9, 300), "", "x"][kind]


_KEYS = (
    "choices delta content text usage error message tool_calls function name arguments finish_reason index reasoning "
    "prompt messages role max_tokens stream stream_options stop n tools tool_choice response_format json regex choice "
    "structured_outputs type schema temperature top_p top_k seed min_tokens ignore_eos model stop_token_ids parameters "
    "include_usage json_schema completion_tokens prompt_tokens code logprobs guided_json"
).split()


def vary(rng: Rng, value: Any, chance: float) -> Any:
    """A JSON value with some of its parts replaced, left out or renamed."""
    if rng.random() < chance:
        return any_json(rng)
    if isinstance(value, dict):
        kept = {rng.choice(_KEYS) if rng.random() < chance / 4 else k: vary(rng, v, chance) for k, v in value.items()}
        if rng.random() < chance:
            kept[rng.choice(_KEYS)] = any_json(rng)
        return kept
    if isinstance(value, list):
        return [vary(rng, part, chance) for part in value for _ in range(rng.choice((1, 1, 1, 0, 2)))]
    return value


# ---------------------------------------------------------------- stream


def a_stream(rng: Rng) -> bytes:
    """The body of an answer, well-formed more often than not."""
    texts = ["a", " b", "", "中", "🚀", '"', "\\n", "x" * rng.choice((1, 50, 900))]
    chat = rng.random() < 0.5
    parts = [event(chunk(role="assistant", content="")) if chat else b""]
    for _ in range(rng.choice((0, 1, 3, 8, 30))):
        text = rng.choice(texts)
        channel = rng.choice(("content", "content", "content", "reasoning", "refusal"))
        payload: Any = chunk(**{channel: text}) if chat else chunk(text)
        if rng.random() < 0.05:
            payload = vary(rng, payload, 0.3)
        parts.append(event(payload))
    parts += [
        rng.choice((event(chunk("", "stop")), event(chunk("z", "length")), b"")),
        rng.choice((event(usage(rng.randrange(50))), b"")),
        rng.choice((DONE, DONE, b"data: [DONE]", b"")),
    ]
    line_end = rng.choice((b"\n", b"\n", b"\r\n", b"\r"))
    body = b"".join(parts)
    return body if line_end == b"\n" else body.replace(b"\n", line_end)


def framed(pieces: Sequence[bytes]) -> WireExchange:
    exchange = WireExchange()
    exchange.head = parse_head(STREAM_HEAD)
    assert exchange.head is not None
    exchange.status, exchange.headers = 200, exchange.head.headers
    exchange.pieces = list(pieces)
    exchange.stamps = array("q", range(10, 10 * len(pieces) + 10, 10))
    return exchange


def meaning(record: RequestRecord) -> tuple[Any, ...]:
    """All that does not depend on how the network cut the bytes."""
    return (
        record.failure, record.num_events, record.text, record.tool_calls, record.finish_reason, record.output_tokens,
        record.prompt_tokens, record.cached_tokens, record.reasoning_tokens, record.tokens_from,
    )  # fmt: skip


def check_record(record: RequestRecord) -> None:
    """What holds for any record, whatever the bytes were."""
    stamps = list(record.event_stamps_ns)
    assert stamps == sorted(stamps) and 0 <= record.shared_stamps <= max(0, len(stamps) - 1)
    assert record.first_token_ns == (stamps[0] if stamps else None)
    assert record.last_token_ns == (stamps[-1] if stamps else None)
    assert record.failure is None or record.failure.kind in FailureKind
    if stamps:
        assert record.output_tokens is not None and record.output_tokens > 0
    detail = record.failure.detail if record.failure else ""
    orjson.dumps([record.text, record.tool_calls, record.finish_reason, detail])


def fuzz_stream(rng: Rng) -> None:
    body = mutate(rng, a_stream(rng), rng.choice((0, 1, 1, 3, 20)))
    if rng.random() < 0.03:
        body = rng.randbytes(rng.randrange(200))
    as_chunks = rng.random() < 0.5
    raw = in_chunks(rng, body) if as_chunks else body
    if as_chunks:
        raw = mutate(rng, raw, rng.choice((0, 0, 1, 2)))
    make: Callable[[list[bytes]], Exchange] = framed if as_chunks else exchange_of
    whole = read_exchange(REQUEST, make([raw] if raw else []), 0, keep_text=True)
    check_record(whole)
    for most in (3, 60):
        cut = [piece for piece in pieces_of(rng, raw, most) if piece]
        record = read_exchange(REQUEST, make(cut), 0, keep_text=True)
        check_record(record)
        assert meaning(record) == meaning(whole), (meaning(record), meaning(whole))
        bare = read_exchange(REQUEST, make(cut), 0)
        assert bare.event_stamps_ns == record.event_stamps_ns and bare.failure == record.failure


# ---------------------------------------------------------------- http


def an_answer(rng: Rng) -> bytes:
    """A whole HTTP answer."""
    body = a_stream(rng)[: rng.choice((50, 500, 20_000))]
    status = rng.choice((b"200 OK", b"200 OK", b"200", b"503 Busy", b"204 No Content", b"404 Not Found"))
    head = rng.choice((b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n")) + b"HTTP/1.%d %b\r\n" % (rng.randrange(2), status)
    kind = rng.choice((b"text/event-stream", b"text/event-stream; charset=utf-8", b"application/json", b"text/html"))
    head += b"Content-Type: %b\r\n" % kind
    if rng.random() < 0.1:
        body = gzip.compress(body, 1)
        head += b"Content-Encoding: gzip\r\n"
    framing = rng.randrange(4)
    if framing == 0:
        head += b"Content-Length: %d\r\n" % len(body)
    elif framing < 3:
        head += b"Transfer-Encoding: chunked\r\n"
        body = in_chunks(rng, body)
    if rng.random() < 0.2:
        head += b"Connection: close\r\n"
    return head + b"\r\n" + body


def taken(pieces: Sequence[bytes]) -> tuple[Any, ...]:
    """(head, body, over, excess, [DONE] seen) or the error, of an answer in these pieces."""
    data, done = b"", False
    deframer: Deframer | None = None
    scanner, body = DoneScanner(), b""
    head = None
    for piece in pieces:
        try:
            if deframer is None:
                data += piece
                head = parse_head(data)
                if head is None:
                    continue
                deframer, piece = Deframer(head.framing, head.length), data[head.body_start :]
            part = deframer.feed(piece)
        except (NotHttp, TooLarge) as error:
            return head, type(error)
        body += part
        done = done or scanner.feed(part)
    if deframer is None:
        return (None,)
    return head, body, deframer.over, deframer.excess, done


def fuzz_http(rng: Rng) -> None:
    raw = mutate(rng, an_answer(rng), rng.choice((0, 1, 2, 8, 40)))
    whole = taken([raw])
    assert taken([p for p in pieces_of(rng, raw, 20) if p] or [b""]) == whole
    if len(raw) < 600:
        assert taken([raw[i : i + 1] for i in range(len(raw))] or [b""]) == whole
    if len(whole) == 5:
        assert whole[0].framing in Framing and len(whole[1]) <= len(raw)


# ---------------------------------------------------------------- exchange


class Loopback:
    """A server that plays what it is given, piece by piece, and closes; and a client of either kind to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.pieces: list[bytes] = []
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=5, idle_s=2, total_s=4))
        self.clients = [make_transport("wire", target), make_transport("aiohttp", target)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n{}")
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def ask(self, pieces: list[bytes]) -> list[RequestRecord]:
        async def each() -> list[RequestRecord]:
            answers = [await client.exchange("POST", "/", "r1", b"{}") for client in self.clients]
            return [read_exchange(REQUEST, answer, 0, keep_text=True) for answer in answers]

        self.pieces = pieces
        return self.loop.run_until_complete(each())

    def close(self) -> None:
        async def all_of_it() -> None:
            for client in self.clients:
                await client.close()
            self.server.close()
            await self.server.wait_closed()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait(others, timeout=5) if others else None

        self.loop.run_until_complete(all_of_it())
        self.loop.close()


_loopback: list[Loopback] = []


def fuzz_exchange(rng: Rng) -> None:
    if not _loopback:
        _loopback.append(Loopback())
    raw = mutate(rng, an_answer(rng), rng.choice((0, 1, 1, 2, 8)))
    by_wire, by_aiohttp = _loopback[0].ask([piece for piece in pieces_of(rng, raw, 6) if piece])
    for record in (by_wire, by_aiohttp):
        check_record(record)
    if by_wire.ok and by_aiohttp.ok:  # they need not forgive the same faults, but must read the same answer
        assert (by_wire.text, by_wire.num_events) == (by_aiohttp.text, by_aiohttp.num_events)


# ---------------------------------------------------------------- trace

SAMPLES: dict[str, list[str]] = {
    "loadgen": [
        '{"schema":"loadgen.trace/1","block_size":16}',
        '{"timestamp":0,"input_length":40,"output_length":4,"hash_ids":[1,2,3],"session_id":"a"}',
        '{"timestamp":10.5,"input_length":20,"output_length":0,"request_id":"q","tags":{"k":"v"}}',
        '{"session_id":"a","turn":2,"delay":500,"input_length":64,"output_length":2,"after":["q"]}',
        '{"timestamp":12,"text_input":"hi","output_length":3}',
        '{"timestamp":13,"messages":[{"role":"user","content":"x"}],"input_length":1,"output_length":1}',
    ],
    "azure": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:46.9951690,0,0",
        "2024-05-10 00:00:00.009930+00:00,100,5",
    ],
    "burstgpt": [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45.5,GPT-4,30,0,30,API log",
    ],
    "bailian": [
        '{"chat_id":1,"parent_chat_id":-1,"timestamp":0.5,"input_length":20,"output_length":5,"type":"text","turn":1,'
        '"hash_ids":[1,2]}',
        '{"chat_id":2,"parent_chat_id":1,"timestamp":3.0,"input_length":33,"output_length":5,"type":"text","turn":2,'
        '"hash_ids":[1,2,3]}',
    ],
    "sharegpt": [
        '[{"id":"a","conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"hello there"}]},',
        '{"id":"b","conversations":[{"from":"system","value":"s"},{"from":"human","value":"x"},{"from":"gpt","value":"y"}]}]',
    ],
    "aiperf-single-turn": ['{"timestamp":0,"text":"hello","output_length":3}', '{"text":"b","delay":5}'],
    "aiperf-multi-turn": ['{"session_id":"s","turns":[{"text":"a","timestamp":0},{"text":"b","delay":100}]}'],
    "weka": [
        '{"id":"s","block_size":64,"requests":[{"t":0.0,"type":"s","in":70,"out":4,"hash_ids":[1,2]},'
        '{"t":1.5,"type":"s","in":130,"out":4,"hash_ids":[1,2,3]}]}',
    ],
    "ragpulse": [
        '{"timestamp":"0","input_length":30,"output_length":5,"hash_ids":{"sys":[1],"user":[2]},"session_id":"z"}'
    ],
    "vidur": ["num_prefill_tokens,num_decode_tokens,arrived_at", "100,5,0.25", "30,2,0.5"],
    "splitwise-sim": ["request_id,arrival_timestamp,prompt_size,token_size", "0,0.1,100,5", "1,0.3,50,2"],
}


def fuzz_trace(rng: Rng) -> None:
    name = rng.choice(sorted(SAMPLES))
    lines = [line for line in SAMPLES[name] for _ in range(rng.choice((1, 1, 1, 2, 30)))]
    data = rng.choice(("\n", "\n", "\r\n")).join(lines).encode()
    data = mutate(rng, data, rng.choice((0, 1, 1, 3, 15)))
    if rng.random() < 0.1:
        data = mutate(rng, gzip.compress(data, 1), rng.choice((0, 1)))
    told = rng.choice((None, None, name, rng.choice(FORMATS)))
    rules = Rules(
        timed=rng.random() < 0.5,
        speedup=rng.choice((1.0, 0.5, 1e3)),
        max_gap_ns=rng.choice((None, 10**9)),
        max_model_len=rng.choice((None, 64)),
        overflow=rng.choice(("skip", "clip-input", "clip-output", "fail")),
        zero_output=rng.choice(("skip", "one")),
    )
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            with open_trace(file.name, told, rng.choice((None, None, 16))) as trace:
                planned = list(replay(trace.rows(), rules, trace.counts, "t"))
        except TraceError as error:
            assert "\n" not in str(error)
            return
    counts = trace.counts
    assert counts.read == counts.planned + sum(counts.skipped.values()) and counts.planned == len(planned)
    for row in planned:
        assert row.output_length >= 1 and (row.input_length is None or row.input_length >= 0)


# ---------------------------------------------------------------- body

_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["x"], "max_tokens": 5, "stream": True}
_BODIES: list[Any] = [
    {"model": "m", "prompt": "hello", **_SAMPLING, "stream_options": {"include_usage": True}},
    {"prompt": [1, 2, 3], "n": 1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [7]},
    {"prompt": [[1], [2, 3]], "structured_outputs": {"choice": ["a", "b"]}, "logprobs": None},
    {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "text", "text": "y"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_completion_tokens": 4,
        **_SAMPLING,
    },
    {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    },
]


def fuzz_body(rng: Rng) -> None:
    value = vary(rng, rng.choice(_BODIES), rng.choice((0.02, 0.1, 0.3)))
    data = mutate(rng, orjson.dumps(value), rng.choice((0, 0, 1, 4)))
    try:
        value = orjson.loads(data)
    except ValueError:
        return
    for parse in (parse_completion, parse_chat):
        try:
            wish = parse(value)
        except ApiError as error:
            assert 400 <= error.status < 500 and str(error)
            orjson.dumps(error.body())
        else:
            assert wish.prompts or wish.messages
            assert wish.max_tokens is None or wish.max_tokens >= 1


# ---------------------------------------------------------------- the loop

TARGETS: dict[str, Callable[[Rng], None]] = {
    "stream": fuzz_stream,
    "http": fuzz_http,
    "exchange": fuzz_exchange,
    "trace": fuzz_trace,
    "body": fuzz_body,
}


def case(target: str, number: int) -> None:
    """Run one case; raises what it finds."""
    with _alarm():
        TARGETS[target](random.Random(f"{target} {number}"))


@contextmanager
def _alarm() -> Iterator[None]:
    """Hang after HANG_S, wherever the code is. Main thread only."""

    def ring(*_: object) -> None:
        raise Hang(f"not over after {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(target: str, numbers: Iterator[int], seconds: float | None = None) -> tuple[int, dict[int, str]]:
    """(cases, findings by number); the first of each kind of finding is kept."""
    end = None if seconds is None else time.monotonic() + seconds
    findings: dict[int, str] = {}
    kinds: Counter[str] = Counter()
    cases = 0
    for number in numbers:
        if end is not None and time.monotonic() >= end:
            break
        cases += 1
        try:
            case(target, number)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
            kinds[kind] += 1
            if kinds[kind] == 1:
                findings[number] = f"{kind}: {str(error)[:300]}"
    close()
    return cases, findings


def close() -> None:
    while _loopback:
        _loopback.pop().close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="in all, shared out among the targets (default 60)")
    parser.add_argument("--target", choices=sorted(TARGETS), help="this one alone")
    parser.add_argument("--case", type=int, metavar="N", help="run case N of --target alone, and show its traceback")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case (default 0)")
    options = parser.parse_args()
    if options.case is not None:
        if options.target is None:
            parser.error("--case needs --target")
        case(options.target, options.case)
        close()
        return 0
    targets = [options.target] if options.target else list(TARGETS)
    found = 0
    for target in targets:
        began = time.monotonic()
        numbers = iter(range(options.first, 1 << 62))
        cases, findings = run(target, numbers, options.seconds / len(targets))
        took_s = time.monotonic() - began
        print(f"{target:9} {cases:9,} cases in {took_s:6.1f} s ({cases / took_s:,.0f}/s), {len(findings)} findings")
        for number, finding in findings.items():
            print(f"  --target {target} --case {number}: {finding}")
        found += len(findings)
        sys.stdout.flush()
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

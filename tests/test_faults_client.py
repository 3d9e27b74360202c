"""The public faults of tools like this one, K01 to K19, end to end: real sockets, both transports, a scripted server.

What the client measured is compared with what the server says it did, not with what it was asked to do, so nothing here
depends on the speed of the machine: a stamp may not be earlier than its bytes were sent, and with kernel stamps
not later than the next bytes were. docs/faults.md maps the kinds to tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from loadgen.metrics import summarize
from loadgen.options import Options, Span
from loadgen.record import FailureKind, RequestRecord, Run
from loadgen.workers import run_load
from tests.scripted_server import (
    CLOSE,
    DONE,
    END,
    HEAD,
    RESET,
    Asked,
    Post,
    Reply,
    ScriptedServer,
    delta,
    good,
    in_chunk,
    payload,
    plain,
    sse,
    usage,
)

Steps = Sequence[tuple[float, bytes | str]]
LATE_NS = 250_000_000  # a read of aiohttp may be so late on a busy machine
# The status, or 3 when the machine was busy: INVALID. Nothing else that is asserted here depends on that.
WELL, FAILED = (0, 3), (1, 3)
EARLY_NS = 500_000  # the kernel's wall-clock stamps are taken over to the monotonic clock with an error far below this


@pytest.fixture(params=["wire", "aiohttp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(server: ScriptedServer | str, transport: str, **options: Any) -> Run:
    """One run in this process: by default one request, alone, no warm-up."""
    url = server if isinstance(server, str) else server.url
    defaults: dict[str, Any] = {"requests": 1, "warmup": 0, "scrape": False, "save_text": True, "seed": 1}
    if "rate" not in options:
        defaults["concurrency"] = 1
    return run_load(Options(url=url, transport=transport, **{**defaults, **options}))


def one(reply: Reply, transport: str, **options: Any) -> tuple[RequestRecord, Post, dict[str, Any]]:
    """The record of a single request, the server's log of it, and the run's metrics."""
    with ScriptedServer(reply) as server:
        run = load(server, transport, **options)
        (record,), (post,) = run.records, server.posts()
        return record, post, summarize(run)["metrics"]


def fits(record: RequestRecord, post: Post, steps: Sequence[int]) -> None:
    """The token-bearing events are those of these steps, with their times."""
    assert record.num_events == len(steps)
    for stamp, step in zip(record.event_stamps_ns, steps, strict=True):
        in_time(record, post, stamp, step)
    assert record.sent_ns is not None and record.sent_ns <= post.t_ns
    assert record.first_token_ns == record.event_stamps_ns[0]
    assert record.last_token_ns == record.event_stamps_ns[-1]


def in_time(record: RequestRecord, post: Post, stamp: int | None, step: int) -> None:
    sent = post.sent_ns[step]
    assert stamp is not None and stamp >= sent - EARLY_NS, f"{(sent - stamp) / 1e6 if stamp else None} ms too early"
    later = [at for at in post.sent_ns[step + 1 :] if at > sent + 10_000_000]  # those written at once are no limit
    limit = later[0] if record.kernel_stamps and later else sent + LATE_NS
    assert stamp <= limit, f"{(stamp - sent) / 1e6} ms after it was sent"


def kinds(run: Run) -> dict[str, int]:
    return dict(summarize(run)["counts"]["failures"])


def failure(record: RequestRecord) -> tuple[FailureKind, str]:
    assert record.failure is not None
    return record.failure.kind, record.failure.detail


def strict(path: Path) -> Any:
    """JSON without NaN and Infinity."""
    return json.loads(path.read_bytes(), parse_constant=lambda constant: pytest.fail(f"{constant} in {path}"))


def cli(*arguments: str, python_path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadgen", *arguments],
        env=environment(python_path, env),
        capture_output=True,
        text=True,
        timeout=100,
    )


def environment(python_path: Path | None = None, more: dict[str, str] | None = None) -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    paths = [str(python_path), here] if python_path else [here]
    without = ("OPENAI_API_KEY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
    clean = {name: value for name, value in os.environ.items() if name.upper() not in without}
    return {**clean, "PYTHONPATH": os.pathsep.join(paths), **(more or {})}


def quick(number: int, a: Asked) -> Steps:
    return good(a, 1, max(2, a.body["max_tokens"]), 0)


QUICK = ("--warmup", "0", "--no-scrape", "--output-tokens", "8")

# ---------------------------------------------------------------- K01 to K06: which event, when


def test_k01_a_role_only_event_does_not_stop_the_clock(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [
            (0, HEAD),
            (0, delta(a, role="assistant", content=None)),
            (300, delta(a, content="A")),
            (50, delta(a, content="B")),
            (50, delta(a, "stop", content="C")),
            (400, usage(a, 3)),  # late, so that it cannot pass for the last token
            (0, DONE),
            (0, END),
        ]

    record, post, metrics = one(reply, transport, endpoint="chat")
    fits(record, post, [2, 3, 4])
    in_time(record, post, record.first_event_ns, 1)
    assert (record.text, record.output_tokens, record.ok) == ("ABC", 3, True)
    stamps = record.event_stamps_ns
    assert metrics["tpot_ms"]["mean"] == pytest.approx((stamps[2] - stamps[0]) / 2 / 1e6)
    assert metrics["gap_ms"]["n"] == 2


def test_k02_reasoning_counts_and_the_first_answer_token_is_told_apart(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        thought = [(100, delta(a, **{name: "r"})) for name in ("reasoning_content", "reasoning", "reasoning_content")]
        details = {"completion_tokens_details": {"reasoning_tokens": 3}}
        answer = [(100, delta(a, "stop", content="ok")), (0, usage(a, 4, **details)), (0, DONE), (0, END)]
        return [(0, HEAD), (0, delta(a, role="assistant", content="")), *thought, *answer]

    record, post, _ = one(reply, transport, endpoint="chat")
    fits(record, post, [2, 3, 4, 5])
    assert record.first_answer_ns == record.last_token_ns
    assert (record.text, record.output_tokens, record.reasoning_tokens) == ("ok", 4, 3)


def test_k02_an_answer_of_tool_calls_alone_is_an_answer(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        def call(**function: str) -> bytes:
            return delta(a, tool_calls=[{"index": 0, "function": function}])

        return [
            (0, HEAD),
            (0, delta(a, role="assistant", content=None)),
            (150, call(name="f", arguments="")),
            (50, call(arguments='{"a":')),
            (50, call(arguments="1}")),
            (300, delta(a, "tool_calls")),
            (0, usage(a, 6)),
            (0, DONE),
            (0, END),
        ]

    record, post, metrics = one(reply, transport, endpoint="chat")
    assert record.ok and record.finish_reason == "tool_calls"
    fits(record, post, [2, 3, 4])
    assert orjson.loads(record.tool_calls or "") == [{"name": "f", "arguments": '{"a":1}'}]
    stamps = record.event_stamps_ns
    assert metrics["tpot_ms"]["mean"] == pytest.approx((stamps[2] - stamps[0]) / 5 / 1e6)  # N is 6


def test_k03_several_tokens_per_event(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        events = [(80, delta(a, "length" if i == 4 else None, content="a b c d ")) for i in range(5)]
        return [(0, HEAD), *events, (0, usage(a, 20)), (0, DONE), (0, END)]

    record, post, metrics = one(reply, transport)
    fits(record, post, [1, 2, 3, 4, 5])
    stamps = record.event_stamps_ns
    assert (record.output_tokens, record.num_events, metrics["tokens_per_event"]) == (20, 5, 4)
    assert metrics["tpot_ms"]["mean"] == pytest.approx((stamps[4] - stamps[0]) / 19 / 1e6)
    assert metrics["gap_ms"]["n"] == 4  # per event, and called so
    assert metrics["output_tokens_per_s"] == pytest.approx(20 / metrics["window_s"])


def test_k03_a_one_token_answer_has_no_tpot(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, HEAD), (60, delta(a, "stop", content="Y")), (0, usage(a, 1)), (0, DONE), (0, END)]

    record, post, metrics = one(reply, transport)
    fits(record, post, [1])
    assert record.ok
    assert (metrics["tpot_ms"]["n"], metrics["tpot_ms"]["mean"], metrics["tpot_ms"]["p50"]) == (0, None, None)
    assert metrics["gap_ms"]["n"] == 0


def test_k04_a_character_cut_by_the_network(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        event = sse(payload(a, {"content": "中文"}))
        cut = event.index("中".encode()) + 1
        halves = [(50, in_chunk(event[:cut])), (60, in_chunk(event[cut:]))]
        return [(0, HEAD), *halves, (0, delta(a, "stop")), (0, usage(a, 2)), (0, DONE), (0, END)]

    record, post, _ = one(reply, transport)
    fits(record, post, [2])
    assert record.ok and (record.text, record.output_tokens) == ("中文", 2)


def test_k04_an_object_cut_in_three_and_a_chunk_cut_by_the_network(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        event = sse(payload(a, {"content": "hello"}))
        a_third = len(event) // 3
        thirds = [event[:a_third], event[a_third : 2 * a_third], event[2 * a_third :]]
        second = delta(a, "stop", content=" you")
        rest = [(60, second[:20]), (60, second[20:]), (0, usage(a, 2)), (0, DONE), (0, END)]
        return [(0, HEAD), *[(60, in_chunk(third)) for third in thirds], *rest]

    record, post, _ = one(reply, transport)
    fits(record, post, [3, 5])
    assert record.ok and (record.text, record.output_tokens) == ("hello you", 2)


def test_k05_all_line_ends_comments_and_no_blank_after_the_colon(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        def data(text: str, end: bytes, finish: str | None = None, start: bytes = b"data:") -> bytes:
            return in_chunk(start + orjson.dumps(payload(a, {"content": text}, finish)) + end)

        return [
            (0, HEAD),
            (0, in_chunk(b": keep-alive\r\n\r\n")),
            (150, data("A", b"\r\n\r\n")),
            (50, in_chunk(b":\r\n\r\n")),
            (50, data("B", b"\r\r", start=b"id: 7\revent: message\rdata:")),
            (50, data("C", b"\n\n", "stop", start=b"retry: 10\ndata: ")),
            (0, in_chunk(b"data:[DONE]\r\n\r\n")),
            (0, END),
        ]

    record, post, metrics = one(reply, transport)
    fits(record, post, [2, 4, 5])
    assert record.ok and record.text == "ABC"
    assert (record.output_tokens, record.tokens_from, metrics["output_tokens_estimated"]) == (3, "events", 3)


@pytest.mark.parametrize("size", [200_000, 5_000_000])
def test_k06_long_lines(transport: str, size: int) -> None:
    def reply(number: int, a: Asked) -> Steps:
        long = delta(a, "stop", content="x" * size)
        return [(0, HEAD), (50, delta(a, content="s")), (50, long), (0, usage(a, 2)), (0, DONE), (0, END)]

    record, post, _ = one(reply, transport)
    assert record.ok and len(record.text or "") == size + 1
    assert (record.num_events, record.output_tokens) == (2, 2)
    in_time(record, post, record.first_token_ns, 1)
    assert (record.last_token_ns or 0) >= post.sent_ns[2] - EARLY_NS  # its last byte


# ---------------------------------------------------------------- K07 to K11: failures


def engine_stops(number: int, a: Asked) -> Steps:
    error = {"error": {"message": "engine stopped", "type": "InternalServerError", "param": None, "code": 500}}
    tokens = [(20, delta(a, content=text)) for text in "abc"]
    return [(0, HEAD), *tokens, (20, in_chunk(sse(error))), (0, DONE), (0, END)]


def test_k07_an_error_inside_the_stream_is_a_failure(transport: str, tmp_path: Path) -> None:
    with ScriptedServer(engine_stops) as server:
        flags = ("--concurrency", "1", "--requests", "4", "--transport", transport, "--out", str(tmp_path / "run"))
        result = cli("--url", server.url, *flags, *QUICK)
    assert result.returncode in FAILED, result.stderr
    document = strict(tmp_path / "run" / "run.json")
    counts, metrics = document["counts"], document["metrics"]
    assert (counts["started"], counts["ok"], counts["failed"]) == (4, 0, 4)
    assert counts["failures"] == {"stream-error": 4}
    (reason,) = counts["failure_reasons"]
    assert reason == {"kind": "stream-error", "status": 500, "detail": "engine stopped (500)", "n": 4}
    assert "engine stopped" in result.stdout
    assert (metrics["output_tokens"], metrics["partial_tokens_of_failures"]) == (0, 12)
    assert metrics["ttft_ms"]["n"] == 0 and metrics["ttft_ms"]["p50"] is None
    assert not metrics["output_tokens_per_s"]


def test_k08_a_stream_that_just_stops_is_cut_off(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        steps = [(0, HEAD), (20, delta(a, content="a")), (20, delta(a, content="b"))]
        ends: list[Steps] = [
            [(20, END)],  # a clean end of the body, but neither finish_reason nor [DONE]
            [(300, delta(a, "stop")), (0, END)],
            [(0, DONE), (0, END)],
            [(20, CLOSE)],
            [(20, RESET)],
            [(20, in_chunk(sse(payload(a, {"content": "cut"}))[:-30])), (0, CLOSE)],
        ]
        return [*steps, *ends[number % 6]]

    with ScriptedServer(reply) as server:
        for _ in range(2):  # the same verdicts each time
            run = load(server, transport, requests=6)
            verdicts = [record.failure.kind if record.failure else None for record in run.records]
            cut = FailureKind.CUT_OFF
            assert verdicts == [cut, None, None, cut, cut, cut]
        posts = server.posts()
        assert len(posts) == 12  # and nothing was sent twice
        fits(run.records[1], posts[7], [1, 2])  # the last token, not the finish event 300 ms later
        assert all(record.num_events == 2 for record in run.records)


@pytest.mark.parametrize("body", [b"", b": still thinking\n\n"])
def test_k08_an_answer_that_ends_behind_its_headers(transport: str, body: bytes) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, HEAD), (10, in_chunk(body)) if body else (10, b""), (10, CLOSE)]

    record, _, _ = one(reply, transport)
    assert failure(record)[0] is FailureKind.CUT_OFF
    assert (record.status, record.first_token_ns, record.output_tokens) == (200, None, None)


def test_k08_done_without_a_token_is_empty_and_a_finish_reason_is_an_answer(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, HEAD), (0, DONE if number == 0 else delta(a, "stop")), (0, END)]

    with ScriptedServer(reply) as server:
        empty, answered = load(server, transport, requests=2).records
    assert failure(empty)[0] is FailureKind.EMPTY
    assert answered.ok and answered.first_token_ns is None


def test_k09_usage_is_asked_for_and_read_from_an_event_without_choices(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        asked = a.body["stream_options"]["include_usage"]
        tokens = [(50, delta(a, "stop" if i == 4 else None, content="a")) for i in range(5)]
        return [(0, HEAD), *tokens, *[(300, usage(a, 5))] * asked, (0, DONE), (0, END)]

    record, post, metrics = one(reply, transport, output_tokens=Span(64, 64))
    assert post.body["stream_options"] == {"include_usage": True} and post.body["max_tokens"] == 64
    fits(record, post, [1, 2, 3, 4, 5])
    assert (record.output_tokens, record.prompt_tokens, record.tokens_from) == (5, 4, "server")
    stamps = record.event_stamps_ns
    assert metrics["tpot_ms"]["mean"] == pytest.approx((stamps[4] - stamps[0]) / 4 / 1e6)  # not / 63


def test_k09_without_usage_events_are_counted_and_marked(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, HEAD), *[(5, delta(a, content="a"))] * 5, (0, DONE), (0, END)]

    record, _, metrics = one(reply, transport, output_tokens=Span(64, 64))
    assert (record.output_tokens, record.tokens_from, metrics["output_tokens_estimated"]) == (5, "events", 5)


def test_k10_nothing_listens(transport: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    flags = ("--concurrency", "2", "--requests", "20", "--transport", transport, "--out", str(tmp_path / "run"))
    result = cli("--url", url, "--model", "m", *flags, *QUICK)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and url in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    document = strict(tmp_path / "run" / "run.json")
    counts = document["counts"]
    assert (counts["started"], counts["ok"], counts["failed"], counts["failures"]) == (20, 0, 20, {"refused": 20})
    for name in ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms"):
        assert document["metrics"][name]["p50"] is None
    # without --model there is nothing to ask it from: one line, and no run
    result = cli("--url", url, *flags[:4], *QUICK, "--out", str(tmp_path / "none"))
    assert result.returncode == 2 and "no server at" in result.stderr and not (tmp_path / "none").exists()


def test_k10_failures_stay_out_of_the_figures(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return good(a, 100, 10, 5) if number % 2 == 0 else [(0, plain(500, {"error": {"message": "x", "code": 500}}))]

    with ScriptedServer(reply) as server:
        run = load(server, transport, requests=10)
        posts = server.posts()
    summary = summarize(run)
    counts, metrics = summary["counts"], summary["metrics"]
    assert (counts["ok"], counts["failed"], counts["failures"]) == (5, 5, {"status": 5})
    assert counts["failure_reasons"][0]["status"] == 500 and "x" in counts["failure_reasons"][0]["detail"]
    assert metrics["ttft_ms"]["n"] == 5 and metrics["ttft_ms"]["min"] >= 99  # a zero of a failure would show
    assert (metrics["output_tokens"], metrics["error_share"]) == (50, 0.5)
    assert metrics["output_tokens_per_s"] == pytest.approx(50 / metrics["window_s"])
    first, last = run.records[0], run.records[-1]
    assert metrics["window_s"] == pytest.approx(((last.end_ns or 0) - first.planned_ns) / 1e9)
    truth_s = (posts[-1].sent_ns[-1] - posts[0].t_ns) / 1e9
    assert metrics["window_s"] == pytest.approx(truth_s, abs=LATE_NS / 1e9)
    infinity = metrics["ttft_ms_failures_as_infinity"]
    assert infinity["p90"] is None and infinity["p99"] is None


def test_k11_no_hidden_retry_and_retry_after_is_kept(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        if number % 3:
            return good(a, 30, 5, 5)
        status = 503 if number else 429
        return [(0, plain(status, {"error": {"message": "busy", "code": status}}, "Retry-After: 7\r\n"))]

    with ScriptedServer(reply) as server:
        run = load(server, transport, requests=9)
        assert len(server.posts()) == 9
    failures = [record.failure for record in run.records if record.failure]
    assert [(f.kind, f.status, f.retry_after) for f in failures] == [
        (FailureKind.STATUS, 429, "7"),
        (FailureKind.STATUS, 503, "7"),
        (FailureKind.STATUS, 503, "7"),
    ]
    assert summarize(run)["metrics"]["ttft_ms"]["n"] == 6


# ---------------------------------------------------------------- K12, K13: connections and limits


def test_k12_the_asked_concurrency_is_reached(transport: str) -> None:
    with ScriptedServer(lambda number, a: good(a, 1500, 2, 10)) as server:
        run = load(server, transport, requests=150, concurrency=150)
        posts = server.posts()
    assert all(record.ok for record in run.records)
    assert max(post.active for post in posts) == 150
    first_answer_ns = min(post.sent_ns[1] for post in posts)
    assert max(post.t_ns for post in posts) < first_answer_ns  # all were there before any was answered


def test_k12_too_few_descriptors_stop_the_run_before_it_starts() -> None:
    with ScriptedServer(lambda number, a: good(a)) as server:
        command = (
            f"ulimit -n 64 && exec {sys.executable} -m loadgen --url {server.url} --concurrency 100 --requests 100"
        )
        result = subprocess.run(
            ["bash", "-c", f"{command} {' '.join(QUICK)}"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert server.posts() == []
    assert result.returncode == 2
    assert "64" in result.stderr and "100" in result.stderr and "Traceback" not in result.stderr


DEFAULT_TOTAL_OF_2_S = """
import aiohttp, aiohttp.client as c
c.DEFAULT_TIMEOUT = aiohttp.ClientTimeout(total=2)
"""
BARE_POST = """
import aiohttp, asyncio, sys
async def main():
    async with aiohttp.ClientSession() as session, session.post(sys.argv[1], json={}) as answer:
        await answer.read()
asyncio.run(main())
"""


def test_k13_no_limit_on_the_whole_request_unless_asked_for(tmp_path: Path) -> None:
    """A default limit of two seconds stands for aiohttp's five minutes; the wire has no such thing."""
    (tmp_path / "sitecustomize.py").write_text(DEFAULT_TOTAL_OF_2_S)
    with ScriptedServer(lambda number, a: good(a, 400, 8, 300)) as server:
        bare = subprocess.run(
            [sys.executable, "-c", BARE_POST, f"{server.url}/v1/completions"],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "TimeoutError" in bare.stderr  # the trap is armed
        flags = ("--concurrency", "1", "--requests", "1", "--transport", "aiohttp", "--out", str(tmp_path / "run"))
        result = cli("--url", server.url, *flags, *QUICK, python_path=tmp_path)
    assert result.returncode in WELL, result.stderr
    (line,) = (tmp_path / "run" / "requests.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["num_events"] == 8


def test_k13_a_kept_alive_connection_that_died_is_reopened_and_counted(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [*good(a, 10, 3, 5), (0, CLOSE)]  # says nothing of closing

    with ScriptedServer(reply) as server:
        run = load(server, transport, requests=20)
        posts = server.posts()
    assert kinds(run) == {} and len(posts) == 20
    assert len({post.connection for post in posts}) == 20


def test_k13_a_connection_that_dies_under_the_request_is_sent_once_more(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, CLOSE)] if number % 2 else [*good(a, 10, 3, 5)[:-2], (0, DONE + END)]

    with ScriptedServer(reply) as server:
        run = load(server, transport, requests=3)
        posts = server.posts()
    # 0 is answered, 1 is dropped on the kept-alive connection and comes again as 2; 3 likewise as 4
    assert kinds(run) == {} and [record.reopened for record in run.records] == [False, True, True]
    assert len(posts) == 5 and summarize(run)["counts"]["reopened"] == 2
    assert [post.headers["x-request-id"] for post in posts[1:3]] == [run.records[1].id] * 2


def test_k13_on_a_fresh_connection_nothing_is_sent_twice(transport: str) -> None:
    with ScriptedServer(lambda number, a: [(0, CLOSE)]) as server:
        run = load(server, transport, requests=2, warmup=0, model="m")
        assert len(server.posts()) == 2 + sum(record.reopened for record in run.records)
        assert all(failure(record)[0] is FailureKind.CUT_OFF for record in run.records)


def stalls(number: int, a: Asked) -> Steps:
    return [(0, HEAD), (10, delta(a, content="a")), (10, delta(a, content="b")), (60_000, END)]


def test_k13_silence_ends_a_request_within_its_limit(transport: str) -> None:
    record, post, _ = one(stalls, transport, idle_timeout_s=0.5)
    assert failure(record) == (FailureKind.SILENCE, "nothing more for 0.5 s")
    fits(record, post, [1, 2])
    assert record.end_ns is not None and record.last_token_ns is not None
    assert 0.49e9 <= record.end_ns - record.last_token_ns < 5e9  # asyncio's timers are a millisecond wide
    record, _, _ = one(lambda number, a: [(60_000, HEAD)], transport, idle_timeout_s=0.5)
    assert failure(record) == (FailureKind.SILENCE, "no byte of an answer for 0.5 s")
    assert record.status is None and record.first_byte_ns is None


def test_k13_a_server_that_drips_is_ended_by_the_request_limit_alone(transport: str) -> None:
    """A byte every 100 ms never trips a silence limit of 2 s."""

    def reply(number: int, a: Asked) -> Steps:
        event = in_chunk(sse(payload(a, {"content": "never whole"})))
        return [(0, HEAD), *[(100, event[i : i + 1]) for i in range(100)], (0, CLOSE)]

    record, _, _ = one(reply, transport, idle_timeout_s=2, request_timeout_s=1)
    assert failure(record) == (FailureKind.TOTAL_TIMEOUT, "not over after 1 s")
    assert record.end_ns is not None
    assert 1e9 <= record.end_ns - record.planned_ns < 10e9


def test_k13_a_connection_that_is_never_accepted_times_out(transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        run = load(f"http://127.0.0.1:{port}", transport, model="m", connect_timeout_s=0.5)
        for filler in fillers:
            filler.close()
    assert failure(run.records[0]) == (FailureKind.CONNECT_TIMEOUT, f"no connection to 127.0.0.1:{port} in 0.5 s")
    assert time.monotonic() - began < 10


# ---------------------------------------------------------------- K14: the time base


def test_k14_sends_keep_to_absolute_times(transport: str) -> None:
    with ScriptedServer(lambda number, a: good(a, 5, 2, 1)) as server:
        run = load(server, transport, rate=200, arrival="constant", requests=400, input_tokens=Span(8, 8))
        posts = server.posts()
    assert kinds(run) == {} and len(posts) == 400
    planned = np.array([record.planned_ns for record in run.records])
    assert set(np.diff(planned)) == {5_000_000}
    sent = np.array([record.sent_ns for record in run.records])
    lag_ms = (sent - planned) / 1e6
    assert lag_ms.min() >= 0
    # sleeping from each "now" would lose some 9 %: 180 ms at the end of these two seconds
    assert np.median(lag_ms[-100:]) - np.median(lag_ms[:100]) < 40
    assert (posts[-1].t_ns - posts[0].t_ns) / 1e9 == pytest.approx(399 * 0.005, abs=0.15)
    metrics = summarize(run)["metrics"]
    assert metrics["offered_per_s"] == pytest.approx(200)
    assert metrics["lag_ms"]["max"] == pytest.approx(lag_ms.max())


def test_k14_the_wait_for_a_free_slot_is_in_the_latency(transport: str) -> None:
    with ScriptedServer(lambda number, a: good(a, 290, 2, 10)) as server:
        run = load(server, transport, rate=10, arrival="constant", requests=6, concurrency=1)
        posts = server.posts()
    assert max(post.active for post in posts) == 1
    metrics = summarize(run)["metrics"]
    lags = [((record.sent_ns or 0) - record.planned_ns) / 1e6 for record in run.records]
    for number, lag in enumerate(lags):
        assert lag >= 200 * number - 10  # 300 ms an answer, 100 ms apart
    assert metrics["lag_ms"]["max"] == pytest.approx(lags[-1])
    assert metrics["e2e_sent_ms"]["min"] >= 299
    assert metrics["e2e_ms"]["mean"] == pytest.approx(metrics["e2e_sent_ms"]["mean"] + sum(lags) / 6)
    assert metrics["e2e_ms"]["max"] >= 1290


CLOCK_STEPS = """
import time as _t
_r, _m = _t.time, _t.monotonic
_t.time = lambda: _r() - 3600 * (int(5 * _m()) % 2)
"""


def test_k14_a_step_of_the_wall_clock_bends_nothing(transport: str, tmp_path: Path) -> None:
    """An hour back and forth again, every 200 ms."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK_STEPS)
    with ScriptedServer(lambda number, a: good(a, 100, 8, 50)) as server:
        flags = ("--concurrency", "1", "--requests", "2", "--transport", transport, "--out", str(tmp_path / "run"))
        result = cli("--url", server.url, *flags, *QUICK, python_path=tmp_path)
        posts = server.posts()
    assert result.returncode in WELL, result.stderr
    start_ns = strict(tmp_path / "run" / "run.json")["start_monotonic_ns"]
    lines = [orjson.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_bytes().splitlines()]
    for line, post in zip(lines, posts, strict=True):
        for name, step in (("first_token_ns", 1), ("last_token_ns", 8)):
            assert -EARLY_NS <= line[name] + start_ns - post.sent_ns[step] < LATE_NS
        assert 0 <= line["planned_ns"] <= line["sent_ns"] <= line["first_byte_ns"] <= line["end_ns"]
    metrics = strict(tmp_path / "run" / "run.json")["metrics"]
    assert 0.45 * 2 - 0.01 <= metrics["window_s"] < 3


# ---------------------------------------------------------------- K15, K16: trace files


def replayed(
    path: Path, transport: str, *flags: str, reply: Reply | None = None, out: str = "run", owned_by: str = "test"
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Post]]:
    """run.json, the lines of requests.jsonl and the server's log of `loadgen --trace path`."""
    folder = path.parent / out
    with ScriptedServer(reply or quick, owned_by=owned_by) as server:
        more = ("--transport", transport, "--warmup", "0", "--no-scrape", "--out", str(folder))
        result = cli("--url", server.url, "--trace", str(path), *more, *flags)
        posts = [post for post in server.posts() if "x-request-id" in post.headers]  # not /tokenize
    assert result.returncode in (WELL + FAILED), result.stderr
    lines = [orjson.loads(line) for line in (folder / "requests.jsonl").read_bytes().splitlines()]
    return strict(folder / "run.json"), lines, posts


def arrived_as_planned(lines: list[dict[str, Any]], posts: list[Post]) -> None:
    """The server saw the planned gaps, and what was planned for each came as that one."""
    by_id = {post.headers["x-request-id"]: post for post in posts}
    first = by_id[lines[0]["id"]].t_ns - lines[0]["planned_ns"]
    for line in lines:
        assert -EARLY_NS - LATE_NS <= by_id[line["id"]].t_ns - first - line["planned_ns"] < LATE_NS


def test_k15_wall_clock_times_of_seven_digits_over_midnight(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-02-29 23:59:59.9990000,64,5\n"
        "2024-03-01 00:00:00.0005000,40,3\n"
        "2024-03-01 00:00:00.0080000,32,2\n"
        "2024-03-01 00:00:00.0937501,20,4\n"
    )
    document, lines, posts = replayed(path, transport)
    assert [line["planned_ns"] for line in lines] == [0, 1_500_000, 9_000_000, 94_750_100]
    by_id = {post.headers["x-request-id"]: post.body for post in posts}
    assert [by_id[line["id"]]["max_tokens"] for line in lines] == [5, 3, 2, 4]
    arrived_as_planned(lines, posts)
    assert document["counts"]["ok"] == 4


def test_k15_milliseconds_a_speed_up_and_shared_blocks(tmp_path: Path) -> None:
    rows = [(0, 1100, 4, [7, 8, 9]), (2000, 1100, 4, [7, 8, 10]), (2100, 300, 2, [11]), (15_000, 300, 2, [12])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    _, lines, posts = replayed(path, "wire", "--speedup", "10", owned_by="vllm")
    assert [line["planned_ns"] for line in lines] == [0, 200_000_000, 210_000_000, 1_500_000_000]
    arrived_as_planned(lines, posts)
    by_id = {post.headers["x-request-id"]: post.body["prompt"] for post in posts}
    first, second, third, fourth = (by_id[line["id"]] for line in lines)
    assert [len(ids) for ids in (first, second, third, fourth)] == [1100, 1100, 300, 300]
    assert first[:1024] == second[:1024] and first[1024] != second[1024]  # two blocks of 512, then apart
    assert third[0] != fourth[0] != first[0] != third[0]


def test_k16_rows_without_output_are_skipped_and_counted(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "7,GPT-4,200,0,200,Conversation log\n"
        "10,ChatGPT,40,9,49,Conversation log\n"
        "52.5,GPT-4,30,6,36,API log\n"
        "52.5,GPT-4,0,0,0,API log\n"
        "127,ChatGPT,50,11,61,API log\n"
    )
    document, lines, posts = replayed(path, transport, "--speedup", "100")
    # zero is the first row of the file, the skipped one, too
    assert [line["planned_ns"] for line in lines] == [30_000_000, 455_000_000, 1_200_000_000]
    by_id = {post.headers["x-request-id"]: post.body for post in posts}
    assert [by_id[line["id"]]["max_tokens"] for line in lines] == [9, 6, 11]
    trace = document["plan"]["trace"]
    assert (trace["read"], trace["sent"], sum(trace["skipped"].values())) == (5, 3, 2)
    assert document["counts"]["started"] == 3


def test_k16_a_row_that_is_too_long_fails_with_the_servers_words_or_is_skipped(transport: str, tmp_path: Path) -> None:
    def reply(number: int, a: Asked) -> Steps:
        if len(json.dumps(a.body["prompt"])) > 20_000:
            return [(0, plain(400, {"error": {"message": "maximum context length is 4096 tokens", "code": 400}}))]
        return good(a, 1, 4, 0)

    path = tmp_path / "long.jsonl"
    lengths = [50, 50, 100_000, 50, 50]
    path.write_text("".join(json.dumps({"input_length": n, "output_length": 4}) + "\n" for n in lengths))
    document, _, _ = replayed(path, transport, "--concurrency", "1", reply=reply, out="sent")
    counts = document["counts"]
    assert (counts["started"], counts["ok"], counts["failed"]) == (5, 4, 1)
    assert "maximum context length" in counts["failure_reasons"][0]["detail"]
    limit = ("--concurrency", "1", "--max-model-len", "4096")
    document, _, posts = replayed(path, transport, *limit, reply=reply, out="skipped")
    assert (document["counts"]["ok"], document["counts"]["failed"], len(posts)) == (4, 0, 4)
    trace = document["plan"]["trace"]
    assert (trace["read"], trace["sent"], sum(trace["skipped"].values())) == (5, 4, 1)


def test_k16_the_servers_prompt_tokens_stand_beside_the_asked_ones(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [
            (0, HEAD),
            (30, delta(a, content="a")),
            (5, delta(a, "length", content="b")),
            (0, usage(a, 2, 1100)),
            (0, END),
        ]

    record, _, metrics = one(reply, transport, input_tokens=Span(1000, 1000), output_tokens=Span(2, 2))
    assert (record.asked_input_tokens, record.prompt_tokens) == (1000, 1100)
    assert (metrics["input_tokens_asked"], metrics["input_tokens"]) == (1000, 1100)
    assert metrics["input_tokens_per_s"] == pytest.approx(1100 / metrics["window_s"])


# ---------------------------------------------------------------- K17: equal work


def bodies(transport: str, **options: Any) -> list[dict[str, Any]]:
    with ScriptedServer(quick) as server:
        load(server, transport, **{"requests": 12, "warmup": 4, "seed": None, "concurrency": 4, **options})
        return [post.body for post in server.posts()]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_k17_prompts_are_new_unless_the_seed_is_given(endpoint: str) -> None:
    def prompts(these: list[dict[str, Any]]) -> list[str]:
        found = [body["prompt"] if endpoint == "completions" else body["messages"][0]["content"] for body in these]
        return sorted(orjson.dumps(prompt).decode() for prompt in found)

    runs = [prompts(bodies("wire", endpoint=endpoint)) for _ in range(2)]
    assert not set(runs[0]) & set(runs[1])
    assert len({prompt[:200] for prompt in runs[0]}) == 16  # no shared beginning within a run
    again = [bodies("wire", endpoint=endpoint, seed=5) for _ in range(2)]
    assert sorted(map(orjson.dumps, again[0])) == sorted(map(orjson.dumps, again[1]))


def test_k17_every_body_says_everything_the_warm_up_too(transport: str, tmp_path: Path) -> None:
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}}
    with ScriptedServer(quick) as server:
        out = tmp_path / "run"
        flags = ("--concurrency", "2", "--requests", "4", "--warmup", "2", "--output-tokens", "3", "--out", str(out))
        extra = ("--extra-body", json.dumps(schema), "--seed", "5", "--temperature", "0.7", "--no-scrape")
        result = cli("--url", server.url, "--transport", transport, *flags, *extra)
        assert result.returncode in WELL, result.stderr
        sent = [post.body for post in server.posts()]
    assert len(sent) == 6
    fixed = {"model": "m", "max_tokens": 3, "min_tokens": 3, "ignore_eos": True, "temperature": 0.7, "top_p": 1.0}
    fixed |= {"n": 1, "seed": 5, "stream": True, "stream_options": {"include_usage": True}, **schema}
    for body in sent:
        assert {name: value for name, value in body.items() if name != "prompt"} == fixed
        assert not any(name.startswith("guided_") for name in body)
    options = strict(out / "run.json")["options"]
    assert (options["seed"], options["temperature"], options["stop_at_eos"]) == (5, 0.7, False)
    assert options["extra_body"] == schema


# ---------------------------------------------------------------- K18: interruption; servers and disks that die


def started(server: ScriptedServer, transport: str, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadgen", "--url", server.url, "--transport", transport, "--out", str(out)]
    return subprocess.Popen(
        [*command, *QUICK, *more],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, so that a test can press Ctrl-C
    )


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_k18_the_first_interrupt_writes_what_is_complete(transport: str, tmp_path: Path) -> None:
    with ScriptedServer(lambda number, a: good(a, 200, 2, 10)) as server:
        out = tmp_path / "run"
        process = started(server, transport, out, "--rate", "10", "--arrival", "constant", "--requests", "100")
        wait_for(lambda: sum(post.end == "end" for post in server.posts()) >= 15)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 10
        ended = sum(post.end == "end" for post in server.posts())
        arrived = len(server.posts())
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    document = strict(out / "run.json")
    counts = document["counts"]
    assert document["interrupted"] is True
    assert 15 <= counts["ok"] <= ended and ended - counts["ok"] <= 3  # some may have ended in the very moment
    assert counts["failed"] == 0 and counts["started"] == counts["ok"] + counts["unfinished"]
    assert abs(counts["started"] - arrived) <= 1 and counts["started"] + counts["skipped"] == 100
    window_s = document["metrics"]["window_s"]
    assert document["metrics"]["requests_per_s"] == pytest.approx(counts["ok"] / window_s)
    assert 1.5 < window_s < 60


def test_k18_the_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    with ScriptedServer(stalls) as server:
        process = started(server, "wire", tmp_path / "run", "--concurrency", "4", "--requests", "4")
        wait_for(lambda: len(server.posts()) == 4)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_server_that_is_killed_in_mid_run(transport: str, tmp_path: Path) -> None:
    with ScriptedServer(lambda number, a: good(a, 100, 5, 20)) as server:
        process = started(server, transport, tmp_path / "run", "--concurrency", "4", "--requests", "60")
        wait_for(lambda: sum(post.end == "end" for post in server.posts()) >= 8)
        server.kill()
        posts = server.posts()
        _, errors = process.communicate(timeout=60)
    assert process.returncode in FAILED, errors
    counts = strict(tmp_path / "run" / "run.json")["counts"]
    assert counts["started"] == 60 == counts["ok"] + counts["failed"]
    ended = sum(post.end == "end" for post in posts)
    assert ended - 4 <= counts["ok"] <= ended
    assert set(counts["failures"]) <= {"refused", "cut-off"} and counts["failures"]["refused"] >= 40


def on_a_disk_of(size_kib: int, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """40 requests with --out on a disk of its own, in a mount namespace of its own; the folder is copied out of it."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    with ScriptedServer(quick) as server:
        flags = f"--concurrency 4 --requests 40 --out {disk / 'run'} {' '.join(QUICK)}"
        script = f"mount -t tmpfs -o size={size_kib}k none {disk} || exit 77; "
        script += f"{sys.executable} -m loadgen --url {server.url} {flags}; s=$?; cp -r {disk} {copy}; exit $s"
        result = subprocess.run(
            ["unshare", "-m", "bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=60
        )
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip("a small disk needs root")
    return result


def test_a_full_disk_is_one_line_and_keeps_what_is_complete(tmp_path: Path) -> None:
    """requests.jsonl of 40 requests takes 21 KiB, run.json does not fit behind it."""
    result = on_a_disk_of(32, tmp_path)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and "No space left on device" in result.stderr
    assert "40 ok" in result.stdout  # the numbers are printed all the same
    lines = (tmp_path / "copy" / "run.incomplete" / "requests.jsonl").read_bytes().splitlines()
    assert len(lines) == 40 and all(orjson.loads(line)["ok"] for line in lines)
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["run.incomplete"]


def test_a_disk_too_full_for_anything_leaves_nothing_half(tmp_path: Path) -> None:
    result = on_a_disk_of(12, tmp_path)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and "No space left on device" in result.stderr
    assert "40 ok" in result.stdout
    assert list((tmp_path / "copy").iterdir()) == []


def test_a_place_that_cannot_be_written_is_told_before_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with ScriptedServer(quick) as server:
        result = cli("--url", server.url, "--concurrency", "1", *QUICK, "--out", str(tmp_path / "file" / "run"))
        assert server.posts() == []
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and "--out" in result.stderr


# ---------------------------------------------------------------- K19: the way to the server


def gzips_when_asked(number: int, a: Asked) -> Steps:
    if "gzip" not in a.headers.get("accept-encoding", ""):
        return good(a, 100, 5, 50)
    return gzips(number, a)


def gzips(number: int, a: Asked) -> Steps:
    events = [sse(payload(a, {"content": "w"}, "length" if i == 4 else None)) for i in range(5)]
    packer = zlib.compressobj(6, 8, 31)
    packed = packer.compress(b"".join(events) + b"data: [DONE]\n\n") + packer.flush()
    return [(0, HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n"), (100, in_chunk(packed)), (0, END)]


def test_k19_identity_is_asked_for_and_gzip_is_read_all_the_same(transport: str) -> None:
    record, post, _ = one(gzips_when_asked, transport)
    assert record.ok and post.headers["accept-encoding"] == "identity"
    fits(record, post, [1, 2, 3, 4, 5])
    record, post, _ = one(gzips, transport)
    assert record.ok and (record.num_events, record.text) == (5, "wwwww")


def test_k19_loopback_never_goes_through_a_proxy(transport: str, tmp_path: Path) -> None:
    with ScriptedServer(quick) as server:
        proxies = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")}
        flags = ("--concurrency", "1", "--requests", "3", "--transport", transport, "--out", str(tmp_path / "run"))
        result = cli("--url", server.url, *flags, "--warmup", "0", "--output-tokens", "2", **proxies)
    assert result.returncode in WELL, result.stderr
    assert strict(tmp_path / "run" / "run.json")["counts"]["ok"] == 3


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_k19_the_base_url_with_and_without_v1(transport: str, endpoint: str) -> None:
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    with ScriptedServer(quick) as server:
        for ending in ("", "/", "/v1", "/v1/"):
            run = load(server.url + ending, transport, endpoint=endpoint, output_tokens=Span(2, 2))
            assert kinds(run) == {}
        assert [post.path for post in server.posts()] == [path] * 4


def test_k19_the_key_goes_to_the_server_and_nowhere_else(transport: str, tmp_path: Path) -> None:
    def reply(number: int, a: Asked) -> Steps:
        if number == 1:  # a server that repeats it in its error
            said = f"invalid key: {a.headers['authorization']} {a.headers['x-secret']}"
            return [(0, plain(401, {"error": {"message": said}}))]
        return quick(number, a)

    with ScriptedServer(reply) as server:
        flags = ("--concurrency", "1", "--requests", "3", "--transport", transport, "--out", str(tmp_path / "run"))
        secret = ("--header", "X-Secret=sk-HEADER-77")
        result = cli(
            "--url", server.url, *flags, *secret, "--warmup", "0", "--output-tokens", "2", OPENAI_API_KEY="sk-TEST-4242"
        )
        assert result.returncode in FAILED, result.stderr
        for post in server.posts():
            assert post.headers["authorization"] == "Bearer sk-TEST-4242"
            assert post.headers["x-secret"] == "sk-HEADER-77"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for text in (result.stdout, result.stderr, *[path.read_bytes().decode("latin-1") for path in files]):
        assert "sk-TEST-4242" not in text
        assert "sk-HEADER-77" not in text


# ---------------------------------------------------------------- other failures, told apart


def test_what_is_no_http_and_no_stream(transport: str) -> None:
    answers: list[Steps] = [
        [(0, b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), (0, CLOSE)],
        [(0, plain(200, b"<html>hello</html>", content_type="text/html"))],
        [(0, plain(200, b"pong", content_type="text/plain"))],
        [(0, HEAD), (0, b"zz\r\nno chunk\r\n"), (0, CLOSE)],
        [(0, HEAD), (0, in_chunk(b"data: no json\n\n")), (0, END)],
    ]
    with ScriptedServer(lambda number, a: answers[number]) as server:
        run = load(server, transport, requests=len(answers))
    for record in run.records:
        assert failure(record)[0] is FailureKind.PROTOCOL, record


def test_a_whole_answer_instead_of_a_stream(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        choice = {"index": 0, "text": "hello", "finish_reason": "stop"}
        counts = {"prompt_tokens": 4, "completion_tokens": 7}
        return [(100, plain(200, {"object": "text_completion", "choices": [choice], "usage": counts}))]

    record, post, metrics = one(reply, transport)
    fits(record, post, [0])
    assert record.ok and (record.text, record.output_tokens) == ("hello", 7)
    assert metrics["tpot_ms"]["mean"] == 0  # one event: measured, and worth a warning


def test_done_ends_the_answer_even_if_the_connection_stays_open(transport: str) -> None:
    def reply(number: int, a: Asked) -> Steps:
        return [(0, HEAD), (10, delta(a, "stop", content="a")), (0, DONE), (2000, END)]

    with ScriptedServer(reply) as server:
        run = load(server, transport, requests=3)
        posts = server.posts()
    assert kinds(run) == {}
    for record, post in zip(run.records, posts, strict=True):
        assert record.end_ns is not None
        assert post.sent_ns[2] - EARLY_NS <= record.end_ns < post.sent_ns[2] + LATE_NS


def test_tls_against_a_server_that_speaks_plain_http() -> None:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        run = load(f"https://127.0.0.1:{listener.getsockname()[1]}", "auto", model="m")
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert failure(run.records[0])[0] is FailureKind.TLS


def test_headers_without_end_are_too_large(transport: str) -> None:
    steps: Steps = [(0, b"HTTP/1.1 200 OK\r\nX: " + b"x" * (2 << 20) + b"\r\n\r\n"), (0, CLOSE)]
    record, _, _ = one(lambda number, a: steps, transport)
    assert failure(record)[0] is FailureKind.TOO_LARGE


def test_both_transports_make_the_same_record_of_the_same_bytes() -> None:
    """Everything but times."""
    replies: list[Any] = [
        lambda n, a: good(a, 5, 20, 1),
        engine_stops,
        lambda n, a: [(0, HEAD), (1, delta(a, content="a")), (0, CLOSE)],
        lambda n, a: [(0, plain(503, {"error": {"message": "busy"}}, "Retry-After: 1\r\n"))],
        lambda n, a: [(0, HEAD), (0, DONE), (0, END)],
        gzips,
        lambda n, a: [(0, plain(200, b"pong", content_type="text/plain"))],
        lambda n, a: [(0, b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"), (0, b"data: [D"), (0, CLOSE)],
        lambda n, a: [
            (0, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"),
            (0, sse(payload(a, {"content": "a"}, "stop"))),
            (0, CLOSE),
        ],
        lambda n, a: [(0, b"HTTP/1.1 204 No Content\r\n\r\n")],
        lambda n, a: [(0, b"HTTP/1.1 307 Moved\r\nLocation: http://other\r\nContent-Length: 0\r\n\r\n")],
    ]

    def told(transport: str) -> list[Any]:
        with ScriptedServer(lambda number, a: replies[number](number, a)) as server:
            run = load(server, transport, requests=len(replies))
        return [
            (r.ok, r.failure and (r.failure.kind, r.failure.detail, r.failure.status, r.failure.retry_after), r.status)
            + (r.num_events, r.prompt_tokens, r.output_tokens, r.tokens_from, r.finish_reason, r.text, r.reopened)
            for r in run.records
        ]

    assert told("wire") == told("aiohttp")

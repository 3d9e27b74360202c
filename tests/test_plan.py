"""Options to requests: the same seed, the same plan; workers share it; traces keep times, prefixes and sessions."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadgen.options import Options, Span, UsageError
from loadgen.plan import Plan, make_plan
from loadgen.record import Phase, Request, RequestRecord
from loadgen.runner import Outcome, Runner
from loadgen.target import ServerInfo
from loadgen.trace_plan import settled
from tests.fakes import DONE, FakeClock, FakeTransport, Script, answer, chunk, event, usage

S = 1_000_000_000
MS = 1_000_000
VLLM = ServerInfo("m", owned_by="vllm", max_model_len=100_000)  # takes token ids
PLAIN = ServerInfo("m")


def not_found(number: int, body: bytes) -> Script:
    return Script([], status=404)


def plan_of(options: Options, info: ServerInfo = VLLM, worker: int = 0) -> Plan:
    options = options if options.seed is not None else options.replace(seed=1)
    return asyncio.run(make_plan(options, info, FakeTransport(FakeClock(), not_found), worker))


def measured(plan: Plan) -> list[Request]:
    return [request for _, request in plan.measured]


def body_of(request: Request) -> dict[str, Any]:
    made: dict[str, Any] = orjson.loads(request.body)
    return made


def prompts_of(plan: Plan) -> list[list[int]]:
    return [body_of(request)["prompt"] for request in measured(plan)]


def due_s(plan: Plan) -> list[float | None]:
    return [None if r.planned_ns is None else r.planned_ns / S for r in measured(plan)]


def traced(tmp_path: Path, *rows: dict[str, Any], header: dict[str, Any] | None = None) -> str:
    lines = ([{"schema": "loadgen.trace/1", **header}] if header is not None else []) + list(rows)
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def shared(a: list[int], b: list[int]) -> int:
    """Leading tokens that are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def in_phases(plan: Plan) -> list[tuple[Phase, int]]:
    return [(request.phase, index) for index, request in plan.before]


# ---------------------------------------------------------------- without a trace


def test_the_same_seed_gives_the_same_plan_and_another_rate_the_same_bodies() -> None:
    options = Options(rate=5, requests=20, seed=3, input_tokens=Span(5, 50))
    bodies = [r.body for r in measured(plan_of(options))]
    assert bodies == [r.body for r in measured(plan_of(options))]
    assert bodies == [r.body for r in measured(plan_of(options.replace(rate=50)))]
    assert bodies != [r.body for r in measured(plan_of(options.replace(seed=4)))]


def test_cold_then_warm_up_then_measured() -> None:
    plan = plan_of(Options(concurrency=3, requests=4))
    assert in_phases(plan) == [(Phase.COLD, 0), (Phase.WARMUP, 1), (Phase.WARMUP, 2)]
    assert [index for index, _ in plan.measured] == [3, 4, 5, 6] and plan.total == 4
    assert not plan.open_loop and plan.concurrency == 3
    assert plan_of(Options(concurrency=3, warmup=0)).before == ()


def test_workers_share_one_plan() -> None:
    options = Options(rate=9, requests=10, seed=5, workers=3)
    alone = list(plan_of(options.replace(workers=1)).measured)
    parts = [list(plan_of(options, worker=worker).measured) for worker in range(3)]
    assert sorted((pair for part in parts for pair in part), key=lambda pair: pair[0]) == alone
    assert [len(part) for part in parts] == [4, 3, 3]
    assert plan_of(options, worker=1).before == ()


def test_prompts_are_of_exact_length_and_differ_from_the_first_token_on() -> None:
    prompts = prompts_of(plan_of(Options(concurrency=2, requests=30, input_tokens=Span(3, 90))))
    assert all(3 <= len(prompt) <= 90 for prompt in prompts) and len({len(prompt) for prompt in prompts}) > 5
    assert len({prompt[0] for prompt in prompts}) == 30


# ---------------------------------------------------------------- traces: times


MOONCAKE = (
    {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 10]},
    {"timestamp": 3050, "input_length": 300, "output_length": 2, "hash_ids": [11]},
    {"timestamp": 27000, "input_length": 300, "output_length": 2, "hash_ids": [12]},
)


def test_recorded_times_and_lengths(tmp_path: Path) -> None:
    # B15 b
    plan = plan_of(Options(trace=traced(tmp_path, *MOONCAKE)))
    assert plan.open_loop and plan.total == 4
    assert due_s(plan) == [0, 3, 3.05, 27]
    assert [body_of(r)["max_tokens"] for r in measured(plan)] == [4, 4, 2, 2]
    assert [len(prompt) for prompt in prompts_of(plan)] == [1100, 1100, 300, 300]
    faster = plan_of(Options(trace=traced(tmp_path, *MOONCAKE), trace_options={"speedup": 10.0}))
    assert due_s(faster) == [0, 0.3, 0.305, 2.7]
    assert prompts_of(faster) == prompts_of(plan)


def test_run_json_says_what_became_of_every_row(tmp_path: Path) -> None:
    rows = [*MOONCAKE, {"timestamp": 28000, "input_length": 99, "output_length": 0, "colour": "red"}]
    path = traced(tmp_path, *rows, {"timestamp": 29000, "input_length": 200_000, "output_length": 5})
    plan = plan_of(Options(trace=path, trace_options={"from_s": 1.0, "speedup": 2.0}))
    assert plan.trace_counts is not None
    said = settled([plan.trace_counts()], started=len(measured(plan)))
    assert (said["read"], said["sent"]) == (6, 3)
    assert said["skipped"] == {"before_from": 1, "zero_output": 1, "too_long": 1}
    assert (said["offset_s"], said["speedup"], said["inversions"]) == (3, 2, 0)
    assert len(said["sha256"]) == 64 and said["max_model_len_from"] == "the server"
    assert said["unknown_keys"] == {"colour": 1}
    assert plan.notes() == (
        "trace t.jsonl: 1 rows skipped: no output",
        "trace t.jsonl: 1 rows skipped: longer than the model takes",
        "trace t.jsonl: keys that are not of the format were ignored: colour",
    )
    orjson.dumps(said)


def test_what_was_planned_and_not_started_is_skipped() -> None:
    counts = {"read": 10, "planned": 8, "skipped": {"zero_output": 2}}
    said = settled([{"file": "x", "read": 4, "planned": 4, "skipped": {}}, counts], started=5)
    assert said == {"file": "x", "read": 10, "sent": 5, "skipped": {"zero_output": 2, "not_started": 3}}


def test_a_rate_replays_the_rows_in_order_as_poisson(tmp_path: Path) -> None:
    rows = [{"timestamp": 10 * n, "input_length": 5 + n, "output_length": 1} for n in range(400)]
    path = traced(tmp_path, *rows)
    plan = plan_of(Options(trace=path, rate=4))
    times = [t for t in due_s(plan) if t is not None]
    assert [r.input_tokens for r in measured(plan)] == [5 + n for n in range(400)]
    assert len(times) == 400 and times == sorted(times)
    assert 80 < times[-1] < 125  # 400 at 4/s: 100 s, of deviation 5 s
    constant = due_s(plan_of(Options(trace=path, rate=4, arrival="constant")))
    assert constant[:3] == [0, 0.25, 0.5]
    recorded = due_s(plan_of(Options(trace=path, rate=4, arrival="recorded")))
    assert recorded[0] == 0 and recorded[-1] == pytest.approx(100)  # 400 rows over 100 s


def test_concurrency_replays_in_file_order(tmp_path: Path) -> None:
    rows = [{"input_length": 5 + n, "output_length": 1} for n in range(10)]
    plan = plan_of(Options(trace=traced(tmp_path, *rows), concurrency=2, requests=6))
    assert not plan.open_loop and plan.concurrency == 2 and due_s(plan) == [None] * 6
    assert [r.input_tokens for r in measured(plan)] == [5, 6, 7, 8, 9, 10]
    assert plan.trace_counts is not None and plan.trace_counts()["ended_by"] == "--requests"


def test_the_warm_up_is_like_the_first_rows_but_shares_nothing_with_them(tmp_path: Path) -> None:
    plan = plan_of(Options(trace=traced(tmp_path, *MOONCAKE), warmup=2))
    assert in_phases(plan) == [(Phase.COLD, 0), (Phase.WARMUP, 1)]
    warm = [body_of(request)["prompt"] for _, request in plan.before]
    assert [len(prompt) for prompt in warm] == [1100, 1100]
    assert max(shared(a, b) for a in warm for b in prompts_of(plan)) < 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 2, "trace_options": {"speedup": 2.0}}, "--speedup would be ignored: --concurrency"),
        ({"rate": 2.0, "trace_options": {"max_gap_s": 2.0}}, "--max-gap would be ignored: --rate"),
        ({"trace_options": {"speedup_delays": True}}, "--speedup-delays needs --speedup X and --pacing session"),
        ({"trace_options": {"from_s": 5.0, "to_s": 5.0}}, "--from 5 must be below --to 5"),
        ({"arrival": "recorded"}, "--arrival recorded needs --rate"),
        ({"trace_options": {"overflow": "fail"}}, "--overflow needs --max-model-len"),
        ({"trace_options": {"trace_format": "x"}}, "--trace-format must be one of"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        plan_of(Options(trace=traced(tmp_path, *MOONCAKE), **options), PLAIN)


def test_a_bad_row_far_behind_ends_the_replay_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgen.trace_plan._BUILT_AHEAD", 5)
    monkeypatch.setattr("loadgen.trace._WINDOW_ROWS", 4)
    monkeypatch.setattr("loadgen.trace_formats._PEEK_ROWS", 2)
    rows = [{"timestamp": n, "input_length": 5, "output_length": 1} for n in range(40)]
    plan = plan_of(Options(trace=traced(tmp_path, *rows, {"input_length": "x"})))
    assert plan.total is None and len(measured(plan)) == 40
    assert plan.trace_counts is not None
    assert "line 41: input_length" in plan.trace_counts()["ended_by"] and "line 41" in plan.notes()[0]


def test_a_bad_row_near_the_start_is_an_error_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 2: input_length"):
        plan_of(Options(trace=traced(tmp_path, MOONCAKE[0], {"input_length": "x"})))


# ---------------------------------------------------------------- traces: prompts


@pytest.mark.parametrize("info", [VLLM, PLAIN])
def test_equal_ids_are_equal_tokens_and_siblings_differ_at_once(tmp_path: Path, info: ServerInfo) -> None:
    # B15 b: rows 1 and 2 are equal over 2 x 512 tokens and differ after; 3 and 4 share nothing
    prompts: list[Any] = prompts_of(plan_of(Options(trace=traced(tmp_path, *MOONCAKE)), info))
    if info is PLAIN:  # a word is a token
        prompts = [prompt.split(" ") for prompt in prompts]
    a, b, c, d = prompts
    assert [len(prompt) for prompt in prompts] == [1100, 1100, 300, 300]
    assert shared(a, b) == 1024 and a[1024] != b[1024]
    assert max(shared(a, c), shared(a, d), shared(c, d)) == 0


def test_the_three_layouts_of_ids(tmp_path: Path) -> None:
    rows = [
        {"input_length": 128, "output_length": 1, "hash_ids": [1, 2]},  # exact
        {"input_length": 100, "output_length": 1, "hash_ids": [1, 2]},  # the last block partly filled
        {"input_length": 200, "output_length": 1, "hash_ids": [1, 2]},  # a tail without id
        {"input_length": 200, "output_length": 1, "hash_ids": [1, 2]},
        {"input_length": 70, "output_length": 1, "hash_ids": [1, 3]},
    ]
    trace = traced(tmp_path, *rows, header={"block_size": 64})
    exact, partial, tail, other_tail, sibling = prompts_of(plan_of(Options(trace=trace, concurrency=1)))
    assert [len(p) for p in (exact, partial, tail, other_tail, sibling)] == [128, 100, 200, 200, 70]
    assert exact[:100] == partial and tail[:128] == exact
    assert shared(tail, other_tail) == 128  # tails are each request's own, from their first token on
    assert shared(sibling, exact) == 64


def test_many_siblings_differ_in_their_first_token(tmp_path: Path) -> None:
    rows = [{"input_length": 65 + n % 3, "output_length": 1, "hash_ids": [0, 1 + n]} for n in range(500)]
    prompts = prompts_of(plan_of(Options(trace=traced(tmp_path, *rows, header={"block_size": 64}), concurrency=1)))
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 1
    assert len({prompt[64] for prompt in prompts}) == 500


def test_a_prompt_is_the_same_whatever_the_window_and_another_seed_changes_all(tmp_path: Path) -> None:
    trace = traced(tmp_path, *MOONCAKE)
    whole = prompts_of(plan_of(Options(trace=trace)))
    part = prompts_of(plan_of(Options(trace=trace, trace_options={"from_s": 2.0})))
    assert part == whole[1:]
    assert max(map(shared, whole, prompts_of(plan_of(Options(trace=trace, seed=2))))) < 16


def test_clipped_inputs_keep_their_prefix(tmp_path: Path) -> None:
    trace = traced(tmp_path, *MOONCAKE)
    whole = prompts_of(plan_of(Options(trace=trace)))
    clipped = prompts_of(plan_of(Options(trace=trace, trace_options={"max_model_len": 700, "overflow": "clip-input"})))
    assert [len(prompt) for prompt in clipped] == [696, 696, 300, 300]
    assert clipped[0] == whole[0][:696] == clipped[1]


def test_scopes_are_apart(tmp_path: Path) -> None:
    row = {"input_length": 64, "output_length": 1, "hash_ids": [1]}
    trace = traced(tmp_path, row, {**row, "hash_scope": "a"}, {**row, "hash_scope": "b"}, header={"block_size": 64})
    a, b, c = prompts_of(plan_of(Options(trace=trace, concurrency=1)))
    assert max(shared(a, b), shared(b, c), shared(a, c)) < 16


def test_segments_are_shared_in_order(tmp_path: Path) -> None:
    def row(*ids: int) -> dict[str, Any]:
        return {"input_length": 100, "output_length": 1, "segments": [{"id": i, "tokens": 30} for i in ids]}

    a, b, c = prompts_of(plan_of(Options(trace=traced(tmp_path, row(1, 2), row(1, 3), row(1, 2)), concurrency=1)))
    assert [len(p) for p in (a, b, c)] == [100] * 3 and (shared(a, b), shared(a, c)) == (30, 60)


def test_prefix_lengths_share_the_context_before(tmp_path: Path) -> None:
    def row(session: str, length: int, prefix: int) -> dict[str, Any]:
        return {"session_id": session, "input_length": length, "prefix_length": prefix, "output_length": 1}

    rows = [row("s", 100, 0), row("r", 100, 0), row("s", 180, 120), row("s", 200, 150), row("s", 90, 40)]
    trace = traced(tmp_path, *rows)
    a, other, b, c, d = prompts_of(plan_of(Options(trace=trace, concurrency=2)))
    assert [len(p) for p in (a, b, c, d)] == [100, 180, 200, 90]
    assert shared(a, other) < 16
    assert shared(a, b) == 100  # of 120: what was not in the prompt before was its answer
    assert (shared(b, c), shared(c, d), shared(a, d)) == (150, 40, 40)
    parts = [plan_of(Options(trace=trace, concurrency=2, workers=2), worker=worker) for worker in range(2)]
    assert sorted(p for part in parts for p in prompts_of(part)) == sorted([a, other, b, c, d])


def test_a_chat_template_is_taken_off_without_breaking_what_is_shared() -> None:
    from loadgen.prompt import Synthetic, block_chunks

    def made(ids: list[int], length: int) -> list[str]:
        words = [f"w{n}" for n in range(500)]
        prompts = Synthetic(words, 7, as_text=True, overhead_tokens=10)
        content = prompts.of_chunks(3, block_chunks(ids, 64, length)).content
        assert isinstance(content, str)
        return content.split(" ")

    a, b = made([1, 2, 3], 192), made([1, 2, 4], 150)
    assert (len(a), len(b)) == (182, 140)
    assert a[:118] == b[:118] and a[118] != b[118]  # 10 + 118 = 2 blocks
    assert len(made([1], 5)) == 1  # never nothing


def test_content_goes_out_as_it_is(tmp_path: Path) -> None:
    rows = [
        {"text_input": "say hi", "output_length": 3, "extra": {"top_k": 4}},
        {"prompt_token_ids": [5, 6, 7], "output_length": 3},
        {"payload": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "model": "other"}},
    ]
    plan = plan_of(Options(trace=traced(tmp_path, *rows), concurrency=1))
    text, ids, payload = measured(plan)
    assert body_of(text)["prompt"] == "say hi" and body_of(text)["top_k"] == 4 and text.input_tokens is None
    assert body_of(ids)["prompt"] == [5, 6, 7] and ids.input_tokens == 3
    assert payload.path == "/v1/chat/completions" and payload.output_tokens == 9
    assert body_of(payload) == {
        **rows[2]["payload"],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    messages = traced(tmp_path, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]})
    with pytest.raises(UsageError, match="line 1: messages need --endpoint chat"):
        plan_of(Options(trace=messages, concurrency=1))
    (chat,) = measured(plan_of(Options(trace=messages, concurrency=1, endpoint="chat")))
    assert body_of(chat)["tools"] == [{"type": "function"}] and body_of(chat)["max_tokens"] == 128


# ---------------------------------------------------------------- traces: sessions


def run(
    options: Options, script: Callable[[int, bytes], Script], info: ServerInfo = PLAIN
) -> tuple[Outcome, dict[str, float], FakeTransport]:
    """The outcome, when each request was really sent in s after the start, and the transport."""
    clock = FakeClock()
    transport = FakeTransport(clock, script)

    async def main() -> Outcome:
        plan = await make_plan(options.replace(seed=1, warmup=0), info, FakeTransport(FakeClock(), not_found))
        return await Runner(plan, transport, clock).run()

    outcome = asyncio.run(main())
    sent = {sent.id or "": (sent.at_ns - outcome.start_ns) / S for sent in transport.sent}
    return outcome, sent, transport


def takes_s(seconds: float) -> Callable[[int, bytes], Script]:
    return lambda number, body: answer([seconds * 1000])


def turn(session: str, at_s: float | None, delay_s: float | None = None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"session_id": session, "input_length": 5, "output_length": 1, **more}
    if at_s is not None:
        row["timestamp"] = at_s * 1000
    return row if delay_s is None else {**row, "delay": delay_s * 1000}


def by_position(sent: dict[str, float]) -> list[float]:
    return [round(at, 6) for _, at in sorted(sent.items())]


SESSION = {"pacing": "session"}


def test_open_pacing_sends_every_row_at_its_time(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 0), turn("a", 2, 1), turn("b", 3))
    _, sent, _ = run(Options(trace=path), takes_s(100))
    assert by_position(sent) == [0, 2, 3]


def test_a_turn_waits_for_the_one_before_and_its_think_time(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 0), turn("a", 40, 4), turn("a", 80, 6), turn("b", 50))
    _, sent, _ = run(Options(trace=path, trace_options=SESSION), takes_s(10))
    # in order of the earliest time: a1 0, a2 0 + 10 + 4 = 14, a3 14 + 10 + 6 = 30, b 50
    assert by_position(sent) == [0, 14, 30, 50]
    _, sent, _ = run(Options(trace=path, trace_options={**SESSION, "speedup": 2.0}), takes_s(10))
    assert by_position(sent) == [0, 14, 30, 25]  # think times are people's: they stay
    fast = {**SESSION, "speedup": 2.0, "speedup_delays": True}
    assert by_position(run(Options(trace=path, trace_options=fast), takes_s(10))[1]) == [0, 12, 25, 25]


def test_latency_counts_from_the_end_of_the_think_time(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 0), turn("a", 40, 4))
    outcome, _, _ = run(Options(trace=path, trace_options=SESSION), takes_s(10))
    assert [(r.planned_ns - outcome.start_ns) / S for _, r in outcome.records] == [0, 14]
    assert [r.sent_ns == r.planned_ns for _, r in outcome.records] == [True, True]


def test_a_turn_without_think_time_keeps_its_recorded_time_unless_the_server_is_late(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 0), turn("a", 20), turn("a", 25))
    assert by_position(run(Options(trace=path, trace_options=SESSION), takes_s(10))[1]) == [0, 20, 30]


def test_turns_without_a_time_need_session_pacing(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 1), turn("a", None, 2), turn("b", 4))
    _, sent, _ = run(Options(trace=path, trace_options=SESSION), takes_s(10))
    assert sorted(by_position(sent)) == [0, 3, 12]  # b is at 4 - 1
    with pytest.raises(UsageError, match="line 2: no timestamp: .*--pacing session"):
        plan_of(Options(trace=path))


def test_a_join_waits_for_all_and_thinks_after_the_first(tmp_path: Path) -> None:
    rows = [
        turn("a", 0, request_id="a1"),
        turn("x", 1, request_id="x1", after=["a1"]),
        turn("a", 2, 3, request_id="a2", after=["a1", "x1"]),
        turn("a", 9, 0, request_id="a3"),
    ]
    _, sent, _ = run(Options(trace=traced(tmp_path, *rows), trace_options=SESSION), takes_s(10))
    # x1 after a1: 10; a2: max(10 + 3, 20) = 20; a3 after a2: 30
    assert sorted(by_position(sent)) == [0, 10, 20, 30]


def test_a_turn_that_was_skipped_is_left_out_of_its_session(tmp_path: Path) -> None:
    path = traced(tmp_path, turn("a", 0), turn("a", 5, 1, output_length=0), turn("a", 9, 2))
    _, sent, _ = run(Options(trace=path, trace_options=SESSION), takes_s(10))
    assert by_position(sent) == [0, 12]


def test_a_closed_loop_keeps_its_slots_busy_while_sessions_think(tmp_path: Path) -> None:
    rows = [turn("a", None), turn("a", None, 30), turn("b", None), turn("c", None), turn("d", None)]
    _, sent, transport = run(Options(trace=traced(tmp_path, *rows), concurrency=1, trace_options=SESSION), takes_s(10))
    # one slot: a1 0-10, b 10, c 20, d 30-40; a2 is ripe at 10 + 30 = 40
    assert by_position(sent) == [0, 40, 10, 20, 30]
    assert max(one.in_flight for one in transport.sent) == 1
    assert len(sent) == 5


def test_no_turn_starts_after_the_duration_and_nothing_hangs(tmp_path: Path) -> None:
    rows = [turn("a", 0), turn("a", 5, 30), turn("a", 9, 1), turn("b", 12)]
    path = traced(tmp_path, *rows)
    for concurrency in (None, 2):
        options = Options(trace=path, duration_s=25, concurrency=concurrency, trace_options=SESSION)
        outcome, sent, _ = run(options, takes_s(10))
        assert len(sent) == 2 and len(outcome.records) == 2 and not outcome.interrupted
        assert outcome.trace is not None
        said = settled([outcome.trace], started=2)
        assert (said["read"], said["sent"], said["skipped"]) == (4, 2, {"not_started": 2})


def test_sessions_stay_on_one_worker(tmp_path: Path) -> None:
    rows = [turn(f"s{n % 5}", n, 1) for n in range(40)]
    options = Options(trace=traced(tmp_path, *rows), workers=2, seed=1, trace_options=SESSION)
    parts = [measured(plan_of(options, worker=worker)) for worker in range(2)]
    assert sorted(r.id for part in parts for r in part) == [f"00000001-{1 + n:06d}" for n in range(40)]
    for part in parts:
        ids = {request.id for request in part}
        assert ids and all(set(request.after) <= ids for request in part)


# ---------------------------------------------------------------- traces: conversations


def says(text: str, fail: bool = False) -> Script:
    if fail:
        return Script([(0, b'{"error": {"message": "no"}}')], status=500, headers={"content-type": "application/json"})
    return Script([(5 * MS, event(chunk(finish="stop", content=text))), (0, event(usage(3))), (0, DONE)])


CHAT = [
    {"session_id": "a", "messages": [{"role": "user", "content": "one"}], "output_text": "recorded 1"},
    {"session_id": "a", "messages": [{"role": "user", "content": "two"}], "output_text": "recorded 2"},
    {"session_id": "a", "messages": [{"role": "user", "content": "three"}]},
]


def said_in(body: bytes) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}" for m in orjson.loads(body)["messages"]]


def test_real_answers_are_in_the_context_with_session_pacing(tmp_path: Path) -> None:
    path = traced(tmp_path, *CHAT, header={"context_mode": "delta"})
    options = Options(trace=path, concurrency=4, endpoint="chat", trace_options=SESSION)
    outcome, _, transport = run(options, lambda number, body: says(f"real {number}"))
    assert [said_in(sent.body) for sent in transport.sent] == [
        ["u:one"],
        ["u:one", "a:real 0", "u:two"],
        ["u:one", "a:real 0", "u:two", "a:real 1", "u:three"],
    ]
    assert all(record.text is None for _, record in outcome.records)  # kept for the next turn only
    kept, _, _ = run(options.replace(save_text=True), lambda number, body: says(f"real {number}"))
    assert [record.text for _, record in kept.records] == ["real 0", "real 1", "real 2"]


def test_a_turn_that_failed_is_taken_out_of_the_conversation(tmp_path: Path) -> None:
    path = traced(tmp_path, *CHAT, header={"context_mode": "delta"})
    options = Options(trace=path, concurrency=1, endpoint="chat", trace_options=SESSION)
    _, _, transport = run(options, lambda number, body: says(f"real {number}", fail=number == 1))
    assert said_in(transport.sent[2].body) == ["u:one", "a:real 0", "u:three"]


def test_recorded_answers_are_in_the_context_otherwise(tmp_path: Path) -> None:
    want = [
        ["u:one"],
        ["u:one", "a:recorded 1", "u:two"],
        ["u:one", "a:recorded 1", "u:two", "a:recorded 2", "u:three"],
    ]
    for mode, pacing in (("delta", {}), ("delta_with_responses", {}), ("delta_with_responses", SESSION)):
        path = traced(tmp_path, *CHAT, header={"context_mode": mode})
        options = Options(trace=path, concurrency=4, endpoint="chat", trace_options=pacing)
        _, _, transport = run(options, lambda number, body: says("real"))
        assert sorted((said_in(sent.body) for sent in transport.sent), key=len) == want
        assert plan_of(options).trace_counts is not None
    silent = [{**row, "output_text": None} for row in CHAT]
    with pytest.raises(UsageError, match="line 3: the turn before has no recorded answer"):
        plan_of(
            Options(trace=traced(tmp_path, *silent, header={"context_mode": "delta"}), concurrency=1, endpoint="chat")
        )


def test_lengths_go_on_in_text(tmp_path: Path) -> None:
    rows = [turn("a", None, context_mode="delta", input_length=n) for n in (4, 3)]
    options = Options(trace=traced(tmp_path, *rows), concurrency=1, trace_options=SESSION)
    for info in (PLAIN, VLLM):
        _, _, transport = run(options, lambda number, body: answer([10]), info)
        first, second = (orjson.loads(sent.body)["prompt"] for sent in transport.sent)
        assert len(first.split()) == 4 and second.startswith(first + "\n w0\n") and len(second.split()) == 4 + 1 + 3
    with pytest.raises(UsageError, match="needs --prompt-kind text"):
        plan_of(options.replace(prompt_kind="ids"))


def test_sharegpt_is_replayed_turn_by_turn(tmp_path: Path) -> None:
    talks = [
        {
            "id": str(n),
            "conversations": [{"from": r, "value": f"{r} {n} {k}"} for k in (1, 2) for r in ("human", "gpt")],
        }
        for n in range(3)
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    options = Options(trace=str(path), concurrency=2, endpoint="chat", trace_options=SESSION)
    outcome, _, transport = run(options, lambda number, body: says("real"))
    asked = [said_in(sent.body) for sent in transport.sent]
    assert sorted(asked) == sorted(
        [[f"u:human {n} 1"] for n in range(3)] + [[f"u:human {n} 1", "a:real", f"u:human {n} 2"] for n in range(3)]
    )
    assert max(one.in_flight for one in transport.sent) == 2
    records: list[RequestRecord] = [record for _, record in outcome.records]
    assert {record.asked_output_tokens for record in records} == {2}  # 7 characters / 4

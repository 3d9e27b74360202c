"""The runner on a clock that jumps: loops, caps, durations, warm-up, sessions and the early end, exact to the ns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from loadgen.clock import NS_PER_MS, NS_PER_S
from loadgen.plan import Plan, Planned
from loadgen.record import Failure, FailureKind, Phase, Request, RequestRecord, most_in_flight
from loadgen.runner import Outcome, Runner, Snapshot
from loadgen.transport import Exchange
from tests.fakes import FakeClock, FakeTransport, Script, Sent, answer

MS = NS_PER_MS


def request(index: int, phase: Phase = Phase.MEASURED, due_ms: float | None = None, **more: Any) -> Planned:
    due_ns = None if due_ms is None else round(due_ms * MS)
    return index, Request(f"r{index}", phase, "/v1/completions", b"%d" % index, due_ns, **more)


def plan(measured: Iterable[Planned], *, total: int | None = None, **changes: Any) -> Plan:
    if isinstance(measured, list):
        total = len(measured)
    values: dict[str, Any] = {"before": (), "open_loop": False, "concurrency": None, **changes}
    return Plan(measured=measured, total=total, **values)


class Rig:
    """A runner, its clock and transport; script(number, body) in order of sending, the warm-up included."""

    def __init__(self, plan: Plan, script: Callable[[int, bytes], Script], **more: Any) -> None:
        self.clock = FakeClock()
        self.transport = FakeTransport(self.clock, script)
        self.runner = Runner(plan, self.transport, self.clock, **more)

    def run(self) -> Outcome:
        return asyncio.run(asyncio.wait_for(self.runner.run(), 30))

    @property
    def sent(self) -> list[Sent]:
        return self.transport.sent

    def at_ms(self, outcome: Outcome) -> list[float]:
        """When requests were really sent, in ms after the start."""
        return [(sent.at_ns - outcome.start_ns) / MS for sent in self.sent]

    async def stop_at(self, when_ms: float, origin_ns: int) -> None:
        await self.clock.sleep_until_ns(origin_ns + round(when_ms * MS))
        self.runner.stop()


def takes(*each_ms: float) -> Callable[[int, bytes], Script]:
    """Answers of one token after so many ms, round and round, by the number in the body."""
    return lambda number, body: answer([each_ms[int(body) % len(each_ms)]])


def records(outcome: Outcome) -> list[RequestRecord]:
    return [record for _, record in outcome.records]


# ---------------------------------------------------------------- closed loop


def test_a_slot_asks_again_the_moment_its_answer_is_over() -> None:
    """Two slots, answers of 10 and 35 ms: no wave, a slot never waits for the other one."""
    rig = Rig(plan([request(i) for i in range(8)], concurrency=2), takes(10, 35))
    outcome = rig.run()
    #          r0 0-10                        r2 10-20  r3 20-55
    #          r1 0-35                                  r4 35-45  r5 45-80   r6 55-65  r7 65-100
    assert rig.at_ms(outcome) == [0, 0, 10, 20, 35, 45, 55, 65]
    assert {sent.in_flight for sent in rig.sent[1:]} == {2}
    assert [r.planned_ns for r in records(outcome)] == [r.sent_ns for r in records(outcome)]
    assert outcome.end_ns - outcome.start_ns == 100 * MS
    assert outcome.usage.wall_s == 0.1


def test_all_slots_are_full_until_nothing_is_left() -> None:
    rig = Rig(plan([request(i) for i in range(500)], concurrency=64), takes(7, 11, 13, 17))
    outcome = rig.run()
    assert [sent.in_flight for sent in rig.sent[63:]] == [64] * 437
    assert most_in_flight(records(outcome)) == 64
    assert (outcome.unfinished, outcome.skipped, outcome.interrupted) == (0, 0, False)
    assert [index for index, _ in outcome.records] == list(range(500))


def test_fewer_requests_than_slots() -> None:
    rig = Rig(plan([request(0)], concurrency=8), takes(5))
    assert len(rig.run().records) == 1


def test_a_failure_frees_its_slot_like_an_answer() -> None:
    def script(number: int, body: bytes) -> Script:
        return Script([(20 * MS, Failure(FailureKind.CUT_OFF, "x"))]) if int(body) % 2 else answer([10])

    snapshot = Snapshot()
    rig = Rig(plan([request(i) for i in range(10)], concurrency=1), script, snapshot=snapshot)
    outcome = rig.run()
    assert rig.at_ms(outcome) == [0, 10, 30, 40, 60, 70, 90, 100, 120, 130]
    assert [r.ok for r in records(outcome)] == [True, False] * 5
    assert (snapshot.started, snapshot.finished, snapshot.failed, snapshot.in_flight) == (10, 10, 5, 0)


def test_no_request_starts_after_the_duration_and_those_in_flight_are_awaited() -> None:
    endless = (request(i) for i in iter(int, 1))
    rig = Rig(plan(endless, concurrency=2, duration_ns=100 * MS), takes(40))
    outcome = rig.run()
    assert rig.at_ms(outcome) == [0, 0, 40, 40, 80, 80]
    assert outcome.end_ns - outcome.start_ns == 120 * MS
    assert all(r.ok for r in records(outcome))


def test_a_dead_server_is_not_asked_ten_thousand_times_a_second() -> None:
    refused = Failure(FailureKind.REFUSED, "x")
    endless = (request(i) for i in iter(int, 1))
    rig = Rig(plan(endless, concurrency=1, duration_ns=NS_PER_S), lambda n, body: Script([(0, refused)], status=None))
    assert rig.at_ms(rig.run()) == list(range(0, 1000, 100))


def test_a_long_plan_is_read_just_ahead_of_time() -> None:
    made = 0

    def feed() -> Iterator[Planned]:
        nonlocal made
        for index in range(100):
            made += 1
            yield request(index)

    def script(number: int, body: bytes) -> Script:
        assert made <= number + 4
        return answer([10])

    assert len(Rig(plan(feed(), total=100, concurrency=4), script).run().records) == 100


# ---------------------------------------------------------------- open loop


def test_slow_answers_delay_no_send() -> None:
    """1000 requests 5 ms apart, each answered after ten seconds."""
    rig = Rig(plan([request(i, due_ms=5 * i) for i in range(1000)], open_loop=True), takes(10_000))
    outcome = rig.run()
    assert rig.at_ms(outcome) == [5 * i for i in range(1000)]
    assert all(r.planned_ns == r.sent_ns == outcome.start_ns + 5 * i * MS for i, r in outcome.records)
    assert rig.sent[-1].in_flight == most_in_flight(records(outcome)) == 1000


def test_a_burst_is_a_burst() -> None:
    due = [0, 0, 0, 0.000001, 250, 250]
    rig = Rig(plan([request(i, due_ms=ms) for i, ms in enumerate(due)], open_loop=True), takes(100))
    assert rig.at_ms(rig.run()) == due


def test_behind_a_cap_the_wait_counts_from_the_plan() -> None:
    """One in flight, 300 ms an answer, 100 ms apart: waits of 0, 200, ... 1000 ms, first come, first served."""
    rig = Rig(plan([request(i, due_ms=100 * i) for i in range(6)], open_loop=True, concurrency=1), takes(300))
    outcome = rig.run()
    assert rig.at_ms(outcome) == [0, 300, 600, 900, 1200, 1500]
    rows = records(outcome)
    assert [(r.sent_ns - r.planned_ns) / MS for r in rows if r.sent_ns] == [0, 200, 400, 600, 800, 1000]
    assert [(r.last_token_ns - r.planned_ns) / MS for r in rows if r.last_token_ns] == [300, 500, 700, 900, 1100, 1300]
    assert [sent.id for sent in rig.sent] == [f"r{i}" for i in range(6)]
    assert most_in_flight(rows) == 1


def test_a_cap_that_is_never_reached_changes_nothing() -> None:
    rig = Rig(plan([request(i, due_ms=10 * i) for i in range(20)], open_loop=True, concurrency=5), takes(35))
    assert rig.at_ms(rig.run()) == [10 * i for i in range(20)]


def test_an_open_loop_ends_with_its_duration() -> None:
    feed = (request(i, due_ms=30 * i) for i in range(1000))
    rig = Rig(plan(feed, open_loop=True, duration_ns=100 * MS), takes(200))
    outcome = rig.run()
    assert rig.at_ms(outcome) == [0, 30, 60, 90]
    assert outcome.end_ns - outcome.start_ns == 290 * MS


# ---------------------------------------------------------------- cold, warm-up, start


def before(warmup: int) -> tuple[Planned, ...]:
    return tuple(request(i, Phase.WARMUP if i else Phase.COLD) for i in range(warmup))


def test_the_cold_request_goes_alone_then_the_warm_up_then_the_start() -> None:
    snapshot = Snapshot()
    measured = [request(i) for i in range(5, 8)]
    load = plan(measured, before=before(5), concurrency=2, warmup_concurrency=2, connections=2)
    rig = Rig(load, takes(10), snapshot=snapshot)
    outcome = rig.run()
    assert rig.at_ms(outcome) == [-30, -20, -20, -10, -10, 0, 0, 10]
    phases = [record.phase for record in records(outcome)]
    assert phases == [Phase.COLD] + [Phase.WARMUP] * 4 + [Phase.MEASURED] * 3
    assert (snapshot.started, snapshot.finished, snapshot.total) == (3, 3, 3)  # the measured ones alone
    assert rig.transport.opened == 2 and outcome.usage.wall_s == 0.02


def test_a_common_start_is_awaited_after_the_warm_up() -> None:
    asked: list[int] = []

    async def start_at() -> int:
        asked.append(rig.clock.now_ns())
        return rig.clock.now_ns() + 123 * MS

    for open_loop in (True, False):
        due = [request(i, due_ms=i) for i in range(1, 4)] if open_loop else [request(i) for i in range(1, 4)]
        load = plan(due, before=before(1), open_loop=open_loop, concurrency=None if open_loop else 1)
        rig = Rig(load, takes(10), start_at=start_at)
        outcome = rig.run()
        assert outcome.start_ns == asked[-1] + 123 * MS
        assert rig.at_ms(outcome) == ([-133, 1, 2, 3] if open_loop else [-133, 0, 10, 20])


def test_a_warm_up_that_fails_does_not_keep_the_load_from_starting() -> None:
    def script(number: int, body: bytes) -> Script:
        return answer([10]) if number >= 3 else Script([(0, Failure(FailureKind.REFUSED, "x"))], status=None)

    rig = Rig(plan([request(i) for i in range(3, 6)], before=before(3), concurrency=1), script)
    assert [record.ok for record in records(rig.run())] == [False] * 3 + [True] * 3


# ---------------------------------------------------------------- the early end


def stopped(rig: Rig, when_ms: float) -> Outcome:
    async def main() -> Outcome:
        load = asyncio.ensure_future(rig.runner.run())
        stopper = asyncio.ensure_future(rig.stop_at(when_ms, rig.clock.now_ns()))
        outcome = await asyncio.wait_for(load, 30)
        stopper.cancel()
        left = asyncio.all_tasks() - {asyncio.current_task(), stopper}
        assert not left, "a stopped run leaves no task behind"
        return outcome

    return asyncio.run(main())


def test_stop_in_a_closed_loop_keeps_what_is_complete() -> None:
    rig = Rig(plan([request(i) for i in range(100)], concurrency=3), takes(10))
    outcome = stopped(rig, 45)
    assert outcome.interrupted
    assert (len(outcome.records), outcome.unfinished, outcome.skipped) == (12, 3, 85)
    assert outcome.end_ns - outcome.start_ns == 45 * MS
    assert all(r.ok for r in records(outcome))


def test_stop_in_an_open_loop_does_not_call_started_what_was_only_held() -> None:
    """Tasks are made 50 ms ahead: at 10,047 ms those of 10,050 to 10,095 ms wait for their time."""
    rig = Rig(plan([request(i, due_ms=5 * i) for i in range(4000)], open_loop=True), takes(20))
    origin_ns = rig.clock.now_ns()
    outcome = stopped(rig, 10_047)
    lead_ms = (outcome.start_ns - origin_ns) // MS
    sent = (10_047 - lead_ms) // 5 + 1
    assert len(rig.sent) == sent
    assert len(outcome.records) + outcome.unfinished == sent
    assert outcome.unfinished == 4 and outcome.skipped == 4000 - sent


def test_stop_behind_a_cap() -> None:
    rig = Rig(plan([request(i, due_ms=10 * i) for i in range(10)], open_loop=True, concurrency=1), takes(100))
    outcome = stopped(rig, 50 + 250)
    assert (len(outcome.records), outcome.unfinished, outcome.skipped) == (2, 1, 7)


def test_stop_in_the_warm_up_measures_nothing() -> None:
    rig = Rig(plan([request(i) for i in range(5, 9)], before=before(5), concurrency=1), takes(10))
    outcome = stopped(rig, 15)
    assert [record.phase for record in records(outcome)] == [Phase.COLD]
    assert (outcome.interrupted, outcome.unfinished, outcome.skipped) == (True, 0, 4)


def test_stop_while_the_start_is_awaited() -> None:
    started: list[asyncio.Future[int]] = []

    async def start_at() -> int:
        started.append(asyncio.get_running_loop().create_future())
        return await started[0]

    async def main() -> Outcome:
        load = asyncio.ensure_future(rig.runner.run())
        while not started:
            await asyncio.sleep(0)
        rig.runner.stop()
        started[0].set_result(0)
        return await asyncio.wait_for(load, 30)

    rig = Rig(plan([request(1)], concurrency=1), takes(10), start_at=start_at)
    outcome = asyncio.run(main())
    assert (outcome.interrupted, len(rig.sent), outcome.skipped) == (True, 0, 1)


@pytest.mark.parametrize("open_loop", [False, True])
def test_a_bug_in_a_requests_task_ends_the_run_loudly(open_loop: bool) -> None:
    def script(number: int, body: bytes) -> Script:
        if number == 3:
            raise ValueError("cannot be sent at all")
        return answer([10])

    due = [request(i, due_ms=1000 * i if open_loop else None) for i in range(100)]
    rig = Rig(plan(due, open_loop=open_loop, concurrency=None if open_loop else 1), script)
    with pytest.raises(ValueError, match="cannot be sent at all"):
        rig.run()
    assert len(rig.sent) == 3


# ---------------------------------------------------------------- sessions


@pytest.mark.parametrize("open_loop", [False, True])
def test_a_turn_starts_its_think_time_after_the_first_and_not_before_the_others(open_loop: bool) -> None:
    def body(earlier: Any) -> bytes:
        return b"1" if [record.text for record in earlier.values()] == [" w0 w1", " w0 w1"] else b"0"

    due = {"due_ms": 0} if open_loop else {}
    measured = [
        request(0, session_open=True, **due),
        request(1, session_open=True, **due),
        request(2, after=("r0", "r1"), delay_ns=500 * MS, make_body=body),
        request(3, **due),
    ]
    load = plan(measured, open_loop=open_loop, concurrency=None if open_loop else 4)
    rig = Rig(load, lambda number, body: answer([100, 50 * (number + 1)]))
    outcome = rig.run()
    # r0 ends at 150, and 500 of thinking; r1 is over at 200
    by_id = {record.id: record for record in records(outcome)}
    sent_ms = {sent.id: (sent.at_ns - outcome.start_ns) / MS for sent in rig.sent}
    assert sent_ms == {"r0": 0, "r1": 0, "r3": 0, "r2": 650}
    assert next(sent.body for sent in rig.sent if sent.id == "r2") == b"1"
    assert by_id["r2"].ok and by_id["r2"].planned_ns - outcome.start_ns == 650 * MS


# ---------------------------------------------------------------- what it says of itself


def test_the_exchange_is_read_off_the_timed_path_and_the_snapshot_follows() -> None:
    snapshot = Snapshot()
    rig = Rig(plan([request(i) for i in range(50)], concurrency=5), lambda n, b: answer([10, 5, 5]), snapshot=snapshot)
    outcome = rig.run()
    assert snapshot.events == 150 and snapshot.ttft_ns == 10 * MS
    assert outcome.usage.transport == "fake" and outcome.usage.kernel_stamps
    assert outcome.usage.reads == 250  # three tokens, usage and [DONE]


def test_most_in_flight_of_records() -> None:
    async def spans(*each: tuple[int, int]) -> int:
        clock = FakeClock(0)
        transport = FakeTransport(clock, lambda number, body: answer([each[number][1] - each[number][0]]))
        load = plan([request(i, due_ms=span[0]) for i, span in enumerate(each)], open_loop=True)
        return most_in_flight(records(await Runner(load, transport, clock).run()))

    assert asyncio.run(spans((0, 10), (10, 20))) == 1  # one ends as the other begins
    assert asyncio.run(spans((0, 10), (9, 20), (11, 12))) == 2
    assert most_in_flight([]) == 0


def test_an_exchange_without_an_end_counts_nowhere() -> None:
    class Broken(FakeTransport):
        async def exchange(self, *arguments: Any, **named: Any) -> Exchange:
            return Exchange(failure=Failure(FailureKind.REFUSED, "x"))

    clock = FakeClock()
    outcome = asyncio.run(Runner(plan([request(0)], concurrency=1), Broken(clock, takes(1)), clock).run())
    (record,) = records(outcome)
    assert record.sent_ns is None and not record.ok and most_in_flight([record]) == 0

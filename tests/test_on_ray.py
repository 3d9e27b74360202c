"""Loads on a Ray cluster: clocks brought together, the same work as without Ray, Ctrl-C, errors in one line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import orjson
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Asked, ScriptedServer, good

from loadgen.on_ray import Actor, Alignment, Mailbox, Offset, measure_offset
from loadgen.options import Options, Span, UnusableServer, UsageError
from loadgen.plan import make_plan
from loadgen.record import ClientUsage, Phase, RequestRecord
from loadgen.runner import Outcome, Snapshot
from loadgen.target import ServerInfo
from loadgen.workers import run_async, run_load, with_transport

# ---------------------------------------------------------------- clocks, simulated


class TwoClocks:
    """This host's clock, and another that is `skew_ns` ahead and gains `drift` ns per ns. Travelling takes time."""

    def __init__(self, skew_ns: int, drift: float = 0.0, trips: Iterator[tuple[int, int]] | None = None) -> None:
        self.here_ns = 5_000_000_000_000
        self.origin_ns = self.here_ns
        self.skew_ns, self.drift = skew_ns, drift
        self.trips = trips or iter(lambda: (100_000, 100_000), None)

    def now(self) -> int:
        return self.here_ns

    def true_offset_ns(self) -> int:
        return self.skew_ns + round((self.here_ns - self.origin_ns) * self.drift)

    def read_other(self) -> int:
        out_ns, back_ns = next(self.trips)
        self.here_ns += out_ns
        reading = self.here_ns + self.true_offset_ns()
        self.here_ns += back_ns
        return reading


def test_offset_of_an_even_trip_is_exact() -> None:
    clocks = TwoClocks(-7_000_000_000)
    offset = measure_offset(clocks.read_other, 5, clocks.now)
    assert offset.offset_ns == -7_000_000_000
    assert offset.residual_ns == 100_000  # half of 200 us there and back


def test_the_quickest_trip_counts() -> None:
    clocks = TwoClocks(10**15, trips=iter([(900_000, 100_000), (30_000, 10_000), (5_000_000, 0)]))
    offset = measure_offset(clocks.read_other, 3, clocks.now)
    # taken 30 us after the call, the middle is at 20 us: the estimate is 10 us too high
    assert offset.offset_ns == 10**15 + 10_000
    assert offset.residual_ns == 20_000


@given(
    st.integers(-(10**18), 10**18),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=20),
)
def test_the_residual_is_a_bound(skew_ns: int, trips: list[tuple[int, int]]) -> None:
    clocks = TwoClocks(skew_ns, trips=iter(trips))
    offset = measure_offset(clocks.read_other, len(trips), clocks.now)
    assert abs(offset.offset_ns - skew_ns) <= offset.residual_ns


def record(planned_ns: int) -> RequestRecord:
    """A request as some clock saw it: sent 1 us late, tokens 50 and 60 ms after the plan."""
    first, last = planned_ns + 50_000_000, planned_ns + 60_000_000
    return RequestRecord(
        id="a",
        phase=Phase.MEASURED,
        planned_ns=planned_ns,
        sent_ns=planned_ns + 1000,
        first_byte_ns=first - 5,
        first_token_ns=first,
        first_answer_ns=None,
        last_token_ns=last,
        end_ns=last + 7,
        event_stamps_ns=array("q", [first, last]),
        shared_stamps=0,
        prompt_tokens=1,
        output_tokens=2,
        tokens_from="server",
        finish_reason="length",
        status=200,
        failure=None,
        text=None,
        kernel_stamps=True,
        reopened=False,
        asked_input_tokens=1,
        asked_output_tokens=2,
        first_event_ns=first - 3,
    )


def outcome(*planned_ns: int) -> Outcome:
    usage = ClientUsage(1.0, 1.0, (), "wire", True)
    records = tuple(enumerate(map(record, planned_ns)))
    return Outcome(records, planned_ns[0], planned_ns[-1], usage, False, 0, 0)


def test_drift_is_taken_out_and_durations_stay_exact() -> None:
    """100 ppm over 100 s are 10 ms: with one measurement the last record would be 10 ms off."""
    clocks = TwoClocks(123_456_789_000, drift=1e-4)
    before = measure_offset(clocks.read_other, 3, clocks.now)
    planned_here = [clocks.here_ns + second * 1_000_000_000 for second in (0, 50, 100)]
    planned_there = []
    for planned in planned_here:
        clocks.here_ns = planned
        planned_there.append(planned + clocks.true_offset_ns())
    after = measure_offset(clocks.read_other, 3, clocks.now)
    alignment = Alignment(before, after)
    moved = alignment.to_here(outcome(*planned_there))
    for (_, result), planned in zip(moved.records, planned_here, strict=True):
        assert abs(result.planned_ns - planned) <= alignment.residual_ns
        assert result.planned_ns == pytest.approx(planned, abs=100)  # even trips: exact but for rounding
        assert result == record(result.planned_ns)  # moved as a whole
    assert moved.start_ns == moved.records[0][1].planned_ns
    assert moved.end_ns == moved.records[-1][1].planned_ns


def test_outside_of_the_two_measurements_the_offset_is_level() -> None:
    alignment = Alignment(Offset(1000, 10_000, 1), Offset(2000, 10_100, 3))
    assert alignment.offset_ns(0) == alignment.offset_ns(11_000) == 10_000
    assert alignment.offset_ns(11_550) == 10_050  # the middle, on the other clock
    assert alignment.offset_ns(12_100) == alignment.offset_ns(99_999) == 10_100
    assert alignment.residual_ns == 3
    assert Alignment(Offset(5, 7, 1), Offset(5, 7, 1)).offset_ns(12) == 7


def test_the_mailbox_keeps_what_comes_before_anybody_listens() -> None:
    box = Mailbox()
    heard: list[tuple[str, object]] = []

    async def listen() -> None:
        box.put("start", 1)
        box.listen(lambda kind, value: heard.append((kind, value)))
        await asyncio.to_thread(box.put, "stop", None)
        while len(heard) < 2:
            await asyncio.sleep(0)
        box.close()

    asyncio.run(listen())
    box.put("stop", None)  # after the load is over: dropped
    assert heard == [("start", 1), ("stop", None)]


# ---------------------------------------------------------------- an actor without Ray


def messages_of(actor: Actor) -> Iterator[tuple[str, Any]]:
    while True:
        yield from actor.poll(10.0)


def test_an_actor_runs_its_share_with_files_that_only_the_driver_has() -> None:
    files = {"prompts": b"one fine day\n"}
    info = ServerInfo("m")
    with ScriptedServer(lambda number, asked: good(asked, ttft_ms=1, tokens=2, gap_ms=1)) as server:
        wanted = Options(
            url=server.url, concurrency=4, requests=5, workers=2, warmup=1, seed=1, prompts="/only/there/prompts.txt"
        )
        actor = Actor()
        thread = threading.Thread(target=actor.run, args=(wanted, info, 1, None, files))
        thread.start()
        messages = messages_of(actor)
        assert next(kind for kind, _ in messages if kind != "progress") == "ready"
        actor.tell("start", time.monotonic_ns())
        kind, result = next(message for message in messages if message[0] != "progress")
        thread.join()
        assert {post.body["prompt"] for post in server.posts()} == {"one fine day"}
    assert kind == "done"
    assert [index for index, _ in result.records] == [2, 4]  # every second one of those behind the warm-up


def test_an_error_of_an_actor_is_a_message() -> None:
    actor = Actor()
    actor.run(Options(concurrency=1, prompts="/not/there", seed=1), ServerInfo("m"), 3, None, {})
    [(kind, text)] = actor.poll(1.0)
    assert kind == "error"
    assert text.startswith("worker 3 on ") and "/not/there" in text


# ---------------------------------------------------------------- errors in one line


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"^--ray needs Ray: pip install 'loadgen\[ray\]'$"):
        run_load(Options(concurrency=1, ray="local"))


# ---------------------------------------------------------------- a real cluster of this machine


def reply(number: int, asked: Asked) -> list[tuple[float, bytes | str]]:
    return good(asked, ttft_ms=20, tokens=4, gap_ms=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray of two CPUs; every process of it is gone afterwards."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import loadgen

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"py_modules": [os.path.dirname(loadgen.__file__)]},
    )
    yield
    ray.shutdown()
    assert not ray.is_initialized()


def options(url: str, **changes: object) -> Options:
    fixed = Options(url=url, ray="local", workers=2, seed=5, output_tokens=Span(4, 4), warmup=2, scrape=False)
    return fixed.replace(**changes)


def test_no_cluster_at_the_address() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    assert not ray.is_initialized(), "this must come before the tests that start a cluster"
    with pytest.raises(UsageError, match=r"^--ray 127\.0\.0\.1:1: no Ray cluster answers there"):
        run_load(Options(concurrency=1, ray="127.0.0.1:1"))
    with pytest.raises(UsageError, match=r"^--ray must be local, auto or HOST:PORT, not 'nonsense'"):
        run_load(Options(concurrency=1, ray="nonsense"))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("cluster")
class TestOnACluster:
    def test_same_bodies_same_arrivals_as_in_one_process(self) -> None:
        with ScriptedServer(reply) as server:
            wanted = options(server.url, rate=40.0, arrival="poisson", requests=30)
            run = run_load(wanted)
            posts = {post.headers["x-request-id"]: post for post in server.posts()}
            info = ServerInfo(str(run.options["model"]), owned_by="test")
            alone = wanted.replace(ray=None, workers=1)
            plan = run_async(with_transport(alone, lambda transport: make_plan(alone, info, transport)))
        assert [r.failure for r in run.records] == [None] * 32
        assert [r.phase for r in run.records] == [Phase.COLD, Phase.WARMUP, *[Phase.MEASURED] * 30]
        residual_ns = run.plan["clock_residual_ms"] * 1e6
        assert 0 < residual_ns < 1e9
        for result, (_, request) in zip(run.measured, plan.measured, strict=True):
            assert result.id == request.id
            assert posts[result.id].body == orjson.loads(request.body)
            assert result.planned_ns - run.start_ns == pytest.approx(request.planned_ns, abs=4 * residual_ns)
            # On one machine the truth is known: no request can have arrived before it was sent, nor can a token
            # have been seen before the server sent it, by more than the clocks may disagree.
            truth = posts[result.id]
            assert truth.t_ns >= result.sent_ns - residual_ns
            assert result.first_token_ns >= truth.sent_ns[1] - residual_ns
        assert run.usage.num_workers == 2
        assert not run.interrupted and run.skipped == 0
        assert any("2 Ray workers on 1 host" in note for note in run.usage.notes)

    def test_ctrl_c_keeps_what_is_complete(self) -> None:
        class PressesCtrlC:
            pressed = False

            def update(self, snapshot: Snapshot) -> None:
                if snapshot.finished >= 4 and not self.pressed:
                    self.pressed = True
                    signal.raise_signal(signal.SIGINT)

            def close(self) -> None: ...

        with ScriptedServer(reply) as server:
            run = run_load(options(server.url, concurrency=2, requests=100_000, warmup=1), progress=PressesCtrlC())
        assert run.interrupted
        assert 4 <= len(run.measured) < 100_000
        assert all(r.ok for r in run.measured)
        assert run.skipped > 0

    def test_ctrl_c_while_one_worker_waits_for_the_other(self) -> None:
        """Worker 0 warms up against a server that never answers, worker 1 waits for the common start."""

        class PressesCtrlC:
            updates = 0

            def update(self, snapshot: Snapshot) -> None:
                self.updates += 1
                if self.updates == 10:
                    signal.raise_signal(signal.SIGINT)

            def close(self) -> None: ...

        with ScriptedServer(lambda number, asked: good(asked, ttft_ms=600_000)) as server:
            run = run_load(options(server.url, concurrency=2, requests=10), progress=PressesCtrlC())
        assert run.interrupted
        assert run.measured == ()

    def test_more_workers_than_cpus(self) -> None:
        with pytest.raises(UsageError, match=r"^--workers 3 needs as many CPUs, .* has 2: use --workers 2"):
            run_load(Options(ray="local", workers=3, concurrency=3))

    def test_the_key_reaches_the_workers_and_no_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
        with ScriptedServer(reply) as server:
            run = run_load(options(server.url, concurrency=2, requests=4))
            posts = server.posts()
        assert {post.headers["authorization"] for post in posts} == {"Bearer sk-of-the-test"}
        assert "sk-of-the-test" not in repr(run)

    def test_a_worker_that_dies_ends_the_load_in_one_line(self) -> None:
        class KillsOne:
            killed = False

            def update(self, snapshot: Snapshot) -> None:
                if snapshot.finished >= 2 and not self.killed:
                    self.killed = True
                    children = psutil.Process().children(recursive=True)
                    next(p for p in children if p.name().startswith("ray::Actor")).kill()

            def close(self) -> None: ...

        with ScriptedServer(reply) as server:
            with pytest.raises(UnusableServer, match=r"^Ray worker [01] on .* died: [^\n]+$"):
                run_load(options(server.url, concurrency=2, requests=100_000), progress=KillsOne())

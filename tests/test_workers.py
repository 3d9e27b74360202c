"""Several client processes: one plan, one start, one merged Run; Ctrl-C keeps what is complete."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from loadgen.metrics import summarize
from loadgen.options import Options, Span, UsageError
from loadgen.record import Failure, FailureKind, Phase, Run
from loadgen.runner import Outcome, Snapshot
from loadgen.target import ServerInfo
from loadgen.workers import _sum, merge, run_load
from tests.runs import START_NS, failed, make_run
from tests.scripted_server import Asked, ScriptedServer, good
from tests.test_faults_client import started, strict, wait_for

Steps = Sequence[tuple[float, bytes | str]]


def quick(number: int, a: Asked) -> Steps:
    return good(a, 2, 3, 1)


def load(server: ScriptedServer, **options: Any) -> Run:
    defaults: dict[str, Any] = {"warmup": 3, "scrape": False, "seed": 7, "input_tokens": Span(8, 8)}
    return run_load(Options(url=server.url, **{**defaults, **options}))


def test_merged_arrivals_and_bodies_are_those_of_one_process() -> None:
    runs: list[Run] = []
    bodies = []
    with ScriptedServer(quick) as server:
        for workers in (1, 2):
            before = len(server.posts())
            runs.append(load(server, rate=100, requests=41, workers=workers, output_tokens=Span(4, 60)))
            bodies.append({post.headers["x-request-id"]: post.body for post in server.posts()[before:]})
    alone, merged = runs
    offsets = [[record.planned_ns - run.start_ns for record in run.measured] for run in runs]
    assert offsets[0] == offsets[1] and len(offsets[0]) == 41
    assert [r.id for r in alone.records] == [r.id for r in merged.records]  # in order of plan
    assert [r.phase for r in merged.records[:4]] == [Phase.COLD, Phase.WARMUP, Phase.WARMUP, Phase.MEASURED]
    assert bodies[0] == bodies[1] and len(bodies[0]) == 44
    assert all(record.ok for record in merged.records)
    assert merged.usage.num_workers == 2 and merged.usage.transport == "wire" and merged.usage.loop_lag_ns
    assert summarize(merged)["counts"]["ok"] == 41


@pytest.mark.parametrize("concurrency", [2, 3])
def test_the_slots_of_a_closed_loop_are_shared_out(concurrency: int) -> None:
    with ScriptedServer(lambda number, a: good(a, 60, 2, 1)) as server:
        run = load(server, concurrency=concurrency, requests=12, warmup=0, workers=2)
        posts = server.posts()
    assert len(run.measured) == len(posts) == 12 and all(record.ok for record in run.records)
    assert max(post.active for post in posts) == concurrency == run.usage.max_in_flight


def test_a_duration_ends_all_of_them() -> None:
    with ScriptedServer(quick) as server:
        run = load(server, rate=50, arrival="constant", duration_s=0.5, requests=None, workers=2)
    assert len(run.measured) == 25


def test_an_interrupt_keeps_what_is_complete_of_all_processes(tmp_path: Path) -> None:
    with ScriptedServer(lambda number, a: good(a, 150, 2, 10)) as server:
        out = tmp_path / "run"
        flags = ("--rate", "20", "--arrival", "constant", "--requests", "400", "--workers", "2")
        process = started(server, "auto", out, *flags)
        wait_for(lambda: sum(post.end == "end" for post in server.posts()) >= 10)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to all of them
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 20
        arrived = len(server.posts())
        ended = sum(post.end == "end" for post in server.posts())
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    document = strict(out / "run.json")
    counts = document["counts"]
    assert document["interrupted"] is True
    assert 10 <= counts["ok"] <= ended and ended - counts["ok"] <= 8
    assert counts["failed"] == 0 and counts["started"] == counts["ok"] + counts["unfinished"]
    assert abs(counts["started"] - arrived) <= 2 and counts["started"] + counts["skipped"] == 400
    lines = [orjson.loads(line) for line in (out / "requests.jsonl").read_bytes().splitlines()]
    assert [line["id"] for line in lines] == sorted(line["id"] for line in lines) and len(lines) == counts["ok"]


def test_a_client_process_that_dies_ends_the_run_in_one_line(tmp_path: Path) -> None:
    with ScriptedServer(lambda number, a: good(a, 3000, 2, 10)) as server:
        process = started(server, "auto", tmp_path / "run", "--concurrency", "4", "--requests", "40", "--workers", "2")
        wait_for(lambda: len(server.posts()) >= 4)
        workers = [c for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline())]
        workers[0].kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "client process" in errors and "died" in errors and "Traceback" not in errors


def test_a_plan_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with ScriptedServer(quick) as server:
        with pytest.raises(UsageError, match="empty.txt"):
            load(server, concurrency=2, requests=4, workers=2, prompts=str(tmp_path / "empty.txt"))
        assert server.posts() == []


# ---------------------------------------------------------------- what merging leaves out


@pytest.mark.parametrize(
    ("detail", "written"),
    [
        ("401: bad key sk-abcdef-123456", "401: bad key ***"),
        ("no Bearer sk-abcdef-123456, no Token-0123456789", "no Bearer ***, no ***"),
        ("cut in the middle: sk-abcdef-12…", "cut in the middle: ***…"),
        ("true is no secret", "true is no secret"),
    ],
)
def test_what_a_server_repeats_of_a_secret_is_masked(
    detail: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-abcdef-123456")
    record = failed(0, 0, 5, FailureKind.STATUS, detail, status=401)
    usage = make_run([record]).usage
    outcome = Outcome(((0, record),), START_NS, START_NS + 1, usage, interrupted=False, unfinished=0, skipped=0)
    options = Options(headers={"X-Token": "Token-0123456789", "X-Flag": "true"})
    run = merge(options, ServerInfo("m"), {}, [outcome], [])
    assert run.records[0].failure == Failure(FailureKind.STATUS, written, 401)
    assert run.options["headers"] == {"X-Token": "***", "X-Flag": "***"}


def test_more_workers_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="--workers must be at most --concurrency \\(1\\), not 2"):
        run_load(Options(concurrency=1, workers=2))


def test_every_snapshot_adds_up() -> None:
    total = _sum([Snapshot(10, 5, 3, 1, 30, 7), Snapshot(None, 2, 2, 0, 8, None)])
    assert (total.total, total.started, total.finished, total.failed, total.events) == (None, 7, 5, 1, 38)
    assert total.ttft_ns == 7 and total.in_flight == 2

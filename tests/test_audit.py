"""The verdict: a client that was late is INVALID for the right reason, a slow server never is."""

import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from loadgen.audit import audit
from loadgen.options import Options
from loadgen.record import ClientUsage, Failure, FailureKind, Phase, RequestRecord, Run
from loadgen.run import exit_status
from loadgen.runner import Snapshot
from loadgen.workers import run_load
from tests.scripted_server import Asked, ScriptedServer, good

MS = 1_000_000


def record(
    index: int, *, late_ms: float = 0, stamps_ms: Sequence[float] = (50, 70, 90), shared: int = 0
) -> RequestRecord:
    planned = index * 10 * MS
    stamps = array("q", [planned + round(ms * MS) for ms in stamps_ms])
    return RequestRecord(
        id=f"r{index}", phase=Phase.MEASURED, planned_ns=planned, sent_ns=planned + round(late_ms * MS),
        first_byte_ns=stamps[0], first_token_ns=stamps[0], first_answer_ns=stamps[0], last_token_ns=stamps[-1],
        end_ns=stamps[-1], event_stamps_ns=stamps, shared_stamps=shared, prompt_tokens=4, output_tokens=len(stamps),
        tokens_from="server", finish_reason="length", status=200, failure=None, text=None, kernel_stamps=True,
        reopened=False, asked_input_tokens=4, asked_output_tokens=3,
    )  # fmt: skip


def run(
    records: Sequence[RequestRecord] = (),
    *,
    lag_ms: Sequence[float] = (0.5,) * 100,
    cpu_s: float = 2.0,
    options: dict[str, object] | None = None,
    kernel: bool = True,
    unread: int = 0,
    workers: int = 1,
) -> Run:
    usage = ClientUsage(
        cpu_s=cpu_s, wall_s=10.0, loop_lag_ns=tuple(round(ms * MS) for ms in lag_ms), transport="wire",
        kernel_stamps=kernel, unread_bytes=unread, num_workers=workers, cores=4,
    )  # fmt: skip
    chosen = {"rate": 100.0, "concurrency": None, "trace": None} if options is None else options
    return Run(
        options=chosen, records=tuple(records) or (record(0),), start_ns=0, start_utc="", end_ns=10**10, usage=usage
    )


def test_a_fast_client_on_a_slow_server_is_valid() -> None:
    slow = [record(i, stamps_ms=(9_000, 12_000, 20_000)) for i in range(50)]
    verdict = audit(run(slow))
    assert verdict.valid and not verdict.warnings


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (run([record(i, late_ms=30 if i % 20 == 0 else 0) for i in range(100)]), "30.0 ms or more late"),
        (run(lag_ms=[0.5] * 99 + [200]), "stood still for 200 ms"),
        (run(lag_ms=[0.5] * 90 + [60] * 10), "60.0 ms late"),
        (run(cpu_s=9.9), "99% of a core"),
        # 20 ms between events, the loop 15 ms late: events of one stream met in one read
        (run([record(0, shared=1)], lag_ms=[15.0] * 100), "share a read"),
    ],
)
def test_a_late_client_is_invalid_for_the_right_reason(bad: Run, words: str) -> None:
    verdict = audit(bad)
    assert not verdict.valid
    assert any(words in reason.what for reason in verdict.reasons), verdict.reasons
    assert all(reason.remedy for reason in verdict.reasons)


def test_a_punctual_client_blames_the_server_for_tokens_sent_together() -> None:
    verdict = audit(run([record(0, stamps_ms=(50, 50, 90), shared=1)]))
    assert verdict.valid and "several tokens at a time" in verdict.warnings[0].what


def test_waiting_behind_a_cap_is_not_lateness() -> None:
    held = [record(i, late_ms=800) for i in range(50)]
    assert audit(run(held, options={"rate": 10.0, "concurrency": 1, "trace": None})).valid
    assert not audit(run(held)).valid


def test_cpu_is_counted_per_worker() -> None:
    assert audit(run(cpu_s=15.0, workers=2)).valid and not audit(run(cpu_s=19.9, workers=2)).valid


def test_doubts_that_do_not_spoil_a_run_are_warnings() -> None:
    verdict = audit(run(kernel=False, unread=17, cpu_s=8.5))
    assert verdict.valid and len(verdict.warnings) == 3
    assert verdict.as_dict()["valid"] is True


def test_the_exit_status() -> None:
    good = record(0)
    failure = Failure(FailureKind.STATUS, "500: x", 500)
    bad = replace(good, failure=failure)
    unreached = replace(good, failure=Failure(FailureKind.REFUSED, "x"))
    valid, invalid = audit(run()), audit(run(cpu_s=9.9))
    for records, verdict, interrupted, status in [
        ([good, good], valid, False, 0),
        ([good, bad], valid, False, 1),
        ([bad, bad], valid, False, 1),
        ([unreached, unreached], valid, False, 2),
        ([unreached, bad], valid, False, 1),
        ([good, bad], invalid, False, 3),
        ([good, bad], invalid, True, 130),
    ]:
        assert exit_status(replace(run(records), interrupted=interrupted), verdict, 0) == status
    assert exit_status(run([good, bad, bad]), valid, max_failures=2) == 0
    assert exit_status(run([bad, bad, bad]), valid, max_failures=2) == 1


# ---------------------------------------------------------------- real runs


class Stalls:
    """A progress line that takes 200 ms once, in the midst of the load: the client's event loop stands still."""

    def __init__(self) -> None:
        self.stalled = False

    def update(self, snapshot: Snapshot) -> None:
        if snapshot.finished >= 2 and not self.stalled:
            self.stalled = True
            time.sleep(0.2)

    def close(self) -> None:
        assert self.stalled


def slow(number: int, a: Asked) -> Sequence[tuple[float, bytes | str]]:
    return good(a, 300, 4, 120)


@pytest.mark.parametrize("load", [{"concurrency": 4}, {"rate": 40.0, "arrival": "constant"}])
def test_a_stall_of_the_client_in_mid_run_is_found(load: dict[str, Any]) -> None:
    with ScriptedServer(lambda number, a: good(a, 20, 4, 20)) as server:
        options = Options(url=server.url, requests=60, warmup=0, scrape=False, seed=1, transport="wire", **load)
        real = run_load(options, progress=Stalls())
    verdict = audit(real)
    assert not verdict.valid and all(record.ok for record in real.records)
    stood = re.search(r"the client stood still for (\d+) ms", " ".join(reason.what for reason in verdict.reasons))
    assert stood is not None and int(stood[1]) >= 170  # up to 20 ms of it are the sampler's own
    assert exit_status(real, verdict, 0) == 3


def test_a_fast_client_on_a_slow_server_is_valid_in_a_real_run() -> None:
    """An idle moment of the machine is needed once in eight tries; the server is slow in all of them."""
    with ScriptedServer(slow) as server:
        for _ in range(8):
            options = Options(url=server.url, requests=6, concurrency=3, warmup=0, scrape=False, seed=1)
            real = run_load(options)
            verdict = audit(real)
            assert all(record.ok and record.last_token_ns for record in real.records)
            if verdict.valid:
                break
        assert verdict.valid, verdict.reasons
        assert exit_status(real, verdict, 0) == 0

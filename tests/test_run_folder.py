"""The run folder: what is read is what was written; whole or not at all; no key and no header value in any byte."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from loadgen import run_folder
from loadgen.metrics import summarize
from loadgen.options import UsageError
from loadgen.record import Failure, FailureKind, Phase, Run
from tests.runs import START_NS, failed, make_run, record

SCRAPES = ({"t_ns": START_NS - 5, "a_total": 1.0}, {"t_ns": START_NS + 5, "a_total": 2.0, "gpu0:power_w": 99.5})


def a_run(**changes: Any) -> Run:
    return make_run(
        [
            record(0, -900, [-500, -490], phase=Phase.COLD, output_tokens=2),
            record(1, -300, [-250], phase=Phase.WARMUP, output_tokens=1),
            record(2, 0, [100, 120.5, 140], output_tokens=3, cached_tokens=2, tags={"session": "s"}),
            record(3, 5, [], output_tokens=0, end_ms=30, finish_reason="stop"),
            record(4, 6, [50, 60], text="two 中 words", tool_calls='[{"name": "f"}]', reasoning_tokens=1),
            failed(5, 10, 11, FailureKind.REFUSED, "connection refused", sent_ns=None, first_byte_ns=None),
            record(6, 20, [30], failure=Failure(FailureKind.STATUS, "busy", 503, "1"), status=503),
        ],
        **{"scrapes": SCRAPES, "skipped": 2, "unfinished": 1, **changes},
    )


def strict(path: Path) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return json.loads(path.read_text(), parse_constant=refuse)


def test_round_trip(tmp_path: Path) -> None:
    run = a_run()
    document = run_folder.save(tmp_path / "new" / "r", run, summarize(run))
    assert run_folder.load(tmp_path / "new" / "r") == run
    assert run_folder.load_document(tmp_path / "new" / "r") == document
    # and the numbers come out the same, any time later
    again = json.loads(json.dumps(summarize(run_folder.load(tmp_path / "new" / "r"))))
    assert again["metrics"] == document["metrics"] and again["counts"] == document["counts"]


def test_the_files(tmp_path: Path) -> None:
    run = a_run()
    run_folder.save(tmp_path / "r", run, summarize(run), {"valid": False, "reasons": [{"what": "w"}], "warnings": []})
    assert {p.name for p in (tmp_path / "r").iterdir()} == {
        "requests.jsonl",
        "events.npz",
        "run.json",
        "server_metrics.jsonl",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["r"]  # nothing left beside it
    document = strict(tmp_path / "r" / "run.json")
    assert document["format"] == "loadgen.run/1" and document["start_monotonic_ns"] == START_NS
    assert document["validity"]["valid"] is False and document["validity"]["reasons"] == [{"what": "w"}]
    assert document["validity"]["warnings"]  # those of the summary are joined in
    assert document["counts"]["started"] == 6 and document["counts"]["skipped"] == 2
    assert {"python", "loadgen", "aiohttp", "uvloop", "numpy", "kernel"} <= set(document["versions"])
    assert document["host"]["cores"] and document["host"]["memory_bytes"] > 0

    lines = [json.loads(line) for line in (tmp_path / "r" / "requests.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [r.id for r in run.records]
    assert [line["phase"] for line in lines[:3]] == ["cold", "warmup", "measured"]
    assert lines[0]["planned_ns"] == -900_000_000 and lines[2]["first_token_ns"] == 100_000_000
    assert lines[2]["ok"] is True and lines[2]["failure"] is None and lines[2]["num_events"] == 3
    assert "text" not in lines[2] and lines[4]["text"] == "two 中 words"
    assert lines[5]["sent_ns"] is None and lines[5]["failure"]["kind"] == "refused"
    assert lines[6]["failure"] == {"kind": "status", "detail": "busy", "status": 503, "retry_after": "1"}

    with np.load(tmp_path / "r" / "events.npz") as events:
        stamps, offsets = events["stamps_ns"], events["offsets"]
    assert stamps.dtype == offsets.dtype == np.int64 and offsets.tolist() == [0, 2, 3, 6, 6, 8, 8, 9]
    assert stamps[3:6].tolist() == [100_000_000, 120_500_000, 140_000_000]
    scrapes = [json.loads(line) for line in (tmp_path / "r" / "server_metrics.jsonl").read_text().splitlines()]
    assert [line["t_ns"] for line in scrapes] == [-5, 5]


def test_empty_run(tmp_path: Path) -> None:
    run = make_run([], interrupted=True)
    document = run_folder.save(tmp_path / "r", run, summarize(run))
    assert document["interrupted"] is True and strict(tmp_path / "r" / "run.json") == document
    assert (tmp_path / "r" / "requests.jsonl").read_bytes() == b""
    assert not (tmp_path / "r" / "server_metrics.jsonl").exists()
    assert run_folder.load(tmp_path / "r") == run


def test_no_key_and_no_header_value_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, header = "sk-TEST-4242", "secret-header-value"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    detail = f"Incorrect API key provided: {key}."
    run = make_run(
        [failed(0, -9, -8, FailureKind.STATUS, detail, status=401, phase=Phase.COLD)]
        + [failed(1, 0, 1, FailureKind.STATUS, detail, status=401)],
        options={"rate": None, "headers": {"X-Team": header}},
    )
    document = run_folder.save(tmp_path / "r", run, summarize(run))
    for path in (tmp_path / "r").iterdir():
        assert key.encode() not in path.read_bytes() and header.encode() not in path.read_bytes(), path
    assert document["options"]["headers"] == {"X-Team": "***"}
    assert document["counts"]["failure_reasons"][0]["detail"] == "Incorrect API key provided: ***."


def test_a_taken_place_is_left_alone(tmp_path: Path) -> None:
    run = a_run()
    (tmp_path / "r").mkdir()
    run_folder.save(tmp_path / "r", run, summarize(run))  # an empty folder is no obstacle
    before = {p: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    with pytest.raises(UsageError, match="not empty"):
        run_folder.save(tmp_path / "r", run, summarize(run))
    assert {p: p.read_bytes() for p in (tmp_path / "r").iterdir()} == before


def test_a_full_disk_keeps_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second file: one line, the first file kept whole, no folder under the final name."""
    real, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    run = a_run()
    with pytest.raises(UsageError) as caught:
        run_folder.save(tmp_path / "r", run, summarize(run))
    message = str(caught.value)
    assert "No space left on device" in message and "r.incomplete: requests.jsonl" in message and "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["r.incomplete"]
    kept = list((tmp_path / "r.incomplete").iterdir())
    assert [p.name for p in kept] == ["requests.jsonl"] and len(kept[0].read_text().splitlines()) == 7


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = a_run()
    with pytest.raises(UsageError, match="could not be written"):
        run_folder.save(tmp_path / "file" / "r", run, summarize(run))
    with pytest.raises(UsageError, match="not empty"):
        run_folder.save(tmp_path / "file", run, summarize(run))


def test_killed_while_writing_leaves_no_half_folder(tmp_path: Path) -> None:
    """A process killed in the middle of the second file: nothing under the final name."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from loadgen import run_folder
from loadgen.metrics import summarize
from tests.test_run_folder import a_run
real, calls = os.fsync, []
def fsync(d):
    calls.append(d)
    if len(calls) == 2: os.kill(os.getpid(), 9)
    real(d)
os.fsync = fsync
run_folder.save({str(tmp_path / "r")!r}, a_run(), summarize(a_run()))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "run.json").unlink(), "no readable run.json"),
        (lambda d: (d / "run.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "run.json").write_text('{"format": "other/3"}'), "'other/3'"),
        (lambda d: (d / "events.npz").write_bytes(b"PK"), "damaged"),
        (lambda d: (d / "events.npz").write_bytes(b""), "damaged"),
        (lambda d: (d / "events.npz").write_bytes(b"PK\x03\x04" + bytes(40)), "damaged"),
        (lambda d: (d / "requests.jsonl").write_text(""), "damaged: events.npz is of 7 requests"),
        (lambda d: (d / "requests.jsonl").unlink(), "damaged"),
    ],
)
def test_damaged_folders_are_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    run = a_run()
    run_folder.save(tmp_path / "r", run, summarize(run))
    damage(tmp_path / "r")
    with pytest.raises(UsageError, match=message) as caught:
        run_folder.load(tmp_path / "r")
    assert "\n" not in str(caught.value)


def test_stamps_of_a_long_uptime_survive(tmp_path: Path) -> None:
    """2^53 ns is 104 days of uptime: beyond that a float would lose nanoseconds."""
    shift = 2**60
    one = record(1, 0, [10, 20])
    values = {
        n: getattr(one, n) + shift for n in ("planned_ns", "sent_ns", "first_token_ns", "last_token_ns", "end_ns")
    }
    moved = replace(one, **values)
    run = make_run([moved], start_ns=START_NS + shift, end_ns=moved.end_ns)
    run_folder.save(tmp_path / "r", run, summarize(run))
    assert run_folder.load(tmp_path / "r").records[0].end_ns == moved.end_ns

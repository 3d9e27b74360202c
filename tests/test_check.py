"""check.py and mock_server.py: the truth that clients are measured against, and `loadgen check` itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loadgen.check import errors_ms, mock_server, truth_of
from loadgen.options import Options, Span
from loadgen.workers import run_load
from tests.runs import make_run, ns, record

MS = 1_000_000


@pytest.mark.parametrize("itl_ms", [0.0, 5.0])
@pytest.mark.parametrize("transport", ["wire", "aiohttp"])
def test_every_event_is_there_and_none_is_early(transport: str, itl_ms: float) -> None:
    with mock_server(10, 5, itl_ms) as url:
        options = Options(url=url, concurrency=4, requests=12, warmup=1, input_tokens=Span(8, 8), seed=3, scrape=False)
        run = run_load(options.replace(output_tokens=Span(40, 40), transport=transport))
        truth = truth_of(url)
    assert [r.output_tokens for r in run.measured] == [40] * 12 and all(r.ok for r in run.measured)
    for done in run.measured:
        entry = truth[done.id]
        assert len(entry["sent_ns"]) == done.num_events == 40
        assert done.sent_ns is not None and done.sent_ns <= entry["read_ns"] + MS // 2
        assert all(seen >= sent - MS // 2 for seen, sent in zip(done.event_stamps_ns, entry["sent_ns"], strict=True))
        assert entry["sent_ns"][0] - entry["read_ns"] >= 10 * MS
    assert len(truth) == 13, "the warm-up, too"
    found = errors_ms(run, truth)
    assert found["matched"] == 12 and found["missing_events"] == 0


def test_errors_are_measured_minus_true() -> None:
    """Seen 52 and 73 ms after the send; read after 1, sent at 51 and 71: TTFT 52 - 50, gap 21 - 20, stamps +1, +2."""
    run = make_run([record(1, 0, [52, 73])])
    read_ns, sent_ns = ns(1), [ns(51), ns(71)]
    found = errors_ms(run, {"r1": {"read_ns": read_ns, "sent_ns": sent_ns}})
    assert found["ttft_p50"] == pytest.approx(2) and found["gap_p99"] == pytest.approx(1)
    assert found["stamp_max"] == pytest.approx(2)


def test_the_command() -> None:
    command = [sys.executable, "-m", "loadgen", "check", "--streams", "8", "--rate", "20", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    document = json.loads(result.stdout)
    loads = document["loads"]
    assert list(loads) == ["ceiling", "accuracy", "lateness"]
    assert result.returncode == (0 if all(load["valid"] for load in loads.values()) else 3)
    for name, requests in (("ceiling", 2048), ("accuracy", 16), ("lateness", 100)):
        assert loads[name]["failed"] == 0 and loads[name]["requests"] == requests
        assert loads[name]["error_ms"]["matched"] == requests and loads[name]["error_ms"]["missing_events"] == 0
        assert loads[name]["cpu_us_per_event"] > 0

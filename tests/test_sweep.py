"""sweep.py: the search on made-up servers, and the command against servers that follow a script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import sweep
from loadgen.options import Slo
from loadgen.stats import binomial_bounds
from tests.scripted_server import Asked, ScriptedServer, good

# ---------------------------------------------------------------- the highest rate


def test_binomial_bounds() -> None:
    """0 of 299: 0.95^(1/299)... p_high = 1 - 0.05^(1/299) = 0.00997; 5 of 10 by tables: 0.2224 to 0.7776."""
    assert binomial_bounds(0, 299) == (0.0, pytest.approx(1 - 0.05 ** (1 / 299), abs=1e-9))
    assert binomial_bounds(5, 10) == (pytest.approx(0.2224, abs=1e-4), pytest.approx(0.7776, abs=1e-4))
    assert binomial_bounds(7, 7)[1] == 1.0
    assert sweep.needed_requests(0.99) == 299 and sweep.needed_requests(0.9) == 29


def test_search_finds_the_rate_of_a_server_with_a_cliff() -> None:
    """Nothing is missed up to 13.7 requests/s, half of all above."""
    wanted = sweep.MaxRate(Slo(ttft_ms=100), precision=0.05)
    trials: list[sweep.Trial] = []
    sweep.search(lambda rate: (299, 0 if rate <= 13.7 else 150, False), wanted, trials)
    found = sweep.result_of(wanted, trials)["max_rate"]
    assert found["resolved"] and found["holds_per_s"] <= 13.7 < found["breaks_per_s"]
    assert found["breaks_per_s"] / found["holds_per_s"] <= 1.05
    assert [trial.rate for trial in trials][:5] == [1, 2, 4, 8, 16]


def test_search_adds_trials_until_it_knows() -> None:
    """2 of 299 missed in every trial: p99 is neither kept nor broken for sure, however the three add up."""
    wanted = sweep.MaxRate(Slo(ttft_ms=100), trials=3)
    trials: list[sweep.Trial] = []
    sweep.search(lambda rate: (299, 2, False), wanted, trials)
    assert [(t.requests, t.missed, t.holds) for t in trials] == [(897, 6, None)]
    found = sweep.result_of(wanted, trials)["max_rate"]
    assert not found["resolved"] and found["holds_per_s"] is None


def test_a_growing_queue_breaks_the_promise() -> None:
    """Service of 1.25 s of work for every s: nobody misses 2 s yet in 4 s, but the line gets longer and longer."""
    start = (np.arange(400) * 10_000_000).astype(np.int64)
    overloaded = (np.arange(400) * 12_500_000 + 20_000_000).astype(np.int64)
    stable = start + 200_000_000
    assert sweep._growing(start, overloaded)
    assert not sweep._growing(start, stable)


# ---------------------------------------------------------------- the command


def loadgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=240)


def quick(number: int, asked: Asked) -> Any:
    return good(asked, ttft_ms=2, tokens=5, gap_ms=2)


def test_sweep_command(tmp_path: Path) -> None:
    out = tmp_path / "s"
    with ScriptedServer(quick) as server:
        result = loadgen(
            *("sweep", "--concurrency", "1,2,4", "--url", server.url, "--requests", "8", "--input-tokens", "16"),
            *("--output-tokens", "5", "--no-scrape", "--out", str(out)),
        )
    assert result.returncode in (0, 3), result.stderr
    document = json.loads((out / "sweep.json").read_text())
    assert [point["load"] for point in document["points"]] == ["c1", "c2", "c4"]
    assert document["knee"] in ("c1", "c2", "c4") and f"{document['knee']}" in result.stdout
    assert "</html>" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--find-max-rate"),
        (["--concurrency", "1,x"], "--concurrency"),
        (["--rate", "1", "--at", "p99"], "--at"),
        (["--find-max-rate"], "--slo"),
    ],
)
def test_wrong_flags_are_one_line(args: list[str], said: str) -> None:
    result = loadgen("sweep", *args)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and said in result.stderr

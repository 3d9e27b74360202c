"""compare.py and sweep.py: documents of made-up rounds, and both commands against servers that follow a script."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import sweep
from loadgen.compare import Arm, Plan, Rounds, document_of, parse_arms, text_of, verdict
from loadgen.options import Options, Slo, UsageError
from loadgen.stats import binomial_bounds
from tests.scripted_server import Asked, ScriptedServer, good

# ---------------------------------------------------------------- documents


def rounds(*rates: float, failed: int = 0, output: int = 100, valid: bool = True) -> Rounds:
    """Rounds whose TTFT is 1000 / rate ms."""

    def document(rate: float) -> dict[str, Any]:
        latency = {key: 1000 / rate for key in ("p50", "p99")}
        names = ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")
        return {
            "server": {"url": "http://x", "model": "m"},
            "counts": {"started": 10 + failed, "failed": failed},
            "validity": {"valid": valid},
            "metrics": {
                "output_tokens_per_s": rate,
                "requests_per_s": rate / 10,
                "goodput_per_s": None,
                "input_tokens": 500,
                "output_tokens": output,
                "output_tokens_asked": 100,
                **dict.fromkeys(names, latency),
            },
        }

    return Rounds([document(rate) for rate in rates], [Path("x")] * len(rates))


def compared(a: Rounds, b: Rounds, same_within: float = 0.03) -> dict[str, Any]:
    plan = Plan([Arm("A", "http://a"), Arm("B", "http://b")], Options(), same_within=same_within)
    return document_of(plan, {"A": a, "B": b}, len(a.documents), False, 1)


def test_twice_as_fast() -> None:
    """Log ratios log 2 + (-0.01, 0, 0.01): mean log 2, s 0.01, half width t(0.975, 2) 0.01 / sqrt 3 = 0.02484."""
    a = rounds(100, 110, 90)
    b = rounds(200 * math.exp(-0.01), 220, 180 * math.exp(0.01))
    entry = compared(a, b)["metrics"]["output_tokens_per_s"]["B"]
    assert entry["ratio"] == pytest.approx(2)
    assert entry["low"] == pytest.approx(2 * math.exp(-0.02484), rel=1e-4)
    assert entry["high"] == pytest.approx(2 * math.exp(0.02484), rel=1e-4)
    assert entry["verdict"] == "faster" and entry["rounds_needed"] is None
    latency = compared(a, b)["metrics"]["ttft_p50_ms"]["B"]
    assert latency["ratio"] == pytest.approx(0.5) and latency["verdict"] == "faster"
    assert compared(b, a)["metrics"]["ttft_p99_ms"]["B"]["verdict"] == "slower"


def test_values_are_the_ones_whose_ratio_is_given() -> None:
    document = compared(rounds(100, 150, 80), rounds(140, 160, 130))
    for entries in document["metrics"].values():
        assert entries["B"]["value"] / entries["A"]["value"] == pytest.approx(entries["B"]["ratio"])
    assert "goodput_per_s" not in document["metrics"]  # no SLO: nothing to compare


@pytest.mark.parametrize(
    ("low", "high", "higher", "said"),
    [
        (0.98, 1.02, True, "same within 3 %"),
        (1.001, 1.02, True, "same within 3 %"),  # a difference, but one that nobody asked about
        (1.001, 1.2, True, "faster"),
        (1.001, 1.2, False, "slower"),
        (0.8, 0.999, True, "slower"),
        (0.8, 0.999, False, "faster"),
        (0.9, 1.1, True, "not resolved"),
    ],
)
def test_verdicts(low: float, high: float, higher: bool, said: str) -> None:
    assert verdict(low, high, higher, 0.03) == said


def test_not_resolved_says_what_would_do() -> None:
    entry = compared(rounds(100, 90, 110), rounds(104, 98, 105))["metrics"]["output_tokens_per_s"]["B"]
    assert entry["verdict"] == "not resolved"
    assert entry["rounds_needed"] > 3 and entry["detectable"] > 1
    text = text_of(compared(rounds(100, 90, 110), rounds(104, 98, 105)))
    assert f"{entry['rounds_needed']} rounds would settle it" in text


def test_one_round_has_no_interval() -> None:
    entry = compared(rounds(100), rounds(200))["metrics"]["output_tokens_per_s"]["B"]
    assert entry["ratio"] == pytest.approx(2) and entry["low"] is None and "one round" in entry["verdict"]


def test_different_work_comes_first() -> None:
    document = compared(rounds(100, 101, failed=1), rounds(200, 201, output=70))
    said = document["different_work"]
    assert any("A: 2 of 22 requests failed" in text for text in said)
    assert any("B did 140 output tokens, A 200" in text for text in said)
    lines = text_of(document).splitlines()
    assert min(i for i, line in enumerate(lines) if line.startswith("!")) < next(
        i for i, line in enumerate(lines) if line.startswith("metric")
    )


def test_no_ratio_without_its_absolutes() -> None:
    for line in text_of(compared(rounds(100, 101), rounds(200, 205))).splitlines():
        if " x " in line:
            assert len([word for word in line.split() if word.replace(".", "").isdigit()]) >= 3, line


@pytest.mark.parametrize(
    ("pairs", "starts", "said"),
    [
        ([("A", "u")], [], "two or more"),
        ([("A", "u"), ("A", "v")], [], "name A"),
        ([("A", "u"), ("B", "v")], [("C", "x")], "C"),
        ([("a/b", "u"), ("B", "v")], [], "a/b"),
    ],
)
def test_wrong_arms(pairs: list[tuple[str, str]], starts: list[tuple[str, str]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_arms(pairs, starts)


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


# ---------------------------------------------------------------- the commands


def loadgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=240)


def quick(number: int, asked: Asked) -> Any:
    return good(asked, ttft_ms=2, tokens=5, gap_ms=2)


def test_compare_command(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with ScriptedServer(quick) as a, ScriptedServer(quick) as b:
        result = loadgen(
            *("compare", f"A={a.url}", f"B={b.url}", "--concurrency", "2", "--requests", "6", "--rounds", "3"),
            *("--input-tokens", "16", "--output-tokens", "5", "--no-scrape", "--out", str(out)),
        )
        bodies = [[post.body["prompt"] for post in server.posts()] for server in (a, b)]
    assert result.returncode in (0, 3), result.stderr  # 3: this machine was too busy, and it says so
    assert bodies[0] == bodies[1], "the same work for both"
    assert len(set(map(str, bodies[0]))) == len(bodies[0]), "and no prompt twice"
    document = json.loads((out / "compare.json").read_text())
    assert document["format"] == "loadgen.compare/1" and document["rounds"] == 3 and document["baseline"] == "A"
    assert document["arms"]["A"]["requests"] == document["arms"]["B"]["requests"] == 18
    entry = document["metrics"]["ttft_p50_ms"]["B"]
    assert entry["low"] <= entry["ratio"] <= entry["high"]
    starts = {}
    for number in (1, 2, 3):
        for name in ("A", "B"):
            run = json.loads((out / f"round-{number}" / name / "run.json").read_text())
            starts[number, name] = run["start_monotonic_ns"]
    assert starts[1, "A"] < starts[1, "B"] < starts[2, "B"] < starts[2, "A"] < starts[3, "A"] < starts[3, "B"]
    assert "</html>" in (out / "report.html").read_text()
    assert "A (baseline)" in result.stdout and "ttft_p50_ms" in result.stdout


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
        (["sweep"], "--find-max-rate"),
        (["sweep", "--concurrency", "1,x"], "--concurrency"),
        (["sweep", "--rate", "1", "--at", "p99"], "--at"),
        (["sweep", "--find-max-rate"], "--slo"),
        (["compare", "A=http://127.0.0.1:9", "--concurrency", "1"], "two or more"),
        (["compare", "A=http://127.0.0.1:9", "B=http://127.0.0.1:9"], "--concurrency"),
        (["compare", "A=u", "B=v", "--concurrency", "1", "--same-within", "300%"], "--same-within"),
    ],
)
def test_wrong_flags_are_one_line(args: list[str], said: str) -> None:
    result = loadgen(*args)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and said in result.stderr

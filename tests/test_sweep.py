"""sweep.py and max_rate.py: the search on made-up servers, the command against servers that follow a script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen import sweep
from loadgen.max_rate import Search, Wanted, search, stopping
from loadgen.options import Slo
from tests.runs import failed, make_run, record
from tests.scripted_server import Asked, ScriptedServer, good

# ---------------------------------------------------------------- when to stop


@pytest.mark.parametrize("p", [0.5, 0.8, 0.2, 0.9])
def test_stopping_is_rarely_wrong(p: float) -> None:
    """Trials that go one way with probability p exactly are called "more than p" in at most 5 of 100."""
    entries = stopping(p, 0.05, 60)
    others = np.cumsum(np.random.default_rng(1).random((20_000, 60)) >= p, axis=1)
    wrong = np.any([others[:, n - 1] == j for j, n in enumerate(entries)], axis=0)
    assert wrong.mean() <= 0.05
    assert list(entries) == sorted(set(entries)) and entries[-1] <= 60


def test_stopping_by_hand() -> None:
    """0.5^6 = 0.0156 <= 0.025 < 0.5^5. One of 9: 6 of the 512 ways have their one among the first 6, 0.0117 <= 0.0125;
    of 8: 6 in 256. 0.8^17 = 0.0225 <= 0.025 < 0.8^16."""
    assert stopping(0.5, 0.05, 20)[:2] == (6, 9)
    assert stopping(0.8, 0.05, 20) == (17,)


# ---------------------------------------------------------------- the search


def found(meets: Callable[[float], bool], start: float = 1.0, **wanted: Any) -> Search:
    result = Search(start, Wanted(Slo(ttft_ms=100), **wanted))
    search(meets, result)
    return result


@pytest.mark.parametrize(("start", "precision"), [(1.0, 0.2), (3.3, 0.1), (50.0, 0.2), (13.7, 0.05)])
def test_a_cliff_is_found(start: float, precision: float) -> None:
    """All is well up to 13.7 requests/s, nothing above: 17 trials hold, 3 break."""
    result = found(lambda rate: rate <= 13.7, start, precision=precision)
    low, high = result.as_dict()["holds_per_s"], result.as_dict()["breaks_per_s"]
    assert result.resolved and low <= 13.7 < high and high / low == pytest.approx(1 + precision)
    decided = [(level.met, level.missed, level.holds) for _, level in sorted(result.levels.items())]
    assert decided == [(17, 0, True), (0, 3, False)]


@pytest.mark.parametrize(("keep", "steep"), [(0.8, 12), (0.5, 12), (0.8, 4), (0.8, 100)])
def test_what_holds_holds(keep: float, steep: float) -> None:
    """Servers whose trials meet the limits less and less often: 1 / (1 + (rate / r)^steep). The true border is where
    that is `keep`: it lies between the two rates in 95 of 100 searches."""
    rng = np.random.default_rng(2)
    searches, wrong, resolved = 200, 0, 0
    for _ in range(searches):
        half = float(np.exp(rng.uniform(0, 3)))
        result = found(lambda rate, half=half: rng.random() < 1 / (1 + (rate / half) ** steep), keep=keep)
        border = half * ((1 - keep) / keep) ** (1 / steep)
        low, high = result.as_dict()["holds_per_s"], result.as_dict()["breaks_per_s"]
        wrong += (low is not None and low > border * (1 + 1e-9)) or (high is not None and high < border * (1 - 1e-9))
        resolved += result.resolved
    assert wrong / searches <= 0.05 + 0.03, wrong  # two standard errors
    if steep >= 12:
        assert resolved / searches >= 0.6


def test_no_end_in_sight() -> None:
    """Whatever is asked is met: doubled 20 times, and then it is not resolved."""
    rates: list[float] = []
    result = found(lambda rate: rates.append(rate) is None, trials=17)
    assert not result.resolved and result.as_dict()["breaks_per_s"] is None
    assert max(rates) > 2**19 and len(rates) == 21 + 17


def test_nothing_holds() -> None:
    result = found(lambda rate: False)
    assert not result.resolved and result.as_dict()["holds_per_s"] is None
    assert min(level.rate for level in result.levels.values()) > 1 / 2**9


def test_an_interrupt_keeps_what_was_decided() -> None:
    """Five trials to bracket 10, two to bisect, 17 that hold; the 26th is interrupted."""
    count = 0

    def meets(rate: float) -> bool:
        nonlocal count
        count += 1
        if count > 25:
            raise KeyboardInterrupt
        return rate <= 10

    result = Search(1.0, Wanted(Slo(ttft_ms=100)))
    with pytest.raises(KeyboardInterrupt):
        search(meets, result)
    assert result.as_dict()["holds_per_s"] == pytest.approx(1.2**12) and result.breaks is None
    assert [(rate["trials"], rate["holds"]) for rate in result.as_dict()["rates"]] == [(17, True), (1, None)]


# ---------------------------------------------------------------- trials and the knee


def test_a_growing_queue_breaks_the_promise() -> None:
    """Service of 1.25 s of work for every s: nobody misses 2 s yet in 4 s, but the line gets longer and longer."""
    start = (np.arange(400) * 10_000_000).astype(np.int64)
    overloaded = (np.arange(400) * 12_500_000 + 20_000_000).astype(np.int64)
    assert sweep.growing(start, overloaded)
    assert not sweep.growing(start, start + 200_000_000)
    assert not sweep.growing(start[:20], overloaded[:20])


def test_a_trial_meets_when_enough_requests_do() -> None:
    """9 of 10 within 100 ms: p90 is kept, p95 is not; a failure is a miss."""
    from loadgen.metrics import summarize
    from loadgen.record import FailureKind

    records = [record(n, 10 * n, [10 * n + 50, 10 * n + 60]) for n in range(9)]
    for last in (record(9, 90, [290, 300]), failed(9, 90, 95, FailureKind.STATUS, "busy", status=503)):
        run = make_run([*records, last])
        document = summarize(run, Slo(ttft_ms=100))
        assert sweep.meets(run, document, 0.9) and not sweep.meets(run, document, 0.95)
    assert [sweep.trial_requests(at) for at in (0.5, 0.9, 0.95, 0.99, 0.999)] == [50, 50, 50, 200, 2000]


def test_a_client_at_its_end_is_said() -> None:
    limit = {"rate_per_s": 900.0, "tries": 3, "what": "the client used 99 % of a core", "remedy": "use --workers 2"}
    search = Search(1.0, Wanted(Slo(ttft_ms=100)))
    extra = {"requests_per_trial": 200, "alone": None, "client_limit": limit}
    text = sweep.text_of({"interrupted": False, "max_rate": {**search.as_dict(), **extra}})
    for said in (
        "INVALID at 900.0 requests/s",
        "99 % of a core",
        "-> use --workers 2",
        "not resolved",
        "no rate was decided",
    ):
        assert said in text, said


def point(load: str, rate: float, e2e_ms: float | None) -> sweep.Point:
    metrics = {"output_tokens_per_s": rate, "e2e_ms": {"p50": e2e_ms}}
    return sweep.Point(load, Path(load), {"metrics": metrics, "validity": {"valid": True}})


def test_knee() -> None:
    """Power 100 / 1, 190 / 1.05, 360 / 1.2, 400 / 2.4: it falls once only latency grows."""
    points = [point("c1", 100, 1000), point("c2", 190, 1050), point("c4", 360, 1200), point("c8", 400, 2400)]
    assert sweep.knee(points) == {"load": "c4", "at_the_end": False}
    assert sweep.knee(points[:3]) == {"load": "c4", "at_the_end": True}
    assert sweep.knee([point("c1", 0, None)]) is None


# ---------------------------------------------------------------- the command


def loadgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=240)


def quick(number: int, asked: Asked) -> Any:
    return good(asked, ttft_ms=2, tokens=5, gap_ms=2)


LENGTHS = ("--input-tokens", "16", "--output-tokens", "5", "--no-scrape")


def test_sweep_command(tmp_path: Path) -> None:
    out = tmp_path / "s"
    with ScriptedServer(quick) as server:
        result = loadgen(
            *("sweep", "--concurrency", "1,2,4", "--url", server.url, "--requests", "8", *LENGTHS, "--out", str(out)),
            *("--slo", "ttft=10s"),
        )
    assert result.returncode in (0, 3), result.stderr  # 3: this machine was too busy, and it says so
    document = json.loads((out / "sweep.json").read_text())
    assert [entry["load"] for entry in document["points"]] == ["c1", "c2", "c4"]
    assert document["knee"]["load"] in ("c1", "c2", "c4") and f"knee: {document['knee']['load']}" in result.stdout
    assert all(entry["goodput_per_s"] == entry["requests_per_s"] for entry in document["points"])
    assert "goodput" in result.stdout
    page = (out / "report.html").read_text()
    assert "Throughput against latency" in page and "</html>" in page


def test_find_max_rate_command(tmp_path: Path) -> None:
    """Answers take 10 ms one after the other, so 100 requests/s is the end, and 20 requests at twice that rate wait for
    up to 100 ms. How well this machine keeps to that, nobody knows: the border may be lower, never higher."""
    out = tmp_path / "m"
    with subprocess.Popen([sys.executable, "-m", "tests.one_place"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            result = loadgen(
                *("sweep", "--find-max-rate", "--url", url, "--slo", "ttft=60ms", "--requests", "20", "--keep", "50%"),
                *("--at", "p90", "--start-rate", "50", "--arrival", "constant", *LENGTHS, "--warmup", "1"),
                *("--out", str(out), "--precision", "90%", "--trials", "8"),
            )
        finally:
            server.kill()
    assert result.returncode in (0, 3), result.stderr
    document = json.loads((out / "sweep.json").read_text())
    found = document["max_rate"]
    if found["client_limit"] is None:
        assert found["breaks_per_s"] is not None
        assert sum(rate["trials"] for rate in found["rates"]) < len(
            document["points"]
        )  # the bracket counts for nothing
    assert found["holds_per_s"] is None or found["holds_per_s"] <= 50 * 1.9**2
    assert len({entry["folder"] for entry in document["points"]}) == len(document["points"])
    assert "requests/s" in result.stdout and "</html>" in (out / "report.html").read_text()


def test_a_promise_that_a_request_alone_does_not_keep(tmp_path: Path) -> None:
    out = tmp_path / "m"
    with ScriptedServer(quick) as server:
        result = loadgen(
            *("sweep", "--find-max-rate", "--url", server.url, "--slo", "e2e=1ms", *LENGTHS, "--out", str(out))
        )
    assert result.returncode in (0, 3), result.stderr
    assert "no rate holds: of 8 requests one after the other 0 met the limits" in result.stdout
    assert json.loads((out / "sweep.json").read_text())["max_rate"]["alone"]["misses"] is True


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--find-max-rate"),
        (["--concurrency", "1,x"], "--concurrency"),
        (["--rate", "1", "--at", "p99"], "--at"),
        (["--rate", "1", "--keep", "90%"], "--keep"),
        (["--find-max-rate"], "--slo"),
    ],
)
def test_wrong_flags_are_one_line(args: list[str], said: str) -> None:
    result = loadgen("sweep", *args)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and said in result.stderr

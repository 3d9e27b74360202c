"""compare.py: documents of made-up rounds, and the command against servers that follow a script."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.compare import LOADS, Arm, Plan, Rounds, document_of, order_of, parse_arms, seed_of, text_of
from loadgen.options import Options, UsageError
from loadgen.verdicts import judge, verdict
from tests.scripted_server import Asked, ScriptedServer, good

# ---------------------------------------------------------------- documents


def rounds(*rates: float, failed: int = 0, output: int = 100, valid: bool = True) -> Rounds:
    """Rounds of these rates, the first load 10 % below and the second 10 % above; TTFT is 1000 / rate ms."""

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
                "input_tokens_cached": None,
                "output_tokens": output,
                "output_tokens_asked": 100,
                "output_tokens_estimated": 0,
                **dict.fromkeys(names, latency),
            },
        }

    documents = [document(load) for rate in rates for load in (rate / 1.1, rate * 1.1)]
    return Rounds(documents, [Path("x")] * len(documents))


def compared(a: Rounds, b: Rounds, same_within: float = 0.03) -> dict[str, Any]:
    plan = Plan([Arm("A", "http://a"), Arm("B", "http://b")], Options(), same_within=same_within)
    return document_of(plan, {"A": a, "B": b}, len(a.documents) // LOADS, False, 1)


def test_twice_as_fast() -> None:
    """Log ratios log 2 + (-0.01, 0, 0.01): mean log 2, s 0.01, half width t(0.975, 2) 0.01 / sqrt 3 = 0.02484."""
    a = rounds(100, 110, 90)
    b = rounds(200 * math.exp(-0.01), 220, 180 * math.exp(0.01))
    entry = compared(a, b)["metrics"]["output_tokens_per_s"]["B"]
    assert entry["ratio"] == pytest.approx(2)
    assert entry["low"] == pytest.approx(2 * math.exp(-0.02484), rel=1e-4)
    assert entry["high"] == pytest.approx(2 * math.exp(0.02484), rel=1e-4)
    assert entry["verdict"] == "faster" and entry["rounds_needed"] is None
    assert entry["rounds"] == pytest.approx([200 * math.exp(-0.01), 220, 180 * math.exp(0.01)])
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


def test_a_figure_that_stands_alone_among_many_is_not_claimed() -> None:
    """Nine figures that do not differ and one of p = 0.03: one in ten looks so by chance, 0.05 / 10 would be needed."""
    same = {"A": [100.0] * 5, "B": [100 * math.exp(d) for d in (0.05, -0.05, 0.06, -0.06, 0.0)]}
    odd = {"A": [100.0] * 5, "B": [100 * math.exp(d) for d in (0.02, 0.09, 0.05, 0.13, 0.04)]}
    figures = {f"m{i}": same for i in range(9)} | {"odd": odd}
    kinds = {"baseline": "A", "higher_is_better": dict.fromkeys(figures, True), "same_within": 0.03}
    entry = judge(figures, **kinds)["odd"]["B"]
    assert 0.005 < entry["p_value"] < 0.05 and entry["low"] > 1 and entry["verdict"] == "not resolved"
    assert entry["rounds_needed"] > 5
    assert judge({"odd": odd}, **kinds)["odd"]["B"]["verdict"] == "faster"


def test_a_missing_figure_is_no_ratio() -> None:
    figures = {"m": {"A": [1.0, 2.0], "B": [None, 3.0], "C": [2.0, 4.0]}}
    entries = judge(figures, baseline="A", higher_is_better={"m": True}, same_within=0.03)["m"]
    assert entries["B"]["value"] is None and entries["B"]["ratio"] is None and entries["B"]["verdict"] == "no value"
    assert entries["C"]["ratio"] == pytest.approx(2) and entries["C"]["verdict"] == "faster"


def test_different_work_comes_first() -> None:
    document = compared(rounds(100, 101, failed=1), rounds(200, 201, output=70))
    said = document["different_work"]
    assert any("A: 4 of 44 requests failed" in text for text in said)
    assert any("B did 280 output tokens, A 400" in text for text in said)
    lines = text_of(document).splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("metric"))
    assert max(i for i, line in enumerate(lines) if line.startswith("!")) < table
    assert all("(! not the same work)" in line for line in lines[table + 1 :] if " x A" in line)
    assert "(! not the same work)" not in text_of(compared(rounds(100, 101), rounds(200, 201)))


def test_no_ratio_without_its_absolutes_and_its_baseline() -> None:
    lines = [line for line in text_of(compared(rounds(100, 101), rounds(200, 205))).splitlines() if " x A" in line]
    assert len(lines) == 9
    for line in lines:
        assert len([word for word in line.split() if word.replace(".", "").isdigit()]) >= 5, line  # with the interval


def test_seeds() -> None:
    """Never twice for an arm; the same for all arms; of its own for an arm with an address that another has."""
    plan = Plan([Arm("A", "h:1"), Arm("B", "http://h:2"), Arm("A2", "http://h:1/v1")], Options(), rounds=4)
    loads = [(number, load) for number in range(1, 5) for load in range(LOADS)]
    seeds = [[seed_of(plan, 100, arm, *load) for load in loads] for arm in range(3)]
    assert seeds[0] == seeds[1] == list(range(100, 108))
    assert seeds[2] == list(range(108, 116))
    in_turn = Plan([Arm("A", "h:1", "serve a"), Arm("B", "h:1", "serve b")], Options(), rounds=4)
    assert seed_of(in_turn, 100, 0, 3, 1) == seed_of(in_turn, 100, 1, 3, 1), "two servers that share an address"


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


# ---------------------------------------------------------------- the commands


def loadgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=240)


def quick(number: int, asked: Asked) -> Any:
    return good(asked, ttft_ms=2, tokens=5, gap_ms=2)


LOAD = ("--concurrency", "2", "--requests", "6", "--input-tokens", "16", "--output-tokens", "5", "--no-scrape")


def test_compare_command(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with ScriptedServer(quick) as a, ScriptedServer(quick) as b:
        result = loadgen(
            "compare", f"A={a.url}", f"B={b.url}", "--rounds", "3", *LOAD, "--out", str(out), "--seed", "4"
        )
        bodies = [[post.body["prompt"] for post in server.posts()] for server in (a, b)]
    assert result.returncode in (0, 3), result.stderr  # 3: this machine was too busy, and it says so
    assert sorted(map(str, bodies[0])) == sorted(map(str, bodies[1])), "the same work for both"
    assert len(set(map(str, bodies[0]))) == len(bodies[0]), "and no prompt twice"
    document = json.loads((out / "compare.json").read_text())
    assert document["format"] == "loadgen.compare/1" and document["rounds"] == 3 and document["baseline"] == "A"
    assert document["arms"]["A"]["requests"] == document["arms"]["B"]["requests"] == 3 * LOADS * 6
    entry = document["metrics"]["ttft_p50_ms"]["B"]
    assert entry["low"] <= entry["ratio"] <= entry["high"]
    starts = {}
    for number in (1, 2, 3):
        for name in ("A-1", "A-2", "B-1", "B-2"):
            run = json.loads((out / f"round-{number}" / name / "run.json").read_text())
            starts[run["start_monotonic_ns"]] = "AB".index(name[0])
    turns = [starts[stamp] for stamp in sorted(starts)]
    assert turns == [turn for number in (1, 2, 3) for turn in order_of(2, number, 4)]
    assert "</html>" in (out / "report.html").read_text()
    assert "A (baseline)" in result.stdout and "ttft_p50_ms" in result.stdout


def test_one_server_against_itself_gets_other_prompts(tmp_path: Path) -> None:
    with ScriptedServer(quick) as server:
        result = loadgen(
            "compare", f"A={server.url}", f"B={server.url}/v1", "--rounds", "2", *LOAD, "--out", str(tmp_path / "c")
        )
        prompts = [str(post.body["prompt"]) for post in server.posts()]
    assert result.returncode in (0, 3), result.stderr
    assert len(set(prompts)) == len(prompts)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_servers_started_in_turn(tmp_path: Path, port: int) -> None:
    """Both at one port, so never at once; the arm at the turning point goes twice on one start: 3 starts a round."""
    url, out = f"http://127.0.0.1:{port}", tmp_path / "c"
    command = f"{sys.executable} -m loadgen.mock_server --port {port} --ttft-ms 2 --itl-ms 2"  # it prints its port
    starts = [f"--start={name}={command}" for name in "AB"]
    result = loadgen("compare", f"A={url}", f"B={url}", *starts, "--rounds", "2", *LOAD, "--out", str(out))
    assert result.returncode in (0, 3), result.stderr
    started = [(out / "logs" / f"{name}.log").read_text().split().count(str(port)) for name in "AB"]
    assert sum(started) == 6 and min(started) >= 2
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "no server is left"


def test_a_server_that_goes_away_leaves_what_was_complete(tmp_path: Path) -> None:
    """B is up for one round and a bit, then it answers nothing but errors, and then it is gone."""
    out = tmp_path / "c"
    with ScriptedServer(quick) as a:
        with ScriptedServer(quick) as b:
            process = subprocess.Popen(
                [sys.executable, "-m", "loadgen", "compare", f"A={a.url}", f"B={b.url}", "--rounds", "500", *LOAD]
                + ["--out", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            while not (out / "round-3").exists():
                assert process.poll() is None, process.stderr
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and f"no server at {b.url}" in errors.strip().splitlines()[-1]
    document = json.loads((out / "compare.json").read_text())
    assert document["rounds"] >= 2 and document["metrics"]["ttft_p50_ms"]["B"]["low"] is not None
    assert "A (baseline)" in printed


def test_interrupt(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with ScriptedServer(quick) as a, ScriptedServer(quick) as b:
        process = subprocess.Popen(
            [sys.executable, "-m", "loadgen", "compare", f"A={a.url}", f"B={b.url}", "--rounds", "500", *LOAD]
            + ["--out", str(out), "--quiet"],
            stdout=subprocess.PIPE,
            text=True,
        )
        while not (out / "round-3").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 130
    document = json.loads((out / "compare.json").read_text())
    assert document["interrupted"] and document["rounds"] >= 2
    assert document["arms"]["A"]["requests"] == document["rounds"] * LOADS * 6


def test_interrupted_before_the_first_load(tmp_path: Path, port: int) -> None:
    """A server that never gets ready: Ctrl-C ends it, and there is nothing to write but its log."""
    url, out = f"http://127.0.0.1:{port}", tmp_path / "c"
    command = f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(600)'"
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", "compare", f"A={url}", f"B={url}", *LOAD, "--out", str(out)]
        + [f"--start=A={command}", f"--start=B={command}"]
    )
    while not [log for log in out.glob("logs/*.log") if log.read_text()]:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not (out / "compare.json").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["A=http://127.0.0.1:9", "--concurrency", "1"], "two or more"),
        (["A=http://127.0.0.1:9", "B=http://127.0.0.1:9"], "--concurrency"),
        (["A=u", "B=v", "--concurrency", "1", "--same-within", "300%"], "--same-within"),
    ],
)
def test_wrong_flags_are_one_line(args: list[str], said: str) -> None:
    result = loadgen("compare", *args)
    assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1 and said in result.stderr

"""explain.py: its arms, its tables from elsewhere, and the text; test_end_to_end.py runs it on real servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.explain import parse_arm, parse_arms, read_table
from loadgen.options import UsageError


def test_all_arms() -> None:
    arms = parse_arms(None, streams=32, width=8)
    assert [arm.name for arm in arms] == ["serial", "static-8", "static-32", "continuous-32", "vllm-1", "vllm-32"]
    assert [arm.streams for arm in arms] == [1, 8, 32, 32, 1, 32]
    assert len({arm.server for arm in arms}) == 5  # both arms of vLLM share one start
    assert [arm.name for arm in parse_arms(None, streams=8, width=8)].count("static-8") == 1


@pytest.mark.parametrize("name", ["static", "static-0", "vllm-", "turbo-8", "serial-2", "static-8x"])
def test_a_wrong_arm(name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(name)):
        parse_arm(name)


TABLES = {
    "csv": "arm,streams,tokens_per_s\nserial,1,34.4\nstatic-8,8,158.2\nvLLM,1,75.7\nvllm,64,2442\n",
    "blanks": "# measured elsewhere\nserial 1 34.4\n\nstatic 8 158.2   # padded\nvllm-1 1 75.7\nvllm-64 64 2442\n",
    "tabs, BOM, CRLF": "\ufeffarm\tstreams\ttok/s\r\n"
    "serial\t1\t34.4\r\nstatic 8\t8\t158.2\r\nvllm\t1\t75.7\r\nvllm\t64\t2442\r\n",
}


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_tables(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table"
    path.write_bytes(text.encode())
    assert [(arm.name, arm.streams, arm.rounds) for arm in read_table(path)] == [
        ("serial", 1, (34.4,)),
        ("static-8", 8, (158.2,)),
        ("vllm-1", 1, (75.7,)),
        ("vllm-64", 64, (2442.0,)),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("turbo 1 5", "line 2.*turbo"),
        ("vllm 0 5", "line 2.*STREAMS"),
        ("vllm 1 0", "line 2.*TOKENS_PER_S"),
        ("vllm 1 nan", "line 2"),
        ("vllm 1 inf", "line 2"),
        ("vllm 1", "line 2"),
        ("vllm 1 2 3", "line 2"),
        ("vllm many 5", "line 2"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "table"
    path.write_text(f"serial 1 34.4\n{line}\n")
    with pytest.raises(UsageError, match=said):
        read_table(path)


def loadgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=120)


def test_a_published_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TABLES["csv"])
    document = json.loads(loadgen("explain", "--from-table", str(path), "--json").stdout)
    rounded = [
        round(document["total"], 1),
        round(document["scheduling_first"]["engine"], 1),
        round(document["scheduling_first"]["scheduling"], 1),
        round(document["engine_first"]["engine"], 1),
        round(document["engine_first"]["scheduling"]),
    ]
    assert rounded == [71.0, 15.4, 4.6, 2.2, 32]
    assert document["arms"]["vllm-64"] == {"engine": "vllm", "streams": 64, "tokens_per_s": pytest.approx(2442)}
    text = loadgen("explain", "--from-table", str(path)).stdout
    assert "70.99x" in text and "baseline: serial" in text
    for line in text.splitlines():  # no ratio without the absolute values it is made of
        if re.search(r"\d x?x\b|\d x ", line):
            assert "34.40" in line or "158.2" in line or "75.70" in line, line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--arms", "serial,vllm-1"], "static or continuous"),
        (["--arms", "serial,static-8,vllm-1,warp-8"], "warp-8"),
        (["--demo", "--arms", "serial"], "--arms"),
        (["--from-table", "TABLE", "--rounds", "2"], "--rounds"),
        (["--from-table", "ABSENT"], "--from-table"),
        (["--streams", "1"], "--streams"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path: Path, args: list[str], said: str) -> None:
    table = tmp_path / "TABLE"
    table.write_text(TABLES["csv"])
    result = loadgen("explain", *(str(table) if word == "TABLE" else word for word in args))
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and said in result.stderr

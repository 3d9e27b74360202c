"""constrained.py against servers that keep to a constraint, ignore it, or refuse it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_server import DONE, END, HEAD, Asked, ScriptedServer, delta, plain, usage

CITY = {"city": "Oslo", "country": "Norway", "millions": 1}


def say(asked: Asked, text: str) -> Any:
    return [
        (2, HEAD),
        (1, delta(asked, content=text)),
        (1, delta(asked, "stop")),
        (0, usage(asked, 9)),
        (0, DONE),
        (0, END),
    ]


def call(asked: Asked, name: str, arguments: str) -> Any:
    head = {"index": 0, "id": "c", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": arguments}}
    events = [(2, HEAD), (1, delta(asked, tool_calls=[head])), (1, delta(asked, tool_calls=[rest]))]
    return [*events, (1, delta(asked, "tool_calls")), (0, usage(asked, 9)), (0, DONE), (0, END)]


def obedient(number: int, asked: Asked) -> Any:
    body = asked.body
    wanted = body.get("structured_outputs", {})
    if "choice" in wanted:
        return say(asked, wanted["choice"][0])
    if "regex" in wanted:
        return say(asked, "1999-12-31")
    if "json" in wanted or "response_format" in body:
        return say(asked, json.dumps(CITY))
    if "tools" in body:
        return call(asked, body["tool_choice"]["function"]["name"], json.dumps(CITY))
    return say(asked, "It is a city.")


def deaf(number: int, asked: Asked) -> Any:
    return say(asked, "It is a city.")


def refusing(number: int, asked: Asked) -> Any:
    if "structured_outputs" in asked.body:
        return [(0, plain(400, {"error": {"message": "structured_outputs is not supported"}}))]
    return obedient(number, asked)


def run(reply: Any, out: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    with ScriptedServer(reply) as server:
        command = [sys.executable, "-m", "loadgen", "constrained", server.url, "--rounds", "2", "--requests", "6"]
        command += ["--no-scrape", "--out", str(out), *flags]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return result, json.loads((out / "constrained.json").read_text()) if (out / "constrained.json").exists() else {}


def test_a_server_that_keeps_to_constraints(tmp_path: Path) -> None:
    result, document = run(obedient, tmp_path / "o")
    assert result.returncode in (0, 3), result.stderr  # 3: a busy machine
    kinds = document["kinds"]
    assert list(kinds) == ["none", "polite", "choice", "regex", "json", "response_format", "tool"]
    for name in ("choice", "regex", "json", "response_format", "tool"):
        assert kinds[name]["valid"] == kinds[name]["ok"] == 12, name
        assert kinds[name]["ignored"] is False
        assert kinds[name]["low"] <= kinds[name]["ratio"] <= kinds[name]["high"]
    assert kinds["polite"]["valid"] == 0 and kinds["polite"]["ignored"] is None  # asked only: it may say anything
    assert kinds["none"]["valid"] is None
    assert "IGNORED" not in result.stdout and "12 of 12" in result.stdout


def test_a_server_that_ignores_them_is_told_so(tmp_path: Path) -> None:
    result, document = run(deaf, tmp_path / "o", "--kinds", "choice,tool")
    assert list(document["kinds"]) == ["none", "choice", "tool"]
    for name in ("choice", "tool"):
        assert document["kinds"][name]["ignored"] is True and document["kinds"][name]["valid_share"] == 0
        assert f"! {name}: IGNORED" in result.stdout


def test_a_server_that_refuses_them(tmp_path: Path) -> None:
    result, document = run(refusing, tmp_path / "o", "--kinds", "json")
    assert result.returncode in (1, 3)
    entry = document["kinds"]["json"]
    assert entry["failed"] == 12 and entry["ok"] == 0 and entry["ignored"] is None and entry["valid_share"] is None
    assert "not supported" in entry["failure"] and "not supported" in result.stdout


@pytest.mark.parametrize(("flags", "said"), [(["--kinds", "xml"], "xml"), (["--rounds", "0"], "--rounds")])
def test_wrong_flags(tmp_path: Path, flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "loadgen", "constrained", "http://127.0.0.1:9", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and said in result.stderr and len(result.stderr.strip().splitlines()) == 1

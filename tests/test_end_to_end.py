"""The whole of it on real parts: transformers and vLLM on the packaged model, real HTTP, the commands of users."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.run_folder import load
from server.packaged_model import packaged_model
from tests.test_server_process import server

ROOT = Path(__file__).resolve().parent.parent


def loadgen(*args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadgen", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def strict(path: Path) -> Any:
    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.model
@pytest.mark.parametrize(("endpoint", "transport"), [("completions", "wire"), ("chat", "aiohttp")])
def test_a_run_against_the_reference_server(tmp_path: Path, endpoint: str, transport: str) -> None:
    out = tmp_path / "run"
    with server("--model", str(packaged_model()), "--mode", "static", "--batch-size", "8") as (_, url):
        result = loadgen(
            *("--url", url, "--concurrency", "8", "--requests", "32", "--output-tokens", "8", "--input-tokens", "24"),
            *("--endpoint", endpoint, "--transport", transport, "--out", str(out)),
        )
    document = strict(out / "run.json")
    # A busy machine may hold the client up: then the run must say so, and only so.
    assert result.returncode == (0 if document["validity"]["valid"] else 3), result.stdout + result.stderr
    assert "32 ok, 0 failed" in result.stdout
    assert document["counts"]["ok"] == 32 and document["metrics"]["ttft_ms"]["n"] == 32
    lines = (out / "requests.jsonl").read_text().splitlines()
    measured = [record for record in map(json.loads, lines) if record["phase"] == "measured"]
    assert len(measured) == 32 and all(record["output_tokens"] == 8 for record in measured)
    run = load(out)
    assert all(1 <= record.num_events <= 8 for record in run.measured)
    prompts = {record.prompt_tokens for record in run.measured}
    assert prompts == {24} if endpoint == "completions" else min(prompts) > 24  # the chat template adds to it
    assert "</html>" in (out / "report.html").read_text()


@pytest.mark.vllm
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_explain_on_transformers_and_vllm(tmp_path: Path) -> None:
    """Small, but all of it: both servers started, asked, loaded and stopped; factors that multiply; equal work."""
    out = tmp_path / "explain"
    result = loadgen(
        *("explain", "--arms", "serial,static-4,vllm-1,vllm-4", "--rounds", "2", "--round-seconds", "1"),
        *("--input-tokens", "8:24", "--output-tokens", "8", "--vllm-args=--enforce-eager", "--out", str(out)),
        timeout=1400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    document = strict(out / "explain.json")
    assert list(document["arms"]) == ["serial", "static-4", "vllm-1", "vllm-4"]
    for name, arm in document["arms"].items():
        assert arm["failed"] == 0 and arm["requests"] > 0, name
        assert arm["output_tokens"] == 8 * arm["requests"], name
        assert "Paris" in arm["answer"], name
        assert arm["tokens_per_s"] == pytest.approx(
            (arm["rounds_tokens_per_s"][0] * arm["rounds_tokens_per_s"][1]) ** 0.5
        )
        for number in (1, 2):
            assert strict(out / name / f"round-{number}" / "run.json")["counts"]["failed"] == 0
    total = document["total"]
    assert total == pytest.approx(
        document["arms"]["vllm-4"]["tokens_per_s"] / document["arms"]["serial"]["tokens_per_s"], rel=1e-9
    )
    for group in ("engine_first", "scheduling_first", "shapley"):
        first, second = document[group].values()
        assert first * second == pytest.approx(total, rel=1e-9)
    account = document["static_account"]
    assert account["product"] == pytest.approx(
        account["rows"] * account["live"] * account["step"] * account["decode"], rel=1e-9
    )
    assert 1 <= account["rows"] <= 4 and 0 < account["live"] <= 1
    # The counters and the client's clock must tell one story; how well, benchmarks say: here the machine may be busy.
    assert abs(account["unexplained"]) < 0.5
    assert "baseline: serial" in result.stdout and "vllm-4" in result.stdout
    assert "</html>" in (out / "report.html").read_text()

"""Reports compared whole with the files in golden/. After a wanted change: UPDATE_GOLDEN=1 pytest tests/test_report.py,
then read the difference."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadgen import run_folder
from loadgen.metrics import summarize
from loadgen.options import Slo, UsageError
from loadgen.other_tools import TOOLS, reexpress
from loadgen.record import FailureKind, Phase, Run
from loadgen.report import csv_report, main, number, ratio, text_report, tool_report
from tests.arms import batched, continuous
from tests.runs import failed, make_run, ns, record

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{name} differs: UPDATE_GOLDEN=1 rewrites it"


def document(run: Run, slo: Slo | None = None, validity: dict[str, Any] | None = None) -> dict[str, Any]:
    return run_folder.make_document(run, summarize(run, slo or Slo()), validity)


def open_loop() -> Run:
    """20 arrivals 50 ms apart; every fifth fails; the server counts 100 of 128 prompt tokens; a cold first request."""
    records = [record(0, -2000, [-1200, -1180], phase=Phase.COLD, output_tokens=2)]
    records.append(record(1, -900, [-700, -680], phase=Phase.WARMUP, output_tokens=2))
    for i in range(20):
        at = 50.0 * i
        if i % 5 == 4:
            kind, detail = (FailureKind.STATUS, "503: busy") if i < 15 else (FailureKind.CUT_OFF, "after 1 events")
            records.append(failed(i, at, at + 20, kind, detail, status=503, token_ms=[at + 15] if i >= 15 else []))
        else:
            token_ms = [at + 40 + i + 20 * k for k in range(8)]
            records.append(
                record(i, at, token_ms, sent_ms=at + 0.25, output_tokens=8, prompt_tokens=100, asked_input_tokens=128)
            )
    span = {"low": 128, "high": 128}
    options = {"url": "http://127.0.0.1:8000", "rate": 20.0, "arrival": "constant", "headers": {}, "concurrency": None}
    options |= {"trace": None, "input_tokens": span, "output_tokens": {"low": 8, "high": 8}}
    options |= {"slo": {"ttft_ms": 50.0, "tpot_ms": None, "e2e_ms": None}}
    server = {"url": "http://127.0.0.1:8000", "model": "SmolLM2-135M", "owned_by": "vllm", "version": "0.32.0"}
    return make_run(records, options=options, server=server)


def test_one_run() -> None:
    validity = {
        "valid": False,
        "reasons": [{"what": "the client used 99% of a core (limit 95%)", "remedy": "use --workers 2 or more"}],
        "warnings": [{"what": "a note without a remedy", "remedy": ""}],
    }
    golden("one_run.txt", text_report(document(open_loop(), Slo(ttft_ms=50), validity)) + "\n")


def test_several_runs() -> None:
    runs = {"serial": batched(24, 1, 8), "static": batched(fail_every=15), "continuous": continuous()}
    golden("several_runs.txt", text_report([document(run) for run in runs.values()], list(runs)) + "\n")


def test_nothing_succeeded() -> None:
    run = make_run([failed(i, 0, 1, FailureKind.REFUSED, "[Errno 111]", sent_ns=None) for i in range(20)])
    golden("nothing_succeeded.txt", text_report(document(run)) + "\n")


def test_lines_fit_a_terminal() -> None:
    for text in (text_report(document(open_loop(), Slo(ttft_ms=50))), text_report([document(continuous())] * 2)):
        assert max(map(len, text.splitlines())) <= 115


def test_interrupted() -> None:
    run = make_run([record(1, 0, [10, 20], output_tokens=2)], interrupted=True, end_ns=ns(100), unfinished=3, skipped=6)
    text = text_report(document(run))
    assert text.startswith("interrupted: ") and "4 started: 1 ok, 0 failed, 3 unfinished, 6 skipped" in text


@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools(tool: str) -> None:
    golden(f"as_{tool}.txt", tool_report(reexpress(open_loop(), tool)) + "\n")


def test_one_answer_in_five_definitions() -> None:
    """One chat answer: slot at 0, sent at 10, role-only event at 100, tokens at 400, 450, 500 (usage 3), [DONE] at 520.

    loadgen    ttft 400 (from the plan), tpot (500 - 400) / 2 = 50
    vllm       ttft 100 - 10 = 90, tpot (500 - 10 - 90) / 2 = 200, itl 300, 50, 50
    guidellm   ttft 390, itl 50, tpot (500 - 10) / 3 = 163.33, latency 510 ms
    aiperf     ttft 390, itl 50, latency 490 ms, second token 50 after the first
    sglang     ttft 390, 3 tokens asked for: tpot (520 - 10 - 390) / 2 = 60
    """
    one = record(1, 0, [400, 450, 500], sent_ms=10, end_ms=520, output_tokens=3, first_event_ns=ns(100))
    run = make_run([one], options={"endpoint": "chat", "concurrency": 1})
    ours = summarize(run)["metrics"]
    assert (ours["ttft_ms"]["mean"], ours["tpot_ms"]["mean"]) == (400, 50)
    vllm, guidellm, aiperf, sglang = (
        reexpress(run, tool)["metrics"] for tool in ("vllm", "guidellm", "aiperf", "sglang")
    )
    assert (vllm["mean_ttft_ms"], vllm["mean_tpot_ms"], vllm["mean_e2el_ms"]) == (90, 200, 490)
    assert vllm["mean_itl_ms"] == pytest.approx(400 / 3)
    assert guidellm["time_to_first_token_ms.p50 (ms)"] == 390
    assert guidellm["inter_token_latency_ms.p50 (ms)"] == 50
    assert guidellm["time_per_output_token_ms.p50 (ms)"] == pytest.approx(490 / 3)
    assert guidellm["request_latency.avg (s)"] == pytest.approx(0.51)
    assert (aiperf["time_to_first_token.avg (ms)"], aiperf["inter_token_latency.avg (ms)"]) == (390, 50)
    assert (aiperf["request_latency.avg (ms)"], aiperf["time_to_second_token.avg (ms)"]) == (490, 50)
    assert aiperf["output_token_throughput_per_user.avg (tokens/s/user)"] == 20
    assert (sglang["mean_ttft_ms"], sglang["mean_tpot_ms"], sglang["mean_e2e_latency_ms"]) == (390, 60, 510)


def test_sglang_takes_the_asked_length_for_the_real_one() -> None:
    # 5 tokens came where 64 were asked for: 64 "output tokens" there, 5 here
    one = record(1, 0, [100, 150, 200, 250, 300], output_tokens=5, asked_output_tokens=64)
    assert reexpress(make_run([one]), "sglang")["metrics"]["total_output"] == 64
    assert reexpress(make_run([one]), "vllm")["metrics"]["total_output_tokens"] == 5


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "records", [[], [failed(1, 0, 1, FailureKind.REFUSED, "")], [record(1, 0, [5], output_tokens=1)]]
)
def test_other_tools_without_values(tool: str, records: list[Any]) -> None:
    result = reexpress(make_run(records), tool)
    json.dumps(result, allow_nan=False)
    tool_report(result)


def test_unknown_tool() -> None:
    with pytest.raises(UsageError, match="vllm, guidellm, aiperf, sglang, not 'wrk'"):
        reexpress(make_run([]), "wrk")


def test_csv_holds_every_number() -> None:
    doc = document(open_loop(), Slo(ttft_ms=50))
    rows = list(csv.DictReader(io.StringIO(csv_report([doc, doc], ["a", "b"]))))
    values = {(r["run"], r["metric"], r["statistic"]): r["value"] for r in rows}
    assert len(values) == len(rows) and {r["run"] for r in rows} == {"a", "b"}
    assert (
        values["a", "ok", "count"] == "16" and float(values["b", "ttft_ms", "p50"]) == doc["metrics"]["ttft_ms"]["p50"]
    )
    assert values["a", "ttft_ms_failures_as_infinity", "p99"] == ""  # no value, never 0 and never NaN
    assert float(values["a", "requests_per_s", "value"]) == doc["metrics"]["requests_per_s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.0, "0"), (7, "7"), (0.0123, "0.012"), (1.23456, "1.235"), (12.3456, "12.35")]
    + [(999.96, "1000.0"), (1234.5, "1234"), (1e6, "1000000"), (-12.3456, "-12.35")],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_ratio() -> None:
    assert [ratio(5, 2), ratio(1, 200), ratio(None, 1), ratio(1, 0), ratio(0, 2)] == [
        "2.50x",
        "0.005x",
        "-",
        "-",
        "0.00x",
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, run in (("a", open_loop()), ("b", continuous(8, 4, 4))):
        run_folder.save(tmp_path / name, run, summarize(run))
    a, b = tmp_path / "a", tmp_path / "b"

    def output(*folders: Path, **options: Any) -> str:
        assert main(folders, **options) == 0
        return capsys.readouterr().out

    assert output(a) == text_report(run_folder.load_document(a)) + "\n"
    assert "b / a" in output(a, b)
    assert json.loads(output(a, as_json=True)) == run_folder.load_document(a)
    assert [d["format"] for d in json.loads(output(a, b, as_json=True))] == ["loadgen.run/1"] * 2
    assert output(a, as_csv=True).startswith("run,metric,statistic,value\na,started,count,20\n")
    assert "time_to_first_token" in output(a, as_tool="aiperf")
    assert json.loads(output(a, as_tool="vllm", as_json=True))["metrics"]["completed"] == 16
    assert output(a, b, html=tmp_path / "x.html").strip() == str(tmp_path / "x.html")
    assert "<h2>Throughput against latency</h2>" in (tmp_path / "x.html").read_text()
    with pytest.raises(UsageError, match="not a run folder"):
        main([tmp_path / "missing"])
    with pytest.raises(UsageError, match="at least one"):
        main([])

"""Flags: what is refused says which flag and which range, in one line; what is taken ends in Options."""

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli import cli, options_from
from loadgen.options import Options, Slo, Span


def parse(*args: str, monkeypatch: pytest.MonkeyPatch) -> Options:
    """The Options that `loadgen ARGS` would run with."""
    seen: list[Options] = []
    import loadgen.run

    monkeypatch.setattr(loadgen.run, "run_and_report", lambda options: seen.append(options) or 0)
    cli.main(list(args), standalone_mode=False)
    return seen[0]


def command(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadgen", *args], capture_output=True, text=True, timeout=60, cwd=cwd, check=False
    )


def test_flags_without_a_command_are_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse("--concurrency", "64", monkeypatch=monkeypatch)
    assert options == parse("run", "--max-concurrency", "64", monkeypatch=monkeypatch)
    assert options.concurrency == 64 and options.temperature == 0 and not options.stop_at_eos


def test_values_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(
        "--request-rate", "8", "--num-prompts", "9", "--arrival", "gamma", "--burstiness", "0.5",
        "--input-tokens", "10:20", "--output-tokens", "7", "--slo", "ttft=500ms,e2e=10s", "--duration", "2m",
        "--idle-timeout", "500ms", "--request-timeout", "0", "--header", "X-A=b=c", "--extra-body", '{"top_p": 0.5}',
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert (options.rate, options.requests, options.burstiness) == (8, 9, 0.5)
    assert (options.input_tokens, options.output_tokens) == (Span(10, 20), Span(7, 7))
    assert options.slo == Slo(ttft_ms=500, e2e_ms=10_000)
    assert (options.duration_s, options.idle_timeout_s, options.request_timeout_s) == (120, 0.5, None)
    assert options.headers == {"X-A": "b=c"} and options.extra_body == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--concurrency", "0"], ["--concurrency", "x>=1"]),
        (["--concurrency", "many"], ["--concurrency", "many"]),
        (["--rate", "-1"], ["--rate", "x>0"]),
        (["--concurrency", "1", "--output-tokens", "5:2"], ["--output-tokens", "1 <= LO <= HI", "5:2"]),
        (["--concurrency", "1", "--slo", "ttft=5"], ["--slo", "ttft=500ms", "ttft=5"]),
        (["--concurrency", "1", "--duration", "0"], ["--duration", "above 0"]),
        (["--concurrency", "1", "--temperature", "3"], ["--temperature", "0<=x<=2"]),
        (["--concurrency", "1", "--nonsense"], ["--nonsense"]),
        (["--concurrency", "1", "--url", "ftp://x"], ["--url", "http://127.0.0.1:8000"]),
        (["--concurrency", "1", "--extra-body", "[1]"], ["--extra-body", "JSON object"]),
        # what would be ignored is refused
        (["--requests", "5"], ["--concurrency", "--rate", "--trace"]),
        (["--concurrency", "1", "--arrival", "poisson"], ["--arrival", "--rate"]),
        (["--rate", "1", "--burstiness", "2"], ["--burstiness", "gamma"]),
        (["--concurrency", "1", "--speedup", "2"], ["--speedup", "--trace"]),
        (["--concurrency", "1", "--endpoint", "chat", "--prompt-kind", "ids"], ["--prompt-kind", "completions"]),
        (["--concurrency", "1", "--input-tokens", "8", "--shared-prefix-tokens", "8"], ["--shared-prefix-tokens", "8"]),
        (["--concurrency", "1", "--trace", "/nonexistent"], ["--trace", "/nonexistent"]),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line_that_names_it(args: list[str], words: list[str]) -> None:
    result = command(*args)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in ["loadgen: ", *words]:
        assert word in result.stderr


def test_no_server_is_one_line_with_the_address() -> None:
    result = command("--concurrency", "1", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert result.returncode == 2
    assert result.stderr.strip().splitlines() == [
        "loadgen: no server at http://127.0.0.1:9 (nobody listens there): start one, or give its address with --url"
    ]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    result = command("--concurrency", "1", "--out", str(tmp_path))
    assert result.returncode == 2 and "--out" in result.stderr and "not empty" in result.stderr


def test_help_is_readable_without_a_server() -> None:
    assert "loadgen compare A=URL B=URL" in command("--help").stdout
    text = command("run", "--help").stdout
    for flag in ("--concurrency", "--rate", "--trace", "--slo", "--seed", "--out"):
        assert flag in text
    assert command("--version").stdout.startswith("loadgen, version")


def test_starting_needs_no_heavy_library() -> None:
    """A run imports neither torch, transformers nor aiohttp's client: start-up is a fraction of a second."""
    code = (
        "import sys, loadgen.run, loadgen.cli; "
        "print([m for m in ('torch', 'transformers', 'plotly', 'aiohttp', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_options_from_nothing_but_a_load() -> None:
    assert options_from({"concurrency": 3}) == Options(concurrency=3)

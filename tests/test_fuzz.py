"""Every fuzz target runs briefly, over cases that are always the same; what fuzzing has found stays found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.http1 import Deframer, DoneScanner, Framing, NotHttp
from tests import fuzz


@pytest.mark.parametrize(
    ("target", "cases"), [("stream", 250), ("http", 600), ("exchange", 60), ("trace", 1500), ("body", 4000)]
)
def test_no_finding(target: str, cases: int) -> None:
    assert fuzz.run(target, iter(range(cases))) == (cases, {})


def test_the_same_number_is_the_same_case_and_a_finding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def target(rng: fuzz.Rng) -> None:
        seen.append(rng.random())
        assert seen[-1] < 0.5, "half of the cases"

    monkeypatch.setitem(fuzz.TARGETS, "it", target)
    cases, findings = fuzz.run("it", iter(range(50)))
    again = fuzz.run("it", iter(range(50)))
    assert seen[:50] == seen[50:] and again == (cases, findings)
    (number, finding), *others = findings.items()
    assert not others and seen[number] >= 0.5 and finding.startswith("AssertionError at test_fuzz.py:")
    with pytest.raises(AssertionError, match="half of the cases"):
        fuzz.case("it", number)


def test_a_hang_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(rng: fuzz.Rng) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "HANG_S", 0.05)
    monkeypatch.setitem(fuzz.TARGETS, "it", target)
    cases, findings = fuzz.run("it", iter(range(1)))
    assert cases == 1 and findings[0].startswith("Hang at ")


def test_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--target", "body", "--seconds", "0.2"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("body ") and "0 findings" in result.stdout


# ---------------------------------------------------------------- found by it


def test_done_inside_a_line_ends_nothing_however_it_is_cut() -> None:
    """A window of the last 32 bytes that begins in the middle of a line is no beginning of a line."""
    body = b"data: x" * 4 + b"data: [DONE]\n\n"
    for size in range(1, len(body)):
        scanner = DoneScanner()
        assert not any(scanner.feed(body[at : at + size]) for at in range(0, len(body), size)), size


def test_the_body_in_front_of_a_broken_chunk_is_kept_however_it_is_cut() -> None:
    raw = b"3\r\nabc\r\n2\r\nde\r\nno size\r\n"
    for size in range(1, len(raw) + 1):
        deframer, body = Deframer(Framing.CHUNKED), b""
        with pytest.raises(NotHttp) as caught:
            for at in range(0, len(raw), size):
                body += deframer.feed(raw[at : at + size])
        assert body + caught.value.before == b"abcde"

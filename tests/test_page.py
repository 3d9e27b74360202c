"""report.html in a real browser, and its SVG as data. The browser tests need `chromium` (apt install chromium)."""

from __future__ import annotations

import re
import shutil
import subprocess
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from loadgen import run_folder
from loadgen.metrics import summarize
from loadgen.options import UsageError
from loadgen.page import make_page, write_page
from loadgen.pictures import Arm, percentile_curve
from loadgen.record import FailureKind, Run
from tests.arms import batched, continuous
from tests.runs import failed, make_run, ns, record

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH: apt install chromium")


def arm(run: Run, name: str = "a", colour: int = 0) -> Arm:
    return Arm(name, run_folder.make_document(run, summarize(run)), run, colour)


def three_arms() -> list[Arm]:
    runs = {"serial": batched(24, 1, 8), "static": batched(fail_every=15), "continuous": continuous()}
    return [arm(run, name, i) for i, (name, run) in enumerate(runs.items())]


def browse(page: Path, *flags: str) -> tuple[str, str]:
    """(DOM after loading, console messages) in a headless browser without network."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def measured_in_browser(tmp_path: Path, page: str, script: str, *flags: str) -> str:
    """What a script says about the page: the test's copy alone carries it, and leaves out the policy against it."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    page = page.replace("</body>", f"<script>document.title = {script};</script></body>")
    (tmp_path / "measured.html").write_text(page)
    dom, _ = browse(tmp_path / "measured.html", *flags)
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    return found[1]


@needs_browser
def test_the_browser_shows_every_section_and_complains_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text(make_page(three_arms()))
    dom, console = browse(tmp_path / "p.html")
    assert console == ""
    for heading in (
        "Figures",
        "Latency distributions",
        "Throughput against latency",
        "Requests over time",
        "Load over time",
    ):
        assert f"<h2>{heading}</h2>" in dom
    assert dom.count("<svg") == 3 + 3 + 3 + 5  # distributions, throughput, timelines, series


@needs_browser
@pytest.mark.parametrize("width", [500, 1400])  # 500 is the narrowest window that headless Chromium makes
def test_no_sideways_scrolling(tmp_path: Path, width: int) -> None:
    script = "document.documentElement.scrollWidth + ' ' + innerWidth"
    text = measured_in_browser(tmp_path, make_page(three_arms()), script, f"--window-size={width},900")
    needed, there = map(int, text.split())
    assert needed <= there


@needs_browser
def test_light_and_dark(tmp_path: Path) -> None:
    page = make_page([arm(continuous(16, 4, 4))])
    script = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.querySelector('text')).fill"
    light = measured_in_browser(tmp_path, page, script, "--blink-settings=preferredColorScheme=1")
    dark = measured_in_browser(tmp_path, page, script, "--blink-settings=preferredColorScheme=0")
    assert light.startswith("rgb(255, 255, 255)") and dark.startswith("rgb(20, 23, 27)")
    assert light != dark and dark.endswith("rgb(230, 233, 237)")  # light text on dark


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def bars(svg: ElementTree.Element, css: str) -> list[tuple[float, float]]:
    """(left, right) of the bars of a class."""
    rects = [rect for rect in svg.iter("rect") if rect.get("class") == css]
    return [(float(r.get("x", "")), float(r.get("x", "")) + float(r.get("width", ""))) for r in rects]


def test_static_and_continuous_batching_look_different() -> None:
    """Static: rows of a batch of 8 begin their tokens together. Continuous: each at its own time but for the start."""
    begins = {}
    for name, run in (("static", batched(64, 8, 16)), ("continuous", continuous(64, 16, 16))):
        svg = next(s for s in svgs(make_page([arm(run)])) if s.get("class") == "timeline")
        begins[name] = [left for left, _ in bars(svg, "tokens")]
    assert len(begins["static"]) == len(begins["continuous"]) == 64
    assert len(set(begins["static"])) == 64 / 8
    assert len(set(begins["continuous"])) > 40


def test_bars_are_where_the_stamps_are() -> None:
    # asked at 0, sent at 100, first byte at 200, token at 400, last at 1000 ms: with 1 s over 876 units from x = 52
    one = record(1, 0, [400, 700, 1000], sent_ms=100, first_byte_ns=ns(200), output_tokens=3)
    svg = next(s for s in svgs(make_page([arm(make_run([one]))])) if s.get("class") == "timeline")
    unit = 940 - 12 - 52
    for css, start, end in (("wait", 0, 0.1), ("queue", 0.1, 0.2), ("prefill", 0.2, 0.4), ("tokens", 0.4, 1.0)):
        assert bars(svg, css) == [(pytest.approx(52 + unit * start, abs=0.1), pytest.approx(52 + unit * end, abs=0.1))]
    stroke = next(p for p in svg.iter("path") if p.get("class") == "stroke")
    assert len(re.findall("M", stroke.get("d", ""))) == 3


def test_the_tail_of_a_curve_stops_where_failures_begin() -> None:
    # 90 values 1..90 and 10 failures: p50 of all 100 is the 51st value, the line ends at 89 of 100
    x, y = percentile_curve(np.arange(1.0, 91.0), failures=10)
    assert (x[0], y[0]) == (0, 1) and x[-1] == 0.89 and y[-1] == 90
    x, y = percentile_curve(np.arange(1.0, 100_001.0))
    assert len(x) <= 240 and (x[-1], y[-1]) == (1 - 1e-5, 100_000)
    x, y = percentile_curve(np.array([7.0]))
    assert x.tolist() == [0] and y.tolist() == [7]


def test_nothing_is_loaded_and_nothing_runs() -> None:
    page = make_page(three_arms())
    assert "default-src 'none'" in page and "<script" not in page and "@import" not in page
    assert not re.search(r"<[^>]*\s(src|href|srcset|data|action)\s*=|url\(", page)


def test_what_servers_and_users_say_is_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'"
    run = make_run(
        [failed(1, 0, 5, FailureKind.STATUS, evil, status=500), record(2, 0, [5, 9], output_tokens=2)],
        server={"url": "http://x", "model": evil, "version": evil, "owned_by": evil},
    )
    page = make_page([arm(run, evil)], texts={evil: evil}, title=evil)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    svgs(page)  # well-formed


def test_figures_name_their_baseline() -> None:
    page = make_page(three_arms())
    row = next(r for r in page.split("<tr>") if "output tokens <span class='unit'>1/s" in r)
    assert row.count("&times; serial") == 2
    row = next(r for r in page.split("<tr>") if ">TTFT p99 " in r)
    assert row.count("too few") == 3  # 24, 60 and 64 requests do not know their p99


def test_a_sweep_is_a_line_and_other_servers_are_points() -> None:
    """Three loads of one server: one line through three points. The same load twice, or another server: points."""

    def at(slots: int, port: int = 8002) -> Run:
        return continuous(32, slots, slots, port)

    for runs, lines in (([at(2), at(4), at(8)], 1), ([at(4), at(4)], 0), ([at(2), at(4, 9000)], 0)):
        page = make_page([arm(run, f"r{i}", i) for i, run in enumerate(runs)])
        section = page.split("<h2>Throughput against latency</h2>")[1].split("</section>")[0]
        first = svgs(section)[0]
        assert len(list(first.iter("circle"))) == len(runs)
        assert len([p for p in first.iter("path") if "line" in p.get("class", "")]) == lines


def test_comparison_table() -> None:
    def entry(**changes: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("ratio", "low", "high", "verdict", "detectable", "rounds_needed"))
        return {**empty, "value": 10.0, **changes}

    other = entry(value=25.0, ratio=2.5, low=2.25, high=2.75, verdict="faster", detectable=1.1, rounds_needed=3)
    comparison = {
        "baseline": "a",
        "arms": ["a", "b"],
        "rounds": [1, 2, 3, 4],
        "metrics": {"output_tokens_per_s": {"a": entry(), "b": other}},
        "different_work": ["b did 10 output tokens, a 20"],
    }
    page = make_page(three_arms()[:1], comparison=comparison)
    for text in (
        "2.500</b> &times; a",
        "2.250 to 2.750",
        "faster",
        "1.100 &times;",
        "3 rounds would settle it",
        "4 rounds",
    ):
        assert text in page, text
    assert page.index("b did 10 output tokens, a 20") < page.index("2.500</b>"), "before any ratio"


@pytest.mark.parametrize(
    "records",
    [[], [failed(1, 0, 0, FailureKind.REFUSED, "", sent_ns=None)], [record(1, 0, [], output_tokens=0, end_ms=0)]],
)
def test_runs_without_anything_to_draw(records: list[Any]) -> None:
    for count in (1, 2):
        svgs(make_page([arm(make_run(records), f"r{i}", i) for i in range(count)]))


def test_a_large_run_makes_a_small_page() -> None:
    """50,000 requests of 64 tokens: what is drawn is bounded, and the page says what it left out."""
    stamps = array("q", range(ns(10), ns(10) + 64 * 20_000_000, 20_000_000))
    one = record(1, 0, [10, 20], output_tokens=64, event_stamps_ns=stamps, last_token_ns=stamps[-1], end_ns=stamps[-1])
    page = make_page([arm(make_run([one] * 50_000))])
    assert len(page) < 500_000
    assert "The first 120 of 50000 requests." in page


def test_write_page(tmp_path: Path) -> None:
    run = continuous(8, 4, 4)
    run_folder.save(tmp_path / "r", run, summarize(run))
    write_page([tmp_path / "r"], tmp_path / "r" / "report.html")
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")
    assert not [p for p in (tmp_path / "r").iterdir() if p.name.startswith(".")]
    with pytest.raises(UsageError, match="could not be written"):
        write_page([tmp_path / "r"], tmp_path / "missing" / "report.html")
    with pytest.raises(UsageError, match="not a run folder"):
        write_page([tmp_path], tmp_path / "report.html")

"""Scrapes against a real HTTP server on loopback: the reading, the clock, and everything that must not fail a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadgen.clock import now_ns
from loadgen.scrape import Scraper, parse

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %d
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.001",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{model_name="m"} 2.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 0.5
"""


@contextmanager
def server(status: int = 200, text: bytes = VLLM) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server whose counter grows by 10 with every read; gives its address and the headers it saw."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({"path": self.path, **dict(self.headers)})
            body = text % (10 * len(seen)) if b"%d" in text else text
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", seen
    finally:
        httpd.shutdown()
        httpd.server_close()


def scrape(url: str, seen: list[dict[str, str]] | None = None, reads: int = 0) -> list[dict[str, Any]]:
    async def go() -> list[dict[str, Any]]:
        scraper = Scraper(period_s=0.01)
        scraper.start(url, {"Authorization": "Bearer k"})
        while seen is not None and len(seen) < reads:
            await asyncio.sleep(0.005)
        return await scraper.stop()

    return asyncio.run(go())


def test_lines_are_on_the_clients_clock_and_end_with_the_final_counters() -> None:
    before = now_ns()
    with server() as (url, seen):
        lines = scrape(url, seen, reads=3)
    stamps = [line["t_ns"] for line in lines]
    assert stamps == sorted(stamps) and before < stamps[0] and stamps[-1] <= now_ns()
    assert seen[0]["path"] == "/metrics" and seen[0]["Authorization"] == "Bearer k"
    # labels summed (3 + 4), shares averaged ((0.25 + 0.75) / 2), no buckets, no creation times
    assert {k: v for k, v in lines[0].items() if k != "t_ns" and not k.startswith("gpu")} == {
        "vllm:num_requests_running": 7.0,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prefix_cache_hits_total": 10.0,
        "vllm:time_to_first_token_seconds_count": 2.0,
        "vllm:time_to_first_token_seconds_sum": 0.5,
    }
    assert lines[-1]["vllm:prefix_cache_hits_total"] == 10.0 * len(seen)  # stop() reads once more


@pytest.mark.parametrize("status", [404, 401, 500])
def test_a_server_without_metrics_gives_no_lines(status: int) -> None:
    with server(status) as (url, _):
        lines = scrape(url)
    assert [line for line in lines if any(not key.startswith("gpu") for key in line if key != "t_ns")] == []


def test_no_server_no_url_no_start() -> None:
    for url in ("http://127.0.0.1:9", "http://", "nonsense"):
        assert all(set(line) <= {"t_ns"} | {k for k in line if k.startswith("gpu")} for line in scrape(url))
    assert asyncio.run(Scraper().stop()) == []


def test_text_that_is_no_metrics() -> None:
    assert parse(b"<html>hello</html>\n") == {}
    assert parse(b"") == {}
    assert parse(b"a_total 1\nb_total NaN\nc +Inf\n") == {"a_total": 1.0}
    assert parse(b"\xff\xfe\x00") == {}

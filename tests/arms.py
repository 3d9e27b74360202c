"""Synthetic runs of the three kinds of server, for pictures: serial, static batches, continuous batching."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from loadgen.record import ClientUsage, FailureKind, Phase, RequestRecord, Run
from tests.runs import START_NS, failed, make_run, record

STEP_MS = 30.0  # one decode step of one row; a wider step costs 5 % a row more


def _lengths(n: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(4).integers(12, 49, n)]


def _run(records: list[RequestRecord], slots: int, port: int, gauges: list[dict[str, Any]]) -> Run:
    before = [record(9000, -3000, [-2000, -1970], phase=Phase.COLD, output_tokens=2)]
    before += [record(9001 + i, -900, [-700, -650], phase=Phase.WARMUP, output_tokens=2) for i in range(2)]
    usage = ClientUsage(
        cpu_s=0.4, wall_s=10.0, loop_lag_ns=(1000,), transport="wire", kernel_stamps=True, max_in_flight=slots
    )
    return make_run(
        before + records,
        usage=usage,
        options={"url": f"http://127.0.0.1:{port}", "concurrency": slots, "rate": None, "trace": None, "headers": {}},
        server={"url": f"http://127.0.0.1:{port}", "model": "SmolLM2-135M", "owned_by": "loadgen-reference"},
        scrapes=tuple(gauges),
    )


def _gauge(ms: float, running: float, waiting: float, kv: float) -> dict[str, Any]:
    return {
        "t_ns": START_NS + round(ms * 1e6),
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": waiting,
        "vllm:kv_cache_usage_perc": kv,
    }


def batched(n: int = 64, width: int = 8, slots: int = 16, port: int = 8003, fail_every: int = 0) -> Run:
    """Static batches of `width`; width 1 is a serial server. Closed loop of `slots`."""
    lengths, records, gauges = _lengths(n), [], []
    ready = [(0.0, slot) for slot in range(slots)]  # when each slot asks for its next request
    free_ms, done = 0.0, 0
    while done < n:
        batch = [heapq.heappop(ready) for _ in range(min(width, n - done, len(ready)))]
        begin = max(free_ms, max(at for at, _ in batch))
        step = STEP_MS * (1 + 0.05 * (len(batch) - 1))
        longest = max(lengths[done : done + len(batch)])
        for row, (asked, slot) in enumerate(batch):
            number = done + row
            token_ms = [begin + 60 + step * k for k in range(lengths[number])]
            if fail_every and number % fail_every == fail_every - 1:
                records.append(failed(number, asked, begin + 5, FailureKind.STATUS, "503: busy", status=503))
                heapq.heappush(ready, (begin + 5, slot))
            else:
                records.append(record(number, asked, token_ms, output_tokens=lengths[number], first_byte_ns=None))
                heapq.heappush(ready, (token_ms[-1], slot))
        gauges.append(_gauge(begin, len(batch), slots - len(batch), len(batch) / slots))
        free_ms, done = begin + 60 + step * longest, done + len(batch)
    return _run(records, slots, port, gauges)


def continuous(n: int = 64, width: int = 16, slots: int = 16, port: int = 8002) -> Run:
    """Every slot's next request joins the running ones at the next step."""
    lengths, records, gauges = _lengths(n), [], []
    ready = [(0.0, slot) for slot in range(slots)]
    step = STEP_MS * (1 + 0.05 * (min(width, slots) - 1))
    for number in range(n):
        asked, slot = heapq.heappop(ready)
        first = asked + 60
        token_ms = [first + step * k for k in range(lengths[number])]
        records.append(record(number, asked, token_ms, output_tokens=lengths[number]))
        gauges.append(_gauge(asked, min(slots, n - number), 0, min(slots, n - number) / 40))
        heapq.heappush(ready, (token_ms[-1], slot))
    gauges.sort(key=lambda line: line["t_ns"])
    return _run(records, slots, port, gauges)

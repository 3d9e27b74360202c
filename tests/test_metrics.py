"""The definitions, on tables worked out by hand. Times in the tables are ms after the run's start."""

from __future__ import annotations

import json
import math
import time
from array import array
from typing import Any

import numpy as np
import pytest

from loadgen.metrics import LATENCIES, columns, distribution, latencies_ms, pooled_gaps_ms, summarize
from loadgen.options import Slo
from loadgen.record import FailureKind, Phase, RequestRecord
from tests.runs import failed, make_run, ns, record


def metrics_of(*records: RequestRecord, slo: Slo | None = None, **changes: Any) -> dict[str, Any]:
    result: dict[str, Any] = summarize(make_run(records, **changes), slo or Slo())["metrics"]
    return result


def test_role_only_event_is_not_the_first_token() -> None:
    # role event at 0 (a byte, no token), tokens at 400, 450, 500: ttft 400, gaps 50 and 50, tpot (500 - 400) / 2
    m = metrics_of(record(1, 0, [400, 450, 500], output_tokens=3, first_byte_ns=ns(0)))
    assert m["ttft_ms"]["mean"] == 400 and m["e2e_ms"]["mean"] == 500
    assert (m["gap_ms"]["n"], m["gap_ms"]["min"], m["gap_ms"]["max"]) == (2, 50, 50)
    assert m["tpot_ms"]["mean"] == 50


def test_four_tokens_an_event() -> None:
    # five events at 200, 280, ... 520 with 20 tokens: tpot (520 - 200) / 19 = 16.842, gaps per event [80] * 4,
    # 20 tokens / 5 events = 4 tokens an event, 20 tokens / 0.52 s = 38.46 tokens/s
    m = metrics_of(record(1, 0, [200, 280, 360, 440, 520], output_tokens=20))
    assert m["tpot_ms"]["mean"] == pytest.approx(320 / 19)
    assert (m["gap_ms"]["n"], m["gap_ms"]["mean"]) == (4, 80)
    assert m["tokens_per_event"] == 4
    assert m["output_tokens_per_s"] == pytest.approx(20 / 0.52)


def test_one_token_has_no_tpot_and_no_gap() -> None:
    m = metrics_of(record(1, 0, [120], output_tokens=1))
    assert m["ttft_ms"]["mean"] == m["e2e_ms"]["mean"] == 120
    for name in ("tpot_ms", "gap_ms"):
        assert m[name]["n"] == 0 and m[name]["mean"] is None and m[name]["p50"] is None


def half_fail() -> list[RequestRecord]:
    """B10b: ten requests one after another; every second one answers 500 at once, the others take 190 ms."""
    records = []
    for i in range(5):
        begin = 190 * i
        records.append(record(2 * i, begin, [begin + 100 + 10 * k for k in range(10)], output_tokens=10))
        records.append(failed(2 * i + 1, begin + 190, begin + 190, FailureKind.STATUS, "x", status=500))
    return records


def test_failures_are_counted_and_spoil_no_mean() -> None:
    # 5 x 190 ms = 0.95 s; 50 tokens / 0.95 s = 52.63 tokens/s; ttft 100 of n = 5, not 50 of n = 10
    summary = summarize(make_run(half_fail()))
    counts, m = summary["counts"], summary["metrics"]
    assert (counts["started"], counts["ok"], counts["failed"], counts["failures"]) == (10, 5, 5, {"status": 5})
    assert counts["failure_reasons"] == [{"kind": "status", "status": 500, "detail": "x", "n": 5}]
    assert (m["ttft_ms"]["n"], m["ttft_ms"]["mean"], m["e2e_ms"]["mean"]) == (5, 100, 190)
    assert m["output_tokens"] == 50 and m["window_s"] == pytest.approx(0.95)
    assert m["output_tokens_per_s"] == pytest.approx(50 / 0.95)
    assert m["error_share"] == 0.5


def test_failures_as_infinity_stand_beside() -> None:
    # type 7 position of p50 in 10 values: 4.5, between the largest success and the first infinity: infinite, null.
    # With 5 successes and 4 failures it is position 4: the largest success.
    m = summarize(make_run(half_fail()))["metrics"]
    assert m["ttft_ms_failures_as_infinity"] == {"n": 10, **dict.fromkeys(("p50", "p90", "p95", "p99", "p999"))}
    m = summarize(make_run(half_fail()[:-1]))["metrics"]
    assert m["ttft_ms_failures_as_infinity"]["p50"] == 100
    assert m["ttft_ms_failures_as_infinity"]["p90"] is None


def test_partial_tokens_of_failures_are_apart() -> None:
    # B07: four requests die after three tokens: 0 output tokens of successes, 12 partial ones
    failure = {"status": 200, "token_ms": [50, 70, 90]}
    records = [failed(i, 0, 90, FailureKind.STREAM_ERROR, "500: engine stopped", **failure) for i in range(4)]
    summary = summarize(make_run(records))
    m = summary["metrics"]
    assert m["output_tokens"] == 0 and m["output_tokens_per_s"] == 0 and m["partial_tokens_of_failures"] == 12
    assert summary["counts"]["failure_reasons"][0]["n"] == 4
    assert m["ttft_ms"]["n"] == 0 and m["ttft_ms"]["p50"] is None


@pytest.mark.parametrize("records", [[], [failed(i, 0, 1, FailureKind.REFUSED, "", sent_ms=0) for i in range(20)]])
def test_nothing_succeeded(records: list[RequestRecord]) -> None:
    summary = summarize(make_run(records), Slo(ttft_ms=1))
    text = json.dumps(summary, allow_nan=False)  # raises on NaN
    assert summary["counts"]["ok"] == 0 and summary["counts"]["failed"] == len(records)
    assert summary["metrics"]["goodput_per_s"] in (None, 0) and "ttft_ms" in text
    assert all(summary["metrics"][name]["p99"] is None for name in LATENCIES if name != "lag_ms")


def test_empty_answer_is_ok_without_times() -> None:
    empty = record(2, 0, [], output_tokens=0, end_ms=30)
    m = metrics_of(record(1, 0, [10, 20], output_tokens=2), empty)
    assert m["ttft_ms"]["n"] == m["e2e_ms"]["n"] == 1 and m["requests_per_s"] == pytest.approx(2 / 0.030)


def test_latency_counts_from_the_plan_and_from_the_send() -> None:
    # planned at 0, sent at 25 (a full slot), token at 40 and 50
    m = metrics_of(record(1, 0, [40, 50], sent_ms=25, output_tokens=2))
    assert (m["ttft_ms"]["mean"], m["ttft_sent_ms"]["mean"]) == (40, 15)
    assert (m["e2e_ms"]["mean"], m["e2e_sent_ms"]["mean"]) == (50, 25)
    assert m["lag_ms"]["mean"] == 25


def test_gaps_do_not_cross_requests() -> None:
    gaps, offsets = pooled_gaps_ms(
        [record(1, 0, [10, 13]), record(2, 0, []), record(3, 0, [1000]), record(4, 0, [2000, 2001, 2004])]
    )
    assert gaps.tolist() == [3, 1, 3] and offsets.tolist() == [0, 1, 1, 1, 3]


def test_cold_and_warmup_enter_no_statistic() -> None:
    # the cold request takes 900 ms, two of warm-up overlap from -300 to -100
    records = [
        record(0, -2000, [-1100, -1090], phase=Phase.COLD, output_tokens=2),
        record(1, -300, [-250, -200], phase=Phase.WARMUP, output_tokens=2),
        record(2, -300, [-150, -100], phase=Phase.WARMUP, output_tokens=2),
        record(3, 0, [10, 20], output_tokens=2),
    ]
    summary = summarize(make_run(records))
    assert summary["metrics"]["ttft_ms"]["n"] == summary["counts"]["started"] == 1
    assert summary["metrics"]["window_s"] == 0.02
    assert (summary["cold"]["ttft_ms"], summary["cold"]["e2e_ms"]) == (900, 910)
    assert (summary["warmup"]["requests"], summary["warmup"]["took_s"]) == (2, 0.2)
    assert not any("warm-up" in w["what"] for w in summary["warnings"])


def test_no_warmup_says_so() -> None:
    summary = summarize(make_run([record(1, 0, [10, 20])]))
    assert summary["cold"] is None and summary["warmup"]["requests"] == 0
    assert any("no warm-up" in w["what"] for w in summary["warnings"])


def test_interrupted_run_divides_by_the_time_until_the_interrupt() -> None:
    # two answers over by 40 ms, interrupt at 400 ms with 3 in flight and 5 never sent: 4 tokens / 0.4 s
    records = [record(i, 0, [20, 40], output_tokens=2) for i in range(2)]
    summary = summarize(make_run(records, interrupted=True, end_ns=ns(400), unfinished=3, skipped=5))
    counts = summary["counts"]
    assert (counts["started"], counts["ok"], counts["failed"]) == (5, 2, 0)
    assert (counts["unfinished"], counts["skipped"]) == (3, 5)
    assert summary["metrics"]["output_tokens_per_s"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(), None),  # no limit, no goodput
        (Slo(ttft_ms=100), 2),  # 1 and 2; 3 is late, 4 failed, 5 never had a token
        (Slo(ttft_ms=100, tpot_ms=10), 2),  # 1 has tpot 10; 2 has a single token, so no tpot to miss
        (Slo(ttft_ms=100, tpot_ms=9.9), 1),
        (Slo(e2e_ms=105), 1),  # 2 alone
    ],
)
def test_goodput(slo: Slo, met: int | None) -> None:
    records = [
        record(1, 0, [100, 110], output_tokens=2),
        record(2, 0, [90], output_tokens=1),
        record(3, 0, [101, 111], output_tokens=2),
        failed(4, 0, 1, FailureKind.STATUS, "", status=503, token_ms=[1]),
        record(5, 0, [], output_tokens=0, end_ms=200),
    ]
    m = metrics_of(*records, slo=slo)
    assert m["slo_met"] == met
    assert m["goodput_per_s"] == (None if met is None else pytest.approx(met / 0.2))


def test_tokens_asked_beside_those_the_server_counted() -> None:
    # B16c: 1000 asked, 1100 counted; the rate uses 1100
    m = metrics_of(record(1, 0, [500, 1000], output_tokens=2, prompt_tokens=1100, asked_input_tokens=1000))
    assert (m["input_tokens_asked"], m["input_tokens"], m["input_tokens_per_s"]) == (1000, 1100, 1100)
    assert m["total_tokens_per_s"] == 1102


def test_tokens_without_usage_are_marked_estimated() -> None:
    m = metrics_of(record(1, 0, [10, 20, 30]), record(2, 0, [10, 20], output_tokens=2))
    assert (m["output_tokens"], m["output_tokens_estimated"]) == (5, 3)


def test_rates_of_an_open_loop() -> None:
    # five arrivals 100 ms apart: (5 - 1) / 0.4 s = 10/s offered; the last one sent 100 ms late: 4 / 0.5 s = 8/s
    records = [record(i, 100 * i, [1000], sent_ms=100 * i + (100 if i == 4 else 0)) for i in range(5)]
    m = metrics_of(*records, options={"rate": 10, "arrival": "constant"})
    assert (m["requested_per_s"], m["offered_per_s"], m["achieved_per_s"]) == (10, 10, 8)
    assert m["arrivals"]["asked"] == "constant" and m["arrivals"]["poisson_p_value"] is None
    closed = metrics_of(*records)
    assert closed["offered_per_s"] is None and closed["arrivals"] is None


def test_poisson_arrivals_are_told_from_constant_ones() -> None:
    poisson = np.cumsum(np.random.default_rng(5).exponential(10, 400))
    constant = np.arange(400) * 10.0
    p = {}
    for name, times in (("poisson", poisson), ("constant", constant)):
        records = [record(i, t, [t + 5]) for i, t in enumerate(times.tolist())]
        summary = summarize(make_run(records, options={"rate": 100, "arrival": "poisson"}))
        p[name] = summary["metrics"]["arrivals"]["poisson_p_value"]
        assert any("Poisson" in w["what"] for w in summary["warnings"]) == (name == "constant")
    assert p["poisson"] > 0.01 and p["constant"] < 1e-6


def test_too_few_samples_for_a_percentile() -> None:
    # A two-sided 95 % interval of the q quantile needs q^n <= 0.025: n >= 72 for p95, 368 for p99, 3688 for p999
    for n, too_few in (
        (5, {"p50", "p90", "p95", "p99", "p999"}),
        (100, {"p99", "p999"}),
        (400, {"p999"}),
        (4000, set()),
    ):
        d = distribution(np.arange(float(n)))
        assert set(d["too_few"]) == too_few, n
        for name in ("p50", "p90", "p95", "p99", "p999"):
            interval = d[f"{name}_interval"]
            assert (interval is None) == (name in too_few)
            assert interval is None or interval[0] <= d[name] <= interval[1]


def test_intervals_of_gaps_know_that_gaps_of_a_request_hang_together() -> None:
    """40 requests of 50 gaps, some requests slower than others: an interval that takes the 2000 gaps as independent
    misses the true median (of lognormal x exponential, from 4 million draws: 6.71 ms) in almost half of all runs."""
    generator = np.random.default_rng(7)
    grouped = pooled = 0
    for _ in range(200):
        gaps = np.repeat(generator.lognormal(0, 0.5, 40), 50) * generator.exponential(10, 2000)
        low, high = distribution(gaps, np.arange(41) * 50)["p50_interval"]
        grouped += low <= 6.71 <= high
        low, high = distribution(gaps)["p50_interval"]
        pooled += low <= 6.71 <= high
    assert grouped >= 180 and pooled <= 140


def test_all_latencies_have_every_key() -> None:
    m = metrics_of(record(1, 0, [10, 20], output_tokens=2))
    for name in LATENCIES:
        assert {"n", "mean", "p50", "p90", "p95", "p99", "p999", "min", "max"} <= set(m[name]), name


def test_absolute_stamps_lose_no_nanosecond() -> None:
    # 5e15 ns does not fit into a float64 with single ns: differences are taken as integers first
    one = record(1, 0, [10])
    table = columns([one])
    assert latencies_ms(table)["ttft_ms"][0] == 10.0
    assert math.isnan(latencies_ms(columns([failed(2, 0, 1, FailureKind.REFUSED, "")]))["ttft_ms"][0])


def test_a_hundred_thousand_requests() -> None:
    """100,000 x 64 events: nothing is quadratic, no Python loop over events. The limit is 20 times what it took."""
    begin = time.perf_counter()
    stamps = array("q", range(ns(10), ns(10) + 64 * 20_000_000, 20_000_000))
    shared = record(1, 0, [10, 20], output_tokens=64, event_stamps_ns=stamps, last_token_ns=stamps[-1])
    m = metrics_of(*[shared] * 100_000)
    assert m["gap_ms"]["n"] == 6_300_000 and m["gap_ms"]["p99"] == 20
    assert time.perf_counter() - begin < 40


def test_server_counters_grow_from_the_last_read_before_the_start() -> None:
    scrapes = (
        {"t_ns": ns(-2000), "a_total": 5.0, "b_total": 9.0, "g": 1.0},
        {"t_ns": ns(-500), "a_total": 8.0, "b_total": 9.0, "g": 2.0},
        {"t_ns": ns(500), "a_total": 9.0, "b_total": 1.0, "c_count": 3.0, "g": 3.0},
        {"t_ns": ns(900), "a_total": 18.0, "b_total": 2.0, "c_count": 7.0, "g": 4.0},
    )
    run = make_run([record(1, 0, [10])], scrapes=scrapes)
    # a: 18 - 8; b was restarted; c appeared in the run: 7 - 3; g is no counter
    assert summarize(run)["server_counters"] == {"a_total": 10.0, "c_count": 4.0}


@pytest.mark.parametrize(
    ("options", "changes", "hits", "warned"),
    [
        ({}, {}, 60.0, True),  # 60 of 100 prompt tokens by the server's counters
        ({}, {}, 1.0, False),
        ({"endpoint": "chat"}, {}, 40.0, False),  # the chat template
        ({"shared_prefix_tokens": 64}, {}, 60.0, False),  # asked for
        ({"trace": "t.jsonl"}, {}, 60.0, False),
        ({}, {"cached_tokens": 3}, 0.0, True),  # usage says 3 of 4
        ({}, {"cached_tokens": 0}, 60.0, False),  # usage knows better than counters that others raise, too
    ],
)
def test_a_warm_prefix_cache_is_told(options: Any, changes: Any, hits: float, warned: bool) -> None:
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    scrapes = tuple({"t_ns": ns(t), names[0]: hits * k, names[1]: 100.0 * k} for k, t in ((0, -1), (1, 900)))
    summary = summarize(make_run([record(1, 0, [10], **changes)], scrapes=scrapes, options=options))
    assert any("prefix cache" in w["what"] for w in summary["warnings"]) == warned


def test_failure_kinds_have_their_own_counts() -> None:
    kinds = [FailureKind.REFUSED, FailureKind.SILENCE, FailureKind.SILENCE]
    counts = summarize(make_run([failed(i, 0, 1, kind, "") for i, kind in enumerate(kinds)]))["counts"]
    assert counts["failures"] == {"refused": 1, "silence": 2}

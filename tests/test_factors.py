"""factors.py: the split, the account of a static batch and the roofline, with the arithmetic in comments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loadgen.factors import (
    REFERENCE,
    VLLM,
    Throughput,
    add_sums,
    batch_sums,
    roles,
    roofline,
    shares,
    split,
    static_account,
)
from loadgen.options import UsageError


def arm(name: str, streams: int, *rounds: float) -> Throughput:
    return Throughput(name, VLLM if name.startswith("vllm") else REFERENCE, name != "serial", streams, rounds)


BLOG = [arm("serial", 1, 34.4), arm("static-8", 8, 158.2), arm("vllm-1", 1, 75.7), arm("vllm-64", 64, 2442.0)]


def test_a_published_table_in_both_orders() -> None:
    """2442 / 34.4 = 71.0; 75.7 / 34.4 = 2.2, 2442 / 75.7 = 32.3; 158.2 / 34.4 = 4.6, 2442 / 158.2 = 15.4."""
    found = split(roles(BLOG))
    assert found["total"] == pytest.approx(70.99, abs=0.01)
    assert found["engine_first"] == {
        "engine": pytest.approx(2.2, abs=0.01),
        "scheduling": pytest.approx(32.26, abs=0.01),
    }
    assert found["scheduling_first"]["scheduling"] == pytest.approx(4.599, abs=0.001)
    assert found["scheduling_first"]["engine"] == pytest.approx(15.44, abs=0.01)
    assert found["interaction"] == pytest.approx(15.44 / 2.2006, abs=0.01)
    assert found["baseline"] == "serial" and found["roles"]["batched"] == "static-8"


def test_factors_multiply_to_the_total() -> None:
    generator = np.random.default_rng(3)
    for _ in range(100):
        rates = generator.lognormal(3, 2, 4)
        found = split(roles([arm(a.name, a.streams, rate) for a, rate in zip(BLOG, rates, strict=True)]))
        for group in ("engine_first", "scheduling_first", "shapley"):
            assert math.prod(found[group].values()) == pytest.approx(found["total"], rel=1e-12)
        orders = found["engine_first"]["engine"] * found["scheduling_first"]["scheduling"]
        assert orders * found["interaction"] == pytest.approx(found["total"], rel=1e-12)


def test_the_best_batched_reference_is_the_denominator() -> None:
    arms = [*BLOG, arm("static-64", 64, 700.0), arm("continuous-64", 64, 500.0)]
    assert roles(arms).batched.name == "static-64"


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (BLOG[1:], "serial"),
        ([BLOG[0], *BLOG[2:]], "static"),
        ([*BLOG[:2], BLOG[3]], "1 stream"),
        (BLOG[:3], "more than 1"),
    ],
)
def test_a_missing_arm_is_named(kept: list[Throughput], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        roles(kept)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        roles([arm("serial", 1, rate), *BLOG[1:]])


def test_one_round_has_no_interval() -> None:
    assert set(split(roles(BLOG))["intervals"].values()) == {None}


def test_intervals_cover_the_truth() -> None:
    """1000 simulated explains of 3 rounds, 5 % noise a round, other noise in one arm: 95 % hold the true factor."""
    generator = np.random.default_rng(8)
    truth = {a.name: a.tokens_per_s for a in BLOG}
    noise = {"serial": 0.02, "static-8": 0.05, "vllm-1": 0.05, "vllm-64": 0.1}
    names = ("total", "engine_first.engine", "interaction", "shapley.scheduling")
    hits = dict.fromkeys(names, 0)
    expected = split(roles(BLOG))
    for _ in range(1000):
        drawn = [arm(a.name, a.streams, *(truth[a.name] * np.exp(generator.normal(0, noise[a.name], 3)))) for a in BLOG]
        intervals = split(roles(drawn))["intervals"]
        for name in names:
            group, _, key = name.partition(".")
            value = expected[group][key] if key else expected[group]
            hits[name] += intervals[name][0] <= value <= intervals[name][1]
    assert all(930 <= hit <= 990 for hit in hits.values()), hits


# ---------------------------------------------------------------- the account


def batch(started_s: float, **changes: Any) -> dict[str, Any]:
    """A serial batch: 32 tokens, the first out of a prefill of 0.1 s, 31 steps of 50 ms."""
    plain: dict[str, Any] = {
        "started_s": started_s,
        "requests": 1,
        "steps": 31,
        "row_steps": 31,
        "useful_row_steps": 31,
        "dead_row_steps": 0,
        "first_tokens": 1,
        "output_tokens": 32,
        "prompt_tokens": 40,
        "padding_tokens": 0,
        "idle_s": 0.01,
        "fill_wait_s": 0.0,
        "queue_wait_s": 0.0,
        "prefill_s": 0.1,
        "decode_s": 1.55,
        "rest_s": 0.04,
        "wall_s": 1.69,
        "kv_bytes_reserved": 72,
        "kv_bytes_used": 72,
    }
    return plain | changes


def test_account_of_a_batch_is_exact() -> None:
    """Serial: 32 tokens in 1.7 s. Static: 4 rows of which 1 ends after 16 of the 31 steps, each 100 ms; 3.5 s in all.

    rows 4; live (3 * 31 + 16) / 124; step 50 / 100; decode (3.1 / 3.5) / (1.55 / 1.7). The tokens per useful row-step
    differ a little (32 / 31 against 113 / 109): that is all that may be left.
    """
    serial = batch_sums([batch(100 + 1.7 * i) for i in range(3)], 99.99, 200)
    static = batch_sums(
        [
            batch(
                50 + 3.5 * i,
                requests=4,
                row_steps=124,
                useful_row_steps=109,
                dead_row_steps=15,
                first_tokens=4,
                output_tokens=113,
                prompt_tokens=130,
                padding_tokens=30,
                idle_s=0.02,
                fill_wait_s=0.03,
                prefill_s=0.3,
                decode_s=3.1,
                rest_s=0.05,
                wall_s=3.45,
            )
            for i in range(2)
        ],
        49.95,
        200,
    )
    assert serial is not None and static is not None
    account = static_account(serial, static, serial_per_s=32 / 1.7, static_per_s=113 / 3.5)
    assert account["rows"] == pytest.approx(4)
    assert account["live"] == pytest.approx(109 / 124)
    assert account["step"] == pytest.approx(0.5)
    assert account["decode"] == pytest.approx((3.1 / 3.5) / (1.55 / 1.7))
    assert account["product"] == pytest.approx(4 * 109 / 124 * 0.5 * (3.1 / 3.5) / (1.55 / 1.7))
    assert account["unexplained"] == pytest.approx(account["first_tokens"] - 1)
    assert account["padding"] == pytest.approx(30 / 160)
    for named in account["shares"].values():
        assert sum(named.values()) == pytest.approx(1)
    assert account["shares"]["static"]["prefill_padding"] == pytest.approx(0.3 * 30 / 160 / 3.5)


def test_batches_outside_of_the_load_do_not_count() -> None:
    """One began before the start, one after the end; the first inside waited 5 s, of which 0.5 s fall into the load."""
    batches = [batch(9.9), batch(11.5, idle_s=4.0, fill_wait_s=1.0), batch(13), batch(15)]
    sums = batch_sums(batches, 11, 14)
    assert sums is not None
    assert sums["batches"] == 2 and sums["steps"] == 62
    assert sums["idle_s"] == pytest.approx(0.01)  # 4.0 of the first is taken back whole
    assert sums["fill_wait_s"] == pytest.approx(0.5)
    assert batch_sums(batches, 20, 30) is None


def test_rounds_add_up() -> None:
    first, second = batch_sums([batch(1)], 0.99, 2), batch_sums([batch(1, kv_bytes_reserved=90)], 0.99, 2)
    assert first is not None and second is not None
    total = add_sums([first, second])
    assert total["steps"] == 62 and total["kv_bytes_reserved"] == 90
    assert shares(total) == pytest.approx(shares(first))


def test_roofline() -> None:
    """270 MB of weights and 8 rows x 100 tokens x 23 kB = 18.4 MB in 30 ms: 9.61 GB/s of 12; at least 24 ms."""
    found = roofline(
        weight_bytes=270e6, kv_bytes_per_token=23e3, rows=8, context_tokens=100, step_s=0.03, bandwidth=12e9
    )
    assert found["bytes_per_s"] == pytest.approx(288.4e6 / 0.03)
    assert found["share"] == pytest.approx(288.4e6 / 0.03 / 12e9)
    assert found["least_step_ms"] == pytest.approx(24.03, abs=0.01)

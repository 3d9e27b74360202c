"""Do the intervals of a comparison keep their promise? Simulated servers of a known ratio, thousands of comparisons.

A comparison is what compare.py makes of one: rounds of A B B A or B A A B by lot; each load's figure is the server's
true value times the weather of its moment times its own noise. docs/compare.md has the same for other orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from loadgen.compare import order_of
from loadgen.stats import (
    detectable_difference,
    false_discovery_levels,
    log_ratio_interval,
    rounds_to_resolve,
    student_t_quantile,
)
from loadgen.verdicts import judge, verdict

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Floats]
N = 4000
FORTH_AND_BACK = np.array([-1, 1, 1, -1])  # A B B A: the sign of each load's log in the round's log ratio


def weather_none(rng: np.random.Generator, moments: int) -> Floats:
    return np.zeros((N, moments))


def weather_drift(rng: np.random.Generator, moments: int) -> Floats:
    """A machine that gets up to 3 % slower or faster with every load, evenly."""
    return rng.uniform(-0.03, 0.03, (N, 1)) * np.arange(moments)


def weather_warming_up(rng: np.random.Generator, moments: int) -> Floats:
    """10 % slower at first, half of it gone after three loads."""
    return 0.1 * 0.5 ** (np.arange(moments) / 3) * np.ones((N, 1))


def weather_correlated(rng: np.random.Generator, moments: int) -> Floats:
    """AR(1) at 0.8 from load to load, 5 % wide."""
    values = np.empty((N, moments))
    values[:, 0] = rng.normal(0, 1, N)
    for i in range(1, moments):
        values[:, i] = 0.8 * values[:, i - 1] + 0.6 * rng.normal(0, 1, N)
    return 0.05 * values


def noise_normal(rng: np.random.Generator, moments: int) -> Floats:
    return rng.normal(0, 0.03, (N, moments))


def noise_heavy(rng: np.random.Generator, moments: int) -> Floats:
    """Student t of 3 degrees of freedom: now and then a load that is far off."""
    return 0.03 * rng.standard_t(3, (N, moments))


def noise_skewed(rng: np.random.Generator, moments: int) -> Floats:
    """Lognormal: loads are late, never early, as a p99 is."""
    return 0.03 * rng.lognormal(0, 1, (N, moments))


WEATHERS = [weather_none, weather_drift, weather_warming_up, weather_correlated]


def simulate(rounds: int, ratio: float, weather: Noise, noise: Noise, seed: int) -> Floats:
    """The rounds' log ratios, [N, rounds]."""
    rng = np.random.default_rng(seed)
    loads = weather(rng, 4 * rounds) + noise(rng, 4 * rounds)
    begins = rng.choice([-1, 1], (N, rounds, 1))  # B's signs are A's turned round
    return math.log(ratio) + (loads.reshape(N, rounds, 4) * FORTH_AND_BACK * begins).sum(axis=2) / 2


def intervals(differences: Floats) -> tuple[Floats, Floats]:
    """log_ratio_interval for every row at once; test_the_rows_are_the_product ties the two together."""
    n = differences.shape[1]
    half = student_t_quantile(0.975, n - 1) * differences.std(axis=1, ddof=1) / math.sqrt(n)
    return np.exp(differences.mean(axis=1) - half), np.exp(differences.mean(axis=1) + half)


def test_the_rows_are_the_product() -> None:
    differences = simulate(4, 1.2, weather_correlated, noise_heavy, 1)
    low, high = intervals(differences)
    for i in range(20):
        estimate = log_ratio_interval(np.full(4, 50.0), 50 * np.exp(differences[i]))
        assert estimate is not None
        assert (estimate.low, estimate.high) == pytest.approx((low[i], high[i]), rel=1e-9)
        assert (estimate.p_value < 0.05) == (low[i] > 1 or high[i] < 1)


def test_orders_are_forth_and_back_by_lot() -> None:
    orders = [order_of(3, number, seed=5) for number in range(1, 601)]
    assert all(order == order[::-1] and sorted(order[:3]) == [0, 1, 2] for order in orders)
    firsts = np.bincount([order[0] for order in orders])
    assert firsts.min() > 150  # 200 each, standard deviation 11.5
    assert orders == [order_of(3, number, seed=5) for number in range(1, 601)]


@pytest.mark.parametrize("rounds", [3, 4, 5, 10])
@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("noise", [noise_normal, noise_heavy, noise_skewed])
def test_coverage(rounds: int, weather: Noise, noise: Noise) -> None:
    """95 % intervals cover the truth in 93 to 97 of 100 comparisons (4000 know a share of 95 % to +- 0.7 %).

    Skewed noise of few rounds is covered in up to 97.2 of 100, as heavy tails of any kind are: Student's interval is
    then on the careful side.
    """
    low, high = intervals(simulate(rounds, 1.05, weather, noise, seed=rounds))
    covered = float(((low <= 1.05) & (1.05 <= high)).mean())
    assert 0.93 <= covered <= (0.98 if noise is noise_skewed else 0.97), covered


def test_what_a_fixed_order_would_do() -> None:
    """Why the order is by lot and goes back: A B, B A in turn covers a drift in all of 100, A B, A B in hardly any."""
    rng = np.random.default_rng(8)
    loads = (weather_none(rng, 10) + 0.03 * np.arange(10) + rng.normal(0, 0.01, (N, 10))).reshape(N, 5, 2)
    difference = loads[:, :, 1] - loads[:, :, 0]
    for signs, least, most in (([1, 1, 1, 1, 1], 0.0, 0.1), ([1, -1, 1, -1, 1], 0.995, 1.0)):
        low, high = intervals(difference * signs)
        assert least <= float(((low <= 1) & (1 <= high)).mean()) <= most


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize("weather", WEATHERS)
@pytest.mark.parametrize("rounds", [3, 5])
def test_a_against_a_claims_nothing_in_one_figure(rounds: int, weather: Noise) -> None:
    """`same` or `not resolved` in at least 95 of 100, less two standard errors."""
    low, high = intervals(simulate(rounds, 1.0, weather, noise_normal, seed=rounds))
    verdicts = [verdict(a, b, True, 0.03) for a, b in zip(low, high, strict=True)]
    assert sum(v in ("same within 3 %", "not resolved") for v in verdicts) / N >= 0.943


def tables(number: int, rounds: int, figures: int, together: float, ratio: float, seed: int) -> Floats:
    """Log ratios [number, figures, rounds]. together: correlation of a round's figures, as those of one run have it."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=(number, 1, rounds)), rng.normal(size=(number, figures, rounds))
    return math.log(ratio) + 0.03 * (math.sqrt(together) * common + math.sqrt(1 - together) * own)


def claims(differences: Floats) -> NDArray[np.bool_]:
    """Which figures of each table leave 1 out for the table as a whole: judge for many tables at once."""
    _, figures, rounds = differences.shape
    t = np.abs(differences.mean(axis=2)) / differences.std(axis=2, ddof=1) * math.sqrt(rounds)
    needed = [student_t_quantile(1 - 0.05 * rank / figures / 2, rounds - 1) for rank in range(1, figures + 1)]
    passed = np.where(-np.sort(-t, axis=1) >= needed, np.arange(1, figures + 1), 0).max(axis=1)
    rank = (-t).argsort(axis=1).argsort(axis=1) + 1
    return rank <= passed[:, None]


def test_the_tables_are_the_product() -> None:
    names = [f"m{i}" for i in range(6)]
    for differences in tables(20, 4, 6, 0.5, 1.04, seed=9):
        measured = {
            n: {"A": [50.0] * 4, "B": (50 * np.exp(d)).tolist()} for n, d in zip(names, differences, strict=True)
        }
        entries = judge(measured, baseline="A", higher_is_better=dict.fromkeys(names, True), same_within=0.0)
        said = [entries[name]["B"]["verdict"] for name in names]
        assert [v != "not resolved" for v in said] == claims(differences[None])[0].tolist()


@pytest.mark.parametrize("together", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("rounds", [3, 5])
def test_a_against_a_claims_nothing_in_the_whole_table(rounds: int, together: float) -> None:
    """Ten figures, of which each by itself would let 14 to 40 of 100 tables claim something."""
    differences = tables(N, rounds, 10, together, 1.0, seed=int(10 * together) + rounds)
    low, high = intervals(differences.reshape(-1, rounds))
    alone = ((low > 1) | (high < 1)).reshape(N, 10).any(axis=1).mean()
    assert 0.13 <= alone <= 0.42
    assert claims(differences).any(axis=1).mean() <= 0.05 + 0.007  # two standard errors


def test_a_difference_in_all_figures_is_found_as_if_there_were_one() -> None:
    """5 % at 3 % from round to round, 5 rounds: alone found in 80 of 100, in the table in 70."""
    differences = tables(N, 5, 10, 0.5, 1.05, seed=3)
    low, _ = intervals(differences[:, 0])
    assert claims(differences)[:, 0].mean() >= float((low > 1).mean()) - 0.15 >= 0.6


def test_same_is_said_when_it_is_the_same() -> None:
    """Equal servers with 0.5 % noise, 5 rounds: said in nearly all; servers 5 % apart: called the same in none."""

    def quiet(rng: np.random.Generator, moments: int) -> Floats:
        return rng.normal(0, 0.005, (N, moments))

    for ratio, least, most in ((1.0, 0.99, 1.0), (1.05, 0.0, 0.001)):
        low, high = intervals(simulate(5, ratio, weather_drift, quiet, seed=5))
        said = sum(verdict(x, y, True, 0.03).startswith("same") for x, y in zip(low, high, strict=True)) / N
        assert least <= said <= most, (ratio, said)


# ---------------------------------------------------------------- more rounds


@pytest.mark.parametrize(("rounds", "least"), [(3, 0.75), (5, 0.9)])
def test_the_rounds_that_would_do_do(rounds: int, least: float) -> None:
    """5 % apart at 6 % from round to round: whoever was not resolved and follows the number is resolved, mostly."""
    rng = np.random.default_rng(6)
    followed = settled = 0

    def entry(n: int) -> dict[str, object]:
        values = 100 * 0.95 * np.exp(rng.normal(0, 0.06, n))
        measured = {"m": {"A": [100.0] * n, "B": values.tolist()}}
        return judge(measured, baseline="A", higher_is_better={"m": True}, same_within=0.03)["m"]["B"]

    for _ in range(250):
        first = entry(rounds)
        if first["verdict"] == "not resolved" and first["rounds_needed"]:
            assert isinstance(first["rounds_needed"], int) and first["rounds_needed"] > rounds
            followed += 1
            settled += entry(first["rounds_needed"])["verdict"] == "slower"
    assert followed > 120 and settled / followed >= least, settled / followed


def test_rounds_to_resolve() -> None:
    """Known spread 4 %, 5 % apart: t(0.975, 7) = 2.365, t(0.8, 7) = 0.896: 3.261 * 0.04 / sqrt 8 = 0.0461 <= 0.0488,
    and with 7 rounds (2.447 + 0.906) * 0.04 / sqrt 7 = 0.0507 is too wide."""
    assert rounds_to_resolve(math.log(1.05), 0.04) == 8
    assert rounds_to_resolve(0, 0.04) is None and rounds_to_resolve(1e-9, 1.0) is None
    assert rounds_to_resolve(0.1, 0.0) == 2
    # a spread that three rounds gave: t(0.9, 2) = 1.886, (2.201 + 1.886) * 0.04 / sqrt 12 = 0.0472
    assert rounds_to_resolve(math.log(1.05), 0.04, power=0.9) == 10
    assert rounds_to_resolve(math.log(1.05), 0.04, power=0.9, seen=3) == 12
    assert detectable_difference(0.04, 8) == pytest.approx(0.0461, abs=1e-4)


def test_false_discovery_levels() -> None:
    """Benjamini and Hochberg's own way: 4 tests at 5 %: levels 0.0125, 0.025, 0.0375, 0.05 by rank."""
    assert false_discovery_levels([0.03, 0.01, 0.9, 0.036]) == (
        [True, True, False, True],  # the third is below 0.0375: all up to it are claimed, the 0.03 above 0.025 too
        [pytest.approx(0.0375), pytest.approx(0.0375), pytest.approx(0.05), pytest.approx(0.0375)],
    )
    assert false_discovery_levels([0.04, 0.06])[0] == [False, False]
    assert false_discovery_levels([0.04])[0] == [True]
    assert false_discovery_levels([]) == ([], [])
    assert false_discovery_levels([0.2, 0.2 * (1 + 1e-12), 0.9])[1] == pytest.approx([0.05 * 2 / 3, 0.05 * 2 / 3, 0.05])

"""Schedules are what they say: constant is constant, Poisson is Poisson, whatever the number of workers."""

from itertools import islice, pairwise

import numpy as np
import pytest

from loadgen.arrival import offsets_ns


def gaps_s(**kwargs: object) -> np.ndarray:
    return np.diff(np.array(list(offsets_ns(**kwargs)), dtype=np.int64)) / 1e9  # type: ignore[arg-type]


def test_constant_gaps_differ_by_rounding_only() -> None:
    offsets = list(offsets_ns("constant", rate_per_s=3, seed=0, count=3001))
    assert offsets[0] == 0 and offsets[3000] == 1_000_000_000_000  # 3000 gaps of 1/3 s, no drift
    assert {b - a for a, b in pairwise(offsets)} <= {333_333_333, 333_333_334}


def test_poisson_gaps_are_exponential_and_independent() -> None:
    gaps = gaps_s(arrival="poisson", rate_per_s=50, seed=7, count=20_001)
    n = len(gaps)
    assert gaps.mean() == pytest.approx(1 / 50, rel=4 / np.sqrt(n))  # the mean of n exponentials: sd 1 / sqrt(n)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=4 / np.sqrt(n))
    # Kolmogorov-Smirnov distance to 1 - exp(-50 x): 1.95 / sqrt(n) is passed by one sample in a thousand
    sorted_gaps = np.sort(gaps)
    model = 1 - np.exp(-50 * sorted_gaps)
    ranks = np.arange(1, n + 1) / n
    assert max(np.abs(ranks - model).max(), np.abs(ranks - 1 / n - model).max()) < 1.95 / np.sqrt(n)
    centred = gaps - gaps.mean()
    assert abs((centred[1:] * centred[:-1]).mean() / centred.var()) < 4 / np.sqrt(n)  # lag-1 autocorrelation


def test_dispersion_of_poisson_counts_is_one() -> None:
    offsets = np.array(list(offsets_ns("poisson", rate_per_s=100, seed=3, duration_s=400)))
    counts = np.bincount(offsets // 1_000_000_000, minlength=400)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=4 * np.sqrt(2 / 400))


@pytest.mark.parametrize("shape", [0.25, 4.0])
def test_gamma_has_the_asked_burstiness(shape: float) -> None:
    gaps = gaps_s(arrival="gamma", rate_per_s=10, burstiness=shape, seed=1, count=40_001)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


def test_same_seed_same_schedule_and_other_seed_another() -> None:
    make = lambda seed: list(offsets_ns("poisson", rate_per_s=5, seed=seed, count=100))  # noqa: E731
    assert make(1) == make(1) != make(2)


def test_a_longer_schedule_begins_with_the_shorter_one() -> None:
    short = list(offsets_ns("poisson", rate_per_s=5, seed=1, count=10))
    assert short == list(islice(offsets_ns("poisson", rate_per_s=5, seed=1, count=10_000), 10))


def test_duration_is_half_open() -> None:
    assert list(offsets_ns("constant", rate_per_s=2, seed=0, duration_s=1.5)) == [0, 500_000_000, 1_000_000_000]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (dict(arrival="uniform", rate_per_s=1, count=1), "poisson"),
        (dict(arrival="poisson", rate_per_s=0, count=1), "above 0"),
        (dict(arrival="gamma", rate_per_s=1, count=1, burstiness=-1), "burstiness"),
        (dict(arrival="poisson", rate_per_s=1), "count or a duration"),
    ],
)
def test_errors_name_the_value_and_the_range(kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(offsets_ns(seed=0, **kwargs))  # type: ignore[arg-type]

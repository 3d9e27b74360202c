"""Statistics, numpy only: quantiles, intervals, ratios of rounds, goodness of fit. Pure functions.

One definition of a quantile for the whole project: Hyndman & Fan (1996) type 7, linear between order statistics, the
one numpy, R and most peers use. docs/compare.md has the simulated coverage of the intervals of a comparison.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[Any]

# ---------------------------------------------------------------- quantiles


def quantile(values: Values, q: float) -> float | None:
    """Hyndman-Fan type 7: x[(n - 1) q], linear between neighbours; None without values. 0 <= q <= 1."""
    if len(values) == 0:
        return None
    return float(np.quantile(np.asarray(values, dtype=np.float64), q))


def quantile_with_infinities(values: Values, num_failures: int, q: float) -> float | None:
    """The quantile when each failure is an infinitely slow success; None when it is infinite, or without values."""
    finite = np.sort(np.asarray(values, dtype=np.float64))
    position = (len(finite) + num_failures - 1) * q
    if position < 0 or math.ceil(position) >= len(finite):
        return None
    low = math.floor(position)
    high = math.ceil(position)
    return float(finite[low] + (finite[high] - finite[low]) * (position - low))


def order_statistic_interval(values: Values, q: float, confidence: float = 0.95) -> tuple[float, float] | None:
    """Distribution-free interval of the q quantile from two order statistics; None when n is too small for one.

    The number of values below the quantile is Binomial(n, q), so [x(l), x(u)] covers it with probability
    P(l <= B <= u - 1), whatever the distribution (David & Nagaraja, Order Statistics, section 7.1). The ranks are
    chosen with at most (1 - confidence) / 2 in either tail. Values must be independent; gaps of one stream nearly are.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    ranks = _binomial_ranks(n, q, confidence)
    if ranks is None:
        return None
    return float(ordered[ranks[0] - 1]), float(ordered[ranks[1] - 1])


def _binomial_ranks(n: int, q: float, confidence: float) -> tuple[int, int] | None:
    """1-based ranks (l, u); None when the sample is too small for a two-sided interval at this q."""
    tail = (1 - confidence) / 2
    if n == 0 or q**n > tail or (1 - q) ** n > tail:
        return None
    if n > 2000 and min(q, 1 - q) * n > 50:
        half = normal_quantile(1 - tail) * math.sqrt(n * q * (1 - q))
        return max(1, math.floor(n * q - half)), min(n, math.ceil(n * q + half) + 1)
    counts = np.arange(n + 1)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    log_pmf = (
        log_factorial[n] - log_factorial - log_factorial[::-1] + counts * math.log(q) + (n - counts) * math.log1p(-q)
    )
    cdf = np.cumsum(np.exp(log_pmf))
    low = int(np.searchsorted(cdf, tail, side="right"))  # P(B <= low - 1) <= tail
    high = int(np.searchsorted(cdf, 1 - tail, side="left")) + 1  # P(B <= high - 1) >= 1 - tail
    if low < 1 or high > n:
        return None
    return low, high


# ---------------------------------------------------------------- distributions


def normal_quantile(p: float) -> float:
    """Inverse of the standard normal distribution function."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def student_t_cdf(t: float, df: float) -> float:
    """P(T <= t), by the regularised incomplete beta function (Abramowitz & Stegun 26.7.1)."""
    tail = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return 1 - tail if t > 0 else tail


@functools.lru_cache(maxsize=10_000)
def student_t_quantile(p: float, df: float) -> float:
    """Inverse of student_t_cdf by bisection, 0 < p < 1, df > 0; exact to 1e-10 relative."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -student_t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while student_t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if student_t_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b) by its continued fraction (DLMF 8.17.22, modified Lentz)."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1 / (1 + step * d or tiny)
            c = 1 + step / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


# ---------------------------------------------------------------- ratios of rounds


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """B over A: the ratio with its interval, and in logs what decides about more rounds.

    p_value: two-sided, of no difference. difference: mean paired log ratio. deviation: its standard deviation from
    round to round.
    """

    ratio: float
    low: float
    high: float
    p_value: float
    difference: float
    deviation: float
    rounds: int


def log_ratio_interval(a_rounds: Values, b_rounds: Values, confidence: float = 0.95) -> RatioEstimate | None:
    """Ratio B / A with a Student t interval of the mean paired log ratio; None below 2 rounds or with values <= 0.

    The unit of replication is the round: within one, A and B met the same weather, so d_i = log(b_i / a_i) and
    mean(d) +- t(n - 1) s / sqrt(n), exponentiated. (Requests within a round are not independent; treating them so is
    how tools come to call noise a difference.) It keeps its promise as far as the d_i are independent and of mean
    log(B / A): compare.py's rounds are made for that, docs/compare.md has the simulated coverage.
    """
    a, b = np.asarray(a_rounds, dtype=np.float64), np.asarray(b_rounds, dtype=np.float64)
    if len(a) != len(b) or len(a) < 2 or not (np.all(a > 0) and np.all(b > 0)):
        return None
    differences = np.log(b / a)
    n = len(differences)
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    error = deviation / math.sqrt(n)
    half = student_t_quantile((1 + confidence) / 2, n - 1) * error
    if error > 0:
        p_value = 2 * student_t_cdf(-abs(mean) / error, n - 1)
    else:
        p_value = 1.0 if mean == 0 else 0.0
    return RatioEstimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half), p_value, mean, deviation, n)


def detectable_difference(deviation: float, rounds: int, confidence: float = 0.95, power: float = 0.8) -> float:
    """The smallest mean log ratio that so many rounds resolve with this power."""
    reach = student_t_quantile((1 + confidence) / 2, rounds - 1) + student_t_quantile(power, rounds - 1)
    return reach * deviation / math.sqrt(rounds)


def rounds_to_resolve(
    difference: float, deviation: float, confidence: float = 0.95, power: float = 0.8, seen: int | None = None
) -> int | None:
    """Rounds until a mean log ratio of this size is resolved with this power; None when it is 0, or above 1000.

    Smallest n with (t(confidence, n - 1) + t(power, df)) * deviation / sqrt(n) <= difference. seen: how many rounds the
    deviation was estimated from, df = seen - 1, for a guess from few rounds may be far too low (Julious & Owen 2006);
    None: it is known, df = n - 1.
    """
    if difference <= 0:
        return None
    if deviation == 0:
        return 2

    def enough(n: int) -> bool:
        df = n - 1 if seen is None else seen - 1
        reach = student_t_quantile((1 + confidence) / 2, n - 1) + student_t_quantile(power, df)
        return reach * deviation / math.sqrt(n) <= difference

    n = bisect.bisect_left(range(1001), True, lo=2, key=enough)  # more rounds never resolve less
    return n if n <= 1000 else None


def false_discovery_levels(p_values: Values, level: float = 0.05) -> tuple[list[bool], list[float]]:
    """(which are claimed, the level each had to meet) when many are tested at once (Benjamini & Hochberg 1995).

    In order of size, p_(k) is held against k / m * level; all up to the last one that is below are claimed. Of what is
    claimed at most `level` is wrong on average, and where nothing differs, nothing is claimed with probability 1 -
    level, also when the tests hang together (as the figures of one run do).
    """
    p = np.asarray(p_values, dtype=np.float64)
    m = len(p)
    if m == 0:
        return [], []
    # equals share the highest of their ranks: requests/s and tokens/s of equal work are one figure up to rounding
    ranks = np.searchsorted(np.sort(p), p * (1 + 1e-9), side="right")
    levels = level * ranks / m
    passed = ranks[p <= levels]
    last = int(passed.max()) if len(passed) else 0
    return (ranks <= last).tolist(), np.maximum(levels, level * last / m).tolist()


# ---------------------------------------------------------------- arrivals


def cv(values: Values) -> float | None:
    """Coefficient of variation: population standard deviation over the mean; None without a positive mean."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) == 0 or array.mean() <= 0:
        return None
    return float(array.std() / array.mean())


def dispersion(times: Values, window: float) -> float | None:
    """Index of dispersion: variance over mean of the counts in windows of this length (1 = Poisson)."""
    array = np.asarray(times, dtype=np.float64)
    if len(array) == 0 or window <= 0:
        return None
    bins = ((array - array.min()) // window).astype(np.int64)
    counts = np.bincount(bins)[:-1] if bins.max() > 0 else np.bincount(bins)  # the last window is cut short
    if len(counts) < 2 or counts.mean() == 0:
        return None
    return float(counts.var() / counts.mean())


def autocorrelation(values: Values, lag: int = 1) -> float | None:
    """Sample autocorrelation at this lag; about 0 +- 2 / sqrt(n) for independent values."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= lag + 1 or array.var() == 0:
        return None
    centred = array - array.mean()
    return float((centred[lag:] * centred[:-lag]).mean() / array.var())


def exponential_fit_p_value(gaps: Values, mean: float) -> float | None:
    """Kolmogorov-Smirnov p-value of gaps against an exponential of this mean (asymptotic; n >= 20, else None)."""
    ordered = np.sort(np.asarray(gaps, dtype=np.float64))
    n = len(ordered)
    if n < 20 or mean <= 0:
        return None
    model = -np.expm1(-ordered / mean)
    above = np.max(np.arange(1, n + 1) / n - model)
    below = np.max(model - np.arange(n) / n)
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * max(above, below)  # Stephens 1970
    total = 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return min(1.0, max(0.0, total)) if scaled > 0.2 else 1.0

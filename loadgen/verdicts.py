"""Rounds of several servers to ratios, intervals and verdicts. Pure: figures in, what compare.json says of them out.

Verdicts, in this order:

    same within x %   the 95 % interval of the ratio lies inside of +- x %
    faster, slower    it leaves 1 out, and among all the figures that were compared this one still stands out
    not resolved      else

A table has about ten figures a server, and one in twenty looks different by chance: uncorrected, a server against
itself "differs" in every fifth to third table. So faster and slower are claimed for the whole table (Benjamini and
Hochberg): a server against itself claims nothing in 95 tables of 100. The interval of each line is 95 % by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.stats import (
    RatioEstimate,
    detectable_difference,
    false_discovery_levels,
    log_ratio_interval,
    rounds_to_resolve,
)

Rounds = Sequence[float | None]  # one figure a round
NOT_RESOLVED = "not resolved"
LEVEL = 0.05
_POWER = 0.9  # of rounds_needed: the ratio that was found is a guess, too


def judge(
    figures: Mapping[str, Mapping[str, Rounds]],
    *,
    baseline: str,
    higher_is_better: Mapping[str, bool],
    same_within: float,
) -> dict[str, dict[str, dict[str, Any]]]:
    """{metric: {arm: rounds}} to {metric: {arm: entry}}; all arms of a metric have the same number of rounds.

    entry: value (geometric mean of the rounds), rounds, ratio to the baseline (value over value), low, high (95 %),
    p_value, verdict, detectable (the smallest ratio above 1 that four of five such comparisons would have resolved),
    rounds_needed (when not resolved: rounds that would settle it, one way or the other; None above 1000). null for what
    cannot be said. same_within: as a share, 0.03 = 3 %.
    """
    result: dict[str, dict[str, dict[str, Any]]] = {}
    open_entries: list[tuple[dict[str, Any], RatioEstimate, bool]] = []
    for metric, arms in figures.items():
        base = arms[baseline]
        result[metric] = {}
        for name, rounds in arms.items():
            entry = result[metric][name] = _absolute(rounds)
            if name == baseline:
                entry |= {"ratio": None if entry["value"] is None else 1.0, "verdict": "baseline"}
                continue
            theirs = _value(base)
            if entry["value"] is None or theirs is None:
                continue
            entry["ratio"] = entry["value"] / theirs
            estimate = log_ratio_interval([v or 0 for v in base], [v or 0 for v in rounds])
            if estimate is None:
                entry["verdict"] = "one round: no interval"
            else:
                open_entries.append((entry, estimate, higher_is_better[metric]))
    claimed, levels = false_discovery_levels([estimate.p_value for _, estimate, _ in open_entries], LEVEL)
    for (entry, estimate, higher), claim, level in zip(open_entries, claimed, levels, strict=True):
        _decide(entry, estimate, higher, claim, level, same_within)
    return result


def _value(rounds: Rounds) -> float | None:
    """Geometric mean: the ratio of two of them is that of the paired rounds. None when a round has no figure."""
    known = [value for value in rounds if value is not None and value > 0]
    return math.exp(sum(map(math.log, known)) / len(known)) if known and len(known) == len(rounds) else None


def _absolute(rounds: Rounds) -> dict[str, Any]:
    unknown = dict.fromkeys(("ratio", "low", "high", "p_value", "detectable", "rounds_needed"))
    return {"value": _value(rounds), "rounds": list(rounds), **unknown, "verdict": "no value"}


def _decide(
    entry: dict[str, Any], estimate: RatioEstimate, higher: bool, claim: bool, level: float, same_within: float
) -> None:
    detectable = detectable_difference(estimate.deviation, estimate.rounds, 1 - level)
    entry |= {
        "low": estimate.low,
        "high": estimate.high,
        "p_value": estimate.p_value,
        "detectable": math.exp(min(detectable, 50.0)),
        "verdict": verdict(estimate.low, estimate.high, higher, same_within, claim),
    }
    if entry["verdict"] == NOT_RESOLVED:
        entry["rounds_needed"] = _rounds_needed(estimate, level, same_within)


def verdict(low: float, high: float, higher_is_better: bool, same_within: float, claim: bool = True) -> str:
    """What the 95 % interval low..high of arm / baseline says. claim: whether the table lets a difference stand."""
    if 1 / (1 + same_within) <= low and high <= 1 + same_within:
        return f"same within {100 * same_within:g} %"
    if claim and (low > 1 or high < 1):
        return "faster" if (low > 1) == higher_is_better else "slower"
    return NOT_RESOLVED


def _rounds_needed(estimate: RatioEstimate, level: float, same_within: float) -> int | None:
    """The fewer of the rounds that would show the ratio found to be a difference, and those that would show it to be
    within +- same_within."""
    seen = estimate.rounds
    found = abs(estimate.difference)
    different = rounds_to_resolve(found, estimate.deviation, 1 - level, _POWER, seen)
    same = rounds_to_resolve(math.log1p(same_within) - found, estimate.deviation, 1 - LEVEL, _POWER, seen)
    known = [max(n, seen + 1) for n in (different, same) if n is not None]
    return min(known, default=None)

"""Arms to factors that multiply to the total: pure functions of measured throughputs and of a server's own counters.

    total = many / base                                       vLLM at N streams over the reference, one at a time

    engine first:      engine = one / base          scheduling = many / one          (of the new engine)
    scheduling first:  scheduling = batched / base  engine = many / batched          (of the reference)
    interaction = total / (one / base * batched / base)       1 when the order does not matter
    Shapley:           engine = sqrt(one / base * many / batched), scheduling = sqrt(many / one * batched / base)

Both orders and the Shapley average (of the logs; Shapley 1953, for two players the mean of both orders) multiply to the
total exactly. Every factor is a product of powers of arms, so its interval is that of a linear combination of
the logs of their rounds: Student t with Welch and Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.options import UsageError
from loadgen.stats import student_t_quantile

REFERENCE, VLLM = "reference", "vllm"


@dataclass(frozen=True, slots=True)
class Throughput:
    """An arm as far as factors need it: its rounds' output tokens/s, each above 0."""

    name: str
    engine: str  # REFERENCE or VLLM
    batched: bool  # reference: static or continuous; of vLLM all arms are
    streams: int
    rounds: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Geometric mean of the rounds."""
        return math.exp(float(np.mean(np.log(self.rounds))))


@dataclass(frozen=True, slots=True)
class Roles:
    """Which arm plays what. Batched is the reference's best: a slow denominator makes a large factor cheap."""

    base: Throughput
    batched: Throughput
    one: Throughput
    many: Throughput


def roles(arms: Sequence[Throughput]) -> Roles:
    """Choose the four arms of the split. Raises UsageError that names the arm which is missing."""
    for arm in arms:
        if not arm.rounds or not all(math.isfinite(r) and r > 0 for r in arm.rounds):
            raise UsageError(f"arm {arm.name}: tokens/s must be above 0, not {list(arm.rounds)}")
    reference = [arm for arm in arms if arm.engine == REFERENCE]
    vllm = [arm for arm in arms if arm.engine == VLLM]
    base = [arm for arm in reference if not arm.batched]
    batched = [arm for arm in reference if arm.batched]
    one = [arm for arm in vllm if arm.streams == 1]
    many = [arm for arm in vllm if arm.streams > 1]
    there = ", ".join(f"{arm.name} ({arm.streams} streams)" for arm in arms) or "none"
    for found, what in (
        (base, "serial, the baseline"),
        (batched, "static or continuous, the reference with many streams"),
        (one, "vllm with 1 stream"),
        (many, "vllm with more than 1 stream"),
    ):
        if not found:
            raise UsageError(f"the split needs an arm that is missing: {what}; there are: {there}")
    return Roles(
        base[0],
        max(batched, key=lambda arm: arm.tokens_per_s),
        one[0],
        max(many, key=lambda arm: arm.streams),
    )


def split(chosen: Roles) -> dict[str, Any]:
    """total, engine_first, scheduling_first, interaction, shapley, and `intervals` of all of them (95 %, None where an
    arm has fewer than two rounds)."""
    base, batched, one, many = chosen.base, chosen.batched, chosen.one, chosen.many
    powers = {  # of base, batched, one, many
        "total": (-1, 0, 0, 1),
        "engine_first.engine": (-1, 0, 1, 0),
        "engine_first.scheduling": (0, 0, -1, 1),
        "scheduling_first.scheduling": (-1, 1, 0, 0),
        "scheduling_first.engine": (0, -1, 0, 1),
        "interaction": (1, -1, -1, 1),
        "shapley.engine": (-0.5, -0.5, 0.5, 0.5),
        "shapley.scheduling": (-0.5, 0.5, -0.5, 0.5),
    }
    arms = (base, batched, one, many)
    result: dict[str, Any] = {
        "baseline": base.name,
        "roles": {"base": base.name, "batched": batched.name, "one": one.name, "many": many.name},
    }
    intervals = {}
    for name, exponents in powers.items():
        value = math.exp(sum(e * math.log(arm.tokens_per_s) for e, arm in zip(exponents, arms, strict=True)))
        group, _, key = name.partition(".")
        if key:
            result.setdefault(group, {})[key] = value
        else:
            result[group] = value
        intervals[name] = _interval(value, exponents, [arm.rounds for arm in arms])
    return result | {"intervals": intervals}


def _interval(
    value: float, exponents: Sequence[float], rounds: Sequence[Sequence[float]], confidence: float = 0.95
) -> list[float] | None:
    variance, weight = 0.0, 0.0  # weight: Satterthwaite's denominator
    for exponent, values in zip(exponents, rounds, strict=True):
        if exponent == 0:
            continue
        if len(values) < 2:
            return None
        part = exponent**2 * float(np.var(np.log(values), ddof=1)) / len(values)
        variance += part
        weight += part**2 / (len(values) - 1)
    if variance == 0:
        return [value, value]
    half = student_t_quantile((1 + confidence) / 2, variance**2 / weight) * math.sqrt(variance)
    return [value * math.exp(-half), value * math.exp(half)]


# ---------------------------------------------------------------- why a batch of 8 is not 8 times as fast


def batch_sums(batches: Sequence[Mapping[str, Any]], start_s: float, end_s: float) -> dict[str, float] | None:
    """The sums over the batches that began in [start_s, end_s) of the server's clock; None without decode steps.

    What the server waited before the first of them counts from start_s: the time before is not the load's.
    """
    inside = sorted(
        (batch for batch in batches if start_s <= batch["started_s"] < end_s), key=lambda batch: batch["started_s"]
    )
    names = (
        "requests steps row_steps useful_row_steps dead_row_steps first_tokens output_tokens prompt_tokens "
        "padding_tokens idle_s fill_wait_s queue_wait_s prefill_s decode_s rest_s wall_s"
    ).split()
    sums = {name: float(sum(batch[name] for batch in inside)) for name in names}
    if not sums["steps"]:
        return None
    first = inside[0]
    surplus = first["idle_s"] + first["fill_wait_s"] - (first["started_s"] - start_s)
    if surplus > 0:
        from_idle = min(surplus, first["idle_s"])
        sums["idle_s"] -= from_idle
        sums["fill_wait_s"] -= surplus - from_idle
    sums["batches"] = len(inside)
    sums["kv_bytes_reserved"] = max(batch["kv_bytes_reserved"] for batch in inside)
    sums["kv_bytes_used"] = max(batch["kv_bytes_used"] for batch in inside)
    return sums


def add_sums(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of several rounds as one (KV bytes: the largest)."""
    total = {name: sum(sums[name] for sums in rounds) for name in rounds[0]}
    for name in ("kv_bytes_reserved", "kv_bytes_used"):
        total[name] = max(sums[name] for sums in rounds)
    return total


def shares(sums: Mapping[str, float]) -> dict[str, float]:
    """Where the server's wall time went, adding to 1: decode, prefill of useful and of padding tokens, waiting for the
    batch to fill, idle (no request there), rest."""
    total = sums["wall_s"] + sums["idle_s"] + sums["fill_wait_s"]
    tokens = sums["prompt_tokens"] + sums["padding_tokens"]
    padding = sums["padding_tokens"] / tokens if tokens else 0.0
    return {
        "decode": sums["decode_s"] / total,
        "prefill_useful": sums["prefill_s"] * (1 - padding) / total,
        "prefill_padding": sums["prefill_s"] * padding / total,
        "fill_wait": sums["fill_wait_s"] / total,
        "idle": sums["idle_s"] / total,
        "rest": sums["rest_s"] / total,
    }


def static_account(
    serial: Mapping[str, float], static: Mapping[str, float], *, serial_per_s: float, static_per_s: float
) -> dict[str, Any]:
    """static / serial = rows x live x step x decode, out of the servers' counters (sums as of batch_sums).

    rows: mean rows in a decode step of the batch. live: useful row-steps over all; the rest are dead rows. step: time
    of a serial decode step over that of the batch, t1 / tw. decode: share of the wall time in decode steps, dw / d1.
    measured: the ratio of the clients' output tokens/s over the same rounds (all tokens over all seconds, as the
    counters add them up); unexplained: measured / product - 1. The shares say how
    1 - d is made up. first_tokens: the tokens per useful row-step, static over serial (1 when answers are as long).
    """
    rows = static["row_steps"] / static["steps"] / (serial["row_steps"] / serial["steps"])
    live = static["useful_row_steps"] / static["row_steps"] / (serial["useful_row_steps"] / serial["row_steps"])
    t1, tw = serial["decode_s"] / serial["steps"], static["decode_s"] / static["steps"]
    serial_shares, static_shares = shares(serial), shares(static)
    decode = static_shares["decode"] / serial_shares["decode"]
    product = rows * live * (t1 / tw) * decode
    measured = static_per_s / serial_per_s
    return {
        "rows": rows,
        "live": live,
        "step": t1 / tw,
        "decode": decode,
        "product": product,
        "measured": measured,
        "unexplained": measured / product - 1,
        "tokens_per_s": {"serial": serial_per_s, "static": static_per_s},
        "step_ms": {"serial": t1 * 1e3, "static": tw * 1e3},
        "shares": {"serial": serial_shares, "static": static_shares},
        "padding": static["padding_tokens"] / (static["padding_tokens"] + static["prompt_tokens"]),
        "first_tokens": (static["output_tokens"] / static["useful_row_steps"])
        / (serial["output_tokens"] / serial["useful_row_steps"]),
    }


# ---------------------------------------------------------------- what bounds a step


def roofline(
    *,
    weight_bytes: float,
    kv_bytes_per_token: float,
    rows: float,
    context_tokens: float,
    step_s: float,
    bandwidth: float,
) -> dict[str, float]:
    """The least that a decode step moves, weights once and the KV of every row, against the measured bandwidth.

    bandwidth: bytes/s read from memory by a kernel that does nothing else. share: of it, what the step reached, if it
    moved no more than it had to; about 1: bound by bandwidth, far below 1: by computing, launching or waiting.
    """
    moved = weight_bytes + kv_bytes_per_token * rows * context_tokens
    return {
        "bytes_per_step": moved,
        "step_ms": step_s * 1e3,
        "bytes_per_s": moved / step_s,
        "bandwidth_bytes_per_s": bandwidth,
        "share": moved / step_s / bandwidth,
        "least_step_ms": moved / bandwidth * 1e3,
    }

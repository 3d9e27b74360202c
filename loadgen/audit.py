"""Was the client the bottleneck? Evidence of a run in, a verdict out.

A run is INVALID when the client, not the server, was measured. Each reason says what was seen, against which limit,
and what to do. A slow server never makes a run invalid: a client that waits is idle, punctual and reads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.record import RequestRecord, Run

LATE_P99_MS = 10.0  # open loop: 99 % of the sends are at most this late
STALL_MS = 100.0  # the event loop never stands still for this long
LAG_P99_MS = 20.0  # 99 % of the loop's wake-ups are at most this late
CPU_SHARE = 0.95  # of one core; beyond it the client is saturated
CPU_WARN_SHARE = 0.80
SHARED_SHARE = 0.01  # of events that share a read with another, when the client was late to read


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Validity:
    reasons: tuple[Finding, ...]  # why the run is INVALID
    warnings: tuple[Finding, ...]

    @property
    def valid(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, object]:
        def plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
            return [{"what": finding.what, "remedy": finding.remedy} for finding in findings]

        return {"valid": self.valid, "reasons": plain(self.reasons), "warnings": plain(self.warnings)}


_MORE_CLIENT = "give the client a free core, use --workers 2 or more, or lower the load"


def audit(run: Run) -> Validity:
    """The verdict over a run's own evidence: lateness of sends, loop lag, CPU, shared stamps, unread bytes."""
    reasons: list[Finding] = []
    warnings: list[Finding] = []
    usage = run.usage
    lag_ms = np.asarray(usage.loop_lag_ns, dtype=np.float64) / 1e6
    lag_p99_ms = float(np.quantile(lag_ms, 0.99)) if lag_ms.size else 0.0
    lag_max_ms = float(lag_ms.max()) if lag_ms.size else 0.0

    late = _lateness_ms(run)
    if late.size and (p99 := float(np.quantile(late, 0.99))) > LATE_P99_MS:
        reasons.append(
            Finding(f"1 % of the requests were sent {p99:.1f} ms or more late (limit {LATE_P99_MS:g} ms)", _MORE_CLIENT)
        )
    if lag_max_ms > STALL_MS:
        reasons.append(
            Finding(
                f"the client stood still for {lag_max_ms:.0f} ms (limit {STALL_MS:g} ms)",
                "something took its core away: look for other processes, swapping or a suspended machine, and repeat",
            )
        )
    elif lag_p99_ms > LAG_P99_MS:
        reasons.append(
            Finding(
                f"the client's event loop ran {lag_p99_ms:.1f} ms late (p99, limit {LAG_P99_MS:g} ms)", _MORE_CLIENT
            )
        )
    share = usage.cpu_s / usage.wall_s / max(1, min(usage.num_workers, usage.cores)) if usage.wall_s > 0 else 0.0
    if share > CPU_SHARE and usage.wall_s > 0.5:
        reasons.append(Finding(f"the client used {share:.0%} of a core (limit {CPU_SHARE:.0%})", _MORE_CLIENT))
    elif share > CPU_WARN_SHARE and usage.wall_s > 0.5:
        warnings.append(Finding(f"the client used {share:.0%} of a core", _MORE_CLIENT))

    _shared_stamps(run.measured, lag_p99_ms, reasons, warnings)
    if usage.unread_bytes:
        warnings.append(
            Finding(f"{usage.unread_bytes} bytes were waiting unread at the end", "repeat with a longer run")
        )
    if not usage.kernel_stamps and usage.transport == "wire":
        warnings.append(
            Finding("the kernel gave no receive stamps: times are those of the reads", "a loaded client is then late")
        )
    warnings.extend(Finding(note, "") for note in usage.notes)
    return Validity(tuple(reasons), tuple(warnings))


def _lateness_ms(run: Run) -> np.ndarray:
    """send - plan of the requests that no cap held back: with a cap, waiting is the point."""
    if run.options.get("rate") is None and run.options.get("trace") is None:
        return np.empty(0)
    if run.options.get("concurrency") is not None:
        return np.empty(0)
    late = [r.sent_ns - r.planned_ns for r in run.measured if r.sent_ns is not None and not r.reopened]
    return np.asarray(late, dtype=np.float64) / 1e6


def _shared_stamps(
    records: Sequence[RequestRecord], lag_p99_ms: float, reasons: list[Finding], warnings: list[Finding]
) -> None:
    """Events that came in one read share a stamp. A punctual client means that the server sent them together."""
    events = sum(r.num_events for r in records)
    shared = sum(r.shared_stamps for r in records)
    if not events or shared / events <= SHARED_SHARE:
        return
    gaps = [np.diff(np.asarray(r.event_stamps_ns)) for r in records if r.num_events > 1]
    apart = np.concatenate(gaps) if gaps else np.empty(0)
    apart = apart[apart > 0]
    gap_ms = float(np.median(apart)) / 1e6 if apart.size else float("inf")
    what = f"{shared / events:.1%} of the events share a read with another one"
    if lag_p99_ms > gap_ms / 2:
        reasons.append(
            Finding(
                f"{what}, and the client was {lag_p99_ms:.1f} ms late (p99) at {gap_ms:.1f} ms between events",
                _MORE_CLIENT,
            )
        )
    else:
        warnings.append(
            Finding(
                f"{what}; the client was punctual, so the server sends several tokens at a time",
                "gaps are per event: see tokens per event",
            )
        )

"""What is in a trace: rows, times, burstiness, lengths, reuse of prefixes, sessions, quirks. One pass, bounded memory.

    describe("trace.jsonl")["cv"]

Definitions: rate = rows / span; cv = population standard deviation over mean of the gaps between sorted times (1 =
Poisson); dispersion = variance over mean of the counts in windows from the first time on, the last and cut one left out
(1 = Poisson); quantiles are type 7. A prefix hit is a leading block whose id was seen before in the file: what a cache
without end, cold at the start of the file, would have had; its tokens are block size x hits, the input at most.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.trace import TraceRow, estimated_tokens, in_order
from loadgen.trace_formats import Trace

Ints = NDArray[np.int64]

_BATCH = 1 << 14  # rows at a time
_LONG = 32  # ids of a row from which on a loop in C is worth its set-up
_DENSE_IDS = 1 << 26  # ids below this are kept in a byte each, larger ones in a set
_BINS = 1024  # of the picture
_LIMITS = (4096, 8192, 32768, 131072)  # contexts that models are served with
_LONG_GAP_NS = 60_000_000_000


class Lengths:
    """Counts of token lengths: exact quantiles however many there are."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, lengths: list[int]) -> None:
        self.counts.update(lengths)  # counted in C

    def summary(self) -> dict[str, Any]:
        """{n, sum, mean, min, p50, p90, p99, max}; None where there are no values."""
        values = np.array(sorted(self.counts), dtype=np.int64)
        below = np.cumsum([self.counts[value] for value in values.tolist()])
        n = int(below[-1]) if len(below) else 0
        total = sum(value * count for value, count in self.counts.items())

        def at(rank: int) -> int:
            return int(values[np.searchsorted(below, rank, side="right")])

        def quantile(q: float) -> float | None:
            if not n:
                return None
            low = math.floor((n - 1) * q)
            low_value, high_value = at(low), at(min(low + 1, n - 1))
            return low_value + (high_value - low_value) * ((n - 1) * q - low)

        return {
            "n": n,
            "sum": total,
            "mean": total / n if n else None,
            "min": int(values[0]) if n else None,
            **{name: quantile(q) for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
            "max": int(values[-1]) if n else None,
        }


class Seen:
    """Ids seen so far, by scope."""

    def __init__(self) -> None:
        self._dense: dict[str | None, bytearray] = {}
        self._sparse: set[tuple[str | None, int]] = set()
        self.num_ids = 0

    def leading_hits(self, scope: str | None, ids: Sequence[int]) -> tuple[int, bool]:
        """How many leading ids were seen before, and whether one was behind a new one; all are seen from now on."""
        if scope not in self._dense:
            self._dense[scope] = bytearray()
        dense = self._dense[scope]
        top = max(ids, default=0)
        hashes = top >= _DENSE_IDS
        if hashes:
            top = max((block for block in ids if block < _DENSE_IDS), default=0)
        if top >= len(dense):
            dense.extend(bytes(top + 1 - len(dense) + 4096))
        if hashes:
            return self._sparse_hits(scope, ids)
        hits = 0
        for block in ids:
            if not dense[block]:
                break
            hits += 1
        else:
            return hits, False
        new = ids[hits:] if hits else ids
        if len(new) > _LONG:
            low, high = new[0], new[0] + len(new)
            if not any(dense[low:high]) and list(new) == list(range(low, high)):  # numbered as they come: all at once
                dense[low:high] = b"\1" * len(new)
                self.num_ids += len(new)
                return hits, False
        known = 0
        for block in new:
            known += dense[block]
            dense[block] = 1
        self.num_ids += len(new) - known
        return hits, known > 0

    def _sparse_hits(self, scope: str | None, ids: Sequence[int]) -> tuple[int, bool]:
        """The same where ids are hashes: a set. Small ones among them are in the bytes all the same."""
        dense = self._dense[scope]
        known = [dense[b] == 1 if b < _DENSE_IDS else (scope, b) in self._sparse for b in ids]
        for block, seen in zip(ids, known, strict=True):
            self.num_ids += not seen
            if block < _DENSE_IDS:
                dense[block] = 1
            else:
                self._sparse.add((scope, block))
        hits = known.index(False) if False in known else len(known)
        return hits, any(known[hits:])


@dataclass(slots=True)
class _Windows:
    """Counts in windows of one width, from the first time on; empty windows count."""

    width_ns: int
    current: int = 0  # number of the open window
    count: int = 0
    closed: int = 0
    total: int = 0
    squares: int = 0

    def add(self, since_first_ns: Ints) -> None:
        """Times in order; they go on where the ones before ended."""
        windows, counts = np.unique(since_first_ns // self.width_ns, return_counts=True)
        for window, count in zip(windows.tolist(), counts.tolist(), strict=True):
            if window != self.current:
                self.total += self.count
                self.squares += self.count * self.count
                self.closed += window - self.current
                self.current, self.count = window, 0
            self.count += count

    def dispersion(self) -> float | None:
        if self.closed < 2 or not self.total:
            return None
        mean = self.total / self.closed
        return (self.squares / self.closed - mean * mean) / mean


@dataclass(slots=True)
class _Arrivals:
    """Times as they come, in order."""

    first_ns: int | None = None
    last_ns: int = 0
    num: int = 0
    squares: float = 0.0  # of gaps, s^2
    same: int = 0
    max_gap_ns: int = 0
    long_gaps: int = 0
    one_s: _Windows = field(default_factory=lambda: _Windows(1_000_000_000))
    ten_s: _Windows = field(default_factory=lambda: _Windows(10_000_000_000))
    bins: Ints = field(default_factory=lambda: np.zeros(_BINS, dtype=np.int64))
    bin_ns: int = 1_000_000

    def add(self, times_ns: list[int]) -> None:
        if not times_ns:
            return
        times = np.array(times_ns, dtype=np.int64)
        before = times_ns[0] if self.first_ns is None else self.last_ns
        gaps = np.diff(times, prepend=before)
        self.squares += float(np.square(gaps / 1e9).sum())
        self.same += int(np.count_nonzero(gaps == 0)) - (self.first_ns is None)  # the first has no row before it
        self.max_gap_ns = max(self.max_gap_ns, int(gaps.max()))
        self.long_gaps += int(np.count_nonzero(gaps > _LONG_GAP_NS))
        if self.first_ns is None:
            self.first_ns = times_ns[0]
        self.num += len(times_ns)
        self.last_ns = times_ns[-1]
        since = times - self.first_ns
        self.one_s.add(since)
        self.ten_s.add(since)
        while self.span_ns // self.bin_ns >= _BINS:  # twice as wide, two in one
            self.bins = np.concatenate([self.bins.reshape(-1, 2).sum(axis=1), np.zeros(_BINS // 2, dtype=np.int64)])
            self.bin_ns *= 2
        self.bins += np.bincount(since // self.bin_ns, minlength=_BINS)

    @property
    def span_ns(self) -> int:
        return self.last_ns - (self.first_ns or 0)

    def cv(self) -> float | None:
        gaps = self.num - 1
        if gaps < 1 or not self.span_ns:
            return None
        mean = self.span_ns / 1e9 / gaps
        return math.sqrt(max(0.0, self.squares / gaps - mean * mean)) / mean


@dataclass(slots=True)
class _Tally:
    """Everything that one pass gathers."""

    inputs: Lengths = field(default_factory=Lengths)
    outputs: Lengths = field(default_factory=Lengths)
    arrivals: _Arrivals = field(default_factory=_Arrivals)
    seen: Seen = field(default_factory=Seen)
    turns: Counter[int] = field(default_factory=Counter)  # by hash of the session id: a hash is smaller than an id
    odd: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    input_with_ids: int = 0
    longer: Counter[int] = field(default_factory=Counter)


def describe(path: str | Path, trace_format: str | None = None, block_size: int | None = None) -> dict[str, Any]:
    """The description as plain data, ready for JSON; docs/traces.md explains the keys. Raises TraceError."""
    return _summary(*_read(path, trace_format, block_size))


def _read(path: str | Path, trace_format: str | None, block_size: int | None) -> tuple[Trace, _Tally]:
    tally = _Tally()
    collecting = gc.isenabled()
    gc.disable()  # no cycles are made here, and the collector would go over the rows held again and again
    try:
        with Trace(path, trace_format, block_size) as trace:
            in_file_order = _with_prefixes(trace.raw_rows(), trace.block_size or 0, tally)
            rows = in_order(in_file_order, trace.counts, trace.name)
            while batch := list(islice(rows, _BATCH)):
                _take(batch, tally)
    finally:
        if collecting:
            gc.enable()
    return trace, tally


def _with_prefixes(rows: Iterator[TraceRow], block_size: int, tally: _Tally) -> Iterator[TraceRow]:
    """Counts prefix hits in order of the file, as the sources do; rows of equal times have no other order."""
    leading_hits = tally.seen.leading_hits
    for row in rows:
        if row.hash_ids:
            length = row.input_length or 0
            hits, gap = leading_hits(row.hash_scope, row.hash_ids)
            tally.blocks += len(row.hash_ids)
            tally.input_with_ids += length
            if hits:
                tally.hit_blocks += hits
                tally.hit_tokens += min(hits * block_size, length)
            if gap:
                tally.odd["rows with a known block behind a new one: ids that are not of prefixes"] += 1
        yield row


def _take(rows: list[TraceRow], tally: _Tally) -> None:
    tally.rows += len(rows)
    tally.arrivals.add([row.timestamp_ns for row in rows if row.timestamp_ns is not None])
    sizes = [(row.input_length, row.output_length) for row in rows]
    if any(length is None or output is None for length, output in sizes):
        sizes = [_size(row, tally) for row in rows]
    tally.inputs.add([length for length, _ in sizes if length is not None])
    tally.outputs.add([output for _, output in sizes if output is not None])
    both = np.array([length + output for length, output in sizes if length is not None and output is not None])
    for limit in _LIMITS:
        tally.longer[limit] += int(np.count_nonzero(both > limit))
    tally.turns.update(hash(row.session_id) for row in rows if row.session_id is not None)


def _size(row: TraceRow, tally: _Tally) -> tuple[int | None, int | None]:
    length, output = row.input_length, row.output_length
    if output is None and row.output_text is not None:
        output = estimated_tokens(row.output_text)
        tally.odd["rows whose output tokens are estimated from the text (4 characters each)"] += 1
    if length is None and row.content is not None and row.content[0] in ("text_input", "messages"):
        length = estimated_tokens(_text(row.content[1]))
        tally.odd["rows whose input tokens are estimated from the text (4 characters each)"] += 1
    return length, output


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(message["content"] for message in content if isinstance(message.get("content"), str))


def _summary(trace: Trace, tally: _Tally) -> dict[str, Any]:
    arrivals = tally.arrivals
    timed = arrivals.first_ns is not None
    span_s = arrivals.span_ns / 1e9
    return {
        "file": trace.name,
        "format": trace.format,
        "rows": tally.rows,
        "first_s": arrivals.first_ns / 1e9 if arrivals.first_ns is not None else None,
        "last_s": arrivals.last_ns / 1e9 if timed else None,
        "span_s": span_s if timed else None,
        "rate_per_s": tally.rows / span_s if span_s else None,
        "cv": arrivals.cv(),
        "dispersion_1s": arrivals.one_s.dispersion(),
        "dispersion_10s": arrivals.ten_s.dispersion(),
        "input_tokens": tally.inputs.summary(),
        "output_tokens": tally.outputs.summary(),
        "longer_than": {str(limit): tally.longer[limit] for limit in _LIMITS},
        "block_size": trace.block_size,
        "prefix_hit_share": tally.hit_blocks / tally.blocks if tally.blocks else None,
        "prefix_hit_token_share": tally.hit_tokens / tally.input_with_ids if tally.input_with_ids else None,
        "prefix": {
            "blocks": tally.blocks,
            "hit_blocks": tally.hit_blocks,
            "hit_tokens": tally.hit_tokens,
            "unique_ids": tally.seen.num_ids,
        }
        if tally.blocks
        else None,
        "sessions": len(tally.turns),
        "longest_session_turns": max(tally.turns.values(), default=None),
        "header": trace.header or None,
        "quirks": _quirks(trace, tally),
    }


def _quirks(trace: Trace, tally: _Tally) -> list[str]:
    arrivals = tally.arrivals
    if zero := tally.outputs.counts[0]:
        tally.odd["rows without output (failed calls, as a rule)"] = zero
    found = trace.found.sentences() + [f"{count:,} {what}" for what, count in tally.odd.items()]
    if trace.block_size_from not in (None, "--block-size", "the header"):
        found.append(f"the block size is not in the file: {trace.block_size}, by {trace.block_size_from}")
    if trace.counts.inversions:
        found.append(f"{trace.counts.inversions:,} rows are earlier than the row before them: sorted")
    distinct = arrivals.num - arrivals.same
    if arrivals.same:
        burst = ": arrivals were rounded when they were recorded, and a replay sends bursts" * (
            2 * distinct < arrivals.num
        )
        found.append(f"{arrivals.num:,} rows at {distinct:,} distinct times{burst}")
    if arrivals.first_ns is not None and arrivals.first_ns > _LONG_GAP_NS:
        found.append(f"times begin at {arrivals.first_ns / 1e9:,.3f} s, not at 0: a replay takes that off")
    if arrivals.num and arrivals.num < tally.rows:
        found.append(f"{tally.rows - arrivals.num:,} rows have no time")
    if not arrivals.num:
        found.append("no times: replay it with --rate or --concurrency")
    if arrivals.num > 1 and arrivals.max_gap_ns > max(_LONG_GAP_NS, 50 * arrivals.span_ns // arrivals.num):
        found.append(
            f"{arrivals.long_gaps:,} gaps above 60 s, the longest {arrivals.max_gap_ns / 1e9:,.0f} s (--max-gap)"
        )
    found += [f"{count:,} rows with the unknown key {key!r}" for key, count in trace.found.unknown_keys.items()]
    return found


# ---------------------------------------------------------------- for people


def text_of(description: dict[str, Any]) -> str:
    """The description as a few lines for a terminal."""
    d = description

    def shown(value: float | None, digits: str = ",.4g") -> str:
        return "-" if value is None else format(value, digits)

    head = f"{d['file']}: {d['format']}, {d['rows']:,} rows"
    if d["first_s"] is not None:
        head += f", {d['first_s']:,.3f} to {d['last_s']:,.3f} s, {shown(d['rate_per_s'])} requests/s"
    lines = [head]
    if d["first_s"] is not None:
        lines.append(
            f"burstiness   cv {shown(d['cv'])}, dispersion {shown(d['dispersion_1s'])} at 1 s, "
            f"{shown(d['dispersion_10s'])} at 10 s (1 = Poisson)"
        )
    lines.append(f"{'tokens':<8}{'sum':>18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
    for name in ("input", "output"):
        s = d[f"{name}_tokens"]
        values = "".join(f"{shown(s[q], ',.0f'):>10}" for q in ("mean", "p50", "p90", "p99", "max"))
        lines.append(f"{name:<8}{s['sum']:>18,}{values}")
    over = ", ".join(f"{int(k):,}: {n / d['rows']:.1%}" for k, n in d["longer_than"].items() if n)
    if over:
        lines.append(f"input + output above {over} of the rows (--max-model-len)")
    if d["prefix"]:
        p = d["prefix"]
        lines.append(
            f"prefixes     {d['prefix_hit_share']:.1%} of {p['blocks']:,} blocks of {d['block_size']} and "
            f"{d['prefix_hit_token_share']:.1%} of the input tokens were seen before, {p['unique_ids']:,} distinct"
        )
    if d["sessions"]:
        lines.append(f"sessions     {d['sessions']:,}, the longest of {d['longest_session_turns']:,} turns")
    lines += [f"note         {quirk}" for quirk in d["quirks"]]
    return "\n".join(lines)


def write_picture(
    path: str | Path, out: str | Path, trace_format: str | None = None, block_size: int | None = None
) -> dict[str, Any]:
    """Describe, and write one self-contained page: arrivals over time, and how lengths are distributed."""
    from loadgen.page_style import STYLE
    from loadgen.svg import Scale, Series, chart, scale_for

    trace, tally = _read(path, trace_format, block_size)
    description = _summary(trace, tally)
    charts = []
    arrivals = tally.arrivals
    if arrivals.first_ns is not None and arrivals.span_ns:
        used = arrivals.span_ns // arrivals.bin_ns + 1
        width_s = arrivals.bin_ns / 1e9
        x = (np.arange(used) * width_s + arrivals.first_ns / 1e9).astype(np.float64)
        y = arrivals.bins[:used] / width_s
        charts.append(
            chart(
                f"Arrivals, in windows of {width_s:.3g} s",
                [Series("requests/s", x, y, kind="steps")],
                Scale(float(x[0]), float(x[-1] + width_s), "s"),
                scale_for([y], "requests/s", log=False),
                width=940,
            )
        )
    curves = []
    for colour, (name, lengths) in enumerate((("input", tally.inputs), ("output", tally.outputs))):
        if lengths.counts:
            values = np.array(sorted(lengths.counts), dtype=np.float64)
            share = np.cumsum([lengths.counts[int(v)] for v in values])
            curves.append(Series(name, values, share / share[-1] * 100, colour, "steps"))
    if curves:
        charts.append(
            chart(
                "Lengths: share of the rows up to each",
                curves,
                scale_for([one.x for one in curves], "tokens"),
                Scale(0, 100, "%"),
                width=940,
            )
        )
    keys = "".join(f'<span><span class="key c{one.colour}"></span>{one.name}</span>' for one in curves)
    Path(out).write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(trace.name)}</title>'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(trace.name)}</h1>"
        f"<pre>{escape(text_of(description))}</pre>{''.join(charts)}"
        f'<div class="legend">{keys}</div></main></body></html>\n',
        encoding="utf-8",
    )
    return description

"""Traces: what production really asked for, one row a request. The canonical format, its rules, and the replay of it.

`loadgen.trace/1` is JSON Lines with the names of Mooncake and AIPerf, times in ms; docs/traces.md has all fields. A
plain Mooncake file is a valid trace. trace_formats.py reads other files into the same rows.

    {"schema": "loadgen.trace/1", "block_size": 512}                                            (optional)
    {"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]}

Rows stream: whatever the length of a file, a bounded number of them is held. in_order() sorts within a window,
replay() applies the rules of a run, and Counts says what became of every row: read = planned + skipped.
In memory times are integer ns, as everywhere; a file's ms keep four decimals (100 ns).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from loadgen.options import UsageError

SCHEMA = "loadgen.trace/1"
CONTENTS = ("text_input", "messages", "payload", "prompt_token_ids")
CONTEXT_MODES = ("full", "delta", "delta_with_responses")

_WINDOW_ROWS = 1 << 14  # rows held to sort a file that is not quite in order
_WINDOW_WEIGHT = 2_000_000  # and at most so many ids and characters / 8 in them
_KNOWN_IDS = 1 << 20  # request ids remembered: a duplicate further away than this is not noticed
_MAX_MS = 1e14  # 3,000 years: beyond it is a wrong unit or no time at all


class TraceError(UsageError):
    """A file that is not a trace, or a row that breaks the rules: one line with file and line number."""


class TraceRow(NamedTuple):
    """One request as recorded. Lengths are tokens; None = the file does not say.

    A tuple, as making a million of them takes a second; a frozen dataclass of this many fields takes six times that.
    """

    line: int  # of the file, from 1
    timestamp_ns: int | None = None  # recorded arrival, from the trace's own zero
    input_length: int | None = None  # the whole prompt, history and template included
    output_length: int | None = None  # 0 = recorded as none
    hash_ids: Sequence[int] | None = None  # each stands for a block of tokens and all before it
    hash_scope: str | None = None  # namespace of hash_ids; None = the file
    delay_ns: int | None = None  # think time: from the end of the anchor to this start
    request_id: str | None = None
    session_id: str | None = None
    turn: int | None = None  # from 1
    after: tuple[str, ...] = ()  # request ids that must have ended; the first is the anchor of delay_ns
    prefix_length: int | None = None  # leading tokens shared with the session's context before, where no ids exist
    segments: Sequence[Mapping[str, Any]] | None = None  # {id, tokens, kind?}: chunks of any length, in order
    content: tuple[str, Any] | None = None  # (one of CONTENTS, its value)
    tools: Any = None  # beside messages
    context_mode: str | None = None  # None: as the header says, else full
    output_text: str | None = None  # recorded answer
    num_images: int | None = None
    model: str | None = None
    stream: bool | None = None
    extra: Mapping[str, Any] | None = None
    tags: Mapping[str, str] | None = None
    recorded: Mapping[str, Any] | None = None  # what became of it at the source; never a target
    source: Mapping[str, Any] | None = None  # the source's other fields, as they were


@dataclass(slots=True)
class Counts:
    """What became of the rows that were read; read = planned + sum of skipped."""

    read: int = 0
    planned: int = 0
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    clipped: Counter[str] = field(default_factory=Counter)  # input_rows, input_tokens, output_rows, output_tokens
    inversions: int = 0  # rows that are earlier than the row before them in the file
    capped_gaps: int = 0
    capped_delays: int = 0
    zero_output_as_one: int = 0
    estimated_output: int = 0  # no length in the file: a quarter of the characters of the recorded answer
    default_output: int = 0  # no length and no answer in the file
    offset_ns: int | None = None  # trace time of the first row in the window: replay's zero
    ended_by: str | None = None  # "--to" when the rest of the file was not read
    unknown_keys: Counter[str] = field(default_factory=Counter)


# ---------------------------------------------------------------- the canonical row


def parse_row(fields: Any, line: int, unknown_keys: Counter[str] | None = None) -> TraceRow:
    """A row of a JSON object. Raises ValueError for anything out of range; unknown keys go to `source`."""
    if type(fields) is not dict:
        raise ValueError(f"a row must be a JSON object, not {_shown(fields)}")
    get = fields.get
    timestamp, hash_ids = get("timestamp"), get("hash_ids")
    input_length, output_length = get("input_length"), get("output_length")
    others = len(fields) - (timestamp is not None) - (hash_ids is not None)
    if input_length is not None:
        others -= 1
        if type(input_length) is not int or input_length < 0:
            _whole(input_length, "input_length", 0)
    if output_length is not None:
        others -= 1
        if type(output_length) is not int or output_length < 0:
            _whole(output_length, "output_length", 0)
    if timestamp is not None:
        timestamp = _ns(timestamp, "timestamp")
    if hash_ids is not None:
        _check_ids(hash_ids)
    if others == 0 and input_length is not None:  # most rows of most traces
        return TraceRow(line, timestamp, input_length, output_length, hash_ids)
    return _parse_rest(fields, line, timestamp, unknown_keys)


def _parse_rest(
    fields: dict[str, Any], line: int, timestamp_ns: int | None, unknown_keys: Counter[str] | None
) -> TraceRow:
    get = fields.get
    delay = get("delay")
    given = [name for name in CONTENTS if get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"a row has one content, not {' and '.join(given)}")
    if not given and get("input_length") is None:
        raise ValueError(f"a row needs input_length or one of {', '.join(CONTENTS)}")
    turn = get("turn")
    mode = get("context_mode")
    if mode is not None and mode not in CONTEXT_MODES:
        raise ValueError(f"context_mode must be one of {', '.join(CONTEXT_MODES)}, not {_shown(mode)}")
    if given:
        _check_content(given[0], fields[given[0]])
    if get("prefix_length") is not None and (get("hash_ids") is not None or get("segments") is not None):
        raise ValueError("prefix_length is for rows without hash_ids and segments")
    if get("segments") is not None and get("hash_ids") is not None:
        raise ValueError("a row has segments or hash_ids, not both")
    if get("segments") is not None:
        _check_segments(get("segments"), get("input_length"))
    after = get("after")
    if after is not None and not (type(after) is list and all(type(name) is str for name in after)):
        raise ValueError(f"after must be a list of request ids, not {_shown(after)}")
    unknown = {name: value for name, value in fields.items() if name not in _KEYS}
    if unknown and unknown_keys is not None:
        unknown_keys.update(unknown.keys())
    for name in ("request_id", "session_id", "hash_scope", "model", "output_text"):
        if (value := get(name)) is not None and type(value) is not str:
            raise ValueError(f"{name} must be a string, not {_shown(value)}")
    for name in ("extra", "tags", "recorded", "source"):
        if (value := get(name)) is not None and type(value) is not dict:
            raise ValueError(f"{name} must be an object, not {_shown(value)}")
    return TraceRow(
        line=line,
        timestamp_ns=timestamp_ns,
        input_length=get("input_length"),
        output_length=get("output_length"),
        hash_ids=get("hash_ids"),
        hash_scope=get("hash_scope"),
        delay_ns=None if delay is None else _ns(delay, "delay"),
        request_id=get("request_id"),
        session_id=get("session_id"),
        turn=None if turn is None else _whole(turn, "turn", 1),
        after=tuple(after or ()),
        prefix_length=None if get("prefix_length") is None else _whole(get("prefix_length"), "prefix_length", 0),
        segments=get("segments"),
        content=(given[0], fields[given[0]]) if given else None,
        tools=get("tools"),
        context_mode=mode,
        output_text=get("output_text"),
        num_images=None if get("num_images") is None else _whole(get("num_images"), "num_images", 0),
        model=get("model"),
        stream=get("stream"),
        extra=get("extra"),
        tags=get("tags"),
        recorded=get("recorded"),
        source={**(get("source") or {}), **unknown} or None,
    )


_KEYS = frozenset(
    "timestamp delay request_id session_id turn after input_length output_length hash_ids hash_scope prefix_length "
    "segments text_input messages tools payload prompt_token_ids context_mode output_text num_images model stream "
    "extra tags recorded source".split()
)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(value: Any, name: str, least: int) -> int:
    if type(value) is not int or value < least:  # a bool is not a number here
        raise ValueError(f"{name} must be a whole number of {least} or more, not {_shown(value)}")
    return value


def _ns(value: Any, name: str) -> int:
    """ns of a time in ms, exact to 100 ns."""
    if type(value) is int and 0 <= value < _MAX_MS:
        return value * 1_000_000
    if type(value) is not float or not 0 <= value < _MAX_MS:  # NaN and Infinity are in no range
        raise ValueError(f"{name} must be a number of ms, 0 or more and below {_MAX_MS:g}, not {_shown(value)}")
    return round(value * 10_000) * 100


def _check_ids(ids: Any) -> None:
    if type(ids) is not list:
        raise ValueError(f"hash_ids must be a list of whole numbers, not {_shown(ids)}")
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0):  # a loop in C: there may be thousands
        wrong = next(value for value in ids if type(value) is not int or value < 0)
        raise ValueError(f"hash_ids must be whole numbers of 0 or more, not {_shown(wrong)}")


def _check_segments(segments: Any, input_length: int | None) -> None:
    if type(segments) is not list or not all(type(s) is dict and "id" in s for s in segments):
        raise ValueError("segments must be a list of {id, tokens, kind}")
    total = sum(_whole(segment.get("tokens"), "tokens of a segment", 0) for segment in segments)
    if input_length is None or total > input_length:
        raise ValueError(f"segments have {total} tokens together, more than input_length {input_length}")


def _check_content(name: str, value: Any) -> None:
    kind = {"text_input": str, "messages": list, "payload": dict, "prompt_token_ids": list}[name]
    if type(value) is not kind or not value:
        raise ValueError(f"{name} must be a {kind.__name__} with something in it, not {_shown(value)}")
    if name == "messages" and not all(type(message) is dict for message in value):
        raise ValueError("messages must be a list of objects with role and content")
    if name == "prompt_token_ids":
        for token in value:
            _whole(token, "prompt_token_ids", 0)


def read_canonical(
    lines: Iterable[tuple[int, bytes]], name: str, unknown_keys: Counter[str], *, unit_ns: int = 1_000_000
) -> Iterator[TraceRow]:
    """Rows of JSON lines (the header, if there is one, already taken off). unit_ns: of timestamp and delay in the file.

    Raises TraceError with the line for what is not a row, a request_id that was seen before, or an `after` that names
    no earlier row (so that no cycle can be).
    """
    seen: dict[str, None] = {}
    for number, line in lines:
        try:
            fields = orjson.loads(line)
            if unit_ns != 1_000_000 and type(fields) is dict:
                for key in ("timestamp", "delay"):
                    if type(fields.get(key)) in (int, float):
                        fields[key] *= unit_ns / 1_000_000
            row = parse_row(fields, number, unknown_keys)
            if row.request_id is not None or row.after:
                _check_references(row, seen)
        except ValueError as error:
            raise TraceError(f"{name}, line {number}: {error}") from None
        yield row


def _check_references(row: TraceRow, seen: dict[str, None]) -> None:
    for other in row.after:
        if other not in seen:
            raise ValueError(f"after names {other!r}, which is no earlier row")
    if row.request_id is not None:
        if row.request_id in seen:
            raise ValueError(f"request_id {row.request_id!r} was used before")
        seen[row.request_id] = None
        if len(seen) > _KNOWN_IDS:
            del seen[next(iter(seen))]


def ms(time_ns: int) -> int | float:
    """ns as the format's ms: a whole number where it is one, else up to four decimals."""
    return time_ns // 1_000_000 if time_ns % 1_000_000 == 0 else round(time_ns / 1e6, 4)


def row_fields(row: TraceRow) -> dict[str, Any]:
    """The row as the canonical JSON object, in the documented order of keys."""
    fields: dict[str, Any] = {}
    if row.timestamp_ns is not None:
        fields["timestamp"] = ms(row.timestamp_ns)
    if row.delay_ns is not None:
        fields["delay"] = ms(row.delay_ns)
    for key in _PLAIN_FIELDS:
        if (value := getattr(row, key)) is not None and value != ():
            fields[key] = list(value) if type(value) is tuple else value
    if row.content is not None:
        fields[row.content[0]] = row.content[1]
    return fields


_PLAIN_FIELDS = (
    "request_id session_id turn after input_length output_length hash_ids hash_scope prefix_length segments tools "
    "context_mode output_text num_images model stream extra tags recorded source"
).split()


def line_of(fields: Mapping[str, Any]) -> bytes:
    """One line of a JSON Lines file."""
    return orjson.dumps(fields) + b"\n"


# ---------------------------------------------------------------- order


def _weight(row: TraceRow) -> int:
    weight = len(row.hash_ids) if row.hash_ids is not None else 0
    if row.content is not None or row.output_text is not None:
        weight += (len(str(row.content)) + len(row.output_text or "")) // 8
    return weight


def in_order(rows: Iterable[TraceRow], counts: Counts, name: str) -> Iterator[TraceRow]:
    """The rows sorted by timestamp; equal times keep the order of the file. Counts the inversions.

    A step back is never taken for a new day. A row without a time stays behind the row before it. A window of rows is
    held back, and a row may be that far from its place; one is read for one that is given, so that a replay never stops
    to read many. Raises TraceError for a row that is further away (sorting needs the whole file then), and what `rows`
    raises, both when all rows before it are given out.
    """
    held: deque[tuple[int, TraceRow]] = deque()
    weight = 0
    newest = given_out = -(1 << 62)
    broken: TraceError | None = None
    source = iter(rows)
    while True:
        try:
            row = next(source)
        except StopIteration:
            break
        except TraceError as error:
            broken = error
            break
        key = row.timestamp_ns
        if key is None:
            key = newest
        elif key < newest:
            counts.inversions += 1
            if key < given_out:
                broken = TraceError(
                    f"{name}, line {row.line}: steps back in time over more than {len(held):,} rows; sort the file"
                )
                break
        newest = key
        if not held or key >= held[-1][0]:
            held.append((key, row))
        else:
            held.insert(bisect_right(held, key, key=itemgetter(0)), (key, row))
        weight += _weight(row)
        while len(held) > _WINDOW_ROWS or (weight > _WINDOW_WEIGHT and len(held) > 1):
            given_out, ready = held.popleft()
            weight -= _weight(ready)
            yield ready
    while held:
        yield held.popleft()[1]
    if broken is not None:
        raise broken


# ---------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True)
class Rules:
    """How a trace is replayed. Times are of the trace's own clock, before the speed-up; from_ns <= t < to_ns."""

    timed: bool = True  # recorded times are needed
    speedup: float = 1.0  # divides offsets; 2 = twice as fast
    speedup_delays: bool = False  # divides think times, too
    from_ns: int | None = None
    to_ns: int | None = None
    max_gap_ns: int | None = None  # a longer gap between two rows that are sent, or think time, becomes this long
    max_model_len: int | None = None  # longest input + output
    overflow: str = "skip"  # skip, clip-input, clip-output, fail
    zero_output: str = "skip"  # skip, one
    default_output: int = 128  # where the file does not say


class Replayed(NamedTuple):
    """A row that is sent, with what the rules made of it."""

    row: TraceRow
    offset_ns: int | None  # from the start of the replay; None without a recorded time
    delay_ns: int | None
    input_length: int | None
    output_length: int


def replay(rows: Iterable[TraceRow], rules: Rules, counts: Counts, name: str) -> Iterator[Replayed]:
    """The rows that are sent, in order. `rows` must be in order of time.

    The first row in the window is replay's zero, even when it is skipped: which rows a model is too small for does
    not move the others. Skipped, by reason: before_from, zero_output, no_input, too_long. Raises TraceError for a row
    that is too long where the rules say fail, or has no time where times are needed.
    """
    cut_ns = 0  # taken out of gaps so far
    last_ns: int | None = None
    sessions: set[int] = set()  # hashes of the sessions that were sent something
    for row in rows:
        time_ns = row.timestamp_ns
        follows = row.session_id is not None and hash(row.session_id) in sessions
        if time_ns is None:
            # a later turn needs no time; one whose session began before the window is skipped below
            cut_off = rules.from_ns and row.session_id is not None
            if (rules.timed or rules.from_ns or rules.to_ns) and not follows and not cut_off:
                raise TraceError(
                    f"{name}, line {row.line}: no timestamp: replay it with --rate R or --concurrency N, "
                    "without --from and --to"
                )
        elif rules.to_ns is not None and time_ns >= rules.to_ns:
            counts.ended_by = "--to"
            return
        counts.read += 1
        if rules.from_ns and (time_ns < rules.from_ns if time_ns is not None else not follows):
            counts.skipped["before_from"] += 1
            continue
        if counts.offset_ns is None:
            counts.offset_ns = time_ns
        size = _fitted(row, rules, counts, name)
        if size is None:
            continue
        if time_ns is not None:
            if rules.max_gap_ns is not None and last_ns is not None and time_ns - last_ns > rules.max_gap_ns:
                cut_ns += time_ns - last_ns - rules.max_gap_ns
                counts.capped_gaps += 1
            last_ns = time_ns
        delay_ns = row.delay_ns
        if delay_ns is not None:
            if rules.max_gap_ns is not None and delay_ns > rules.max_gap_ns:
                delay_ns = rules.max_gap_ns
                counts.capped_delays += 1
            if rules.speedup_delays:
                delay_ns = round(delay_ns / rules.speedup)
        if row.session_id is not None:
            sessions.add(hash(row.session_id))
        counts.planned += 1
        offset_ns = None
        if time_ns is not None and counts.offset_ns is not None:
            offset_ns = round((time_ns - counts.offset_ns - cut_ns) / rules.speedup)
        yield Replayed(row, offset_ns, delay_ns, *size)


def _fitted(row: TraceRow, rules: Rules, counts: Counts, name: str) -> tuple[int | None, int] | None:
    """(input, output) tokens of a row that is sent, else None, counted."""
    length, output = row.input_length, row.output_length
    if length == 0 and row.content is None:
        counts.skipped["zero_output" if output == 0 and rules.zero_output == "skip" else "no_input"] += 1
        return None
    if output is None and row.output_text is not None:
        counts.estimated_output += 1
        output = estimated_tokens(row.output_text)
    if output is None:
        counts.default_output += 1
        output = rules.default_output
    if output == 0:
        if rules.zero_output == "skip":
            counts.skipped["zero_output"] += 1
            return None
        counts.zero_output_as_one += 1
        output = 1
    limit = rules.max_model_len
    if limit is None or length is None or length + output <= limit:
        return length, output
    if rules.overflow == "fail":
        raise TraceError(
            f"{name}, line {row.line}: {length} + {output} tokens, and the model takes {limit}: "
            "choose --overflow skip, clip-input or clip-output"
        )
    if rules.overflow == "clip-input" and row.content is None and output < limit:
        counts.clipped.update(input_rows=1, input_tokens=length + output - limit)
        return limit - output, output
    if rules.overflow == "clip-output" and length < limit:
        counts.clipped.update(output_rows=1, output_tokens=length + output - limit)
        return length, limit - length
    counts.skipped["too_long"] += 1
    return None


def estimated_tokens(text: str) -> int:
    """A quarter of the characters, at least 1: for texts without a count, where no tokenizer is asked."""
    return max(1, round(len(text) / 4))


def mean_rate_per_s(rows: Iterable[Replayed]) -> float:
    """Rows that are sent over the span of their times, before any speed-up; what --arrival recorded rescales.

    Raises TraceError when there are fewer than two distinct times.
    """
    count = 0
    first = last = None
    for item in rows:
        count += 1
        if item.offset_ns is not None:
            first = item.offset_ns if first is None else first
            last = item.offset_ns
    if first is None or last is None or last == first:
        raise TraceError("a mean rate needs rows at two different times at least: use --arrival poisson")
    return count / ((last - first) / 1e9)


# ---------------------------------------------------------------- blocks


def check_layout(row: TraceRow, block_size: int) -> None:
    """Raises ValueError when hash_ids and input_length do not fit: n blocks reach past the end by a whole block."""
    count, length = len(row.hash_ids or ()), row.input_length
    if length is not None and count and (count - 1) * block_size >= length:
        raise ValueError(
            f"{count} hash_ids of {block_size} tokens do not fit into input_length {length}: is --block-size right?"
        )


def infer_block_size(rows: Iterable[TraceRow]) -> int | None:
    """The one B of 16, 32, ... 1024 for which all rows have ceil(input / B) ids, or all have floor; else None."""
    pairs = [(r.input_length, len(r.hash_ids)) for r in rows if r.hash_ids is not None and r.input_length is not None]
    sizes = [16 << k for k in range(7)]
    fit = [
        b
        for b in sizes
        if all(n == math.ceil(length / b) for length, n in pairs) or all(n == length // b for length, n in pairs)
    ]
    return fit[0] if pairs and len(fit) == 1 else None

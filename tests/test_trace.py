"""The canonical trace: what is a row, in which order rows come, and what a replay makes of them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from loadgen import trace as trace_module
from loadgen.trace import (
    Counts,
    Replayed,
    Rules,
    TraceError,
    TraceRow,
    check_layout,
    in_order,
    infer_block_size,
    line_of,
    mean_rate_per_s,
    parse_row,
    read_canonical,
    replay,
    row_fields,
)

S = 1_000_000_000
MS = 1_000_000


def rows_of(*lines: str) -> list[TraceRow]:
    return list(read_canonical([(n, line.encode()) for n, line in enumerate(lines, 1)], "t.jsonl", Counter()))


def timed(*times_s: float, **same: Any) -> list[TraceRow]:
    """Rows of 10 tokens in, 5 out, at these times."""
    size = {"input_length": 10, "output_length": 5, **same}
    return [TraceRow(n, timestamp_ns=round(t * S), **size) for n, t in enumerate(times_s, 1)]


def replayed(rows: Iterable[TraceRow], counts: Counts | None = None, **rules: Any) -> list[Replayed]:
    counts = counts or Counts()
    made = list(replay(rows, Rules(**rules), counts, "t.jsonl"))
    assert counts.read == counts.planned + sum(counts.skipped.values())
    assert counts.planned == len(made)
    return made


def offsets_s(made: Iterable[Replayed]) -> list[float | None]:
    return [None if one.offset_ns is None else one.offset_ns / S for one in made]


# ---------------------------------------------------------------- rows


def test_a_plain_mooncake_row_is_a_row() -> None:
    (row,) = rows_of('{"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]}')
    assert row == TraceRow(1, 3 * S, 1100, 4, [7, 8, 9])


def test_every_field_survives_reading_and_writing() -> None:
    fields = {
        "timestamp": 1234.5678,
        "delay": 20,
        "request_id": "b",
        "session_id": "s",
        "turn": 2,
        "after": ["a"],
        "input_length": 9,
        "output_length": 3,
        "hash_scope": "x",
        "tools": [{"type": "function"}],
        "context_mode": "delta",
        "output_text": "yes",
        "num_images": 1,
        "model": "m",
        "stream": True,
        "extra": {"top_p": 0.5},
        "tags": {"log_type": "API"},
        "recorded": {"status": "ok"},
        "source": {"x": 1},
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert row_fields(parse_row(fields, 1)) == fields
    segments = {"input_length": 9, "segments": [{"id": 4, "tokens": 9, "kind": "history"}]}
    assert row_fields(parse_row(segments, 1)) == segments
    prefix = {"input_length": 9, "prefix_length": 4}
    assert row_fields(parse_row(prefix, 1)) == prefix


def test_times_are_exact_to_100_ns_however_late() -> None:
    # 19,440,301,000.1234 ms is 225 days: ns do not fit a float any more, 100 ns do
    for text, ns in (("0.0001", 100), ("1.5", 1_500_000), ("19440301000.1234", 19_440_301_000_123_400)):
        (row,) = rows_of(f'{{"timestamp": {text}, "input_length": 1}}')
        assert row.timestamp_ns == ns
        assert parse_row(row_fields(row), 1) == row


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": NaN, "input_length": 1}', "line 1"),
        ('{"timestamp": Infinity, "input_length": 1}', "line 1"),
        ('{"timestamp": 1e999, "input_length": 1}', "line 1"),
        ('{"timestamp": -1, "input_length": 1}', "timestamp must be a number of ms, 0 or more"),
        ('{"timestamp": true, "input_length": 1}', "timestamp must be a number"),
        ('{"timestamp": "82", "input_length": 1}', "timestamp must be a number"),
        ('{"input_length": true}', "input_length must be a whole number"),
        ('{"input_length": 1.5}', "input_length must be a whole number"),
        ('{"input_length": -1}', "input_length must be a whole number of 0 or more"),
        ('{"input_length": 1, "output_length": false}', "output_length"),
        ('{"input_length": 1, "turn": 0}', "turn must be a whole number of 1 or more"),
        ('{"input_length": 1, "hash_ids": [1, -2]}', "hash_ids"),
        ('{"input_length": 1, "hash_ids": [1, true]}', "hash_ids"),
        ('{"input_length": 1, "hash_ids": {"a": 1}}', "hash_ids must be a list"),
        ('{"input_length": 1, "delay": -5}', "delay"),
        ('{"output_length": 1}', "input_length or one of"),
        ('{"text_input": "a", "messages": [{}]}', "one content"),
        ('{"text_input": ""}', "text_input"),
        ('{"messages": ["hi"]}', "messages"),
        ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids"),
        ('{"input_length": 5, "segments": [{"id": 1, "tokens": 6}]}', "more than input_length 5"),
        ('{"input_length": 5, "segments": [], "hash_ids": [1]}', "not both"),
        ('{"input_length": 5, "prefix_length": 2, "hash_ids": [1]}', "prefix_length"),
        ('{"input_length": 5, "context_mode": "some"}', "context_mode"),
        ('{"input_length": 5, "session_id": 7}', "session_id must be a string"),
        ('{"input_length": 5, "tags": []}', "tags must be an object"),
        ('{"input_length": 5, "after": "a"}', "after must be a list"),
        ("[1, 2]", "JSON object"),
        ('{"input_length": 5', "line 1"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(line: str, words: str) -> None:
    with pytest.raises(TraceError, match="t.jsonl, line 1") as caught:
        rows_of(line)
    assert words in str(caught.value)


def test_ids_are_unique_and_after_names_an_earlier_row() -> None:
    a, b = '{"request_id": "a", "input_length": 1}', '{"request_id": "b", "after": ["a"], "input_length": 1}'
    assert rows_of(a, b)[1].after == ("a",)
    with pytest.raises(TraceError, match="line 2: request_id 'a' was used before"):
        rows_of(a, a)
    with pytest.raises(TraceError, match="line 1: after names 'a', which is no earlier row"):
        rows_of(b, a)  # so no cycle can be, of one row neither:
    with pytest.raises(TraceError, match="line 1: after names 'b'"):
        rows_of('{"request_id": "b", "after": ["b"], "input_length": 1}')


def test_unknown_keys_are_kept_and_counted() -> None:
    unknown: Counter[str] = Counter()
    line = b'{"input_length": 1, "type": "text", "source": {"x": 1}}'
    (row,) = read_canonical([(1, line)], "t", unknown)
    assert row.source == {"x": 1, "type": "text"} and unknown == {"type": 1}


def test_seconds_are_read_as_such_when_told() -> None:
    (row,) = read_canonical([(1, b'{"timestamp": 1.5, "delay": 2, "input_length": 1}')], "t", Counter(), unit_ns=S)
    assert (row.timestamp_ns, row.delay_ns) == (1_500_000_000, 2_000_000_000)


# ---------------------------------------------------------------- order


def test_rows_are_sorted_stably_and_inversions_counted() -> None:
    counts = Counts()
    made = list(in_order(timed(3, 1, 2, 2, 0, 5), counts, "t"))
    # earlier than the one before: 1 (after 3) and 0 (after 2)
    assert [row.line for row in made] == [5, 2, 3, 4, 1, 6] and counts.inversions == 2


def test_a_step_back_is_no_new_day() -> None:
    made = list(in_order(timed(604_441, 604_453, 0, 7), Counts(), "t"))
    assert [row.timestamp_ns for row in made] == [0, 7 * S, 604_441 * S, 604_453 * S]


def test_rows_stream_and_too_far_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_WINDOW_ROWS", 8)
    taken = 0

    def source(late: float) -> Iterable[TraceRow]:
        nonlocal taken
        for n, row in enumerate(timed(*range(100), late)):
            taken = n + 1
            yield row

    ordered = in_order(source(97.5), Counts(), "t")
    assert next(ordered).timestamp_ns == 0 and taken == 9
    assert next(ordered).timestamp_ns == S and taken == 10  # one is read for one that is given
    made = list(in_order(source(97.5), Counts(), "t"))
    assert [row.timestamp_ns / S for row in made if row.timestamp_ns is not None][-4:] == [97, 97.5, 98, 99]
    with pytest.raises(TraceError, match="line 101: steps back in time over more than 8 rows"):
        list(in_order(source(3), Counts(), "t"))
    late = in_order(source(3), Counts(), "t")
    assert [next(late).line for _ in range(100)] == list(range(1, 101))  # all before it are given first


def test_long_rows_shorten_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "_WINDOW_WEIGHT", 100)
    taken = 0

    def source() -> Iterable[TraceRow]:
        nonlocal taken
        for row in timed(*range(50), hash_ids=list(range(30))):
            taken += 1
            yield row

    next(iter(in_order(source(), Counts(), "t")))
    assert taken == 4  # 4 x 30 ids are more than 100
    counts = Counts()
    backwards = timed(*range(20, 0, -1), hash_ids=[1])
    assert [row.line for row in in_order(backwards, counts, "t")] == list(range(20, 0, -1)) and counts.inversions == 19


def test_rows_without_times_keep_their_place() -> None:
    rows = [TraceRow(1, 5 * S), TraceRow(2), TraceRow(3, 1 * S), TraceRow(4)]
    assert [row.line for row in in_order(rows, Counts(), "t")] == [3, 4, 1, 2]
    assert [row.line for row in in_order([TraceRow(1), TraceRow(2)], Counts(), "t")] == [1, 2]


# ---------------------------------------------------------------- replay


def test_times_count_from_the_first_row_and_speedup_divides_them() -> None:
    # B15 (Azure form): 1.5, 7.5, 88.75 and 99.25 ms apart
    rows = timed(46.903, 46.9045, 46.912, 47.00075, 47.1000009)
    assert offsets_s(replayed(rows)) == [0, 0.0015, 0.009, 0.09775, 0.1970009]
    counts = Counts()
    assert offsets_s(replayed(timed(0, 3, 3.05, 27), counts, speedup=10)) == [0, 0.3, 0.305, 2.7]
    assert counts.offset_ns == 0


def test_the_window_is_half_open_and_on_the_traces_own_clock() -> None:
    counts = Counts()
    made = replayed(timed(100, 110, 120, 130), counts, from_ns=110 * S, to_ns=130 * S)
    assert offsets_s(made) == [0, 10] and [one.row.line for one in made] == [2, 3]
    assert (counts.read, counts.skipped, counts.ended_by) == (3, {"before_from": 1}, "--to")
    assert counts.offset_ns == 110 * S


def test_rows_without_output_are_skipped_or_made_one() -> None:
    # B16 (BurstGPT form): 3 of 5 rows have an answer; the first row, a skipped one, is the zero of the replay
    rows = [
        TraceRow(2, 3 * S, 200, 0),
        TraceRow(3, 5 * S, 400, 18),
        TraceRow(4, 45 * S + S // 2, 30, 7),
        TraceRow(5, 45 * S + S // 2, 0, 0),
        TraceRow(6, 118 * S, 90, 12),
    ]
    counts = Counts()
    made = replayed(rows, counts)
    assert [one.output_length for one in made] == [18, 7, 12] and counts.skipped == {"zero_output": 2}
    assert offsets_s(made) == [2, 42.5, 115]
    counts = Counts()
    made = replayed(rows, counts, zero_output="one")
    assert [one.output_length for one in made] == [1, 18, 7, 12]
    assert (counts.zero_output_as_one, counts.skipped) == (1, {"no_input": 1})  # a prompt of nothing cannot be sent


@pytest.mark.parametrize(
    ("overflow", "sizes", "skipped", "clipped"),
    [
        ("skip", [(50, 5)], {"too_long": 2}, {}),
        ("clip-input", [(50, 5), (90, 10)], {"too_long": 1}, {"input_rows": 1, "input_tokens": 15}),
        ("clip-output", [(50, 5)], {"too_long": 2}, {}),
    ],
)
def test_too_long_rows(
    overflow: str, sizes: list[tuple[int, int]], skipped: dict[str, int], clipped: dict[str, int]
) -> None:
    rows = [TraceRow(1, 0, 50, 5), TraceRow(2, S, 105, 10), TraceRow(3, 2 * S, 400, 200)]
    counts = Counts()
    made = replayed(rows, counts, max_model_len=100, overflow=overflow)
    assert [(one.input_length, one.output_length) for one in made] == sizes
    assert (counts.skipped, counts.clipped) == (skipped, clipped)


def test_clipped_outputs_and_the_time_axis_stays() -> None:
    rows = [TraceRow(1, 0, 500, 1), TraceRow(2, S, 90, 30), TraceRow(3, 3 * S, 10, 1)]
    counts = Counts()
    made = replayed(rows, counts, max_model_len=100, overflow="clip-output")
    assert [(one.input_length, one.output_length) for one in made] == [(90, 10), (10, 1)]
    assert offsets_s(made) == [1, 3]  # the row that is left out does not move the others
    assert counts.clipped == {"output_rows": 1, "output_tokens": 20}
    with pytest.raises(TraceError, match=r"line 1: 500 \+ 1 tokens, and the model takes 100"):
        replayed(rows, max_model_len=100, overflow="fail")


def test_gaps_and_think_times_are_capped_and_counted() -> None:
    rows = timed(0, 1, 101, 102, session_id="s", delay_ns=50 * S)
    counts = Counts()
    made = replayed(rows, counts, max_gap_ns=10 * S, speedup=2)
    # 100 s become 10, then all is divided by 2
    assert offsets_s(made) == [0, 0.5, 5.5, 6.0] and counts.capped_gaps == 1
    assert {one.delay_ns for one in made} == {10 * S} and counts.capped_delays == 4
    made = replayed(rows, speedup=2, speedup_delays=True)
    assert {one.delay_ns for one in made} == {25 * S}


def test_lengths_that_the_file_does_not_say() -> None:
    rows = [TraceRow(1, 0, 7, output_text="x" * 41), TraceRow(2, 0, 7)]
    counts = Counts()
    assert [one.output_length for one in replayed(rows, counts, default_output=33)] == [10, 33]
    assert (counts.estimated_output, counts.default_output) == (1, 1)


def test_rows_without_times_need_another_pace() -> None:
    rows = [TraceRow(1, input_length=5, output_length=5)]
    with pytest.raises(TraceError, match="line 1: no timestamp: replay it with --rate R or --concurrency N"):
        replayed(rows)
    assert offsets_s(replayed(rows, timed=False)) == [None]
    later = [TraceRow(1, 0, 5, 5, session_id="s"), TraceRow(2, None, 5, 5, session_id="s", delay_ns=S)]
    assert offsets_s(replayed(later)) == [0, None]  # a later turn's time comes from the turn before
    counts = Counts()
    assert offsets_s(replayed([*later, TraceRow(3, 9 * S, 5, 5)], counts, from_ns=5 * S)) == [0]
    assert counts.skipped == {"before_from": 2}  # the session began before the window


def test_mean_rate() -> None:
    assert mean_rate_per_s(replayed(timed(10, 11, 14))) == 3 / 4
    with pytest.raises(TraceError, match="two different times"):
        mean_rate_per_s(replayed(timed(10, 10)))


# ---------------------------------------------------------------- blocks


def test_the_block_size_is_inferred_only_when_one_fits() -> None:
    def rows(*pairs: tuple[int, int]) -> list[TraceRow]:
        return [TraceRow(n, 0, length, 1, list(range(ids))) for n, (length, ids) in enumerate(pairs)]

    assert infer_block_size(rows((1100, 3), (300, 1))) == 512  # B15 b: ceil
    assert infer_block_size(rows((130, 2), (190, 2), (1000, 15))) == 64  # floor: the tail has no id
    assert infer_block_size(rows((10, 1))) is None  # all of them fit
    assert infer_block_size(rows((1100, 3), (300, 2))) is None  # none fits
    assert infer_block_size(timed(1, 2)) is None


def test_ids_that_reach_past_the_end_are_refused() -> None:
    check_layout(TraceRow(1, 0, 1024, 1, [1, 2]), 512)
    check_layout(TraceRow(1, 0, 513, 1, [1, 2]), 512)
    check_layout(TraceRow(1, 0, 5000, 1, [1, 2]), 512)  # an unhashed tail
    with pytest.raises(ValueError, match="3 hash_ids of 512 tokens do not fit into input_length 1024"):
        check_layout(TraceRow(1, 0, 1024, 1, [1, 2, 3]), 512)


def test_a_line_is_a_line() -> None:
    assert line_of({"timestamp": 0}) == b'{"timestamp":0}\n'

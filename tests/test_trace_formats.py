"""Other people's formats: small files made to their descriptions, their traps, and the numbers of real samples."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from loadgen.trace import TraceError, TraceRow
from loadgen.trace_describe import describe
from loadgen.trace_formats import FORMATS, Trace, sha256, wall_clock_ticks

S = 1_000_000_000
SAMPLES = Path(os.environ.get("LOADGEN_SAMPLES") or Path(__file__).resolve().parents[2] / "shared" / "traces")


def written(tmp_path: Path, text: str | bytes, name: str = "file") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path, trace_format: str | None = None, block_size: int | None = None) -> tuple[Trace, list[TraceRow]]:
    with Trace(path, trace_format, block_size) as trace:
        return trace, list(trace.rows())


def times_s(rows: list[TraceRow]) -> list[float | None]:
    return [None if row.timestamp_ns is None else row.timestamp_ns / S for row in rows]


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.9030000,120,5
2023-11-16 18:15:46.9045000,80,3
2023-11-16 18:15:46.9120000,64,2
2023-11-16 18:15:47.0007500,32,4
2023-11-16 18:15:47.1000009,16,2
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
3,GPT-4,200,0,200,Conversation log
5,ChatGPT,400,18,418,Conversation log
45.5,GPT-4,30,7,37,API log
45.5,GPT-4,0,0,0,API log
118,ChatGPT,90,12,102,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 10]}
{"timestamp": 3050, "input_length": 300, "output_length": 2, "hash_ids": [11]}
{"timestamp": 27000, "input_length": 300, "output_length": 2, "hash_ids": [12]}
"""


# ---------------------------------------------------------------- Azure


def test_azure_2023_keeps_every_digit(tmp_path: Path) -> None:
    trace, rows = read(written(tmp_path, AZURE))
    assert trace.format == "azure"
    assert times_s(rows) == [0, 0.0015, 0.009, 0.09775, 0.1970009]
    assert [(row.input_length, row.output_length) for row in rows] == [(120, 5), (80, 3), (64, 2), (32, 4), (16, 2)]
    assert trace.header == {"time_origin": "2023-11-16 18:15:46.9030000"}


@pytest.mark.parametrize(
    "text",
    [
        AZURE.replace("\n", "\r\n").rstrip(),  # as published: CR LF, and no line end after the last row
        "\ufeff" + AZURE,
        AZURE.replace("46.9045000,80,3\n", "46.9045000,80,3\n\n\r\n"),
        AZURE + "\n\n",
    ],
)
def test_line_ends_marks_and_blank_lines_change_nothing(tmp_path: Path, text: str) -> None:
    assert times_s(read(written(tmp_path, text))[1]) == [0, 0.0015, 0.009, 0.09775, 0.1970009]


def test_what_is_unusual_about_a_file_is_noted(tmp_path: Path) -> None:
    trace, _ = read(written(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n").rstrip()))
    assert trace.found.sentences() == [
        "a byte order mark at the start",
        "lines end with CR LF",
        "no line end after the last row",
    ]


@pytest.mark.parametrize(
    ("text", "after_midnight_ticks"),
    [
        ("2024-05-10 00:00:00.009930+00:00", 99_300),
        ("2024-05-12 00:00:00+00:00", 0),  # Azure 2024 writes no fraction when it is 0
        ("2024-10-15T12:00:00.269Z", 432_002_690_000),
        ("2024-05-10 00:00:01", 10_000_000),
        ("2024-05-10 00:00:00.1234567", 1_234_567),
        ("2024-05-10 00:00:00.123456789", 1_234_567),
        ("2024-05-10 02:00:00.5+02:00", 5_000_000),
        ("2024-05-10 00:00:00.5-00:30", 18_000_000_000 + 5_000_000),
    ],
)
def test_wall_clocks(text: str, after_midnight_ticks: int) -> None:
    assert wall_clock_ticks(text) - wall_clock_ticks(text[:10] + " 00:00:00") == after_midnight_ticks


def test_a_clock_over_midnight_and_over_a_zone() -> None:
    assert wall_clock_ticks("2024-03-01 00:00:00") - wall_clock_ticks("2024-02-29 23:59:59.9") == 1_000_000
    assert wall_clock_ticks("2024-05-10 02:00:00+02:00") == wall_clock_ticks("2024-05-10 00:00:00Z")


@pytest.mark.parametrize("text", ["", "2024-05-10", "2024-13-10 00:00:00", "10:00:00.5", "2024-05-10 00:00:00.x"])
def test_what_is_no_wall_clock(text: str) -> None:
    with pytest.raises(ValueError):
        wall_clock_ticks(text)


def test_azure_lmm_has_images_and_its_columns_in_another_place(tmp_path: Path) -> None:
    text = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,2,770,491\n"
    trace, (row,) = read(written(tmp_path, text))
    assert trace.format == "azure" and (row.num_images, row.input_length, row.output_length) == (2, 770, 491)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("2023-11-16,1,1", "line 3: not a time"),
        ("2023-11-16 18:15:46.9,1", "line 3: 2 columns, the header has 3"),
        ("2023-11-16 18:15:46.9,-1,1", "line 3: ContextTokens must be a whole number"),
        ("2023-11-16 18:15:46.9,1,1.5", "line 3: GeneratedTokens must be a whole number"),
    ],
)
def test_a_broken_csv_row_is_refused_with_its_line(tmp_path: Path, row: str, words: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(written(tmp_path, "\n".join([*AZURE.splitlines()[:2], row])))
    assert words in str(caught.value)


# ---------------------------------------------------------------- BurstGPT


def test_burstgpt_1(tmp_path: Path) -> None:
    trace, rows = read(written(tmp_path, BURSTGPT))
    assert trace.format == "burstgpt" and times_s(rows) == [3, 5, 45.5, 45.5, 118]
    assert [row.output_length for row in rows] == [0, 18, 7, 0, 12]
    assert rows[0].recorded == {"status": "failed"} and rows[1].recorded is None
    assert rows[1].model == "ChatGPT" and rows[2].tags == {"log_type": "API log"}
    assert "not a real copy" in trace.found.sentences()[0]


def test_burstgpt_3_has_sessions_and_its_columns_elsewhere(tmp_path: Path) -> None:
    text = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,u-1,43,GPT-4,906,446,1352,Conversation log
19440120.0,,2,ChatGPT,36,29,65,API log
19440301.0,u-1,26,ChatGPT,1631,282,1913,Conversation log
"""
    trace, rows = read(written(tmp_path, text))
    first, api, second = rows
    assert times_s(rows) == [19440110, 19440120, 19440301]
    assert (first.session_id, first.turn, first.delay_ns) == ("u-1", 1, None)
    assert (api.session_id, api.turn) == (None, None)
    # 19440301 - (19440110 + 43): from the end of the turn before
    assert (second.turn, second.delay_ns, second.recorded) == (2, 148 * S, {"e2e_ms": 26_000})
    assert trace.found.sentences() == []  # the first row of the published file 3


def test_burstgpt_refuses_no_number(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2: Timestamp must be a number of seconds, not 'nan'"):
        read(written(tmp_path, BURSTGPT.replace("3,GPT", "nan,GPT", 1)))


# ---------------------------------------------------------------- Mooncake and AIPerf


def test_mooncake_is_the_canonical_format_without_header(tmp_path: Path) -> None:
    trace, rows = read(written(tmp_path, MOONCAKE))
    assert trace.format == "loadgen" and times_s(rows) == [0, 3, 3.05, 27]
    assert (trace.block_size, trace.block_size_from) == (512, "the lengths of the first rows")
    assert rows[1].hash_ids == [7, 8, 10]
    assert times_s(read(written(tmp_path, MOONCAKE), "mooncake")[1]) == [0, 3, 3.05, 27]


def test_the_header_says_the_block_size_and_unknown_versions_are_refused(tmp_path: Path) -> None:
    header = '{"schema": "loadgen.trace/1", "block_size": 16}\n'
    row = '{"input_length": 16, "output_length": 1, "hash_ids": [1]}\n'
    trace, rows = read(written(tmp_path, header + row))
    assert (trace.block_size, trace.block_size_from, rows[0].line) == (16, "the header", 2)
    with pytest.raises(TraceError, match="schema 'loadgen.trace/2' is not known here"):
        read(written(tmp_path, header.replace("/1", "/2") + row))
    with pytest.raises(TraceError, match="block_size must be a whole number"):
        read(written(tmp_path, header.replace("16", "0") + row))


def test_a_block_size_that_cannot_be_inferred_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, '{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match="line 1: .*give --block-size N"):
        read(path)
    assert read(path, block_size=512)[0].block_size == 512


def test_ids_that_do_not_fit_the_length_are_refused_with_their_line(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE + '{"timestamp": 28000, "input_length": 1024, "hash_ids": [1, 2, 3]}\n')
    with pytest.raises(TraceError, match="line 5: 3 hash_ids of 512 tokens do not fit"):
        read(path, block_size=512)


def test_seconds_taken_for_ms_are_warned_of(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {n * 0.31}, "input_length": 5, "output_length": 1}}' for n in range(20)]
    trace, _ = read(written(tmp_path, "\n".join(lines)))
    assert "may be in seconds" in trace.found.sentences()[-1]
    trace, rows = read(written(tmp_path, "\n".join(lines)), "mooncake-s")
    assert times_s(rows)[1] == 0.31 and "seconds" not in "".join(trace.found.sentences())
    trace, _ = read(written(tmp_path, MOONCAKE))
    assert "seconds" not in "".join(trace.found.sentences())


def test_a_broken_first_row_is_pointed_at(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1"):
        read(written(tmp_path, '{"timestamp": NaN, "input_length": 5}\n'))


def test_aiperf_rows(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 5, "session_id": "a", "text_input": "hello", "output_length": 3},
        {"delay": 20, "session_id": "a", "messages": [{"role": "user", "content": "x"}], "extra": {"top_k": 1}},
        {"timestamp": 9, "payload": {"prompt": "p", "max_tokens": 4}},
    ]
    _, rows = read(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert [row.content and row.content[0] for row in rows] == ["text_input", "messages", "payload"]
    assert (rows[1].delay_ns, rows[1].extra) == (20_000_000, {"top_k": 1})


def test_aiperf_single_turn(tmp_path: Path) -> None:
    text = '{"text": "one", "timestamp": 10, "output_length": 4}\n{"texts": ["a", "b"], "images": ["data:x"]}\n'
    trace, rows = read(written(tmp_path, text))
    assert trace.format == "aiperf-single-turn"
    assert (rows[0].content, rows[0].timestamp_ns, rows[0].output_length) == (("text_input", "one"), 10_000_000, 4)
    assert rows[1].content is not None
    name, (message,) = rows[1].content
    assert name == "messages" and [part["type"] for part in message["content"]] == ["text", "text", "image_url"]
    with pytest.raises(TraceError, match="line 1: a turn has timestamp or delay, not both"):
        read(written(tmp_path, '{"text": "one", "timestamp": 10, "delay": 4}'))


def test_aiperf_multi_turn(tmp_path: Path) -> None:
    text = '{"session_id": "s", "turns": [{"text": "a", "timestamp": 7}, {"text": "b", "delay": 30}]}\n'
    trace, rows = read(written(tmp_path, text))
    assert trace.format == "aiperf-multi-turn"
    assert [(row.session_id, row.turn, row.context_mode) for row in rows] == [("s", 1, "delta"), ("s", 2, "delta")]
    assert (rows[0].timestamp_ns, rows[1].timestamp_ns, rows[1].delay_ns) == (7_000_000, None, 30_000_000)
    with pytest.raises(TraceError, match="line 1: turns must be a list"):
        read(written(tmp_path, '{"session_id": "s", "turns": []}'))


# ---------------------------------------------------------------- Bailian


def bailian(chat: int, parent: int, time: float, **more: Any) -> str:
    row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": time, "input_length": 20, "output_length": 5}
    return json.dumps({**row, "type": "text", "turn": 1, "hash_ids": [chat * 2, chat * 2 + 1], **more}) + "\n"


def test_bailian_is_a_tree_in_seconds(tmp_path: Path) -> None:
    text = bailian(0, -1, 0.0) + bailian(1, 0, 1.5, turn=2) + bailian(2, 0, 2.25, turn=2) + bailian(3, 99, 3.0, turn=4)
    trace, rows = read(written(tmp_path, text))
    assert (trace.format, trace.block_size) == ("bailian", 16)
    assert times_s(rows) == [0, 1.5, 2.25, 3]
    assert [(row.request_id, row.session_id, row.after) for row in rows] == [
        ("0", "0", ()),
        ("1", "0", ("0",)),
        ("2", "0", ("0",)),  # two children of one parent
        ("3", "3", ()),  # the parent is before the window
    ]
    assert rows[0].tags == {"type": "text"} and rows[3].turn == 4
    assert trace.found.sentences() == ["1 rows whose parent chat is not in the file before them: taken as first turns"]
    with pytest.raises(TraceError, match="line 2: chat_id 0 was used before"):
        read(written(tmp_path, bailian(0, -1, 0) + bailian(0, -1, 1)))
    with pytest.raises(TraceError, match="line 1: 'hash_ids' is missing|line 1: hash_ids"):
        read(written(tmp_path, bailian(0, -1, 0, hash_ids=None)))


# ---------------------------------------------------------------- ShareGPT


def sharegpt(*conversations: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"id": f"c{n}_0", "conversations": [{"from": role, "value": text} for role, text in turns]}
        for n, turns in enumerate(conversations)
    ]


TALKS = sharegpt(
    [("human", "How are you?"), ("gpt", "Well, [thank] you"), ("human", "And {now}?"), ("gpt", "Still \\well")],
    [("gpt", "I begin"), ("human", "Fine"), ("gpt", "Yes")],
    [],
    [("human", "nobody answers")],
    [("system", "be kind"), ("human", "a"), ("human", "b"), ("gpt", "c")],
)


@pytest.mark.parametrize("indent", [None, 2])
def test_sharegpt_pairs_each_question_with_its_answer(tmp_path: Path, indent: int | None) -> None:
    trace, rows = read(written(tmp_path, json.dumps(TALKS, indent=indent)))
    assert trace.format == "sharegpt"
    assert [(row.session_id, row.turn, row.output_text) for row in rows] == [
        ("0:c0_0", 1, "Well, [thank] you"),
        ("0:c0_0", 2, "Still \\well"),
        ("1:c1_0", 1, "Yes"),
        ("4:c4_0", 1, "c"),
    ]
    assert rows[1].content == ("messages", [{"role": "user", "content": "And {now}?"}])
    assert {row.context_mode for row in rows} == {"delta"} and times_s(rows) == [None] * 4
    # left out: "I begin", "nobody answers", "be kind" and "a"
    assert any(sentence.startswith("4 turns left out") for sentence in trace.found.sentences())


def test_sharegpt_is_read_piece_by_piece(tmp_path: Path) -> None:
    text = json.dumps(TALKS * 200, indent=1)
    _, rows = read(written(tmp_path, text))
    assert len(rows) == 800 and rows[-1].session_id == "999:c4_0"


@pytest.mark.parametrize("cut", [1, 30, -1, -20])
def test_a_cut_off_array_is_an_error(tmp_path: Path, cut: int) -> None:
    with pytest.raises(TraceError, match="JSON array"):
        read(written(tmp_path, json.dumps(TALKS)[:cut]))


def test_an_entry_without_conversations_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="needs a list of conversations"):
        read(written(tmp_path, '[{"id": "x"}]'))


# ---------------------------------------------------------------- agents and simulators


WEKA = {
    "id": "t1",
    "models": ["m"],
    "block_size": 64,
    "requests": [
        {"t": 0, "type": "s", "model": "m", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 2.5, "ttft": 1.0},
        {
            "t": 10,
            "type": "subagent",
            "agent_id": "a",
            "requests": [
                {"t": 1, "type": "n", "in": 64, "out": 3, "hash_ids": [9], "api_time": 1.0},
                {"t": 4, "type": "n", "in": 70, "out": 3, "hash_ids": [9], "api_time": 1.0, "think_time": 2.0},
            ],
        },
        {"t": 20, "type": "s", "in": 200, "out": 0, "hash_ids": [1, 2, 3], "think_time": 7.5, "stop": "end_turn"},
    ],
}


@pytest.mark.parametrize("indent", [None, 2])
def test_weka_sessions_with_a_subagent(tmp_path: Path, indent: int | None) -> None:
    trace, rows = read(written(tmp_path, json.dumps(WEKA, indent=indent)))
    assert (trace.format, trace.block_size) == ("weka", 64)
    assert times_s(rows) == [0, 11, 14, 20]
    assert [(row.session_id, row.turn, row.after) for row in rows] == [
        ("t1", 1, ()),
        ("t1/a", 1, ("t1#1",)),
        ("t1/a", 2, ("t1/a#1",)),
        ("t1", 2, ("t1#1", "t1/a#2")),  # it waits for the subagent, too
    ]
    assert [row.delay_ns for row in rows] == [None, None, 2 * S, 7 * S + S // 2]
    assert rows[0].recorded == {"e2e_ms": 2500, "ttft_ms": 1000} and {row.hash_scope for row in rows} == {"t1"}


def test_weka_rejects_what_is_no_session(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a session of this format: 'in' is missing"):
        read(written(tmp_path, json.dumps({"id": "x", "block_size": 64, "requests": [{"t": 0}]})))


def test_ragpulse_chunks_become_segments_where_their_lengths_are_known(tmp_path: Path) -> None:
    ids = {"sys_prompt": [1], "passages_ids": [7, 8], "history": [], "web_search": [], "user_input": [3]}
    row = {"timestamp": "82", "input_length": 100, "output_length": 9, "hash_ids": ids, "session_id": "s"}
    path = written(tmp_path, json.dumps(row) + "\n\n", "0_trace.jsonl")
    trace, (alone,) = read(path)
    assert trace.format == "ragpulse" and alone.timestamp_ns == 82 * S and alone.segments is None
    written(tmp_path, '{"sys_prompt_id": 1, "token_length": 40}\n', "1_sys_prompt.jsonl")
    written(
        tmp_path, '{"passage_id": 7, "token_length": 20}\n{"passage_id": 8, "token_length": 21}', "2_passages.jsonl"
    )
    written(tmp_path, '{"user_input_id": 3, "token_length": 9}\n', "4_user_input.jsonl")
    _, (known,) = read(path)
    assert known.segments == [
        {"id": 1, "tokens": 40, "kind": "sys_prompt"},
        {"id": 7, "tokens": 20, "kind": "passages_ids"},
        {"id": 8, "tokens": 21, "kind": "passages_ids"},
        {"id": 3, "tokens": 9, "kind": "user_input"},
    ]


def test_simulators(tmp_path: Path) -> None:
    trace, rows = read(
        written(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n")
    )
    assert trace.format == "vidur" and times_s(rows) == [0, 4.314579]
    _, rows = read(written(tmp_path, "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,4,7,0.75\n"))
    assert times_s(rows) == [None] and rows[0].output_length == 4
    head = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size"
    text = f"{head}\n0,2,0,1,1,4096,32\n"
    trace, (row,) = read(written(tmp_path, text))
    assert trace.format == "splitwise-sim" and (row.timestamp_ns, row.input_length) == (S, 4096)
    assert row.source == {"request_type": "2", "application_id": "0", "batch_size": "1"}


# ---------------------------------------------------------------- files


def test_compressed_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = written(tmp_path, gzip.compress(MOONCAKE.encode()), "x.jsonl.gz")
    assert times_s(read(packed)[1]) == [0, 3, 3.05, 27]
    packed = written(tmp_path, zstandard.compress(MOONCAKE.encode()), "no suffix")
    assert times_s(read(packed)[1]) == [0, 3, 3.05, 27]
    assert sha256(packed) != sha256(written(tmp_path, MOONCAKE))


def test_a_compressed_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress((MOONCAKE * 50).encode())
    with pytest.raises(TraceError, match="ends too early"):
        read(written(tmp_path, whole[: len(whole) // 2], "x.gz"))
    with pytest.raises(TraceError, match="cannot be read behind line 0"):
        read(written(tmp_path, b"\x1f\x8b" + b"\xff" * 60, "y.gz"))


def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is empty"):
        Trace(written(tmp_path, ""))
    with pytest.raises(TraceError, match="no trace format that is known here begins with 'hello'"):
        Trace(written(tmp_path, "hello"))
    with pytest.raises(TraceError, match="--trace-format must be one of"):
        Trace(written(tmp_path, MOONCAKE), "csv")
    with pytest.raises(TraceError, match="No such file"):
        Trace(tmp_path / "none")
    with pytest.raises(TraceError, match="line 1: no column GeneratedTokens"):
        Trace(written(tmp_path, "TIMESTAMP,ContextTokens\n"), "azure")
    assert "burstgpt" in FORMATS and "aiperf" in FORMATS


# ---------------------------------------------------------------- real samples

# rows, first and last time (s), sums, cv: measured from the published bytes by other means
GOLDEN = {
    "azure_llm_2023_code.csv": (8819, 0.0, 3435.948056, 18059974, 245896, 13.1513),
    "azure_llm_2023_conv.head5000.csv": (5000, 0.0, 1023.316984, 5805639, 1287511, 1.0616),
    "mooncake_conversation.head1000.jsonl": (1000, 0.0, 330.0, 13732944, 349357, 2.8429),
    "mooncake_conversation.mid100.jsonl": (100, 1874.999, 1905.0, 1059659, 33717, 2.9833),
    "mooncake_synthetic.head1000.jsonl": (1000, 0.0, 272.653, 11851558, 196039, 0.9890),
    "mooncake_arxiv.quoted9.jsonl": (9, 1178.625, 1178.625, 38198, 2917, None),
    "burstgpt_1.head400.csv": (400, 5.0, 37274.0, 208189, 110612, 4.5612),
    "burstgpt_3.head400.csv": (400, 19440110.0, 19481563.0, 246941, 68350, 2.8671),
    "ragpulse_0_trace.head300.jsonl": (300, 82.0, 11658.0, 905131, 74593, 1.2701),
    "ragpulse_0_trace.mid12.jsonl": (12, 0.0, 604453.0, 36427, 2178, 3.1587),
    "ragpulse_0_trace.tail5.jsonl": (5, 604421.0, 604603.0, 13566, 958, 1.0612),
    "weka_trace_0091.json": (10, 0.0, 441.0, 1284267, 1447, 0.9752),
    "weka_trace_0174.json": (6, 0.0, 75.0, 115836, 1776, 0.3040),
    "weka_trace_0187.json": (3, 0.0, 12.0, 35830, 788, 0.0),
    "weka_trace_0291.json": (32, 0.0, 1363.0, 2254119, 19504, 2.2873),
    "weka_trace_0460.json": (12, 0.0, 1439.0, 164269, 1377, 2.9157),
    "weka_trace_0504.json": (3, 0.0, 3075.0, 33739, 337, 0.9915),
    "vidur_splitwise_conv.head500.csv": (500, 0.0, 129.012474, 467684, 132536, 1.2883),
}
# leading blocks seen before, blocks, tokens of them, distinct ids
PREFIXES = {
    "mooncake_conversation.head1000.jsonl": (5791, 27305, 2962776, 21514),
    "mooncake_conversation.mid100.jsonl": (99, 2113, 50688, 2014),
    "mooncake_synthetic.head1000.jsonl": (4007, 23787, 2046169, 19780),
    "mooncake_arxiv.quoted9.jsonl": (18, 79, 9216, 61),
    "weka_trace_0091.json": (18030, 20061, None, None),
    "weka_trace_0174.json": (1460, 1807, None, None),
    "weka_trace_0187.json": (338, 558, None, None),
    "weka_trace_0291.json": (31603, 35209, None, None),
    "weka_trace_0460.json": (2287, 2559, None, None),
    "weka_trace_0504.json": (343, 525, None, None),
}
ZERO_ROWS = {"burstgpt_1.head400.csv": 17, "burstgpt_3.head400.csv": 1}


def sample(name: str) -> Path:
    if not SAMPLES.is_dir():
        pytest.skip(f"no folder of real traces at {SAMPLES} (LOADGEN_SAMPLES names another)")
    return SAMPLES / name


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    rows, first_s, last_s, input_sum, output_sum, cv = GOLDEN[name]
    made = describe(sample(name))
    assert (made["rows"], made["first_s"], made["last_s"]) == (rows, first_s, last_s)
    assert (made["input_tokens"]["sum"], made["output_tokens"]["sum"]) == (input_sum, output_sum)
    assert made["cv"] is None if cv is None else made["cv"] == pytest.approx(cv, abs=5e-5)
    if name in PREFIXES:
        hits, blocks, tokens, ids = PREFIXES[name]
        assert (made["prefix"]["hit_blocks"], made["prefix"]["blocks"]) == (hits, blocks)
        assert made["prefix_hit_share"] == hits / blocks
        assert tokens is None or (made["prefix"]["hit_tokens"], made["prefix"]["unique_ids"]) == (tokens, ids)
    if name in ZERO_ROWS:
        assert any(quirk.startswith(f"{ZERO_ROWS[name]} rows without output") for quirk in made["quirks"])


def test_quoted_samples_are_recognised() -> None:
    formats = {
        "azure_llm_2024_code.quoted5.csv": "azure",
        "azure_llm_2024_conv.quoted5.csv": "azure",
        "azure_lmm_2025_multimodal.quoted5.csv": "azure",
        "qwen_bailian_thinking.quoted1.jsonl": "bailian",
        "aiperf_template_precise_schedule.jsonl": "loadgen",
        "vidur_arxiv_summarization.head300.csv": "vidur",
        "splitwise_sim_test_trace.csv": "splitwise-sim",
    }
    for name, trace_format in formats.items():
        trace, rows = read(sample(name))
        assert (name, trace.format) == (name, trace_format) and rows


def test_a_sample_whose_ids_do_not_fit_its_lengths() -> None:
    with pytest.raises(TraceError, match="line 3: 3 hash_ids of 512 tokens do not fit into input_length 1024"):
        read(sample("aiperf_template_production_trace.jsonl"), block_size=512)


def test_percentiles_of_a_published_table() -> None:
    made = describe(sample("azure_llm_2023_code.csv"))
    assert [round(made["input_tokens"][q]) for q in ("p50", "p90", "p99", "max")] == [1469, 5188, 7436, 7437]
    assert [round(made["output_tokens"][q]) for q in ("p50", "p90", "p99", "max")] == [13, 55, 251, 1899]
    assert round(made["rate_per_s"], 3) == 2.567
    assert (round(made["dispersion_1s"], 1), int(made["dispersion_10s"])) == (13.2, 71)

"""describe, convert, generate: what is said of a trace, what conversions keep, a recipe that gives its bytes again."""

import gzip
import json
import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import stats
from loadgen.cli import cli
from loadgen.options import UsageError
from loadgen.trace import TraceRow, line_of
from loadgen.trace_convert import convert
from loadgen.trace_describe import Lengths, Seen, describe, text_of
from loadgen.trace_formats import Trace
from loadgen.trace_generate import Draw, Recipe, generate

TRACES = Path(__file__).resolve().parents[1] / "traces"


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(line_of(row) for row in rows))
    return path


def rows_of(path: Path | str, **how: Any) -> list[TraceRow]:
    with Trace(path, **how) as trace:
        return list(trace.rows())


def loadgen(*args: str) -> str:
    """Standard output of a command that must end well."""
    result = CliRunner().invoke(cli, args, standalone_mode=False)
    assert result.exception is None, result.exception
    return result.stdout


# ---------------------------------------------------------------- describe


def test_a_description_by_hand(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        {"timestamp": 1000, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3], "session_id": "a"},
        {"timestamp": 1000, "input_length": 20, "output_length": 0, "hash_ids": [1, 2], "session_id": "b"},
        {"timestamp": 4000, "input_length": 48, "output_length": 9, "hash_ids": [1, 4, 3], "session_id": "a"},
    )
    made = describe(path)
    assert (made["rows"], made["first_s"], made["last_s"], made["rate_per_s"]) == (3, 1, 4, 1)
    assert made["cv"] == 1  # gaps 0 and 3: mean 1.5, deviation 1.5
    assert made["input_tokens"] == {
        "n": 3,
        "sum": 108,
        "mean": 36,
        "min": 20,
        "p50": 40,
        "p90": 46.4,
        "p99": 47.84,
        "max": 48,
    }
    # leading blocks seen before: none of 3, both of 2, one of 3 (the 3 behind the new 4 is no prefix)
    assert made["prefix"] == {"blocks": 8, "hit_blocks": 3, "hit_tokens": 36, "unique_ids": 4}
    assert made["prefix_hit_share"] == 3 / 8 and made["prefix_hit_token_share"] == 36 / 108
    assert (made["sessions"], made["longest_session_turns"], made["block_size"]) == (2, 2, 16)
    assert any(quirk.startswith("1 rows with a known block behind a new one") for quirk in made["quirks"])
    assert "3 rows at 2 distinct times" in made["quirks"]
    orjson.dumps(made)
    assert "cv 1," in text_of(made) and "37.5%" in text_of(made)


def test_numbers_agree_with_numpy_on_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.trace_describe._BATCH", 64)  # many batches must give what one would
    draw = random.Random(3)
    times, rows, now = [], [], 0.0
    for n in range(2000):
        now += draw.choice([0, 0, 7.5, draw.expovariate(1 / 400), 70_000 if n % 500 == 3 else 1])
        times.append(round(now, 1))
        rows.append({"timestamp": times[-1], "input_length": draw.randrange(9000), "output_length": draw.randrange(90)})
    made = describe(written(tmp_path / "t.jsonl", *rows))
    seconds = np.array(times) / 1000
    assert made["cv"] == pytest.approx(stats.cv(np.diff(seconds)), rel=1e-9)
    since_ns = np.rint(np.array(times) * 10).astype(np.int64) * 100_000
    for key, width in (("dispersion_1s", 10**9), ("dispersion_10s", 10**10)):
        counts = np.bincount((since_ns - since_ns[0]) // width)[:-1]
        assert made[key] == pytest.approx(counts.var() / counts.mean(), rel=1e-9)
    for name in ("input", "output"):
        values = [row[f"{name}_length"] for row in rows]
        summary = made[f"{name}_tokens"]
        for key, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            assert summary[key] == pytest.approx(np.quantile(values, q))
        assert (summary["sum"], summary["max"]) == (sum(values), max(values))
    assert made["longer_than"]["4096"] == sum(row["input_length"] + row["output_length"] > 4096 for row in rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=80))
def test_quantiles_of_counts_are_those_of_the_values(values: list[int]) -> None:
    lengths = Lengths()
    lengths.add(values)
    made = lengths.summary()
    for key, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert made[key] == pytest.approx(float(np.quantile(values, q)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.one_of(st.integers(0, 9), st.just(2**40), st.just(2**63)), max_size=6), max_size=30))
def test_leading_hits_are_those_of_a_set(rows: list[list[int]]) -> None:
    seen, known = Seen(), set[int]()
    for ids in rows:
        want = 0
        while want < len(ids) and ids[want] in known:
            want += 1
        once = list(dict.fromkeys(ids))  # no id twice in a row, as in all sources
        if once != ids:
            continue
        assert seen.leading_hits(None, ids)[0] == want
        known.update(ids)
    assert seen.num_ids == len(known)


def test_nothing_to_say_is_null(tmp_path: Path) -> None:
    made = describe(written(tmp_path / "t.jsonl", {"input_length": 4}))
    nothing = ("first_s", "last_s", "rate_per_s", "cv", "dispersion_1s", "prefix_hit_share", "longest_session_turns")
    assert all(made[key] is None for key in nothing)
    assert made["output_tokens"]["p50"] is None and made["output_tokens"]["sum"] == 0
    assert "no times: replay it with --rate or --concurrency" in made["quirks"]
    assert "-" in text_of(made)


def test_texts_are_estimated_and_said_to_be(tmp_path: Path) -> None:
    talk = [{"id": "x", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 20}]}]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(talk))
    made = describe(path)
    assert (made["input_tokens"]["sum"], made["output_tokens"]["sum"]) == (10, 5)
    assert sum("estimated from the text" in quirk for quirk in made["quirks"]) == 2


def test_long_silences_and_late_zeros_are_noted(tmp_path: Path) -> None:
    rows = [{"timestamp": 100_000 + t, "input_length": 1, "output_length": 1} for t in (*range(0, 990, 10), 200_000)]
    quirks = describe(written(tmp_path / "t.jsonl", *rows))["quirks"]
    assert "1 gaps above 60 s, the longest 199 s (--max-gap)" in quirks
    assert "times begin at 100.000 s, not at 0: a replay takes that off" in quirks


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    made = json.loads(loadgen("trace", "describe", str(TRACES / "agents.jsonl"), "--json", "--plot", str(page)))
    assert made["rows"] == 339 and set(made) >= {"first_s", "last_s", "rate_per_s", "cv", "sessions", "quirks"}
    text = page.read_text()
    assert text.count("<svg") == 2 and "requests/s" in text and "http" not in text
    assert "339 rows" in loadgen("trace", "describe", str(TRACES / "agents.jsonl"))


# ---------------------------------------------------------------- convert


def test_conversion_to_the_canonical_format_loses_nothing(tmp_path: Path) -> None:
    source = tmp_path / "b.csv"
    source.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,u,43,GPT-4,906,446,1352,Conversation log\n"
        "19440301.0,u,26,GPT-4,1631,282,1913,Conversation log\n"
        "19440200.0,,9,ChatGPT,0,0,0,API log\n"
    )
    out = tmp_path / "out.jsonl"
    assert convert(source, str(out))["lost"] == {}
    assert [row._replace(line=0) for row in rows_of(out)] == [row._replace(line=0) for row in rows_of(source)]
    header = orjson.loads(out.read_bytes().splitlines()[0])
    assert header["schema"] == "loadgen.trace/1" and header["license"] == "CC-BY-4.0" and header["sorted"]
    assert header["source"]["file"] == "b.csv" and len(header["source"]["sha256"]) == 64
    again = tmp_path / "again.jsonl.gz"
    convert(out, str(again))
    assert gzip.decompress(again.read_bytes()).splitlines()[1:] == out.read_bytes().splitlines()[1:]


@pytest.mark.parametrize("name", ["chat", "batch", "code", "summaries", "agents"])
def test_our_traces_survive_a_conversion(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.jsonl"
    convert(TRACES / f"{name}.jsonl", str(out))
    assert out.read_bytes().splitlines()[1:] == (TRACES / f"{name}.jsonl").read_bytes().splitlines()[1:]


def test_times_before_the_first_row_are_moved_up(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 10:00:05.5,1,1\n2023-11-16 10:00:00,2,2\n")
    out = tmp_path / "out.jsonl"
    convert(source, str(out))
    assert [row.timestamp_ns for row in rows_of(out)] == [0, 5_500_000_000]


def test_to_mooncake(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        {"schema": "loadgen.trace/1", "block_size": 256},
        {"timestamp": 1.5, "input_length": 1100, "output_length": 4, "hash_ids": [10, 11, 12, 13, 14]},
        {"timestamp": 7, "input_length": 1024, "output_length": 4, "hash_ids": [10, 11, 12, 99], "session_id": "s"},
        {"timestamp": 8, "input_length": 600, "output_length": 4},
        {"timestamp": 9, "input_length": 600, "output_length": 4, "hash_ids": [10, 11]},
        {"timestamp": 9, "text_input": "x"},
    )
    out = tmp_path / "m.jsonl"
    done = convert(path, str(out), target="mooncake")
    # two of 256 make one of 512: [10 11][12 13][14] -> 0 1 2, [10 11][12 99] -> 0 3; what has no id gets a new one
    assert [row.hash_ids for row in rows_of(out)] == [[0, 1, 2], [0, 3], [4, 5], [0, 6]]
    assert set(orjson.loads(out.read_bytes().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    assert done == {
        "read": 5,
        "written": 4,
        "block_size": 512,
        "lost": {
            "timestamp rounded to whole ms": 1,
            "session_id dropped": 1,
            "left out: no input or no output length": 1,
        },
    }
    before, after = describe(path), describe(out)
    assert after["block_size"] == 512 and before["prefix"]["hit_tokens"] == 768 + 512
    assert after["prefix"]["hit_tokens"] == 512 + 512  # reuse is whole blocks
    with pytest.raises(UsageError, match="line 2: no timestamp"):
        convert(TRACES / "batch.jsonl", str(out), target="mooncake")


def test_mooncake_to_mooncake_keeps_every_prefix(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 10]},
    )
    out = tmp_path / "m.jsonl"
    convert(path, str(out), target="mooncake")
    assert [row.hash_ids for row in rows_of(out)] == [[0, 1, 2], [0, 1, 3]]


def test_to_aiperf(tmp_path: Path) -> None:
    row = {"input_length": 100, "output_length": 4, "hash_ids": [1, 2]}
    path = written(
        tmp_path / "t.jsonl",
        {"schema": "loadgen.trace/1", "block_size": 64},
        {"timestamp": 5, "session_id": "s", **row},
        {"timestamp": 90, "delay": 30, "session_id": "s", **row, "hash_scope": "other", "tags": {"a": "b"}},
        {"timestamp": 91, "text_input": "hi", "input_length": 2, "output_length": 3, "extra": {"top_k": 2}},
        {"timestamp": 92, "input_length": 5, "output_length": 0},
        {"timestamp": 93, "prompt_token_ids": [1]},
    )
    out = tmp_path / "a.jsonl"
    done = convert(path, str(out), target="aiperf")
    assert [orjson.loads(line) for line in out.read_bytes().splitlines()] == [
        {"timestamp": 5, "session_id": "s", **row},
        {"delay": 30, "session_id": "s", **row, "hash_ids": [0, 1]},
        {"timestamp": 91, "text_input": "hi", "output_length": 3, "extra": {"top_k": 2}},
    ]
    assert done["lost"] == {"left out: no output": 1, "left out: prompt_token_ids": 1}


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        convert(TRACES / "chat.jsonl", str(tmp_path / "no" / "file"))
    with pytest.raises(UsageError, match="--as must be one of"):
        convert(TRACES / "chat.jsonl", str(tmp_path / "x"), target="csv")
    with pytest.raises(UsageError, match="not a tokenizer.json"):
        convert(TRACES / "chat.jsonl", str(tmp_path / "x"), tokenizer=str(TRACES / "chat.jsonl"))


def test_a_tokenizer_counts_the_answers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    talk = [{"id": "x", "conversations": [{"from": "human", "value": "well?"}, {"from": "gpt", "value": "yes no yes"}]}]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    out = tmp_path / "out.jsonl"
    convert(tmp_path / "talk.json", str(out), tokenizer=str(tmp_path / "tokenizer.json"))
    assert rows_of(out)[0].output_length == 3


# ---------------------------------------------------------------- generate


def commands() -> list[list[str]]:
    lines = (TRACES / "README.md").read_text().splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("loadgen trace generate")]


@pytest.mark.parametrize("args", commands(), ids=lambda args: args[3])
def test_the_readme_makes_every_trace_again_byte_for_byte(args: list[str], tmp_path: Path) -> None:
    where = args.index("--out") + 1
    ours = TRACES.parent / args[where]
    made = tmp_path / "made.jsonl"
    loadgen(*args[:where], str(made), *args[where + 1 :])
    assert made.read_bytes() == ours.read_bytes()


def test_every_trace_is_in_the_readme() -> None:
    assert {Path(args[-1]).name for args in commands()} == {path.name for path in TRACES.glob("*.jsonl")}


def recipe(**changes: Any) -> Recipe:
    given_ = {
        "rate": 5.0,
        "duration_s": 600.0,
        "input": Draw.parse("lognormal:1000,1,8000"),
        "output": Draw.parse("10:60"),
    }
    return Recipe(**{**given_, "seed": 7, **changes})


def generated(made: Recipe, tmp_path: Path) -> list[TraceRow]:
    path = tmp_path / "g.jsonl"
    path.write_bytes(b"".join(generate(made)))
    return rows_of(path)


def test_drawn_lengths_and_gaps_are_what_was_asked(tmp_path: Path) -> None:
    rows = generated(recipe(arrival="gamma", burstiness=0.3), tmp_path)
    inputs = np.array([row.input_length for row in rows])
    outputs = np.array([row.output_length for row in rows])
    assert len(rows) == pytest.approx(3000, abs=5 * (3000 / 0.3) ** 0.5)  # 5 deviations of a renewal count
    assert np.median(inputs) == pytest.approx(1000, rel=0.1) and inputs.max() <= 8000
    assert (outputs.min(), outputs.max()) == (10, 60)
    gaps = np.diff([row.timestamp_ns or 0 for row in rows])
    assert stats.cv(gaps) == pytest.approx(0.3**-0.5, rel=0.15)
    assert all((row.timestamp_ns or 0) < 600e9 for row in rows)


def test_the_seed_decides_and_another_rate_keeps_the_lengths() -> None:
    def lengths(made: Recipe) -> list[Any]:
        return [orjson.loads(line).get("input_length") for line in generate(made)][1:50]

    assert list(generate(recipe())) == list(generate(recipe()))
    assert lengths(recipe()) == lengths(recipe(rate=50.0)) != lengths(recipe(seed=8))


def test_sessions_grow_share_their_prefix_and_never_overlap(tmp_path: Path) -> None:
    made = recipe(
        rate=0.5, duration_s=100.0, turns=Draw.parse("2:6"), think_s=Draw.parse("1:3"), input=Draw.parse("50:90"),
        shared_prefix_tokens=200, block_size=64, max_input=500,
    )  # fmt: skip
    rows = generated(made, tmp_path)
    sessions: dict[str, list[TraceRow]] = {}
    for row in rows:
        assert row.hash_ids is not None and row.input_length is not None
        assert list(row.hash_ids[:3]) == [0, 1, 2] and len(row.hash_ids) == -(-row.input_length // 64)
        sessions.setdefault(row.session_id or "", []).append(row)
    assert any(len(turns) > 2 for turns in sessions.values())
    for turns in sessions.values():
        assert [row.turn for row in turns] == list(range(1, len(turns) + 1))
        for a, b in zip(turns, turns[1:], strict=False):
            assert a.input_length is not None and a.output_length is not None and b.input_length is not None
            full = a.input_length // 64
            assert a.hash_ids is not None and b.hash_ids is not None and a.hash_ids[:full] == b.hash_ids[:full]
            assert a.input_length + a.output_length + 50 <= b.input_length <= 500
            assert b.delay_ns is not None and 1e9 <= b.delay_ns <= 3e9
            assert (b.timestamp_ns or 0) - (a.timestamp_ns or 0) > b.delay_ns
    ids = [block for row in rows for block in row.hash_ids or ()]
    assert sorted(set(ids)) == list(range(max(ids) + 1))  # numbered as they appear
    assert [row.timestamp_ns for row in rows] == sorted(row.timestamp_ns or 0 for row in rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival": "none"}, "--arrival none has no times"),
        ({"rate": None}, "--rate R"),
        ({"duration_s": None}, "--duration S or --requests N"),
        ({"burstiness": 2.0}, "--burstiness needs --arrival gamma"),
        ({"think_s": Draw.parse("1")}, "--think needs --turns"),
        ({"max_input": 9}, "--max-input needs --turns"),
        ({"turns": Draw.parse("2")}, "--block-size"),
        ({"arrival": "replay"}, "--arrival must be one of"),
    ],
)
def test_recipes_that_contradict_themselves(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(generate(recipe(**changes)))


@pytest.mark.parametrize(
    "text", ["", "5:2", "lognormal:5", "lognormal:0,1", "lognormal:9,1,5", "x", "-3", "normal:1,1"]
)
def test_what_is_no_draw(text: str) -> None:
    with pytest.raises(UsageError, match="must be N, LO:HI"):
        Draw.parse(text)


def test_the_commands_name_the_wrong_flag(tmp_path: Path) -> None:
    args = ["trace", "generate", "--rate", "1", "--requests", "5", "--input", "9:1", "--output", "5", "--seed", "1"]
    result = CliRunner().invoke(cli, args, standalone_mode=False)
    assert isinstance(result.exception, UsageError) and str(result.exception).startswith("--input must be")
    out = str(tmp_path / "m.jsonl")
    result = CliRunner().invoke(
        cli, ["trace", "convert", str(TRACES / "agents.jsonl"), out, "--as", "mooncake"], standalone_mode=False
    )
    assert result.exception is None and "339 rows read, 339 written; 339 rows: session_id dropped" in result.stderr
    assert "blocks of 512 tokens" in result.stderr

"""Other people's traces as TraceRows: which format a file has is told by its first bytes, never by its name.

    with open_trace("AzureLLMInferenceTrace_code.csv") as trace:
        for row in trace.rows(): ...          # in order of time

    loadgen            loadgen.trace/1; headerless it is also Mooncake's and AIPerf's mooncake_trace (ms)
    mooncake-s         the same keys with times in seconds (GuideLLM, vLLM's timed_trace); never recognised, only told
    azure              Azure LLM inference 2023 and 2024, LMM 2025 (CSV, wall-clock times)
    burstgpt           BurstGPT 1, 2 and 3 (CSV, seconds)
    bailian            Qwen-Bailian (JSON Lines, seconds, a tree of chats, blocks of 16)
    sharegpt           one JSON array of conversations, no times
    aiperf-single-turn, aiperf-multi-turn     AIPerf's text inputs (JSON Lines, ms)
    weka               one agentic session a file (JSON, seconds, blocks of 64)
    ragpulse           RAGPulse (JSON Lines, seconds, chunks of varying length)
    vidur, splitwise-sim                      simulators' CSV, seconds or no times

Plain, .gz and .zst; LF or CRLF; with or without BOM. Columns are found by name, never by position. Every reader streams
(weka holds its one session). Errors are TraceErrors with the line.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import orjson

from loadgen.trace import SCHEMA, Counts, TraceError, TraceRow, check_layout, in_order, infer_block_size, read_canonical

_PEEK_ROWS = 1000  # looked at to infer the block size and the unit
_DEFAULT_BLOCK = {"bailian": 16, "weka": 64}
_SECOND_NS = 1_000_000_000

Lines = Iterator[tuple[int, bytes]]


@dataclass(slots=True)
class Found:
    """What a reader noticed about its file, for `describe` and run.json."""

    quirks: Counter[str] = field(default_factory=Counter)  # sentence: how often (0: it holds for the file)
    unknown_keys: Counter[str] = field(default_factory=Counter)
    time_origin: str | None = None

    def sentences(self) -> list[str]:
        return [f"{count:,} {quirk}" if count else quirk for quirk, count in self.quirks.items()]


@dataclass(frozen=True, slots=True)
class _File:
    """What a reader gets."""

    name: str
    path: Path
    lines: Lines  # numbered from 1, without line ends; blank ones left out
    found: Found


# ---------------------------------------------------------------- opening


class Trace:
    """An open trace. rows() may be called once; open it again for another pass."""

    def __init__(self, path: str | Path, trace_format: str | None = None, block_size: int | None = None) -> None:
        """Raises TraceError when the file cannot be read, or its format is not known. block_size is told, or None."""
        self.path = Path(path)
        self.name = self.path.name
        self.found = Found()
        self.counts = Counts(unknown_keys=self.found.unknown_keys)
        self.header: dict[str, Any] = {}
        self._stream = _open_bytes(self.path)
        try:
            self._start(trace_format, block_size)
        except BaseException:
            self.close()
            raise

    def _start(self, trace_format: str | None, block_size: int | None) -> None:
        lines = _numbered(self._stream, self.name, self.found)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{self.name} is empty: a trace has a row a request")
        head = _json_object(first[1])
        if head is not None and "schema" in head:
            self.header = _checked_header(head, self.name)
        self.format = _resolved(trace_format, first[1], head, self.name)
        if not self.header:
            lines = itertools.chain([first], lines)
        self._rows = _READERS[self.format](_File(self.name, self.path, lines, self.found))
        self.peeked = tuple(itertools.islice(self._rows, _PEEK_ROWS))
        self._rows = itertools.chain(self.peeked, self._rows)
        self.block_size, self.block_size_from = self._block_size(block_size)
        self._look_at_unit()
        if self.found.time_origin is not None:
            self.header = {"time_origin": self.found.time_origin, **self.header}

    @property
    def context_mode(self) -> str:
        """Of rows that do not say."""
        return str(self.header.get("context_mode") or "full")

    def _block_size(self, told: int | None) -> tuple[int | None, str | None]:
        if told is not None:
            return told, "--block-size"
        if (known := self.header.get("block_size")) is not None:
            return int(known), "the header"
        if all(row.hash_ids is None for row in self.peeked):
            return None, None
        if self.format in _DEFAULT_BLOCK:
            return _DEFAULT_BLOCK[self.format], f"the format {self.format}"
        inferred = infer_block_size(self.peeked)
        return inferred, None if inferred is None else "the lengths of the first rows"

    def _look_at_unit(self) -> None:
        """Seconds taken for ms cannot be told for sure, but fractions with gaps below 1 'ms' are a strong sign."""
        if self.format != "loadgen" or self.header:
            return
        times = [row.timestamp_ns for row in self.peeked if row.timestamp_ns is not None]
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        if gaps and gaps[len(gaps) // 2] < 1_000_000 and any(t % 1_000_000 for t in times):
            self.found.quirks[
                "times have fractions and the median gap is below 1 ms: the file may be in seconds "
                "(--trace-format mooncake-s)"
            ] = 0

    def raw_rows(self) -> Iterator[TraceRow]:
        """The rows in order of the file, layouts of hash_ids checked."""
        for row in self._rows:
            if row.hash_ids:
                if self.block_size is None:
                    raise TraceError(
                        f"{self.name}, line {row.line}: hash_ids, and the block size is neither in the file nor can "
                        "it be inferred: give --block-size N (tokens per id)"
                    )
                try:
                    check_layout(row, self.block_size)
                except ValueError as error:
                    raise TraceError(f"{self.name}, line {row.line}: {error}") from None
            yield row

    def rows(self) -> Iterator[TraceRow]:
        """The rows in order of time; self.counts has the inversions."""
        return in_order(self.raw_rows(), self.counts, self.name)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


open_trace = Trace


def sha256(path: str | Path) -> str:
    """Of the file's bytes as they are stored."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_bytes(path: Path) -> IO[bytes]:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        if magic[:2] == b"\x1f\x8b":
            return gzip.open(path, "rb")  # type: ignore[return-value]
        if magic == b"\x28\xb5\x2f\xfd":
            try:
                import zstandard
            except ImportError:
                raise TraceError(f"{path.name} is zstd: `pip install zstandard` to read it") from None
            file = open(path, "rb")
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=True)
            return io.BufferedReader(reader, 1 << 20)
        return open(path, "rb", buffering=1 << 20)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _numbered(stream: IO[bytes], name: str, found: Found) -> Lines:
    """Numbered lines without their ends, BOM and blanks; the habits of the file noted as quirks."""
    number = 0
    line = b"\n"
    try:
        for line in stream:
            number += 1
            if number == 1:
                if line.startswith(b"\xef\xbb\xbf"):
                    found.quirks["a byte order mark at the start"] = 0
                    line = line[3:]
                if line.endswith(b"\r\n"):
                    found.quirks["lines end with CR LF"] = 0
            if text := line.strip():
                yield number, text
    except EOFError:
        raise TraceError(f"{name}: the compressed file ends too early, behind line {number}") from None
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith(("zstandard", "zlib")):
            raise TraceError(f"{name}: cannot be read behind line {number}: {error}") from None
        raise
    if not line.endswith(b"\n"):
        found.quirks["no line end after the last row"] = 0


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _checked_header(head: Mapping[str, Any], name: str) -> dict[str, Any]:
    if head["schema"] != SCHEMA:
        raise TraceError(f"{name}: schema {head['schema']!r} is not known here: this version reads {SCHEMA}")
    block_size = head.get("block_size")
    if block_size is not None and (type(block_size) is not int or block_size < 1):
        raise TraceError(f"{name}, line 1: block_size must be a whole number of 1 or more, not {block_size!r}")
    return dict(head)


def _resolved(told: str | None, line: bytes, head: Mapping[str, Any] | None, name: str) -> str:
    if told is not None:
        told = {"mooncake": "loadgen", "aiperf": "loadgen"}.get(told, told)
        if told not in _READERS:
            raise TraceError(f"--trace-format must be one of {', '.join(FORMATS)}, not {told!r}")
        return told
    found = _recognised(line, head)
    if found is None:
        shown = line[:80].decode(errors="replace")
        raise TraceError(f"{name}: no trace format that is known here begins with {shown!r}; --trace-format forces one")
    return found


def _recognised(line: bytes, head: Mapping[str, Any] | None) -> str | None:
    if head is not None:
        keys = set(head)
        if "schema" in keys:
            return "loadgen"
        if "turns" in keys:
            return "aiperf-multi-turn"
        if {"chat_id", "parent_chat_id"} <= keys:
            return "bailian"
        if "requests" in keys and "block_size" in keys:
            return "weka"
        if isinstance(head.get("hash_ids"), dict):
            return "ragpulse"
        if keys & {"input_length", "text_input", "messages", "payload", "prompt_token_ids"}:
            return "loadgen"
        if keys & {"text", "texts", "image", "images"}:
            return "aiperf-single-turn"
        return None
    if line[:1] == b"[":
        return "sharegpt"
    if line[:1] == b"{":  # a broken row is for its reader to point at; else one object over several lines
        return "loadgen" if any(key in line for key in (b'"timestamp"', b'"input_length"', b'"schema"')) else "weka"
    columns = {column.strip() for column in line.decode(errors="replace").split(",")}
    for name, needed in _COLUMNS.items():
        if needed <= columns:
            return name
    return None


_COLUMNS = {
    "azure": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
    "vidur": {"num_prefill_tokens", "num_decode_tokens"},
    "splitwise-sim": {"arrival_timestamp", "prompt_size", "token_size"},
}

# ---------------------------------------------------------------- JSON Lines


def _canonical(file: _File) -> Iterator[TraceRow]:
    return read_canonical(file.lines, file.name, file.found.unknown_keys)


def _canonical_in_seconds(file: _File) -> Iterator[TraceRow]:
    return read_canonical(file.lines, file.name, file.found.unknown_keys, unit_ns=_SECOND_NS)


def _objects(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in file.lines:
        try:
            row = orjson.loads(line)
        except ValueError as error:
            raise TraceError(f"{file.name}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"{file.name}, line {number}: a row must be a JSON object")
        yield number, row


def _rows_of(parse: Callable[[_File, int, dict[str, Any]], TraceRow]) -> Callable[[_File], Iterator[TraceRow]]:
    """A reader of JSON Lines from a function of one row; what that raises gets its line."""

    def read(file: _File) -> Iterator[TraceRow]:
        for number, row in _objects(file):
            try:
                yield parse(file, number, row)
            except (ValueError, KeyError, TypeError) as error:
                said = f"{error} is missing" if isinstance(error, KeyError) else error
                raise TraceError(f"{file.name}, line {number}: {said}") from None

    return read


def _count(value: Any, name: str) -> int:
    """Tokens: a whole number of 0 or more, as JSON or as CSV has it."""
    if type(value) is str and (value.isdigit() or value.strip().isdigit()):
        return int(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a whole number of 0 or more, not {value!r}")
    return value


def _seconds_ns(value: Any, name: str) -> int:
    """ns of a time in seconds, a number or text; exact to 100 ns."""
    try:
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, int) or (isinstance(value, str) and value.strip().isdigit()):
            time_ns = int(value) * _SECOND_NS
        else:
            time_ns = round(float(value) * 1e7) * 100
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{name} must be a number of seconds, not {value!r}") from None
    if not 0 <= time_ns < 10**20:
        raise ValueError(f"{name} must be 0 or more seconds, not {value!r}")
    return time_ns


def _bailian(file: _File) -> Iterator[TraceRow]:
    """The root of each chat is its session. A parent that is not in the file (before its window) makes a new root."""
    roots: dict[int, str] = {}

    def parse(file: _File, number: int, row: dict[str, Any]) -> TraceRow:
        chat, parent = row["chat_id"], row["parent_chat_id"]
        if chat in roots:
            raise ValueError(f"chat_id {chat} was used before")
        root = roots.get(parent)
        if root is None and parent != -1:
            file.found.quirks["rows whose parent chat is not in the file before them: taken as first turns"] += 1
        roots[chat] = root or str(chat)
        if len(roots) > 1 << 20:
            del roots[next(iter(roots))]
        return TraceRow(
            line=number,
            timestamp_ns=_seconds_ns(row["timestamp"], "timestamp"),
            input_length=_count(row["input_length"], "input_length"),
            output_length=_count(row["output_length"], "output_length"),
            hash_ids=_ids(row["hash_ids"]),
            request_id=str(chat),
            session_id=roots[chat],
            turn=max(1, _count(row.get("turn", 1), "turn")),
            after=() if root is None else (str(parent),),
            tags={"type": str(row["type"])} if "type" in row else None,
        )

    return _rows_of(parse)(file)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise ValueError("hash_ids must be a list of whole numbers of 0 or more")
    return value


_RAG_TABLES = ("sys_prompt", "passages", "history", "user_input", "web_search")


def _ragpulse(file: _File) -> Iterator[TraceRow]:
    """Chunks become segments, their lengths taken from the tables beside the file; without tables only lengths stay."""
    tokens = _rag_lengths(file.path.parent)
    if not tokens:
        file.found.quirks["no tables of chunk lengths beside the file: shared chunks are not replayed"] = 0

    def parse(file: _File, number: int, row: dict[str, Any]) -> TraceRow:
        length = _count(row["input_length"], "input_length")
        if not isinstance(row["hash_ids"], dict):
            raise ValueError("hash_ids must be an object of lists")
        chunks = [(kind, chunk) for kind, ids in row["hash_ids"].items() for chunk in ids]
        segments: list[dict[str, Any]] | None = None
        if tokens:
            known = [(kind, chunk, tokens.get((kind.removesuffix("_ids"), chunk))) for kind, chunk in chunks]
            if any(count is None for _, _, count in known):
                file.found.quirks["rows with a chunk that is in no table: replayed without shared chunks"] += 1
            elif sum(count or 0 for _, _, count in known) > length:
                file.found.quirks["rows whose chunks are longer than their input: without shared chunks"] += 1
            else:
                segments = [{"id": chunk, "tokens": count, "kind": kind} for kind, chunk, count in known]
        return TraceRow(
            line=number,
            timestamp_ns=_seconds_ns(row["timestamp"], "timestamp"),
            input_length=length,
            output_length=_count(row["output_length"], "output_length"),
            session_id=str(row["session_id"]) if row.get("session_id") else None,
            segments=segments,
            source=None if segments else {"hash_ids": row["hash_ids"]},
        )

    return _rows_of(parse)(file)


def _rag_lengths(folder: Path) -> dict[tuple[str, int], int]:
    lengths = {}
    for kind in _RAG_TABLES:
        for table in sorted(folder.glob(f"*{kind}*.jsonl")):
            for line in table.read_bytes().splitlines():
                entry = _json_object(line) or {}
                ids = [value for key, value in entry.items() if key.endswith("_id")]
                if len(ids) == 1 and "token_length" in entry:
                    lengths[kind, ids[0]] = _count(entry["token_length"], "token_length")
    return lengths


# ---------------------------------------------------------------- AIPerf's text inputs


def _parts(row: Mapping[str, Any]) -> tuple[str, Any]:
    """text_input, or messages where there are several texts or pictures."""
    texts = [row["text"]] if row.get("text") is not None else list(row.get("texts") or [])
    images = [row["image"]] if row.get("image") is not None else list(row.get("images") or [])
    texts = [t for text in texts for t in (text["contents"] if isinstance(text, dict) else [text])]
    images = [i for image in images for i in (image["contents"] if isinstance(image, dict) else [image])]
    if not all(isinstance(part, str) for part in (*texts, *images)) or not (texts or images):
        raise ValueError("a turn needs text, texts or images, of strings")
    if len(texts) == 1 and not images:
        return "text_input", texts[0]
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    parts += [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return "messages", [{"role": str(row.get("role") or "user"), "content": parts}]


def _aiperf_turn(row: Mapping[str, Any], number: int, **more: Any) -> TraceRow:
    from loadgen.trace import parse_row

    fields = {key: row[key] for key in ("timestamp", "delay", "output_length", "extra") if row.get(key) is not None}
    if "timestamp" in fields and "delay" in fields:
        raise ValueError("a turn has timestamp or delay, not both")
    name, value = _parts(row)
    return parse_row({**fields, name: value, **more}, number)


def _aiperf_single(file: _File) -> Iterator[TraceRow]:
    def parse(file: _File, number: int, row: dict[str, Any]) -> TraceRow:
        more = {"session_id": row["session_id"]} if row.get("session_id") else {}
        return _aiperf_turn(row, number, **more)

    return _rows_of(parse)(file)


def _aiperf_multi(file: _File) -> Iterator[TraceRow]:
    """A line is a session; its turns are appended to what was said before, with the real answers in between."""
    for number, row in _objects(file):
        try:
            if not isinstance(row["turns"], list) or not row["turns"]:
                raise ValueError("turns must be a list with something in it")
            session = str(row.get("session_id") or f"line {number}")
            for turn, fields in enumerate(row["turns"], 1):
                yield _aiperf_turn(fields, number, session_id=session, turn=turn, context_mode="delta")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"{error} is missing" if isinstance(error, KeyError) else error
            raise TraceError(f"{file.name}, line {number}: {said}") from None


# ---------------------------------------------------------------- whole JSON documents


def _sharegpt(file: _File) -> Iterator[TraceRow]:
    """A row for each human turn that a gpt turn follows; other turns are left out and counted."""
    for index, (number, entry) in enumerate(_array_items(file)):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise TraceError(f"{file.name}, line {number}: an entry needs a list of conversations")
        said = [(str(t.get("from")), t.get("value")) for t in turns if isinstance(t, dict)]
        used = turn = 0
        for (role, asked), (next_role, answer) in itertools.pairwise(said):
            if role not in ("human", "user") or next_role not in ("gpt", "chatgpt", "bing", "bard", "assistant"):
                continue
            if not isinstance(asked, str) or not isinstance(answer, str) or not asked.strip() or not answer.strip():
                continue
            turn += 1
            used += 2
            yield TraceRow(
                line=number,
                session_id=f"{index}:{entry.get('id')}",
                turn=turn,
                content=("messages", [{"role": "user", "content": asked}]),
                context_mode="delta",
                output_text=answer,
            )
        if used < len(turns):
            file.found.quirks["turns left out (no human turn with an answer behind it, or empty)"] += len(turns) - used


def _array_items(file: _File) -> Iterator[tuple[int, Any]]:
    """The items of one JSON array, read piece by piece, each with the line where it was complete."""
    decoder = json.JSONDecoder()
    text = ""
    start = 0  # of the next item in text
    wanted = "["
    wait_for = 0  # do not try again before text is this long
    number = 0
    for number, line in file.lines:
        text = text[start:] + line.decode(errors="replace") + "\n"
        start = 0
        while True:
            start += len(text[start:]) - len(text[start:].lstrip()) if text[start : start + 1].isspace() else 0
            mark = text[start : start + 1]
            if wanted and mark:
                if wanted == "," and mark == "]":
                    return
                if mark != wanted:
                    raise TraceError(f"{file.name}, line {number}: expected {wanted!r}, not {mark!r}")
                start, wanted = start + 1, ""
                continue
            if not mark or mark == "]" or len(text) - start < wait_for:
                if mark == "]":
                    return
                break
            try:
                item, start = decoder.raw_decode(text, start)
            except ValueError:
                wait_for = 2 * (len(text) - start) if len(text) - start > 1 << 16 else 0
                break
            wanted, wait_for = ",", 0
            yield number, item
    if text[start:].strip():
        raise TraceError(f"{file.name}, line {number}: the JSON array is cut off, or is not JSON")
    raise TraceError(f"{file.name}: the JSON array does not end")


def _weka(file: _File) -> Iterator[TraceRow]:
    """One session: its requests in order of the file, a subagent's at its place, times from the session's start."""
    try:
        document = orjson.loads(b"\n".join(line for _, line in file.lines))
        session = str(document["id"])
        if (size := document.get("block_size")) not in (None, 64):
            raise ValueError(f"block_size {size}: convert it with --block-size {size}")
        yield from _weka_requests(file, document["requests"], session, session, 0, ())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        said = f"{error} is missing" if isinstance(error, KeyError) else error
        raise TraceError(f"{file.name}: not a session of this format: {said}") from None


def _weka_requests(
    file: _File, requests: list[dict[str, Any]], session: str, scope: str, start_ns: int, spawned_by: tuple[str, ...]
) -> Iterator[TraceRow]:
    before, end_ns = spawned_by, None  # ids the next turn waits for; end of the turn before
    turn = 0
    for request in requests:
        begin_ns = start_ns + _seconds_ns(request["t"], "t")
        if request.get("type") == "subagent":
            inner = request.get("requests") or []
            absolute = bool(inner) and _seconds_ns(inner[0]["t"], "t") >= _seconds_ns(request["t"], "t") > 0
            name = f"{session}/{request.get('agent_id')}"
            spawn_ns = start_ns if absolute else begin_ns
            last = f"{name}#{len(inner)}"
            yield from _weka_requests(file, inner, name, scope, spawn_ns, before[:1])
            if inner and request.get("status") != "async_launched":
                before = (*before, last)
            continue
        turn += 1
        name = f"{session}#{turn}"
        think, api = request.get("think_time"), request.get("api_time")
        delay_ns = None if think is None or not before else max(0, round(float(think) * 1e7) * 100)
        if turn == 1 and spawned_by:
            delay_ns = None
        ttft = request.get("ttft")
        recorded = {
            "e2e_ms": None if api is None else api * 1000,
            "ttft_ms": None if ttft is None else ttft * 1000,
            "finish_reason": request.get("stop") or None,
        }
        yield TraceRow(
            line=1,
            timestamp_ns=begin_ns,
            delay_ns=delay_ns,
            input_length=_count(request["in"], "in"),
            output_length=_count(request["out"], "out"),
            hash_ids=_ids(request["hash_ids"]),
            hash_scope=scope,
            request_id=name,
            session_id=session,
            turn=turn,
            after=before if turn > 1 or spawned_by else (),
            model=request.get("model"),
            stream=None if "type" not in request else request["type"] == "s",
            recorded={key: value for key, value in recorded.items() if value is not None} or None,
        )
        if end_ns is not None and begin_ns < end_ns:
            file.found.quirks["requests that start before the one before has ended"] += 1
        end_ns = None if api is None else begin_ns + round(api * 1e9)
        before = (name,)


# ---------------------------------------------------------------- CSV


def _table(file: _File, needed: set[str]) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The names of the columns and the rows of a CSV file; a row of the wrong width is an error."""
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for number, line in file.lines:  # noqa: B007  # the row that csv gives next is of this line
            yield line.decode("utf-8", "replace")

    def checked() -> Iterator[list[str]]:
        try:
            yield from csv.reader(texts())
        except csv.Error as error:
            raise TraceError(f"{file.name}, line {number}: {error}") from None

    rows = checked()
    columns = [column.strip() for column in next(rows)]
    if missing := needed - set(columns):
        raise TraceError(f"{file.name}, line {number}: no column {', '.join(sorted(missing))}")

    def values() -> Iterator[tuple[int, list[str]]]:
        for row in rows:
            if len(row) != len(columns):
                raise TraceError(f"{file.name}, line {number}: {len(row)} columns, the header has {len(columns)}")
            yield number, row

    return columns, values()


def _csv_reader(
    needed: set[str], parse: Callable[[_File, int, Mapping[str, str]], TraceRow]
) -> Callable[[_File], Iterator[TraceRow]]:
    def read(file: _File) -> Iterator[TraceRow]:
        columns, rows = _table(file, needed)
        for number, row in rows:
            try:
                yield parse(file, number, dict(zip(columns, row, strict=True)))
            except ValueError as error:
                raise TraceError(f"{file.name}, line {number}: {error}") from None

    return read


_SECOND = re.compile(r"(\d{4}-\d{2}-\d{2})[T ](\d{2}):(\d{2}):(\d{2})")
_FRACTION = re.compile(r"(?:\.(\d{1,9}))?(?:Z|([+-])(\d{2}):?(\d{2}))?")


def wall_clock_ticks(text: str) -> int:
    """100 ns ticks of an ISO-like time with 0 to 9 fraction digits; without a zone it is UTC, as differences are all
    that matters. Raises ValueError."""
    fraction = text[20:]
    if text[19:20] == "." and fraction.isdigit() and len(fraction) == 7:  # as Azure 2023 has them
        return _second_ticks(text[:19]) + int(fraction)
    text = text.strip()
    match = _FRACTION.fullmatch(text, 19)
    if match is None:
        raise ValueError(f"not a time like 2023-11-16 18:17:03.9799600: {text!r}")
    ticks = _second_ticks(text[:19])
    digits, sign, hours, minutes = match.groups()
    if digits:
        ticks += int(digits[:7].ljust(7, "0"))
    if sign:
        offset = (int(hours) * 60 + int(minutes)) * 600_000_000
        ticks += -offset if sign == "+" else offset
    return ticks


@functools.lru_cache(maxsize=1024)
def _second_ticks(text: str) -> int:
    match = _SECOND.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time like 2023-11-16 18:17:03.9799600: {text!r}")
    day, hours, minutes, seconds = match.groups()
    return (
        date.fromisoformat(day).toordinal() * 86_400 + (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
    ) * 10_000_000


def _azure(file: _File) -> Iterator[TraceRow]:
    columns, rows = _table(file, _COLUMNS["azure"])
    at, length, output = (columns.index(name) for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    images = columns.index("NumImages") if "NumImages" in columns else None
    first: int | None = None
    for number, row in rows:
        try:
            ticks = wall_clock_ticks(row[at])
            if first is None:
                first = ticks
                file.found.time_origin = row[at]
            yield TraceRow(
                number,
                (ticks - first) * 100,
                _count(row[length], "ContextTokens"),
                _count(row[output], "GeneratedTokens"),
                num_images=None if images is None else _count(row[images], "NumImages"),
            )
        except ValueError as error:
            raise TraceError(f"{file.name}, line {number}: {error}") from None


# the first rows of the published files 1 and 3: copies that are partly made up have been passed around
_BURSTGPT_FIRST = {("5", "472", "18"), ("19440110.0", "906", "446")}


def _burstgpt(file: _File) -> Iterator[TraceRow]:
    """Input and output 0 is a failed call. Think time is the start less the end of the turn before."""
    sessions: dict[str, tuple[int, int | None]] = {}  # turns so far, end of the last
    first = True

    def parse(file: _File, number: int, row: Mapping[str, str]) -> TraceRow:
        nonlocal first
        if first and (row["Timestamp"], row["Request tokens"], row["Response tokens"]) not in _BURSTGPT_FIRST:
            file.found.quirks["the first row is not that of the published file 1 or 3: a part, or not a real copy"] = 0
        first = False
        start_ns = _seconds_ns(row["Timestamp"], "Timestamp")
        output = _count(row["Response tokens"], "Response tokens")
        session = row.get("Session ID") or None
        elapsed = row.get("Elapsed time") or None
        elapsed_ns = None if elapsed is None else _seconds_ns(elapsed, "Elapsed time")
        turn, delay_ns = None, None
        if session is not None:
            turns, end_ns = sessions.get(session, (0, None))
            turn = turns + 1
            delay_ns = None if end_ns is None else max(0, start_ns - end_ns)
            sessions[session] = (turn, None if elapsed_ns is None else start_ns + elapsed_ns)
        recorded: dict[str, Any] = {} if output else {"status": "failed"}
        if elapsed_ns is not None:
            recorded["e2e_ms"] = elapsed_ns // 1_000_000
        return TraceRow(
            number,
            start_ns,
            _count(row["Request tokens"], "Request tokens"),
            output,
            delay_ns=delay_ns,
            session_id=session,
            turn=turn,
            model=row.get("Model") or None,
            tags={"log_type": row["Log Type"]} if row.get("Log Type") else None,
            recorded=recorded or None,
        )

    return _csv_reader(_COLUMNS["burstgpt"], parse)(file)


def _vidur(file: _File, number: int, row: Mapping[str, str]) -> TraceRow:
    arrived = row.get("arrived_at")
    return TraceRow(
        number,
        None if arrived is None else _seconds_ns(arrived, "arrived_at"),
        _count(row["num_prefill_tokens"], "num_prefill_tokens"),
        _count(row["num_decode_tokens"], "num_decode_tokens"),
    )


def _splitwise(file: _File, number: int, row: Mapping[str, str]) -> TraceRow:
    used = ("request_id", "arrival_timestamp", "prompt_size", "token_size")
    return TraceRow(
        number,
        _seconds_ns(row["arrival_timestamp"], "arrival_timestamp"),
        _count(row["prompt_size"], "prompt_size"),
        _count(row["token_size"], "token_size"),
        request_id=row.get("request_id"),
        source={name: value for name, value in row.items() if name not in used} or None,
    )


_READERS: dict[str, Callable[[_File], Iterator[TraceRow]]] = {
    "loadgen": _canonical,
    "mooncake-s": _canonical_in_seconds,
    "azure": _azure,
    "burstgpt": _burstgpt,
    "bailian": _bailian,
    "sharegpt": _sharegpt,
    "aiperf-single-turn": _aiperf_single,
    "aiperf-multi-turn": _aiperf_multi,
    "weka": _weka,
    "ragpulse": _ragpulse,
    "vidur": _csv_reader(_COLUMNS["vidur"], _vidur),
    "splitwise-sim": _csv_reader(_COLUMNS["splitwise-sim"], _splitwise),
}
FORMATS = (*_READERS, "mooncake", "aiperf")  # the last two are names of headerless loadgen

"""A trace in another format: any that is read here to loadgen.trace/1, Mooncake or AIPerf's mooncake_trace.

    convert("BurstGPT_3.csv", "burstgpt.jsonl", target="loadgen")

To loadgen.trace/1 nothing is lost: rows come sorted, times keep their zero, what has no field of its own is in
`source`. To Mooncake (timestamp, input_length, output_length, hash_ids; whole ms) and to AIPerf what these cannot say
is left out, and counted in what convert() gives back.
"""

from __future__ import annotations

import contextlib
import gzip
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from loadgen import __version__
from loadgen.options import UsageError
from loadgen.trace import SCHEMA, TraceError, TraceRow, line_of, ms, row_fields
from loadgen.trace_formats import Trace, sha256

TARGETS = ("loadgen", "mooncake", "aiperf")
MOONCAKE_BLOCK = 512

# what the sources ask for wherever their rows are passed on
_RIGHTS = {
    "azure": ("CC-BY-4.0", "Azure LLM inference traces, Microsoft (Splitwise, ISCA 2024; DynamoLLM, HPCA 2025)"),
    "burstgpt": ("CC-BY-4.0", "BurstGPT: Wang et al., KDD 2025"),
    "bailian": ("Apache-2.0", "Qwen-Bailian usage traces: Wang et al., ATC 2025"),
    "ragpulse": ("MIT", "RAGPulse, flashserve"),
    "weka": ("Apache-2.0", "kv-cache-tester, WEKA"),
}


def convert(
    path: str | Path,
    out: str,
    *,
    target: str = "loadgen",
    trace_format: str | None = None,
    block_size: int | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Write `out` ("-": standard output; .gz is compressed) and give {read, written, block_size, lost: {what: rows}}.

    tokenizer: a tokenizer.json, to count output tokens where the file has only text; else they are left open.
    Raises UsageError for a name or row that cannot be converted.
    """
    if target not in TARGETS:
        raise UsageError(f"--as must be one of {', '.join(TARGETS)}, not {target!r}")
    count_tokens = _counter(tokenizer) if tokenizer else None
    lost: Counter[str] = Counter()
    read = written = 0
    with Trace(path, trace_format, block_size) as trace, writing(out) as file:
        rows = _from_zero(trace.rows())
        export: Callable[[TraceRow], dict[str, Any] | None] = row_fields
        size = trace.block_size
        if target == "loadgen":
            file.write(line_of(_header(trace)))
        elif target == "aiperf":
            export = _Aiperf(lost).fields
        else:
            mooncake = _Mooncake(trace, lost)
            export, size = mooncake.fields, mooncake.block_size
        for row in rows:
            read += 1
            if count_tokens is not None and row.output_length is None and row.output_text is not None:
                row = row._replace(output_length=count_tokens(row.output_text))
            if (fields := export(row)) is not None:
                file.write(line_of(fields))
                written += 1
    return {"read": read, "written": written, "block_size": size, "lost": dict(lost)}


def _counter(tokenizer: str) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("--tokenizer needs the package tokenizers: pip install 'loadgen[tokens]'") from None
    try:
        made = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises bare Exceptions
        raise UsageError(f"--tokenizer {tokenizer}: not a tokenizer.json: {error}") from None
    return lambda text: len(made.encode(text, add_special_tokens=False).ids)


@contextlib.contextmanager
def writing(out: str) -> Iterator[IO[bytes]]:
    """A file to write, compressed by its name; "-" is standard output. Raises UsageError when it cannot be made."""
    if out == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with open(out, "wb") as plain:
            if out.endswith(".gz"):
                with gzip.GzipFile(fileobj=plain, mode="wb", filename="", mtime=0) as packed:  # same bytes every time
                    yield packed  # type: ignore[misc]
            else:
                yield plain
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror or error}") from None


def _from_zero(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    """Times before 0 (rows earlier than the first of the file) are not of the format: all are moved up."""
    shift_ns: int | None = None
    for row in rows:
        if row.timestamp_ns is not None:
            if shift_ns is None:
                shift_ns = max(0, -row.timestamp_ns)
            if shift_ns:
                row = row._replace(timestamp_ns=row.timestamp_ns + shift_ns)
        yield row


def _header(trace: Trace) -> dict[str, Any]:
    header: dict[str, Any] = {"schema": SCHEMA, "name": trace.path.name.split(".")[0]}
    if trace.block_size is not None:
        header["block_size"] = trace.block_size
    if trace.format in _RIGHTS:
        header["license"], header["attribution"] = _RIGHTS[trace.format]
    header["source"] = {"file": trace.name, "format": trace.format, "sha256": sha256(trace.path)}
    return {**header, **trace.header, "sorted": True, "converter": f"loadgen {__version__} {trace.format}"}


class _Renumbered:
    """Ids of several namespaces in one, where there are any; else as they are."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, int], int] = {}
        self._scoped = False

    def ids(self, row: TraceRow) -> list[int]:
        self._scoped = self._scoped or row.hash_scope is not None
        if not self._scoped:
            return list(row.hash_ids or ())
        numbers = self._numbers
        return [numbers.setdefault((row.hash_scope, block), len(numbers)) for block in row.hash_ids or ()]


class _Mooncake:
    """The four keys. Smaller blocks are joined: an id stands for all before it, so the last of a block names it."""

    def __init__(self, trace: Trace, lost: Counter[str]) -> None:
        size = trace.block_size or MOONCAKE_BLOCK
        self.block_size = size if MOONCAKE_BLOCK % size else MOONCAKE_BLOCK
        self._join = self.block_size // size
        self._name = trace.name
        self._lost = lost
        self._numbers: dict[tuple[str | None, int], int] = {}
        self._next = 0

    def fields(self, row: TraceRow) -> dict[str, Any] | None:
        if row.timestamp_ns is None:
            raise TraceError(f"{self._name}, line {row.line}: no timestamp, and Mooncake has one in every row")
        if not row.input_length or row.output_length is None:
            self._lost["left out: no input or no output length"] += 1
            return None
        for name in ("session_id", "delay_ns", "content", "segments", "prefix_length", "model"):
            if getattr(row, name) is not None:
                self._lost[f"{name.removesuffix('_ns')} dropped"] += 1
        if row.timestamp_ns % 1_000_000:
            self._lost["timestamp rounded to whole ms"] += 1
        return {
            "timestamp": round(row.timestamp_ns / 1_000_000),
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": self._ids(row),
        }

    def _ids(self, row: TraceRow) -> list[int]:
        """ceil(input / block) ids, numbered as they appear; what was not hashed gets new ones."""
        assert row.input_length is not None
        needed = -(-row.input_length // self.block_size)
        given = row.hash_ids or ()
        small = self.block_size // self._join
        ids = []
        for block in range(needed):
            last = min((block + 1) * self._join, -(-row.input_length // small)) - 1
            key = (row.hash_scope, given[last]) if last < len(given) else None
            if key is None:
                ids.append(self._next)
                self._next += 1
                continue
            if key not in self._numbers:
                self._numbers[key] = self._next
                self._next += 1
            ids.append(self._numbers[key])
        return ids


class _Aiperf:
    """A mooncake_trace row: one content, or lengths and hash_ids; a later turn has its delay instead of a time."""

    def __init__(self, lost: Counter[str]) -> None:
        self._lost = lost
        self._ids = _Renumbered()

    def fields(self, row: TraceRow) -> dict[str, Any] | None:
        if row.content is None and not row.input_length:
            self._lost["left out: no input"] += 1
            return None
        if row.output_length == 0:
            self._lost["left out: no output"] += 1  # a turn's max_tokens is 1 or more there
            return None
        if row.content is not None and row.content[0] == "prompt_token_ids":
            self._lost["left out: prompt_token_ids"] += 1
            return None
        for name in ("segments", "prefix_length", "model", "after"):
            if getattr(row, name):
                self._lost[f"{name} dropped"] += 1
        fields: dict[str, Any] = {}
        if row.timestamp_ns is not None and row.delay_ns is None:
            fields["timestamp"] = ms(row.timestamp_ns)
        if row.delay_ns is not None:
            fields["delay"] = ms(row.delay_ns)
        if row.session_id is not None:
            fields["session_id"] = row.session_id
        if row.content is not None:
            fields[row.content[0]] = row.content[1]
            if row.tools is not None and row.content[0] == "messages":
                fields["tools"] = row.tools
        else:
            fields["input_length"] = row.input_length
            if row.hash_ids:
                fields["hash_ids"] = self._ids.ids(row)
        if row.output_length is not None:
            fields["output_length"] = row.output_length
        if row.extra:
            fields["extra"] = dict(row.extra)
        return fields

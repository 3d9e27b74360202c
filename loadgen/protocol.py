"""The OpenAI protocol, no I/O: bodies out; an answer's bytes and stamps in, a RequestRecord out.

read_exchange never raises, whatever the bytes are: what is not an answer becomes a Failure of some kind.

Definitions (DESIGN.md section 5; docs/metrics.md has them for readers):

- A token-bearing event has a non-empty token of any channel: text or content, reasoning, tool call, refusal.
  Role-only, empty, comment, audio and usage events carry none.
- An event's stamp is that of the read that completed it.
- Output tokens are the server's usage, the last one it sent; without usage, the number of token-bearing events.
- An answer is ok with status 200, no error object, and a finish_reason, or [DONE] after at least one token. A stream
  that ends with neither is cut off. A finish_reason without a token is an empty answer: ok, its times None. A stream
  whose connection breaks behind a finish_reason or [DONE] was complete.

Speed: most events of one answer differ in the token's text alone. Once an event was parsed, the bytes before and
after its text form a template, proven by parsing the template with another text in it. An event with these bytes around
a string without quote, backslash or control byte then has the same structure by construction, and is not parsed.
"""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from loadgen import sse
from loadgen.options import Options
from loadgen.record import Failure, FailureKind, Request, RequestRecord
from loadgen.transport import Exchange

DONE = b"[DONE]"
_DETAIL_CHARS = 300
_ESCAPES = re.compile(rb'["\\\x00-\x1f]')
_PROBE = "loadgen\N{MIDDLE DOT}probe"


# ---------------------------------------------------------------- bodies


class Body:
    """Makes request bodies: every sampling field explicit, the same for each request and each server.

    path: where they go. A prompt is a string, a list of token ids (completions only) or a list of chat messages.
    """

    def __init__(self, options: Options, model: str) -> None:
        self.path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
        self._chat = options.endpoint == "chat"
        self._fixed: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "top_p": 1.0,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature > 0 and options.seed is not None:
            self._fixed["seed"] = options.seed
        self._ignore_eos = not options.stop_at_eos
        self._extra = dict(options.extra_body)

    def serialize(self, prompt: str | Sequence[Any], max_tokens: int | None, **extra: Any) -> bytes:
        """The JSON body. max_tokens None leaves the length to the server; `extra` overrides anything."""
        fields = dict(self._fixed)
        if self._chat:
            fields["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            fields["prompt"] = prompt
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
            if self._ignore_eos:
                fields["min_tokens"] = max_tokens
        if self._ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps({**fields, **self._extra, **extra})


# ---------------------------------------------------------------- one event


class Channel(enum.IntEnum):
    ANSWER = 0  # text or content
    REASONING = 1
    TOOL = 2
    REFUSAL = 3


@dataclass(slots=True)
class _Answer:
    """What is known of an answer so far."""

    stamps: array[int] = field(default_factory=lambda: array("q"))
    last_read: int = -1  # the read that completed the last token-bearing event
    shared: int = 0  # token-bearing events that came in the same read as the one before
    first_event_ns: int | None = None  # with choices, token-bearing or not
    first_answer_ns: int | None = None
    finish_reason: str | None = None
    done: bool = False
    usage: Mapping[str, Any] | None = None
    failure: Failure | None = None
    text: list[str] | None = None  # None: not wanted
    tools: dict[int, dict[str, str]] = field(default_factory=dict)

    def token(self, stamp_ns: int, read: int, channel: int) -> None:
        self.stamps.append(stamp_ns)
        self.shared += read == self.last_read
        self.last_read = read
        if channel == Channel.ANSWER and self.first_answer_ns is None:
            self.first_answer_ns = stamp_ns


def _tokens_of(choice: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(channel, text) of one choice; tool calls give their name and argument bytes as text."""
    found: list[tuple[int, str]] = []

    def take(channel: int, value: Any) -> None:
        if isinstance(value, str) and value:
            found.append((channel, value))

    take(Channel.ANSWER, choice.get("text"))
    delta = choice.get("delta") or choice.get("message")
    if not isinstance(delta, dict):
        return found
    content = delta.get("content")
    if isinstance(content, list):  # typed parts
        for part in content:
            take(Channel.ANSWER, part.get("text") if isinstance(part, dict) else None)
    else:
        take(Channel.ANSWER, content)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    take(Channel.REASONING, reasoning)
    take(Channel.REFUSAL, delta.get("refusal"))
    calls = delta.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for function in [*functions, delta.get("function_call")]:
        if isinstance(function, dict):
            take(Channel.TOOL, function.get("name"))
            take(Channel.TOOL, function.get("arguments"))
    return found


def _choices(payload: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = payload.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _take_event(answer: _Answer, kind: bytes, data: bytes, stamp_ns: int, read: int) -> Mapping[str, Any] | None:
    """Account for one event; gives its JSON object, or None when it has none."""
    if data.strip() == DONE:
        answer.done = True
        return None
    try:
        payload = orjson.loads(data)
    except ValueError:
        what = "the server sent an error event" if kind == b"error" else "an event is not JSON"
        failure_kind = FailureKind.STREAM_ERROR if kind == b"error" else FailureKind.PROTOCOL
        answer.failure = answer.failure or Failure(failure_kind, f"{what}: {_clip(data)}", 200)
        return None
    if not isinstance(payload, dict):
        answer.failure = answer.failure or Failure(FailureKind.PROTOCOL, f"an event is no object: {_clip(data)}", 200)
        return None
    error = _error_in(payload, kind)
    if error is not None:
        answer.failure = answer.failure or error
        return payload
    if isinstance(payload.get("usage"), dict):
        answer.usage = payload["usage"]
    bearing: list[tuple[int, str]] = []
    choices = _choices(payload)
    if choices and answer.first_event_ns is None:
        answer.first_event_ns = stamp_ns
    for choice in choices:
        bearing += _tokens_of(choice)
        if isinstance(choice.get("finish_reason"), str):
            answer.finish_reason = choice["finish_reason"]
        if answer.text is not None:
            _assemble_tools(answer.tools, choice)
    if bearing:
        channels = {channel for channel, _ in bearing}
        answer.token(stamp_ns, read, Channel.ANSWER if Channel.ANSWER in channels else min(channels))
        if answer.text is not None:
            answer.text += [text for channel, text in bearing if channel == Channel.ANSWER]
    return payload


def _error_in(payload: Mapping[str, Any], kind: bytes = b"") -> Failure | None:
    """The failure that an object reports: {"error": {...}}, {"error": "text"}, {"object": "error", ...}."""
    error = payload.get("error")
    if error is None and (payload.get("object") == "error" or kind == b"error"):
        error = payload
    if error is None or error is False:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    detail = error_message(payload)
    return Failure(FailureKind.STREAM_ERROR, detail if code is None else f"{detail} ({code})", status or 200)


def error_message(payload: Any) -> str:
    """The readable part of an error body, as OpenAI, vLLM and FastAPI shape them."""
    if isinstance(payload, dict):
        for key in ("error", "message", "detail"):
            if payload.get(key):
                return error_message(payload[key])
        return _clip(orjson.dumps(payload))
    return _clip(str(payload).encode())


def _clip(data: bytes) -> str:
    text = " ".join(data[: 4 * _DETAIL_CHARS].decode("utf-8", "replace").split())
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"


def _assemble_tools(tools: dict[int, dict[str, str]], choice: Mapping[str, Any]) -> None:
    delta = choice.get("delta") or choice.get("message")
    calls = delta.get("tool_calls") if isinstance(delta, dict) else None
    for position, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        index = call.get("index")
        entry = tools.setdefault(index if isinstance(index, int) else position, {"name": "", "arguments": ""})
        for key in entry:
            if isinstance(function.get(key), str):
                entry[key] += function[key]


# ---------------------------------------------------------------- templates


@dataclass(frozen=True, slots=True)
class _Template:
    """An event's bytes around its text: `data: {... "text":"` + text + `" ...}` + line ends."""

    prefix: bytes
    suffix: bytes
    channel: int


def _learn(event: bytes, payload: Mapping[str, Any]) -> _Template | None:
    """A template of an event's whole bytes (`data: ` to its blank line), or None where it has no simple shape."""
    choices = _choices(payload)
    if len(choices) != 1 or payload.get("usage") is not None or choices[0].get("finish_reason") is not None:
        return None
    bearing = _tokens_of(choices[0])
    if len(bearing) != 1 or bearing[0][0] == Channel.TOOL:
        return None
    channel, text = bearing[0]
    quoted = b'"' + text.encode("utf-8", "surrogatepass") + b'"'
    if _ESCAPES.search(quoted[1:-1]) or event.count(quoted) != 1:
        return None
    at = event.index(quoted) + 1
    prefix, suffix = event[:at], event[at + len(quoted) - 2 :]
    # the proof: with another text in the same place nothing but that text differs
    try:
        probe = orjson.loads((prefix + _PROBE.encode() + suffix).removeprefix(b"data:"))
    except ValueError:
        return None
    other = _choices(probe)
    if len(other) != 1 or _tokens_of(other[0]) != [(channel, _PROBE)]:
        return None
    if {**probe, "choices": None} != {**payload, "choices": None}:
        return None
    return _Template(prefix, suffix, channel)


class _Reader:
    """Reads the pieces of one event stream. A piece that is exactly whole events takes the fast path, if chunked with
    its chunk frame; anything else ends the fast path for this answer and sse.Parser reads it from the start."""

    def __init__(self, keep_text: bool) -> None:
        self.keep_text = keep_text

    def read(self, exchange: Exchange) -> _Answer:
        framed = exchange.framed_pieces()
        if framed is not None:
            answer = self._fast(*framed, chunked=True)
        else:
            answer = self._fast(*exchange.body_pieces(), chunked=False)
        return answer if answer is not None else read_slowly(*exchange.body_pieces(), keep_text=self.keep_text)

    def _fast(self, pieces: Sequence[bytes], stamps: Sequence[int], chunked: bool) -> _Answer | None:
        answer = _Answer(text=[] if self.keep_text else None)
        heads: dict[int, bytes | None] = {}  # by length of the piece: chunk size line (if chunked) + prefix
        template: _Template | None = None
        suffix = b""
        from_end = 0
        plain: set[bytes] = set()  # texts without quote, backslash and control bytes
        take = answer.stamps.append
        for read, piece in enumerate(pieces):
            head = heads.get(len(piece))
            if head is None and template is not None:
                head = _chunk_head(len(piece)) + template.prefix if chunked else template.prefix
                heads[len(piece)] = head
            if head is not None and piece.startswith(head) and piece.endswith(suffix):
                text = piece[len(head) : from_end]
                if text not in plain and text and not _ESCAPES.search(text):
                    plain.add(text)
                if text in plain:
                    take(stamps[read])
                    if answer.text is not None and template is not None and template.channel == Channel.ANSWER:
                        answer.text.append(text.decode("utf-8", "replace"))
                    continue
            body = _unchunk_whole(piece) if chunked else piece
            learnt = None if body is None else self._whole_events(answer, body, stamps[read], read)
            if learnt is None:
                return None
            if answer.done:
                return answer
            if isinstance(learnt, _Template):
                template, heads = learnt, {}
                suffix = template.suffix + (b"\r\n" if chunked else b"")
                from_end = -len(suffix)
        return answer

    def _whole_events(self, answer: _Answer, body: bytes, stamp_ns: int, read: int) -> _Template | bool | None:
        """Take a piece that is whole `data: ...` events with LF ends, and learn from a single one; None when it is
        anything else."""
        if not body:
            return True
        if b"\r" in body or not body.endswith(b"\n\n"):
            return None
        events = body[:-2].split(b"\n\n")
        if any(not event.startswith(b"data:") or b"\n" in event for event in events):
            return None
        payload = None
        for event in events:
            data = event[6:] if event[5:6] == b" " else event[5:]
            payload = _take_event(answer, b"", data, stamp_ns, read)
            if answer.done:
                return True
        return (payload is not None and len(events) == 1 and _learn(body, payload)) or True


def _chunk_head(piece_length: int) -> bytes:
    """The size line of a chunk that fills a piece of this length: hex size, CRLF, data, CRLF."""
    for digits in range(1, 17):
        size = piece_length - digits - 4
        if size > 0 and len(head := b"%x\r\n" % size) == digits + 2:
            return head
    return b"\xff"  # no chunk has this length: matches nothing


def _unchunk_whole(piece: bytes) -> bytes | None:
    """The data of a piece that is exactly one or more whole chunks, else None (sizes in lower or upper case hex)."""
    parts = []
    at = 0
    while at < len(piece):
        end = piece.find(b"\r\n", at, at + 18)
        digits = piece[at:end] if end > at else b""
        if not digits or not all(byte in b"0123456789abcdefABCDEF" for byte in digits):
            return None
        size = int(digits, 16)
        start = end + 2
        if piece[start + size : start + size + 2] != b"\r\n":
            return None
        parts.append(piece[start : start + size])
        at = start + size + 2
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_slowly(pieces: Sequence[bytes], stamps: Sequence[int], *, keep_text: bool) -> _Answer:
    """The reference reader: any cut, any line end. `_Reader` must agree with it on every input."""
    answer = _Answer(text=[] if keep_text else None)
    parser = sse.Parser()
    read = -1
    try:
        for read, piece in enumerate(pieces):
            for kind, data in parser.feed(piece):
                _take_event(answer, kind, data, stamps[read], read)
                if answer.done:
                    return answer
        if read >= 0:
            for kind, data in parser.finish():
                _take_event_at_end(answer, kind, data, stamps[read], read)
    except sse.LineTooLong as error:
        answer.failure = answer.failure or Failure(FailureKind.TOO_LARGE, str(error), 200)
    return answer


def _take_event_at_end(answer: _Answer, kind: bytes, data: bytes, stamp_ns: int, read: int) -> None:
    """A last event without its blank line: taken when it is whole, dropped (as a cut) when it is not JSON."""
    if data.strip() != DONE:
        try:
            orjson.loads(data)
        except ValueError:
            return
    _take_event(answer, kind, data, stamp_ns, read)


# ---------------------------------------------------------------- one exchange


def read_exchange(request: Request, exchange: Exchange, planned_ns: int, *, keep_text: bool = False) -> RequestRecord:
    """What became of a request. planned_ns: the absolute start that its latency counts from. Never raises."""
    answer = _Answer(text=[] if keep_text else None)
    if exchange.status == 200:
        try:
            if _is_json(exchange):
                _take_whole(answer, exchange)
            else:
                answer = _Reader(keep_text).read(exchange)
        except (ValueError, OSError, EOFError) as error:  # a broken content coding
            answer.failure = Failure(FailureKind.PROTOCOL, f"the body cannot be decoded: {error}", 200)
    failure = _failure(exchange, answer)
    usage = answer.usage or {}
    completion_tokens = _count(usage.get("completion_tokens"))
    prompt_details = usage.get("prompt_tokens_details")
    output_details = usage.get("completion_tokens_details")
    num_events = len(answer.stamps)
    estimated = completion_tokens is None and num_events > 0
    return RequestRecord(
        id=request.id,
        phase=request.phase,
        planned_ns=planned_ns,
        sent_ns=exchange.sent_ns,
        first_byte_ns=exchange.first_byte_ns,
        first_token_ns=answer.stamps[0] if num_events else None,
        first_event_ns=answer.first_event_ns,
        first_answer_ns=answer.first_answer_ns,
        last_token_ns=answer.stamps[-1] if num_events else None,
        end_ns=exchange.end_ns,
        event_stamps_ns=answer.stamps,
        shared_stamps=answer.shared,
        prompt_tokens=_count(usage.get("prompt_tokens")),
        output_tokens=num_events if estimated else completion_tokens,
        tokens_from="events" if estimated else None if completion_tokens is None else "server",
        finish_reason=answer.finish_reason,
        status=exchange.status,
        failure=failure,
        text=None if answer.text is None else "".join(answer.text),
        kernel_stamps=exchange.kernel_stamps,
        reopened=exchange.reopened,
        asked_input_tokens=request.input_tokens,
        asked_output_tokens=request.output_tokens,
        cached_tokens=_count(prompt_details.get("cached_tokens")) if isinstance(prompt_details, dict) else None,
        reasoning_tokens=_count(output_details.get("reasoning_tokens")) if isinstance(output_details, dict) else None,
        tool_calls=orjson.dumps([answer.tools[k] for k in sorted(answer.tools)]).decode() if answer.tools else None,
        tags=request.tags,
    )


def _is_json(exchange: Exchange) -> bool:
    return exchange.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def _take_whole(answer: _Answer, exchange: Exchange) -> None:
    """An answer that did not stream: one event, at the read that completed it."""
    pieces, stamps = exchange.body_pieces()
    if pieces:
        _take_event(answer, b"", b"".join(pieces), stamps[-1], len(pieces) - 1)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _failure(exchange: Exchange, answer: _Answer) -> Failure | None:
    if exchange.status is not None and exchange.status != 200 and exchange.failure is None:
        return _status_failure(exchange)
    if answer.failure is not None:
        return answer.failure
    complete = answer.finish_reason is not None or (answer.done and len(answer.stamps) > 0)
    if exchange.failure is not None:
        if exchange.failure.kind is FailureKind.CUT_OFF and complete:
            return None
        return exchange.failure
    if complete:
        return None
    if exchange.status is None:
        return Failure(FailureKind.PROTOCOL, "no answer")
    if answer.done:
        return Failure(FailureKind.EMPTY, "[DONE] without a token and without finish_reason", 200)
    seen = len(answer.stamps)
    if not seen and not answer.usage and any(exchange.body_pieces()[0]) and not _looks_like_events(exchange):
        return Failure(FailureKind.PROTOCOL, f"not an event stream: {_clip(_body(exchange))}", 200)
    return Failure(FailureKind.CUT_OFF, f"the stream ended after {seen} events, without finish_reason or [DONE]", 200)


def _looks_like_events(exchange: Exchange) -> bool:
    return "event-stream" in exchange.headers.get("content-type", "") or b"data:" in _body(exchange)


def _body(exchange: Exchange) -> bytes:
    return b"".join(exchange.body_pieces()[0])


def _status_failure(exchange: Exchange) -> Failure:
    status = exchange.status
    try:
        body = _body(exchange)
        payload: Any = orjson.loads(body) if body else ""
    except (ValueError, OSError, EOFError):
        payload = body.decode("utf-8", "replace")
    message = error_message(payload) if payload else ""
    return Failure(
        FailureKind.STATUS,
        f"{status}: {message}" if message else str(status),
        status,
        exchange.headers.get("retry-after"),
    )

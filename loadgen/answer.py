"""What the events of one answer mean: tokens by channel, finish, usage, errors. No bytes off the wire, no HTTP.

A token-bearing event has a non-empty token of any channel: text or content, reasoning, tool call, refusal. Role-only,
empty, audio and usage events carry none. take_event never raises, whatever the data is.

Read generously, as far as the meaning is plain: bytes that are not UTF-8 become U+FFFD (as the SSE standard says), NaN
and lone surrogates in JSON are let through, an event without data or a named event that is not JSON is a keep-alive.
"""

from __future__ import annotations

import enum
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from loadgen.record import Failure, FailureKind

DONE = b"[DONE]"
_DETAIL_CHARS = 300
_FAILED_FINISH = ("error", "abort")  # vLLM and SGLang end an answer so when the engine gave it up
_MAX_COUNT = 1 << 53  # no token count; what JSON readers take for exact


class Channel(enum.IntEnum):
    ANSWER = 0  # text or content
    REASONING = 1
    TOOL = 2
    REFUSAL = 3


_ANSWER, _REASONING, _TOOL, _REFUSAL = (int(channel) for channel in Channel)


@dataclass(slots=True)
class Answer:
    """What is known of an answer so far. Stamps are ns of the reads that completed the events."""

    text: list[str] | None = None  # None: not wanted
    stamps: array[int] = field(default_factory=lambda: array("q"))
    last_read: int = -1  # the read that completed the last token-bearing event
    shared: int = 0  # token-bearing events that came in the same read as the one before
    num_parsed: int = 0  # events that were not skipped by a template
    first_event_ns: int | None = None  # with choices, token-bearing or not
    first_answer_ns: int | None = None
    finish_reason: str | None = None
    done: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    tools: dict[int, dict[str, str]] = field(default_factory=dict)

    def tokens(self, stamps: Sequence[int], reads: Sequence[int], channel: int) -> None:
        """Token-bearing events of one channel, in order: the stamp and number of the read that completed each."""
        self.stamps.extend(stamps)
        if not isinstance(reads, range):
            self.shared += len(reads) - len(set(reads))
        self.shared += reads[0] == self.last_read
        self.last_read = reads[-1]
        if channel == _ANSWER and self.first_answer_ns is None:
            self.first_answer_ns = stamps[0]

    def fail(self, kind: FailureKind, detail: str, status: int = 200) -> None:
        """The first failure stays."""
        if self.failure is None:
            self.failure = Failure(kind, detail, status)

    def count(self, name: str, details: str | None = None) -> int | None:
        """A token count of the usage, None where it has none."""
        usage = self.usage.get(details) if details else self.usage
        value = usage.get(name) if isinstance(usage, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT else None


def take_event(answer: Answer, kind: bytes, data: bytes, stamp_ns: int, read: int) -> dict[str, Any] | None:
    """Account for one event: its type and data, the stamp and number of the read that completed it.

    Gives the event's JSON object, or None where it has none.
    """
    answer.num_parsed += 1
    if data == DONE:
        answer.done = True
        return None
    try:
        payload = orjson.loads(data)
    except ValueError:
        stripped = data.strip()
        if stripped == DONE:
            answer.done = True
            return None
        payload = _loads_generously(stripped)
    if not isinstance(payload, dict):
        if kind == b"error":
            answer.fail(FailureKind.STREAM_ERROR, f"the server sent an error event: {clip(data)}")
        elif data.strip() and kind in (b"", b"message"):
            answer.fail(FailureKind.PROTOCOL, f"an event is no JSON object: {clip(data)}")
        return None
    if kind == b"error" or payload.get("error") or payload.get("object") == "error":
        _take_error(answer, payload)
        return payload
    if usage := payload.get("usage"):
        if isinstance(usage, dict):
            answer.usage.update((name, value) for name, value in usage.items() if value is not None)
    choices = choices_of(payload)
    if not choices:
        return payload
    if answer.first_event_ns is None:
        answer.first_event_ns = stamp_ns
    bearing: list[tuple[int, str]] = []
    for choice in choices:
        bearing += tokens_of(choice)
        reason = choice.get("finish_reason")
        if reason and isinstance(reason, str):  # some servers send "" with every event
            answer.finish_reason = reason = clip(reason.encode("utf-8", "replace"))
            if reason in _FAILED_FINISH:
                answer.fail(FailureKind.STREAM_ERROR, f"the server ended the answer with finish_reason {reason!r}")
        if answer.text is not None:
            _assemble_tools(answer.tools, choice)
    if bearing:
        answer.tokens((stamp_ns,), (read,), min(bearing)[0])
        if answer.text is not None:
            answer.text += [text for channel, text in bearing if channel == _ANSWER]
    return payload


def _loads_generously(data: bytes) -> Any:
    """JSON as Python's own parser takes it; None where it is none."""
    try:
        return json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def choices_of(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = payload.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def tokens_of(choice: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(channel, text) of one choice; tool calls give their name and arguments as text."""
    found: list[tuple[int, str]] = []
    if (text := choice.get("text")) and isinstance(text, str):
        found.append((_ANSWER, text))
    delta = choice.get("delta") or choice.get("message")
    if not isinstance(delta, dict):
        return found
    if content := delta.get("content"):
        if isinstance(content, str):
            found.append((_ANSWER, content))
        elif isinstance(content, list):  # typed parts
            texts = (part.get("text") for part in content if isinstance(part, dict))
            found += [(_ANSWER, text) for text in texts if text and isinstance(text, str)]
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if reasoning and isinstance(reasoning, str):
        found.append((_REASONING, reasoning))
    if (refusal := delta.get("refusal")) and isinstance(refusal, str):
        found.append((_REFUSAL, refusal))
    for function in _functions_of(delta):
        found += [(_TOOL, text) for key in ("name", "arguments") if (text := function.get(key)) and type(text) is str]
    return found


def _functions_of(delta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The function parts of tool calls, and of the older function_call."""
    calls = delta.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions.append(delta.get("function_call"))
    return [function for function in functions if isinstance(function, dict)]


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


# ---------------------------------------------------------------- errors


def _take_error(answer: Answer, payload: Mapping[str, Any]) -> None:
    """{"error": {...}}, {"error": "text"}, {"object": "error", ...}, or an event of type error."""
    error = payload.get("error") or payload
    code = error.get("code") if isinstance(error, dict) else payload.get("code")
    detail = error_message(payload)
    if isinstance(code, str | int) and code:
        detail = f"{detail} ({clip(str(code).encode())})"
    answer.fail(FailureKind.STREAM_ERROR, detail, code if isinstance(code, int) and 100 <= code <= 599 else 200)


def error_message(payload: Any) -> str:
    """The readable part of an error body, as OpenAI, vLLM and FastAPI shape them."""
    while isinstance(payload, dict):
        inner = next((payload[key] for key in ("error", "message", "detail") if payload.get(key)), None)
        if inner is None:
            break
        payload = inner
    if isinstance(payload, str):
        return clip(payload.encode("utf-8", "replace"))
    try:
        return clip(orjson.dumps(payload))
    except TypeError:  # nested too deep, or lone surrogates
        return "an error without a readable message"


def clip(data: bytes) -> str:
    """Bytes as one line of at most 300 characters."""
    text = " ".join(data[: 4 * _DETAIL_CHARS].decode("utf-8", "replace").split())
    return text if len(text) <= _DETAIL_CHARS else text[: _DETAIL_CHARS - 1] + "…"

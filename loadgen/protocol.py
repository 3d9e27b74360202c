"""The OpenAI protocol, no I/O: bodies out; an answer's bytes and stamps in, a RequestRecord out.

read_exchange never raises, whatever the bytes are: what is not an answer becomes a Failure of some kind.

Definitions (DESIGN.md section 5; docs/metrics.md has them for readers):

- A token-bearing event has a non-empty token of any channel; answer.py says which. Its stamp is that of the read that
  completed it.
- Output tokens are the server's usage, the last one it sent. Without usage, or where it says 0 of an answer that has
  tokens, they are the number of token-bearing events, marked "events".
- An answer is ok with status 200, no error object, and a finish_reason, or [DONE] after at least one token. A stream
  that ends with neither is cut off. A finish_reason without a token is an empty answer: ok, its times None. A stream
  whose connection breaks behind a finish_reason or [DONE] was complete. A finish_reason of
  "error" or "abort" is a failure.
- A last line without the line end that should follow counts when it is whole: [DONE] or JSON.
- An answer that is one JSON object instead of a stream counts as one event, when its last byte is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from loadgen.answer import Answer, clip, error_message, take_event
from loadgen.options import Options
from loadgen.record import Failure, FailureKind, Request, RequestRecord
from loadgen.stream import read_stream
from loadgen.transport import Exchange

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
        fields |= {**self._extra, **extra}
        if not fields["stream"]:
            del fields["stream_options"]  # servers refuse it without a stream
        return orjson.dumps(fields)


# ---------------------------------------------------------------- one exchange


def read_exchange(request: Request, exchange: Exchange, planned_ns: int, *, keep_text: bool = False) -> RequestRecord:
    """What became of a request. planned_ns: the absolute start that its latency counts from. Never raises."""
    answer = _read(exchange, keep_text)
    num_events = len(answer.stamps)
    output_tokens = answer.count("completion_tokens")
    tokens_from = None if output_tokens is None else "server"
    if num_events and not output_tokens:
        output_tokens, tokens_from = num_events, "events"
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
        prompt_tokens=answer.count("prompt_tokens"),
        output_tokens=output_tokens,
        tokens_from=tokens_from,
        finish_reason=answer.finish_reason,
        status=exchange.status,
        failure=_failure(exchange, answer),
        text=None if answer.text is None else _whole_characters("".join(answer.text)),
        kernel_stamps=exchange.kernel_stamps,
        reopened=exchange.reopened,
        asked_input_tokens=request.input_tokens,
        asked_output_tokens=request.output_tokens,
        cached_tokens=answer.count("cached_tokens", "prompt_tokens_details"),
        reasoning_tokens=answer.count("reasoning_tokens", "completion_tokens_details"),
        tool_calls=_tool_calls(answer) if answer.tools else None,
        tags=request.tags,
    )


def _read(exchange: Exchange, keep_text: bool) -> Answer:
    answer = Answer(text=[] if keep_text else None)
    if exchange.status != 200:
        return answer
    try:
        if not _is_json_object(exchange):
            answer = read_stream(exchange, keep_text=keep_text)
        if answer.num_parsed == 0:
            _take_whole(answer, exchange)
    except ValueError as error:
        answer.fail(FailureKind.PROTOCOL, f"the body cannot be decoded: {error}")
    return answer


def _is_json_object(exchange: Exchange) -> bool:
    media_type = exchange.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" and _body(exchange).lstrip()[:1] == b"{"


def _take_whole(answer: Answer, exchange: Exchange) -> None:
    """An answer that did not stream: one event, at the read that completed it. Some servers give errors so, too,
    under the name of an event stream."""
    pieces, stamps = exchange.body_pieces()
    body = b"".join(pieces)
    if body.lstrip()[:1] == b"{":
        take_event(answer, b"", body, stamps[-1], len(pieces) - 1)


def _failure(exchange: Exchange, answer: Answer) -> Failure | None:
    if exchange.status is not None and exchange.status != 200:
        return _status_failure(exchange, exchange.status)
    if answer.failure is not None and answer.failure.kind is FailureKind.STREAM_ERROR:
        return answer.failure  # the server's own words, even if the connection broke behind them
    complete = answer.finish_reason is not None or (answer.done and len(answer.stamps) > 0)
    if exchange.failure is not None:
        return None if exchange.failure.kind is FailureKind.CUT_OFF and complete else exchange.failure
    if answer.failure is not None or complete:
        return answer.failure
    if exchange.status is None:
        return Failure(FailureKind.PROTOCOL, "no answer")
    if answer.done:
        return Failure(FailureKind.EMPTY, "[DONE] without a token and without finish_reason", 200)
    if not answer.num_parsed and "event-stream" not in exchange.headers.get("content-type", ""):
        if body := _body(exchange):
            return Failure(FailureKind.PROTOCOL, f"no event stream: {clip(body)}", 200)
    seen = f"after {len(answer.stamps)} token-bearing events, without finish_reason or [DONE]"
    return Failure(FailureKind.CUT_OFF, f"the stream ended {seen}", 200)


def _status_failure(exchange: Exchange, status: int) -> Failure:
    try:
        body = _body(exchange)
    except ValueError as error:
        body = f"the body cannot be decoded: {error}".encode()
    try:
        message = error_message(orjson.loads(body))
    except ValueError:
        message = clip(body)
    if location := exchange.headers.get("location"):
        message = f"redirects to {clip(location.encode())}; give the address that answers itself"
    detail = f"{status}: {message}" if message else str(status)
    return Failure(FailureKind.STATUS, detail, status, exchange.headers.get("retry-after"))


def _body(exchange: Exchange) -> bytes:
    """Raises ValueError for an undecodable content coding."""
    return b"".join(exchange.body_pieces()[0])


def _tool_calls(answer: Answer) -> str:
    calls = [answer.tools[index] for index in sorted(answer.tools)]
    return orjson.dumps([{k: _whole_characters(v) for k, v in call.items()} for call in calls]).decode()


def _whole_characters(text: str) -> str:
    """Halves of a surrogate pair that came in two events are joined, single ones become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

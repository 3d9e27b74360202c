"""protocol.read_exchange: what each kind of answer means, and that the fast reader is the slow one, only faster."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadgen import sse
from loadgen.answer import Answer, take_event
from loadgen.http1 import parse_head
from loadgen.options import Options
from loadgen.protocol import Body, read_exchange
from loadgen.record import Failure, FailureKind, Phase, Request, RequestRecord
from loadgen.stream import read_stream
from loadgen.transport import Exchange
from loadgen.wire import WireExchange
from tests.fakes import DONE, chunk, event, exchange_of, usage

REQUEST = Request("r1", Phase.MEASURED, "/v1/completions", b"{}", input_tokens=4, output_tokens=64)
MODEST = settings(deadline=None, max_examples=150, derandomize=True)


def read(*pieces: bytes, keep_text: bool = True, **changes: Any) -> RequestRecord:
    """The record of these body pieces, stamped 10, 20, 30, ..."""
    return read_exchange(REQUEST, exchange_of(pieces, **changes), 0, keep_text=keep_text)


def times(record: RequestRecord) -> tuple[int | None, list[int], int | None]:
    return record.first_token_ns, list(record.event_stamps_ns), record.last_token_ns


def failed(record: RequestRecord) -> tuple[FailureKind, str]:
    assert record.failure is not None
    return record.failure.kind, record.failure.detail


FINISH = event(chunk("", "stop"))


# ---------------------------------------------------------------- bodies


def test_every_sampling_field_is_in_the_body() -> None:
    body = orjson.loads(Body(Options(seed=7), "m").serialize([1, 2, 3], 5))
    assert body == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0.0,
        "top_p": 1.0,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_chat_body_sampling_and_extra_fields() -> None:
    options = Options(
        endpoint="chat", temperature=0.5, seed=7, stop_at_eos=True, extra_body={"top_p": 0.9, "stop": "."}
    )
    body = orjson.loads(Body(options, "m").serialize("hello", 5, response_format={"type": "json_object"}))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert (body["seed"], body["temperature"], body["top_p"], body["stop"]) == (7, 0.5, 0.9, ".")
    assert body["response_format"] == {"type": "json_object"}
    assert "ignore_eos" not in body and "min_tokens" not in body
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    assert orjson.loads(Body(options, "m").serialize(messages, 5))["messages"] == messages


def test_a_body_without_a_stream_has_no_stream_options() -> None:
    body = orjson.loads(Body(Options(extra_body={"stream": False}), "m").serialize("x", None))
    assert body["stream"] is False and "stream_options" not in body and "max_tokens" not in body


# ---------------------------------------------------------------- tokens and times


@pytest.mark.parametrize(
    ("delta", "bears"),
    [
        ({"role": "assistant"}, False),
        ({"role": "assistant", "content": None}, False),
        ({"role": "assistant", "content": ""}, False),
        ({"content": "x"}, True),
        ({"content": " "}, True),
        ({"content": [{"type": "text", "text": "x"}]}, True),
        ({"content": [{"type": "text", "text": ""}]}, False),
        ({"reasoning_content": "x"}, True),
        ({"reasoning": "x"}, True),
        ({"reasoning": ""}, False),
        ({"reasoning_content": "x", "reasoning": "x"}, True),
        ({"refusal": "x"}, True),
        ({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}, True),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
        ({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "", "arguments": ""}}]}, False),
        ({"tool_calls": []}, False),
        ({"function_call": {"name": "f"}}, True),
        ({"audio": {"data": "UklGRg=="}}, False),
        ({}, False),
    ],
)
def test_which_deltas_bear_a_token(delta: dict[str, Any], bears: bool) -> None:
    record = read(event(chunk(**delta)), FINISH, DONE)
    assert times(record) == ((10, [10], 10) if bears else (None, [], None))
    assert record.first_event_ns == 10
    assert record.ok


def test_first_token_of_any_channel_and_first_answer_token() -> None:
    record = read(
        event(chunk(role="assistant", content="")),
        event(chunk(reasoning_content="r1")),
        event(chunk(reasoning_content="r2")),
        event(chunk(content="ok")),
        event(chunk(finish="stop")),
        event(usage(3, completion_tokens_details={"reasoning_tokens": 2}, prompt_tokens_details={"cached_tokens": 1})),
        DONE,
    )
    assert times(record) == (20, [20, 30, 40], 40)
    assert (record.first_event_ns, record.first_answer_ns) == (10, 40)
    assert (record.text, record.output_tokens, record.reasoning_tokens, record.cached_tokens) == ("ok", 3, 2, 1)


def test_an_event_of_two_channels_is_one_and_counts_as_the_answer() -> None:
    record = read(event(chunk(reasoning="r", content="c")), FINISH)
    assert (list(record.event_stamps_ns), record.first_answer_ns, record.text) == ([10], 10, "c")


def test_a_tool_call_is_an_answer_and_is_assembled() -> None:
    def call(index: int, **function: str) -> bytes:
        return event(chunk(tool_calls=[{"index": index, "function": function}]))

    record = read(
        event(chunk(role="assistant", content=None)),
        call(0, name="f", arguments=""),
        call(0, arguments='{"a":'),
        call(0, arguments="1}"),
        call(1, name="g", arguments="{}"),
        event(chunk(finish="tool_calls")),
        event(usage(6)),
        DONE,
    )
    assert record.ok and times(record) == (20, [20, 30, 40, 50], 50)
    assert record.first_answer_ns is None
    assert record.output_tokens == 6
    assert orjson.loads(record.tool_calls or "") == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert record.text == ""


def test_events_of_one_read_share_its_stamp_and_are_counted() -> None:
    a, b, c = (event(chunk(text)) for text in "abc")
    record = read(a + b, c, FINISH + DONE)
    assert list(record.event_stamps_ns) == [10, 10, 20]
    assert record.shared_stamps == 1
    record = read(a[:9], a[9:] + b + c[:9], c[9:] + DONE)
    assert list(record.event_stamps_ns) == [20, 20, 30]
    assert record.shared_stamps == 1


def test_several_choices_in_an_event_are_one_event() -> None:
    two = {"choices": [{"index": 0, "text": ""}, {"index": 1, "text": "x"}]}
    assert list(read(event(two), FINISH).event_stamps_ns) == [10]


# ---------------------------------------------------------------- usage


def test_usage_of_the_server_counts_not_the_wish_and_not_the_events() -> None:
    record = read(event(chunk("a b c d")), FINISH, event(usage(20)), DONE)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (4, 20, "server")
    assert record.asked_output_tokens == 64


def test_without_usage_events_are_counted_and_marked() -> None:
    record = read(event(chunk("a")), event(chunk("b", "length")), DONE)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (None, 2, "events")


@pytest.mark.parametrize(
    "counts",
    [
        [None, {"prompt_tokens": 4, "completion_tokens": 2}],
        [{"prompt_tokens": 4, "completion_tokens": 1}, {"prompt_tokens": 4, "completion_tokens": 2}],  # cumulative
        [{"prompt_tokens": 4}, {"completion_tokens": 2}],  # the parts apart
        [{"prompt_tokens": 4, "completion_tokens": 2}, {"prompt_tokens": None, "completion_tokens": None}],
        [{"prompt_tokens": 4, "completion_tokens": 2}, None],
    ],
)
def test_usage_on_every_event_the_last_wins(counts: list[Any]) -> None:
    record = read(*[event({**chunk("x"), "usage": count}) for count in counts], FINISH, DONE)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (4, 2, "server")


def test_usage_twice_at_the_end() -> None:
    record = read(event(chunk("x")), FINISH, event(usage(1)), event(usage(2)), DONE)
    assert record.output_tokens == 2


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, None, [], 10**30])
def test_usage_that_is_no_count(value: Any) -> None:
    text = orjson.dumps(usage(1)).replace(b'"completion_tokens":1', b'"completion_tokens":%b' % str_json(value))
    record = read(event(chunk("x")), FINISH, b"data: " + text + b"\n\n", DONE)
    assert record.ok
    assert (record.output_tokens, record.tokens_from) == (1, "events")


def str_json(value: Any) -> bytes:
    return str(value).encode() if isinstance(value, int) and value > 2**64 else orjson.dumps(value)


def test_usage_of_zero_beside_tokens_is_not_believed() -> None:
    record = read(event(chunk("x")), FINISH, event(usage(0)), DONE)
    assert (record.output_tokens, record.tokens_from) == (1, "events")
    record = read(FINISH, event(usage(0)), DONE)
    assert (record.output_tokens, record.tokens_from) == (0, "server")


@pytest.mark.parametrize("choices", [[], None, {}, "x", [None], [1]])
def test_choices_of_any_kind(choices: Any) -> None:
    record = read(event({"choices": choices, "usage": {"completion_tokens": 1}}), event(chunk("x", "stop")), DONE)
    assert record.ok and record.output_tokens == 1


# ---------------------------------------------------------------- how it ended


TOKEN = event(chunk("x"))
ENDS = {
    "finish and done": ([TOKEN, FINISH, DONE], None),
    "finish, no done": ([TOKEN, FINISH], None),
    "done, no finish": ([TOKEN, DONE], None),
    "finish with the token": ([event(chunk("x", "stop"))], None),
    "neither": ([TOKEN, TOKEN], FailureKind.CUT_OFF),
    "no token but a finish": ([FINISH, DONE], None),
    "bare done": ([DONE], FailureKind.EMPTY),
    "role and done": ([event(chunk(role="assistant")), DONE], FailureKind.EMPTY),
    "usage and done": ([event(usage(0)), DONE], FailureKind.EMPTY),
    "nothing": ([], FailureKind.CUT_OFF),
    "comments": ([b": ping\n\n"], FailureKind.CUT_OFF),
    "finish is an empty string": ([event(chunk("x", "")), event(chunk("y", ""))], FailureKind.CUT_OFF),
    "finish is null": ([event(chunk("x", None))], FailureKind.CUT_OFF),
    "unterminated done": ([TOKEN, b"data: [DONE]"], None),
    "unterminated event": ([TOKEN, FINISH.rstrip()], None),
    "cut event": ([TOKEN, FINISH[:-20]], FailureKind.CUT_OFF),
    "cut done": ([TOKEN, b"data: [DON"], FailureKind.CUT_OFF),
    "engine error": ([TOKEN, event(chunk("", "error")), DONE], FailureKind.STREAM_ERROR),
    "aborted by the server": ([TOKEN, event(chunk("", "abort")), DONE], FailureKind.STREAM_ERROR),
    "no JSON": ([TOKEN, b"data: oops\n\n", DONE], FailureKind.PROTOCOL),
    "no object": ([TOKEN, b"data: [1]\n\n", DONE], FailureKind.PROTOCOL),
    "empty data": ([TOKEN, b"data:\n\n", b"data: \n\n", DONE], None),
    "named keep-alive": ([TOKEN, b"event: ping\ndata: 17\n\n", DONE], None),
}


@pytest.mark.parametrize(("pieces", "kind"), ENDS.values(), ids=ENDS)
def test_ends(pieces: list[bytes], kind: FailureKind | None) -> None:
    record = read(*pieces)
    assert (record.failure.kind if record.failure else None) is kind
    assert record.ok is (kind is None)


def test_an_empty_answer_has_null_times() -> None:
    record = read(FINISH, event(usage(0)), DONE)
    assert record.ok and times(record) == (None, [], None) and record.finish_reason == "stop"


def test_what_comes_behind_done_is_not_read() -> None:
    record = read(TOKEN, DONE + TOKEN, TOKEN, event({"error": {"message": "late"}}))
    assert record.ok and list(record.event_stamps_ns) == [10]


@pytest.mark.parametrize(
    ("error", "detail", "status"),
    [
        (event({"error": {"message": "engine stopped", "type": "E", "code": 500}}), "engine stopped (500)", 500),
        (event({"error": {"message": "engine stopped", "code": "oom"}}), "engine stopped (oom)", 200),
        (event({"error": "engine stopped"}), "engine stopped", 200),
        (event({"object": "error", "message": "engine stopped", "code": 400}), "engine stopped (400)", 400),
        (b'event: error\ndata: {"message":"engine stopped"}\n\n', "engine stopped", 200),
        (b"event: error\ndata: engine stopped\n\n", "the server sent an error event: engine stopped", 200),
        (b'data: {"error":{"a":1}}\r\n\r\n', '{"a":1}', 200),
    ],
)
def test_an_error_inside_the_stream(error: bytes, detail: str, status: int) -> None:
    record = read(TOKEN, TOKEN, error, DONE)
    assert failed(record) == (FailureKind.STREAM_ERROR, detail)
    assert record.failure is not None and record.failure.status == status
    assert record.num_events == 2  # kept as data; statistics leave failures out
    # and it is not hidden by the connection that breaks behind it
    cut = Failure(FailureKind.CUT_OFF, "closed")
    assert failed(read(TOKEN, error, failure=cut)) == (FailureKind.STREAM_ERROR, detail)


@pytest.mark.parametrize("error", [None, {}, "", False])
def test_an_empty_error_field_is_none(error: Any) -> None:
    assert read(event({**chunk("x", "stop"), "error": error}), DONE).ok


def test_a_break_behind_the_end_is_no_failure_and_before_it_is() -> None:
    cut = Failure(FailureKind.CUT_OFF, "closed")
    silence = Failure(FailureKind.SILENCE, "nothing more for 5 s")
    assert read(TOKEN, FINISH, failure=cut).ok
    assert read(TOKEN, DONE, failure=cut).ok
    assert read(TOKEN, failure=cut).failure == cut
    assert read(TOKEN, b"data: {half", failure=cut).failure == cut
    assert read(TOKEN, FINISH, failure=silence).failure == silence
    assert read(failure=Failure(FailureKind.REFUSED, "x"), status=None).failure == Failure(FailureKind.REFUSED, "x")


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (503, b'{"error":{"message":"busy","code":503}}', "503: busy"),
        (400, b'{"object":"error","message":"too long"}', "400: too long"),
        (
            422,
            b'{"detail":[{"loc":["body"],"msg":"field required"}]}',
            '422: [{"loc":["body"],"msg":"field required"}]',
        ),
        (404, b'{"detail":"Not Found"}', "404: Not Found"),
        (502, b"<html>\n <b>Bad Gateway</b></html>", "502: <html> <b>Bad Gateway</b></html>"),
        (500, b"", "500"),
        (500, b"\xff\xfe", "500: \ufffd\ufffd"),
        (500, b'"text"', "500: text"),
        (500, b"[" * 5000, None),
        (204, b"", "204"),
        (500, b"x" * 1000, "500: " + "x" * 299 + "…"),
    ],
)
def test_a_status_carries_the_servers_words(status: int, body: bytes, detail: str | None) -> None:
    record = read(body, status=status, headers={"content-type": "application/json", "retry-after": "7"})
    kind, said = failed(record)
    assert kind is FailureKind.STATUS and (detail is None or said == detail)
    assert record.failure is not None
    assert (record.failure.status, record.failure.retry_after, record.status) == (status, "7", status)
    # the status is known even if the connection breaks in the body
    assert failed(read(body[:3], status=status, failure=Failure(FailureKind.CUT_OFF, "x")))[0] is FailureKind.STATUS


def test_a_redirect_says_where_to() -> None:
    record = read(status=307, headers={"location": "http://other/v1"})
    assert failed(record)[1] == "307: redirects to http://other/v1; give the address that answers itself"


def test_an_answer_that_is_one_json_object_is_one_event() -> None:
    whole = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
    }
    body = orjson.dumps(whole)
    for content_type in ("application/json", "application/json; charset=utf-8", "text/event-stream"):
        record = read(body[:30], body[30:], headers={"content-type": content_type})
        assert record.ok and times(record) == (20, [20], 20)
        assert (record.text, record.output_tokens) == ("hello", 2)
    record = read(b'{"error":{"message":"no"}}', headers={"content-type": "application/json"})
    assert failed(record) == (FailureKind.STREAM_ERROR, "no")
    record = read(body[:-9], headers={"content-type": "application/json"}, failure=Failure(FailureKind.CUT_OFF, "x"))
    assert failed(record)[0] is FailureKind.CUT_OFF


def test_a_stream_under_the_name_of_json_is_a_stream() -> None:
    assert read(TOKEN, DONE, headers={"content-type": "application/json"}).ok


def test_what_is_neither_stream_nor_json_is_a_protocol_failure() -> None:
    page = b'<html><img src="data:image/png;base64,AA"></html>'
    record = read(page, headers={"content-type": "text/html"})
    assert failed(record) == (FailureKind.PROTOCOL, f"no event stream: {page.decode()}")
    assert failed(read(b"not json", headers={"content-type": "application/json"}))[0] is FailureKind.PROTOCOL
    assert failed(read(status=None))[0] is FailureKind.PROTOCOL


def test_an_unknown_content_coding_is_a_protocol_failure() -> None:
    for status, kind in [(200, FailureKind.PROTOCOL), (500, FailureKind.STATUS)]:
        exchange = framed([K(TOKEN)], b"Content-Encoding: br\r\n", status)
        assert failed(read_exchange(REQUEST, exchange, 0))[0] is kind


def test_a_line_beyond_the_limit_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 1000)
    record = read(TOKEN, event(chunk("y" * 2000, "stop")), DONE)
    assert failed(record)[0] is FailureKind.TOO_LARGE
    assert record.num_events == 1


# ---------------------------------------------------------------- read generously


def test_text_is_whole_characters_whatever_the_events_cut() -> None:
    high, low = b'data: {"choices":[{"text":"\\ud83d"}]}\n\n', b'data: {"choices":[{"text":"\\ude80"}]}\n\n'
    record = read(high, low, FINISH)
    assert record.text == "🚀" and record.num_events == 2
    assert read(high, FINISH).text == "\ufffd"
    assert read(b'data: {"choices":[{"text":"\xe4\xb8"}]}\n\n', FINISH).text == "\ufffd"  # as the SSE standard says


def test_not_quite_json_that_servers_send() -> None:
    nan = b'data: {"choices":[{"text":"x","logprobs":{"token_logprobs":[-Infinity,NaN]},"finish_reason":"stop"}]}\n\n'
    assert read(nan).ok


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"error":' + b'{"error":' * 900 + b"1" + b"}" * 901 + b"\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        b'data: {"choices":[{"text":"x","finish_reason":"\\ud800"}]}\n\n',
        b'data: {"error":{"message":"\\ud800"}}\n\n',
        b'data: {"error":{"x":"\\ud800"}}\n\n',
        b'data: {"usage":{"completion_tokens":1' + b"0" * 5000 + b"}}\n\n",
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":1e9,"function":{"name":"\\ud800"}}]}}]}\n\n',
    ],
)
def test_nasty_events_give_a_record_that_can_be_saved(body: bytes) -> None:
    record = read(body)
    orjson.dumps([record.text, record.tool_calls, record.finish_reason, record.output_tokens, str(record.failure)])


# ---------------------------------------------------------------- the fast reader is the slow one


def slowly(pieces: Sequence[bytes], stamps: Sequence[int]) -> Answer:
    """Every byte through sse.Parser, every event through its JSON: what stream.read_stream must agree with."""
    answer = Answer(text=[])
    parser = sse.Parser()
    for number, piece in enumerate(pieces):
        for kind, data in parser.feed(piece):
            take_event(answer, kind, data, stamps[number], number)
            if answer.done:
                return answer
    if pieces:
        for kind, data in parser.finish():
            try:
                orjson.loads(data)
            except ValueError:
                if data.strip() != b"[DONE]":
                    continue
            take_event(answer, kind, data, stamps[-1], len(pieces) - 1)
    return answer


def facts(answer: Answer) -> tuple[Any, ...]:
    text = "".join(answer.text or [])
    return (
        answer.stamps.tolist(),
        answer.shared,
        answer.first_event_ns,
        answer.first_answer_ns,
        answer.finish_reason,
        answer.done,
        answer.usage,
        answer.failure,
        text,
        answer.tools,
    )


def K(data: bytes, upper: bool = False) -> bytes:
    return (b"%X\r\n%b\r\n" if upper else b"%x\r\n%b\r\n") % (len(data), data)


def framed(pieces: Sequence[bytes], headers: bytes = b"", status: int = 200) -> WireExchange:
    """An exchange as the wire transport keeps it: the body still in its chunks."""
    exchange = WireExchange()
    exchange.head = parse_head(
        b"HTTP/1.1 %d OK\r\nContent-Type: text/event-stream\r\n%bTransfer-Encoding: chunked\r\n\r\n" % (status, headers)
    )
    assert exchange.head is not None
    exchange.status, exchange.headers = status, exchange.head.headers
    exchange.pieces = list(pieces)
    exchange.stamps = array("q", range(10, 10 * len(pieces) + 10, 10))
    return exchange


def agrees(exchange: Exchange) -> Answer:
    answer = read_stream(exchange, keep_text=True)
    assert facts(answer) == facts(slowly(*exchange.body_pieces()))
    without = read_stream(exchange, keep_text=False)
    assert facts(without)[:8] == facts(answer)[:8]
    return answer


def cut(body: bytes, at: Sequence[int]) -> list[bytes]:
    return [body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True)]


TEXTS = st.one_of(
    st.sampled_from(
        [" the", "w", "m", "text", "", " ", "\n", '"', "\\", "é", "中文", "🚀", "\x7f", "\u2028", "a" * 300]
    ),
    st.text(max_size=8),
)
RAW_TEXTS = st.sampled_from(
    [
        rb"\u4e2d",
        rb"\ud83d\ude80",
        rb"\ud83d",
        rb"\ude80",
        b"\xe4\xb8",
        b"\xb8\xad",
        rb"\x",
        rb"\u12",
        b"\t",
        rb'a","b',
        b"\\",
    ]
)


def text_event(text: str) -> bytes:
    return event(chunk(text))


def raw_event(text: bytes) -> bytes:
    return event(chunk("@@")).replace(b"@@", text)


EVENTS = st.one_of(
    TEXTS.map(text_event),
    TEXTS.map(text_event),
    TEXTS.map(text_event),
    RAW_TEXTS.map(raw_event),
    TEXTS.map(lambda text: event(chunk(content=text))),
    TEXTS.map(lambda text: event(chunk(reasoning_content=text))),
    TEXTS.map(lambda text: event(chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": text}}]))),
    st.integers(0, 9).map(lambda n: event({**chunk("x"), "usage": {"completion_tokens": n}})),
    st.sampled_from(
        [
            event(chunk(role="assistant", content="")),
            event(chunk("", "stop")),
            event(usage(3)),
            event({"choices": [chunk("a")["choices"][0], chunk("b")["choices"][0]]}),  # type: ignore[index]
            event({"error": {"message": "no", "code": 500}}),
            b": ping\n\n",
            b":\n",
            b"\n",
            b"event: x\n" + event(chunk("y")),
            b"id: 7\n" + event(chunk("y")),
            event(chunk("z")).replace(b"data: ", b"data:"),
            event(chunk("z")).replace(b"data: ", b"data:  "),
            event(chunk("z")).replace(b',"choices', b'\ndata:,"choices'),
            event(chunk("z")).replace(b"\n\n", b"\r\n\r\n"),
            event(chunk("z")).replace(b"\n\n", b"\r\r"),
            event(chunk("z")).replace(b"\n\n", b"\n\r\n"),
            b"data:\n\n",
            b"data: oops\n\n",
            b"\xef\xbb\xbf",
        ]
    ),
)
RARELY_DONE = st.sampled_from([b"", b"", DONE, DONE.rstrip(), event(chunk("q")).rstrip(), b"data: {"])


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The events of a stream: mostly one kind in a row, as servers send them."""
    events: list[bytes] = []
    for _ in range(draw(st.integers(0, 4))):
        events += draw(st.lists(EVENTS, max_size=4))
        words = draw(st.lists(TEXTS, min_size=1, max_size=4))
        make = draw(st.sampled_from([text_event, lambda text: event(chunk(content=text))]))
        events += [make(words[i % len(words)]) for i in range(draw(st.integers(0, 12)))]
    if draw(st.booleans()):
        events = [e.replace(b"\n\n", b"\r\n\r\n") for e in events]
    return [*events, draw(RARELY_DONE)]


@st.composite
def regrouped(draw: st.DrawFn, events: Sequence[bytes]) -> list[bytes]:
    """The same bytes: an event a piece, several in one, or cut anywhere."""
    body = b"".join(events)
    how = draw(st.sampled_from(["events", "groups", "cuts", "bytes", "one", "some cuts"]))
    if how == "events":
        return list(events)
    if how == "bytes":
        return [body[i : i + 1] for i in range(len(body))]
    if how == "one":
        return [body]
    if how == "cuts":
        return cut(body, sorted(draw(st.lists(st.integers(0, len(body)), max_size=40))))
    size = draw(st.integers(1, 5))
    groups = [b"".join(events[i : i + size]) for i in range(0, len(events), size)]
    if how == "groups":
        return groups
    return [
        part for group in groups for part in cut(group, sorted(draw(st.lists(st.integers(0, len(group)), max_size=1))))
    ]


@MODEST
@given(streams(), st.data())
def test_plain_bodies_in_any_pieces(events: list[bytes], data: st.DataObject) -> None:
    pieces = data.draw(regrouped(events))
    agrees(exchange_of(pieces))


@MODEST
@given(streams(), st.data())
def test_chunked_bodies_in_any_chunks_and_pieces(events: list[bytes], data: st.DataObject) -> None:
    upper = data.draw(st.booleans())
    chunks = [K(part, upper) for part in data.draw(regrouped(events)) if part]
    if data.draw(st.booleans()):
        chunks.append(b"0\r\n\r\n")
    pieces = data.draw(regrouped(chunks))
    if data.draw(st.integers(0, 9)) == 0:
        pieces.insert(data.draw(st.integers(0, len(pieces))), b"zz\r\n")  # a fault: the reads before it count
    agrees(framed(pieces))


def random_stream(rng: random.Random) -> list[bytes]:
    """Long runs of alike events, as servers send them, with something unusual now and then."""
    words = [" the", "m", "é", "中", "\n", '"', "a" * rng.randint(1, 90), *rng.choice([[], [""], ["\\"]])]
    make = rng.choice(
        [
            text_event,
            lambda text: event(chunk(content=text)),
            lambda text: event({**chunk("m"), "model": text}),
            lambda text: event({**chunk(text), "usage": {"completion_tokens": 1}}),
            lambda text: event(chunk(text, "stop")),
            lambda text: event({"choices": [{"delta": {"reasoning": text}}, {"delta": {"content": "c"}}]}),
        ]
    )
    line_end = rng.choice([b"\n\n", b"\n\n", b"\r\n\r\n"])
    odd = [
        raw_event(rng.choice([b"\xe4\xb8", rb"\ud83d", rb"\u4e2d", b"\t", rb"\x"])),
        event(chunk("@@")).replace(b'@@"', b""),  # its start and its end overlap
        event(chunk("z")) + b"\r\n",  # in a chunk, looks like its end
        b"event: x\n",
        b"data: \n",
        event(chunk(reasoning="r")),
        event(chunk(content="c", reasoning="r")),
        event(chunk(reasoning="r", refusal="no")),
        event(chunk("z")).replace(b"\n\n", b"\r\n\r\n"),
        event(chunk("z")).replace(b"\n\n", b"\r\r"),
        event(chunk("z")).replace(b"\n\n", b"\n\r"),
        event(chunk("z")).replace(b',"choices', b'\rdata:,"choices'),
        event(chunk("z")).replace(b',"choices', b'\ndata:,"choices'),
        b"event: x\n" + event(chunk("y")),
        b"\xef\xbb\xbf" + event(chunk("y")),
        b": ping\n\n",
        b"\n",
        event({"error": {"message": "no"}}),
        event(usage(3)),
        event(chunk("", "length")),
        DONE,
    ]
    often = rng.choice([0.0, 0.02, 0.1, 0.4])
    stream = [event(chunk(role="assistant"))] * rng.randint(0, 1)
    for _ in range(rng.randint(1, 80)):
        if rng.random() < often:
            stream.append(rng.choice(odd))
        stream.append(make(rng.choice(words)).replace(b"\n\n", line_end))
    return stream + rng.choice([[], [event(chunk("", "stop")), event(usage(9)), DONE], [b"data: [DONE]"], [b"data: {"]])


def random_pieces(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    body = b"".join(parts)
    how = rng.choice(["parts", "groups", "few cuts", "many cuts", "near the line ends"])
    if how == "parts":
        return parts
    if how == "groups":
        pieces, at = [], 0
        while at < len(parts):
            size = rng.choice([1, 1, 2, 3, 7])
            pieces.append(b"".join(parts[at : at + size]))
            at += size
        return pieces
    if how == "near the line ends":
        ends = [len(b"".join(parts[: i + 1])) + rng.choice([-3, -2, -1, 0, 0, 0, 1]) for i in range(len(parts))]
        return cut(body, sorted(min(max(at, 0), len(body)) for at in ends))
    count = 3 if how == "few cuts" else len(parts)
    return cut(body, sorted(rng.randint(0, len(body)) for _ in range(count)))


@pytest.mark.parametrize("seed", range(20))
def test_many_long_streams_in_pieces_like_those_of_a_network(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        events = random_stream(rng)
        agrees(exchange_of(random_pieces(rng, events)))
        agrees(framed(random_pieces(rng, [K(part) for part in events] + [b"0\r\n\r\n"])))
        agrees(framed(random_pieces(rng, [K(part) for part in random_pieces(rng, events) if part])))


@MODEST
@given(streams(), st.data())
def test_any_cut_and_comments_between_give_the_same_record(events: list[bytes], data: st.DataObject) -> None:
    """Only stamps may differ. Comments come between events, never inside the two line ends of one."""

    def meaning(pieces: Sequence[bytes]) -> tuple[Any, ...]:
        record = read(*pieces)
        return (record.num_events, record.output_tokens, record.text, record.finish_reason, record.ok, failure(record))

    def failure(record: RequestRecord) -> FailureKind | None:
        return record.failure.kind if record.failure else None

    expected = meaning(events)
    assert meaning(data.draw(regrouped(events))) == expected
    noise = [b": ping\n\n", b":\r\n\r\n", b"id: 1\n\n", b"retry: 9\n\n", b"foo: bar\n\n"]
    whole = [e for e in events if e.endswith((b"\n\n", b"\r\n\r\n"))]
    with_noise = [part for e in whole for part in (data.draw(st.sampled_from(noise)), e)]
    assert meaning(data.draw(regrouped(with_noise))) == meaning(whole)


@MODEST
@given(st.binary(max_size=400))
@example(b"data: {\xff}\n\n")
@example(b'{"choices": 1}')
def test_byte_soup_is_a_failure_not_an_exception(soup: bytes) -> None:
    for record in (
        read(soup),
        read(soup, headers={}),
        read(soup, headers={"content-type": "application/json"}),
        read_exchange(REQUEST, framed([soup]), 0),
        read_exchange(REQUEST, framed([soup], b"Content-Encoding: gzip\r\n"), 0),
        read(soup, status=500),
    ):
        assert record.failure is not None
        assert record.failure.kind in FailureKind


def test_the_fast_path_is_taken_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of 200 tokens is read with a handful of JSON parses, however its events are grouped into reads."""
    from loadgen import stream

    parsed = 0

    def counting(*args: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return take_event(*args)

    monkeypatch.setattr(stream, "take_event", counting)
    rng = random.Random(1)
    words = [" the", "é", "\n", '"', "\\", " time", "中"]
    events = [event(chunk(role="assistant"))] + [event(chunk(content=rng.choice(words))) for _ in range(200)]
    events += [event(chunk(finish="stop")), event(usage(200)), DONE]
    crlf = [e.replace(b"\n\n", b"\r\n\r\n") for e in events]
    for these in (events, crlf):
        for size in (1, 3, 500):
            groups = [b"".join(these[i : i + size]) for i in range(0, len(these), size)]
            chunks = [b"".join(map(K, these[i : i + size])) for i in range(0, len(these), size)]
            mixed = cut(b"".join(map(K, these)), range(700, 20_000, 700))
            large_chunks = list(map(K, groups))
            exchanges = [exchange_of(groups), framed(chunks), framed(mixed)]
            if size < 500:  # an answer in a single chunk is as good as not streamed
                exchanges.append(framed(large_chunks))
            for exchange in exchanges:
                parsed = 0
                answer = read_stream(exchange, keep_text=False)
                assert len(answer.stamps) == 200
                assert parsed <= 40, (size, these is crlf)
                agrees(exchange)

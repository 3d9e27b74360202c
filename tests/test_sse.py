"""sse.Parser: each case whole, at every split, byte by byte and in random cuts; the standard's own examples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen import sse

# body -> events, by the standard; a last event without its blank line is kept (see Parser.finish)
CASES = {
    "one": (b"data: a\n\n", [(b"", b"a")]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [(b"", b"a"), (b"", b"b")]),
    "cr": (b"data: a\r\rdata: b\r\r", [(b"", b"a"), (b"", b"b")]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\n\r", [(b"", b"a"), (b"", b"b"), (b"", b"c")]),
    "no blank after the colon": (b"data:a\n\n", [(b"", b"a")]),
    "one blank is dropped, one only": (b"data:  a\n\n", [(b"", b" a")]),
    "comments": (b": ping\n\n:\ndata: a\n: between\ndata: b\n\n", [(b"", b"a\nb")]),
    "several data lines": (b"data: a\ndata\ndata: b\n\n", [(b"", b"a\n\nb")]),
    "event type": (b"event: error\ndata: x\n\ndata: y\n\n", [(b"error", b"x"), (b"", b"y")]),
    "type without data": (b"event: error\n\ndata: y\n\n", [(b"", b"y")]),
    "id, retry, unknown": (b"id: 1\nretry: 5\nfoo: bar\nfoo\ndata: a\n\n", [(b"", b"a")]),
    "bom": (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
    "bom only at the start": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"", b"a")]),
    "bom before a blank line": (b"\xef\xbb\xbf\ndata: a\n\n", [(b"", b"a")]),
    "names are exact": (b"Data: a\n data: b\ndata : c\n\n", []),
    "unfinished line": (b"data: a\n\ndata: [DONE]", [(b"", b"a"), (b"", b"[DONE]")]),
    "unfinished event": (b"data: a\n\ndata: b\n", [(b"", b"a"), (b"", b"b")]),
    "nothing": (b"", []),
    "blank lines": (b"\n\r\n\r\r\n\n", []),
    "utf-8": ("data: 中文🚀\n\n".encode(), [(b"", "中文🚀".encode())]),
    # examples of the standard, section 9.2.6
    "standard 1": (
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
        [(b"", b"first event"), (b"", b"second event"), (b"", b" third event")],
    ),
    "standard 2": (b"data\n\ndata\ndata\n\ndata:", [(b"", b""), (b"", b"\n"), (b"", b"")]),
    "standard 3": (b"data:test\n\ndata: test\n\n", [(b"", b"test"), (b"", b"test")]),
    "standard 4": (b"data: YHOO\ndata: +2\ndata: 10\n\n", [(b"", b"YHOO\n+2\n10")]),
}


def parse(pieces: list[bytes]) -> list[sse.Event]:
    parser = sse.Parser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


@pytest.mark.parametrize(("body", "events"), CASES.values(), ids=CASES)
def test_any_cut_gives_the_same_events(body: bytes, events: list[sse.Event]) -> None:
    assert parse([body]) == events
    assert parse([body[i : i + 1] for i in range(len(body))]) == events
    for at in range(len(body) + 1):
        assert parse([body[:at], body[at:]]) == events
        assert parse([body[:at], b"", body[at:]]) == events


def test_an_event_comes_with_the_byte_that_ends_its_blank_line() -> None:
    parser = sse.Parser()
    assert parser.feed(b"data: a\r\n") == []
    assert parser.feed(b"\r") == [(b"", b"a")]  # the LF behind it may come seconds later
    assert not parser.idle
    assert parser.feed(b"\n") == []
    assert parser.idle


def test_idle_is_between_two_events() -> None:
    for fed, idle in [
        (b"", True),
        (b"data: a\n\n", True),
        (b": comment\n", True),
        (b"data: a\n", False),
        (b"dat", False),
        (b"event: x\n", False),
        (b"data: a\n\r", False),
    ]:
        parser = sse.Parser()
        parser.feed(fed)
        assert parser.idle is idle, fed


def test_a_line_longer_than_the_limit_ends_it_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 20)
    body = b"data: ok\n\ndata: 123456789012345\n\ndata: after\n\n"
    for size in (1, 7, 21, len(body)):
        parser = sse.Parser()
        events = [event for at in range(0, len(body), size) for event in parser.feed(body[at : at + size])]
        assert events == [(b"", b"ok")]
        assert parser.too_long
        assert parser.finish() == []


def test_a_line_of_many_megabytes_in_small_pieces_is_linear() -> None:
    parser = sse.Parser()
    line = b"data: " + b"x" * (8 << 20)
    assert all(parser.feed(line[at : at + 1024]) == [] for at in range(0, len(line), 1024))
    assert parser.feed(b"\n\n") == [(b"", line[6:])]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.sampled_from([b"data: a", b"data:", b":", b"\r", b"\n", b"\r\n", b"event: x", b" ", b"z"])), st.data()
)
def test_random_bodies_in_random_cuts(parts: list[bytes], data: st.DataObject) -> None:
    body = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert parse(pieces) == parse([body])

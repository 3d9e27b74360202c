"""The pieces of one event stream to an Answer, as fast as Python can: sse.Parser and JSON only where they are needed.

Most events of one answer differ in the token's text alone. Once an event was parsed, the bytes before and after its
text form a template, proven by parsing the template with another text in it. A piece with these bytes around a valid
JSON string then has the same structure by construction and is not parsed. Three ways, each equal to the next slower:

    runs of events that fit the template    checked and taken in a few C-level passes, no loop in Python
    an event that is one `data:` line       by its JSON
    any bytes                               HTTP chunks by http1.Deframer, lines by sse.Parser, then JSON

The first two are taken only between two events, so what they skip cannot have mattered to the parser. Usually a piece
is an event; where it is not, the pieces are cut anew at the blank lines. Pieces may still be in HTTP/1.1 chunks, as
wire.py keeps them: an event that is a chunk of its own, the usual case, is recognised with its frame.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import Any

import orjson

from loadgen import sse
from loadgen.answer import DONE, Answer, Channel, choices_of, take_event, tokens_of
from loadgen.http1 import Deframer, Framing, NotHttp, TooLarge
from loadgen.record import FailureKind
from loadgen.transport import Exchange

_MAX_TEMPLATES = 4  # reasoning, then answer, and a first event that is unlike the others
_WORTH_LEARNING = 6  # units left: a template costs about as much as parsing four events
_FEW_ODD_EVENTS = 10  # that do not fit the template, before the pieces are cut anew
_MAX_ODD = 8  # events that are not a chunk of their own, before all is taken out of its chunks first
_PROBE = "loadgen\N{MIDDLE DOT}probe"

# The inside of a JSON string, lone surrogates excluded. A blank cannot complete an escape, so texts joined by blanks
# match if and only if each does.
_STRING = re.compile(
    rb"""
    [^"\\\x00-\x1f]*+
    (?: \\ (?: ["\\/bfnrt]
             | u (?![dD][89a-fA-F]) [0-9a-fA-F]{4}
             | u [dD][89abAB][0-9a-fA-F]{2} \\u [dD][c-fC-F][0-9a-fA-F]{2} )
        [^"\\\x00-\x1f]*+ )*+
    """,
    re.VERBOSE,
)


def read_stream(exchange: Exchange, *, keep_text: bool) -> Answer:
    """What an event stream said, up to its [DONE] or its end. Raises ValueError for an undecodable content coding."""
    framed = exchange.framed_pieces()
    if framed is not None:
        try:
            return _Reader(*framed, chunked=True, keep_text=keep_text).read()
        except (_Unfit, NotHttp, TooLarge):
            pass  # body_pieces() gives what came before the fault
    pieces, stamps = exchange.body_pieces()
    try:
        return _Reader(pieces, stamps, keep_text=keep_text).read()
    except _Unfit:
        return _Reader(pieces, stamps, keep_text=keep_text, recut=False).read()


class _Unfit(Exception):
    """This way of reading does not fit the stream: chunks that are not events, or events that cannot be cut anew."""


class _Heads(dict[int, bytes]):
    """By size of a whole event, the bytes that it must begin with: `start`, behind a chunk size line if chunked.

    least: the smallest size, without a chunk frame, in which the start and the end of an event do not overlap.
    """

    def __init__(self, start: bytes, least: int, chunked: bool) -> None:
        self._start, self._least, self._chunked = start, least, chunked

    def __missing__(self, size: int) -> bytes:
        frame = _chunk_head(size) if self._chunked else b""
        if frame is None or not self._least + len(frame) + 2 * self._chunked <= size <= sse.MAX_LINE_BYTES:
            head = b"\0no event has this size"
        else:
            head = frame + self._start
        self[size] = head
        return head


@lru_cache(maxsize=4096)
def _chunk_head(size: int) -> bytes | None:
    """The size line of the chunk that fills `size` bytes: hex digits, CRLF, data, CRLF."""
    for digits in range(1, 17):
        length = size - digits - 4
        if length > 0 and len(head := b"%x\r\n" % length) == digits + 2:
            return head
    return None


_DATA_HEADS = {chunked: _Heads(b"data:", len(b"data:\n\n"), chunked) for chunked in (False, True)}


class _Template:
    """An event's bytes around its text: heads[size] + text + tail + line_end."""

    def __init__(self, start: bytes, tail: bytes, channel: int, line_end: bytes, chunked: bool) -> None:
        self.tail = tail
        self.line_end = line_end
        self.end = tail + line_end
        self.channel = channel
        self.size = len(start) + len(self.end)
        self.heads = _Heads(start, self.size - 2 * chunked, chunked)


def _learn(event: bytes, payload: Mapping[str, Any]) -> tuple[bytes, bytes, int] | None:
    """(start, tail, channel) of an event `data:...` without its line end; None where only its JSON will do."""
    choices = choices_of(payload)
    if len(choices) != 1 or payload.get("usage") or choices[0].get("finish_reason"):
        return None
    bearing = tokens_of(choices[0])
    if len(bearing) != 1 or bearing[0][0] == Channel.TOOL:
        return None
    channel, text = bearing[0]
    quoted = b'"' + text.encode("utf-8", "surrogatepass") + b'"'
    at = event.find(quoted)
    while at >= 0:
        start, tail = event[: at + 1], event[at + len(quoted) - 1 :]
        try:
            found = choices_of(orjson.loads((start + _PROBE.encode() + tail)[5:]))
        except ValueError:
            return None
        if len(found) == 1 and tokens_of(found[0]) == [(channel, _PROBE)]:  # the proof
            return start, tail, channel
        at = event.find(quoted, at + 1)
    return None


class _Reader:
    """Reads one stream, once. It comes in units: as the pieces came, or cut anew into one event each."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        stamps: Sequence[int],
        *,
        keep_text: bool,
        chunked: bool = False,
        recut: bool = True,
    ) -> None:
        self.stamps = stamps  # by read
        self.chunked = chunked
        self.may_recut = recut
        self.cut_at = b""  # the line end at which units were cut anew
        self.answer = Answer(text=[] if keep_text else None)
        self.parser = sse.Parser()
        self.deframer = Deframer(Framing.CHUNKED if chunked else Framing.CLOSE)
        self.idle = True  # between two events, and between two chunks
        self.over = False
        self.last_read = -1  # the last that brought bytes of the body
        self.num_odd = 0
        self.line_ends = (b"\n\n\r\n", b"\r\n\r\n\r\n") if chunked else (b"\n\n", b"\r\n\r\n")
        self.data_heads = _DATA_HEADS[chunked]
        self.units = pieces
        self.reads: Sequence[int] = range(len(pieces))  # by unit: the read that completed it
        self.next = 0  # unit
        self.num_as_read = len(pieces)  # units at the end that are as they were read
        self.template: _Template | None = None
        self.num_templates = 0
        self.fits: list[bool] = []  # by unit: one event by the template, its text not looked at yet

    def read(self) -> Answer:
        """Raises _Unfit, NotHttp or TooLarge for what is to be read another way; a plain body as it came never is."""
        while self.next < len(self.units) and not self.over:
            if self.fits and self.fits[self.next] and self.idle:
                self._take_run(self.next, self.fits.index(False, self.next))
            else:
                self.next += 1
                self._take_unit(self.next - 1)
        self._finish()
        return self.answer

    # ------------------------------------------------------------------ runs of units

    def _use(self, template: _Template, units: Sequence[bytes], reads: Sequence[int]) -> None:
        """From here on: these units, looked through for events of this template."""
        self.units, self.reads, self.next = units, reads, 0
        self.template = template
        starts = map(bytes.startswith, units, map(template.heads.__getitem__, map(len, units)))
        ends = map(bytes.endswith, units, repeat(template.end))
        self.fits = [start and end for start, end in zip(starts, ends, strict=True)]
        if self.may_recut:
            odd_bytes = sum(len(unit) for unit, fits in zip(units, self.fits, strict=True) if not fits)
            if odd_bytes > (_FEW_ODD_EVENTS + len(units) // 16) * template.size:
                self._recut(template)
                return
        self.fits.append(False)

    def _recut(self, template: _Template) -> None:
        """Cut the rest into one event a unit. An event belongs to the read with the byte that ended its blank line."""
        self.may_recut = False
        self.cut_at = line_end = template.line_end
        read_ends = list(accumulate(map(len, self.units[self.next :])))
        *events, rest = b"".join(self.units[self.next :]).split(line_end)
        units = [event + line_end for event in events]
        behind = 2 * self.chunked + (line_end[:1] == b"\r")  # bytes of a unit behind that byte
        ends = list(accumulate(map(len, units)))
        reads = [bisect_left(read_ends, end - behind) for end in ends]
        self.num_as_read = 0
        at = ends[-1] if ends else 0
        while rest:
            read = bisect_right(read_ends, at)
            size = read_ends[read] - at
            units.append(rest[:size])
            reads.append(read)
            rest = rest[size:]
            at += size
            self.num_as_read += 1
        self._use(template, units, [self.reads[self.next + read] for read in reads])

    def _take_run(self, begin: int, end: int) -> None:
        """Units that all fit the template."""
        template = self.template
        assert template is not None
        run = self.units[begin:end]
        heads = template.heads
        cuts = {len(heads[size]) for size in set(map(len, run))}
        tail = -len(template.end)
        if len(cuts) == 1:
            cut = cuts.pop()
            texts = [unit[cut:tail] for unit in run]
        else:
            texts = [unit[len(heads[len(unit)]) : tail] for unit in run]
        if not _all_strings(texts):
            if self.may_recut:  # these may be several events each
                self._recut(template)
            else:
                self.fits[begin:end] = [_all_strings([text]) for text in texts]
            return
        self.next = end
        reads = self.reads[begin:end]
        self._passed(reads[-1])
        if b"" in texts:
            reads = [read for read, text in zip(reads, texts, strict=True) if text]
        if not reads:
            return
        if isinstance(reads, range):
            stamps = self.stamps[reads.start : reads.stop]
        else:
            stamps = [self.stamps[read] for read in reads]
        self.answer.tokens(stamps, reads, template.channel)
        if self.answer.text is not None and template.channel == Channel.ANSWER:
            self.answer.text.append(orjson.loads(b'"' + b"".join(texts) + b'"'))

    # ------------------------------------------------------------------ one unit

    def _take_unit(self, index: int) -> None:
        unit = self.units[index]
        line_end = self.cut_at or self.line_ends[self.line_ends[0] not in unit]
        at = 0
        while at < len(unit) and not self.over:
            if self.idle and (cut := unit.rfind(line_end, at)) >= 0:
                for event in unit[at:cut].split(line_end):
                    at += len(event) + len(line_end)
                    learnt = self._take_line(event, line_end, index)
                    if learnt is not None:
                        rest = [unit[at:]] if at < len(unit) else []
                        begin = index + 1 - len(rest)
                        self._use(learnt, [*rest, *self.units[index + 1 :]], self.reads[begin:])
                        return
                    if self.over or not self.idle:
                        break
            else:
                end = unit.find(line_end, at)
                end = len(unit) if end < 0 else end + len(line_end)
                self._feed(unit[at:end], index)
                at = end

    def _take_line(self, event: bytes, line_end: bytes, index: int) -> _Template | None:
        """An event without its line end: by its JSON if it is a single `data:` line, else by the parser. Gives a
        template if it is a good example."""
        head = self.data_heads[len(event) + len(line_end)]
        data = event[len(head) :]
        if not event.startswith(head) or b"\n" in data or b"\r" in data:
            self._feed(event + line_end, index)
            return None
        read = self.reads[index]
        self._passed(read)
        payload = take_event(self.answer, b"", data[data[:1] == b" " :], self.stamps[read], read)
        self.over = self.answer.done
        if payload is None or self.num_templates == _MAX_TEMPLATES:
            return None
        if len(self.units) - index < _WORTH_LEARNING and len(self.units[index]) < _WORTH_LEARNING * len(event):
            return None
        learnt = _learn(b"data:" + data, payload)
        if learnt is None:
            return None
        self.num_templates += 1
        start, tail, channel = learnt
        return _Template(start, tail, channel, line_end, self.chunked)

    def _passed(self, read: int) -> None:
        """The parser was not shown the whole events up to this read."""
        self.parser.at_start = False
        self.last_read = read

    def _feed(self, part: bytes, index: int) -> None:
        """Bytes of one unit, whatever they are."""
        read = self.reads[index]
        if index < len(self.units) - self.num_as_read and (index == 0 or self.reads[index - 1] != read):
            raise _Unfit  # this unit may be of several reads, and hold an event that one of the first completed
        body = self.deframer.feed(part) if self.chunked else part
        if body:
            self.last_read = read
        events = self.parser.feed(body)
        for kind, data in events:
            take_event(self.answer, kind, data, self.stamps[read], read)
            if self.answer.done:
                break
        self.over = self.answer.done or self.deframer.over or self.parser.too_long
        self.idle = self.parser.idle and (not self.chunked or self.deframer.between_chunks)
        if self.chunked and (len(events) > 1 or not self.idle):
            self.num_odd += len(events) or 1
            if self.num_odd > _MAX_ODD + read // 4:
                raise _Unfit

    def _finish(self) -> None:
        """The body is over. A last event without its blank line is taken if it is whole, dropped if it was cut."""
        answer = self.answer
        if not answer.done and self.last_read >= 0:
            for kind, data in self.parser.finish():
                if data.strip() == DONE or _is_json(data):
                    take_event(answer, kind, data, self.stamps[self.last_read], self.last_read)
        if self.parser.too_long:
            answer.fail(FailureKind.TOO_LARGE, f"a line of more than {sse.MAX_LINE_BYTES >> 20} MiB")


def _all_strings(texts: Sequence[bytes]) -> bool:
    """Each is the inside of a valid JSON string."""
    joined = b" ".join(texts)
    if _STRING.fullmatch(joined) is None:
        return False
    if joined.isascii():
        return True
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_json(data: bytes) -> bool:
    try:
        orjson.loads(data)
    except ValueError:
        return False
    return True

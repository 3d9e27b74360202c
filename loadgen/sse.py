"""Server-sent events, sans I/O: pieces of a body in, events out, whatever the network cut.

    >>> parser = Parser()
    >>> parser.feed(b"data: {}\\r\\n\\r"), parser.feed(b"\\n: comment\\n")
    ([(b'', b'{}')], [])

Rules of the WHATWG HTML standard, section 9.2.6: lines end at CR, LF or CRLF (the line ends at the CR, a LF behind it
is swallowed, so no event waits for the next read); one blank after the colon is dropped; several data lines are joined
by LF; a line that begins with a colon is a comment; id, retry and unknown fields are ignored; a BOM may lead.
No clock, no JSON, no await: the caller knows which piece it fed, and an event belongs to the piece that completed it.
"""

from __future__ import annotations

import re

MAX_LINE_BYTES = 64 << 20

Event = tuple[bytes, bytes]  # event type (b"" unless named), data

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Parser:
    """Owns the bytes of an unfinished line and the data lines of an unfinished event, nothing else.

    too_long: a line was longer than MAX_LINE_BYTES; no event comes out any more.
    at_start: nothing was fed yet, so that a BOM may follow.
    """

    def __init__(self) -> None:
        self.too_long = False
        self.at_start = True
        self._parts: list[bytes] = []  # an unfinished line, in pieces: joined once, so tiny pieces stay cheap
        self._size = 0
        self._swallow_lf = False
        self._data: list[bytes] = []
        self._type = b""

    @property
    def idle(self) -> bool:
        """Between two events: what was fed so far has no influence on what comes."""
        return not (self._parts or self._data or self._type or self._swallow_lf or self.too_long)

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes."""
        if self._swallow_lf and piece:
            self._swallow_lf = False
            if piece[:1] == b"\n":
                piece = piece[1:]
        events: list[Event] = []
        start = 0
        for match in _LINE_END.finditer(piece):
            self._keep(piece[start : match.start()])
            if self.too_long:
                return events
            start = match.end()
            self._line(self._take(), events)
        if piece.endswith(b"\r"):
            self._swallow_lf = True
        self._keep(piece[start:])
        return events

    def finish(self) -> list[Event]:
        """The body is over. The standard drops an unfinished event; here it is given, because servers end with
        `data: [DONE]` and no blank line, and an answer must not be called cut for that. Whether a last line is whole
        is for the caller to judge."""
        events: list[Event] = []
        if not self.too_long:
            if self._parts:
                self._line(self._take(), events)
            self._line(b"", events)
        return events

    def _keep(self, part: bytes) -> None:
        if part:
            self._parts.append(part)
            self._size += len(part)
            self.too_long = self.too_long or self._size > MAX_LINE_BYTES

    def _take(self) -> bytes:
        line = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return line

    def _line(self, line: bytes, events: list[Event]) -> None:
        if self.at_start:
            self.at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                events.append((self._type, b"\n".join(self._data)))
            self._data = []
            self._type = b""
            return
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value

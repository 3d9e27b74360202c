"""HTTP/1.1 answers, sans I/O: the head, and where a body ends. RFC 9112, as much as a client needs.

parse_head reads the status line and the headers; Deframer takes a body out of its transfer framing piece by piece.
Neither knows sockets or clocks; wire.py feeds them.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 1 << 20
MAX_BODY_BYTES = 256 << 20

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?\r?$")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_DONE_LINE = re.compile(rb"[\r\n]data: ?\[DONE\][ \t]*(?=[\r\n])")


class NotHttp(ValueError):
    """The bytes are no HTTP/1.1 answer; the text says what was wrong. `before` is the body in front of the fault."""

    before = b""


class TooLarge(ValueError):
    """A head above MAX_HEAD_BYTES or a body above MAX_BODY_BYTES."""


class Framing(enum.Enum):
    NONE = "none"  # no body: 204, 304
    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "close"  # ends with the connection


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: dict[str, str]  # names in lower case; repeated ones joined by ", "
    framing: Framing
    length: int  # of the body, with Framing.LENGTH
    keep_alive: bool
    body_start: int  # index into the bytes given to parse_head


def parse_head(data: bytes) -> Head | None:
    """The head of a final answer, interim (1xx) ones skipped; None while it is incomplete.

    Raises NotHttp or TooLarge.
    """
    start = 0
    while True:
        end = _HEAD_END.search(data, start)
        if end is None:
            if len(data) > MAX_HEAD_BYTES:
                raise TooLarge(f"response headers of more than {MAX_HEAD_BYTES >> 10} KiB")
            if not b"HTTP/1.".startswith(data[start : start + 7]):
                raise NotHttp(f"no HTTP answer: {data[start : start + 40]!r}")
            return None
        lines = data[start : end.start()].split(b"\n")
        match = _STATUS_LINE.match(lines[0])
        if match is None:
            raise NotHttp(f"no HTTP status line: {lines[0][:60]!r}")
        status = int(match[2])
        if 100 <= status < 200 and status != 101:
            start = end.end()
            continue
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise NotHttp(f"no header line: {line[:60]!r}")
            key = name.decode("latin-1").lower()
            text = value.strip().decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        framing, length = _framing(status, headers)
        connection = headers.get("connection", "").lower()
        keep_alive = "close" not in connection and (match[1] == b"1" or "keep-alive" in connection)
        return Head(status, headers, framing, length, keep_alive and framing is not Framing.CLOSE, end.end())


def _framing(status: int, headers: dict[str, str]) -> tuple[Framing, int]:
    """RFC 9112, section 6.3."""
    if status in (204, 304):
        return Framing.NONE, 0
    if headers.get("transfer-encoding", "").lower().endswith("chunked"):
        return Framing.CHUNKED, 0
    if (text := headers.get("content-length")) is not None:
        values = {part.strip() for part in text.split(",")}
        value = values.pop()
        if values or not value.isascii() or not value.isdigit():
            raise NotHttp(f"Content-Length is no number: {text[:40]!r}")
        if int(value) > MAX_BODY_BYTES:
            raise TooLarge(f"a body of {value} bytes; the client keeps at most {MAX_BODY_BYTES >> 20} MiB")
        return Framing.LENGTH, int(value)
    return Framing.CLOSE, 0


class Deframer:
    """Takes one body out of its framing. feed() gives body bytes; `over` tells that the message is complete."""

    __slots__ = ("framing", "over", "excess", "size", "_left", "_line", "_state")

    def __init__(self, framing: Framing, length: int = 0) -> None:
        self.framing = framing
        self.size = 0  # body bytes so far
        self.excess = False  # bytes came behind the end of the message
        self.over = framing is Framing.NONE or (framing is Framing.LENGTH and length == 0)
        self._left = length  # of the body, or of the chunk
        self._line = b""  # an unfinished size or trailer line
        self._state = "size"  # size, data, end (the CRLF behind a chunk), trailer

    @property
    def between_chunks(self) -> bool:
        return self._state == "size" and not self._line

    def feed(self, piece: bytes) -> bytes:
        """Body bytes in this piece. Raises NotHttp, or TooLarge beyond MAX_BODY_BYTES."""
        if self.over:
            self.excess = self.excess or bool(piece)
            return b""
        if self.framing is Framing.CLOSE:
            body = piece
        elif self.framing is Framing.LENGTH:
            body = piece[: self._left]
            self._left -= len(body)
            if self._left == 0:
                self.over = True
                self.excess = len(body) < len(piece)
        else:
            body = self._chunks(piece)
        self.size += len(body)
        if self.size > MAX_BODY_BYTES:
            raise TooLarge(f"a body of more than {MAX_BODY_BYTES >> 20} MiB")
        return body

    def _chunks(self, piece: bytes) -> bytes:
        body: list[bytes] = []
        at = 0
        while at < len(piece) and not self.over:
            if self._state == "data":
                part = piece[at : at + self._left]
                body.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left == 0:
                    self._state = "end"
                continue
            end = piece.find(b"\n", at)
            if end < 0:
                self._line += piece[at:]
                if len(self._line) > MAX_HEAD_BYTES:
                    raise TooLarge("a chunk size or trailer line of more than 1 MiB")
                break
            line = (self._line + piece[at:end]).rstrip(b"\r")
            self._line = b""
            at = end + 1
            try:
                self._on_line(line)
            except NotHttp as error:
                error.before = b"".join(body)
                raise
        if self.over and at < len(piece):
            self.excess = True
        return body[0] if len(body) == 1 else b"".join(body)

    def _on_line(self, line: bytes) -> None:
        if self._state == "size":
            match = _CHUNK_SIZE.match(line)
            if match is None or (rest := line[match.end() :].strip()) and not rest.startswith(b";"):
                raise NotHttp(f"no chunk size: {line[:40]!r}")
            self._left = int(match[0], 16)
            self._state = "data" if self._left else "trailer"
        elif self._state == "end":
            if line:
                raise NotHttp(f"a chunk is longer than it said: {line[:40]!r}")
            self._state = "size"
        elif not line:
            self.over = True


class DoneScanner:
    """Finds the `data: [DONE]` line of an event stream in body bytes, however they are cut."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\n"

    def feed(self, body: bytes) -> bool:
        window = self._tail + body
        if _DONE_LINE.search(window):
            return True
        self._tail = window[-32:]
        return False

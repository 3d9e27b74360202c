"""A server that answers on a schedule and logs when it really sent: what `loadgen check` and benchmarks/client.py
measure clients against. It computes nothing; one thread, one epoll set, a heap of what is due.

    python -m loadgen.mock_server --ttft-ms 50 --ttft-jitter-ms 20 --itl-ms 20      prints its port

POST /v1/completions and /v1/chat/completions stream max_tokens events of one token; --itl-ms 0: as fast as it goes.
GET /__truth gives, for every answer since the last GET, {id, read_ns, sent_ns: [...]}: CLOCK_MONOTONIC right after the
request was read and right before each event was given to the kernel. The id is the X-Request-Id header.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import select
import socket
import time
from array import array

import orjson

_READ = 1 << 16
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": "mock-model", "object": "model", "owned_by": "loadgen-mock"}]}
_BURST = 32  # events of one stream in a row when unpaced, each in a send of its own


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(chat: bool, text: str | None, finish: str | None, usage: dict[str, int] | None = None) -> bytes:
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text or ""}
    body = {
        "id": "cmpl-mock",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1_700_000_000,
        "model": "mock-model",
        "choices": [] if usage else [choice],
    }
    return b"data: " + orjson.dumps(body | ({"usage": usage} if usage else {})) + b"\n\n"


class _Stream:
    """One connection and, while there is one, its answer."""

    __slots__ = (
        "buffer",
        "chat",
        "due_ns",
        "id",
        "left",
        "out",
        "prompt_tokens",
        "read_ns",
        "sent_ns",
        "sock",
        "total",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.out = b""  # what the kernel did not take
        self.left = 0
        self.total = 0
        self.chat = False
        self.id = ""
        self.prompt_tokens = 0
        self.due_ns = self.read_ns = 0
        self.sent_ns = array("q")


class MockServer:
    """See the module. ttft and itl in ms; jitter: uniform on top of the ttft."""

    def __init__(self, port: int, ttft_ms: float, jitter_ms: float, itl_ms: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._ttft_ns, self._jitter_ns, self._itl_ns = (int(ms * 1e6) for ms in (ttft_ms, jitter_ms, itl_ms))
        self._random = random.Random(1)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._streams: dict[int, _Stream] = {}
        self._due: list[tuple[int, int, _Stream]] = []
        self._tie = itertools.count()
        self._truth: list[tuple[str, int, array[int]]] = []
        self._events = {chat: _chunk(_event(chat, " word", None)) for chat in (False, True)}
        self._lasts = {chat: _chunk(_event(chat, " word", "length")) for chat in (False, True)}

    def serve(self) -> None:
        """For ever."""
        while True:
            timeout = 0.5
            if self._due:
                timeout = max(0.0, (self._due[0][0] - time.monotonic_ns()) / 1e9)
            for number, events in self._epoll.poll(timeout):
                if number == self._listener.fileno():
                    self._accept()
                elif (stream := self._streams.get(number)) is not None:
                    if events & select.EPOLLOUT:
                        self._flush(stream)
                    if events & ~select.EPOLLOUT:
                        self._read(stream)
            now = time.monotonic_ns()
            while self._due and self._due[0][0] <= now:
                self._send_due(heapq.heappop(self._due)[2])

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._streams[sock.fileno()] = _Stream(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _close(self, stream: _Stream) -> None:
        self._streams.pop(stream.sock.fileno(), None)
        stream.left = 0
        stream.sock.close()

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.sock.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(stream)
            return
        stream.buffer += data
        head, found, rest = stream.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        length = int(headers.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        stream.buffer = rest[length:]
        method, path, _ = lines[0].decode("latin-1").split(" ", 2)
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self._begin(stream, path, headers, orjson.loads(rest[:length]))
        else:
            self._answer(stream, path)

    def _answer(self, stream: _Stream, path: str) -> None:
        body = b""
        status = b"200 OK"
        if path == "/v1/models":
            body = orjson.dumps(_MODELS)
        elif path == "/__truth":
            told, self._truth = self._truth, []
            body = orjson.dumps([{"id": name, "read_ns": at, "sent_ns": list(sent)} for name, at, sent in told])
        elif path != "/health":
            status = b"404 Not Found"
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        self._send(stream, head + body)

    def _begin(self, stream: _Stream, path: str, headers: dict[bytes, bytes], body: dict[str, object]) -> None:
        stream.read_ns = time.monotonic_ns()
        stream.chat = "chat" in path
        stream.id = headers.get(b"x-request-id", b"").decode("latin-1")
        stream.total = stream.left = int(str(body.get("max_tokens") or body.get("max_completion_tokens") or 16))
        prompt = body.get("prompt")
        stream.prompt_tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
        stream.sent_ns = array("q")
        self._send(stream, _HEAD)
        stream.due_ns = stream.read_ns + self._ttft_ns + int(self._random.random() * self._jitter_ns)
        heapq.heappush(self._due, (stream.due_ns, next(self._tie), stream))

    def _send_due(self, stream: _Stream) -> None:
        """One event; unpaced, as many as the kernel takes of a burst, each in its own send."""
        for _ in range(1 if self._itl_ns else _BURST):
            if not stream.left or stream.out:
                return  # closed, or _flush goes on when the kernel takes more
            stream.left -= 1
            data = self._events[stream.chat] if stream.left else self._lasts[stream.chat] + self._end(stream)
            stream.sent_ns.append(time.monotonic_ns())
            self._send(stream, data)
        if stream.left:
            stream.due_ns += self._itl_ns
            heapq.heappush(self._due, (stream.due_ns, next(self._tie), stream))

    def _end(self, stream: _Stream) -> bytes:
        counts = {
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": stream.total,
            "total_tokens": stream.prompt_tokens + stream.total,
        }
        self._truth.append((stream.id, stream.read_ns, stream.sent_ns))
        return _chunk(_event(stream.chat, None, None, counts)) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _send(self, stream: _Stream, data: bytes) -> None:
        try:
            sent = stream.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(stream)
            return
        if sent < len(data):
            stream.out = data[sent:]
            self._epoll.modify(stream.sock, select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, stream: _Stream) -> None:
        data, stream.out = stream.out, b""
        self._epoll.modify(stream.sock, select.EPOLLIN)
        if data:
            self._send(stream, data)
        if stream.left and not stream.out:
            heapq.heappush(self._due, (time.monotonic_ns(), next(self._tie), stream))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.mock_server", description="a server of known times")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, printed [%(default)s]")
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--ttft-jitter-ms", type=float, default=0.0)
    parser.add_argument("--itl-ms", type=float, default=20.0, help="0: as fast as it goes [%(default)s]")
    parser.add_argument("--core", type=int, help="run on this core alone")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    server = MockServer(args.port, args.ttft_ms, args.ttft_jitter_ms, args.itl_ms)
    print(server.port, flush=True)
    server.serve()


if __name__ == "__main__":
    main()

"""A server on loopback that follows a script, in a process of its own, and logs what it really did and when.

    def reply(number, request):               # the number-th POST since the start
        return [Step(0, HEAD), Step(400, text("A")), Step(50, text("B", "stop")), Step(0, DONE), Step(0, END)]

    with ScriptedServer(reply) as server:
        ...                                   # load server.url
        posts = server.posts()                # arrivals, connections, bodies, and the stamp of each step

Stamps are ns of CLOCK_MONOTONIC, which all processes of a machine share; that of a step is taken right before its
bytes are given to the kernel. GET /v1/models and /health are answered, other GETs are 404. Linux only (it forks).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
CLOSE = "close"  # as the last step: close politely
RESET = "reset"  # as the last step: reset the connection


class Step(NamedTuple):
    """Bytes, or CLOSE or RESET, so many ms after the step before."""

    wait_ms: float
    data: bytes | str


@dataclass(frozen=True)
class Asked:
    """One POST as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def chat(self) -> bool:
        return "chat" in self.path


Reply = Callable[[int, Asked], Sequence[tuple[float, bytes | str]]]


@dataclass
class Post:
    """The truth about one POST. active counts the POSTs in flight at its arrival, this one included."""

    t_ns: int
    connection: int
    active: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    sent_ns: list[int] = field(default_factory=list)  # by step
    end: str | None = None  # "end" or "gone" (the client left first)


def in_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def sse(payload: object) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


DONE = in_chunk(b"data: [DONE]\n\n")


def payload(asked: Asked, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """The object of one event, for the endpoint that was asked; completions show the delta's content as text."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": delta} if asked.chat else {"text": delta.get("content") or ""}
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    return {"id": "x", "object": kind, "created": 1, "model": "m", "choices": [choice], **more}


def delta(asked: Asked, finish: str | None = None, **what: Any) -> bytes:
    """One event in a chunk of its own: delta(asked, content="A"), delta(asked, "stop")."""
    return in_chunk(sse(payload(asked, what, finish)))


def usage(asked: Asked, completion_tokens: int, prompt_tokens: int = 4, **more: Any) -> bytes:
    total = prompt_tokens + completion_tokens
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total, **more}
    return in_chunk(sse({**payload(asked, {}), "choices": [], "usage": counts}))


def plain(status: int, body: object, headers: str = "", content_type: str = "application/json") -> bytes:
    """A whole answer that is no stream."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def good(asked: Asked, ttft_ms: float = 100, tokens: int = 10, gap_ms: float = 10) -> list[tuple[float, bytes | str]]:
    """A well-formed answer."""
    waits = [ttft_ms, *[gap_ms] * (tokens - 1)]
    events = [(wait, delta(asked, "length" if i == tokens - 1 else None, content=" w")) for i, wait in enumerate(waits)]
    return [(0, HEAD), *events, (0, usage(asked, tokens)), (0, DONE), (0, END)]


class ScriptedServer:
    """Context manager; `idle_s`: close a connection that rests so long; `owned_by` is what /v1/models says."""

    def __init__(self, reply: Reply, *, idle_s: float | None = None, owned_by: str = "test") -> None:
        self._reply = reply
        self._idle_s = idle_s
        self._owned_by = owned_by
        self._folder = tempfile.TemporaryDirectory(prefix="scripted-server-")
        self._log_path = Path(self._folder.name) / "log.jsonl"
        self._log_path.touch()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port = listener.getsockname()[1]
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(listener,), daemon=True)
        self._process.start()
        listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """As kill -9 does."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def posts(self) -> list[Post]:
        posts: list[Post] = []
        for line in self._log_path.read_bytes().splitlines():
            entry = orjson.loads(line)
            what = entry.pop("what")
            if what == "post":
                del entry["n"]
                posts.append(Post(**entry))
            elif what == "sent":
                posts[entry["n"]].sent_ns.append(entry["t_ns"])
            else:
                posts[entry["n"]].end = what
        return posts

    # ------------------------------------------------------------------ the child process

    def _run(self, listener: socket.socket) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._log = open(self._log_path, "ab", buffering=0)  # noqa: SIM115
        self._num_posts = self._num_connections = self._active = 0
        asyncio.run(self._listen(listener))
        os._exit(0)

    def _note(self, what: str, **entry: Any) -> None:
        self._log.write(orjson.dumps({"what": what, **entry}) + b"\n")

    async def _listen(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener, limit=1 << 26)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        connection = self._num_connections
        # asyncio leaves the algorithm of Nagle on for sockets of socket.create_server: "sent" would not be the truth
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._idle_s)
                t_ns = time.monotonic_ns()
                first, *lines = head.decode("latin-1").split("\r\n")
                pairs = (line.partition(":") for line in lines if line)
                headers = {name.lower(): value.strip() for name, _, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                if method == "GET":
                    writer.write(self._get(path))
                elif not await self._post(t_ns, connection, Asked(path, headers, json.loads(body)), writer):
                    return
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()

    def _get(self, path: str) -> bytes:
        if path.endswith("/models"):
            return plain(200, {"object": "list", "data": [{"id": "m", "owned_by": self._owned_by}]})
        return plain(200 if path.endswith("/health") else 404, {})

    async def _post(self, t_ns: int, connection: int, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        number = self._num_posts
        self._num_posts += 1
        self._active += 1
        fields = {"path": asked.path, "headers": asked.headers, "body": asked.body}
        self._note("post", n=number, t_ns=t_ns, connection=connection, active=self._active, **fields)
        ended = False
        try:
            due_ns = t_ns
            for wait_ms, data in self._reply(number, asked):
                due_ns += round(wait_ms * 1e6)  # absolute, so that delays do not add up
                while (left_ns := due_ns - time.monotonic_ns()) > 0:
                    await asyncio.sleep(left_ns / 1e9)
                self._note("sent", n=number, t_ns=time.monotonic_ns())
                if isinstance(data, str):
                    if data == RESET:
                        linger = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        writer.transport.abort()
                    ended = True
                    return False
                writer.write(data)
                await writer.drain()
            ended = True
            return True
        finally:
            self._active -= 1
            self._note("end" if ended else "gone", n=number)

"""The seam between the runner and the network: one request out, one Exchange back.

An Exchange is raw: the bytes of the answer's body as they came, each piece with the stamp of its arrival. Nothing is
parsed here beyond what tells where the answer ends; protocol.py turns an Exchange into a RequestRecord later, off the
timed path. Foreign exceptions end here: a transport never raises for what a server or network does, it returns an
Exchange whose `failure` says it. It raises only ValueError for a request that could not be sent at all.

Implementations: wire.py (plain http, kernel stamps), via_aiohttp.py (https, proxies), tests/fakes.py (a script).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from loadgen.options import UsageError
from loadgen.record import Failure


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; None = no limit. There is no limit on the whole request unless the user sets one."""

    connect_s: float | None = 10.0
    idle_s: float | None = 300.0  # silence: before the first byte, and between pieces
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. base_url has no trailing slash and no /v1."""

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict)  # sent with every request; the key is in here, never saved
    timeouts: Timeouts = Timeouts()
    proxy: str | None = None


@dataclass(slots=True)
class Exchange:
    """One request and the bytes that came back. Stamps are absolute monotonic ns."""

    sent_ns: int | None = None  # just before the first byte was written
    first_byte_ns: int | None = None  # first byte of the answer, headers included
    end_ns: int | None = None  # body complete, [DONE] seen, or the failure noticed
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    pieces: list[bytes] = field(default_factory=list)  # body bytes without transfer framing; see body_pieces
    stamps: array[int] = field(default_factory=lambda: array("q"))  # one a piece
    failure: Failure | None = None
    kernel_stamps: bool = False
    reopened: bool = False

    def body_pieces(self) -> tuple[list[bytes], array[int]]:
        """The body as (pieces, stamps) with chunk framing removed. wire.py overrides this to do it late."""
        return self.pieces, self.stamps

    def framed_pieces(self) -> tuple[list[bytes], array[int]] | None:
        """The same still in HTTP/1.1 chunks, if that is how it was kept: a reader may take whole chunks at once."""
        return None


@dataclass(frozen=True, slots=True)
class TransportUsage:
    """What a transport counted since it was made."""

    reads: int = 0  # reads that brought bytes
    unread_bytes: int = 0  # waiting in the sockets now
    num_connections: int = 0  # ever opened


class Transport(Protocol):
    name: str  # "wire" or "aiohttp"

    async def open(self, connections: int) -> None:
        """Open that many connections before the clock starts; failures are left to the requests themselves."""

    async def exchange(
        self, method: str, path: str, request_id: str | None, body: bytes, *, planned_ns: int | None = None
    ) -> Exchange:
        """Send one request, return when its answer is over: end of body, or [DONE] of an event stream, or a failure.

        planned_ns: absolute; when given, the request is sent at that time (the transport may hold it until then).
        Cancelled: the connection is closed and the cancellation goes on.
        """

    async def sleep_until_ns(self, when_ns: int) -> None:
        """As clock.Clock.sleep_until_ns, by the finest timer the transport has."""

    def usage(self) -> TransportUsage: ...

    async def close(self) -> None: ...


def make_transport(name: str, target: Target) -> Transport:
    """The transport of that name; "auto" is wire for plain http without a proxy on Linux, else aiohttp.

    Raises UsageError for wire where it cannot work.
    """
    from loadgen import wire

    fits = wire.SUPPORTED and target.base_url.startswith("http://") and target.proxy is None
    if name == "wire" and not fits:
        why = "on Linux" if not wire.SUPPORTED else "plain http" if target.proxy is None else "without a proxy"
        raise UsageError(f"--transport wire works {why} only, not for {target.base_url}: use auto or aiohttp")
    if name == "wire" or (name == "auto" and fits):
        return wire.Wire(target)
    from loadgen.via_aiohttp import ViaAiohttp

    return ViaAiohttp(target)

"""The one place that reads the time.

All stamps are integer nanoseconds of CLOCK_MONOTONIC. Wall-clock time appears once, in run.json.
Code that must be tested without waiting takes a Clock; tests pass a FakeClock (tests/fakes.py).
"""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

now_ns = time.monotonic_ns


def utc_at(stamp_ns: int) -> str:
    """ISO 8601 UTC with microseconds of a stamp of this machine's clock, for run.json only."""
    then = datetime.now(UTC) - timedelta(microseconds=(now_ns() - stamp_ns) / 1000)
    return then.isoformat(timespec="microseconds")


class Clock(Protocol):
    """What the runner needs of time: a reading, and a wait until an absolute reading."""

    def now_ns(self) -> int: ...

    async def sleep_until_ns(self, when_ns: int) -> None:
        """Return at or shortly after when_ns; at once when it has passed."""


class MonotonicClock:
    """The real clock. The wait is the event loop's (about 1 ms late on uvloop); wire.py has a finer one."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    async def sleep_until_ns(self, when_ns: int) -> None:
        while (left := when_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(left / NS_PER_S)

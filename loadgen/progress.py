"""A progress line on the terminal: live rate, in flight, TTFT. Silent where standard error is not a terminal."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

from loadgen.runner import Snapshot

_PLAIN_EVERY_S = 10.0  # in a log file: one line now and then instead of a bar


class Bar:
    """Implements workers.Progress. `label` stands before the bar, such as the arm of a comparison."""

    def __init__(self, label: str = "") -> None:
        self._bar: tqdm[None] | None = None
        self._label = label
        self._plain = not sys.stderr.isatty()
        self._since = self._said = time.monotonic()

    def update(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        ttft = f"{snapshot.ttft_ns / 1e6:.0f} ms" if snapshot.ttft_ns is not None else "-"
        facts = f"{snapshot.in_flight} in flight, TTFT {ttft}"
        if snapshot.failed:
            facts += f", {snapshot.failed} failed"
        if self._plain:
            if now - self._said >= _PLAIN_EVERY_S and snapshot.started:
                self._said = now
                of = f"/{snapshot.total}" if snapshot.total else ""
                print(f"{self._label or 'loadgen'}: {snapshot.finished}{of} requests, {facts}", file=sys.stderr)
            return
        if self._bar is None:
            self._bar = tqdm(
                total=snapshot.total, unit="req", desc=self._label or None, dynamic_ncols=True, leave=False
            )
        self._bar.n = snapshot.finished
        self._bar.set_postfix_str(facts if snapshot.started else "warming up", refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

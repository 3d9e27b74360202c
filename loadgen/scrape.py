"""/metrics of the server, and GPU readings, about once a second on the client's clock.

    scraper = Scraper()
    scraper.start("http://127.0.0.1:8000")
    ...
    lines = await scraper.stop()    # [{"t_ns": ..., "vllm:num_requests_running": 3.0, ...}, ...]

A line has `t_ns` (absolute monotonic ns, when the answer was there) and one value per metric name: labels are summed,
averaged for names that say they are a share (`_perc`, `_ratio`, `_usage`); buckets are left out, a histogram is its
`_count` and `_sum`. GPU readings, where nvidia-ml-py finds a GPU on this machine, are `gpu<i>:utilization_percent`,
`gpu<i>:memory_used_bytes`, `gpu<i>:power_w`. A thread reads and sleeps; the lines that are wanted are kept as text and
parsed at the end, off the timed path. A server without /metrics, or one that dies, gives no lines: a scrape never
fails a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ssl
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from loadgen.clock import now_ns

PERIOD_S = 1.0
_TIMEOUT_S = 2.0
_LAST_READ_S = 0.7  # how long stop() waits for the final counters: Ctrl-C must be quick
_LARGEST_ANSWER = 8 << 20
_GIVE_UP_AFTER = 3  # answers other than 200, in a row from the start
_SHARES = ("_perc", "_percent", "_ratio", "_usage", "_share")


class Scraper:
    """Reads from start() until stop(); both may be called once, stop() also without start()."""

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._raw: list[tuple[int, bytes, dict[str, float]]] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """url: the server's base address; headers go with every read (a key may be needed). Returns at once."""
        self._thread = threading.Thread(target=self._loop, args=(url, dict(headers or {})), name="scrape", daemon=True)
        self._thread.start()

    async def stop(self) -> list[dict[str, Any]]:
        """Read once more, for the final counters, and give all lines in order of time."""
        if self._thread is None:
            return []
        self._ending.set()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, _LAST_READ_S)
        return [{"t_ns": t_ns, **parse(text), **gpu} for t_ns, text, gpu in list(self._raw)]

    def _loop(self, url: str, headers: dict[str, str]) -> None:
        with contextlib.suppress(Exception), _Gpus() as gpus:  # whatever goes wrong here, the run goes on
            failures = 0
            while True:
                last = self._ending.is_set()
                text = _read(url, headers)
                if text is None:
                    failures += 1
                readings = gpus.read()
                if text is not None or readings:
                    self._raw.append((now_ns(), _wanted(text or b""), readings))
                if last or (failures >= _GIVE_UP_AFTER and not self._raw):
                    return
                self._ending.wait(self._period_s)


def _read(url: str, headers: Mapping[str, str]) -> bytes | None:
    """The body of GET /metrics; None for anything but a 200. No proxy: a server's metrics are next to it."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.netloc, timeout=_TIMEOUT_S, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("GET", parts.path.rstrip("/") + "/metrics", headers=dict(headers))
            answer = connection.getresponse()
            return answer.read(_LARGEST_ANSWER) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None


def _wanted(text: bytes) -> bytes:
    """Without comments and buckets: 5 % of what vLLM answers, and the parser is slow."""
    lines = (line for line in text.splitlines() if not line.startswith(b"#") and b"_bucket{" not in line)
    return b"\n".join(lines) + b"\n"


def parse(text: bytes) -> dict[str, float]:
    """Prometheus text to {sample name: value}: labels summed, or averaged for shares; no buckets, no creation times.

    Text that is no Prometheus text gives what was readable before the first bad line.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, list[float]] = defaultdict(list)
    with contextlib.suppress(ValueError, KeyError, IndexError):
        for family in text_string_to_metric_families(text.decode("utf-8", "replace")):
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                    continue
                if sample.value == sample.value and abs(sample.value) != float("inf"):
                    values[sample.name].append(float(sample.value))
    return {
        name: sum(found) / (len(found) if name.endswith(_SHARES) else 1)
        for name, found in values.items()
        if not name.startswith(("python_", "process_max", "process_virtual"))
    }


class _Gpus:
    """GPU readings by nvidia-ml-py; none without it, or without a GPU on this machine."""

    def __enter__(self) -> _Gpus:
        self._nvml: Any = None
        self._handles: list[Any] = []
        with contextlib.suppress(Exception):  # no package, no driver, no GPU
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()

    def read(self) -> dict[str, float]:
        readings: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(Exception):  # a reading that this GPU does not give (WSL2: power)
                readings[f"gpu{index}:utilization_percent"] = float(
                    self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                )
            with contextlib.suppress(Exception):
                readings[f"gpu{index}:memory_used_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with contextlib.suppress(Exception):
                readings[f"gpu{index}:power_w"] = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return readings

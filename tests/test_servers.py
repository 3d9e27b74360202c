"""servers.py: real processes, made of a few lines of Python."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from loadgen.options import UnusableServer
from loadgen.servers import Server

# argv: port, s until ready, "stubborn" or "". Starts a child that outlives SIGTERM; both write their pids.
SERVER = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer
    port, ready_s, stubborn, pids = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE)
    child.stdout.readline()
    open(pids, "w").write(f"{os.getpid()} {child.pid}")
    begin = time.monotonic()
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if time.monotonic() - begin >= ready_s else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
    print("listening", flush=True)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Init may need a moment to take them away."""
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def server(tmp_path: Path, port: int, ready_s: float = 0.3, timeout_s: float = 60) -> Server:
    command = [sys.executable, "-c", SERVER, str(port), str(ready_s), "", str(tmp_path / "pids")]
    return Server("toy", command, f"http://127.0.0.1:{port}", tmp_path / "log", timeout_s=timeout_s, quiet=True)


def test_ready_when_health_says_so_and_the_whole_group_ends(tmp_path: Path, port: int) -> None:
    with server(tmp_path, port) as started:
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(alive, pids))
        assert started.startup_s is not None and started.startup_s >= 0.3
    assert gone(pids), "the child ignores SIGTERM and must be killed"
    assert "listening" in (tmp_path / "log").read_text()


def test_an_error_inside_ends_it(tmp_path: Path, port: int) -> None:
    with pytest.raises(KeyboardInterrupt), server(tmp_path, port):
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        raise KeyboardInterrupt
    assert gone(pids)


def test_nothing_is_left_when_this_process_is_killed(tmp_path: Path, port: int) -> None:
    """SIGKILL leaves us no last word, so a guard has it; a shorter grace than the usual one keeps the test short."""
    script = textwrap.dedent(
        f"""
        import pathlib, sys, time
        from loadgen import servers
        servers._GRACE_S = 1.0
        command = [sys.executable, "-c", {SERVER!r}, "{port}", "0", "", {str(tmp_path / "pids")!r}]
        with servers.Server("toy", command, "http://127.0.0.1:{port}", pathlib.Path({str(tmp_path / "log")!r})):
            print("ready", flush=True)
            time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"ready\n"
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(alive, pids))
        killed.kill()
    assert gone(pids)


def test_not_ready_in_time(tmp_path: Path, port: int) -> None:
    slow = server(tmp_path, port, ready_s=600, timeout_s=5)
    with pytest.raises(UnusableServer, match="not ready after 5 s: .*log"), slow:
        raise AssertionError("it was never ready")
    assert not (tmp_path / "pids").exists() or gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-c", "print('out of memory'); raise SystemExit(3)"], "status 3 .*out of memory"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "signal 9.*said nothing"),
        (["/no/such/program"], "cannot be run"),
    ],
)
def test_a_command_that_ends(tmp_path: Path, port: int, command: list[str], said: str) -> None:
    wrong = Server("toy", command, f"http://127.0.0.1:{port}", tmp_path / "log", quiet=True)
    with pytest.raises(UnusableServer, match=said), wrong:
        raise AssertionError("it was never ready")


def test_a_port_in_use(tmp_path: Path, port: int) -> None:
    with server(tmp_path, port):
        second = Server("other", ["true"], f"http://127.0.0.1:{port}", tmp_path / "log2", quiet=True)
        with pytest.raises(UnusableServer, match="something else answers"), second:
            raise AssertionError("it was never ready")
        assert os.path.exists(tmp_path / "pids")

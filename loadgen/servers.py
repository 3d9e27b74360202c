"""A server that a command starts and stops around a load.

    with Server("vllm", ["bash", "server/start_vllm.sh", "--port", "8000"], "http://127.0.0.1:8000", log) as server:
        ...                                   # it answers; server.startup_s says how long that took

The command runs in a session of its own. Leaving the block, by whatever way, ends the whole process group: SIGTERM,
and SIGKILL for what is left after a grace, so that no engine process keeps its GPU memory. Its output goes to the log.
Should this process itself be killed, a guard does the same: a shell that waits at a pipe which closes with us.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from loadgen.options import UnusableServer
from loadgen.target import base_url

_POLL_S = 0.2
_SAY_EVERY_S = 10.0
_ASK_TIMEOUT_S = 2.0
_GRACE_S = 30.0
_LAST_LINES = 3

# Reads a line from us when all is well; the end of the pipe instead means that we are gone.
_GUARD = 'read -r _ || { kill -TERM -"$0"; sleep "$1"; kill -KILL -"$0"; }'


class Server:
    """One server process group; a context manager that gives itself once the server is ready.

    command: a shell-like line or the words. url: where it will answer. log: file for its output. env: the whole
    environment, None for this process's. Raises UnusableServer, with the last lines of the log, when something else
    listens there already, when the command ends, or when it is not ready after timeout_s.
    """

    def __init__(
        self,
        name: str,
        command: str | Sequence[str],
        url: str,
        log: Path,
        *,
        timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        self.name = name
        self.command = shlex.split(command) if isinstance(command, str) else list(command)
        self.url = base_url(url)
        self.log = log
        self.startup_s: float | None = None  # from the start of the command to the first good answer
        self._timeout_s = timeout_s
        self._env = env
        self._quiet = quiet
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        if self._answers() is not None:
            raise UnusableServer(
                f"{self.name}: something else answers at {self.url} already: stop it, or use another port"
            )
        begin = time.monotonic()
        try:
            with open(self.log, "ab") as output:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=None if self._env is None else dict(self._env),
                    start_new_session=True,
                )
        except OSError as error:
            raise UnusableServer(f"{self.name}: {self.command[0]} cannot be run: {error.strerror}") from None
        try:
            self._guard = subprocess.Popen(
                ["sh", "-c", _GUARD, str(self._process.pid), f"{_GRACE_S:g}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
            self._wait_until_ready(begin)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, begin: float) -> None:
        assert self._process is not None
        said = begin
        while True:
            status = self._process.poll()
            if status is not None:
                how = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
                raise UnusableServer(f"{self.name} {how} before it was ready: {self._last_words()}")
            if self._answers() == 200:
                return
            now = time.monotonic()
            if now - begin > self._timeout_s:
                raise UnusableServer(f"{self.name} was not ready after {self._timeout_s:g} s: {self._last_words()}")
            if now - said >= _SAY_EVERY_S and not self._quiet:
                said = now
                print(f"{self.name}: not ready yet, {now - begin:.0f} s (log: {self.log})", file=sys.stderr)
            time.sleep(_POLL_S)

    def _answers(self) -> int | None:
        """The status of /health (of /v1/models where there is no /health); None when nobody listens."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        status = None
        for path in ("/health", "/v1/models"):
            try:
                with direct.open(self.url + path, timeout=_ASK_TIMEOUT_S) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                status = error.code
                error.close()
                if status != 404:
                    return status
            except (OSError, ValueError):
                return status
        return status

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"{' | '.join(line.strip() for line in lines[-_LAST_LINES:]) or 'it said nothing'} (log: {self.log})"

    def stop(self) -> None:
        """End the process group; harmless when it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(process, signal.SIGKILL)  # what its leader left behind, too
            process.wait()
            if self._guard is not None:
                with contextlib.suppress(OSError):
                    self._guard.communicate(b"all is well\n")

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

"""`loadgen run`: one load, its numbers, its folder. run -> summarise -> audit -> save -> page -> print -> status."""

from __future__ import annotations

import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from loadgen import run_folder
from loadgen.audit import Validity, audit
from loadgen.metrics import summarize
from loadgen.options import Options, UnusableServer, UsageError
from loadgen.progress import Bar
from loadgen.record import FailureKind, Run
from loadgen.workers import run_load

OK, REQUESTS_FAILED, UNUSABLE, INVALID, INTERRUPTED = 0, 1, 2, 3, 130


def new_folder(out: str | None, what: str) -> Path:
    """The run folder: --out, or runs/<UTC time>-<what>."""
    if out:
        return Path(out)
    safe = re.sub(r"[^A-Za-z0-9._=-]+", "-", what).strip("-")
    return Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{safe}"


def describe_load(options: Options) -> str:
    """A short name of a load: c64, r8-poisson, trace-chat-x2."""
    parts = []
    if options.trace:
        parts.append(f"trace-{Path(options.trace).stem}")
    if options.rate:
        parts.append(f"r{options.rate:g}" + ("" if options.trace else f"-{options.arrival}"))
    if options.concurrency:
        parts.append(f"c{options.concurrency}")
    return "-".join(parts) or "run"


def exit_status(run: Run, validity: Validity, max_failures: int) -> int:
    """DESIGN: 0 well, 1 requests failed, 2 no server, 3 INVALID, 130 interrupted."""
    if run.interrupted:
        return INTERRUPTED
    failed = [r for r in run.measured if not r.ok]
    unreachable = (FailureKind.REFUSED, FailureKind.CONNECT_TIMEOUT, FailureKind.TLS)
    if run.measured and len(failed) == len(run.measured):
        if all(r.failure is not None and r.failure.kind in unreachable for r in failed):
            return UNUSABLE
    if not validity.valid:
        return INVALID
    return REQUESTS_FAILED if len(failed) > max_failures else OK


def run_and_report(options: Options) -> int:
    """The command: gives the exit status. Raises UsageError or UnusableServer before anything was measured."""
    folder = new_folder(options.out, describe_load(options))
    _ensure_writable(folder.parent)
    run = run_load(options, progress=None if options.quiet else Bar())
    validity = audit(run)
    summary = summarize(run, options.slo)
    try:
        document = run_folder.save(folder, run, summary, validity.as_dict())
    except UsageError:  # a full disk takes the folder, not the numbers
        _print(options, run_folder.make_document(run, summary, validity.as_dict()))
        raise
    _write_page(folder, options.quiet)
    _print(options, document)
    if not options.json:
        click.echo(f"{'' if options.quiet else 'records and report: '}{folder}")
    status = exit_status(run, validity, options.max_failures)
    if status == UNUSABLE:
        raise UnusableServer(f"no request reached {run.server.get('url')}: {run.measured[0].failure}")
    return status


def _ensure_writable(parent: Path) -> None:
    """Known before the load, not after an hour of it. Raises UsageError."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UsageError(f"no run folder can be made in {parent} (--out): {error.strerror or error}") from None


def _print(options: Options, document: dict[str, Any]) -> None:
    if options.json:
        sys.stdout.buffer.write(run_folder.as_json(document))
    elif not options.quiet:
        from loadgen.report import text_report

        click.echo(text_report(document))


def _write_page(folder: Path, quiet: bool) -> None:
    if quiet:  # `loadgen report DIR --html` makes it any time later
        return
    from loadgen.page import write_page

    write_page([folder], folder / "report.html")

"""The run folder: what a run leaves behind, written whole or not at all, and read back.

    requests.jsonl        one line a request, in order of plan
    events.npz            stamps_ns int64 [events], offsets int64 [n + 1]; loop_lag_ns int64, the client's own evidence
    run.json              options, seeds, versions, host, client, server, counts, metrics, validity: strict JSON
    server_metrics.jsonl  /metrics and GPU readings on the client's clock; absent where there were none

Stamps in the files are ns since the start of the measured phase (those of the warm-up are negative); run.json has that
start as `start_monotonic_ns` and `start_utc`. The folder is made under another name beside its place, synced to the
disk and renamed. When that fails (a full disk), the files that were complete stay in `<name>.incomplete`.

Versions: loadgen.run/1 is the first.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import zipfile
from array import array
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from loadgen import __version__
from loadgen.metrics import pooled_events
from loadgen.options import UsageError
from loadgen.record import FORMAT, ClientUsage, Failure, FailureKind, Phase, RequestRecord, Run

_STAMPS = (
    "planned_ns",
    "sent_ns",
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
)
_PLAIN = (
    "shared_stamps",
    "prompt_tokens",
    "output_tokens",
    "tokens_from",
    "finish_reason",
    "status",
    "kernel_stamps",
    "reopened",
    "asked_input_tokens",
    "asked_output_tokens",
    "cached_tokens",
    "reasoning_tokens",
)
_KEPT_TEXT = ("text", "tool_calls")  # in the line only when kept
_LIBRARIES = ("aiohttp", "uvloop", "numpy", "orjson")


# ---------------------------------------------------------------- writing


def save(
    path: str | Path, run: Run, summary: Mapping[str, Any], validity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the folder and give what went into run.json.

    summary: of metrics.summarize; validity: of audit's Validity.as_dict, whose warnings are joined with the summary's.
    Raises UsageError, in one line, when `path` is taken or cannot be written.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} exists and is not empty: name a new folder with --out")
    document = make_document(run, summary, validity)
    files = {
        "requests.jsonl": b"".join(_line(record, run.start_ns) for record in run.records),
        "events.npz": _events(run),
    }
    if run.scrapes:
        files["server_metrics.jsonl"] = b"".join(
            orjson.dumps({**scrape, "t_ns": scrape["t_ns"] - run.start_ns}) + b"\n" for scrape in run.scrapes
        )
    files["run.json"] = as_json(document)
    _write_folder(path, files)
    return document


def as_json(document: Mapping[str, Any]) -> bytes:
    """The bytes of run.json."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    partial = path.with_name(f"{path.name}.incomplete")
    written: list[str] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            partial = path.with_name(f"{path.name}.incomplete-{os.getpid()}")
        partial.mkdir()
        for name, data in files.items():
            write_synced(partial / name, data)
            written.append(name)
        _sync(partial)
        if path.exists():  # empty; POSIX would replace it, Windows would not
            path.rmdir()
        partial.rename(path)
        _sync(path.parent)
    except OSError as error:
        kept = f"; complete and kept in {partial}: {', '.join(written)}" if written else ""
        if not written:
            shutil.rmtree(partial, ignore_errors=True)
        raise UsageError(f"the run could not be written to {path}: {error.strerror or error}{kept}") from error


def write_synced(path: Path, data: bytes) -> None:
    """Write one file and sync it to the disk; a file that could not be written whole is removed. Raises OSError."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write compare.json and the like: strict JSON, whole or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.part")
    write_synced(partial, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    partial.replace(path)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def make_document(run: Run, summary: Mapping[str, Any], validity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What run.json holds, as plain data: no NaN, no key, no header value."""
    validity = dict(validity or {"valid": True, "reasons": [], "warnings": []})
    validity["warnings"] = [*validity["warnings"], *summary.get("warnings", [])]
    usage = asdict(run.usage)
    lag_ms = np.asarray(usage.pop("loop_lag_ns"), dtype=np.float64) / 1e6
    usage["loop_lag_ms"] = {
        "n": len(lag_ms),
        "p99": float(np.quantile(lag_ms, 0.99)) if len(lag_ms) else None,
        "max": float(lag_ms.max()) if len(lag_ms) else None,
    }
    document = {
        "format": FORMAT,
        "start_utc": run.start_utc,
        "start_monotonic_ns": run.start_ns,
        "end_ns": run.end_ns - run.start_ns,
        "interrupted": run.interrupted,
        "options": run.options,
        "plan": run.plan,
        "server": run.server,
        "versions": _versions(),
        "host": _host(),
        "client": usage,
        "counts": summary["counts"],
        "metrics": summary["metrics"],
        "validity": validity,
        "cold": summary["cold"],
        "warmup": summary["warmup"],
        "server_counters": summary["server_counters"],
    }
    plain = orjson.loads(orjson.dumps(document, default=_plain, option=orjson.OPT_NON_STR_KEYS))
    plain["options"]["headers"] = {name: "***" for name in plain["options"].get("headers") or {}}
    for reason in plain["counts"].get("failure_reasons", []):
        reason["detail"] = _without_key(reason["detail"])
    if plain["cold"]:
        plain["cold"]["failure"] = _without_key(plain["cold"]["failure"])
    result: dict[str, Any] = plain
    return result


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return str(value)


def _without_key(text: str | None) -> str | None:
    """A server may repeat the key in its error message; it is never written."""
    key = os.environ.get("OPENAI_API_KEY")
    return text.replace(key, "***") if text and key and len(key) > 3 else text


def _line(record: RequestRecord, start_ns: int) -> bytes:
    line: dict[str, Any] = {"id": record.id, "phase": record.phase}
    for name in _STAMPS:
        stamp = getattr(record, name)
        line[name] = None if stamp is None else stamp - start_ns
    line["num_events"] = record.num_events
    line |= {name: getattr(record, name) for name in _PLAIN}
    line["ok"] = record.ok
    line["failure"] = None
    if (failure := record.failure) is not None:
        line["failure"] = {
            "kind": failure.kind,
            "detail": _without_key(failure.detail),
            "status": failure.status,
            "retry_after": failure.retry_after,
        }
    line |= {name: value for name in _KEPT_TEXT if (value := getattr(record, name)) is not None}
    if record.tags:
        line["tags"] = dict(record.tags)
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _events(run: Run) -> bytes:
    stamps, offsets = pooled_events(run.records)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        stamps_ns=stamps - run.start_ns,
        offsets=offsets,
        loop_lag_ns=np.asarray(run.usage.loop_lag_ns, dtype=np.int64),
    )
    return buffer.getvalue()


# ---------------------------------------------------------------- this machine, this program


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "loadgen": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _commit() -> str | None:
    """The commit of the checkout this program runs from, `+` when files differ; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _host() -> dict[str, Any]:
    import psutil

    return {
        "system": platform.system(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "wsl": "microsoft" in platform.release().lower(),
    }


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


# ---------------------------------------------------------------- reading


def load_document(path: str | Path) -> dict[str, Any]:
    """run.json of a run folder. Raises UsageError when there is none, or none that this version reads."""
    path = Path(path)
    try:
        document = orjson.loads((path / "run.json").read_bytes())
    except OSError as error:
        raise UsageError(f"{path} is not a run folder: no readable run.json ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path / 'run.json'} is not JSON: {error}") from None
    kind = document.get("format") if isinstance(document, dict) else None
    if kind != FORMAT:
        raise UsageError(f"{path / 'run.json'} has format {kind!r}; this version reads {FORMAT!r}")
    result: dict[str, Any] = document
    return result


def load(path: str | Path) -> Run:
    """The Run that `save` wrote. Raises UsageError when a file is missing or does not fit the others."""
    path = Path(path)
    document = load_document(path)
    start_ns = document["start_monotonic_ns"]
    try:
        with open(path / "events.npz", "rb") as file, np.load(file, allow_pickle=False) as arrays:
            stamps, offsets = arrays["stamps_ns"] + start_ns, arrays["offsets"]
            lags = arrays["loop_lag_ns"].tolist() if "loop_lag_ns" in arrays else []
        lines = [orjson.loads(line) for line in (path / "requests.jsonl").read_bytes().splitlines()]
        if len(offsets) != len(lines) + 1 or offsets[-1] != len(stamps):
            raise ValueError(f"events.npz is of {len(offsets) - 1} requests, requests.jsonl has {len(lines)}")
        records = tuple(_record(line, stamps[offsets[i] : offsets[i + 1]], start_ns) for i, line in enumerate(lines))
        scrapes: tuple[dict[str, Any], ...] = ()
        if (metrics := path / "server_metrics.jsonl").exists():
            scrapes = tuple(orjson.loads(line) for line in metrics.read_bytes().splitlines())
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    counts = document["counts"]
    names = {field.name for field in fields(ClientUsage)}
    client = {name: value for name, value in document["client"].items() if name in names}
    return Run(
        options=document["options"],
        records=records,
        start_ns=start_ns,
        start_utc=document["start_utc"],
        end_ns=document["end_ns"] + start_ns,
        usage=ClientUsage(**{**client, "notes": tuple(client["notes"]), "loop_lag_ns": tuple(lags)}),
        interrupted=document["interrupted"],
        unfinished=counts["unfinished"],
        skipped=counts["skipped"],
        server=document["server"],
        plan=document["plan"],
        scrapes=tuple({**scrape, "t_ns": scrape["t_ns"] + start_ns} for scrape in scrapes),
    )


def _record(line: Mapping[str, Any], stamps: np.ndarray, start_ns: int) -> RequestRecord:
    failure = line["failure"]
    values: dict[str, Any] = {name: None if line[name] is None else line[name] + start_ns for name in _STAMPS}
    values |= {name: line[name] for name in _PLAIN} | {name: line.get(name) for name in _KEPT_TEXT}
    return RequestRecord(
        id=line["id"],
        phase=Phase(line["phase"]),
        event_stamps_ns=array("q", stamps.astype(np.int64).tobytes()),
        failure=None if failure is None else Failure(**{**failure, "kind": FailureKind(failure["kind"])}),
        tags=line.get("tags", {}),
        **values,
    )

"""Which server: the address, the key, and what the server says of itself before a run.

>>> base_url("localhost:8000/v1/")
'http://localhost:8000'
"""

from __future__ import annotations

import ipaddress
import os
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from loadgen.options import Options, UnusableServer, UsageError
from loadgen.record import FailureKind
from loadgen.transport import Exchange, Target, Timeouts, Transport

PROBE_TIMEOUT_S = 10.0


def base_url(url: str) -> str:
    """The address without a trailing slash and without /v1; http:// is assumed. Raises UsageError."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        port_ok = parts.port is None or 0 < parts.port < 65536
    except ValueError:
        port_ok = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or parts.query or parts.fragment:
        raise UsageError(f"--url must be like http://127.0.0.1:8000 (with or without /v1), not {url!r}")
    if parts.username or parts.password:
        raise UsageError("--url must not carry a user or password: the key is read from OPENAI_API_KEY")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_target(options: Options) -> Target:
    """The Target of these options. The key comes from OPENAI_API_KEY; a --header of the same name wins.

    A proxy of the environment is used for hosts that are not this machine (no_proxy is obeyed), never for loopback.
    """
    url = base_url(options.url)
    headers = dict(options.headers)
    key = os.environ.get("OPENAI_API_KEY")
    if key and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        if any(character in name + value for character in "\r\n\0"):
            raise UsageError(f"--header {name!r}: a header must be one line")
    proxy = None
    if not is_loopback(url) and not urllib.request.proxy_bypass(urlsplit(url).hostname or ""):
        proxy = urllib.request.getproxies().get(urlsplit(url).scheme)
    timeouts = Timeouts(options.connect_timeout_s, options.idle_timeout_s, options.request_timeout_s)
    return Target(url, headers, timeouts, proxy)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself; None where it does not."""

    model: str
    owned_by: str | None = None
    max_model_len: int | None = None
    software: str | None = None  # the Server header
    version: str | None = None
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_token_ids(self) -> bool:
        """vLLM and the reference server take a prompt of token ids on /v1/completions; others may not."""
        return self.owned_by in ("vllm", "loadgen-reference")


async def probe(transport: Transport, options: Options) -> ServerInfo:
    """Ask /v1/models. With --model given a server that does not answer it is taken on trust.

    Raises UnusableServer when there is no server, or no model can be chosen.
    """
    import asyncio

    url = base_url(options.url)
    try:
        answer = await asyncio.wait_for(transport.exchange("GET", "/v1/models", None, b""), PROBE_TIMEOUT_S)
    except TimeoutError:
        answer = None
    models = _models(answer)
    notes: tuple[str, ...] = ()
    software = answer.headers.get("server") if answer else None
    if options.model is not None:
        entry = next((m for m in models if m.get("id") == options.model), None)
        if models and entry is None:
            listed = ", ".join(str(m.get("id")) for m in models[:5])
            notes = (f"--model {options.model} is not among the models that the server lists ({listed})",)
        return _info(options.model, entry or {}, software, await _version(transport, entry), notes)
    if answer is None:
        raise UnusableServer(f"no answer from {url}/v1/models within {PROBE_TIMEOUT_S:g} s: is the server ready?")
    if answer.failure is not None and answer.status is None:
        reason = "nobody listens there" if answer.failure.kind is FailureKind.REFUSED else str(answer.failure)
        raise UnusableServer(f"no server at {url} ({reason}): start one, or give its address with --url")
    if not models:
        said = f"status {answer.status}" if answer.status != 200 else "no model in the list"
        hint = ": set OPENAI_API_KEY" if answer.status in (401, 403) else ": name the model with --model"
        raise UnusableServer(f"{url}/v1/models gave {said}{hint}")
    entry = models[0]
    if len(models) > 1:
        notes = (f"the server lists {len(models)} models; the first, {entry['id']}, is used (--model picks)",)
    return _info(str(entry["id"]), entry, software, await _version(transport, entry), notes)


def _info(
    model: str, entry: dict[str, Any], software: str | None, version: str | None, notes: tuple[str, ...]
) -> ServerInfo:
    length = entry.get("max_model_len")
    owner = entry.get("owned_by")
    return ServerInfo(
        model=model,
        owned_by=owner if isinstance(owner, str) else None,
        max_model_len=length if isinstance(length, int) else None,
        software=software,
        version=version,
        notes=notes,
    )


async def _version(transport: Transport, entry: dict[str, Any] | None) -> str | None:
    """vLLM and the reference server say theirs at /version; others are not asked."""
    if not entry or entry.get("owned_by") not in ("vllm", "loadgen-reference"):
        return None
    answer = await transport.exchange("GET", "/version", None, b"")
    try:
        version = orjson.loads(b"".join(answer.body_pieces()[0])).get("version")
    except (ValueError, AttributeError):
        return None
    return version if isinstance(version, str) else None


def _models(answer: Exchange | None) -> list[dict[str, Any]]:
    if answer is None or answer.status != 200:
        return []
    try:
        data = orjson.loads(b"".join(answer.body_pieces()[0]))["data"]
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    except (ValueError, KeyError, TypeError):
        return []

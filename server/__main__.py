"""The reference server: transformers' own generate behind the OpenAI HTTP contract.

    python -m server --mode serial
    python -m server --mode static --batch-size 8 --batch-wait-ms 50 --port 8001
    python -m server --mode continuous --model PATH_OR_NAME

Without --model it serves the packaged SmolLM2-135M-Instruct. The port is opened first and /health says 503 until the
model is loaded and warm. SIGTERM and Ctrl-C finish what was accepted; a second one stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from server.app import Limits, Service

log = logging.getLogger("server")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"server: {message} (see python -m server --help)\n")
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    p = _Parser(prog="python -m server", description="Reference server: transformers behind the OpenAI HTTP contract.")
    p.add_argument("--model", help="folder or hub name [default: the packaged SmolLM2-135M-Instruct]")
    p.add_argument("--served-model-name", help="name in /v1/models [default: the folder's or hub name]")
    p.add_argument("--mode", choices=("serial", "static", "continuous"), default="serial")
    p.add_argument(
        "--batch-size", type=_at_least(1), default=8, help="static: rows; continuous: most rows [%(default)s]"
    )
    p.add_argument(
        "--batch-wait-ms", type=_at_least(0.0), default=50.0, help="static: wait for a full batch [%(default)s]"
    )
    p.add_argument("--host", default="127.0.0.1", help="[%(default)s: this machine alone]")
    p.add_argument("--port", type=_at_least(0), default=8001, help="0: any free one [%(default)s]")
    p.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="auto: as saved, or float32 where that is faster on this CPU",
    )
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--attn", help="attention of transformers: sdpa, eager, flash_attention_2 [default: its choice]")
    p.add_argument("--no-kv-cache", action="store_true", help="compute all of the sequence anew for every token")
    p.add_argument("--compile", action="store_true", help="torch.compile of the decode step, with a static KV cache")
    p.add_argument("--max-model-len", type=_at_least(2), help="prompt + answer, tokens [default: the model's]")
    p.add_argument("--max-waiting", type=_at_least(1), default=1024, help="requests; more get 429 [%(default)s]")
    p.add_argument("--max-body-mib", type=_at_least(0.001), default=16.0, help="larger bodies get 413 [%(default)s]")
    p.add_argument("--api-key", help="ask for it as a bearer token [default: REFERENCE_API_KEY, else none]")
    p.add_argument(
        "--drain-timeout-s", type=_at_least(0.0), default=60.0, help="time to finish at the end [%(default)s]"
    )
    p.add_argument("--step-delay-ms", type=_at_least(0.0), default=0.0, help="testing comparisons: lengthen every step")
    p.add_argument("--slowdown", type=_at_least(1.0), default=1.0, help="testing comparisons: 1.05 = steps 5 %% longer")
    return p


def main() -> None:
    logging.basicConfig(format="server: %(message)s", level=logging.INFO, stream=sys.stderr)
    args = parser().parse_args()
    if args.no_kv_cache and args.mode == "continuous":
        parser().error("--no-kv-cache has no meaning in continuous mode, whose cache is paged; use serial or static")
    if args.no_kv_cache and args.compile:
        parser().error("--compile needs the KV cache; drop --no-kv-cache")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import uvloop

        status = uvloop.run(serve(args))
    except ImportError:
        status = asyncio.run(serve(args))
    except OSError as error:
        log.error("cannot listen on %s port %d: %s", args.host, args.port, error.strerror or error)
        status = 2
    # Threads of torch and of a batch that did not end in time would keep the process.
    sys.stderr.flush()
    os._exit(status)


async def serve(args: argparse.Namespace) -> int:
    """Open the port, load, serve until a signal, drain. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop)
    service = Service(
        _name(args), [args.model] if args.model else [], args.api_key or os.environ.get("REFERENCE_API_KEY"), args.mode
    )
    max_body_bytes = int(args.max_body_mib * (1 << 20))
    # handler_cancellation: a client that goes away must free its row even while nothing is being written to it
    runner = web.AppRunner(service.application(max_body_bytes), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port, backlog=1024).start()
    address = runner.addresses[0]
    log.info("listening on http://%s:%d, loading the model", args.host, address[1])
    if args.host not in ("127.0.0.1", "::1", "localhost"):
        guarded = "with its API key" if service.api_key else "without a key (see --api-key)"
        log.warning("--host %s: whoever reaches this machine may use the server, %s", args.host, guarded)

    failed: asyncio.Future[str] = loop.create_future()
    thread = threading.Thread(
        target=_generation_thread, args=(args, service, loop, failed, max_body_bytes), name="generation", daemon=True
    )
    thread.start()
    failed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if failed.done():
        log.error("%s", failed.result())
        await runner.cleanup()
        return 2
    await _drain(service, args.drain_timeout_s)
    await runner.cleanup()
    return 0


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(130)
    stop.set()


async def _drain(service: Service, timeout_s: float) -> None:
    """Refuse new requests, let the accepted ones end."""
    service.draining = True
    engine = service.engine
    if engine is None:
        return
    log.info("stopping: %d requests to finish (at most %g s)", engine.num_unfinished, timeout_s)
    deadline = time.monotonic() + timeout_s
    engine.close()
    while (service.num_open or engine.num_unfinished) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    if engine.num_unfinished:
        log.warning("%d requests were not finished", engine.num_unfinished)


def _generation_thread(
    args: argparse.Namespace,
    service: Service,
    loop: asyncio.AbstractEventLoop,
    failed: asyncio.Future[str],
    max_body_bytes: int,
) -> None:
    """Load, warm up, generate until the process ends."""
    begin = time.monotonic()

    def fail(message: str) -> None:
        loop.call_soon_threadsafe(failed.set_result, message)

    try:
        if args.model is None:
            from server.packaged_model import packaged_model

            args.model = str(packaged_model())
        if Path(args.model).exists():
            os.environ["HF_HUB_OFFLINE"] = "1"
        from server.generate import LoadOptions, UnusableModel, make_engine
    except (ImportError, FileNotFoundError) as error:
        return fail(f"{error} (bash setup.sh installs what the server needs)")
    try:
        options = LoadOptions(
            model=args.model,
            dtype=args.dtype,
            device=args.device,
            attn=args.attn,
            kv_cache=not args.no_kv_cache,
            compile=args.compile,
            step_delay_s=args.step_delay_ms / 1e3,
            slowdown=args.slowdown,
        )
        engine, model, limit = make_engine(
            options,
            service.deliver,
            args.mode,
            args.batch_size,
            args.batch_wait_ms / 1e3,
            args.max_waiting,
            args.max_model_len,
        )
    except UnusableModel as error:
        return fail(str(error))
    except Exception as error:
        log.exception("the model could not be started")
        return fail(f"the model could not be started: {type(error).__name__}: {error}")

    def ready() -> None:
        service.start(engine, model, Limits(limit, max_body_bytes))
        log.info(
            "ready: %s, %s on %s, %s, in %.1f s",
            service.model_name,
            args.mode,
            model.device,
            str(model.model.dtype).removeprefix("torch."),
            time.monotonic() - begin,
        )

    loop.call_soon_threadsafe(ready)
    engine.run()


def _name(args: argparse.Namespace) -> str:
    if args.served_model_name:
        return str(args.served_model_name)
    if args.model is None:
        from server.packaged_model import NAME

        return NAME
    path = Path(args.model)
    return path.resolve().name if path.exists() else str(args.model)


def _at_least(low: int | float) -> Callable[[str], int | float]:
    """A number of low's type, low or more."""

    def number(text: str) -> int | float:
        try:
            value = type(low)(text)
        except ValueError:
            value = float("nan")
        if not value >= low:
            kind = "a whole number" if isinstance(low, int) else "a number"
            raise argparse.ArgumentTypeError(f"must be {kind} of at least {low:g}, got {text!r}")
        return value

    return number


if __name__ == "__main__":
    main()

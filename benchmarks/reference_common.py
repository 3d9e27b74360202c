"""What the benchmarks of the reference server share: a server process, prompts, a plain HTTP client, a bare model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_TEXTS = [
    "The capital of France is", "Write a short story about a lighthouse keeper who", "def fibonacci(n):\n    ",
    "日本の首都は", "La recette de la tarte aux pommes commence par", "🚀 Rockets fly because",
    "Once upon a time, in a village by the sea,", "The three laws of thermodynamics are", "Der Himmel ist blau, weil",
    "SELECT name, age FROM people WHERE", "List five emoji and what they mean: 😀", "请用一句话介绍北京:",
    "In 1969, two astronauts", "To bake bread you need flour, water,", "A haiku about autumn:\n",
    "안녕하세요. 오늘 날씨는",
]  # fmt: skip


def prompts(count: int) -> list[str]:
    """Different texts of different lengths, CJK and emoji among them."""
    return [
        f"{_TEXTS[i % len(_TEXTS)]}{' Number ' + str(i // len(_TEXTS)) if i >= len(_TEXTS) else ''}"
        for i in range(count)
    ]


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """The address of a server process that is ready."""
    with server_process(*flags) as (_, url):
        yield url


@contextlib.contextmanager
def server_process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "--port", "0", *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True,
        env={**os.environ},
    )  # fmt: skip
    assert process.stderr is not None
    seen = ""
    try:
        for line in process.stderr:
            seen += line
            if "ready:" in line:
                break
        else:
            raise SystemExit(f"the server did not start:\n{seen}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        found = re.search(r"http://[\d.]+:\d+", seen)
        assert found is not None
        yield process, found[0]
    finally:
        process.terminate()
        process.wait(30)


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    """One streamed request, as raw bytes."""
    async with session.post(url, json={**body, "stream": True}) as response:
        raw = await response.read()
        if response.status != 200 or not raw.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"status {response.status}: {raw[-300:]!r}")
        return raw


def events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in raw.decode().split("\n\n") if part and part != "data: [DONE]"]


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {answer}")
        return answer


async def in_turn(limit: int, jobs: list[Any]) -> list[Any]:
    """Await coroutines, at most `limit` at once, in order."""
    slots = asyncio.Semaphore(limit)

    async def one(job: Any) -> Any:
        async with slots:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


class Bare:
    """transformers without a server: what a user writes in ten lines."""

    def __init__(self, dtype: str = "auto", folder: str | None = None) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from server.machine import device_of, fast_dtype, saved_dtype
        from server.packaged_model import packaged_model

        self.torch = torch
        self.folder = folder or str(packaged_model())
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        saved, device = saved_dtype(AutoConfig.from_pretrained(self.folder)), device_of("auto")
        self.model = (
            AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=fast_dtype(saved, device) if dtype == "auto" else getattr(torch, dtype)
            )
            .to(device)
            .eval()
        )

    def generate(self, texts: list[str], tokens: int) -> list[list[int]]:
        """Greedy, exactly so many tokens, eos or not."""
        inputs = self.tokenizer(texts, return_tensors="pt", padding=len(texts) > 1).to(self.model.device)
        out = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return [row[inputs["input_ids"].shape[1] :].tolist() for row in out]

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

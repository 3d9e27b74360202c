"""What the tests of the server share: a tiny random model made on the fly, and a served fake model."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from server.app import Limits, Service
from server.engine import Engine
from server.fake_model import FakeModel

EOS_ID = 256


@functools.cache
def tiny_model(pad: bool = False, eos: tuple[int, ...] = (EOS_ID,), name: str = "tiny") -> Path:
    """A folder with a random float32 Llama of 64 dimensions and a tokenizer whose ids are byte values; 256 is eos.

    Its greedy text is gibberish that soon repeats, and hardly ever eos: what counts is that it is the same.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="tiny-")) / name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    alphabet = _byte_alphabet()
    backend = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>"} | ({"pad_token": "<pad>"} if pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=list(eos),
            pad_token_id=None,
        )
    )
    # Random weights of the usual size give nearly equal logits; larger ones make greedy choices that differ by prompt.
    for weight in model.parameters():
        weight.data.mul_(4.0)
    model.generation_config = GenerationConfig(eos_token_id=list(eos))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte, as the ByteLevel pre-tokenizer uses it."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}


class Served:
    """A model behind HTTP on a port of loopback."""

    def __init__(self, url: str, service: Service, engine: Engine) -> None:
        self.url, self.service, self.engine = url, service, engine

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that must come; the test's own timeout is the limit."""
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def serving(
    model: Any, *, api_key: str | None = None, max_len: int = 4096, **engine: Any
) -> AsyncIterator[Served]:
    service = Service("fake", api_key=api_key)
    runner = web.AppRunner(service.application(1 << 19), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = Engine(model, service.deliver, **engine)
    service.start(made, model, Limits(max_len, 1 << 19))
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{runner.addresses[0][1]}", service, made)
    finally:
        if isinstance(gate := getattr(model, "sleep", None), Gate):
            gate.open(10_000)  # a test that failed must not wait for its model for ever
        made.close()
        await asyncio.to_thread(thread.join)
        await runner.cleanup()


class Gate:
    """A fake model's sleep that waits for a permit a forward pass: the test decides how far generation goes."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        self._permits.acquire()

    def open(self, steps: int) -> None:
        self._permits.release(steps)


def fake(script: str | Callable[[Any], str], **options: Any) -> FakeModel:
    return FakeModel(script if callable(script) else lambda request: script, **options)

"""A model for tests: chosen tokens, chosen step times on a clock of its own, no weights, no GPU.

    clock = FakeClock()
    model = FakeModel({"a": "hello"}, clock, prefill_s=0.1, step_s=0.05)

Tokens are byte values, 256 is eos: the text of a request is its script, then eos for ever (dead rows get eos too).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.engine import OnStep, Request, Sampling

EOS = 256


@dataclass(slots=True)
class FakeClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeModel:
    """scripts: request id -> text. fail_at: (request id, step) at which generate raises. sleep: how time passes."""

    vocab_size = EOS + 1
    eos_ids = frozenset({EOS})
    kv_bytes_per_token = 2

    def __init__(
        self,
        scripts: Mapping[str, str] | Callable[[Request], str],
        sleep: Callable[[float], None] = time.sleep,
        prefill_s: float = 0.0,
        step_s: float = 0.0,
        fail_at: tuple[str, int] | None = None,
    ) -> None:
        self.scripts = scripts
        self.sleep = sleep
        self.prefill_s = prefill_s
        self.step_s = step_s
        self.fail_at = fail_at
        self.batches: list[list[str]] = []  # request ids of every batch
        self.num_forwards = 0

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < EOS).decode("utf-8", "replace")

    def refusal(self, sampling: Sampling, constrained: bool) -> str | None:
        return "this fake model has no constraints" if constrained else None

    def constrain(self, kind: str, value: Any) -> Any:
        raise ValueError(f"this fake model has no {kind}")

    def constrain_tools(self, tools: Sequence[dict[str, Any]], choice: str) -> Any:
        return None

    def generate(self, requests: Sequence[Request], on_step: OnStep) -> None:
        self.batches.append([request.id for request in requests])
        scripts = [list(self._script(request).encode()) for request in requests]
        step = 0
        while True:
            for request in requests:
                if (request.id, step) == self.fail_at:
                    raise RuntimeError("the script says so")
            self.sleep(self.step_s if step else self.prefill_s)
            self.num_forwards += 1
            tokens = [script[step] if step < len(script) else EOS for script in scripts]
            step += 1
            if all(on_step(tokens)):
                return

    def _script(self, request: Request) -> str:
        return self.scripts(request) if callable(self.scripts) else self.scripts[request.id]

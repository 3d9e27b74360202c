"""transformers behind the engine's Model interface: load, tokenize, generate. The one file that knows torch.

Generation is transformers' own: `model.generate` with a StoppingCriteria that hands every new token to the engine
and returns which rows are over. A greedy request adds nothing else to it. Sampling, min_tokens and constraints are a
LogitsProcessor that works row by row: it leaves one token possible, and generate's argmax takes it.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A local folder must never become a question to a hub; set before transformers reads it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)

from server.constrain import Constrainer, Constraint
from server.engine import Engine, OnStep, Output, Request, Sampling, State

log = logging.getLogger("server")


class UnusableModel(Exception):
    """The model cannot be loaded: one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    model: str  # folder or hub name
    dtype: str = "auto"  # auto (as saved), bfloat16, float16, float32
    device: str = "auto"  # auto, cpu, cuda
    attn: str | None = None  # None: transformers' choice; sdpa, eager, flash_attention_2, ...
    kv_cache: bool = True
    compile: bool = False
    step_delay_s: float = 0.0  # for testing comparisons: every step takes so much longer
    slowdown: float = 1.0  # for testing comparisons: every step takes so many times as long


class TransformersModel:
    """A causal language model with its tokenizer."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.device = _device(options.device)
        folder = Path(options.model)
        if (folder.exists() or options.model.startswith((".", "/", "~"))) and not (folder / "config.json").is_file():
            raise UnusableModel(f"--model {options.model}: no config.json there; give a model's folder or a hub name")
        try:
            self.config = AutoConfig.from_pretrained(options.model)
            self.tokenizer = AutoTokenizer.from_pretrained(options.model)
            self.model = AutoModelForCausalLM.from_pretrained(
                options.model,
                dtype=options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
                attn_implementation=options.attn,
            )
        except Exception as error:  # any of transformers', safetensors', the hub's
            reason = " ".join(str(error).split())[:300]
            raise UnusableModel(f"--model {options.model}: {type(error).__name__}: {reason}") from error
        self.model.to(self.device).eval()
        # Two, because encoding (event loop) and decoding (generation thread) of one fast tokenizer may collide.
        self._decoder = copy.deepcopy(self.tokenizer)
        self._backend = getattr(self._decoder, "backend_tokenizer", None) if self._decoder.is_fast else None

        self._lock = threading.Lock()
        self._made_constrainer: Constrainer | None = None
        text = self.config.get_text_config()
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self.max_positions: int = getattr(text, "max_position_embeddings", None) or 2048
        self.eos_ids = _eos_ids(self.model, self.tokenizer)
        self.pad_id = _pad_id(self.tokenizer, self.eos_ids, self.vocab_size)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        per_token = 2 * text.num_hidden_layers * kv_heads * head_dim * self.model.dtype.itemsize
        self.kv_bytes_per_token: int = per_token if options.kv_cache else 0
        self.weight_bytes: int = sum(p.numel() * p.element_size() for p in self.model.parameters())
        # What the model's authors advise (sampling, penalties) must not change what a request asks for.
        self.model.generation_config = GenerationConfig(pad_token_id=self.pad_id)

    # text

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Raises ValueError when there is no chat template, or it refuses these messages."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("this model's tokenizer has no chat template: use /v1/completions")
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # jinja's own, and what templates raise
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return self.encode(str(text), special=False)

    def decode(self, ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=True))
        return str(self._decoder.decode(ids, skip_special_tokens=True))

    # constraints

    def refusal(self, sampling: Sampling, constrained: bool) -> str | None:
        return None

    def constrain(self, kind: str, value: Any) -> Constraint:
        return self._constrainer().compile(kind, value)

    def constrain_tools(self, tools: Sequence[dict[str, Any]], choice: str) -> Constraint:
        return self._constrainer().compile_tools(tools, choice)

    def _constrainer(self) -> Constrainer:
        """Made at the first use: reading the vocabulary takes a moment that most runs need not pay."""
        with self._lock:
            if self._made_constrainer is None:
                try:
                    self._made_constrainer = Constrainer(self.tokenizer, self.vocab_size, self.eos_ids)
                except Exception as error:
                    raise ValueError(f"xgrammar cannot use this model's tokenizer: {error}") from error
            return self._made_constrainer

    # generation

    def generate(self, requests: Sequence[Request], on_step: OnStep) -> None:
        longest = max(len(request.prompt_ids) for request in requests)
        rows = [[self.pad_id] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in requests]
        mask = [[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
        processors = [RowProcessor(requests, self)] if any(needs_processor(r) for r in requests) else []
        self.model.generate(
            torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(request.sampling.max_tokens for request in requests),
                pad_token_id=self.pad_id,
                use_cache=self.options.kv_cache,
            ),
            stopping_criteria=[RowWatcher(requests, self._slowed(on_step))],
            logits_processor=processors,
        )

    def _slowed(self, on_step: OnStep) -> OnStep:
        delay_s, slowdown = self.options.step_delay_s, self.options.slowdown
        if not delay_s and slowdown == 1.0:
            return on_step
        last_s = time.perf_counter()

        def slowed(tokens: Sequence[int]) -> Sequence[bool]:
            nonlocal last_s
            time.sleep(delay_s + (slowdown - 1) * (time.perf_counter() - last_s))
            last_s = time.perf_counter()
            return on_step(tokens)

        return slowed


def make_engine(
    model: TransformersModel,
    deliver: Callable[[list[Output]], None],
    mode: str,
    batch_size: int,
    batch_wait_s: float,
    max_waiting: int,
    max_model_len: int,
) -> Engine:
    """The engine of a mode, with the gauges that only a real model has."""
    if mode == "serial":
        batch_size = 1
    engine = Engine(model, deliver, batch_size, batch_wait_s, max_waiting)
    engine.accounting.gauges["reference_kv_bytes_per_token"] = model.kv_bytes_per_token
    engine.accounting.gauges["reference_model_weight_bytes"] = model.weight_bytes
    return engine


def warm_up(engine: Engine, mode: str, max_model_len: int) -> None:
    """Pay the first-use costs of every batch width (kernels, memory) before the first request does."""
    deliver, engine._deliver = engine._deliver, lambda outputs: None
    prompt = [engine.model.pad_id] * min(16, max_model_len - 1)
    wait_s, engine.batch_wait_s = engine.batch_wait_s, 0.0
    for width in range(engine.batch_size, 0, -1):
        for i in range(width):
            engine.add_request(Request(f"warm-up-{i}", prompt, Sampling(max_tokens=4, ignore_eos=True)))
        engine.step()
    engine._deliver, engine.batch_wait_s = deliver, wait_s
    engine.accounting.reset()


class RowWatcher(StoppingCriteria):  # type: ignore[misc]
    """Shows the engine each row's newest token; true for the rows that are over."""

    def __init__(self, requests: Sequence[Request], on_step: OnStep) -> None:
        self.on_step = on_step
        # generate looks for this name: with it, rows that are over are fed padding. No token is compared to it here.
        self.eos_token_id: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        over = self.on_step(input_ids[:, -1].tolist())
        return torch.tensor(over, dtype=torch.bool, device=input_ids.device)


def needs_processor(request: Request) -> bool:
    sampling = request.sampling
    return sampling.temperature > 0 or sampling.min_tokens > 0 or request.constraint is not None


class RowProcessor(LogitsProcessor):  # type: ignore[misc]
    """Per row: the constraint's mask, no eos before min_tokens, and sampling by a generator of the row's own."""

    def __init__(self, requests: Sequence[Request], model: TransformersModel) -> None:
        self.rows = [_RowSampler(request, model) for request in requests]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, sampler in enumerate(self.rows):
            if sampler.active:
                sampler(scores[row])
        return scores


class _RowSampler:
    def __init__(self, request: Request, model: TransformersModel) -> None:
        self.request = request
        self.needed = needs_processor(request)
        self.stops = [*model.eos_ids, *request.sampling.stop_token_ids]
        self.matcher = request.constraint.matcher() if request.constraint is not None else None
        self.num_matched = 0
        self.generator: torch.Generator | None = None
        if request.sampling.temperature > 0:
            self.generator = torch.Generator(device="cpu")
            seed = request.sampling.seed
            self.generator.manual_seed(int.from_bytes(os.urandom(8)) >> 1 if seed is None else seed)

    @property
    def active(self) -> bool:
        return self.needed and self.request.state is not State.DONE

    def __call__(self, scores: torch.Tensor) -> None:
        """Change one row of float32 logits, shape (vocabulary,), in place."""
        request, sampling = self.request, self.request.sampling
        if self.matcher is not None:
            for token in request.output_ids[self.num_matched :]:
                self.matcher.accept(token)
            self.num_matched = len(request.output_ids)
            self.matcher.mask(scores)
        elif len(request.output_ids) < sampling.min_tokens and self.stops:
            scores[self.stops] = -torch.inf
        if self.generator is not None:
            chosen = sample(scores, sampling.temperature, sampling.top_k, sampling.top_p, self.generator)
            scores.fill_(-torch.inf)
            scores[chosen] = 0.0


def sample(scores: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """Draw a token from logits of shape (vocabulary,): temperature, then top-k, then top-p, as transformers orders
    its warpers. The draw is on the CPU, so that a seed gives the same tokens on every device."""
    scores = scores.float().cpu() / temperature
    if 0 < top_k < scores.numel():
        scores = scores.masked_fill(scores < torch.topk(scores, top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(scores, dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        kept = ordered.cumsum(0) - ordered < top_p  # the smallest set that reaches top_p
        probabilities = torch.zeros_like(probabilities).scatter_(0, order[kept], ordered[kept])
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UnusableModel("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return torch.device(name)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end an answer: the model's (one or a list) and the tokenizer's."""
    found: set[int] = set()
    for ids in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _pad_id(tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> int:
    """An id the model has, for padding that the attention mask hides: never a new one."""
    for candidate in (tokenizer.pad_token_id, *sorted(eos_ids)):
        if candidate is not None and 0 <= candidate < vocab_size:
            return int(candidate)
    return 0

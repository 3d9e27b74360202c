"""transformers behind the engine's Model interface: load, tokenize, generate. The one file that knows torch.

Generation is transformers' own: `model.generate` with a StoppingCriteria that hands every new token to the engine
and returns which rows are over. A greedy request adds nothing else to it. Sampling, min_tokens and constraints are a
LogitsProcessor that works row by row: it leaves one token possible, and generate's argmax takes it.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.requests import RequestStatus

from server.constrain import Constrainer, Constraint
from server.engine import (
    ContinuousEngine,
    Engine,
    OnStep,
    Output,
    Request,
    Sampling,
    StepItem,
)
from server.machine import device_of, fast_dtype, saved_dtype

log = logging.getLogger("server")
CACHE_STEP = 256  # tokens: with --compile the static KV cache is as long as a multiple of this
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)  # it tells every choice it makes


class UnusableModel(Exception):
    """The model cannot be loaded: one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    model: str  # folder or hub name
    dtype: str = "auto"  # auto (as saved, if that is fast here), bfloat16, float16, float32
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
                dtype=self._dtype(),
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
        self._compiled: dict[str, Any] = {}
        if options.compile:
            config = CompileConfig(mode="reduce-overhead" if self.device.type == "cuda" else "default")
            config._compile_all_devices = True  # transformers compiles on accelerators alone otherwise
            self._compiled = {"cache_implementation": "static", "compile_config": config}
        # What the model's authors advise (sampling, penalties) must not change what a request asks for.
        self.model.generation_config = GenerationConfig(pad_token_id=self.pad_id)

    def _dtype(self) -> torch.dtype:
        if self.options.dtype != "auto":
            return getattr(torch, self.options.dtype)
        saved = saved_dtype(self.config.get_text_config())
        dtype = fast_dtype(saved, self.device.type)
        if dtype != saved:
            log.info("%s instead of %s, which is slow on this CPU (--dtype decides)", dtype, saved)
        return dtype

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
        max_new_tokens = max(request.sampling.max_tokens for request in requests)
        if self.options.compile:  # shapes decide what is compiled: few of them
            max_new_tokens = -(-(longest + max_new_tokens) // CACHE_STEP) * CACHE_STEP - longest
        self.model.generate(
            torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.pad_id,
                use_cache=self.options.kv_cache,
                **self._compiled,
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
    options: LoadOptions,
    deliver: Callable[[list[Output]], None],
    mode: str,
    batch_size: int,
    batch_wait_s: float,
    max_waiting: int,
    max_model_len: int | None,
) -> tuple[Engine | ContinuousEngine, TransformersModel, int]:
    """Load the model and make the engine of a mode, warm: (engine, model, longest prompt + answer in tokens).

    Raises UnusableModel.
    """
    model = PagedModel(options, batch_size) if mode == "continuous" else TransformersModel(options)
    limit = max_model_len or model.max_positions
    if limit > model.max_positions:
        raise UnusableModel(f"--max-model-len {limit}: this model has at most {model.max_positions} positions")
    engine: Engine | ContinuousEngine
    if isinstance(model, PagedModel):
        model.max_model_len = limit
        engine = ContinuousEngine(model, deliver, batch_size, max_waiting)
    else:
        engine = Engine(model, deliver, batch_size if mode == "static" else 1, batch_wait_s, max_waiting)
    engine.accounting.gauges["reference_kv_bytes_per_token"] = model.kv_bytes_per_token
    engine.accounting.gauges["reference_model_weight_bytes"] = model.weight_bytes
    engine.warm_up([model.pad_id] * min(16, limit - 4) or [model.pad_id])
    return engine, model, limit


class PagedModel(TransformersModel):
    """transformers' continuous batching: its manager schedules in a thread of its own over a paged KV cache.

    Where it runs CUDA graphs or a step ahead of its own results (flash attention on a GPU), tokens cannot be chosen
    row by row: there it is greedy, and sampling, min_tokens and constraints are refused.
    """

    page_tokens = 256  # transformers' default
    max_batch_tokens = 512  # a longer prompt is prefilled in pieces of so many
    cpu_cache_tokens = 65536  # on the CPU transformers would take nine tenths of the memory

    def __init__(self, options: LoadOptions, batch_size: int) -> None:
        super().__init__(options)
        self.batch_size = batch_size
        self.max_model_len = self.max_positions
        self._requests: dict[str, Request] = {}
        self._manager: Any = None
        self._by_row = True

    def start(self, on_step: Callable[[Sequence[StepItem]], None]) -> None:
        self._on_step = on_step
        self._start_manager()

    def submit(self, request: Request) -> None:
        if not self._manager.is_running():  # it ends with the first error of a forward pass, having failed all requests
            self._start_manager()
        sampling = request.sampling
        stops = [] if sampling.ignore_eos and request.constraint is None else [*self.eos_ids]
        self._requests[request.id] = request
        self._manager.add_request(
            request.prompt_ids,
            request_id=request.id,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=[*stops, *sampling.stop_token_ids] or -1,
        )

    def cancel(self, request: Request) -> None:
        if self._requests.pop(request.id, None) is not None:
            self._manager.cancel_request(request.id)

    def stop(self) -> None:
        self._manager.stop(block=True, timeout=10, hard_stop=True)

    def refusal(self, sampling: Sampling, constrained: bool) -> str | None:
        if self._by_row or not (sampling.temperature > 0 or sampling.min_tokens or constrained):
            return None
        return "this server's continuous mode is greedy here: temperature must be 0, without min_tokens or constraints"

    def _start_manager(self) -> None:
        if "page_size" not in inspect.signature(ContinuousBatchingConfig).parameters:
            raise UnusableModel(
                f"--mode continuous needs transformers 5.19 or later, this is {transformers.__version__}"
            )
        on_cpu = self.device.type == "cpu"
        pages = -(-max(self.cpu_cache_tokens, self.max_model_len) // self.page_tokens)
        self._manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=self.pad_id),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self.page_tokens,
                num_blocks=pages if on_cpu else None,
                max_batch_tokens=self.max_batch_tokens if on_cpu else None,
                max_requests_per_batch=self.batch_size,
                default_compile_level=1 if self.options.compile else 0,
                auto_switch_to_flash=self.options.attn is None,
            ),
        )
        config = self._manager.continuous_batching_config
        self._by_row = not (config.use_async_batching or any(config.cuda_graph_booleans))
        if self._by_row:
            processors = self._manager.logit_processor
            processors.logits_processor.append(_ContinuousRows(self, self._requests))
            processors.tensors_required += 1
            processors.do_processing = True
        self._manager.output_router = _StepRouter(self._step)
        self._manager.warmup()
        self._manager.start()

    def _step(self, outputs: Sequence[Any]) -> None:
        items: list[StepItem] = []
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is not None:
                new = output.generated_tokens[len(request.output_ids) :]
                items.append((request, new, f"generation failed: {output.error}" if output.error else None))
                if output.is_finished():
                    self._requests.pop(request.id, None)
        self._on_step(items)


class _StepRouter:
    """In the place of the manager's OutputRouter: hands on what one step produced as one call, in its thread."""

    def __init__(self, step: Callable[[Sequence[Any]], None]) -> None:
        self.output_queue: queue.Queue[Any] = queue.Queue()  # the manager looks at it; nothing is ever put in
        self._step = step

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        self._step(outputs)

    def deliver(self, output: Any) -> None:
        self._step([output])

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        state.error = str(error)
        self.deliver(state.to_generation_output())


class _ContinuousRows(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """RowProcessor for rows that come and go."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, model: TransformersModel, requests: dict[str, Request]) -> None:
        self.model = model
        self.requests = requests
        self.samplers: dict[Request, _RowSampler] = {}
        self.rows: list[_RowSampler | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Called before each step with its rows in order: the moment to learn which row is whose."""
        rows = [self.requests.get(row.state.request_id) for row in requests_with_new_token]
        self.samplers = {
            request: self.samplers.get(request) or _RowSampler(request, self.model)
            for request in rows
            if request is not None and needs_processor(request)
        }
        self.rows = [self.samplers.get(request) if request is not None else None for request in rows]
        return torch.zeros(len(rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        for row, sampler in enumerate(self.rows):
            if sampler is not None and sampler.active:
                sampler(scores[row])
        return scores


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
        return self.needed and not self.request.over

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
    name = device_of(name)
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

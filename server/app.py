"""HTTP in, HTTP out: routes, checks, server-sent events. Generation happens in one thread, behind the engine.

A request's life: body -> schema.Wish -> prompt ids -> engine.Request -> the engine's queue; each step of the
generation thread crosses to the event loop once, with all of its outputs; each output becomes one event.
A client that goes away cancels its handler, which aborts its rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from server import __version__, schema, tool_calls
from server.engine import ContinuousEngine, Engine, Output, QueueFull, Request, Sampling
from server.schema import JSON, ApiError, Wish
from server.tool_calls import ToolCallReader

log = logging.getLogger("server")
COMPILE_TIMEOUT_S = 30
LONG_TEXT = 20_000  # characters from which on tokenizing leaves the event loop


class Tokenizer(Protocol):
    """What the HTTP side needs of a model."""

    vocab_size: int

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def encode_chat(self, messages: list[JSON], tools: list[JSON] | None = None) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...

    def refusal(self, sampling: Sampling, constrained: bool) -> str | None:
        """Why this mode cannot do that, None when it can."""

    def constrain(self, kind: str, value: Any) -> Any:
        """A compiled constraint; raises ValueError with the reason."""

    def constrain_tools(self, tools: Sequence[JSON], choice: str) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    max_model_len: int  # prompt + answer, tokens
    max_body_bytes: int = 16 << 20


class Service:
    """One model behind HTTP. Until start() it answers 503; after stop() new requests get 503."""

    def __init__(self, model_name: str, aliases: Sequence[str] = (), api_key: str | None = None, mode: str = "serial"):
        self.model_name = model_name
        self.aliases = {model_name, *aliases}
        self.api_key = api_key
        self.mode = mode
        self.created = int(time.time())
        self.engine: Engine | ContinuousEngine | None = None
        self.draining = False
        self._mailboxes: dict[Request, asyncio.Queue[Output]] = {}

    def start(self, engine: Engine | ContinuousEngine, tokenizer: Tokenizer, limits: Limits) -> None:
        """Be ready: called on the event loop once the model is loaded and warm."""
        self.engine, self.tokenizer, self.limits = engine, tokenizer, limits
        self._loop = asyncio.get_running_loop()

    @property
    def num_open(self) -> int:
        """Requests whose answers are not written yet."""
        return len(self._mailboxes)

    def deliver(self, outputs: list[Output]) -> None:
        """From the generation thread to the event loop: one crossing a step."""
        if outputs:
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request)
            if mailbox is not None:
                mailbox.put_nowait(output)

    def application(self, max_body_bytes: int) -> web.Application:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/version", self.version),
                web.get("/metrics", self.metrics),
                web.get("/debug/batches", self.batches),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Keys in, error objects out."""
        try:
            if self.api_key is not None and request.path not in ("/health", "/metrics", "/version"):
                given = request.headers.get("Authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
                    raise ApiError("the API key is missing or wrong", 401, "AuthenticationError")
            return await handler(request)
        except ApiError as error:
            return _json(error.body(), error.status)
        except QueueFull as error:
            return _json(ApiError(str(error), 429, "RateLimitError").body(), 429, {"Retry-After": "1"})
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body is larger than {self.limits.max_body_bytes} bytes (--max-body-mib)"
            return _json(ApiError(limit, 413, "RequestEntityTooLarge").body(), 413)
        except web.HTTPException as error:
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            return _json(
                ApiError(f"{request.method} {request.path}: {error.reason}", error.status, kind).body(), error.status
            )
        except ConnectionError:  # the client went away while we wrote: nobody is left to answer
            raise
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            return _json(ApiError(f"{type(error).__name__}: {error}", 500, "InternalServerError").body(), 500)

    # the small endpoints

    async def health(self, http: web.Request) -> web.Response:
        """200 once warm; 503 while loading and while draining."""
        state = "draining" if self.draining else "ready" if self.engine is not None else "loading"
        return _json({"status": state}, 200 if state == "ready" else 503)

    async def models(self, http: web.Request) -> web.Response:
        self._ready()
        card = {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "loadgen-reference",
            "root": self.model_name,
            "parent": None,
            "max_model_len": self.limits.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def version(self, http: web.Request) -> web.Response:
        return _json({"version": f"{__version__} {self.mode}"})

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=self._ready().accounting.prometheus(), content_type="text/plain")

    async def batches(self, http: web.Request) -> web.Response:
        engine = self._ready()
        records = engine.accounting.records()
        return _json({"mode": self.mode, "width": engine.batch_size, "batches": records})

    async def tokenize(self, http: web.Request) -> web.Response:
        self._ready()
        body = await _body(http)
        if "messages" in body:
            wish = schema.parse_chat({"messages": body["messages"], "tools": body.get("tools")})
            ids = await self._encode_chat(wish)
        elif isinstance(body.get("prompt"), str):
            ids = await self._encode(body["prompt"], body.get("add_special_tokens", True) is not False)
        else:
            raise ApiError("give a prompt (text) or messages", param="prompt")
        return _json({"count": len(ids), "max_model_len": self.limits.max_model_len, "tokens": ids, "token_strs": None})

    async def detokenize(self, http: web.Request) -> web.Response:
        self._ready()
        ids = (await _body(http)).get("tokens")
        if not isinstance(ids, list):
            raise ApiError("tokens must be a list of token ids", param="tokens")
        self._check_ids(ids)
        return _json({"prompt": self.tokenizer.decode(ids)})

    # the two that generate

    async def completions(self, http: web.Request) -> web.StreamResponse:
        self._ready()
        wish = schema.parse_completion(await _body(http))
        self._check_model(wish.model)
        prompts = []
        for prompt in wish.prompts:
            if isinstance(prompt, str):
                prompts.append(await self._encode(prompt, wish.special_tokens))
            else:
                self._check_ids(prompt)
                prompts.append(prompt)
        return await self._answer(http, wish, prompts)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        self._ready()
        wish = schema.parse_chat(await _body(http))
        self._check_model(wish.model)
        return await self._answer(http, wish, [await self._encode_chat(wish)])

    async def _answer(self, http: web.Request, wish: Wish, prompts: list[list[int]]) -> web.StreamResponse:
        engine = self._ready()
        constraint = await self._constraint(wish)
        if refusal := self.tokenizer.refusal(wish.sampling, constraint is not None):
            raise ApiError(refusal)
        answer_id = f"{'chatcmpl' if wish.chat else 'cmpl'}-{http.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        requests = [
            Request(
                id=f"{answer_id}-{i}",
                prompt_ids=ids,
                sampling=dataclasses.replace(wish.sampling, max_tokens=self._max_tokens(wish, ids)),
                constraint=constraint,
            )
            for i, ids in enumerate(prompts)
        ]
        mailbox: asyncio.Queue[Output] = asyncio.Queue()
        self._mailboxes.update(dict.fromkeys(requests, mailbox))
        try:
            for request in requests:
                engine.add_request(request)
            respond = self._stream if wish.stream else self._whole
            return await respond(http, wish, answer_id, requests, mailbox)
        finally:
            for request in requests:
                if not request.over:
                    engine.abort(request)
                self._mailboxes.pop(request, None)

    async def _whole(
        self, http: web.Request, wish: Wish, answer_id: str, requests: list[Request], mailbox: asyncio.Queue[Output]
    ) -> web.Response:
        texts = dict.fromkeys(requests, "")
        left = len(requests)
        while left:
            output = await mailbox.get()
            if output.error is not None:
                raise ApiError(output.error, 500, "InternalServerError")
            texts[output.request] += output.text
            left -= output.last
        answer = schema.head(answer_id, wish.chat, self.model_name, chunk=False)
        if wish.chat:
            reader = ToolCallReader(wish.tool_choice)
            message = tool_calls.message(reader.push(texts[requests[0]]) + reader.finish())
            reason = reader.finish_reason(requests[0].finish_reason or "stop")
            answer["choices"] = [schema.message_choice(message, reason, requests[0].stop_reason)]
        else:
            answer["choices"] = [
                schema.text_choice(i, texts[request], request.finish_reason, request.stop_reason)
                for i, request in enumerate(requests)
            ]
        answer["usage"] = _usage(requests)
        return _json(answer)

    async def _stream(
        self, http: web.Request, wish: Wish, answer_id: str, requests: list[Request], mailbox: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        """One event an output that has text or ends the answer; then the usage, then [DONE]."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        head = schema.head(answer_id, wish.chat, self.model_name, chunk=True)
        index = {request: i for i, request in enumerate(requests)}
        left = len(requests)
        reader = ToolCallReader(wish.tool_choice) if wish.chat else None
        # The role comes with the first token, as from vLLM: before it there is nothing to say.
        role = schema.delta_choice({"role": "assistant", "content": ""}, None)
        first: list[JSON] = [{**head, "choices": [role]}] if wish.chat else []
        while left:
            output = await mailbox.get()
            left -= output.last
            events, first = first, []
            if output.error is not None:
                events.append(ApiError(output.error, 500, "InternalServerError").body())
                left = 0
            elif reader is not None:
                events += [{**head, "choices": [choice]} for choice in _deltas(reader, output)]
            elif output.text or output.last:
                stop_reason = output.request.stop_reason if output.last else None
                choice = schema.text_choice(index[output.request], output.text, output.finish_reason, stop_reason)
                events.append({**head, "choices": [choice]})
            if wish.usage_in_every_chunk:
                for event in events:
                    event["usage"] = schema.usage(len(output.request.prompt_ids), output.num_tokens)
            if events:
                await response.write(b"".join(map(_sse, events)))
        end = b"data: [DONE]\n\n"
        if wish.include_usage:
            end = _sse({**head, "choices": [], "usage": _usage(requests)}) + end
        await response.write(end)
        await response.write_eof()
        return response

    # checks

    def _ready(self) -> Engine | ContinuousEngine:
        if self.engine is None or self.draining:
            state = "shutting down" if self.draining else "still loading the model"
            raise ApiError(f"the server is {state}", 503, "ServiceUnavailableError")
        return self.engine

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.aliases:
            raise ApiError(f"The model `{name}` does not exist.", 404, "NotFoundError", "model")

    def _check_ids(self, ids: list[Any]) -> None:
        size = self.tokenizer.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < size:
                raise ApiError(f"Token id {token!r} is out of vocabulary: 0 to {size - 1}", param="prompt")

    def _max_tokens(self, wish: Wish, ids: list[int]) -> int:
        """How many tokens this answer may have. Raises ApiError in vLLM's words when the context is too short."""
        limit = self.limits.max_model_len
        if not ids:
            raise ApiError("the prompt has no tokens: at least one is needed", param="prompt")
        if len(ids) >= limit:
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(ids)} "
                "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of "
                "the input prompt.",
                param="input_tokens",
            )
        if wish.max_tokens is not None and len(ids) + wish.max_tokens > limit:
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However, you requested {wish.max_tokens} "
                f"output tokens and your prompt contains {len(ids)} input tokens, for a total of "
                f"{len(ids) + wish.max_tokens} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                param="max_tokens",
            )
        return limit - len(ids) if wish.max_tokens is None else wish.max_tokens

    async def _constraint(self, wish: Wish) -> Any:
        """The compiled constraint of a request, if any. Compiling may take long: never on the event loop."""
        try:
            if wish.constraint is not None:
                job = asyncio.to_thread(self.tokenizer.constrain, *wish.constraint)
            elif wish.tool_choice != "none":
                job = asyncio.to_thread(self.tokenizer.constrain_tools, wish.tools, wish.tool_choice)
            else:
                return None
            return await asyncio.wait_for(job, COMPILE_TIMEOUT_S)
        except ValueError as error:
            raise ApiError(str(error), param="tools" if wish.constraint is None else "structured_outputs") from error
        except TimeoutError:
            raise ApiError(f"the constraint was not compiled within {COMPILE_TIMEOUT_S} s: make it smaller") from None

    async def _encode(self, text: str, special: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, special)
        return await asyncio.to_thread(self.tokenizer.encode, text, special)

    async def _encode_chat(self, wish: Wish) -> list[int]:
        tools = list(wish.tools) if wish.tools and wish.tool_choice != "none" else None
        try:
            if sum(len(message["content"]) for message in wish.messages) < LONG_TEXT:
                return self.tokenizer.encode_chat(list(wish.messages), tools)
            return await asyncio.to_thread(self.tokenizer.encode_chat, list(wish.messages), tools)
        except ValueError as error:
            raise ApiError(str(error), param="messages") from error


def _deltas(reader: ToolCallReader, output: Output) -> list[JSON]:
    """The choices of one output's chunks; the finish reason is in the last of them."""
    deltas = reader.push(output.text)
    if output.finish_reason is None:
        return [schema.delta_choice(delta, None) for delta in deltas]
    deltas = deltas + reader.finish() or [{"content": ""}]
    reason = reader.finish_reason(output.finish_reason)
    return [schema.delta_choice(delta, None) for delta in deltas[:-1]] + [
        schema.delta_choice(deltas[-1], reason, output.request.stop_reason)
    ]


def _usage(requests: list[Request]) -> JSON:
    return schema.usage(sum(len(r.prompt_ids) for r in requests), sum(len(r.output_ids) for r in requests))


def _sse(event: JSON) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _json(body: JSON, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", headers=headers)


async def _body(http: web.Request) -> JSON:
    try:
        body = orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body

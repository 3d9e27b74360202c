"""The OpenAI contract as plain data: request bodies checked, answers and chunks made. No HTTP, no model.

Status codes and wording follow vLLM: 400 for anything wrong with a body, 404 for an unknown model. A field that this
server does not know is ignored, as vLLM does; one that it knows and cannot honour (n, logprobs, penalties, guided_*)
is refused, because an ignored wish is a wrong result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.engine import Sampling

JSON = dict[str, Any]


class ApiError(Exception):
    """An answer that is an OpenAI error object."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param

    def body(self) -> JSON:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, slots=True)
class Wish:
    """A checked body of /v1/completions or /v1/chat/completions.

    prompts: texts or token ids, one answer each (completions). messages, tools, tool_choice: chat.
    max_tokens None: as many as the context has room for.
    """

    chat: bool
    model: str | None
    sampling: Sampling
    max_tokens: int | None
    stream: bool = False
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    special_tokens: bool = True  # add_special_tokens of a text prompt
    prompts: tuple[str | list[int], ...] = ()
    messages: tuple[JSON, ...] = ()
    tools: tuple[JSON, ...] = ()
    tool_choice: str = "none"  # none, auto, required, or "=NAME"
    constraint: tuple[str, Any] | None = None  # ("choice", [...]), ("regex", "..."), ("json", schema or None)
    tags: Mapping[str, Any] = field(default_factory=dict)


# Fields that this server knows and cannot honour, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "functions": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}


def parse_completion(body: Any) -> Wish:
    body = _object(body)
    prompt = body.get("prompt")
    if prompt is None:
        raise ApiError(
            "prompt is missing: give a text, a list of texts, token ids, or a list of token id lists", param="prompt"
        )
    prompts: list[str | list[int]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
        prompts = prompt
    elif isinstance(prompt, list) and prompt and all(_is_ids(part) for part in prompt):
        prompts = prompt
    elif _is_ids(prompt):
        prompts = [prompt]
    else:
        raise ApiError("prompt must be a text, a list of texts, token ids, or a list of token id lists", param="prompt")
    if any(not part for part in prompts):
        raise ApiError("prompt is empty: at least one token is needed", param="prompt")
    max_tokens = _integer(body, "max_tokens", 16, low=1)
    return Wish(
        chat=False,
        prompts=tuple(prompts),
        max_tokens=max_tokens,
        constraint=_constraint(body),
        special_tokens=_boolean(body, "add_special_tokens", True),
        **_common(body),
    )


def parse_chat(body: Any) -> Wish:
    body = _object(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    tools = tuple(_tool(tool) for tool in _list(body, "tools"))
    choice = _tool_choice(body.get("tool_choice"), tools)
    constraint = _constraint(body)
    if constraint is not None and choice not in ("none", "auto"):
        raise ApiError("tool_choice and a constraint cannot both decide the form of the answer", param="tool_choice")
    field_name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return Wish(
        chat=True,
        messages=tuple(_message(message, i) for i, message in enumerate(messages)),
        tools=tools,
        tool_choice=choice,
        max_tokens=_integer(body, field_name, None, low=1),
        constraint=constraint,
        **_common(body),
    )


def _common(body: JSON) -> JSON:
    for name, neutral in _UNSUPPORTED.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(f"{name}={body[name]!r} is not supported by this server", param=name)
    for name in body:
        if name.startswith("guided_") and body[name] is not None:
            raise ApiError(f"{name} is not supported: use structured_outputs {{choice, regex, json}}", param=name)
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else _list(body, "stop")
    if any(not isinstance(part, str) or not part for part in stops):
        raise ApiError("stop must be a text or a list of texts, none of them empty", param="stop")
    stop_ids = _list(body, "stop_token_ids")
    if stop_ids and not _is_ids(stop_ids):
        raise ApiError("stop_token_ids must be a list of token ids", param="stop_token_ids")
    options = body.get("stream_options") or {}
    stream = _boolean(body, "stream", False)
    if options and not stream:
        raise ApiError("stream_options is only allowed with stream=true", param="stream_options")
    if not isinstance(options, dict):
        raise ApiError("stream_options must be an object", param="stream_options")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError("model must be a text", param="model")
    return {
        "model": model or None,
        "stream": stream,
        "include_usage": _boolean(options, "include_usage", False),
        "usage_in_every_chunk": _boolean(options, "continuous_usage_stats", False),
        "sampling": Sampling(
            min_tokens=_integer(body, "min_tokens", 0, low=0) or 0,
            ignore_eos=_boolean(body, "ignore_eos", False),
            stop=tuple(stops),
            stop_token_ids=tuple(stop_ids),
            temperature=_number(body, "temperature", 1.0, low=0.0),
            top_p=_top_p(body),
            top_k=max(0, _integer(body, "top_k", 0, low=-1) or 0),
            seed=_integer(body, "seed", None, low=-(2**63), high=2**63 - 1),
        ),
    }


def _object(body: Any) -> JSON:
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(part) is int for part in value)


def _list(body: JSON, name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(f"{name} must be a list", param=name)
    return value


def _boolean(body: JSON, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {value!r}", param=name)
    return value


def _integer(body: JSON, name: str, default: int | None, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < low or (high is not None and value > high):
        raise ApiError(f"{name} must be an integer of at least {low}, got {value!r}", param=name)
    return value


def _number(body: JSON, name: str, default: float, low: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
        raise ApiError(f"{name} must be a number of at least {low:g}, got {value!r}", param=name)
    return float(value)


def _top_p(body: JSON) -> float:
    value = _number(body, "top_p", 1.0, low=0.0)
    if not 0.0 < value <= 1.0:
        raise ApiError(f"top_p must be in (0, 1], got {value:g}", param="top_p")
    return value


def _message(message: Any, index: int) -> JSON:
    """One message with its content as one text, which is what chat templates of text models take."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"{where} must be an object with a role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(f"{where}: only content parts of type text are supported", param="messages")
            parts.append(part["text"])
        content = "\n".join(parts)
    if content is None and (message.get("tool_calls") or message["role"] == "assistant"):
        content = ""
    if not isinstance(content, str):
        raise ApiError(f"{where}: content must be a text", param="messages")
    return {**message, "content": content}


def _tool(tool: Any) -> JSON:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or tool.get("type") != "function":
        raise ApiError(
            'a tool must be {"type": "function", "function": {"name": ..., "parameters": ...}}', param="tools"
        )
    if not isinstance(function.get("parameters", {}), dict):
        raise ApiError(f"tool {function['name']!r}: parameters must be a JSON schema", param="tools")
    return tool  # type: ignore[no-any-return]


def _tool_choice(choice: Any, tools: Sequence[JSON]) -> str:
    names = [tool["function"]["name"] for tool in tools]
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in names:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools {names}", param="tool_choice")
        return f"={name}"
    if choice not in ("none", "auto", "required"):
        raise ApiError(
            f"tool_choice must be none, auto, required or a named function, got {choice!r}", param="tool_choice"
        )
    if choice != "none" and not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    return str(choice)


def _constraint(body: JSON) -> tuple[str, Any] | None:
    """What the body says about the form of the answer: structured_outputs or response_format."""
    found: list[tuple[str, Any]] = []
    wanted = body.get("structured_outputs")
    if wanted is not None:
        if not isinstance(wanted, dict):
            raise ApiError("structured_outputs must be an object", param="structured_outputs")
        for name, value in wanted.items():
            if value is None:
                continue
            if name == "json_object":
                if value:
                    found.append(("json", None))
            elif name in ("choice", "regex", "json"):
                found.append((name, value))
            else:
                raise ApiError(
                    f"structured_outputs.{name} is not supported: use choice, regex or json", param="structured_outputs"
                )
    form = body.get("response_format")
    if form is not None:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "json_object":
            found.append(("json", None))
        elif kind == "json_schema":
            wrapped = form.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict | bool):
                raise ApiError("response_format.json_schema.schema must be a JSON schema", param="response_format")
            found.append(("json", schema))
        elif kind != "text":
            raise ApiError(
                f"response_format.type must be text, json_object or json_schema, got {kind!r}", param="response_format"
            )
    if len(found) > 1:
        raise ApiError("give one constraint only: structured_outputs {choice | regex | json} or response_format")
    return found[0] if found else None


# answers


def usage(prompt_tokens: int, output_tokens: int) -> JSON:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": None,
    }


def head(answer_id: str, chat: bool, model: str, chunk: bool) -> JSON:
    """The part that is the same in an answer and in all of its chunks."""
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def text_choice(index: int, text: str, finish_reason: str | None, stop_reason: int | str | None) -> JSON:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def delta_choice(delta: JSON, finish_reason: str | None, stop_reason: int | str | None = None) -> JSON:
    choice: JSON = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    if finish_reason is not None:
        choice["stop_reason"] = stop_reason
    return choice


def message_choice(message: JSON, finish_reason: str, stop_reason: int | str | None) -> JSON:
    return {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }

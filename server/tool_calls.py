"""The text of an answer that may be a tool call, to the deltas of the OpenAI contract, as it grows.

    reader = ToolCallReader("required")
    reader.push('{"name": "weather", "argum')    # []: the name is not certain yet
    reader.push('ents": {"city": ')              # [{"tool_calls": [...name...]}, {"tool_calls": [...'{"city": '...]}]

The text has the form that constrain.py enforces: arguments alone ("=NAME"), {"name": ..., "arguments": ...}
("required"), or text that may end in that between <tool_call> and </tool_call> ("auto").
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

Delta = dict[str, Any]
OPEN, CLOSE = "<tool_call>", "\n</tool_call>"
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


class ToolCallReader:
    """choice as in schema.Wish.tool_choice."""

    def __init__(self, choice: str) -> None:
        self.choice = choice
        self.called = False  # a tool call has begun
        self._in_text = choice == "auto"
        self._tail = {"auto": "}" + CLOSE, "required": "}"}.get(choice, "")  # after the arguments
        self._buffer = ""

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        if self._in_text:
            at = self._buffer.find(OPEN)
            keep = len(self._buffer) - at if at >= 0 else _overlap(self._buffer, OPEN)
            plain = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(plain) :]
            if plain:
                deltas.append({"content": plain})
            if at < 0:
                return deltas
            self._in_text = False
            self._buffer = self._buffer[len(OPEN) :]
        if not self.called:
            if self.choice.startswith("="):
                deltas.append(self._begin(self.choice[1:]))
            elif head := _HEAD.match(self._buffer):
                deltas.append(self._begin(json.loads(head[1])))
                self._buffer = self._buffer[head.end() :]
            else:
                return deltas
        # The tail's length stays back until the end: only then is it known to be the tail.
        ready = self._buffer[: max(0, len(self._buffer) - len(self._tail))]
        self._buffer = self._buffer[len(ready) :]
        if ready:
            deltas.append(_arguments(ready))
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, at the end of the answer."""
        left, self._buffer = self._buffer, ""
        if self.called:
            left = left.removesuffix(self._tail)
            return [_arguments(left)] if left else []
        return [{"content": left}] if left else []

    def finish_reason(self, reason: str) -> str:
        """OpenAI's: "tool_calls" when the model chose to call, "stop" when it was told which function to call."""
        return "tool_calls" if self.called and reason == "stop" and not self.choice.startswith("=") else reason

    def _begin(self, name: str) -> Delta:
        self.called = True
        function = {"name": name, "arguments": ""}
        return {
            "tool_calls": [
                {"index": 0, "id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function", "function": function}
            ]
        }


def message(deltas: list[Delta]) -> Delta:
    """The deltas of a whole answer as one message."""
    content = "".join(delta.get("content") or "" for delta in deltas)
    calls: list[dict[str, Any]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _arguments(text: str) -> Delta:
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of text may be the beginning of mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)

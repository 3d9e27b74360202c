import json

import pytest

from server.tool_calls import ToolCallReader, message

CALL = '{"name": "we\\"ather", "arguments": {"city": "Par}is"}}'
ARGUMENTS = '{"city": "Par}is"}'


def read(choice: str, text: str, size: int) -> tuple[dict, ToolCallReader, list[dict]]:
    reader = ToolCallReader(choice)
    deltas = [d for i in range(0, len(text), size) for d in reader.push(text[i : i + size])] + reader.finish()
    return message(deltas), reader, deltas


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "choice, text, content, name, arguments, reason",
    [
        ("none", "hello", "hello", None, None, "stop"),
        ("=f", ARGUMENTS, None, "f", ARGUMENTS, "stop"),
        ("required", CALL, None, 'we"ather', ARGUMENTS, "tool_calls"),
        ("auto", f"Well. <tool_call>\n{CALL}\n</tool_call>", "Well. ", 'we"ather', ARGUMENTS, "tool_calls"),
        ("auto", "a <tool_cal is not one <", "a <tool_cal is not one <", None, None, "stop"),
    ],
)
def test_any_split(
    size: int, choice: str, text: str, content: str | None, name: str | None, arguments: str | None, reason: str
) -> None:
    got, reader, deltas = read(choice, text, size)
    assert got["content"] == content
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in got.get("tool_calls", [])]
    assert calls == ([(name, arguments)] if name else [])
    assert reader.finish_reason("stop") == reason
    if name and size == 1:
        assert sum("tool_calls" in delta for delta in deltas) >= len(ARGUMENTS)  # as it grows, not in one clump


def test_a_call_that_was_cut_keeps_what_there_is() -> None:
    got, reader, _ = read("required", CALL[:-6], 3)
    assert ARGUMENTS.startswith(got["tool_calls"][0]["function"]["arguments"])
    assert reader.finish_reason("length") == "length"
    assert json.loads(json.dumps(got)) == got

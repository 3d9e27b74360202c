"""python -m server as a process, on a tiny random model: the openai client, signals, and wrong usage."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server_fixtures import tiny_model

pytestmark = pytest.mark.model
ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def server(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "server", "--port", "0", "--model", str(tiny_model()), *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )
    assert process.stderr is not None
    lines: list[str] = []
    drain = None
    try:
        for line in process.stderr:
            lines.append(line)
            if "ready:" in line:
                break
        else:
            raise AssertionError("".join(lines))
        drain = threading.Thread(target=process.stderr.read)  # a full pipe would stop the server
        drain.start()
        url = re.search(r"http://[\d.]+:\d+", "".join(lines))
        assert url is not None
        yield process, url[0]
    finally:
        process.kill()
        process.wait()
        if drain is not None:
            drain.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def openai_client() -> Iterator[Any]:
    from openai import OpenAI

    with server("--mode", "static", "--batch-size", "4", "--batch-wait-ms", "5", "--api-key", "k") as (_, url):
        with OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            yield client


def test_openai_completions(openai_client: Any) -> None:
    (card,) = openai_client.models.list().data
    assert card.id == "tiny"
    options = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = openai_client.completions.create(**options)
    assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length"
    chunks = list(openai_client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    ids = openai_client.completions.create(**{**options, "prompt": [97, 98, 99]})
    assert ids.choices[0].text == whole.choices[0].text


def test_openai_chat(openai_client: Any) -> None:
    options = {
        "model": "tiny", "messages": [{"role": "system", "content": "日本"}, {"role": "user", "content": "🚀?"}],
        "max_tokens": 30, "temperature": 0.9, "seed": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = openai_client.chat.completions.create(**options)
    chunks = list(openai_client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openai_structured_outputs_and_tools(openai_client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
    }
    options = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = openai_client.chat.completions.create(**options, response_format=form)
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 9
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    answer = openai_client.chat.completions.create(**options, tools=tools, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "f" and set(json.loads(call.function.arguments)) == {"n"}
    assert answer.choices[0].finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "f"}}
    arguments = ""
    for chunk in openai_client.chat.completions.create(**options, tools=tools, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments or ""
    assert set(json.loads(arguments)) == {"n"}
    answer = openai_client.completions.create(
        model="tiny", prompt="x", max_tokens=9, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}
    )
    assert answer.choices[0].text in ("red", "blue")


def test_openai_errors(openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="parenthesis is not closed"):
        openai_client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "(a"}})
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        openai_client.completions.create(model="tiny", prompt="x" * 100_000)
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").models.list()


def test_sigterm_lets_what_was_accepted_end() -> None:
    import http.client

    with server("--step-delay-ms", "20") as (process, url):
        body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
        with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body))
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in rest
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--mode", "fast"], "--mode"),
        (["--batch-size", "0"], "--batch-size: must be a whole number of at least 1, got '0'"),
        (["--no-kv-cache", "--mode", "continuous"], "--no-kv-cache has no meaning in continuous mode"),
        (["--model", "/nowhere"], "--model /nowhere: no config.json there"),
        (["--max-model-len", "100000"], "this model has at most 512 positions"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(flags: list[str], said: str) -> None:
    command = [sys.executable, "-m", "server", "--port", "0", "--model", str(tiny_model()), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "listening" not in line]
    assert len(lines) == 1 and said in lines[0]


def test_a_port_in_use_is_one_line_and_status_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "server", "--port", port], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert time.monotonic() - begin < 30
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and f"port {port}" in done.stderr

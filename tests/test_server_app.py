"""HTTP on loopback around a fake model whose steps the test releases one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.server_fixtures import Gate, Served, fake, serving

JSON = dict[str, Any]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def post(served: Served, path: str, body: Any, **options: Any) -> tuple[int, JSON]:
    async with aiohttp.ClientSession() as session:
        options |= {"data": body} if isinstance(body, bytes | str) else {"json": body}
        async with session.post(served.url + path, **options) as response:
            return response.status, await response.json()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[JSON]:
    async for line in response.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


async def stream(served: Served, path: str, body: JSON) -> list[JSON]:
    async with aiohttp.ClientSession() as session:
        async with session.post(served.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    return [json.loads(part[6:]) for part in raw.decode().split("\n\n") if part and part != "data: [DONE]"]


def test_streamed_text_has_whole_characters_and_a_token_an_event() -> None:
    async def test() -> None:
        async with serving(fake("é🚀 ok")) as served:
            got = await stream(
                served, "/v1/completions", {"prompt": "x", "max_tokens": 50, "stream_options": {"include_usage": True}}
            )
            texts = [event["choices"][0]["text"] for event in got if event["choices"]]
            # 9 bytes and eos: the characters' last bytes, blank, o, k; eos brings the reason and no text
            assert texts == ["é", "🚀", " ", "o", "k", ""]
            assert [e["choices"][0]["finish_reason"] for e in got if e["choices"]] == [None] * 5 + ["stop"]
            assert got[-1]["choices"] == []
            assert got[-1]["usage"]["completion_tokens"] == 10  # eos counted, in all modes
            status, whole = await post(served, "/v1/completions", {"prompt": "x", "max_tokens": 50})
            assert (status, whole["choices"][0]["text"]) == (200, "é🚀 ok")
            assert whole["usage"] == {**got[-1]["usage"], "prompt_tokens": 1, "total_tokens": 11}

    run(test)


def test_events_come_as_the_tokens_do() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(fake("a" * 10, sleep=gate)) as served, aiohttp.ClientSession() as session:
            body = {"prompt": "x", "max_tokens": 10, "stream": True}
            async with session.post(served.url + "/v1/completions", json=body) as response:
                reader = events(response)
                for _ in range(9):
                    gate.open(1)
                    assert (await anext(reader))["choices"][0]["text"] == "a"
                gate.open(1)
                assert (await anext(reader))["choices"][0]["finish_reason"] == "length"

    run(test)


@pytest.mark.parametrize("script, max_tokens, reason, tokens", [("aaaaaaaaaa", 5, "length", 5), ("abc", 9, "stop", 4)])
def test_finish_reasons(script: str, max_tokens: int, reason: str, tokens: int) -> None:
    async def test() -> None:
        async with serving(fake(script)) as served:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens}
            got = await stream(served, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in got[:-1]) == script[:5]
            assert got[-2]["choices"][0]["finish_reason"] == reason
            assert got[-1]["usage"]["completion_tokens"] == tokens
            _, whole = await post(served, "/v1/chat/completions", body)
            assert whole["choices"][0]["message"] == {"role": "assistant", "content": script[:5]}
            assert whole["choices"][0]["finish_reason"] == reason

    run(test)


def test_an_exception_is_an_error_event_and_the_next_request_works() -> None:
    async def test() -> None:
        model = fake("abcdef")
        async with serving(model) as served:
            model.fail_at = ("cmpl-mine-0", 2)
            async with aiohttp.ClientSession(headers={"X-Request-Id": "mine"}) as session:
                body = {"prompt": "x", "stream": True}
                async with session.post(served.url + "/v1/completions", json=body) as response:
                    got = [event async for event in events(response)]
            assert [event["choices"][0]["text"] for event in got[:-1]] == ["a", "b"]
            assert got[-1]["error"]["code"] == 500
            assert "the script says so" in got[-1]["error"]["message"]
            status, body = await post(served, "/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
            assert (status, body["error"]["type"]) == (500, "InternalServerError")
            status, body = await post(served, "/v1/completions", {"prompt": "x"})
            assert (status, body["choices"][0]["text"]) == (200, "abcdef")

    run(test)


def test_a_client_that_goes_away_frees_its_row_within_two_tokens() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(fake("a" * 100, sleep=gate)) as served, aiohttp.ClientSession() as session:
            body = {"prompt": "x", "max_tokens": 100, "stream": True}
            response = await session.post(served.url + "/v1/completions", json=body)
            reader = events(response)
            gate.open(3)
            for _ in range(3):
                await anext(reader)
            response.close()
            # the abort has come when nothing is written any more; from then on the model may make two tokens
            await served.until(lambda: served.service.num_open == 0)
            gate.open(200)
            status, _ = await post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert status == 200
            first = served.engine.accounting.records()[0]
            assert first["aborted"] == 1
            assert first["steps"] <= 2 + 2  # 3 tokens read are the prefill and 2 steps
            await reader.aclose()  # type: ignore[attr-defined]

    run(test)


def test_a_client_that_goes_away_while_waiting_never_runs() -> None:
    async def test() -> None:
        gate = Gate()
        model = fake("ab", sleep=gate)
        async with serving(model) as served, aiohttp.ClientSession() as session:
            first = asyncio.create_task(post(served, "/v1/completions", {"prompt": "x"}))
            await served.until(lambda: served.engine._num_running == 1)
            second = asyncio.create_task(session.post(served.url + "/v1/completions", json={"prompt": "y"}))
            await served.until(lambda: served.engine.num_unfinished == 2)
            second.cancel()
            await served.until(lambda: served.engine.num_unfinished == 1)
            gate.open(3)
            assert (await first)[0] == 200
        assert len(model.batches) == 1

    run(test)


def test_health_answers_while_the_model_is_busy() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(fake("ab", sleep=gate)) as served, aiohttp.ClientSession() as session:
            busy = asyncio.create_task(post(served, "/v1/completions", {"prompt": "x"}))
            await served.until(lambda: served.engine._num_running == 1)
            for path in ("/health", "/metrics", "/v1/models", "/debug/batches"):
                async with session.get(served.url + path) as response:
                    assert response.status == 200
            assert not busy.done()
            gate.open(3)
            assert (await busy)[0] == 200

    run(test)


def test_two_at_once_in_serial_mode_are_not_mixed() -> None:
    async def test() -> None:
        def script(request: Any) -> str:
            return "a" * 20 if bytes(request.prompt_ids) == b"A" else "b" * 20

        async with serving(fake(script)) as served:
            bodies = [{"prompt": name, "max_tokens": 20} for name in "AB"]
            answers = await asyncio.gather(*(post(served, "/v1/completions", body) for body in bodies))
            assert [answer["choices"][0]["text"] for _, answer in answers] == ["a" * 20, "b" * 20]
            assert [record["width"] for record in served.engine.accounting.records()] == [1, 1]

    run(test)


def test_several_prompts_are_several_choices() -> None:
    async def test() -> None:
        async with serving(fake(lambda request: bytes(request.prompt_ids).decode() * 2), batch_size=2) as served:
            status, answer = await post(served, "/v1/completions", {"prompt": ["a", "bc"]})
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "aa"), (1, "bcbc")]
            assert answer["usage"]["prompt_tokens"] == 3
            _, ids = await post(served, "/v1/completions", {"prompt": [[97], [98, 99]]})
            assert [c["text"] for c in ids["choices"]] == ["aa", "bcbc"]

    run(test)


def test_limits() -> None:
    async def test() -> None:
        gate = Gate()
        async with serving(fake("a", sleep=gate), max_waiting=1, max_len=100) as served:
            running = asyncio.create_task(post(served, "/v1/completions", {"prompt": "x"}))
            await served.until(lambda: served.engine._num_running == 1)
            waiting = asyncio.create_task(post(served, "/v1/completions", {"prompt": "x"}))
            await served.until(lambda: served.engine.num_unfinished == 2)
            status, body = await post(served, "/v1/completions", {"prompt": "x"})
            assert (status, body["error"]["code"]) == (429, 429)
            status, body = await post(served, "/v1/completions", {"prompt": "x" * 900_000})
            assert (status, body["error"]["type"]) == (413, "RequestEntityTooLarge")
            gate.open(10)
            assert (await running)[0] == (await waiting)[0] == 200

    run(test)


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "path, body, status, said",
    [
        ("/v1/completions", b"{bad", 400, "not JSON"),
        ("/v1/completions", [], 400, "must be a JSON object"),
        ("/v1/completions", {}, 400, "prompt is missing"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt must be"),
        ("/v1/completions", {"prompt": [1, 5000]}, 400, "Token id 5000 is out of vocabulary: 0 to 256"),
        ("/v1/completions", {"prompt": [-1]}, 400, "out of vocabulary"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/completions", {"prompt": "x" * 100}, 400, "maximum context length is 100 tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 100}, 400, "you requested 100 output tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be an integer of at least 1"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, 400, "top_p must be in (0, 1]"),
        ("/v1/completions", {"prompt": "x", "stream": "yes"}, 400, "stream must be true or false"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "n=2 is not supported"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "x", "guided_json": {}}, 400, "use structured_outputs"),
        ("/v1/completions", {"prompt": "x", "stop": ["", "a"]}, 400, "stop"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream=true"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"lark": "a"}}, 400, "lark is not supported"),
        (
            "/v1/completions",
            {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["a"]}},
            400,
            "one constraint",
        ),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "messages[0]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "type text",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice needs tools"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "a tool must be"),
        ("/v1/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_bad_input_is_an_error_object_that_says_why(path: str, body: Any, status: int, said: str) -> None:
    async def test() -> None:
        async with serving(fake("a"), max_len=100) as served:
            got, answer = await post(served, path, body)
            assert got == status
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["code"] == status
            assert said in answer["error"]["message"]

    run(test)


def test_what_asks_for_nothing_is_accepted() -> None:
    async def test() -> None:
        async with serving(fake("a")) as served:
            body = {"prompt": "x", "n": 1, "echo": False, "logprobs": None, "presence_penalty": 0.0, "user": "me"}
            body |= {"structured_outputs": None, "response_format": {"type": "text"}, "stop": None, "unheard_of": 3}
            assert (await post(served, "/v1/completions", body))[0] == 200
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            body = {"messages": [{"role": "user", "content": parts}], "tools": [], "max_completion_tokens": 3}
            status, answer = await post(served, "/v1/chat/completions", body)
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)

    run(test)


def test_the_small_endpoints() -> None:
    async def test() -> None:
        async with serving(fake("a"), max_len=77) as served, aiohttp.ClientSession() as session:
            async with session.get(served.url + "/v1/models") as response:
                card = (await response.json())["data"][0]
            assert (card["id"], card["max_model_len"]) == ("fake", 77)
            _, tokens = await post(served, "/tokenize", {"prompt": "héy"})
            assert (tokens["count"], tokens["tokens"]) == (4, list("héy".encode()))
            assert (await post(served, "/tokenize", {"prompt": ""}))[1]["tokens"] == []
            assert (await post(served, "/tokenize", {"messages": MESSAGES}))[1]["count"] == 1
            assert (await post(served, "/detokenize", {"tokens": [104, 105]}))[1] == {"prompt": "hi"}

    run(test)


def test_a_key_is_asked_for() -> None:
    async def test() -> None:
        async with serving(fake("a"), api_key="secret") as served, aiohttp.ClientSession() as session:
            assert (await post(served, "/v1/completions", {"prompt": "x"}))[0] == 401
            assert (await post(served, "/tokenize", {"prompt": "x"}))[0] == 401
            headers = {"Authorization": "Bearer secret"}
            assert (await post(served, "/v1/completions", {"prompt": "x"}, headers=headers))[0] == 200
            async with session.get(served.url + "/health") as response:
                assert response.status == 200

    run(test)


def test_while_loading_and_while_draining_it_says_so() -> None:
    async def test() -> None:
        async with serving(fake("a")) as served, aiohttp.ClientSession() as session:
            engine, served.service.engine = served.service.engine, None
            async with session.get(served.url + "/health") as response:
                assert (response.status, await response.json()) == (503, {"status": "loading"})
            status, body = await post(served, "/v1/completions", {"prompt": "x"})
            assert (status, body["error"]["message"]) == (503, "the server is still loading the model")
            served.service.engine, served.service.draining = engine, True
            async with session.get(served.url + "/health") as response:
                assert response.status == 503
            assert (await post(served, "/v1/completions", {"prompt": "x"}))[0] == 503

    run(test)

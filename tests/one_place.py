"""python -m tests.one_place: a server that answers one request after the other in 10 ms each; prints its port."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web


async def main() -> None:
    place = asyncio.Lock()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": "test"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        async with place:
            await asyncio.sleep(0.01)
            for n in range(body["max_tokens"]):
                last = n == body["max_tokens"] - 1
                choice = {"index": 0, "text": "a", "finish_reason": "length" if last else None}
                await answer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 16, "completion_tokens": body["max_tokens"]}
        await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return answer

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

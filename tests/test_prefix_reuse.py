"""benchmarks/prefix_reuse.py against a server whose cache is known: it must agree, and notice one that is off."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefix_reuse
from benchmarks.prefix_reuse import expected_share

BLOCK = 16


def test_the_expected_share_by_hand() -> None:
    a = list(range(40))
    # 40 + 40 + 41 + 32 tokens; hits: none; 32 (the third block is not full); 32 of the longer one; 16 of [0..31]
    assert expected_share([a, a, [*a, 9], a[:32]], BLOCK) == (32 + 32 + 16) / 153  # never the last token of a prompt
    assert expected_share([a, [7, *a]], BLOCK) == 0
    assert expected_share([], BLOCK) == 0


@contextmanager
def server(*, forgetful: bool) -> Iterator[str]:
    """A server on loopback that caches full blocks as vLLM does, and counts as vLLM does."""
    known: set[tuple[int, ...]] = set()
    counts = {"hits": 0, "queries": 0}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body: bytes, kind: str = "application/json", status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                model = {"id": "m", "owned_by": "vllm", "max_model_len": 4096}
                self.answer(json.dumps({"data": [model]}).encode())
            elif self.path == "/metrics":
                lines = [f'vllm:prefix_cache_{k}_total{{engine="0"}} {v}\n' for k, v in counts.items()]
                self.answer("".join(lines).encode(), "text/plain")
            else:
                self.answer(b"{}", status=404)

        def do_POST(self) -> None:
            body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.answer(b"{}", status=404)
                return
            prompt = body["prompt"]
            ends = range(BLOCK, len(prompt), BLOCK)
            hits = next((end - BLOCK for end in ends if tuple(prompt[:end]) not in known), ends[-1] if ends else 0)
            if not forgetful:
                known.update(tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK))
            counts["hits"] += hits
            counts["queries"] += len(prompt)
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": 1,
                "prompt_tokens_details": {"cached_tokens": hits},
            }
            events = [
                {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]},
                {"choices": [], "usage": usage},
            ]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            self.answer(f"{text}data: [DONE]\n\n".encode(), "text/event-stream")

        def log_message(self, format: str, *args: Any) -> None: ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


@pytest.mark.parametrize("forgetful", [False, True])
def test_it_agrees_with_a_cache_that_works_and_not_with_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forgetful: bool
) -> None:
    rows = [
        {"timestamp": n, "input_length": 64 * 3 + 20, "output_length": 9, "hash_ids": [0, 1 + n % 3, 10 + n, 100 + n]}
        for n in range(20)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server(forgetful=forgetful) as url:
        monkeypatch.setattr("sys.argv", ["prefix_reuse", url, str(path), "--block-size", "64"])
        assert prefix_reuse.main() == (1 if forgetful else 0)
    said = capsys.readouterr().out
    # 17 rows find two blocks, two find one, of 20 and the warm-up: (17 x 128 + 2 x 64) / (21 x 212) tokens
    assert f"expected {(17 * 128 + 2 * 64) / (21 * 212):.1%}" in said
    assert "without prefixes  20 requests" in said and "expected 0.0%" in said

"""The policies on a fake model and a fake clock: exact times, exact counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.engine import ContinuousEngine, Engine, Output, QueueFull, Request, Sampling
from server.fake_model import EOS, FakeClock, FakeModel


class Bench:
    """An engine on a fake model, with everything it delivered and when."""

    def __init__(self, scripts: dict[str, str], prefill_s: float = 0.5, step_s: float = 0.1, **engine: Any) -> None:
        self.clock = FakeClock()
        fail_at = engine.pop("fail_at", None)
        self.model = FakeModel(scripts, self.clock.sleep, prefill_s, step_s, fail_at=fail_at)
        self.outputs: list[tuple[float, Output]] = []
        self.engine = Engine(self.model, self.deliver, clock=self.clock, **engine)

    def deliver(self, outputs: list[Output]) -> None:
        self.outputs += [(self.clock.now_s, output) for output in outputs]

    def add(self, name: str, prompt_tokens: int = 3, **sampling: Any) -> Request:
        request = Request(name, [1] * prompt_tokens, Sampling(**({"max_tokens": 100} | sampling)))
        self.engine.add_request(request)
        return request

    def text(self, request: Request) -> str:
        return "".join(output.text for _, output in self.outputs if output.request is request)

    def times(self, request: Request) -> list[float]:
        return [round(t, 6) for t, output in self.outputs if output.request is request]

    def record(self, index: int = -1) -> dict[str, Any]:
        return self.engine.accounting.records()[index]


def test_serial_is_first_come_first_served() -> None:
    bench = Bench({"a": "abc", "b": "xy"})
    a, b = bench.add("a"), bench.add("b")
    assert bench.engine.step() and bench.engine.step() and not bench.engine.step()
    assert bench.model.batches == [["a"], ["b"]]
    # a: prefill 0.5, then b, c and eos at 0.1 each; b starts when a is over
    assert bench.times(a) == [0.5, 0.6, 0.7, 0.8]
    assert bench.times(b) == [1.3, 1.4, 1.5]
    assert (bench.text(a), a.finish_reason, len(a.output_ids)) == ("abc", "stop", 4)  # eos counts as a token


@pytest.mark.parametrize(
    "script, sampling, text, reason, tokens",
    [
        ("abcdef", {"max_tokens": 3}, "abc", "length", 3),
        ("abc", {"max_tokens": 4}, "abc", "stop", 4),  # eos is the 4th
        ("abc", {"max_tokens": 3}, "abc", "length", 3),
        ("ab", {"max_tokens": 6, "ignore_eos": True}, "ab", "length", 6),
        ("abc", {"stop_token_ids": (ord("b"),)}, "a", "stop", 2),
        ("abcd", {"stop": ("bc",)}, "a", "stop", 3),
        ("ab", {"max_tokens": 9, "min_tokens": 4}, "ab", "stop", 5),  # eos as 3rd and 4th token does not end it
    ],
)
def test_how_an_answer_ends(script: str, sampling: dict[str, Any], text: str, reason: str, tokens: int) -> None:
    bench = Bench({"a": script})
    request = bench.add("a", **sampling)
    bench.engine.step()
    assert (bench.text(request), request.finish_reason, len(request.output_ids)) == (text, reason, tokens)


def test_a_static_batch_waits_for_the_others_then_goes() -> None:
    bench = Bench({"a": "a", "b": "b", "c": "c"}, batch_size=2, batch_wait_s=0.05)
    assert bench.engine.wait_s() is None
    bench.clock.sleep(1.0)
    bench.add("a")
    assert bench.engine.wait_s() == pytest.approx(0.05)
    assert not bench.engine.step()
    bench.clock.sleep(0.02)
    bench.add("b")
    assert bench.engine.wait_s() == 0  # full
    bench.engine.step()
    assert bench.model.batches == [["a", "b"]]
    assert (bench.record()["idle_s"], bench.record()["fill_wait_s"]) == (pytest.approx(1.0), pytest.approx(0.02))
    bench.add("c")
    bench.clock.sleep(0.05)
    assert bench.engine.step()  # not full, but it has waited
    assert bench.model.batches[-1] == ["c"]


def test_the_wait_counts_from_when_the_engine_is_free() -> None:
    bench = Bench({name: "x" * 5 for name in "abc"}, batch_size=2, batch_wait_s=0.05)
    bench.add("a")
    bench.add("b")
    bench.engine.step()
    late = bench.add("c")
    late.arrival_s -= 0.3  # it came while the batch ran
    assert bench.engine.wait_s() == pytest.approx(0.05)


def test_a_row_that_is_over_is_dragged_along_and_counted() -> None:
    bench = Bench({"a": "aaaaaaaaaa", "b": "bb"}, batch_size=2, batch_wait_s=0.0)
    a, b = bench.add("a", prompt_tokens=9, max_tokens=8), bench.add("b", prompt_tokens=3)
    bench.engine.step()
    record = bench.record()
    # a: 8 tokens = prefill + 7 steps; b: b, b, eos = prefill + 2 steps, then dead for 5
    assert (record["width"], record["steps"], record["row_steps"]) == (2, 7, 14)
    assert (record["useful_row_steps"], record["dead_row_steps"]) == (9, 5)
    assert (record["prompt_tokens"], record["padding_tokens"], record["longest_prompt"]) == (12, 6, 9)
    assert (record["first_tokens"], record["output_tokens"]) == (2, 11)
    assert record["prefill_s"] == pytest.approx(0.5)
    assert record["decode_s"] == pytest.approx(0.7)
    assert record["rest_s"] == pytest.approx(0.0)
    # 2 bytes a token: the rectangle is 2 rows x (9 + 8), in it 9 + 8 and 3 + 3
    assert (record["kv_bytes_reserved"], record["kv_bytes_used"]) == (2 * 2 * 17, 2 * (17 + 6))
    assert (bench.text(a), bench.text(b)) == ("a" * 8, "bb")


def test_an_aborted_row_is_over_at_its_next_token() -> None:
    bench = Bench({"a": "a" * 50, "b": "b"})
    a, b = bench.add("a"), bench.add("b")

    def gone(outputs: list[Output]) -> None:
        if len(a.output_ids) == 3:
            bench.engine.abort(a)

    bench.engine._deliver = gone
    bench.engine.step()
    assert len(a.output_ids) == 3
    assert bench.model.num_forwards == 4
    assert bench.record()["aborted"] == 1
    bench.engine.step()
    assert b.finish_reason == "stop"


def test_an_aborted_waiting_request_never_runs() -> None:
    bench = Bench({"a": "a", "b": "b"})
    bench.add("a")
    b = bench.add("b")
    bench.engine.abort(b)
    bench.engine.step()
    assert not bench.engine.step()
    assert bench.model.batches == [["a"]]
    assert bench.engine.num_unfinished == 0


def test_an_exception_ends_its_batch_and_no_other() -> None:
    bench = Bench({"a": "aaaa", "b": "bbbb", "c": "c"}, batch_size=2, batch_wait_s=0.0, fail_at=("b", 2))
    a, b = bench.add("a"), bench.add("b")
    bench.engine.step()
    errors = [output for _, output in bench.outputs if output.error]
    assert [output.request for output in errors] == [a, b]
    assert "RuntimeError: the script says so" in str(errors[0].error)
    assert bench.record()["failed"] == 2
    c = bench.add("c")
    bench.engine.step()
    assert c.finish_reason == "stop"


def test_the_queue_has_an_end() -> None:
    bench = Bench({}, max_waiting=2)
    bench.add("a")
    bench.add("b")
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        bench.add("c")


@pytest.mark.parametrize("width", [1, 4, 8])
def test_the_account_adds_up(width: int) -> None:
    """Random load: every second and every row-step is in exactly one place, and the product is the throughput."""
    draw = random.Random(width)
    scripts = {str(i): "x" * draw.randrange(1, 30) for i in range(60)}
    bench = Bench(scripts, prefill_s=0.3, step_s=0.07, batch_size=width, batch_wait_s=0.05)
    waiting = list(scripts)
    while waiting or bench.engine.num_unfinished:
        for _ in range(draw.randrange(0, 4)):
            if waiting:
                bench.add(waiting.pop(), prompt_tokens=draw.randrange(1, 40))
        if not bench.engine.step():
            bench.clock.sleep(draw.random() * 0.1)
    records = bench.engine.accounting.records()
    total = {key: sum(r[key] for r in records) for key in records[0] if key not in ("mode", "step_s")}
    for record in records:
        assert record["row_steps"] == record["useful_row_steps"] + record["dead_row_steps"]
        assert record["prompt_tokens"] + record["padding_tokens"] == record["width"] * record["longest_prompt"]
        assert record["output_tokens"] == record["useful_row_steps"] + record["first_tokens"]
    assert total["output_tokens"] == sum(len(text) + 1 for text in scripts.values())
    spent = total["idle_s"] + total["fill_wait_s"] + total["wall_s"]
    assert spent == pytest.approx(records[-1]["started_s"] + records[-1]["wall_s"])  # the clock began at 0
    rows, live = total["row_steps"] / total["steps"], total["useful_row_steps"] / total["row_steps"]
    step, share = total["decode_s"] / total["steps"], total["decode_s"] / spent
    product = rows * live * share / step * total["output_tokens"] / total["useful_row_steps"]
    assert product == pytest.approx(total["output_tokens"] / spent)


def test_metrics_text_is_prometheus() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    bench = Bench({"a": "abc", "b": "a"}, batch_size=2)
    bench.add("a")
    bench.add("b")
    bench.engine.step()
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(bench.engine.accounting.prometheus())
        for sample in family.samples
    }
    assert samples["reference_num_requests_running", ()] == 0
    assert samples["reference_output_tokens_total", ()] == 6
    assert samples["reference_steps_total", ("2",)] == 3
    assert samples["reference_step_seconds_total", ("2",)] == pytest.approx(0.3)
    assert samples["reference_requests_total", ("ok",)] == 2


class Scheduler:
    """Continuous batching by hand: the test says what each step gives."""

    eos_ids = frozenset({EOS})
    kv_bytes_per_token = 2
    page_tokens = 16

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def generate(self, requests: Any, on_step: Any) -> None:
        raise AssertionError("a scheduling model is not told to generate")

    def start(self, on_step: Any) -> None: ...

    def submit(self, request: Request) -> None:
        self.submitted.append(request.id)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request.id)

    def stop(self) -> None: ...


def test_continuous_account() -> None:
    clock, model = FakeClock(), Scheduler()
    outputs: list[Output] = []
    engine = ContinuousEngine(model, outputs.extend, clock=clock)
    a, b = (Request(name, [1] * 5, Sampling(max_tokens=3)) for name in "ab")
    clock.sleep(1.0)
    engine.add_request(a)
    engine._hand_over()
    clock.sleep(0.5)
    engine.on_step([(a, [ord("a")], None)])  # prefill of a
    engine.add_request(b)
    engine._hand_over()
    clock.sleep(0.6)
    engine.on_step([(a, [ord("a")], None), (b, [ord("b")], None)])  # a decode step that prefills b too
    clock.sleep(0.1)
    engine.on_step([(a, [ord("a")], None), (b, [ord("b")], None)])
    engine.abort(b)
    engine._hand_over()
    assert model.submitted == ["a", "b"] and "b" in model.cancelled
    (record,) = engine.accounting.records()
    assert (record["requests"], record["first_tokens"], record["output_tokens"]) == (2, 2, 5)
    assert (record["steps"], record["row_steps"], record["useful_row_steps"], record["dead_row_steps"]) == (2, 3, 3, 0)
    assert record["idle_s"] == pytest.approx(1.0)
    assert record["prefill_s"] == pytest.approx(0.5)
    assert record["decode_s"] == pytest.approx(0.7)
    assert record["wall_s"] == pytest.approx(1.2)
    assert (record["aborted"], a.finish_reason, engine.num_unfinished) == (1, "length", 0)
    assert record["kv_bytes_reserved"] == 2 * 16 * 2  # a page each

"""transformers' generate through the engine, on a tiny random float32 model: its tokens are a bare generate's."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from server.engine import Engine, Output, Request, Sampling
from server.generate import LoadOptions, PagedModel, TransformersModel, UnusableModel, make_engine, sample
from tests.server_fixtures import EOS_ID, tiny_model

pytestmark = pytest.mark.model

TEXTS = ["a", "The capital of France is", "日本語のテキスト🚀", "x" * 40, "é", "one two three", "\n\n", "{}"]


@functools.cache
def loaded(**options: Any) -> TransformersModel:
    return TransformersModel(LoadOptions(str(tiny_model()), **options))


@functools.cache
def paged() -> PagedModel:
    return PagedModel(LoadOptions(str(tiny_model())), batch_size=4)


def bare(ids: list[int], tokens: int) -> list[int]:
    """A bare greedy generate: the second path, which shares nothing with the server but the weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = _bare_model(AutoModelForCausalLM)
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@functools.cache
def _bare_model(auto: Any) -> Any:
    model = auto.from_pretrained(tiny_model(), dtype="auto").eval()
    model.generation_config.eos_token_id = None
    return model


def generate(model: TransformersModel, requests: list[Request], width: int = 1) -> tuple[Engine, list[Output]]:
    outputs: list[Output] = []
    engine = Engine(model, outputs.extend, batch_size=width)
    for request in requests:
        engine.add_request(request)
    while engine.step():
        pass
    assert not [output.error for output in outputs if output.error]
    return engine, outputs


def requests(tokens: int = 12, texts: list[str] = TEXTS, **sampling: Any) -> list[Request]:
    made = Sampling(**({"max_tokens": tokens, "ignore_eos": True} | sampling))
    return [Request(f"r{i}", list(text.encode()), made) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    "options, width", [({}, 1), ({}, 3), ({}, 8), ({"kv_cache": False}, 4), ({"attn": "eager"}, 4)]
)
def test_greedy_tokens_are_those_of_a_bare_generate(options: dict[str, Any], width: int) -> None:
    asked = requests()
    engine, outputs = generate(loaded(**options), asked, width)
    for request in asked:
        assert request.output_ids == bare(request.prompt_ids, 12)
        text = "".join(output.text for output in outputs if output.request is request)
        assert text == loaded().tokenizer.decode(request.output_ids, skip_special_tokens=True)
    for record in engine.accounting.records():
        assert record["prompt_tokens"] + record["padding_tokens"] == record["width"] * record["longest_prompt"]


def test_prompts_of_3_and_9_tokens_alone_and_together() -> None:
    """No pad token in this tokenizer, and none is added: padding is an id the model has, behind the mask."""
    model = loaded()
    assert model.tokenizer.pad_token_id is None
    assert 0 <= model.pad_id < model.vocab_size == 260
    alone = requests(16, ["abc", "abcdefghi"])
    together = requests(16, ["abc", "abcdefghi"])
    generate(model, alone, width=1)
    generate(model, together, width=2)
    assert [r.output_ids for r in alone] == [r.output_ids for r in together]
    assert all(token < model.vocab_size for r in together for token in r.output_ids)


def test_rows_end_one_by_one() -> None:
    asked = requests(12)
    for i, request in enumerate(asked):
        request.sampling = Sampling(max_tokens=2 + i, ignore_eos=True)
    engine, _ = generate(loaded(), asked, width=8)
    assert [len(request.output_ids) for request in asked] == [2, 3, 4, 5, 6, 7, 8, 9]
    for request in asked:
        assert request.output_ids == bare(request.prompt_ids, len(request.output_ids))
    (record,) = engine.accounting.records()
    # steps 1..8 after the prefill; row i is useful in i + 1 of them
    assert (record["steps"], record["useful_row_steps"], record["dead_row_steps"]) == (8, 36, 28)
    # 2 layers x (K and V) x 2 heads x 16 dimensions x 4 bytes
    assert engine.model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_a_list_of_eos_ids() -> None:
    reference = bare(list(b"The capital"), 12)
    eos = next(token for i, token in enumerate(reference) if i >= 3 and token not in reference[:i])
    model = TransformersModel(LoadOptions(str(tiny_model(eos=(EOS_ID, eos)))))
    assert model.eos_ids == {EOS_ID, eos}
    (request,) = requests(12, ["The capital"], ignore_eos=False)
    generate(model, [request])
    assert request.output_ids == reference[: reference.index(eos) + 1]
    assert request.finish_reason == "stop"
    # min_tokens keeps eos from being chosen at all
    (longer,) = requests(12, ["The capital"], ignore_eos=False, min_tokens=reference.index(eos) + 3)
    generate(model, [longer])
    assert len(longer.output_ids) > reference.index(eos) + 3


def test_seeds_decide_the_draw_and_not_the_neighbours() -> None:
    hot = {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    alone = requests(10, ["abc"], seed=7, **hot)
    again = requests(10, ["abc"], seed=7, **hot)
    other = requests(10, ["abc"], seed=8, **hot)
    greedy = requests(10, ["abcdefgh"])
    generate(loaded(), alone)
    generate(loaded(), [*again, *other, *greedy], width=3)
    assert alone[0].output_ids == again[0].output_ids != other[0].output_ids
    assert greedy[0].output_ids == bare(greedy[0].prompt_ids, 10)  # beside rows that sample


def test_sample_follows_the_distribution() -> None:
    import torch

    logits = torch.tensor([0.0, 1.0, 2.0, -30.0])
    generator = torch.Generator().manual_seed(1)

    def shares(**options: Any) -> list[float]:
        drawn = [sample(logits.clone(), **options, generator=generator) for _ in range(3000)]
        return [drawn.count(i) / 3000 for i in range(4)]

    # softmax(0, 1, 2) = 0.0900, 0.2447, 0.6652; 3000 draws: standard error below 0.009
    assert shares(temperature=1.0, top_k=0, top_p=1.0) == pytest.approx([0.0900, 0.2447, 0.6652, 0], abs=0.045)
    # temperature 0.5: softmax(0, 2, 4) = 0.0159, 0.1173, 0.8668
    assert shares(temperature=0.5, top_k=0, top_p=1.0) == pytest.approx([0.0159, 0.1173, 0.8668, 0], abs=0.045)
    assert shares(temperature=1.0, top_k=2, top_p=1.0) == pytest.approx([0, 0.2689, 0.7311, 0], abs=0.045)
    assert shares(temperature=1.0, top_k=0, top_p=0.6) == [0, 0, 1, 0]  # 0.6652 alone reaches 0.6


def test_continuous_batching_gives_the_same_tokens() -> None:
    outputs: list[Output] = []
    engine, model, limit = make_engine(LoadOptions(str(tiny_model())), outputs.extend, "continuous", 4, 0.0, 100, None)
    assert limit == 512
    thread = threading.Thread(target=engine.run)
    thread.start()
    asked = requests(12, TEXTS * 2)
    for i, request in enumerate(asked):
        request.id = f"c{i}"
        engine.add_request(request)
    stopped = Request("stop", list(b"abc"), Sampling(max_tokens=300, ignore_eos=True))
    engine.add_request(stopped)
    engine.abort(stopped)
    sampled = [
        Request(f"s{i}", list(b"abc"), Sampling(max_tokens=10, temperature=1.0, seed=7, ignore_eos=True))
        for i in (0, 1)
    ]
    for request in sampled:
        engine.add_request(request)
    engine.close()
    thread.join()
    assert not [output.error for output in outputs if output.error]
    for request in asked:
        assert request.output_ids == bare(request.prompt_ids, 12)
        assert request.finish_reason == "length"
    assert sampled[0].output_ids == sampled[1].output_ids
    (alone,) = requests(10, ["abc"], temperature=1.0, seed=7)
    generate(loaded(), [alone])
    assert alone.output_ids == sampled[0].output_ids  # a seed means the same in every mode
    records = engine.accounting.records()
    assert sum(record["output_tokens"] for record in records) >= 16 * 12 + 20
    assert all(r["row_steps"] == r["useful_row_steps"] + r["dead_row_steps"] for r in records)


def test_a_slowdown_makes_steps_longer() -> None:
    def step_s(**options: Any) -> float:
        engine, _ = generate(loaded(**options), requests(6, ["abc"]))
        return float(engine.accounting.records()[0]["step_s"])  # type: ignore[arg-type]

    assert step_s(step_delay_s=0.03) >= 0.03
    assert loaded(step_delay_s=0.03).options.slowdown == 1.0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"model": "/nowhere/at/all"}, "no config.json there"),
        ({"model": "."}, "no config.json there"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_an_unusable_model_is_one_line(options: dict[str, Any], said: str) -> None:
    import torch

    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(UnusableModel, match=said):
        TransformersModel(LoadOptions(**({"model": str(tiny_model())} | options)))


def test_no_chat_template_is_said() -> None:
    model = TransformersModel(LoadOptions(str(tiny_model())))
    assert model.decode(model.encode_chat([{"role": "user", "content": "hé"}])) == "user: hé\nassistant: "
    model.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        model.encode_chat([{"role": "user", "content": "x"}])

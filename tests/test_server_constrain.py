"""Constraints on a tiny random model, which left alone would write gibberish: what it writes is validated apart."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jsonschema
import pytest

from server.constrain import Constrainer, check_schema
from server.engine import Engine, Output, Request, Sampling
from server.generate import LoadOptions, TransformersModel
from server.tool_calls import ToolCallReader, message
from tests.server_fixtures import tiny_model

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]


@functools.cache
def model() -> TransformersModel:
    return TransformersModel(LoadOptions(str(tiny_model())))


def answers(constraint: Any, count: int = 6, **sampling: Any) -> list[str]:
    outputs: list[Output] = []
    engine = Engine(model(), outputs.extend, batch_size=4)
    made = [
        Request(
            f"r{i}",
            list(f"prompt {i}".encode()),
            Sampling(max_tokens=200, temperature=1.0, seed=i, **sampling),
            constraint,
        )
        for i in range(count)
    ]
    free = Request("free", list(b"free"), Sampling(max_tokens=8))  # beside them, under nothing
    for request in [*made, free]:
        engine.add_request(request)
    while engine.step():
        pass
    assert not [output.error for output in outputs if output.error]
    assert {request.finish_reason for request in made} == {"stop"}
    assert len(free.output_ids) == 8
    return ["".join(o.text for o in outputs if o.request is request) for request in made]


@pytest.mark.parametrize("choices", [["yes", "no"], ['say "hi"', "back\\slash", "two\nlines", "日本🚀"]])
def test_choice(choices: list[str]) -> None:
    assert set(answers(model().constrain("choice", choices))) <= set(choices)


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-f]{2}", r"(cat|dog)s?", r"^\d{1,3}(\.\d{1,3}){3}$"])
def test_regex(pattern: str) -> None:
    assert all(re.fullmatch(pattern, text) for text in answers(model().constrain("regex", pattern)))


def test_json_schema_also_when_eos_is_to_be_ignored() -> None:
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 3}):
        for text in answers(model().constrain("json", SCHEMA), **options):
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", "=weather", "=time"])
def test_tools(choice: str) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for text in answers(model().constrain_tools(TOOLS, choice)):
        reader = ToolCallReader(choice)
        (call,) = message(reader.push(text) + reader.finish())["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


def test_any_object_and_auto_tools_compile() -> None:
    assert model().constrain("json", None) and model().constrain_tools(TOOLS, "auto")


@pytest.mark.parametrize(
    "kind, value, said",
    [
        ("regex", "(a", "The parenthesis is not closed"),
        ("regex", "a{3,1}", "Lower bound is larger"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("regex", 5, "must be a text"),
        ("choice", [], "at least one text"),
        ("choice", ["a", 3], "at least one text"),
        ("json", "{not json", "the schema is not JSON"),
        ("json", 3, "must be an object"),
        ("json", {"type": "strin"}, 'Unsupported type "strin"'),
        ("json", {"$ref": "#/nope"}, "Cannot find field nope"),
        ("json", {"type": "object", "properties": {"a": {"not": {}}}, "required": []}, "#/properties/a: not is not"),
        ("json", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems is not supported"),
        ("json", {"type": "object", "required": ["a"]}, "required names ['a']"),
        ("json", {"anyOf": [{"type": "integer"}], "minimum": 5}, "minimum beside anyOf"),
        ("json", {"type": "string", "pattern": "a+", "maxLength": 2}, "beside pattern"),
        ("json", {"type": "string", "format": "regex"}, "format 'regex'"),
        ("json", {"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "allOf of several"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(kind: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        model().constrain(kind, value)


def test_annotations_and_definitions_are_no_reason_to_refuse() -> None:
    schema = {
        "title": "T",
        "$defs": {"a": {"type": "integer", "description": "not, if and contains are words here"}},
        "type": "object",
        "properties": {"not": {"$ref": "#/$defs/a", "default": 3}, "if": {"enum": [1, "x"]}},
    }
    assert json.loads(check_schema(schema)) == schema


def test_a_tokenizer_that_xgrammar_cannot_use_is_a_reason() -> None:
    with pytest.raises((ValueError, TypeError)):
        Constrainer(object(), 10, [0])

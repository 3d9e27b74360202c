"""choice, regex, JSON schema and tool calls to token masks, by xgrammar, as in vLLM.

    constrainer = Constrainer(tokenizer, vocab_size, eos_ids)
    constraint = constrainer.compile("regex", "[0-9]{3}")     # ValueError says what is wrong with it
    matcher = constraint.matcher()                             # one an answer
    matcher.mask(logits); matcher.accept(token)

JSON is written as json.dumps writes it (", " and ": ", no other blanks), so that a small model cannot fill its answer
with blanks. A schema keyword that xgrammar would pass over is refused: an ignored wish is a wrong result.
oneOf is taken as anyOf.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xgrammar

MAX_BYTES = 1 << 20  # of a regex, a schema or all choices together


class Constraint:
    """A compiled grammar; shared by all answers that are under it."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab_size: int, never: torch.Tensor | None = None) -> None:
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._never = never

    def matcher(self) -> Matcher:
        return Matcher(xgrammar.GrammarMatcher(self._grammar), self._vocab_size, self._never)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int, never: torch.Tensor | None) -> None:
        self._matcher = matcher
        self._never = never
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def accept(self, token: int) -> None:
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise RuntimeError(f"token {token} is outside of its own constraint")

    def mask(self, scores: torch.Tensor) -> None:
        """Set to -inf what may not come next. scores: (vocabulary,), float32, changed in place."""
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._bits)
            if self._never is not None:
                self._bits &= ~self._never
            xgrammar.apply_token_bitmask_inplace(scores.unsqueeze(0), self._bits.to(scores.device))


class Constrainer:
    """Compiles constraints for one tokenizer; equal ones are compiled once. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(eos_ids))
        self._vocab_size = vocab_size
        # xgrammar 0.2.8 lets raw control characters into strings that have a maxLength; JSON does not allow them.
        self._control = _bits([any(byte < 0x20 for byte in token) for token in info.decoded_vocab], vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=256 << 20)

    def compile(self, kind: str, value: Any) -> Constraint:
        """kind and value as schema.Wish has them. Raises ValueError with the reason."""
        try:
            if kind == "choice":
                return self._made(self._compiler.compile_grammar(choice_grammar(value)))
            if kind == "regex":
                check_regex(value)
                return self._made(self._compiler.compile_regex(value))
            return self._made_json(self._compiler.compile_json_schema(check_schema(value), any_whitespace=False))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the {kind} constraint cannot be used: {_reason(error)}") from error

    def compile_tools(self, tools: Sequence[dict[str, Any]], choice: str) -> Constraint:
        """choice: "auto" (text, or one call), "required" (one call), "=NAME" (the arguments of that function alone)."""
        schemas = {t["function"]["name"]: check_schema(t["function"].get("parameters") or None) for t in tools}
        if choice.startswith("="):
            return self.compile("json", json.loads(schemas[choice[1:]]))
        opening, closing = ("<tool_call>\n", "\n</tool_call>") if choice == "auto" else ("", "")
        tags = [
            {
                "type": "tag",
                "begin": f'{opening}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": json.loads(schema), "max_whitespace_cnt": 1},
                "end": f"}}{closing}",
            }
            for name, schema in schemas.items()
        ]
        if choice == "auto":
            form = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "stop_after_first": True}
        else:
            form = {"type": "or", "elements": tags}
        try:
            grammar = self._compiler.compile_structural_tag({"type": "structural_tag", "format": form})
            return self._made(grammar) if choice == "auto" else self._made_json(grammar)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"the tools cannot be used: {_reason(error)}") from error

    def _made(self, grammar: xgrammar.CompiledGrammar) -> Constraint:
        return Constraint(grammar, self._vocab_size)

    def _made_json(self, grammar: xgrammar.CompiledGrammar) -> Constraint:
        return Constraint(grammar, self._vocab_size, self._control)


def _bits(flags: Sequence[bool], vocab_size: int) -> torch.Tensor:
    """Flags of tokens in xgrammar's form: (1, ceil(vocabulary / 32)) int32, the lowest bit first."""
    size = -(-vocab_size // 32) * 32
    padded = np.zeros(size, dtype=np.uint8)
    padded[: min(len(flags), size)] = flags[:size]
    return torch.from_numpy(np.packbits(padded, bitorder="little").view(np.int32)).unsqueeze(0)


def choice_grammar(choices: Any) -> str:
    """The EBNF of a list of texts. A JSON string is a valid EBNF string."""
    if not isinstance(choices, list) or not choices or any(not isinstance(c, str) or not c for c in choices):
        raise ValueError("choice must be a list of at least one text, none of them empty")
    if sum(map(len, choices)) > MAX_BYTES:
        raise ValueError(f"choice has more than {MAX_BYTES} characters")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def check_regex(pattern: Any) -> None:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("regex must be a text, and not an empty one")
    if "\0" in pattern or len(pattern) > MAX_BYTES:
        raise ValueError(f"regex must have no NUL and at most {MAX_BYTES} characters")


def check_schema(schema: Any) -> str:
    """A JSON schema (an object, true, or JSON text; None is any object) as JSON text, once nothing in it would be
    passed over. Raises ValueError naming the keyword."""
    if schema is None:
        return '{"type": "object", "additionalProperties": true}'
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ValueError("a JSON schema must be an object")
    text = json.dumps(schema)
    if len(text) > MAX_BYTES:
        raise ValueError(f"the schema has more than {MAX_BYTES} characters")
    for where, problem in _passed_over(schema, "#"):
        raise ValueError(f"the schema cannot be enforced: {where}: {problem}")
    return text


_UNENFORCED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "multipleOf",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "contentSchema",
)  # fmt: skip
_FORMATS = {
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
}  # fmt: skip
_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")  # assertions beside these are passed over
_NO_ASSERTION = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id",
    "$comment", "$defs", "definitions", "discriminator",
}  # fmt: skip


def _passed_over(schema: Any, where: str) -> Iterator[tuple[str, str]]:
    """What xgrammar 0.2.8 was seen to pass over in silence, as (place, problem)."""
    if not isinstance(schema, dict):
        return
    for keyword in _UNENFORCED:
        if schema.get(keyword) not in (None, False):
            yield where, f"{keyword} is not supported"
    for keyword in _ALONE:
        beside = schema.keys() - _NO_ASSERTION - {keyword} - ({"type"} if keyword in ("const", "enum") else set())
        if keyword in schema and beside:
            yield where, f"{', '.join(sorted(beside))} beside {keyword} is not supported"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield where, "allOf of several schemas is not supported"
    if schema.get("format", "date") not in _FORMATS:
        yield where, f"format {schema['format']!r} is not supported"
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        yield where, "minLength or maxLength beside pattern or format is not supported"
    properties = schema.get("properties")
    if isinstance(schema.get("required"), list):
        unknown = [name for name in schema["required"] if not isinstance(properties, dict) or name not in properties]
        if unknown:
            yield where, f"required names {unknown}, which properties does not have"
    if "propertyNames" in schema and ("properties" in schema or "patternProperties" in schema):
        yield where, "propertyNames beside properties or patternProperties is not supported"
    several = schema.get("patternProperties")
    if isinstance(several, dict) and (properties or len(several) > 1):
        yield where, "patternProperties beside properties, or several of them, is not supported"
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(schema.get(keyword), dict):
            for name, part in schema[keyword].items():
                yield from _passed_over(part, f"{where}/{keyword}/{name}")
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(keyword), list):
            for i, part in enumerate(schema[keyword]):
                yield from _passed_over(part, f"{where}/{keyword}/{i}")
    for keyword in ("items", "additionalProperties", "unevaluatedProperties", "propertyNames"):
        yield from _passed_over(schema.get(keyword), f"{where}/{keyword}")


def _reason(error: Exception) -> str:
    """xgrammar's message without the time and place in its sources."""
    return str(error).split(": ", 1)[-1].strip()

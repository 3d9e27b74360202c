"""Prompts of an exact number of tokens, the same for the same seed, unlike each other from the first token on.

Prefix caches must not help by accident, so two prompts of a run differ in their first two tokens (in their first one
while there are enough tokens to choose from). `--shared-prefix-tokens` puts the same tokens before all of them.

    ids    lists of token ids (vLLM and the reference server take them on /v1/completions): exact by construction
    text   common English words that the server's own /tokenize says are one token each: exact where it has one, else
           about one token a word; the report shows the server's count beside the wished one
    file   --prompts: one prompt a line, or JSON Lines with "prompt" (or "text_input", "messages") and "output_tokens"

A trace says which parts of its prompts are the same: such a prompt is a list of Chunks. Equal keys are equal tokens,
other keys differ from their first tokens on, and a chunk without a key is like no other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from loadgen.options import Options, UsageError
from loadgen.target import ServerInfo
from loadgen.transport import Transport

_POOL = 1 << 16  # tokens drawn once; a prompt is a slice of them behind its own first two
_ANY_IDS = range(1000, 20_000)  # ordinary tokens in the vocabularies of all current models

_WORDS = """
able about above across action after again against age ago air all almost alone along already also although
always among amount and animal another answer any appear apple area arm army around art ask away baby back bad
bag ball bank base bath bear beat beauty because bed before began begin behind believe bell below best better
between big bird black blood blow blue board boat body bone book born both bottom box boy branch bread break
bridge bright bring broad brother brown build burn busy business but buy call calm camp can car card care
carry case catch cause cell center certain chair chance change chart check child choose church circle city
class clean clear climb clock close cloud coast coat cold color come common company complete contain control
cook cool copy corn corner correct cost cotton could count country course cover cream create cross crowd cry
current cut dance danger dark day dead deal dear death decide deep degree depend desert design develop did die
different dinner direct discuss distance divide doctor does dog dollar door double down draw dream dress drink
drive drop dry during each early earth ease east eat edge effect egg eight either electric element else end
enemy energy engine enough enter equal even evening event ever every exact example excite exercise expect
experience eye face fact fair fall family famous far farm fast fat father favor fear feed feel feet few field
fight figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow
food foot for force foreign forest form forward found four free fresh friend from front fruit full fun game
garden gas gather gave general gentle get girl give glad glass goes gold gone good got govern grand grass gray
great green grew ground group grow guess guide gun had hair half hand happen happy hard has hat have head hear
heart heat heavy held help her here high hill him his history hit hold hole home hope horse hot hour house how
huge human hundred hunt hurry ice idea imagine inch include indicate industry insect instant instrument
interest into iron island job join jump just keep kept key kill kind king knew know lady lake land language
large last late laugh law lead learn least leave left leg length less let letter level lie life lift light
like line liquid list listen little live locate log lone long look lost lot loud love low machine made magnet
main major make man many map mark market master match material matter may mean measure meat meet melody men
metal method middle might mile milk million mind mine minute miss mix modern molecule moment money month moon
more morning most mother motion mount mountain mouth move much multiply music must name nation nature near
neck need neighbor never new next night nine noise noon nor north nose note nothing notice noun now number
object observe occur ocean off offer office often oil old once one only open operate opposite order organ
original other our out over own oxygen page paint pair paper paragraph parent part particular party pass past
path pattern pay people perhaps period person phrase pick picture piece place plain plan plane planet plant
play please plural poem point poor populate port pose position possible post pound power practice prepare
present press pretty print probable problem process produce product property protect prove provide pull push
put question quick quiet quite race radio rain raise ran range rather reach read ready real reason receive
record red region remember repeat reply represent require rest result rich ride right ring rise river road
rock roll room root rope rose round row rub rule run safe said sail salt same sand sat save saw say scale
school science score sea search season seat second section see seed seem segment select self sell send sense
sent sentence separate serve set settle seven several shape share sharp she sheet shell shine ship shoe shop
shore short should shoulder shout show side sight sign silent silver similar simple since sing single sister
sit six size skill skin sky sleep slow small smell smile snow soft soil soldier solution solve some son song
soon sound south space speak special speech speed spell spend spoke spot spread spring square stand star start
state station stay stead steam steel step stick still stone stood stop store story straight strange stream
street stretch string strong student study subject success such sudden sugar suggest suit summer sun supply
support sure surface surprise swim symbol system table tail take talk tall teach team teeth tell temper ten
term test than thank that the their them then there these they thick thin thing think third this those though
thought thousand three through throw thus tie time tiny tire together told tone too took tool top total touch
toward town track trade train travel tree triangle trip trouble truck true try tube turn twenty two type under
unit until use usual valley value vary verb very view village visit voice vowel wait walk wall want war warm
was wash watch water wave way wear weather week weight well went were west what wheel when where whether which
while white who whole whose why wide wife wild will win wind window wing winter wire wish with woman wonder
wood word work world would write written wrong yard year yellow yes yet you young
""".split()


Chunk = tuple[int | None, int]  # key (None: unique to the request), tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    """content: text, token ids, or chat messages. output_tokens only where a file asks for a length."""

    content: str | list[Any]
    input_tokens: int | None
    output_tokens: int | None = None


class Prompts(Protocol):
    @property
    def info(self) -> Mapping[str, Any]:
        """How they were made; goes into run.json."""

    def prompt(self, index: int, length: int) -> Prompt:
        """The prompt of request `index` (position in the plan), `length` tokens long."""


class Synthetic:
    """Slices of a seeded pool of tokens. `tokens` are ids, or words when `as_text`."""

    def __init__(
        self,
        tokens: Sequence[int] | Sequence[str],
        seed: np.random.SeedSequence | int,
        *,
        as_text: bool,
        shared_prefix_tokens: int = 0,
        overhead_tokens: int = 0,  # what a chat template adds; taken off the length
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.info = info or {}
        self._as_text = as_text
        self._overhead = overhead_tokens
        generator = np.random.default_rng(seed)
        self._count = len(tokens)
        table = np.asarray(tokens, dtype=object)
        self._first: list[Any] = table[generator.permutation(self._count)].tolist()
        self._second: list[Any] = table[generator.permutation(self._count)].tolist()
        self._pool: list[Any] = table[generator.integers(0, self._count, _POOL)].tolist()
        self._prefix: list[Any] = table[generator.integers(0, self._count, shared_prefix_tokens)].tolist()
        self._of_key: list[Any] = table[generator.permutation(self._count)].tolist()

    def prompt(self, index: int, length: int) -> Prompt:
        own = max(1, length - self._overhead) - len(self._prefix)
        if own < 1:
            raise UsageError(f"--input-tokens {length} is no longer than the shared prefix")
        count = self._count
        head = [self._first[index % count], self._second[index // count % count]][:own]
        body = self._slice(index * 7919, own - len(head))
        content = self._prefix + head + body
        return Prompt(" ".join(content) if self._as_text else content, length)

    def of_chunks(self, index: int, chunks: Sequence[Chunk]) -> Prompt:
        """The prompt of request `index` that is made of these chunks, as many tokens long as they are together.

        What a chat template adds is taken off the first chunks' ends: the template's tokens stand before them in every
        prompt, so equal chunks stay equal. At least one token is left.
        """
        content: list[Any] = []
        length = sum(tokens for _, tokens in chunks)
        cut = min(self._overhead, length - 1)
        for key, tokens in chunks:
            if cut:
                cut, tokens = max(0, cut - tokens), max(0, tokens - cut)
            if key is not None:
                content += self._keyed(key, tokens)
            else:
                head = [self._first[index % self._count], self._second[index // self._count % self._count]][:tokens]
                content += head + self._slice(index * 7919, tokens - len(head))
        return Prompt(" ".join(content) if self._as_text else content, length)

    def _keyed(self, key: int, tokens: int) -> list[Any]:
        """The first `tokens` tokens of the endless stream of a key: three that spell it, then a piece of the pool."""
        count = self._count
        mixed = (key + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
        of_key = self._of_key
        head = [of_key[key % count], of_key[key // count % count], of_key[(mixed >> 16) % count]][:tokens]
        return head + self._slice(mixed, tokens - len(head))

    def _slice(self, start: int, length: int) -> list[Any]:
        pool = self._pool
        start %= _POOL
        taken = pool[start : start + length]
        while len(taken) < length:
            taken = taken + pool[: length - len(taken)]
        return taken


@functools.lru_cache(maxsize=1 << 16)
def key_of(name: str) -> int:
    """A number for the key of a chunk that is known by name: far apart for any two names, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=12).digest(), "big") << 20


def block_chunks(ids: Sequence[int], block_size: int, length: int, scope: str | None = None) -> list[Chunk]:
    """Chunks of a prompt of `length` tokens from the ids of its blocks: the last may be partly filled, a tail behind
    them is the request's own; where length was clipped, the ids behind it are left out."""
    base = 0 if scope is None else key_of(scope)
    chunks: list[Chunk] = []
    left = length
    for block in ids:
        if left <= 0:
            break
        chunks.append((base + block, min(block_size, left)))
        left -= block_size
    if left > 0:
        chunks.append((None, left))
    return chunks


@dataclass(frozen=True)
class FromFile:
    """The prompts of --prompts in file order, again from the first when the run is longer."""

    prompts: Sequence[Prompt]
    info: Mapping[str, Any]

    def prompt(self, index: int, length: int) -> Prompt:
        return self.prompts[index % len(self.prompts)]


def read_prompts(path: str, *, chat: bool) -> list[Prompt]:
    """Prompts of a text or JSON Lines file. Raises UsageError with the line that is wrong."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(Prompt(line, None))
            continue
        try:
            row = orjson.loads(line)
        except ValueError as error:
            raise UsageError(f"--prompts {path}, line {number}: not JSON: {error}") from None
        content = row.get("messages") or row.get("prompt") or row.get("text_input")
        if not content or (isinstance(content, list) and not chat and "messages" in row):
            want = '"prompt", "text_input" or "messages"' if chat else '"prompt" or "text_input" (messages need chat)'
            raise UsageError(f"--prompts {path}, line {number}: needs {want}")
        length = row.get("output_tokens", row.get("output_length"))
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise UsageError(f"--prompts {path}, line {number}: output_tokens must be 1 or more, not {length!r}")
        prompts.append(Prompt(content, None, length))
    if not prompts:
        raise UsageError(f"--prompts {path}: no prompt in the file")
    return prompts


async def make_prompts(
    options: Options, info: ServerInfo, transport: Transport, seed: np.random.SeedSequence | int
) -> Prompts:
    """The prompts of a run, made with the server's own tokenizer where it shows one. Raises UsageError."""
    chat = options.endpoint == "chat"
    if options.prompts is not None:
        prompts = read_prompts(options.prompts, chat=chat)
        return FromFile(prompts, {"kind": "file", "file": options.prompts, "prompts": len(prompts)})
    kind = options.prompt_kind
    if kind == "auto":
        kind = "ids" if info.takes_token_ids and not chat else "text"
    return await make_synthetic(options, info, transport, seed, kind)


async def make_synthetic(
    options: Options, info: ServerInfo, transport: Transport, seed: np.random.SeedSequence | int, kind: str
) -> Synthetic:
    """Synthetic prompts of kind "ids" or "text", of tokens that the server's own tokenizer knows."""
    chat = options.endpoint == "chat"
    tokenizer = _Tokenizer(transport, info) if info.takes_token_ids else None
    words, ids = await _single_token_words(tokenizer) if tokenizer else ([], [])
    exact = bool(words)
    overhead = 0
    if exact and chat and tokenizer is not None:
        sample = words[:32]
        counted = await tokenizer.count_chat(" ".join(sample))
        overhead = max(0, counted - len(sample)) if counted is not None else 0
    if kind == "text" and exact and not chat and tokenizer is not None:
        overhead = max(0, len(await tokenizer.ids(" ".join(words[:32])) or words[:32]) - 32)  # BOS and the like
    tokens: Sequence[int] | Sequence[str] = (ids or list(_ANY_IDS)) if kind == "ids" else (words or _WORDS)
    return Synthetic(
        tokens,
        seed,
        as_text=kind == "text",
        shared_prefix_tokens=options.shared_prefix_tokens,
        overhead_tokens=overhead,
        info={
            "kind": kind,
            "exact": kind == "ids" or exact,
            "distinct_tokens": len(tokens),
            "shared_prefix_tokens": options.shared_prefix_tokens,
            "template_tokens": overhead,
        },
    )


class _Tokenizer:
    """The server's /tokenize, as vLLM and the reference server have it."""

    def __init__(self, transport: Transport, info: ServerInfo) -> None:
        self._transport = transport
        self._model = info.model

    async def _tokenize(self, **body: Any) -> list[int] | None:
        data = orjson.dumps({"model": self._model, **body})
        answer = await self._transport.exchange("POST", "/tokenize", None, data)
        try:
            tokens = orjson.loads(b"".join(answer.body_pieces()[0]))["tokens"] if answer.status == 200 else None
        except (ValueError, KeyError, TypeError):
            return None
        return tokens if isinstance(tokens, list) and all(isinstance(t, int) for t in tokens) else None

    async def ids(self, text: str) -> list[int] | None:
        return await self._tokenize(prompt=text)

    async def count_chat(self, text: str) -> int | None:
        tokens = await self._tokenize(messages=[{"role": "user", "content": text}])
        return None if tokens is None else len(tokens)


async def _single_token_words(tokenizer: _Tokenizer) -> tuple[list[str], list[int]]:
    """The words that are one token each behind a blank, and their ids; empty where the server does not tell.

    All words are tokenized in one text; a word that were several tokens would shift the count of its line, so lines
    are halved until each holds or is dropped. The text's first tokens (BOS) are told apart by tokenizing "".
    """
    before = await tokenizer.ids("")
    if before is None:
        return [], []
    kept: list[str] = []
    ids: list[int] = []

    async def take(words: list[str]) -> None:
        tokens = await tokenizer.ids(" " + " ".join(words))
        if tokens is None:
            return
        if len(tokens) - len(before) == len(words):
            kept.extend(words)
            ids.extend(tokens[len(before) :])
        elif len(words) > 1:
            await take(words[: len(words) // 2])
            await take(words[len(words) // 2 :])

    await take(_WORDS)
    if len(set(ids)) < 64:
        return [], []
    return kept, list(dict.fromkeys(ids))

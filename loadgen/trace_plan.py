"""A trace to the requests of a run: bodies, due times, sessions. plan.py calls this where --trace is given.

    recorded     (no --rate, no --concurrency) at the trace's times, divided by --speedup
    --rate R     the rows in order, as Poisson (or --arrival) at R; --arrival recorded: its own times at mean rate R
    --concurrency N     the rows in order, N in flight

hash_ids, segments and prefix_length become prompts whose shared parts are the same tokens; other rows are unlike each
other from the first token on. With --pacing session a turn waits for the end of the turn before and its think time; a
row without one starts at its recorded time, or when the turn before is over, whichever is later. A turn that was
skipped is left out of its session: the next one waits for the last that was sent. Rows that continue a conversation
(context_mode delta) carry the server's own answers with --pacing session, the recorded ones otherwise.

Rows stream through: what is not needed yet is not read, and only sessions' last turns are kept.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from loadgen.arrival import offsets_ns
from loadgen.options import Options, UsageError
from loadgen.prompt import Chunk, Synthetic, block_chunks, key_of, make_synthetic
from loadgen.protocol import Body
from loadgen.record import Phase, Request, RequestRecord
from loadgen.target import ServerInfo
from loadgen.trace import Counts, Replayed, Rules, TraceError, TraceRow, mean_rate_per_s, replay
from loadgen.trace_formats import Trace, sha256
from loadgen.transport import Transport

Planned = tuple[int, Request]

_AHEAD_ROWS = 1 << 15  # rows held to bring later turns, which may be due early on a fast server, to the front
_BUILT_AHEAD = 20_000  # requests made before the clock starts, at most
_BUILT_BYTES = 64 << 20  # and bytes of bodies
_BUILT_S = 0.15  # and time: a long trace begins to be sent within a second
_WARMUP_OUTPUT = 32  # longest answer of a warm-up request
_KNOWN_IDS = 1 << 20  # requests that a later row may name in `after`


@dataclass(frozen=True, slots=True)
class TracePlan:
    """What plan.py needs of a trace."""

    before: tuple[Planned, ...]
    measured: Iterable[Planned]
    total: int | None  # None while not all rows have been read
    info: Mapping[str, Any]
    notes: Callable[[], tuple[str, ...]]  # asked when all has been sent
    counts: Callable[[], dict[str, Any]]  # likewise: the trace, the rules, and what became of its rows


@dataclass(slots=True)
class _Turn:
    """A request that others may wait for."""

    id: str
    earliest_ns: int
    group: int  # all requests that wait for each other are of one group, and of one worker


@dataclass(slots=True)
class _Step:
    """A row with what it waits for."""

    item: Replayed
    earliest_ns: int | None  # it cannot be due before; None in a closed loop
    after: tuple[_Turn, ...]
    turn: _Turn | None  # its own, when a later row may wait for it
    group: int


@dataclass(slots=True)
class _Talk:
    """The conversation so far, in order; `asked` messages wait for their answer."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0


async def make_trace_plan(
    options: Options,
    info: ServerInfo,
    transport: Transport,
    *,
    arrival_seed: np.random.SeedSequence,
    prompt_seed: np.random.SeedSequence,
    warmup: int,
    first: int,
    worker: int,
) -> TracePlan:
    """The requests of worker `worker`. `warmup` requests go before the measured ones, whose positions begin at `first`.

    Raises UsageError (TraceError) for options that would be ignored, a file that is not a trace, and, while it is
    read, for rows that cannot be replayed.
    """
    assert options.trace is not None
    given = options.trace_options
    _refuse_ignored(options)
    trace = Trace(options.trace, given.get("trace_format"), given.get("block_size"))
    hashing: asyncio.Task[str] | None = None  # in a thread: it needs no interpreter lock
    if worker == 0:
        hashing = asyncio.ensure_future(asyncio.to_thread(sha256, options.trace))
    try:
        rules = _rules(options, info)
        if options.arrival == "recorded":
            rules = _with_speedup(rules, options, trace)
        prompts = await make_synthetic(options, info, transport, prompt_seed, _kind(options, info, trace))
        bodies = _Bodies(options, info, prompts, trace, live=given.get("pacing") == "session")
        before = tuple(_before(bodies, trace, rules, warmup))
        feed = _requests(options, trace, rules, bodies, arrival_seed, first, worker)
        await asyncio.sleep(0)  # let the hashing begin
        built, complete = _build_ahead(feed)
        facts = _facts(options, trace, rules, await hashing) if hashing is not None else {}
    except BaseException:
        trace.close()
        if hashing is not None:
            hashing.cancel()
        raise
    return TracePlan(
        before=before,
        measured=built if complete else itertools.chain(built, _until_error(feed, trace.counts)),
        total=len(built) if complete else None,
        info={"prompts": prompts.info},
        notes=lambda: _notes(trace),
        counts=lambda: {**facts, **_counters(trace), **bodies.facts()},
    )


# ---------------------------------------------------------------- options


def _refuse_ignored(options: Options) -> None:
    given = options.trace_options
    session = given.get("pacing") == "session"
    timed = (options.rate is None and options.concurrency is None) or options.arrival == "recorded"
    if options.arrival == "recorded" and options.rate is None:
        raise UsageError("--arrival recorded needs --rate R: without it the trace's own times are the default")
    if not timed:
        how = "--rate" if options.rate is not None else "--concurrency"
        if "speedup" in given and not (session and given.get("speedup_delays")):
            raise UsageError(f"--speedup would be ignored: {how} sets the pace, not the trace's times")
        if "max_gap_s" in given and not session:
            raise UsageError(f"--max-gap would be ignored: {how} sets the pace, not the trace's times")
    if given.get("speedup_delays") and not (session and "speedup" in given):
        raise UsageError("--speedup-delays needs --speedup X and --pacing session")
    if "from_s" in given and "to_s" in given and given["from_s"] >= given["to_s"]:
        raise UsageError(f"--from {given['from_s']:g} must be below --to {given['to_s']:g}")


def _rules(options: Options, info: ServerInfo) -> Rules:
    given = options.trace_options
    limit = given.get("max_model_len", info.max_model_len)
    if limit is None and "overflow" in given:
        raise UsageError("--overflow needs --max-model-len N: the server does not say how long its requests may be")

    def time_ns(name: str) -> int | None:
        return None if name not in given else round(given[name] * 1e9)

    return Rules(
        timed=options.rate is None and options.concurrency is None,
        speedup=given.get("speedup", 1.0),
        speedup_delays=bool(given.get("speedup_delays")),
        from_ns=time_ns("from_s"),
        to_ns=time_ns("to_s"),
        max_gap_ns=time_ns("max_gap_s"),
        max_model_len=limit,
        overflow=given.get("overflow", "skip"),
        zero_output=given.get("zero_output", "skip"),
        default_output=options.output_tokens.low,
    )


def _with_speedup(rules: Rules, options: Options, trace: Trace) -> Rules:
    """The rules whose speed-up makes --rate the mean rate; reads the trace once more, in full."""
    assert options.rate is not None and options.trace is not None
    with Trace(options.trace, trace.format, trace.block_size) as again:
        recorded = mean_rate_per_s(replay(again.rows(), replace(rules, timed=True), again.counts, again.name))
    return replace(rules, timed=True, speedup=options.rate / recorded)


def _kind(options: Options, info: ServerInfo, trace: Trace) -> str:
    """ids or text: conversations continue in text, as answers are text."""
    if options.prompt_kind != "auto":
        return options.prompt_kind
    if options.endpoint == "chat" or not info.takes_token_ids:
        return "text"
    continued = any((row.context_mode or trace.context_mode) != "full" for row in trace.peeked)
    return "text" if continued else "ids"


# ---------------------------------------------------------------- order, sessions, workers


def _requests(
    options: Options,
    trace: Trace,
    rules: Rules,
    bodies: _Bodies,
    arrival_seed: np.random.SeedSequence,
    first: int,
    worker: int,
) -> Iterator[Planned]:
    items = replay(trace.rows(), rules, trace.counts, trace.name)
    steps: Iterable[_Step]
    if options.trace_options.get("pacing") == "session":
        steps = _linked(items)
        if rules.timed:
            steps = _earliest_first(steps)
    else:
        steps = (
            _Step(item, item.offset_ns, (), None, bodies.group(item.row, number)) for number, item in enumerate(items)
        )
    offsets: Iterator[int | None] = itertools.repeat(None)
    if options.rate is not None and not rules.timed:
        offsets = offsets_ns(
            options.arrival,
            rate_per_s=options.rate,
            seed=arrival_seed,
            count=1 << 62,
            burstiness=options.burstiness,
        )
    with trace:
        for position, step in enumerate(itertools.islice(steps, options.requests)):
            due_ns = step.earliest_ns if rules.timed else next(offsets)
            if due_ns is None and rules.timed:
                where = f"{trace.name}, line {step.item.row.line}"
                raise TraceError(f"{where}: no timestamp: its time depends on the turn before: use --pacing session")
            request_id = f"{options.seed or 0:08x}-{first + position:06d}"
            if step.turn is not None:
                step.turn.id = request_id
            if position + 1 == options.requests:
                trace.counts.ended_by = "--requests"
            if step.group % options.workers == worker:
                yield first + position, bodies.request(first + position, request_id, step, due_ns)


def _linked(items: Iterable[Replayed]) -> Iterator[_Step]:
    """Each row with the requests it waits for, and the earliest time it can be due, if answers took no time."""
    sessions: dict[str, _Turn] = {}
    named: dict[str, _Turn] = {}
    groups = itertools.count()
    for item in items:
        row = item.row
        after = [named[name] for name in row.after if name in named]
        if not after and row.session_id is not None and row.session_id in sessions:
            after = [sessions[row.session_id]]
        group = after[0].group if after else next(groups)
        earliest_ns = item.offset_ns
        if after:
            earliest_ns = max(turn.earliest_ns for turn in after)
            if item.delay_ns is not None:
                earliest_ns = max(earliest_ns, after[0].earliest_ns + item.delay_ns)
            elif item.offset_ns is not None:
                earliest_ns = max(earliest_ns, item.offset_ns)
        turn = None
        if row.session_id is not None or row.request_id is not None:
            turn = _Turn("", earliest_ns or 0, group)
            if row.session_id is not None:
                sessions[row.session_id] = turn
            if row.request_id is not None:
                named[row.request_id] = turn
                if len(named) > _KNOWN_IDS:
                    del named[next(iter(named))]
        yield _Step(item, earliest_ns, tuple(after), turn, group)


def _earliest_first(steps: Iterable[_Step]) -> Iterator[_Step]:
    """In order of the earliest time, as far as the rows held allow; a later turn comes too late rather than wrong."""
    held: list[tuple[int, int, _Step]] = []
    for number, step in enumerate(steps):
        heapq.heappush(held, (step.earliest_ns or 0, number, step))
        if len(held) > _AHEAD_ROWS:
            yield heapq.heappop(held)[2]
    while held:
        yield heapq.heappop(held)[2]


def _build_ahead(feed: Iterator[Planned]) -> tuple[list[Planned], bool]:
    """The first requests, and whether they are all."""
    built: list[Planned] = []
    size = 0
    end_s = time.monotonic() + _BUILT_S
    for planned in feed:
        built.append(planned)
        size += len(planned[1].body)
        if len(built) >= _BUILT_AHEAD or size >= _BUILT_BYTES or time.monotonic() > end_s:
            return built, False
    return built, True


def _until_error(feed: Iterator[Planned], counts: Counts) -> Iterator[Planned]:
    """A row that cannot be replayed ends the replay, not the run: what was measured so far is kept, and says so."""
    try:
        yield from feed
    except TraceError as error:
        counts.ended_by = str(error)


def _before(bodies: _Bodies, trace: Trace, rules: Rules, count: int) -> Iterator[Planned]:
    """The cold request and the warm-up: prompts of their own as long as the first rows', with short answers."""
    sizes = []
    try:
        for item in replay(trace.peeked, rules, Counts(), trace.name):
            sizes.append((item.input_length or 128, min(item.output_length, _WARMUP_OUTPUT)))
            if len(sizes) >= count:
                break
    except TraceError:
        pass  # the measured rows will say it
    for index in range(count):
        length, output = sizes[index % len(sizes)] if sizes else (128, 16)
        yield index, bodies.warmup(index, length, output)


# ---------------------------------------------------------------- bodies


class _Bodies:
    """Rows to requests, in order; rows that continue each other must come to the same one."""

    def __init__(self, options: Options, info: ServerInfo, prompts: Synthetic, trace: Trace, *, live: bool) -> None:
        self._seed = options.seed or 0
        self._prompts = prompts
        self._text_only = prompts.info.get("kind") == "text"
        self._chat = options.endpoint == "chat"
        self._trace = trace
        self._block_size = trace.block_size or 1
        self._live = live
        self._model = info.model
        self._body = Body(options, info.model)
        self._talks: dict[str, _Talk] = {}
        self._contexts: dict[str, list[Chunk]] = {}  # of sessions with prefix_length
        self._contiguous = trace.format in ("sharegpt", "aiperf-multi-turn")  # a session's rows are not interleaved
        self._images = 0

    def facts(self) -> dict[str, Any]:
        return {"images_left_out": self._images} if self._images else {}

    def warmup(self, index: int, length: int, output: int) -> Request:
        prompt = self._prompts.prompt(index, length)
        return Request(
            id=f"{self._seed:08x}-{index:06d}",
            phase=Phase.WARMUP if index else Phase.COLD,
            path=self._body.path,
            body=self._body.serialize(prompt.content, output),
            input_tokens=prompt.input_tokens,
            output_tokens=output,
        )

    def group(self, row: TraceRow, number: int) -> int:
        """Rows of one number must be made by one worker, as they continue each other; else a number of its own."""
        mode = row.context_mode or self._trace.context_mode
        if row.session_id is not None and (mode != "full" or row.prefix_length is not None):
            return key_of(row.session_id) >> 20
        return number

    def request(self, index: int, request_id: str, step: _Step, due_ns: int | None) -> Request:
        item, row = step.item, step.item.row
        tags = dict(row.tags or {})
        if row.model is not None:
            tags["model"] = row.model
        self._images += row.num_images or 0
        made = Request(
            id=request_id,
            phase=Phase.MEASURED,
            path=self._body.path,
            body=b"",
            planned_ns=due_ns,
            input_tokens=item.input_length,
            output_tokens=item.output_length,
            after=tuple(turn.id for turn in step.after),
            delay_ns=(item.delay_ns or 0) if step.after else 0,
            session_open=step.turn is not None,
            tags=tags,
        )
        return replace(made, **self._content(index, step))

    def _content(self, index: int, step: _Step) -> dict[str, Any]:
        """The fields of the Request that depend on the kind of content."""
        item, row = step.item, step.item.row
        mode = row.context_mode or self._trace.context_mode
        extra = dict(row.extra or {})
        if row.tools is not None:
            extra["tools"] = row.tools
        if row.content is not None and row.content[0] == "payload":
            return self._payload(row.content[1])
        if mode != "full" and row.session_id is not None:
            return self._continued(index, step, extra, live=mode == "delta" and self._live)
        content, length = self._whole(index, item)
        fields: dict[str, Any] = {"body": self._body.serialize(content, item.output_length, **extra)}
        if length is not None:
            fields["input_tokens"] = length
        return fields

    def _whole(self, index: int, item: Replayed) -> tuple[Any, int | None]:
        """A prompt that needs nothing from before, and its length where that is known for sure."""
        row = item.row
        if row.content is None:
            assert item.input_length is not None
            prompt = self._prompts.of_chunks(index, self._chunks(row, index, item.input_length))
            return prompt.content, prompt.input_tokens
        name, value = row.content
        if name == "messages" and not self._chat:
            raise self._wrong(row, "messages need --endpoint chat")
        if name == "prompt_token_ids" and self._chat:
            raise self._wrong(row, "prompt_token_ids need --endpoint completions")
        return value, len(value) if name == "prompt_token_ids" else None

    def _wrong(self, row: TraceRow, what: str) -> TraceError:
        return TraceError(f"{self._trace.name}, line {row.line}: {what}")

    def _payload(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A body as it was recorded; only the model, and the streaming that measuring needs, are set."""
        body = {**payload, "model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        asked = payload.get("max_completion_tokens", payload.get("max_tokens"))
        path = "/v1/chat/completions" if "messages" in payload else "/v1/completions"
        return {"body": orjson.dumps(body), "path": path, "output_tokens": asked if type(asked) is int else None}

    def _chunks(self, row: TraceRow, index: int, length: int) -> Sequence[Chunk]:
        if row.hash_ids:
            return block_chunks(row.hash_ids, self._block_size, length, row.hash_scope)
        if row.segments is not None:
            chunks: list[Chunk] = []
            left = length
            for segment in row.segments:
                tokens = min(segment["tokens"], left)
                if tokens:
                    chunks.append((key_of(f"segment/{segment.get('kind')}/{segment['id']}"), tokens))
                left -= tokens
            return [*chunks, (None, left)] if left else chunks
        if row.prefix_length is not None and row.session_id is not None:
            return self._after_prefix(row, index, length)
        return [(None, length)]

    def _after_prefix(self, row: TraceRow, index: int, length: int) -> Sequence[Chunk]:
        """The first prefix_length tokens are those of the session's context before. Where that was shorter (the answer
        was part of it) it goes on with tokens of the session's own, which no cache can have."""
        assert row.session_id is not None and row.prefix_length is not None
        shared = min(row.prefix_length, length)
        chunks: list[Chunk] = []
        left = shared
        for key, tokens in self._contexts.get(row.session_id, ()):
            if left > 0:
                chunks.append((key, min(tokens, left)))
                left -= tokens
        if left > 0:
            chunks.append((key_of(f"context/{row.session_id}/{index}"), left))
        if length > shared:
            chunks.append((key_of(f"turn/{row.session_id}/{index}"), length - shared))
        self._contexts[row.session_id] = chunks
        return chunks

    # ------------------------------------------------------------ conversations

    def _continued(self, index: int, step: _Step, extra: dict[str, Any], *, live: bool) -> dict[str, Any]:
        """A turn that is appended to what was said: to the server's own answers, or to the recorded ones."""
        item, row = step.item, step.item.row
        assert row.session_id is not None
        if not self._text_only:
            raise self._wrong(row, "a conversation that goes on needs --prompt-kind text: answers are text")
        new = self._messages(index, item)
        if self._contiguous and row.session_id not in self._talks:
            self._talks.clear()  # requests that wait still hold their own
        talk = self._talks.setdefault(row.session_id, _Talk())
        output = item.output_length
        known_length = None if talk.messages or row.content is not None else item.input_length
        if live and step.after:
            before = step.after[0].id

            def make_body(records: Mapping[str, RequestRecord]) -> bytes:
                answered(talk, records.get(before))
                talk.messages += new
                talk.asked = len(new)
                return self._body.serialize(self._said(talk.messages), output, **extra)

            return {"make_body": make_body, "input_tokens": None}
        if talk.asked:  # in open pacing: the recorded answer of the turn before
            raise self._wrong(
                row, "the turn before has no recorded answer (output_text): use --pacing session, for the server's own"
            )
        talk.messages += new
        body = self._body.serialize(self._said(talk.messages), output, **extra)
        talk.asked = len(new)
        if not live and row.output_text is not None:
            talk.messages.append({"role": "assistant", "content": row.output_text})
            talk.asked = 0
        return {"body": body, "input_tokens": known_length}

    def _messages(self, index: int, item: Replayed) -> list[dict[str, Any]]:
        if item.row.content is not None and item.row.content[0] == "messages":
            return list(item.row.content[1])
        return [{"role": "user", "content": self._whole(index, item)[0]}]

    def _said(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        """Messages for chat, their texts one after another for completions."""
        if self._chat:
            return list(messages)
        return "\n".join(str(message.get("content") or "") for message in messages)


def answered(talk: _Talk, record: RequestRecord | None) -> None:
    """Add the answer to what was asked; a turn that failed is taken out of the conversation."""
    if record is not None and record.ok and record.text:
        talk.messages.append({"role": "assistant", "content": record.text})
    elif talk.asked:
        del talk.messages[-talk.asked :]
    talk.asked = 0


# ---------------------------------------------------------------- what run.json says


def _facts(options: Options, trace: Trace, rules: Rules, digest: str) -> dict[str, Any]:
    given = options.trace_options
    if options.rate is not None:
        how = f"{options.arrival} at --rate"
    else:
        how = "closed loop" if options.concurrency is not None else "recorded times"
    limit_from = None
    if rules.max_model_len is not None:
        limit_from = "--max-model-len" if "max_model_len" in given else "the server"
    return {
        "file": trace.name,
        "sha256": digest,
        "format": trace.format,
        "header": trace.header or None,
        "block_size": trace.block_size,
        "block_size_from": trace.block_size_from,
        "replay": how,
        "pacing": given.get("pacing", "open"),
        "speedup": rules.speedup if rules.timed else None,
        "speedup_delays": rules.speedup_delays,
        "from_s": given.get("from_s"),
        "to_s": given.get("to_s"),
        "max_gap_s": given.get("max_gap_s"),
        "max_model_len": rules.max_model_len,
        "max_model_len_from": limit_from,
        "overflow": rules.overflow,
        "zero_output": rules.zero_output,
    }


def _counters(trace: Trace) -> dict[str, Any]:
    counts = trace.counts
    return {
        "offset_s": None if counts.offset_ns is None else counts.offset_ns / 1e9,
        "read": counts.read,
        "planned": counts.planned,
        "skipped": dict(counts.skipped),
        "clipped": dict(counts.clipped),
        "inversions": counts.inversions,
        "capped_gaps": counts.capped_gaps,
        "capped_delays": counts.capped_delays,
        "zero_output_as_one": counts.zero_output_as_one,
        "estimated_output": counts.estimated_output,
        "default_output": counts.default_output,
        "ended_by": counts.ended_by,
        "unknown_keys": dict(counts.unknown_keys),
        "quirks": trace.found.sentences(),
    }


_SKIPPED = {"zero_output": "no output", "no_input": "no input", "too_long": "longer than the model takes"}


def _notes(trace: Trace) -> tuple[str, ...]:
    """What makes one doubt that this was the replay that was wanted."""
    counts = trace.counts
    notes = [quirk for quirk in trace.found.quirks if "in seconds" in quirk]
    notes += [f"{counts.skipped[why]:,} rows skipped: {said}" for why, said in _SKIPPED.items() if counts.skipped[why]]
    if counts.clipped:
        rows = counts.clipped["input_rows"] + counts.clipped["output_rows"]
        tokens = counts.clipped["input_tokens"] + counts.clipped["output_tokens"]
        notes.append(f"{rows:,} rows were clipped by {tokens:,} tokens to fit the model")
    if counts.unknown_keys:
        notes.append(f"keys that are not of the format were ignored: {', '.join(sorted(counts.unknown_keys))}")
    if counts.ended_by not in (None, "--to", "--requests"):
        notes.append(f"the replay ended early: {counts.ended_by}")
    return tuple(f"trace {trace.name}: {note}" for note in notes)


def settled(finals: Sequence[Mapping[str, Any]], started: int) -> dict[str, Any]:
    """The trace part of run.json from what each worker says at its end: read = sent + skipped.

    The worker that read furthest has seen every row that any of them has. What it planned and nobody started (the end
    of --duration, Ctrl-C) is skipped as not_started.
    """
    furthest = max(finals, key=lambda final: int(final["read"]))
    trace = {**finals[0], **furthest}
    skipped = dict(trace["skipped"])
    planned = trace.pop("planned")
    if planned > started:
        skipped["not_started"] = planned - started
    return {**trace, "sent": trace["read"] - sum(skipped.values()), "skipped": skipped}

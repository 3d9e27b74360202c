"""explain.json as text: the table of arms, both orders of the split, the account of the static batch, memory, and a few
sentences to quote. Pure. No ratio stands without its absolute values and its baseline in the same row.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.report import columns_of, number

Document = Mapping[str, Any]
WIDTH = 118  # characters; tables may be wider
_FLAGS = ("vllm_args", "reference_args")


def text_of(document: Document) -> str:
    """Everything that a terminal shows, and report.html as text."""
    parts = [_arms(document)]
    if "total" in document:
        parts += [_split(document)]
        parts += [_account(document, name, account) for name, account in document.get("static_accounts", {}).items()]
        parts += [_memory(document), "In plain words\n" + "\n".join(_wrapped(f"- {s}") for s in sentences(document))]
    else:
        parts.append("interrupted: no split without all arms" if document.get("interrupted") else "no split: see above")
    return "\n\n".join(part for part in parts if part)


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_long_words=False))


# ---------------------------------------------------------------- arms


def _arms(document: Document) -> str:
    arms = document["arms"]
    if not arms:
        return "no arm was measured"
    base_name = document.get("baseline", "serial")
    base = arms.get(base_name, {}).get("tokens_per_s")
    full = any("requests" in arm for arm in arms.values())
    head = ["arm", "streams"]
    if full:
        head += ["requests", "failed", "output tok", "seconds"]
    head += ["output tok/s", f"ratio to {base_name}"]
    if full:
        head += ["TTFT p50", "p99 ms", "gap p50", "p99 ms", "cold TTFT ms"]
    rows = [head]
    for name, arm in arms.items():
        rate = arm["tokens_per_s"]
        row = [name, str(arm["streams"])]
        if full:
            row += [str(arm["requests"]), str(arm["failed"]), str(arm["output_tokens"]), number(arm["seconds"])]
        row += [number(rate), f"{number(rate / base)} x {number(base)}" if rate and base else "-"]
        if full:
            ttft, gap = arm["ttft_ms"], arm["gap_ms"]
            cold = (arm["cold"] or {}).get("ttft_ms")
            row += [number(value) for value in (ttft["p50"], ttft["p99"], gap["p50"], gap["p99"], cold)]
        rows.append(row)
    lines = columns_of(rows)
    if full:
        lines.append(
            f"tok/s: geometric mean of {document['rounds']} rounds; warm-up and the cold first request are in none of "
            "the other columns"
        )
        extra = "".join(f"; {key.replace('_', ' ')} {document[key]}" for key in _FLAGS if document.get(key))
        lines.append(
            f"{document['model']} in {document['dtype']} on {document['machine']['device']}; prompts of "
            f"{document['input_tokens']}, answers of {document['output_tokens']} tokens{extra}"
        )
        lines += _doubts(document)
    return "\n".join(lines)


def _doubts(document: Document) -> list[str]:
    """What must be known before any ratio is believed."""
    lines = []
    for name, arm in document["arms"].items():
        rounds = [rate for rate in arm["rounds_tokens_per_s"] if rate]
        if arm["failed"]:
            lines.append(f"! {name}: {arm['failed']} of {arm['requests']} requests failed; they are in no figure")
        if arm["output_tokens"] != arm["output_tokens_asked"]:
            lines.append(
                f"! {name}: {arm['output_tokens']} output tokens where {arm['output_tokens_asked']} were asked for: "
                "not the same work"
            )
        if not arm["valid"]:
            lines.append(f"! {name}: INVALID, the client was the bottleneck in a round: see its report")
        if len(rounds) > 1 and max(rounds) > 1.15 * min(rounds):
            lines.append(
                f"! {name}: rounds from {number(min(rounds))} to {number(max(rounds))} tok/s: a noisy machine, "
                "or not yet warm"
            )
        if arm["answer"] is not None:
            lines.append(f"  {name} says of the capital of France: {' '.join(arm['answer'].split())[:80]}")
    return lines


# ---------------------------------------------------------------- the split


def _split(document: Document) -> str:
    roles = document["roles"]
    rate = {role: f"{name} {number(document['arms'][name]['tokens_per_s'])}" for role, name in roles.items()}
    one_step = {
        "total": (rate["many"], rate["base"]),
        "engine_first.engine": (rate["one"], rate["base"]),
        "engine_first.scheduling": (rate["many"], rate["one"]),
        "scheduling_first.scheduling": (rate["batched"], rate["base"]),
        "scheduling_first.engine": (rate["many"], rate["batched"]),
    }

    def row(label: str, key: str, how: str | None = None) -> list[str]:
        group, _, name = key.partition(".")
        value = document[group][name] if name else document[group]
        interval = document["intervals"][key]
        between = f"{number(interval[0])} to {number(interval[1])}" if interval else "one round"
        return [label, f"{number(value)}x", between, how or "{} / {} tok/s".format(*one_step[key])]

    rows = [
        ["factor", "", "95 % interval", "tok/s"],
        row("total", "total"),
        row("engine first: engine, one stream each", "engine_first.engine"),
        row("  then scheduling, many streams for one", "engine_first.scheduling"),
        row("scheduling first: batching the reference", "scheduling_first.scheduling"),
        row("  then engine, many streams each", "scheduling_first.engine"),
        row(
            "interaction (1: the order does not matter)",
            "interaction",
            f"({rate['many']} x {rate['base']}) / ({rate['one']} x {rate['batched']})",
        ),
        row(
            "average of both orders: engine",
            "shapley.engine",
            f"sqrt({rate['one']} / {rate['base']} x {rate['many']} / {rate['batched']})",
        ),
        row(
            "  scheduling",
            "shapley.scheduling",
            f"sqrt({rate['many']} / {rate['one']} x {rate['batched']} / {rate['base']})",
        ),
    ]
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:<{widths[2]}}  {r[3]}".rstrip() for r in rows]
    return "\n".join([f"Where the {number(document['total'])}x comes from (baseline: {document['baseline']})", *lines])


# ---------------------------------------------------------------- the static batch


def _account(document: Document, name: str, account: Mapping[str, Any]) -> str:
    base = document["baseline"]
    arms = document["arms"]
    sums, alone = arms[name]["account"], arms[base]["account"]
    rate, base_rate = (number(account["tokens_per_s"][kind]) for kind in ("static", "serial"))
    step = account["step_ms"]
    shares, base_shares = account["shares"]["static"], account["shares"]["serial"]
    rows = [
        [
            "rows in a step",
            number(account["rows"]),
            f"{number(_rows(sums))} of {name}, {number(_rows(alone))} of {base}",
        ],
        [
            "live: row-steps that gave a token",
            number(account["live"]),
            f"{sums['useful_row_steps']:.0f} of {sums['row_steps']:.0f} of {name}; the rest were dead rows",
        ],
        [
            "step time",
            number(account["step"]),
            f"{number(step['serial'])} ms of {base} / {number(step['static'])} ms of {name}",
        ],
        [
            "share of time in decode steps",
            number(account["decode"]),
            f"{_percent(shares['decode'])} of {name} / {_percent(base_shares['decode'])} of {base}",
        ],
        ["product", f"{number(account['product'])}x", f"to be compared with {rate} / {base_rate} tok/s"],
        ["measured", f"{number(account['measured'])}x", f"{name} {rate} / {base} {base_rate} tok/s"],
        ["unexplained", f"{account['unexplained']:+.1%}", "measured / product - 1"],
    ]
    widths = [max(len(r[i]) for r in rows) for i in range(2)]
    lines = [f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]}" for r in rows]
    rest = ", ".join(
        f"{label} {_percent(shares[key])}"
        for key, label in (
            ("prefill_useful", "prefill of prompt tokens"),
            ("prefill_padding", "prefill of padding"),
            ("fill_wait", "waiting to fill the batch"),
            ("idle", "no request there"),
            ("rest", "set-up and clearing away"),
        )
    )
    return "\n".join(
        [
            f"Why {name} is {number(account['measured'])}x {base} ({rate} / {base_rate} tok/s), "
            f"not {arms[name]['streams']}x: out of the server's counters",
            *lines,
            _wrapped(f"outside of decode steps, of the time of {name}: {rest}"),
        ]
    )


def _rows(sums: Mapping[str, float]) -> float:
    return sums["row_steps"] / sums["steps"]


def _percent(share: float) -> str:
    return f"{share:.1%}"


# ---------------------------------------------------------------- memory


def _memory(document: Document) -> str:
    memory = document.get("memory") or {}
    rows: list[Sequence[str]] = [
        ("arm", "step ms", "least ms", "moves MB", "GB/s", "of bandwidth", "KV reserved MB", "KV used MB")
    ]
    for name, entry in memory.get("arms", {}).items():
        roof = entry.get("roofline")
        cells = ["-"] * 5
        if roof:
            cells = [
                number(roof["step_ms"]),
                number(roof["least_step_ms"]),
                number(roof["bytes_per_step"] / 1e6),
                number(roof["bytes_per_s"] / 1e9),
                f"{_percent(roof['share'])} of {number(roof['bandwidth_bytes_per_s'] / 1e9)}",
            ]
        kv = [number(entry[key] / 1e6) if key in entry else "-" for key in ("kv_bytes_reserved", "kv_bytes_used")]
        rows.append((name, *cells, *kv))
    if len(rows) == 1 or not memory.get("weight_bytes"):
        return ""
    lines = [
        "What bounds a step: bytes it must move (weights once, the KV of every row) against the memory's bandwidth"
    ]
    lines += columns_of(rows)
    per_token = memory["kv_bytes_per_token"]
    lines.append(f"weights {number(memory['weight_bytes'] / 1e6)} MB; KV cache {number(per_token / 1e3)} kB a token")
    for name, entry in memory["arms"].items():
        if "kv_tokens_that_fit" in entry:
            fit = entry["kv_tokens_that_fit"]
            arm = document["arms"][name]
            each = (arm["input_tokens"] + arm["output_tokens"]) / max(1, arm["requests"] - arm["failed"])
            lines.append(
                f"{name}: {number(fit * per_token / 1e9)} GB of paged KV cache hold {fit:.0f} tokens, "
                f"{fit / each:.0f} requests of this size ({each:.0f} tokens)"
            )
            break
    if cache := document.get("kv_cache"):
        base = document["baseline"]
        lines.append(
            f"KV cache: {base} {number(cache['with_tokens_per_s'])} tok/s, without it "
            f"{number(cache['without_tokens_per_s'])} tok/s: {number(cache['ratio'])}x"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------- sentences


def sentences(document: Document) -> list[str]:
    """A few sentences to quote, each with its baseline and its absolute numbers."""
    roles, arms = document["roles"], document["arms"]
    rate = {role: f"{number(arms[name]['tokens_per_s'])} tok/s" for role, name in roles.items()}
    first, second, average = document["engine_first"], document["scheduling_first"], document["shapley"]
    said = [
        f"{roles['many']} gave {rate['many']}, {number(document['total'])} times the {rate['base']} "
        f"of {roles['base']}.",
        f"Stream for stream the engine is {number(first['engine'])}x: {roles['one']} {rate['one']} against "
        f"{roles['base']} {rate['base']}; serving many streams at once is then {number(first['scheduling'])}x: "
        f"{roles['many']} {rate['many']} against {roles['one']} {rate['one']}.",
        f"Taken the other way, batching the reference is {number(second['scheduling'])}x ({roles['batched']} "
        f"{rate['batched']} against {roles['base']} {rate['base']}) and the engine {number(second['engine'])}x "
        f"({roles['many']} {rate['many']} against {roles['batched']} {rate['batched']}).",
        f"Free of the order, engine {number(average['engine'])}x times scheduling {number(average['scheduling'])}x "
        f"make the {number(document['total'])}x of {roles['many']} ({rate['many']}) over {roles['base']} "
        f"({rate['base']}).",
    ]
    account = document.get("static_account")
    if account:
        name, base = account["arm"], document["baseline"]
        step, dead = account["step_ms"], 1 - account["live"]
        said.append(
            f"{name} is {number(account['measured'])}x {base} ({number(account['tokens_per_s']['static'])} against "
            f"{number(account['tokens_per_s']['serial'])} tok/s): {number(account['rows'])} rows a step, "
            f"{_percent(dead)} of the row-steps dead, a step of {number(step['static'])} ms for one of "
            f"{number(step['serial'])} ms, "
            f"{_percent(account['shares']['static']['decode'])} of the time in steps "
            f"({_percent(account['shares']['serial']['decode'])} of {base}); "
            f"{account['unexplained']:+.1%} is unexplained."
        )
    return said

"""`loadgen trace describe | convert | generate`: what the commands do with flags that cli.py has parsed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click
import orjson

from loadgen.options import UsageError
from loadgen.trace_convert import convert, writing
from loadgen.trace_describe import describe, text_of, write_picture
from loadgen.trace_generate import Draw, Recipe, generate


def describe_file(
    path: str, *, trace_format: str | None, block_size: int | None, as_json: bool, plot: str | None
) -> int:
    """Print what is in a trace; with `plot` write the page, too."""
    if plot is None:
        description = describe(path, trace_format, block_size)
    else:
        description = write_picture(path, plot, trace_format, block_size)
    if as_json:
        sys.stdout.buffer.write(orjson.dumps(description, option=orjson.OPT_INDENT_2) + b"\n")
        sys.stdout.buffer.flush()
    else:
        click.echo(text_of(description))
    return 0


def convert_file(path: str, out: str, **how: Any) -> int:
    """Convert, and say on standard error what was lost."""
    done = convert(path, out, **how)
    lost = "".join(f"; {rows:,} rows: {what}" for what, rows in done["lost"].items())
    click.echo(f"{done['read']:,} rows read, {done['written']:,} written{lost}", err=True)
    if how["target"] != "loadgen" and done["block_size"] is not None:
        click.echo(
            f"blocks of {done['block_size']} tokens: the file does not say so, its reader must be told", err=True
        )
    return 0


def generate_file(out: str, values: Mapping[str, Any]) -> int:
    """Write the trace of a recipe; a value that is no Draw is refused with the flag's name."""
    made = dict(values)
    for flag, name in (("input", "input"), ("output", "output"), ("turns", "turns"), ("think", "think_s")):
        if made.get(name) is not None:
            try:
                made[name] = Draw.parse(made[name])
            except UsageError as error:
                raise UsageError(f"--{flag} {error}") from None
    lines = list(generate(Recipe(**made)))
    with writing(out) as file:
        file.writelines(lines)
    return 0

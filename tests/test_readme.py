"""What the README tells a newcomer to type exists: scripts, commands, flags."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from loadgen.cli import cli

CLONE = Path(__file__).resolve().parent.parent
LINES = [line.strip() for line in (CLONE / "README.md").read_text().splitlines() if line.startswith("    ")]
LOADGEN = [line for line in LINES if line.startswith(".venv/bin/loadgen")]


@pytest.mark.parametrize("line", LOADGEN)
def test_commands_and_flags(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    group = cli
    name = words[0] if words and not words[0].startswith("-") else "run"
    command = group.commands[name]
    assert isinstance(command, click.Command)
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_there_is_something_to_test() -> None:
    assert len(LOADGEN) >= 8


def test_scripts_and_files() -> None:
    text = (CLONE / "README.md").read_text()
    for script in re.findall(r"bash ([\w./]+\.sh)", text):
        assert (CLONE / script).exists(), script
    for trace in re.findall(r"--trace (\S+)", text):
        assert (CLONE / trace).exists(), trace
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (CLONE / "loadgen" / name).exists(), name


def test_every_command_is_shown() -> None:
    shown = {shlex.split(line, comments=True)[1] for line in LOADGEN}
    assert set(cli.commands) - {"run", "trace"} <= shown

"""A document and its Chinese twin say the same: commands, headings, tables, what is quoted. And what the table of
failures quotes, the scripts say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent
TWINS = sorted(path for folder in (CLONE, CLONE / "docs") for path in folder.glob("*.zh-CN.md"))


def original(twin: Path) -> Path:
    return twin.with_name(twin.name.replace(".zh-CN", ""))


def commands(path: Path) -> list[str]:
    """The lines of the code blocks, indented or fenced, without comments (which are translated)."""
    lines: list[str] = []
    fenced = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            command = re.sub(r"(^|\s+)#\s.*$", "", line.strip())
            if command:
                lines.append(command)
    return lines


def prose(path: Path) -> str:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def heading_levels(path: Path) -> list[int]:
    return [len(mark) for mark in re.findall(r"^(#+) ", prose(path), flags=re.M)]


def table_widths(path: Path) -> list[int]:
    return [line.count("|") for line in prose(path).splitlines() if line.startswith("|")]


def quoted(path: Path) -> list[str]:
    return sorted(re.findall(r"`([^`\n]+)`", prose(path)))


def linked(path: Path) -> list[str]:
    """Targets of links; a link may lead to the twin of what the other links to."""
    return sorted(target.replace(".zh-CN", "") for target in re.findall(r"\]\(([^)]+)\)", prose(path)))


def test_there_are_twins() -> None:
    assert CLONE / "docs" / "wsl2.zh-CN.md" in TWINS


@pytest.mark.parametrize("twin", TWINS, ids=[path.name for path in TWINS])
@pytest.mark.parametrize(
    "part", [commands, heading_levels, table_widths, quoted, linked], ids=lambda part: part.__name__
)
def test_twins_have_the_same(twin: Path, part) -> None:  # type: ignore[no-untyped-def]
    assert part(twin) == part(original(twin))


@pytest.mark.parametrize("twin", TWINS, ids=[path.name for path in TWINS])
def test_links_lead_somewhere(twin: Path) -> None:
    for path in (twin, original(twin)):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose(path)):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_scripts_say_what_the_table_of_failures_quotes() -> None:
    said = "".join(
        (CLONE / name).read_text()
        for name in ("server/common.sh", "setup/check.sh", "setup/install.sh", "server/start_vllm.sh", "setup.sh")
    )
    rows = re.findall(r"^\| `([^`]+)` \|", prose(CLONE / "docs" / "wsl2.md"), flags=re.M)
    assert len(rows) >= 15
    by_others = {"/bin/bash^M: bad interpreter"}
    assert [row for row in rows if row not in said] == sorted(by_others)


def test_commands_of_the_document_exist() -> None:
    for command in commands(CLONE / "docs" / "wsl2.md"):
        if command.startswith("bash "):
            assert (CLONE / command.split()[1]).exists(), command

"""docs/faults.md names tests that exist, says of each failure what the report says, and the limits that hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from loadgen import http1, sse
from loadgen.options import Options
from loadgen.record import REMEDY, FailureKind

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("|")]


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_kind_has_its_row_and_every_test_exists() -> None:
    kinds = {row[0]: row for row in rows() if re.fullmatch(r"K\d\d", row[0])}
    assert list(kinds) == [f"K{number:02}" for number in range(1, 25)]
    for kind, row in kinds.items():
        assert len(row) == 4 and all(row) and TEST.search(row[3]), kind
    named = set(TEST.findall(TEXT))
    assert len(named) > 50
    for path in {path for path, _ in named}:
        missing = {name for of, name in named if of == path} - names_in(path)
        assert not missing, f"{path} has no {missing}"


def test_every_test_of_a_kind_is_in_the_row_of_its_kind() -> None:
    path = "tests/test_faults_client.py"
    table = {row[0]: {name for _, name in TEST.findall(row[3])} for row in rows() if re.fullmatch(r"K\d\d", row[0])}
    for name in names_in(path):
        if match := re.match(r"test_k(\d\d)_", name):
            assert name in table[f"K{match[1]}"], name


def test_every_failure_has_its_remedy_in_the_words_of_the_report() -> None:
    told = {row[0].strip("`"): row[1] for row in rows() if len(row) == 2}
    assert set(FailureKind) == set(REMEDY)
    for kind, remedy in REMEDY.items():
        assert told[str(kind)] == remedy


def test_the_limits_are_those_of_the_code() -> None:
    told = {row[0]: row[1] for row in rows() if len(row) == 3}
    options = Options()
    assert told["`--connect-timeout`"] == f"{options.connect_timeout_s:g} s"
    assert told["`--idle-timeout`"] == f"{options.idle_timeout_s:g} s"
    assert told["`--request-timeout`"] == "none" and options.request_timeout_s is None
    assert told["a line of an event stream"] == f"{sse.MAX_LINE_BYTES >> 20} MiB"
    assert told["headers of an answer"] == f"{http1.MAX_HEAD_BYTES >> 20} MiB"
    assert told["body of an answer"] == f"{http1.MAX_BODY_BYTES >> 20} MiB"

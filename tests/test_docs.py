"""Links lead somewhere, examples run, tests they name exist, CI runs the README's commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_python_runs(name):
    blocks = code_blocks((ROOT / name).read_text(encoding="utf-8"), "python")
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


def test_ci_runs_the_commands_of_the_readme():
    first = code_blocks(README, "bash")[0]
    commands = [line.split("#")[0].strip() for line in first.splitlines()]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert len(commands) == 2
    assert set(commands) <= set(ci)


def test_cases_are_complete_and_name_tests_that_exist():
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    assert sorted(int(number) for number, _ in rows) == list(range(1, 38))
    for number, held_by in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", held_by)
        assert named, f"case {number} names no test"
        for path, function in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not function or function in functions, f"case {number}: {path} has no {function}"

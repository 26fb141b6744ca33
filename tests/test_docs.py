"""README and docs/: their examples work, their links lead somewhere, their sentences can be read once."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.__main__ import COMMANDS, loaded
from pipeline.core import params
from pipeline.evalset import tasks
from tools import batch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = {"models.md"}  # by a command, as are the parts between marks
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(#[\w-]+)?\)")
MARKED = re.compile(r"<!-- (\w+) -->.*?<!-- /\1 -->", re.DOTALL)


def blocks(kind: str) -> list[Any]:
    found = [(page.name, text) for page in PAGES for language, text in BLOCK.findall(page.read_text("utf-8")) if language == kind]
    return [pytest.param(text, id=f"{name}-{k}") for k, (name, text) in enumerate(found)]


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """base with the example's keys; a model, variants and rules are replaced whole."""
    whole = ("model", "variants", "rules")
    return base | {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) and k not in whole else v
        for k, v in change.items()
    }


@pytest.mark.parametrize("text", blocks("yaml"))
def test_settings_on_the_pages_are_valid(text: str, tmp_path: Path) -> None:
    own = yaml.safe_load((ROOT / "params.yaml").read_text("utf-8"))
    change = yaml.safe_load(text)
    if "variants" in change:  # the example's variants stand alone: what names others goes
        own["gate"] |= {"required": ["int8"]}
        own["serving"] = None
        del own["serving"]
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(merged(own, change)), "utf-8")
    settings = params.load(file)
    assert settings.variants


@pytest.mark.parametrize("text", blocks("sh"))
def test_commands_on_the_pages_exist(text: str) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for line in text.splitlines():
        words = [w for w in shlex.split(line, comments=True) if "=" not in w or w.startswith("-")]
        if words[:2] == ["quantgate", "--help"]:
            continue
        if words[:1] == ["quantgate"]:
            command = loaded(words[1])
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
            assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known, line
        elif words[:1] == ["make"]:
            assert set(words[1:]) <= set(targets), line
        elif words[:1] in (["python"], ["sh"]):
            assert (ROOT / words[1]).exists(), line
        else:
            assert words[:1] in ([], ["."], ["dvc"], ["git"], ["pip"]), line


@pytest.mark.parametrize("text", blocks("jsonl"))
def test_rows_on_the_pages_are_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "key" in json.loads(text.splitlines()[0]):
        (tmp_path / "requests.jsonl").write_text(text, "utf-8")
        assert len(batch.read(tmp_path / "requests.jsonl", 8)) == len(text.splitlines())
        return
    monkeypatch.chdir(tmp_path)
    tasks.TASKS.mkdir(parents=True)
    (tasks.TASKS / "mine.jsonl").write_text(text, "utf-8")
    assert len(tasks.load_task("mine")[1]) == len(text.splitlines())


@pytest.mark.parametrize("text", blocks("python"))
def test_code_on_the_pages_is_python(text: str) -> None:
    ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_page_has_an_example_and_no_dead_link(page: Path) -> None:
    text = page.read_text("utf-8")
    assert page.name in WRITTEN or BLOCK.search(text)
    for link, anchor in LINK.findall(text):
        if "://" in link:
            continue
        target = page.parent / link
        assert target.exists(), link
        heads = (
            [
                re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            ]
            if anchor
            else []
        )
        assert not anchor or anchor[1:] in heads, f"{link}{anchor}"


def sentences(text: str) -> list[str]:
    """Sentences of a Markdown text: without code, tables and what commands write."""
    text = BLOCK.sub("", MARKED.sub("", text))
    lines = [
        "" if line.startswith(("|", "#", "<", "!")) else re.sub(r"^\s*(-|\d+\.|>) ", "\n\n", line) for line in text.splitlines()
    ]
    paragraphs = "\n".join(lines).split("\n\n")
    return [s for p in paragraphs for s in re.split(r"(?<=[.?!:;·])\s+", " ".join(p.split())) if s]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in WRITTEN], ids=lambda p: p.name)
def test_no_sentence_has_more_than_thirty_words(page: Path) -> None:
    long = [s for s in sentences(page.read_text("utf-8")) if len(s.split()) > 30]
    assert not long


def test_readme_is_short_and_every_command_has_an_example() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130
    for name, command in COMMANDS.items():
        assert all(example.startswith(f"quantgate {name}") for example in command.examples)
        assert command.examples and len(command.about) <= 70

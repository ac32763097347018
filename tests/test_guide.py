"""The teaching guide says what is so: its tables, its links, the code it names, its exercises."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import runs
from tests.support import tiny_llm, tiny_loaded

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAPTERS = sorted(DOCS.glob("*.md"))
COUNTED = [name for name in runs.RUNS if not name.endswith("-time")]
TIMED = [name for name in runs.RUNS if name.endswith("-time")]
# What the chapters' model looks like to the one run that counts with its shape, and not only with lengths.
SMOLLM2 = {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def text_of(chapter: Path) -> str:
    return chapter.read_text(encoding="utf-8")


def filled_in(kind: str) -> list[tuple[str, str, str]]:
    """(chapter, name, content) of every place that is filled in by assets/figures.py."""
    place = re.compile(rf"<!-- {kind}: (\S+) -->\n(.*?)<!-- /{kind} -->", re.DOTALL)
    return [(path.name, *found) for path in CHAPTERS for found in place.findall(text_of(path))]


def test_there_are_chapters():
    assert len(CHAPTERS) >= 9


@pytest.mark.parametrize("name", COUNTED)
def test_what_a_table_counts_is_what_the_engine_does(name):
    """On another model than the one the chapter was written with: only lengths matter, or its shape."""
    loaded = tiny_loaded()
    if name == "kv-size":
        config = replace(loaded.config, **SMOLLM2)
        loaded = replace(loaded, config=config, name="SmolLM2-135M-Instruct")
    places = [content for _, found, content in filled_in("run") if found == name]
    assert places, f"no chapter shows the run {name}"
    expected = runs.RUNS[name](loaded).table
    assert "NO" not in expected.split(), "an answer is not what it should be"
    assert [content.strip() for content in places] == [expected] * len(places)


@pytest.mark.parametrize("name", TIMED)
def test_what_is_measured_can_be_measured(name, monkeypatch):
    monkeypatch.setattr(runs, "bytes_a_second", lambda device: 1e10)
    monkeypatch.setattr(runs, "BATCH_SIZES", (1, 2))
    run = runs.RUNS[name](tiny_loaded())
    assert run.table.count("\n|") >= 3


def test_all_tables_and_figures_are_filled_in():
    tables = {name for kind in ("run", "measured") for _, name, _ in filled_in(kind)}
    assert tables == runs.RUNS.keys()
    for kind in ("run", "measured", "figure"):
        for chapter, name, content in filled_in(kind):
            assert content.strip(), f"{chapter}: {name} is empty; run assets/figures.py"
    for chapter, name, content in filled_in("measured"):
        assert "*Measured with" in content, f"{chapter}: {name} does not say on what it was measured"


def test_links_lead_somewhere():
    for chapter in [*CHAPTERS, ROOT / "README.md"]:
        text = text_of(chapter)
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(
            r'(?:src|srcset)="([^"]+)"', text
        )
        for link in links:
            if not re.match(r"https?:", link):
                assert (chapter.parent / link).exists(), f"{chapter.name} links to {link}, which is not there"


def test_no_picture_is_left_over_and_all_are_small():
    shown = {Path(link).name for path in CHAPTERS for link in re.findall(r'"(figures/[^"]+)"', text_of(path))}
    there = {path.name: path.stat().st_size for path in (DOCS / "figures").glob("*.png")}
    assert shown == there.keys()
    assert sum(there.values()) < 6_000_000


def names_in(path: Path) -> set[str]:
    """What a Python file defines: functions, classes, their methods and fields, and its constants."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_code_that_is_named_is_there():
    """[`Class.method`](path/to/file.py): the file defines it."""
    count = 0
    for chapter in [*CHAPTERS, ROOT / "README.md"]:
        for name, link in re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", text_of(chapter)):
            count += 1
            if not name.endswith(".py"):
                path = chapter.parent / link
                assert name in names_in(path), f"{chapter.name} names {name}, but {link} has no such thing"
    assert count > 40


def test_commands_name_runs_and_pictures_that_exist():
    source = (ROOT / "assets" / "figures.py").read_text(encoding="utf-8")
    pictures = set(re.findall(r'^    "([\w-]+)": ', source, re.MULTILINE))
    assert {name for _, name, _ in filled_in("figure")} == pictures
    for chapter in CHAPTERS:
        for names in re.findall(r"docs/runs\.py((?: [a-z-]+)*)", text_of(chapter)):
            assert set(names.split()) <= runs.RUNS.keys()
        for names in re.findall(r"assets/figures\.py((?: [a-z-]+)*)", text_of(chapter)):
            assert set(names.split()) <= runs.RUNS.keys() | pictures


def test_the_snippets_run(monkeypatch, capsys):
    """Every block of Python in the guide, with a tiny model in the place of the real one."""
    snippets = [s for path in CHAPTERS for s in re.findall(r"```python\n(.*?)```", text_of(path), re.DOTALL)]
    assert snippets
    monkeypatch.setattr("engine.LLM", lambda **options: tiny_llm(**options))
    for snippet in snippets:
        exec(compile(snippet, "a snippet of the guide", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 8


def run_exercises(report: Path, *arguments: str) -> dict[str, list[str]]:
    """Run the exercises' tests in a process of their own; the messages of failures by exercise."""
    command = [sys.executable, "-m", "pytest", "-q", "docs/exercises", f"--junit-xml={report}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert report.exists(), done.stdout + done.stderr
    results: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        messages = [bad.get("message", "") for kind in ("failure", "error") for bad in case.findall(kind)]
        results.setdefault(case.get("classname", "").rpartition(".")[2], []).append(";".join(messages))
    return results


def test_each_exercise_has_tests_and_a_solution_that_passes_them(tmp_path):
    names = {path.stem for path in (DOCS / "exercises").glob("ex*.py")}
    assert names == {path.stem for path in (DOCS / "exercises" / "solutions").glob("ex*.py")}
    assert len(names) == 8
    results = run_exercises(tmp_path / "report.xml", "--solutions")
    assert results.keys() == {f"test_{name}" for name in names}
    assert not [message for messages in results.values() for message in messages if message]


def test_an_unsolved_exercise_fails_in_all_its_tests(tmp_path):
    """So the tests can fail. In a student's copy some may be solved, so this is for CI to say."""
    results = run_exercises(tmp_path / "report.xml")
    assert len(results) == 8
    solved = [
        f"{name}: {messages}"
        for name, messages in results.items()
        if not all("NotImplementedError" in message for message in messages)
    ]
    if solved and not os.environ.get("CI"):
        pytest.skip(f"solved here, at least in part: {'; '.join(solved)}")
    assert not solved

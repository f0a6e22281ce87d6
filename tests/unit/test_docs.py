"""The documentation says what the code does: links, code blocks, settings, commands, codes, sizes and names of tests.

Codes are collected from the syntax trees of the code, so that a new one without its line in the docs is found.
"""

import ast
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

import service.__main__
import service.settings
import worker.settings
from layertap.cli.app import app
from layertap.layout import token_bytes
from layertap.schemas.incidents import Blame, IncidentKind
from service.metrics import exposition
from service.metrics.repository import Snapshot
from worker.watchdog.rules import Phase

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    """The page's code blocks in that language."""
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """What can stand behind # in a link to the page, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_after(page: str, mark: str) -> list[list[str]]:
    """The cells of the table that follows `<!-- mark`, without its head."""
    text = (ROOT / "docs" / page).read_text()
    _, _, rest = text.partition(f"<!-- {mark}")
    assert rest, f"{page} has no mark {mark}"
    lines = rest.split("-->", 1)[1].lstrip("\n").split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}; there are {sorted(anchors(target))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


def test_python_blocks_use_only_names_that_exist() -> None:
    import layertap
    from layertap.client import Client
    from layertap.reader import Extraction, Row

    owners: dict[str, Any] = {"layertap": layertap, "client": Client, "rows": Extraction, "row": Row}
    seen = 0
    for page in PAGES:
        for code in blocks(page, "python"):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners:
                    owner = owners[node.value.id]
                    assert hasattr(owner, node.attr) or node.attr in vars(owner).get("__annotations__", {}), (
                        f"{page.name}: {node.value.id}.{node.attr}"
                    )
                    seen += 1
    assert seen > 5


def commands(page: Path) -> list[list[str]]:
    """The words behind `layertap` in every command that the page shows, in a console block or in backticks."""
    lines = [line for code in blocks(page, "console") for line in code.replace("\\\n", " ").splitlines()]
    typed = [re.sub(r"^\$ (?:\w+=\S+ )*", "", line) for line in lines if line.startswith("$ ")]
    inline = [span for span in quoted(prose(page)) if span.startswith("layertap ")]
    return [line.split()[1:] for line in [*typed, *inline] if line.startswith("layertap ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for verb, *rest in commands(page):
        if verb in ("service", "worker", "--help"):
            continue  # their options are those of the tables of settings
        assert verb in group.commands, f"{page.name}: layertap {verb}"
        command = group.commands[verb]
        if rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest[0]]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
        for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert option in known, f"{page.name}: layertap {verb} {option}"


def test_the_readme_shows_the_way_of_a_job() -> None:
    assert {words[0] for words in commands(ROOT / "README.md")} >= {"up", "submit", "errors", "pull", "inspect"}


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name}: {named - targets}"


def shown(default: object) -> str:
    """A default as the tables write it."""
    if default is None or default in ((), []) or default is PydanticUndefined:
        return "none"
    assert not isinstance(default, SecretStr)
    return f"`{default}`"


@pytest.mark.parametrize("part", [service.settings, worker.settings], ids=lambda part: part.__name__)
def test_the_tables_of_settings_are_those_of_the_code(part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show_help: Any = service.__main__.main if part is service.settings else worker.settings.read_settings
    with pytest.raises(SystemExit):
        show_help(["--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    rows = table_after("operations.md", f"settings: {part.__name__}.Settings")
    expected = []
    for name, field in part.Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        default = field.get_default(call_default_factory=True)
        expected.append([f"`LAYERTAP_{name.upper()}`", f"`{flag}`" if flag in flags else "–", shown(default)])
    assert [row[:3] for row in rows] == expected
    assert all(row[3] for row in rows)


@cache
def trees(*folders: str) -> list[tuple[Path, ast.Module]]:
    """The syntax trees of every module below `folders`."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(file, ast.parse(file.read_text())) for file in files]


def called(node: ast.AST) -> str:
    """The name of what a call calls, or ''."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def literals(folders: tuple[str, ...], place: dict[str, int]) -> Iterator[str]:
    """String literals given to calls of the names in `place`, by the position of the argument or the keyword `code`."""
    for _, tree in trees(*folders):
        for node in ast.walk(tree):
            if called(node) not in place:
                continue
            assert isinstance(node, ast.Call)
            index = place[called(node)]
            arguments = [*node.args[index : index + 1], *(k.value for k in node.keywords if k.arg == "code")]
            yield from (a.value for a in arguments if isinstance(a, ast.Constant) and isinstance(a.value, str))


def documented(page: str, mark: str, column: int = 0) -> list[str]:
    """The codes of a table, in order."""
    return [code for row in table_after(page, mark) for code in quoted(row[column])]


def test_the_row_codes_are_those_of_the_code() -> None:
    codes = {*literals(("layertap", "worker/plan"), {"RowError": 0})}
    codes |= {*literals(("service/datasets",), {"_refuse": 1}), *literals(("worker",), {"RowFailure": 0})}
    listed = documented("formats.md", "row-codes")
    assert len(listed) == len(set(listed))
    assert set(listed) == codes


def test_the_failure_codes_are_those_of_the_code() -> None:
    codes = {*literals(("worker",), {"PlanError": 0, "PlanErrorLine": 0, "_fail": 1})}
    codes |= {*literals(("service",), {"fail": 1})}
    for name in ("service/jobs/finish.py", "service/tasks/endings.py"):
        text = (ROOT / name).read_text()
        codes |= set(re.findall(r'failure_code or "(\w+)"', text)) | set(re.findall(r'[(] ?"(lease_expired)"', text))
        codes |= set(re.findall(r'return "(\w+)", f"', text))
    listed = documented("api.md", "failure-codes")
    assert len(listed) == len(set(listed))
    assert set(listed) == codes


def test_the_problem_codes_are_those_of_the_code() -> None:
    codes = {*literals(("service",), {"ProblemError": 1, "InvalidError": 0, "ConflictError": 0})}
    codes |= {f"{what.replace(' ', '_')}_not_found" for what in literals(("service",), {"NotFoundError": 0})}
    # The error classes hand a code to `super().__init__`, behind the status where there is one.
    for file, tree in trees("service"):
        for node in ast.walk(tree):
            if file.name in ("problems.py", "download.py") and called(node) == "__init__":
                assert isinstance(node, ast.Call)
                words = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                codes |= set(words[:1])
    listed = documented("api.md", "problem-codes")
    assert len(listed) == len(set(listed))
    assert set(listed) == codes


def test_the_sizes_are_those_of_the_layout() -> None:
    for model, hidden, token, million, gib, rate in table_after("operations.md", "sizes"):
        nbytes = token_bytes(3, int(hidden), "BF16", True)
        assert token == f"{nbytes:,}", model
        assert million == f"{nbytes / 1e3:.3g} GB", model
        assert gib == f"{2**30 // nbytes:,}", model
        assert rate == f"{nbytes / 100:.0f} MB/s", model


def test_tests_that_the_docs_name_exist() -> None:
    existing = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        existing |= set(re.findall(r"def (test_\w+)", file.read_text()))
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert named <= existing, f"{page.name}: {named - existing}"


def spelt_out(name: str) -> list[str]:
    """The names that a name with a {choice,of} parts stands for."""
    before, brace, rest = name.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + after for choice in choices.split(",")] if brace else [name]


def test_the_metrics_are_those_that_are_shown() -> None:
    nothing = Snapshot(jobs={}, tasks={}, workers={}, incidents={}, present=[], at_work=[])
    shown = re.findall(r"^# TYPE (\w+)", exposition.text(nothing).decode(), re.MULTILINE)
    listed = [name for cell in documented("operations.md", "metrics", 1) for name in spelt_out(cell)]
    assert sorted(listed) == sorted(shown)


@pytest.mark.parametrize(
    ("mark", "words"),
    [("incident-kinds", IncidentKind), ("blames", Blame), ("phases", Phase)],
    ids=lambda value: str(value),
)
def test_the_words_of_incidents_are_those_of_the_code(mark: str, words: type[StrEnum]) -> None:
    assert documented("operations.md", mark) == [word.value for word in words]


def test_the_deadlines_of_the_watchdog_are_the_settings() -> None:
    named = {}
    for row in table_after("operations.md", "phases"):
        named |= {name: int(text.replace(",", "")) for name, text in re.findall(r"`(\w+)` \(([\d,]+) s\)", row[3])}
    fields = worker.settings.Settings.model_fields
    assert named == {name: fields[name].default for name in named}
    assert set(named) == {"launch_quiet", "launch_timeout", "check_timeout", "stall_timeout"}


def test_environment_variables_that_the_docs_name_are_read_or_set_by_the_code() -> None:
    settings = [*service.settings.Settings.model_fields, *worker.settings.Settings.model_fields]
    known = {f"LAYERTAP_{name.upper()}" for name in settings}
    for _, tree in trees("layertap", "service", "worker"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                known |= set(re.findall(r"^LAYERTAP_[A-Z_]*[A-Z]$", node.value))
    for page in PAGES:
        named = set(re.findall(r"LAYERTAP_[A-Z_]*[A-Z]", page.read_text()))
        assert named <= known, f"{page.name}: {named - known}"

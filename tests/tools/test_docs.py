"""The documents: what they point at exists, and what is written from the code is as the code is."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from functools import cache
from pathlib import Path

import protocol_tables
import pytest

import star_hvd

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

LINK = re.compile(r"\]\(([^)#\s]*)(?:#[^)\s]*)?\)")
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|sh|yml|toml|txt|patch)|(?:[\w-]+/){2,}")
FUNCTION = re.compile(r"(test_\w+)(\.\.\.)?")
ATTRIBUTE = re.compile(r"([A-Z]\w+)\.(_?[a-z]\w+)")
CLASS = re.compile(r"_?[A-Z][a-z]+(?:[A-Z]\w*)")
BESIDE = re.compile(r"`([\w.]+)`\s+\(`([\w./-]+\.py)`")
FOREIGN = {"Compression", "ThreadAuthenticator", "GradScaler", "SyncBatchNorm"}
IN_TEXT = {"theta_i"}  # Of formulas.
FOLDERS = ("star_hvd", "scheduler", "tests", "benchmarks", "examples", "scripts")
TEXTS = (*(f"{folder}/**/*.py" for folder in FOLDERS), "scripts/*.sh", "patches/*.patch", "pyproject.toml", "Makefile")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(page: Path) -> str:
    """The page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def sources() -> str:
    files = [path for name in ("star_hvd", "scheduler") for path in sorted((ROOT / name).rglob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def prose(path: Path) -> str:
    """A module's comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return "\n".join(
        token.string
        for token in tokens
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""'))
    )


@cache
def words_of_the_tree() -> set[str]:
    """Of all files that are no pages, and of their names."""
    files = [path for pattern in TEXTS for path in ROOT.glob(pattern)]
    texts = [path.read_text(encoding="utf-8") for path in files]
    return set(re.findall(r"\w+", "\n".join([*texts, *map(named, files)])))


@cache
def words() -> set[str]:
    return set(re.findall(r"\w+", sources()))


@cache
def attributes() -> dict[str, set[str]]:
    """What classes of the packages have of their own: methods, fields, and attributes set on `self`."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(sources().replace("from __future__ import annotations", ""))):
        if not isinstance(node, ast.ClassDef):
            continue
        names = found.setdefault(node.name, set())
        names.update(base.id for base in node.bases if isinstance(base, ast.Name))
        for each in ast.walk(node):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(each.name)
            elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                names.add(each.attr)
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                names.add(each.target.id)
    return found


def has(cls: str, name: str) -> bool:
    own = attributes().get(cls, set())
    return name in own or any(base != cls and has(base, name) for base in own if base in attributes())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(without_blocks(page)) if target and "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    bases = [ROOT, ROOT / "star_hvd"] if page.name in ("protocols.md", "README.md") else [ROOT]
    words = [word for quoted in QUOTED.findall(without_blocks(page)) for word in quoted.split()]
    files = [word for word in words if FILE.fullmatch(word)]
    files = [file for file in files if not file.startswith(("training_logs/", "benchmarks/out/"))]
    assert [file for file in files if not any((base / file).exists() for base in bases)] == []


def test_tests_that_are_named_exist() -> None:
    """As `test_x.py`, or by the function's name; three dots stand for the rest of it."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    functions = set(re.findall(r"def (test_\w+)", "\n".join(texts.values())))
    missing = []
    for page in PAGES:
        for quoted in QUOTED.findall(without_blocks(page)):
            function = FUNCTION.fullmatch(quoted)
            if function and function[2]:
                known = any(name.startswith(function[1]) for name in functions)
            elif function:
                known = quoted in functions
            else:
                known = not re.fullmatch(r"test_\w+\.py", quoted) or quoted in texts
            if not known:
                missing.append(f"{named(page)}: {quoted}")
    assert missing == []


def no_attributes(text: str) -> list[str]:
    """What is quoted as an attribute of a class that has none of that name."""
    pairs = [pair for quoted in QUOTED.findall(text) for pair in ATTRIBUTE.findall(quoted)]
    return [f"{cls}.{attribute}" for cls, attribute in pairs if cls in attributes() and not has(cls, attribute)]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_classes_and_what_they_have_are_those_of_the_code(page: Path) -> None:
    missing = no_attributes(without_blocks(page))
    for quoted in QUOTED.findall(without_blocks(page)):
        for cls in CLASS.findall(quoted):
            if cls not in FOREIGN and cls not in words():
                missing.append(cls)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_names_of_the_code_are_in_it(page: Path) -> None:
    """Functions, constants, fields, options: what is quoted is a word of some file that is no page itself."""
    quoted = [each for each in QUOTED.findall(without_blocks(page)) if not re.search(r"test_\w+", each)]
    found = {word for each in quoted for word in re.findall(r"[A-Za-z_]\w*_\w+", each)}
    assert sorted(found - words_of_the_tree() - IN_TEXT) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_named_with_its_file_is_in_it(page: Path) -> None:
    """In the form `name` (`file.py`)."""
    missing = []
    for name, file in BESIDE.findall(without_blocks(page)):
        text = next((base / file).read_text("utf-8") for base in (ROOT, ROOT / "star_hvd") if (base / file).exists())
        missing += [f"{name} ({file})" for part in name.split(".") if part not in re.findall(r"\w+", text)]
    assert missing == []


def test_the_change_log_says_where_modules_and_classes_are_now() -> None:
    missing = []
    for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        for name in QUOTED.findall(line.split("|")[2]) if line.startswith("| `") else []:
            path = ROOT / name.replace(".", "/")
            if not (path.is_dir() or path.with_suffix(".py").exists() if "." in name else name in words()):
                missing.append(name)
    assert missing == []


def test_the_reference_has_every_name_that_users_import() -> None:
    """Of our own; those that are Horovod's are described there."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^::: ([\w.]+)\n((?:    .*\n?)*)", page, flags=re.MULTILINE))
    missing = []
    for name in star_hvd.__all__:
        home = str(getattr(getattr(star_hvd, name), "__module__", ""))
        members = re.search(r"members: \[(.*?)\]", blocks.get(home, ""))
        named = f"{home}.{name}" in blocks or (home in blocks and (members is None or name in members[1].split(", ")))
        if home.startswith(("star_hvd", "scheduler")) and not named:
            missing.append(name)
    assert missing == []


def test_comments_and_docstrings_name_what_classes_have() -> None:
    missing = []
    for name in ("star_hvd", "scheduler", "tests", "benchmarks", "scripts"):
        for path in sorted((ROOT / name).rglob("*.py")):
            own = {*FOREIGN, *re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)}
            found = [each for each in no_attributes(prose(path)) if each.partition(".")[0] not in own]
            missing += [f"{named(path)}: {each}" for each in found]
    assert missing == []


def test_as_many_files_are_named_for_a_step_as_the_text_says() -> None:
    """Of the gradient's way in `sync`, at most ten; and of all that the training thread runs in a step."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"The gradient itself passes (\d+) files:(.*?)\. Counted is(.*?)runs code in (\d+) files(.*?)\n\n"
                      r"With `overlap=True`", page, flags=re.DOTALL)  # fmt: skip
    assert found is not None, "the text has another form; change the expression above with it"
    passed, others = (re.findall(r"`((?:star_hvd|scheduler)/[\w/]+\.py)`", found[part]) for part in (2, 5))
    assert len(passed) == len(set(passed)) == int(found[1]) <= 10
    assert len({*passed, *others}) == len(passed) + len(others) == int(found[4])
    assert [file for file in (*passed, *others) if not (ROOT / file).exists()] == []


def test_every_thread_has_its_row() -> None:  # Of locks: tests/unit/star_hvd/test_locks.py.
    page = (ROOT / "docs" / "concurrency.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    threads = set(re.findall(r'(?:supervised\([^)]*?|name=f?)"(star-[a-z-]+)', sources()))
    assert len(threads) > 15
    assert sorted(name for name in threads if name.rstrip("-") not in rows) == []


def test_tables_of_messages_are_up_to_date() -> None:
    """Else: python scripts/protocol_tables.py."""
    assert protocol_tables.main(["--check"]) == 0


def test_a_message_that_changes_makes_the_page_out_of_date(tmp_path: Path) -> None:
    parsed = (protocol_tables.MESSAGES / "base.py", protocol_tables.WIRE, protocol_tables.SWITCH, protocol_tables.PAGE)
    for path in (*parsed, *protocol_tables.RECORDS.values()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    assert protocol_tables.main(["--check"], tmp_path) == 1  # Messages of other files are gone.
    assert protocol_tables.main([], tmp_path) == 0
    assert protocol_tables.main(["--check"], tmp_path) == 0
    messages = tmp_path / protocol_tables.MESSAGES / "base.py"
    messages.write_text(messages.read_text(encoding="utf-8").replace("optimizer_id: int", "number: int", 1))
    assert protocol_tables.main(["--check"], tmp_path) == 1


def test_the_format_of_run_logs_is_described() -> None:
    page = (ROOT / "training_logs" / "README.md").read_text("utf-8")
    log, convert = ((ROOT / "star_hvd" / "run_log" / name).read_text("utf-8") for name in ("log.py", "convert.py"))
    kinds = set(re.findall(r'"kind": "(\w+)"|_job_event\("(\w+)"', log))
    named = {one or other for one, other in kinds}
    assert {"step", "plan", "outcome", "timeline"} <= named
    missing = [kind for kind in sorted(named) if f"| `{kind}` |" not in page]
    of_segments = re.search(r"def summary.*?return {name", convert, re.DOTALL)
    assert of_segments is not None
    names = re.findall(r'^ +"(\w+)": ', of_segments[0], re.MULTILINE)
    recorded = json.loads((ROOT / "tests" / "golden" / "public_surface.json").read_text("utf-8"))
    names += [*recorded["mlflow"]["segment"], *recorded["run_log"]["outcome"], "reduced_part", "pushed_part"]
    assert "measured_speed" in names
    assert missing + [name for name in names if f"`{name}`" not in page] == []


def test_the_environment_variables_of_users_are_described() -> None:
    paths = [*ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), ROOT / "README.md"]
    pages = "".join(path.read_text("utf-8") for path in paths)
    names = set(re.findall(r"STAR_[A-Z_]+", (ROOT / "star_hvd" / "env.py").read_text("utf-8")))
    assert "STAR_OVERLAP" in names
    assert [name for name in sorted(names) if name not in pages] == []

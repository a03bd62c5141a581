"""The structure: which component may import which, how large they are, and what must not change without being meant to.

Components are folders; a module directly in `star_hvd/` or `scheduler/` is a component of its own. A component imports
components of lower layers only, whether at the top of a file or late in a function.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.surface import GOLDEN, surface

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 15  # In a component, `__init__.py` not counted.

LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "scheduler": (
        ("stats", "redact", "run_events", "target", "commands", "child_process", "mlflow_limits"),
        ("balance", "transmission"),
        ("plan",),
        ("records",),
        ("diagnosis",),
        ("rules",),
        ("cost",),
        ("policy", "simulator"),
        ("learning",),
        ("cli",),
    ),
    "star_hvd": (
        ("errors", "env", "config", "threads", "requirements", "cli"),
        ("locks", "patches", "telemetry", "channel.messages"),
        ("build_check", "engine.exchange"),
        ("engine",),
        ("channel", "compression"),
        ("doctor", "input", "modes", "ps.common", "coordinator.plans"),
        ("ps.worker", "ps.server", "ps.owner", "coordinator", "run_log"),
        ("runtime",),
        ("wrapper", "epochs", "functions", "job_report"),
        ("loader",),
        ("optimizer", "elastic"),
    ),
}


CALLED_FROM_OUTSIDE = {
    # Users; MLflow, pyzmq and threading; Plan, by the name of a mode; tests, to see what is kept or queued.
    "skip_synchronize", "set_backward_passes_per_step", "_register_hooks", "SyncBatchNorm", "catch_out_of_memory",
    "load_context", "callback", "_release_save", "_acquire_restore", "_is_owned",
    "_check_sync", "_check_subgroup", "_check_ps", "_check_grouped", "_check_local",
    "early_sessions", "open_sessions", "known_plans", "known_pushes", "most_places", "paced_replies",
    "incomplete", "ordered", "queued", "remembered",
}  # fmt: skip


TESTS = ROOT / "tests"
OURS = (*LAYERS, "benchmarks", "scripts", "tests")
PRIVATE_IN_TESTS = {
    # Private names of Horovod's optimizer that programs use, so ours has them too.
    "contract/cases_api.py": 6, "contract/cases_scaler.py": 1, "contract/cases_state.py": 1,
    "contract/cases_step.py": 4,
    # Whether a refused message has changed anything: all of a state.
    "fuzz/targets/control.py": 1, "fuzz/targets/servers.py": 6,
    # pluggy has no other way to take one hook from a plugin.
    "conftest.py": 1,
    # What torch, Horovod and threading tell in no other way.
    "multiproc/dropped_job.py": 1, "support/fake_device.py": 4, "unit/star_hvd/runtime/test_process_sets.py": 2,
    # A wrapped optimizer shows nothing of its own but a torch optimizer's interface.
    "support/inside.py": 1,
    # That a dictionary is used under its lock only.
    "unit/star_hvd/runtime/test_server_sessions.py": 3,
    # What a decision holds of an outcome, or of reports, that takes hundreds of steps to show.
    "unit/scheduler/cost/test_bounds.py": 1, "unit/scheduler/policy/test_cost_policy.py": 6,
    "unit/scheduler/policy/test_switch_outcome.py": 15, "unit/star_hvd/coordinator/test_job_state_watch.py": 2,
    "unit/star_hvd/coordinator/plans/test_mode_chooser_outcomes.py": 2,
}  # fmt: skip
"""Private accesses by file under `tests/`; a class gets a small public seam rather than an entry here."""


UNIT = TESTS / "unit"
TESTS_OF_A_PACKAGE = {"star_hvd/channel/test_capture.py", "star_hvd/channel/test_cut_control.py",
                      "star_hvd/ps/test_cluster.py", "star_hvd/ps/test_cut_servers.py"}  # fmt: skip


def modules() -> dict[str, Path]:
    """All modules by dotted name; packages without their `__init__`."""
    found = {}
    for package in LAYERS:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def component(module: str) -> str:
    """The component of a module; of a package's `__init__`, the package itself."""
    parts = module.split(".")
    is_package = MODULES[module].name == "__init__.py"
    return ".".join(parts if is_package or len(parts) == 2 else parts[:-1])


@functools.cache
def imports() -> dict[str, set[str]]:
    """For every module the modules of ours that it imports, anywhere in its text."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [n if (n := f"{node.module}.{a.name}") in MODULES else node.module for a in node.names]
            else:
                continue
            found[module].update(name for name in names if name in MODULES and name != module)
    return found


def layer(name: str) -> int:
    package, _, rest = name.partition(".")
    for number, components in enumerate(LAYERS[package]):
        if rest in components:
            return number
    raise AssertionError(f"{name} is on no layer; put it into LAYERS below every component that imports it")


@pytest.mark.parametrize("module", sorted(MODULES.keys() - LAYERS.keys()))
def test_imports_go_down(module: str) -> None:
    own = component(module)
    for other in sorted(imports()[module]):
        package, theirs = own.partition(".")[0], component(other)
        if package != other.partition(".")[0]:
            assert package == "star_hvd", f"{module} imports {other}; scheduler knows nothing of star_hvd"
        elif theirs not in (own, package) and not own.startswith(f"{theirs}."):
            assert layer(theirs) < layer(own), f"{module} imports {other}, of layer {layer(theirs)} of {layer(own)}"


def test_modules_import_each_other_in_no_circle() -> None:
    graph = imports()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle of imports: {' -> '.join((*path[path.index(module):], module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_scheduler_imports_neither_torch_nor_horovod() -> None:
    for module, path in MODULES.items():
        if module.startswith("scheduler"):
            for node in ast.walk(tree(path)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.partition(".")[0] not in ("torch", "horovod"), f"{module} imports {name}"


def test_components_are_small() -> None:
    count: dict[Path, int] = defaultdict(int)
    for path in MODULES.values():
        count[path.parent] += path.name != "__init__.py"
    assert {str(folder): n for folder, n in count.items() if n > MOST_FILES} == {}


def test_unit_tests_mirror_the_packages() -> None:
    """`X.py`, or the folder X, is tested by `test_X.py`, or `test_X_more.py`, at the same place under `tests/unit`."""
    astray = []
    for path in sorted(UNIT.rglob("test_*.py")):
        folder = path.parent.relative_to(UNIT)
        own = {folder.name, *(each.stem for each in (ROOT / folder).glob("*") if each.suffix in ("", ".py"))}
        name = path.stem.removeprefix("test_")
        if not any(name == each or name.startswith(f"{each}_") for each in own):
            astray.append(path.relative_to(UNIT).as_posix())
    assert set(astray) == TESTS_OF_A_PACKAGE


def test_no_class_is_shared_over_files_by_inheritance() -> None:
    """A base class that has its one heir in another file, and no instances of its own, is half of that heir."""
    homes, heirs, made = {}, defaultdict(set), set()
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made.add(node.func.id)
            if isinstance(node, ast.ClassDef):
                if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                    homes[node.name] = module
                for base in node.bases:
                    heirs[base.id if isinstance(base, ast.Name) else ""].add((module, node.name))
    for name, found in heirs.items():
        if name in homes.keys() - made and not name.endswith("Error"):
            elsewhere = {heir for module, heir in found if module != homes[name]}
            assert len(elsewhere) != 1 or len(found) > 1, f"{name} of {homes[name]} is half of {elsewhere}"


def foreign(path: Path, ours: Collection[str] = LAYERS) -> set[str]:
    """Names by which a module knows modules that are not ours, and what it has from them."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = getattr(node, "module", None)
            for alias in node.names:
                if (source or alias.name).partition(".")[0] not in ours:
                    found.add((alias.asname or alias.name).partition(".")[0])
    return found


def test_what_is_defined_is_used_by_more_than_tests() -> None:
    """Functions, methods and classes, also public ones; a word in quotes that is a name counts as a use.

    Names are compared without types, so a method of a frequent name escapes. But a member of a class is used as an
    attribute only, and `json.load` is no use of a `load` of ours.
    """
    named, attributes, defined, members = set(), set(), {}, {}
    others = [path for name in ("benchmarks", "examples", "scripts") for path in (ROOT / name).rglob("*.py")]
    for path in [*MODULES.values(), *others]:
        theirs = foreign(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                named.add(node.id)
            elif isinstance(node, ast.Attribute):
                if not (isinstance(node.value, ast.Name) and node.value.id in theirs):
                    attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
                named.add(node.value.rpartition(":")[2])  # `module:function`.
            elif isinstance(node, ast.ClassDef) and path not in others:
                members |= {each.name: path for each in node.body if isinstance(each, ast.FunctionDef)}
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and path not in others:
                defined[node.name] = path
    unused = {name: path for name, path in defined.items() if name not in named | attributes}
    unused |= {name: path for name, path in members.items() if name not in attributes}
    unused = {name: path for name, path in unused.items() if name not in CALLED_FROM_OUTSIDE}
    assert {name: str(path) for name, path in unused.items() if not name.startswith("__")} == {}


def is_private(name: str) -> bool:
    """Whether a name is private, other than those of Python itself and of named tuples, which are public."""
    of_tuples = ("_replace", "_asdict", "_fields", "_make")
    return name.startswith("_") and not name.startswith("__") and name not in of_tuples


def root_of(node: ast.AST) -> str:
    """The name at the beginning of `a.b.c`, `super` for `super().b`, empty for other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id if node.func.id == "super" else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_names(node: ast.AST, free: set[str]) -> list[str]:
    """The private names that one node accesses, unless they are of `free` names.

    These are attributes, imported names, names in quotes that are read or replaced (`setattr`, `monkeypatch.setattr`,
    `mock.patch.object`), and `Class.__new__`, which leaves out what a constructor does.
    """
    if isinstance(node, ast.Attribute) and root_of(node.value) not in free:
        own = isinstance(node.value, (ast.Name, ast.Call)) and root_of(node.value) in ("self", "cls", "super")
        return [node.attr] if node.attr == "__new__" or (is_private(node.attr) and not own) else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
        return [alias.name for alias in node.names if is_private(alias.name)]
    if isinstance(node, ast.Call) and node.args and root_of(node.args[0]) not in free:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("setattr", "getattr", "hasattr", "delattr", "object", "patch"):
            texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            return [text for text in texts if is_private(text.rpartition(".")[2])]
    return []


def private_accesses(path: Path) -> list[str]:
    """The private names of our objects that a file of the tests accesses, each with its line.

    What other libraries' modules hold is not ours to change. Calls of `super()` are those of a class's own base.
    """
    free = foreign(path, OURS)
    nodes = (node for node in ast.walk(tree(path)))
    return [f"{node.lineno}: {name}" for node in nodes for name in private_names(node, free)]  # type: ignore[attr-defined]


def test_tests_observe_behaviour_through_public_names() -> None:
    found = {path.relative_to(TESTS).as_posix(): private_accesses(path) for path in sorted(TESTS.rglob("*.py"))}
    others = {name: each for name, each in found.items() if len(each) != PRIVATE_IN_TESTS.get(name, 0)}
    assert others == {}, (
        "tests access private names: give the class a public property, a clock or another argument, see "
        "tests/README.md; or there are fewer now: correct PRIVATE_IN_TESTS"
    )
    assert PRIVATE_IN_TESTS.keys() <= found.keys()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x._name = 1", 1),
        ("x.y._name()", 1),
        ("self._name", 0),
        ("self.other._name", 1),
        ("super()._name()", 0),
        ("object.__new__(Engine)", 1),
        ("import os\nos._exit(0)", 0),
        ("from star_hvd import loader\nloader._name", 1),
        ("from star_hvd.loader import _name", 1),
        ("from horovod.torch import _name", 0),
        ("monkeypatch.setattr(engine, '_name', 1)", 1),
        ("monkeypatch.setattr('star_hvd.loader._name', 1)", 1),
        ("monkeypatch.setattr(engine, 'name', '_value')", 0),
        ("from horovod.torch import mpi_ops\nmonkeypatch.setattr(mpi_ops, '_name', 1)", 0),
        ("header._replace(size=1)", 0),
    ],
)
def test_what_counts_as_a_private_access(text: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert len(private_accesses(path)) == count


NUMBER_INTO_TENSOR = re.compile(r"^ *[\w.]*(?:flat|part|average|reduced)\w*\[-1\] = \w+(?:\.\w+)*$", re.MULTILINE)


@pytest.mark.parametrize("folder", ["engine", "modes", "wrapper"])
def test_no_number_is_assigned_to_an_element_of_a_buffer(folder: str) -> None:
    """It is copied from the host, which waits until the device has done all that was queued; there is `set_weight`."""
    assert NUMBER_INTO_TENSOR.search("        bucket.flat[-1] = weight\n") is not None
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "star_hvd" / folder).rglob("*.py")
        for line in NUMBER_INTO_TENSOR.findall(path.read_text(encoding="utf-8"))
    }
    assert not found


def test_every_wait_says_what_it_is_for() -> None:
    """Else it is silent until its deadline, half an hour later. Empty where the wait that it is a part of is logged."""
    found = []
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "WaitTime":
                says = len(node.args) > 1 or "what" in (keyword.arg for keyword in node.keywords)
                found += [] if says else [f"{module}:{node.lineno}"]
    assert not found


def test_what_users_and_their_data_rely_on_is_as_recorded() -> None:
    """If a change is meant: `python -m tests.support.surface > tests/golden/public_surface.json`, and say it in the
    change log."""
    recorded, now = json.loads(GOLDEN.read_text("utf-8")), json.loads(json.dumps(surface()))
    assert now.keys() == recorded.keys()
    for part in recorded:
        assert now[part] == recorded[part], part

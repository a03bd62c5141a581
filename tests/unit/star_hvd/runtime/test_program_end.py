"""Whether a program came to its end or failed: told apart however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import star_hvd.runtime.program_end

WATCHED = f"""
import atexit, importlib.util, sys, threading
spec = importlib.util.spec_from_file_location("program_end", {star_hvd.runtime.program_end.__file__!r})
program_end = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program_end)
def start():
    program_end.watch()
    assert not program_end.failed()
    atexit.register(lambda: print("failed" if program_end.failed() else "finished"))
def deep(status):
    raise SystemExit(status)
def in_thread(error, trains=True):
    def work():
        if trains:
            program_end.note_step()
        raise error
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
start()
"""


@pytest.mark.parametrize(
    ("program", "failed"),
    [
        ("pass", False),
        ("import sys; sys.exit()", False),
        ("import sys; sys.exit(0)", False),
        ("import sys; sys.exit(3)", True),
        ("import sys; sys.exit('a reason')", True),
        ("exit()", False),
        ("exit(3)", True),
        ("quit(3)", True),
        ("exit(code=3)", True),
        ("quit(code=0)", False),
        ("raise ValueError", True),
        ("raise KeyboardInterrupt", True),
        ("deep(3)", True),
        ("raise SystemExit(int())", False),
        ("try:\n    deep(3)\nexcept SystemExit:\n    pass", False),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", False),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit()", False),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nraise SystemExit(int())", False),
        ("try:\n    sys.exit()\nexcept SystemExit:\n    pass\nraise ValueError", True),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    raise", True),
        ("try:\n    sys.exit(3)\nfinally:\n    pass", True),
        ("if True:\n    with open('/dev/null'):\n        deep(3)", True),
        ("in_thread(ValueError())", True),
        ("in_thread(ValueError(), trains=False)", False),
        ("in_thread(ValueError())\nprogram_end.note_step()", False),
        ("in_thread(SystemExit())", False),
        ("in_thread(SystemExit(3))", True),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_how_a_program_ends(tmp_path: Path, program: str, failed: bool, module: bool) -> None:
    path = tmp_path / "program_that_ends.py"
    path.write_text(WATCHED + program + "\n", encoding="utf-8")
    command = [sys.executable, *(["-m", path.stem] if module else [str(path)])]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["failed" if failed else "finished"], ended.stderr


def test_a_hook_put_over_ours_is_called_once_after_a_second_start(tmp_path: Path) -> None:
    path = tmp_path / "program_that_ends.py"
    over = "before = sys.excepthook\nsys.excepthook = lambda *error: (print('theirs'), before(*error))\n"
    path.write_text(f"{WATCHED}{over}program_end.watch()\nraise ValueError\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["theirs", "failed"], ended.stderr


@pytest.mark.parametrize(("status", "failed"), [("", False), ("0", False), ("3", True), ("'a reason'", True)])
@pytest.mark.parametrize("module", [False, True])
def test_a_program_ends_by_an_exit_that_it_had_imported_by_name(
    tmp_path: Path, status: str, failed: bool, module: bool
) -> None:
    path = tmp_path / "program_that_ends.py"
    path.write_text(f"from sys import exit as leave\n{WATCHED}\nleave({status})\n", encoding="utf-8")
    command = [sys.executable, *(["-m", path.stem] if module else [str(path)])]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["failed" if failed else "finished"], ended.stderr


def test_a_module_of_the_program_had_imported_the_exit_by_name(tmp_path: Path) -> None:
    (tmp_path / "its_module.py").write_text("from sys import exit\ndef end():\n    exit(0)\n", encoding="utf-8")
    path = tmp_path / "program_that_ends.py"
    path.write_text(f"import its_module\n{WATCHED}\nits_module.end()\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["finished"], ended.stderr


def test_exit_handlers_know_that_the_main_module_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "program_that_ends.py"
    ends = "atexit.register(lambda: print(program_end.ended()))\nprint(program_end.ended())\n"
    path.write_text(f"{WATCHED}{ends}", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["False", "True", "finished"], ended.stderr


END = """
class Block:
    def __enter__(self):
        return self
    def __exit__(self, *error):
        end()
def end():
    print("failed" if program_end.failed() or program_end.handling_error() else "finished")
def leave(error):
    raise error
"""


@pytest.mark.parametrize(
    ("program", "failed"),
    [
        ("try:\n    leave(ValueError())\nfinally:\n    end()", True),
        ("try:\n    leave(KeyboardInterrupt())\nfinally:\n    end()", True),
        ("try:\n    leave(ValueError())\nexcept ValueError:\n    end()", True),
        ("with Block():\n    leave(ValueError())", True),
        ("try:\n    sys.exit(3)\nfinally:\n    end()", True),
        ("try:\n    leave(SystemExit('a reason'))\nfinally:\n    end()", True),
        ("try:\n    sys.exit()\nfinally:\n    end()", False),
        ("try:\n    leave(SystemExit(0))\nfinally:\n    end()", False),
        ("with Block():\n    pass", False),
        ("try:\n    pass\nfinally:\n    end()", False),
        ("try:\n    leave(ValueError())\nexcept ValueError:\n    pass\nend()", False),
        ("try:\n    next(iter([]))\nexcept StopIteration:\n    end()", False),
        ("try:\n    leave(OSError())\nexcept OSError:\n    program_end.note_step()\n    end()", False),
        ("try:\n    leave(ImportError())\nexcept ImportError:\n    start()\n    end()", False),
        ("try:\n    leave(OSError())\nexcept OSError:\n    start()\n    with Block():\n        leave(OSError())", True),
    ],
)
def test_a_rank_that_is_shut_down_on_its_way_out(tmp_path: Path, program: str, failed: bool) -> None:
    """Its main module is still running then, so only the error being handled tells how it ends."""
    path = tmp_path / "program_that_ends.py"
    path.write_text(WATCHED.replace("atexit.register", "id") + END + program + "\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120.0, check=False)
    assert ended.stdout.split() == ["failed" if failed else "finished"], ended.stderr

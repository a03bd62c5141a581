"""Whether a program came to its end or failed: told apart however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import star_hvd.runtime.program_end

WATCHED = f"""
import atexit, importlib.util, sys
spec = importlib.util.spec_from_file_location("program_end", {star_hvd.runtime.program_end.__file__!r})
program_end = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program_end)
def start():
    program_end.watch()
    assert not program_end.failed()
    atexit.register(lambda: print("failed" if program_end.failed() else "finished"))
def deep(status):
    raise SystemExit(status)
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
        ("raise ValueError", True),
        ("raise KeyboardInterrupt", True),
        ("deep(3)", True),
        ("raise SystemExit(int())", False),
        ("try:\n    deep(3)\nexcept SystemExit:\n    pass", False),
        ("if True:\n    with open('/dev/null'):\n        deep(3)", True),
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

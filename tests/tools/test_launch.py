"""What the result of a job tells about ranks that hung."""

from __future__ import annotations

from tests.support.launch import SHOWN_LINES, JobResult

STACKS = """[0]<stderr>:Timeout (0:04:00)!
[0]<stderr>:Thread 0x00007f0000000001 (most recent call first):
[0]<stderr>:  File "/usr/lib/python3/threading.py", line 327 in wait
[1]<stderr>:Thread 0x00007f0000000009 (most recent call first):
[1]<stderr>:  File "/job/star_hvd/engine/meeting.py", line 140 in gather_positions
[0]<stderr>:
[0]<stderr>:Thread 0x00007f0000000002 (most recent call first):
[0]<stderr>:  File "/job/horovod/torch/mpi_ops.py", line 910 in synchronize
[0]<stderr>:  File "/job/case.py", line 7 in main
"""


def test_the_main_threads_of_ranks_that_hung_are_named() -> None:
    """A dump's last thread is the main one, and the lines of two ranks are mixed."""
    result = JobResult(1, STACKS + "more\n" * (2 * SHOWN_LINES), [{}, {}], 1.0)
    assert result.stuck == "[0] mpi_ops.py:910 synchronize < case.py:7 main; [1] meeting.py:140 gather_positions"
    assert "line 910 in synchronize" in result.tail


def test_an_error_is_no_hang() -> None:
    text = '[0]<stderr>:Traceback (most recent call last):\n[0]<stderr>:  File "/job/case.py", line 7, in main\n'
    result = JobResult(1, text + "more\n" * (2 * SHOWN_LINES), [{}], 1.0)
    assert result.stuck == "" and "case.py" not in result.tail

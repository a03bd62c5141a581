"""What a rank reports of its program's waits for other ranks."""

from __future__ import annotations

import threading

import pytest

from star_hvd.channel.messages.base import Message
from star_hvd.channel.messages.waits import ProgramWait
from star_hvd.input.program_waits import ProgramWaits


class Sent(list[Message]):
    """Messages to the coordinator."""

    def __call__(self, message: Message, *, urgent: bool = True) -> None:
        self.append(message)


def test_collectives_are_counted_from_the_start_and_reported_once_there_is_a_loop() -> None:
    sent = Sent()
    waits = ProgramWaits(sent)
    with waits.during("broadcast_parameters"):
        pass
    assert sent == []
    waits.watch()
    with waits.during("allreduce"):
        assert sent == [ProgramWait(2, operation="allreduce")]
    waits.in_loop(3, 7)
    assert sent[1:] == [ProgramWait(2), ProgramWait(2, loader=3, epoch=7)]


def test_a_collective_within_another_is_a_part_of_it() -> None:
    sent = Sent()
    waits = ProgramWaits(sent)
    waits.watch()
    with waits.during("broadcast_parameters"):
        with waits.during("broadcast"):
            pass
        assert sent == [ProgramWait(1, operation="broadcast_parameters")]
    assert sent[1:] == [ProgramWait(1)]


def test_behind_an_error_nothing_is_reported_until_the_next_join() -> None:
    """Other ranks may have raised none: they called one fewer."""
    sent = Sent()
    waits = ProgramWaits(sent)
    with pytest.raises(TypeError), waits.during("broadcast_object"):
        raise TypeError
    waits.watch()
    with waits.during("broadcast_object"):
        pass
    waits.in_loop(0, 0)
    assert sent == []
    waits.joined()
    waits.in_loop(0, 1)
    assert sent == [ProgramWait(0, 1, loader=0, epoch=1)]


def test_a_collective_that_raises_an_error_is_no_wait() -> None:
    sent = Sent()
    waits = ProgramWaits(sent)
    waits.watch()
    with pytest.raises(TypeError), waits.during("allreduce"):
        raise TypeError
    assert sent == [ProgramWait(1, operation="allreduce"), ProgramWait(1)]


def test_another_thread_may_be_anywhere_in_the_program() -> None:
    """It may fetch batches ahead, or call collectives while the program's thread waits in a loop."""
    sent = Sent()
    waits = ProgramWaits(sent)
    waits.watch()

    def work() -> None:
        waits.in_loop(0, 0)
        with waits.during("allreduce"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sent == []
    waits.in_loop(0, 1)
    assert sent == [ProgramWait(0, loader=0, epoch=1)]


def test_behind_join_collectives_are_counted_anew_as_ranks_in_it_called_fewer() -> None:
    sent = Sent()
    waits = ProgramWaits(sent)
    waits.watch()
    with waits.during("allreduce"):
        pass
    waits.joined()
    with waits.during("barrier"):
        pass
    assert sent[-2:] == [ProgramWait(1, 1, "barrier"), ProgramWait(1, 1)]

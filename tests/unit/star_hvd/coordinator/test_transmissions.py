"""What rank 0 knows of other ranks' decisions on how they send."""

from __future__ import annotations

from scheduler.transmission.decision import LATE, PACE_UP, SERVERS
from star_hvd.channel.messages.base import TransmissionNote
from star_hvd.coordinator.transmissions import Transmissions


def test_ranks_that_decide_alike_are_one_sentence_and_earlier_plans_do_not_count() -> None:
    known = Transmissions()
    assert known.sentences(0) == []
    for rank in (3, 1, 2):
        known.note(rank, 4, TransmissionNote(0, 9, SERVERS, "int8", 0.3, f"int8 saves {rank} ms"))
    known.note(4, 4, TransmissionNote(0, 9, SERVERS, "whole", 0.0, "int8 saves nothing"))
    known.note(5, 3, TransmissionNote(0, 9, LATE, "int8", 0.3, "late"))
    known.note(5, 4, TransmissionNote(0, 9, PACE_UP, "2 MB/s", 0.3, "pace: 1 MB/s"))
    known.note(5, 4, TransmissionNote(0, 9, PACE_UP, "2 MB/s", 0.3, "pace: 2 MB/s"))
    assert known.sentences(4) == [
        "rank 5: pace: 2 MB/s",
        "rank 1: int8 saves 1 ms (likewise 2 other ranks)",
        "rank 4: int8 saves nothing",
    ]
    assert known.sentences(5) == []

"""What ranks other than rank 0 decided on how they send, for `explain()`. Pure."""

from __future__ import annotations

from star_hvd.channel.messages.base import TransmissionNote

__all__ = ["Transmissions"]


class Transmissions:
    """The latest decisions of one optimizer's ranks, by rank and what they are about."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, int], tuple[int, TransmissionNote]] = {}

    def note(self, rank: int, plan_id: int, message: TransmissionNote) -> None:
        """Take in a rank's decision under the plan in force."""
        self._latest[message.what, rank] = plan_id, message

    def sentences(self, plan_id: int) -> list[str]:
        """Return the decisions under a plan; of ranks that chose alike, that of the first one, with the number of the
        others."""
        same: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for (what, rank), (under, message) in sorted(self._latest.items(), key=lambda item: item[0]):
            if under == plan_id:
                same.setdefault((what, message.chosen), []).append((rank, message.text))
        found = []
        for ranks in same.values():
            (rank, text), others = ranks[0], len(ranks) - 1
            likewise = f" (likewise {others} other rank{'s' * (others > 1)})" if others else ""
            found.append(f"rank {rank}: {text}{likewise}")
        return found

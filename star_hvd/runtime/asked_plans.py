"""The plans that the user asked for, and checks that a loader is compatible with them."""

from __future__ import annotations

from scheduler.records import Plan

__all__ = ["AskedPlans"]


class AskedPlans:
    """The user's plans by optimizer; none for an optimizer in mode `auto`.

    Args:
        world_size: Number of ranks.
        max_batch: `Config.max_batch`.
    """

    def __init__(self, world_size: int, max_batch: int) -> None:
        self._world_size = world_size
        self._max_batch = max_batch
        self._plans: dict[int, Plan] = {}

    def add(self, optimizer_id: int, plan: Plan) -> None:
        """Note the plan that the user asked for."""
        self._plans[optimizer_id] = plan

    def forget(self, optimizer_id: int) -> None:
        """Forget an optimizer that has ended."""
        self._plans.pop(optimizer_id, None)

    def check_microbatches(self) -> None:
        """Check that the modes the user asked for are possible with micro-batches.

        Raises:
            ValueError: One is not.
        """
        for plan in self._plans.values():
            if plan.mode != "sync" or plan.uneven:
                raise ValueError(
                    f"mode is {plan.label} with microbatches; expected 'sync', 'sync(steal)' or 'auto', which chooses "
                    "between these two: leave microbatches out of hvd.shard for other modes"
                )

    def check_shares(self, batch: int) -> None:
        """Check that the batch shares the user asked for fit a loader's batches.

        Args:
            batch: Samples in a rank's batch if shares are equal.

        Raises:
            ValueError: They make a different global batch, or no shares are within the user's limit.
        """
        for plan in self._plans.values():
            total = self._world_size * batch
            if plan.balanced and 0 < self._max_batch < batch:
                raise ValueError(
                    f"Config.max_batch is {self._max_batch}, and {self._world_size} ranks with batch_size {batch} "
                    f"make {total} samples in a step, which no batch shares divide within it; raise it, or give "
                    "hvd.shard a smaller batch_size"
                )
            if plan.batch_shares and not plan.balanced and sum(plan.batch_shares) != total:
                raise ValueError(
                    f"batch shares {plan.batch_shares} sum to {sum(plan.batch_shares)}, and {self._world_size} ranks "
                    f"with batch_size {batch} make {total} samples in a step; give shares that sum to {total}, or "
                    "another batch_size to hvd.shard"
                )

"""Build the collective that reduces an optimizer's tensors over all ranks: Horovod's, with this job's wrappers."""

from __future__ import annotations

from star_hvd.compression.bucket_codec import without_form
from star_hvd.engine.collective import Collective, HorovodCollective
from star_hvd.engine.device import Streams
from star_hvd.modes.driver import StepDriver
from star_hvd.runtime.host_sets import host_sets
from star_hvd.telemetry.step_timeline import TimedCollective
from star_hvd.wrapper.hierarchical_collective import HierarchicalCollective, stages_of
from star_hvd.wrapper.ordered_collective import OrderedCollective

__all__ = ["collective_of_all"]


def collective_of_all(driver: StepDriver, streams: Streams, *, ordered: bool) -> Collective:
    """Return one optimizer's collective over all ranks, in stages through the hosts if the job asks for them.

    Args:
        driver: The optimizer's driver. It ends the threads, its timeline samples submissions, and stages are used only
            for its plan `sync`. Nothing may be submitted before its engine is set.
        streams: Streams of the tensors' devices; stages are only for tensors in host memory.
        ordered: Whether tensors may overtake each other, for steps that overlap with the program; returns an
            `OrderedCollective` then.
    """
    found: Collective = HorovodCollective()
    sets = host_sets()
    if sets is not None and not streams.devices:
        staged = HierarchicalCollective(
            found, stages_of(sets), lambda: driver.engine.plan.mode == "sync", f"star-hosts-{driver.number}"
        )
        driver.on_stop.append(staged.stop)
        found = staged
    found = TimedCollective(found, driver.timeline)
    if ordered:
        return OrderedCollective(found, streams, f"star-transmit-{driver.number}", key_of=without_form)
    return found

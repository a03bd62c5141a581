"""What reduces an optimizer's tensors over all ranks: Horovod's collective, and what this job puts around it."""

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
    """The collective over all ranks of one optimizer, by stages through the hosts where the job asks for them.

    Args:
        driver: Of the optimizer; it ends the threads, its timeline samples what is submitted, and stages serve its
            plan `sync` only. Nothing may be submitted before its engine is set.
        streams: Of the devices that the tensors are on; stages are for tensors in host memory.
        ordered: Whether tensors may overtake each other, for steps that overlap with the program: an
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

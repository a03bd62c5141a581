"""Check that all ranks train the same parameters, bring them into rank 0's order, and compare how ranks compute."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from horovod.torch.functions import allgather_object, broadcast_object

from star_hvd.engine.buckets import memory_format_of
from star_hvd.run_log.facts import cpu_name

__all__ = ["equal_arithmetic", "same_on_all_ranks"]


def same_on_all_ranks(
    params: Sequence[torch.nn.Parameter], names: dict[torch.nn.Parameter, str], *, ordered: bool = False
) -> list[torch.nn.Parameter]:
    """Return the parameters in rank 0's order: buckets are matched by position, where Horovod matches by name.

    Collective.

    Args:
        params: This rank's parameters.
        names: Their names.
        ordered: Whether the order must be the same already.

    Raises:
        ValueError: Ranks have different parameters; raised on all ranks.
    """
    mine = [f"{names.get(p, '?')} {tuple(p.shape)} {p.dtype} {_format(p)}" for p in params]
    own = [hashlib.sha256("\n".join(lines).encode()).hexdigest() for lines in (mine, sorted(mine))]
    digests = allgather_object(own, name="star.parameters")
    differing = [rank for rank, digest in enumerate(digests) if digest[1] != digests[0][1]]
    out_of_order = any(digest[0] != digests[0][0] for digest in digests)
    if differing or (ordered and out_of_order):
        raise ValueError(
            f"ranks {differing or 'of this job'} have other parameters than rank 0 (names, shapes, dtypes, order or "
            "memory format); build the same model and the same optimizer on all ranks"
        )
    if not out_of_order:
        return list(params)
    first = broadcast_object(mine, root_rank=0, name="star.parameter_order")
    place = {line: i for i, line in enumerate(first)}
    return [param for _, param in sorted(zip(mine, params, strict=True), key=lambda pair: place[pair[0]])]


def equal_arithmetic(devices: Iterable[torch.device]) -> bool:
    """Whether all ranks have equal processors, threads and torch, so that they compute the same bits from equal inputs.

    Collective.

    Args:
        devices: Devices of this rank's parameters.
    """
    names = sorted({torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"})
    cpu = cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    own = [torch.__version__, *map(str, cpu), *names]
    found = allgather_object(own, name="star.arithmetic")
    return all(other == own for other in found)


def _format(param: torch.Tensor) -> str:
    """Return the strides of a non-contiguous parameter, since buckets are reduced in memory order."""
    return "" if param.is_contiguous() else str(memory_format_of(param))

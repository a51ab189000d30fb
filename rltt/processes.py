"""Which of the processes of a run this is. One that was not launched with others is the only one."""

import os
from typing import Any


def rank() -> int:
    """Index of this process among all."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return rank() == 0


def share_of(rows: Any) -> range:
    """Indices of the rows that fall to this process: every n-th, so that shares are alike."""
    return range(rank(), len(rows), world_size())


def everyones(values: list[Any]) -> list[list[Any]]:
    """The lists of all processes, by rank."""
    if world_size() == 1:
        return [values]
    import torch.distributed as dist

    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, values)
    return gathered


def wait_for_everyone() -> None:
    """Return when every process has come here."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()

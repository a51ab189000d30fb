"""Which of the processes of a run this is. One that was not launched with others is the only one."""

import os
from typing import Any

from .errors import RecipeError


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


def of_main(value: Any) -> Any:
    """The main process's value, on every process."""
    return everyones([value])[0][0]


def wait_for_everyone() -> None:
    """Return when every process has come here."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


def part() -> None:
    """Close the connections to the other processes, when every one has come here.

    A process that ends with its connections open takes down another one that has not closed its own yet.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        wait_for_everyone()
        dist.destroy_process_group()


def share(total: int, micro_batch: int, what: str, processes: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps by which the processes take `total` rows an update together.

    A micro-batch that is larger than a process's share is cut down to it: a recipe means the same on any number of
    processes.

    Args:
        total: rows of one update, of all processes.
        micro_batch: most rows of a forward and backward on one process.
        what: the keys that decide `total`, for the message.
        processes: how many there are.

    Raises:
        RecipeError: the processes cannot take equal shares.
    """
    if total % processes:
        raise RecipeError(f"{what}: the {total} rows of an update cannot be shared equally by {processes} processes")
    mine = total // processes
    micro_batch = min(micro_batch, mine)
    if mine % micro_batch:
        raise RecipeError(
            f"{what}: per_device_train_batch_size = {micro_batch} does not divide the {mine} rows of an update that "
            f"each of {processes} processes takes"
        )
    return micro_batch, mine // micro_batch

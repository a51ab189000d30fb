"""The policy that RL would start from: what the recipe names, warm-started where it says so."""

from rich.console import Console

from ..recipe import Recipe
from ..train.policy import Policy
from ..train.preemption import Preemption
from ..train.run import Ready, learnable, warm_start
from ..train.run_directory import RunDirectory


def probed(recipe: Recipe, folder: str, **train: object) -> Recipe:
    """The recipe as a probe runs it: alone, in a folder that is thrown away, without checkpoints.

    Args:
        train: further keys of the train section.
    """
    alone = {"sharding": "none", "offload": "none", "deepspeed": None, "save_steps": None, "warmup_steps": 0}
    return recipe.model_copy(update={"run_dir": folder, "train": recipe.train.model_copy(update=alone | train)})


def start_of(recipe: Recipe, ready: Ready, console: Console) -> Policy:
    """What `rltt train` would begin RL with: a warm start is the same one, to the bit on a CPU.

    Args:
        recipe: as `probed` gives it: the warm start is written to its run directory.
    """
    if recipe.pretrain is None:
        return ready.policy
    responses = learnable(ready.policy, ready.unfiltered)
    run = RunDirectory(recipe)
    try:
        return warm_start(
            recipe, ready.policy, ready.unfiltered, responses, ready.rewards[0], run, console, Preemption()
        )
    finally:
        run.close("finished")

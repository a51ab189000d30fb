"""Which tracker a recipe asks for."""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltt.errors import RecipeError
from rltt.telemetry.trackers.tracker import Guarded, Metrics, NoTracker, Tracker

if TYPE_CHECKING:
    from rltt.recipe import Recipe

MODULES = {"trackio": "trackio", "tensorboard": "tensorboard", "wandb": "wandb"}


def require_tracker(name: str) -> None:
    """Refuse a tracker that is not installed.

    Raises:
        RecipeError: with the command that installs it.
    """
    if name in MODULES and find_spec(MODULES[name]) is None:
        raise RecipeError(f"telemetry.tracker: {name} is not installed; pip install {name}, or choose another (none)")


def open_tracker(
    recipe: "Recipe", run: Path, past: Sequence[Mapping[str, Any]], say: Callable[[str], None], is_main: bool
) -> Guarded:
    """The tracker of a run.

    Args:
        run: its run directory.
        past: the steps that it has made already, when it goes on.
        say: prints a message.
        is_main: whether this process shows the run; the others show nothing.
    """
    name = recipe.telemetry.tracker if is_main else "none"

    def start() -> Tracker:
        config = recipe.model_dump()
        match name:
            case "trackio":
                from rltt.telemetry.trackers.trackio import TrackioTracker

                return TrackioTracker(run, config, past)
            case "tensorboard":
                from rltt.telemetry.trackers.tensorboard import TensorBoardTracker

                return TensorBoardTracker(run, recipe.to_yaml(), last_step(past))
            case "wandb":
                from rltt.telemetry.trackers.wandb import WandbTracker

                return WandbTracker(run, config)
        return NoTracker()

    return Guarded(name, start, say)


def last_step(past: Sequence[Metrics]) -> int:
    """The last step of a history; 0 without one."""
    return int(past[-1]["step"] or 0) if past else 0

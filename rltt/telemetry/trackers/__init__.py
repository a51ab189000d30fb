"""Where the numbers of a run are sent while it runs, besides its run directory: Trackio, TensorBoard, W&B.

tracker.py       what each of them does, and the guard that keeps their failures away from the run
trackio.py       the default: local files beside the runs, a page by `rltt dashboard`
tensorboard.py   event files in the run directory
wandb.py         Weights & Biases
"""

from rltt.telemetry.trackers.open import open_tracker, require_tracker
from rltt.telemetry.trackers.tracker import Guarded, NoTracker, Tracker

__all__ = ["Guarded", "NoTracker", "Tracker", "open_tracker", "require_tracker"]

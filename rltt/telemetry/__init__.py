"""What a run shows of itself, in numbers: read back, judged, displayed.

history.py     the metrics of a run, from its directory, a metrics.jsonl, or TRL's trainer_state.json
verdict.py     whether the run moves its policy
causes.py      why not: one function a cause
changes.py     what to change in the recipe
signals.py     what a verdict weighs: solve rate, mixed groups, KL, certainty, and the thresholds
sequential.py  tests that may be read after every step
windows.py     first and last steps
live.py        the verdict while a run runs

Nothing here needs torch.
"""

from rltt.telemetry.changes import Change
from rltt.telemetry.history import HeldOut, History, flat, read_history
from rltt.telemetry.live import Alert, LiveVerdict
from rltt.telemetry.verdict import Evidence, Verdict, judge

__all__ = [
    "Alert",
    "Change",
    "Evidence",
    "HeldOut",
    "History",
    "LiveVerdict",
    "Verdict",
    "flat",
    "judge",
    "read_history",
]

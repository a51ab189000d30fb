"""What a run shows of itself, in numbers: read back, judged, displayed.

history.py   the metrics of a run, from its directory, a metrics.jsonl, or TRL's trainer_state.json

Nothing here needs torch.
"""

from rltt.telemetry.history import HeldOut, History, read_history

__all__ = ["HeldOut", "History", "read_history"]

"""The committed histories are judged as well as the benchmark's README says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "verdicts"))

import score


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_held_out_runs_are_judged_as_stated(share: float) -> None:
    runs = [run for run in score.judged(share) if run.split == "held-out"]
    assert sum(run.gains for run in runs) >= 12
    assert sum(not run.gains for run in runs) >= 12
    for found, stated in ((score.will_not_move(runs), score.STATED), (score.causes(runs), score.STATED_CAUSES)):
        assert found.precision >= stated[share][0], found
        assert found.recall >= stated[share][1], found

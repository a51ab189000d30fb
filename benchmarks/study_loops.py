"""Train tiny Parallel Loop Transformers and LoopLMs with 1 to 4 loops alike.

    python benchmarks/study_loops.py [--out runs/study] [--seeds 0 1] [--loops 1 2 3 4]

Every run sees the same problems in the same order of batches: 100 steps of warm start (half of the loss on the mean of
all loops, in both families) and 40 steps of RLTT with uniform credit. Runs that are there already are kept;
each has its accuracy before and after RL in `summary.json`.
"""

import argparse
import subprocess
import sys
from itertools import product
from pathlib import Path

FAMILIES = ("plt", "looplm")
RECIPE = Path(__file__).with_name("study_loops.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 2, 3, 4])
    options = parser.parse_args()
    for seed, loops, family in product(options.seeds, options.loops, FAMILIES):
        train(family, loops, seed, options.out / f"{family}-{loops}-{seed}")


def train(family: str, loops: int, seed: int, run: Path) -> None:
    """One run, through the command line as a user would start it."""
    if run.exists():
        return
    overrides = [f"policy.new.family={family}", f"policy.loops={loops}", f"train.seed={seed}", f"run_dir={run}"]
    if family == "plt":  # sequences have some 35 tokens; a window of 64 would see all of them
        overrides.append("policy.new.window=8")
    subprocess.run([sys.executable, "-m", "rltt", "train", str(RECIPE), *overrides], check=True)


if __name__ == "__main__":
    main()

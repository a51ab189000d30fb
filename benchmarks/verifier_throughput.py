r"""Pairs of gold and completion graded a second, on one core: rltt's `verify_math` against math-verify called directly.

Claimed is a ratio of at least 0.9: that grading in worker processes with deadlines, under stricter rules, costs at most
a tenth of the throughput. Each side runs in a process of its own that is bound to one core. For rltt the one worker and
the process that feeds it share that core; math-verify parses and verifies in its process, with its default time limits.

The pairs are golds of MATH in `\boxed{}`, half of them against themselves (right), half against another's (wrong), in
one order for both sides. No text is in two pairs, so nothing read for one pair helps with the next. In `alike` the
right answers are spelled as the gold, as most are in a rollout, and rltt then reads the text once and not twice; in
`respelled` they are spelled in another usual way (`\dfrac`, spaces, `217.0`, ...), and no text at all is read twice.

Each round takes other pairs and new processes, and the sides take turns at going first. Before the clock starts both
grade the same other pairs of the same kind: the parser under both builds its tables as it meets new grammar, which a
run pays for once. Prints medians, and exits with 1 below the claimed ratio.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

CLAIMED = 0.9
SIDES = ("rltt", "math-verify")
MATH = Path(__file__).parents[1] / ".." / "shared" / "data" / "math"
WARM_UP = 400

Pair = tuple[str, str]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, nargs="+", default=[MATH / "train.jsonl", MATH / "test.jsonl"])
    options.add_argument("--pairs", type=int, default=400, help="in a round")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child: pairs on stdin, result on stdout
    arguments = options.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments.side, *json.load(sys.stdin))))
        return
    golds = distinct_golds(arguments.data)
    # A right pair takes one gold, a wrong one two.
    per_round, for_warm_up = arguments.pairs * 3 // 2, WARM_UP * 3 // 2
    needed = for_warm_up + arguments.rounds * per_round
    if len(golds) < needed:
        sys.exit(f"the data has {len(golds)} different golds, and {needed} are needed: lower --pairs or --rounds")
    random.Random(0).shuffle(golds)
    results = {}
    for kind in ("alike", "respelled"):
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        right: dict[str, int] = dict.fromkeys(SIDES, 0)
        for number in range(arguments.rounds):
            start = for_warm_up + number * per_round
            warm_up, pairs = (
                make_pairs(share, respelled=kind == "respelled")
                for share in (golds[:for_warm_up], golds[start : start + per_round])
            )
            for side in SIDES if number % 2 else SIDES[::-1]:
                rate, count = child(side, warm_up, pairs)
                rates[side].append(rate)
                right[side] += count
        results[kind] = rates
        show(kind, rates, right, arguments)
    worst = min(ratio(rates) for rates in results.values())
    print(f"claimed: at least {CLAIMED}; measured: {worst:.2f}")
    sys.exit(worst < CLAIMED)


def distinct_golds(paths: list[Path]) -> list[str]:
    """Different golds of some data files, as rltt reads them."""
    from rltt.data import read_problems
    from rltt.recipe import DataSection, DataSource

    sources = [DataSource(path=str(path.resolve())) for path in paths]
    problems = [problem for source in sources for problem in read_problems(source, DataSection(train=source))]
    return list(dict.fromkeys(problem.gold for problem in problems))


def make_pairs(golds: list[str], respelled: bool) -> list[Pair]:
    """Right and wrong pairs by turns, each of golds that no other pair has."""
    pairs = []
    for first, second, third in zip(golds[::3], golds[1::3], golds[2::3], strict=False):
        answers = (respelling(first) if respelled else first, third)
        pairs += [
            (gold, rf"Therefore, the answer is $\boxed{{{answer}}}$.")
            for gold, answer in zip((first, second), answers, strict=True)
        ]
    return pairs


def respelling(text: str) -> str:
    """The same answer in another text, as other people write it."""
    if re.fullmatch(r"-?\d+", text):
        return f"{text}.0"
    for common, other in ((r"\frac{", r"\dfrac{"), ("+", " + "), ("-", " - "), (",", ", ")):
        if common in text and other not in text and r",\!" not in text:
            return text.replace(common, other)
    return rf"\displaystyle {text}"


def child(side: str, warm_up: list[Pair], pairs: list[Pair]) -> tuple[float, int]:
    """Pairs a second and how many were found right, measured in a new process."""
    command = [sys.executable, __file__, "--side", side]
    done = subprocess.run(command, input=json.dumps([warm_up, pairs]), stdout=subprocess.PIPE, text=True, check=True)
    rate, right = json.loads(done.stdout)
    return rate, right


def measure(side: str, warm_up: list[Pair], pairs: list[Pair]) -> tuple[float, int]:
    """Grades the pairs on one core, after those of the warm-up."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    grade = with_rltt if side == "rltt" else with_math_verify
    grade(warm_up)
    begun = time.perf_counter()
    right = grade(pairs)
    return len(pairs) / (time.perf_counter() - begun), right


def with_rltt(pairs: list[Pair]) -> int:
    from rltt.rewards.math import shared_pool, verify_math

    golds, completions = zip(*pairs, strict=True)
    outcomes = verify_math(golds, completions)
    assert shared_pool().size == 1  # one core, one worker
    return sum(outcome.status == "right" for outcome in outcomes)


def with_math_verify(pairs: list[Pair]) -> int:
    from math_verify import parse, verify

    return sum(verify(parse(rf"\boxed{{{gold}}}"), parse(completion)) for gold, completion in pairs)


def ratio(rates: dict[str, list[float]]) -> float:
    return median(rates["rltt"]) / median(rates["math-verify"])


def show(kind: str, rates: dict[str, list[float]], right: dict[str, int], arguments: argparse.Namespace) -> None:
    print(f"{kind}: {arguments.rounds} rounds of {arguments.pairs} pairs, pairs a second on one core")
    for side in SIDES:
        found = right[side] / (arguments.rounds * arguments.pairs)
        low, high = min(rates[side]), max(rates[side])
        print(f"  {side:12} {median(rates[side]):7.0f}  ({low:.0f} to {high:.0f}), found right: {found:.3f}")
    print(f"  ratio        {ratio(rates):7.2f}", flush=True)


if __name__ == "__main__":
    main()

r"""Ten thousand answers of which one in a hundred is a bomb, against the same without bombs.

Bombs are towers of powers, 4,000 nested brackets, an answer of a megabyte, and a binomial coefficient that only its
deadline ends. Claimed: every healthy answer gets its own verdict, in at most 1.5 times the time without bombs, plus the
deadlines that were reached divided by the workers. Prints both times, and exits with 1 where a claim fails.
"""

import argparse
import sys
import time

from rltt.rewards.outcome import Outcome
from rltt.rewards.pool import Pool

BOMBS = (
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{" + "(" * 4000 + "1" + ")" * 4000 + "}",
    r"\boxed{" + "7" * 10**6 + "}",
    r"\boxed{\binom{10^{10}}{5 \cdot 10^{9}}}",
)
CLAIMED = 1.5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--answers", type=int, default=10_000)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--deadline", type=float, default=5.0, help="CPU seconds for an answer")
    arguments = options.parse_args()

    golds = [rf"\frac{{{number}}}{{{number + 7}}}" for number in range(arguments.answers)]
    healthy = [rf"\boxed{{{gold if number % 2 else number}}}" for number, gold in enumerate(golds)]
    bombed = [BOMBS[number // 100 % len(BOMBS)] if number % 100 == 50 else text for number, text in enumerate(healthy)]

    plain, plain_seconds = grade(golds, healthy, arguments)
    mixed, mixed_seconds = grade(golds, bombed, arguments)
    same = all(mixed[number] == plain[number] for number in range(len(golds)) if number % 100 != 50)
    timeouts = sum(outcome.status == "timeout" for outcome in mixed)
    allowed = CLAIMED * plain_seconds + timeouts * arguments.deadline / arguments.workers
    print(f"without bombs {plain_seconds:.1f} s, with {mixed_seconds:.1f} s (allowed {allowed:.1f} s)")
    print(f"{timeouts} of {len(golds) // 100} bombs reached their deadline; healthy verdicts unchanged: {same}")
    sys.exit(not same or mixed_seconds > allowed)


def grade(golds: list[str], completions: list[str], arguments: argparse.Namespace) -> tuple[list[Outcome], float]:
    """The outcomes in order, and the seconds they took; the workers are started before the clock."""
    pool = Pool("rltt.rewards.grade:grade", workers=arguments.workers, deadline=arguments.deadline)
    pool.map([("1", r"\boxed{1}")] * 4 * arguments.workers)
    begun = time.perf_counter()
    replies = pool.map(list(zip(golds, completions, strict=True)))
    seconds = time.perf_counter() - begun
    pool.close()
    return [reply.value if reply.status == "ok" else Outcome(reply.status) for reply in replies], seconds


if __name__ == "__main__":
    main()

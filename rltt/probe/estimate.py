"""What groups of any size would be, from samples of each prompt. Numbers only."""

from collections.abc import Sequence

from rltt.evaluate import Mean, pass_at_k


def mixed_at(n: int, c: int, group: int) -> float:
    """Chance that `group` completions of a prompt are neither all solved nor all unsolved.

    Unbiased, from `c` solved ones among `n` ≥ group: 1 - C(c, G) / C(n, G) - C(n-c, G) / C(n, G), the share of mixed
    ones among all subsets of G. Raises ValueError for a group outside 1..n or c outside 0..n.
    """
    return pass_at_k(n, c, group) + pass_at_k(n, n - c, group) - 1.0


def mixed_share(counts: Sequence[tuple[int, int]], group: int) -> Mean | None:
    """Mean over prompts of `mixed_at`, from (n, c) of each; None unless every prompt that was graded has n ≥ group.

    Leaving out the prompts with fewer would leave out those on which the reward fails, which are not like the others.
    """
    graded = [(n, c) for n, c in counts if n]
    if not graded or min(n for n, _ in graded) < group:
        return None
    return Mean.over_prompts([mixed_at(n, c, group) for n, c in graded])


def histogram(rates: Sequence[float]) -> list[tuple[float, float, int]]:
    """How many solve rates are 0, in (0, 0.1], …, in (0.9, 1), and 1: lower and upper bound and count of each bin."""
    counts = [0] * 12
    for rate in rates:
        # -(-x // 1) is the ceiling; rounding first, for 0.3 * 10 is a little more than 3.
        counts[0 if rate == 0 else 11 if rate == 1 else int(-(-round(rate * 10, 9) // 1))] += 1
    bounds = [(0.0, 0.0), *((index / 10, (index + 1) / 10) for index in range(10)), (1.0, 1.0)]
    return [(low, high, count) for (low, high), count in zip(bounds, counts, strict=True)]

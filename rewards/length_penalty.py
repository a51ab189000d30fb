"""From 0.0 down to -1.0 as a completion comes near its limit: the soft overlong punishment of DAPO (arXiv 2503.14476).

    rewards: [math, {use: rewards/length_penalty.py:length_penalty, weight: 0.5}]

Up to LIMIT - MARGIN tokens cost nothing; from there the penalty grows linearly to -1 at LIMIT. Set LIMIT to
`rollout.max_completion_length` of the recipe. A completion cut off there cannot be right: this smooths the way to it.
"""

LIMIT = 512
MARGIN = 128


def length_penalty(completions, completion_ids, **kwargs):
    return [penalty(len(ids)) for ids in completion_ids]


def penalty(tokens: int) -> float:
    return -min(1.0, max(0.0, (tokens - (LIMIT - MARGIN)) / MARGIN))

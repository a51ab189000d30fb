"""Advantages: the reward of a completion against the others of its group (GRPO, eq. 3).

A reward is NaN where no reward function applied: such a completion is left out of its group's statistics and has A = 0.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Scale = Literal["group", "batch", "none"]


def total_reward(rewards: Float[Tensor, "B F"], weights: Float[Tensor, " F"]) -> Float[Tensor, " B"]:
    """Weighted sum of the reward functions that applied; NaN where none did."""
    total = (rewards * weights.unsqueeze(0)).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, total)


def solved_of(rewards: Float[Tensor, "B F"], solved_at: float) -> Float[Tensor, " B"]:
    """1 where the first reward counts as solved, 0 where not, NaN where it did not apply."""
    return torch.where(rewards[:, 0].isnan(), torch.nan, (rewards[:, 0] >= solved_at).float())


def group_advantages(
    rewards: Float[Tensor, " B"], num_generations: int, scale: Scale = "group", epsilon: float = 1e-4
) -> Float[Tensor, " B"]:
    """A_i = (r_i - mean_G r) / (std + ε); a group whose rewards are all equal has A = 0.

    Args:
        rewards: completions of one prompt stand together, `num_generations` of them.
        scale: `group`: std of the group (GRPO); `batch`: std of all rewards; `none`: no division (Dr. GRPO).
    """
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred = centred / (nanstd(groups, dim=1) + epsilon)
    elif scale == "batch":
        centred = centred / (nanstd(rewards, dim=0) + epsilon)
    # The fp32 mean of equal rewards is not always that reward, and Adam makes a full step of any rounding error.
    centred = centred.masked_fill(equal_groups(rewards, num_generations)[:, None], 0.0)
    return centred.reshape(-1).nan_to_num(nan=0.0)


def equal_groups(rewards: Float[Tensor, " B"], num_generations: int) -> Bool[Tensor, " P"]:
    """For each of the P prompts, whether the known rewards of its group are all equal: no gradient comes from it."""
    groups = rewards.view(-1, num_generations)
    unknown = groups.isnan()
    lowest = groups.masked_fill(unknown, torch.inf).amin(1)
    return lowest >= groups.masked_fill(unknown, -torch.inf).amax(1)


def nanstd(x: Float[Tensor, "..."], dim: int) -> Float[Tensor, "..."]:
    """Unbiased standard deviation of the numbers that are not NaN, `dim` kept with size 1; 0 for fewer than two."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    variance = (x - x.nanmean(dim, keepdim=True)).square().nanmean(dim, keepdim=True)
    return (variance * (count / (count - 1).clamp(min=1))).sqrt()


def mixed_groups(solved: Float[Tensor, " B"], num_generations: int) -> Float[Tensor, ""]:
    """Share of prompts with both solved and unsolved completions: only they carry a policy gradient.

    `solved` is 1 or 0, NaN where no reward applied.
    """
    groups = solved.view(-1, num_generations)
    return ((groups == 1).any(1) & (groups == 0).any(1)).float().mean()


def pearson(rewards: Float[Tensor, " B"], certainty: Float[Tensor, " B"]) -> float | None:
    """Correlation of the rewards with how certain the policy was (mean log-prob of a completion's tokens).

    A policy tends to be right where it is certain, so a reward that has to do with the task correlates. Rewards that
    are NaN are left out; None where either side does not vary.
    """
    known = ~rewards.isnan()
    centred = [x[known].double() - x[known].double().mean() for x in (rewards, certainty)]
    scale = centred[0].norm() * centred[1].norm()
    return (centred[0] @ centred[1] / scale).item() if scale > 0 else None

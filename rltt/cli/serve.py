"""`rltt serve`: a vLLM server for the policy of a recipe."""

from typing import Annotated

import typer

from rltt.cli.train import RecipeArgument


def serve(
    recipe: RecipeArgument,
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]... [OPTIONS OF vllm serve]...", help="Overrides, then options for vLLM."),
    ] = None,
) -> None:
    """Serve the policy of a recipe with vLLM, for `rollout.vllm_server` of the same recipe.

    Depth, dtype and length come from the recipe, weights from the trainer. Everything from the first argument with a
    dash on goes to vLLM: --host, --port, --tensor-parallel-size, --data-parallel-size, --gpu-memory-utilization, ….
    """
    from itertools import takewhile

    from rltt.recipe import load_recipe
    from rltt.rollout.vllm import require_vllm

    rest = rest or []
    overrides = list(takewhile(lambda argument: not argument.startswith("-"), rest))
    resolved = load_recipe(recipe, overrides)
    require_vllm()

    import torch

    from rltt.rollout.vllm.server import serve as run_server
    from rltt.train.policy import bf16, load

    options = rest[len(overrides) :]
    if resolved.data.max_prompt_length is not None and "--max-model-len" not in options:
        needed = resolved.data.max_prompt_length + resolved.rollout.max_completion_length
        options = ["--max-model-len", str(needed), *options]
    dtype = torch.bfloat16 if bf16(resolved) else torch.float32
    raise typer.Exit(run_server(load(resolved).model, dtype, options))

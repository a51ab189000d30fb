"""`rltt pretrain`: train with the LoopLM objective."""

from rltt.cli.train import (
    DryRunOption,
    MainAddressOption,
    MainPortOption,
    NodeRankOption,
    NodesOption,
    NumProcessesOption,
    OverridesArgument,
    RecipeArgument,
    layout_of,
    start,
)


def pretrain(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: DryRunOption = False,
    num_processes: NumProcessesOption = None,
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    main_address: MainAddressOption = None,
    main_port: MainPortOption = None,
) -> None:
    """Train a looped model with the LoopLM objective on the responses of a data set, as the recipe says."""
    start("pretrain", recipe, overrides, dry_run, layout_of(num_processes, nodes, node_rank, main_address, main_port))

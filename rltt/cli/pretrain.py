"""`rltt pretrain`: train with the LoopLM objective."""

from rltt.cli.train import (
    AcceptChangeOption,
    DryRunOption,
    MainAddressOption,
    MainPortOption,
    NodeRankOption,
    NodesOption,
    NumProcessesOption,
    OverridesArgument,
    RecipeArgument,
    ResumeOption,
    layout_of,
    start,
)


def pretrain(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    accept_change: AcceptChangeOption = None,
    num_processes: NumProcessesOption = None,
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    main_address: MainAddressOption = None,
    main_port: MainPortOption = None,
) -> None:
    """Train a looped model with the LoopLM objective on the responses of a data set, as the recipe says."""
    layout = layout_of(num_processes, nodes, node_rank, main_address, main_port)
    start("pretrain", recipe, overrides, dry_run, layout, resume, accept_change or [])

"""From a recipe to the model that it trains, and to the prompts as that model sees them."""

from dataclasses import dataclass

import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer

from ..data import Problem, arithmetic_tokenizer, build_dataset, prompt_ids
from ..errors import DataError
from ..models.configuration import IQuestPLTCoderConfig, OuroConfig
from ..models.load import load_policy, load_tokenizer, stop_token_ids
from ..models.looped import LoopedForCausalLM
from ..recipe import Recipe


@dataclass
class Policy:
    """The model with what belongs to it."""

    model: LoopedForCausalLM
    tokenizer: PreTrainedTokenizerBase


def load(recipe: Recipe) -> Policy:
    """The policy of a recipe at its depth, in fp32, and its tokenizer."""
    section = recipe.policy
    if section.new is not None:
        tokenizer = arithmetic_tokenizer()
        model = AutoModelForCausalLM.from_config(
            new_config(recipe, tokenizer), dtype=torch.float32, attn_implementation=section.attn_implementation
        )
    else:
        path = str(section.path)
        tokenizer = load_tokenizer(path, section.trust_remote_code, section.revision)
        model = load_policy(
            path,
            section.loops,
            convert=None if section.convert is None else section.convert.model_dump(),
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
            revision=section.revision,
        )
    model.generation_config.eos_token_id = stop_token_ids(model, tokenizer, uses_chat(recipe, tokenizer))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return Policy(model, tokenizer)


def new_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> OuroConfig | IQuestPLTCoderConfig:
    """Configuration of a policy from scratch."""
    new = recipe.policy.new
    assert new is not None
    fields = {
        **new.model_dump(exclude={"family", "window"}),
        "num_key_value_heads": new.num_key_value_heads or new.num_attention_heads,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},  # made for short sequences
        "total_ut_steps": recipe.policy.loops,
    }
    if new.family == "plt":
        return IQuestPLTCoderConfig(**fields, plt_window_size=[new.window, 0])
    return OuroConfig(**fields)


def uses_chat(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts go through the tokenizer's chat template. One that is asked for and missing: `build_dataset`."""
    return bool(tokenizer.chat_template) and recipe.data.chat_template is not False


def make_dataset(problems: list[Problem], recipe: Recipe, policy: Policy, console: Console, purpose: str) -> Dataset:
    """Prompts as the policy sees them; says how many there are and which were dropped."""
    dataset, report = build_dataset(problems, recipe.data, policy.tokenizer)
    console.print(f"{purpose} data: {report}", highlight=False, soft_wrap=True)
    return dataset


def check_lengths(recipe: Recipe, policy: Policy, datasets: list[Dataset]) -> int:
    """How many tokens the longest prompt has together with a full completion.

    Raises:
        DataError: more than the model has positions: it would train silently.
    """
    positions = policy.model.config.max_position_embeddings
    most = 0
    for dataset in datasets:
        lengths = [len(ids) for ids in prompt_ids(dataset["prompt"][:], policy.tokenizer)]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        needed = lengths[longest] + recipe.rollout.max_completion_length
        most = max(most, needed)
        if needed > positions:
            raise DataError(
                f"{dataset[longest]['row']}: the prompt has {lengths[longest]} tokens and with "
                f"rollout.max_completion_length = {recipe.rollout.max_completion_length} needs {needed} positions, but "
                f"the model has {positions}; lower it or set data.max_prompt_length"
            )
    return most


def describe_policy(policy: Policy, console: Console) -> None:
    spec = policy.model.loop_spec
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    console.print(
        f"policy: {type(policy.model).__name__}, {parameters:,} parameters, "
        f"{spec.layers} layers run {spec.loops} times",
        highlight=False,
    )


def bf16(recipe: Recipe) -> bool:
    """Whether to compute in bf16 over the fp32 weights."""
    if recipe.train.precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return recipe.train.precision == "bf16"


def unwrapped(trainer: Trainer) -> LoopedForCausalLM:
    """The plain model of a trainer, without what mixed precision or sharding put around it."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)

"""From problems to the dataset that TRL's trainer reads: templates, the length filter, and columns for rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltt.data.problems import Problem
from rltt.errors import DataError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from rltt.recipe import DataSection

Prompt = str | list[dict[str, str]]

# An extra column under one of these names would collide with ours, with a keyword that TRL gives to every reward
# function, or with one that changes how TRL builds its batch; it is passed on as `original_<name>`.
_OURS = {"prompt", "gold", "response", "row"}
_TRL = {
    "prompts",
    "completion",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environment",
    "environments",
    "image",
    "images",
}
_SHOWN = 3


@dataclass(frozen=True)
class DropReport:
    """What the length filter did: lengths in tokens of the prompt as the model sees it, templates included."""

    kept: int
    dropped: int
    max_length: int | None
    longest: int | None
    """Tokens of the longest prompt, dropped or not; None without a filter, where nothing is counted."""
    first: tuple[str, ...]
    """The first few dropped rows."""

    @property
    def share(self) -> float:
        """Dropped prompts as a share of all."""
        return self.dropped / (self.kept + self.dropped)

    def __str__(self) -> str:
        total = self.kept + self.dropped
        if self.max_length is None:
            return f"all {total} prompts kept (no max_prompt_length)"
        if not self.dropped:
            return f"all {total} prompts kept: the longest has {self.longest} of at most {self.max_length} tokens"
        rows = ", ".join(self.first) + (", …" if self.dropped > len(self.first) else "")
        return (
            f"{self.dropped} of {total} prompts dropped ({self.share:.1%}), longer than {self.max_length} tokens; "
            f"the longest has {self.longest} ({rows})"
        )


def build_dataset(
    problems: Sequence[Problem], section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[datasets.Dataset, DropReport]:
    """The problems as a dataset for `RLTTTrainer` or TRL's `GRPOTrainer`, in their order.

    Columns: `prompt` (text, or messages where a chat template is used: TRL applies the template itself), `gold`,
    `response` where every problem has one, `row` (where the problem comes from) and the source's remaining columns.

    Raises `DataError` when a chat is asked of a tokenizer without a template, when every prompt is too long, and when
    the source's columns do not fit into a dataset.
    """
    import datasets

    chat = _uses_chat(section, tokenizer)
    prompts = [_render(problem, section, chat=chat) for problem in problems]
    kept, report = _filter_by_length(prompts, problems, section.max_prompt_length, tokenizer)
    chosen = [problems[index] for index in kept]
    columns: dict[str, list[Any]] = {
        "prompt": [prompts[index] for index in kept],
        "gold": [problem.gold for problem in chosen],
        "row": [problem.where for problem in chosen],
    }
    if all(problem.response is not None for problem in chosen):
        columns["response"] = [problem.response for problem in chosen]
    columns |= _extra_columns(chosen)
    return datasets.Dataset.from_dict(columns), report


def _uses_chat(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> bool:
    has_template = bool(tokenizer.chat_template)
    if section.chat_template and not has_template:
        raise DataError("data.chat_template is true, but the policy's tokenizer has no chat template: leave it out.")
    chat = has_template if section.chat_template is None else section.chat_template
    if section.system_prompt is not None and not chat:
        reason = "data.chat_template is false" if has_template else "the policy's tokenizer has no chat template"
        raise DataError(f"data.system_prompt needs a chat, but {reason}: put its text into data.prompt_template.")
    return chat


def _render(problem: Problem, section: DataSection, *, chat: bool) -> Prompt:
    # replace, not format: templates ask for answers in \boxed{}.
    text = section.prompt_template.replace("{prompt}", problem.prompt)
    if not chat:
        return text
    system = [] if section.system_prompt is None else [{"role": "system", "content": section.system_prompt}]
    return [*system, {"role": "user", "content": text}]


def _filter_by_length(
    prompts: list[Prompt], problems: Sequence[Problem], max_length: int | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], DropReport]:
    """Indices of the prompts that fit, and the report."""
    if max_length is None:
        return list(range(len(prompts))), DropReport(len(prompts), 0, None, None, ())
    lengths = [len(ids) for ids in prompt_ids(prompts, tokenizer)]
    kept = [index for index, length in enumerate(lengths) if length <= max_length]
    dropped = [problem.where for problem, length in zip(problems, lengths, strict=True) if length > max_length]
    if not kept:
        raise DataError(
            f"data.max_prompt_length is {max_length}, and all {len(prompts)} prompts are longer: "
            f"the shortest has {min(lengths)} tokens."
        )
    return kept, DropReport(len(kept), len(dropped), max_length, max(lengths), tuple(dropped[:_SHOWN]))


def prompt_ids(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The prompts as TRL tokenizes them: text as it is, messages through the chat template."""
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts))["input_ids"]
    encoded = tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoded["input_ids"]


def _extra_columns(problems: list[Problem]) -> dict[str, list[Any]]:
    """The source's remaining columns under names that are free; a row without one has None."""
    import pyarrow

    names = list(dict.fromkeys(name for problem in problems for name in problem.columns))
    columns = {}
    for name in names:
        free = f"original_{name}" if name in _OURS | _TRL else name
        if free != name and free in names:
            raise DataError(f"the data has the columns '{name}', a name that rltt needs, and '{free}': rename one.")
        columns[free] = [problem.columns.get(name) for problem in problems]
        try:
            pyarrow.array(columns[free])
        # Text among numbers, half a surrogate pair, an integer beyond 64 bits: Arrow's errors are kinds of these.
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the data's column '{name}' fits no type: {error}. Mend or remove it.") from error
    return columns

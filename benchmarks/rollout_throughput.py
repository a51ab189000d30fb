"""Completion tokens a second of a recipe's rollouts: the vLLM engine against `generate` on the policy itself.

Both are the trainer's own: two trainers of one recipe in this process, one for each engine, which take turns with the
same prompts. The policy is the recipe's before any training; a warm start is left out. Each engine has a first rollout
that is not timed (vLLM compiles the model and gets its weights there). Printed are medians over the rounds and their
ratio; nothing is claimed, as it depends on the model, the batch and the machine.

    python benchmarks/rollout_throughput.py recipes/gsm8k-smollm-cpu.yaml data.train=gsm8k/train.jsonl
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from rltt.recipe import load_recipe
from rltt.train.run import make_trainer, prepare
from rltt.train.trainer import RLTTTrainer

ENGINES = ("hf", "vllm")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("recipe", type=Path)
    options.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            engine: trainer_of(arguments.recipe, [*arguments.overrides, f"rollout.engine={engine}"], folder)
            for engine in ENGINES
        }
        rates: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for number in range(arguments.rounds + 1):
            for engine in ENGINES if number % 2 else ENGINES[::-1]:
                tokens, seconds = rollout(trainers[engine], number)
                print(f"round {number} {engine}: {tokens} tokens in {seconds:.1f} s", flush=True)
                if number:
                    rates[engine].append(tokens / seconds)
    for engine, found in rates.items():
        print(f"{engine:>5}: {median(found):.0f} tokens a second ({min(found):.0f} to {max(found):.0f})")
    print(f"ratio: {median(rates['vllm']) / median(rates['hf']):.2f}")


def trainer_of(recipe: Path, overrides: list[str], folder: str) -> RLTTTrainer:
    resolved = load_recipe(recipe, overrides).model_copy(update={"pretrain": None, "run_dir": folder})
    ready = prepare(resolved, Console())
    return make_trainer(ready.config, ready.policy, ready.dataset, ready.rewards)


def rollout(trainer: RLTTTrainer, number: int) -> tuple[int, float]:
    """Sample the completions of one step, and return their tokens and the seconds it took."""
    group = trainer.num_generations
    count = trainer.args.generation_batch_size // group
    rows = [(number * count + index) % len(trainer.train_dataset) for index in range(count)]
    prompts = trainer._tokenize_prompts([trainer.train_dataset[row]["prompt"] for row in rows for _ in range(group)])[0]
    torch.manual_seed(number)
    start = time.perf_counter()
    completions, _ = trainer._generate_single_turn(prompts, None, {}, group)
    return sum(map(len, completions)), time.perf_counter() - start


if __name__ == "__main__":
    main()

"""The same numbers whatever the layout: loss, KL, gradient norm and weights of one process, DDP, ZeRO-2 and ZeRO-3.

    python benchmarks/layouts.py                # all cases, some five minutes on 2 cores
    python benchmarks/layouts.py --cases "uniform grpo" "learned cispo" --layouts ddp zero3

Sampling depends on each process's random numbers, so one process samples first, and every layout is then given its
completions: the same global batch of 16, in groups of 4, for four updates of AdamW on two rollouts with a KL penalty.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from rltt.data.arithmetic import arithmetic_problems
from rltt.data.tokenizer import arithmetic_tokenizer
from rltt.launch import Layout
from rltt.models.configuration import OuroConfig
from rltt.models.looplm import OuroForCausalLM
from rltt.processes import is_main, world_size
from rltt.recipe import TrainSection
from rltt.train.config import RLTTConfig
from rltt.train.parity_gate import Turn
from rltt.train.sharding import deepspeed_config, whole_state_dict
from rltt.train.trainer import RLTTTrainer

COMPLETIONS = 16
MEASURES = ("loss", "kl", "grad_norm")
# Reductions: response_mean (grpo, reinforce), token_mean (dapo, cispo), constant (dr_grpo).
CASES: dict[str, dict[str, Any]] = {
    f"{credit} {loss}": {"credit": credit, "loss_type": loss}
    for credit in ("final", "uniform", "progressive", "exit_pdf")
    for loss in ("grpo", "dapo", "dr_grpo")
} | {
    # With a ratio form the gate's gradient on policy is rounding noise (all ratios are 1), which Adam would blow up.
    "exit_pdf, gate trained": {"credit": "exit_pdf", "loss_type": "reinforce", "detach_exit": False},
    "learned reinforce": {"credit": "learned", "loss_type": "reinforce"},
    "learned cispo": {"credit": "learned", "loss_type": "cispo", "epsilon_high": 5.0},
}
# Sharding and micro-batch on one process.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one, micro-batch 4": {"sharding": "none", "micro_batch": 4},
    "ddp": {"sharding": "ddp", "micro_batch": 8},
    "ddp, micro-batch 2": {"sharding": "ddp", "micro_batch": 2},
    "zero2": {"sharding": "zero2", "micro_batch": 4},
    "zero3": {"sharding": "zero3", "micro_batch": 4},
    "zero3, checkpointing": {"sharding": "zero3", "micro_batch": 8, "gradient_checkpointing": True},
    "zero3, offload": {"sharding": "zero3", "micro_batch": 8, "offload": "parameters"},
}


def policy() -> OuroForCausalLM:
    """A LoopLM of 2 layers and 3 loops with random weights; several tokens end a completion, so that lengths differ."""
    torch.manual_seed(0)
    tokenizer = arithmetic_tokenizer()
    config = OuroConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        total_ut_steps=3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = OuroForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(10, 18)]
    return model


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that any completion gets some of."""
    return [sum(map(ord, completion)) % 7 / 3 for completion in completions]


class Replay(RLTTTrainer):
    """Records what one process samples, or takes the completions of an earlier recording in place of sampling.

    Attributes:
        rollouts: prompts, completions and log-probs of each rollout, of all processes in the order of the batch.
        replay: take them from there.
    """

    def __init__(self, *args: Any, rollouts: list[dict[str, Any]], replay: bool, **kwargs: Any) -> None:
        self.rollouts, self.replay, self.drawn = rollouts, replay, 0
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if not self.replay:
            completions, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.rollouts.append({"prompts": prompt_ids, "completions": completions, "log_probs": log_probs})
            return completions, log_probs
        first = self.accelerator.process_index * len(prompt_ids)
        mine = {key: rows[first : first + len(prompt_ids)] for key, rows in self.rollouts[self.drawn].items()}
        self.drawn += 1
        assert mine["prompts"] == prompt_ids, "another order of the data than in one process"
        self.parity_gate.turns.append(Turn(prompt_ids, mine["completions"]))
        return mine["completions"], mine["log_probs"]


def train(
    case: str, out: str, rollouts: list[dict[str, Any]], replay: bool, layout: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Four updates of a case in a layout, by all processes together: what was logged, and the weights."""
    layout = layout or {"sharding": "none", "micro_batch": COMPLETIONS}
    model = policy()
    section = TrainSection(sharding=layout["sharding"], offload=layout.get("offload", "none"))
    deepspeed = deepspeed_config(section, model.num_parameters())
    if layout["sharding"] == "zero3":
        assert deepspeed is not None
        deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # or all of so small a model stays
    accumulation = COMPLETIONS // layout["micro_batch"] // world_size()
    config = RLTTConfig(
        out,
        per_device_train_batch_size=layout["micro_batch"],
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_iterations=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=4,
        learning_rate=1e-3,
        adam_epsilon=1e-6,  # the usual 1e-8 turns rounding in gradients that are nearly zero into steps of full length
        lr_scheduler_type="constant",
        beta=0.05,
        save_strategy="no",
        gradient_checkpointing=layout.get("gradient_checkpointing", False),
        ddp_find_unused_parameters=False,
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=0,
        disable_tqdm=True,
        log_level="error",
        deepspeed=deepspeed,
        **CASES[case],
    )
    problems = arithmetic_problems(1, 32, "train")
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    trainer = Replay(
        model,
        letters,
        config,
        data,
        processing_class=arithmetic_tokenizer(),
        rollouts=rollouts,
        replay=replay,
    )
    trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if "Printer" not in str(c)]
    trainer.train()
    model = trainer.policy
    weights = whole_state_dict(trainer, model) or {k: v.detach().clone() for k, v in model.named_parameters()}
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = {len(completion) for rollout in rollouts for completion in rollout["completions"]}
    assert len(lengths) > 4, "completions of one length cannot tell reductions apart"
    return {"steps": [{key: step[key] for key in MEASURES} for step in steps], "weights": weights}


def worker(folder: Path, layouts: list[str], cases: list[str]) -> None:
    """One of the processes of a launch: replay every case in every layout."""
    recording = torch.load(folder / "recording.pt", weights_only=False)
    found = {
        (layout, case): train(case, str(folder), recording[case]["rollouts"], True, LAYOUTS[layout])
        for layout in layouts
        for case in cases
    }
    if is_main():
        torch.save(found, folder / "found.pt")


def compare(cases: list[str], layouts: list[str], folder: Path) -> list[dict[str, Any]]:
    """For each case and layout, how far its numbers are from those of one process with one micro-batch.

    Returns:
        Rows of case, layout, and the largest difference of each measure over the updates, relative to its largest
        value; `weights` is the norm of the difference relative to how far training has moved the weights.
    """
    recording: dict[str, Any] = {}
    for case in cases:
        rollouts: list[dict[str, Any]] = []
        recording[case] = train(case, str(folder), rollouts, replay=False) | {"rollouts": rollouts}
    torch.save(recording, folder / "recording.pt")
    alone = [layout for layout in layouts if LAYOUTS[layout]["sharding"] == "none"]
    found = {
        (layout, case): train(case, str(folder), recording[case]["rollouts"], True, LAYOUTS[layout])
        for layout in alone
        for case in cases
    }
    if shared := [layout for layout in layouts if layout not in alone]:
        spec = json.dumps({"folder": str(folder), "layouts": shared, "cases": cases})
        command = [sys.executable, "-m", "torch.distributed.run", *Layout(2).options()]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, __file__, "--worker", spec], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"the launch of {', '.join(shared)} failed:\n{done.stderr[-5000:]}")
        found |= torch.load(folder / "found.pt", weights_only=False)
    start = dict(policy().named_parameters())
    return [
        {"case": case, "layout": layout} | differences(recording[case], found[layout, case], start)
        for case in cases
        for layout in layouts
    ]


def differences(expected: dict[str, Any], found: dict[str, Any], start: dict[str, Any]) -> dict[str, float]:
    """Relative differences; see `compare`."""
    result = {}
    for key in MEASURES:
        pairs = [(e[key], f[key]) for e, f in zip(expected["steps"], found["steps"], strict=True)]
        result[key] = max(abs(e - f) for e, f in pairs) / max(abs(e) for e, _ in pairs)
    weights = expected["weights"]
    assert weights.keys() == found["weights"].keys()
    off = sum((weights[name] - found["weights"][name]).square().sum().item() for name in weights)
    origin = {name: start.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}
    moved = sum((weights[name] - origin[name]).square().sum().item() for name in weights)
    return result | {"weights": (off / moved) ** 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the numbers of layouts.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        spec = json.loads(args.worker)
        worker(Path(spec["folder"]), spec["layouts"], spec["cases"])
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(args.cases, args.layouts, Path(folder))
    print(f"{'case':24} {'layout':22}" + "".join(f"{key:>11}" for key in (*MEASURES, "weights")))
    for row in rows:
        print(f"{row['case']:24} {row['layout']:22}" + "".join(f"{row[key]:11.1e}" for key in (*MEASURES, "weights")))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

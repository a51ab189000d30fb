"""Who generates completions: the seam between a policy and an inference engine.

An engine takes prompts (text, or chat messages) and gives back `Completion`s, a group for each prompt. It has to agree
with scoring on the prompt's tokens (`rltt.data.prompt_ids`), the temperature, the depth, and the tokens that end a
completion.

hf.py   `generate` on the policy itself, for evaluation and the warm start's checks. During training TRL calls the same
        transformers method under `RLTTTrainer._generate_single_turn`, the one place where another engine plugs in.
vllm/   looped models in vLLM, and the engine that a trainer samples from with `rollout.engine: vllm`
parity.py   whether engine and training path give the same tokens the same log-probs
"""

from rltt.rollout.hf import Completion, Prompt, generate

__all__ = ["Completion", "Prompt", "generate"]

"""`RLTTConfig`: TRL's GRPOConfig with credit over loops, and what is unsafe for looped policies refused by name."""

from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOConfig

from ..objective.credit import SCHEMES
from ..objective.policy_loss import REDUCTION, PolicyLoss

_OTHER_SAMPLER = "completions would be sampled from another distribution than the one that is scored"
# Option, its neutral value, and why any other value is unsafe for a looped policy.
_UNSAFE: tuple[tuple[str, Any, str], ...] = (
    ("off_policy_mask_threshold", None, "its sequence mask is made from the last loop, the other loops have none"),
    ("use_adaptive_entropy", False, "its controller sees the last loop's entropy while the credit goes to all loops"),
    ("router_aux_loss_coef", None, "looped policies have no router"),
    ("sync_ref_model", False, "the KL is measured to a frozen reference; a moving one hides how far the policy went"),
    ("top_p", 1.0, _OTHER_SAMPLER),
    ("top_k", 0, _OTHER_SAMPLER),
    ("min_p", None, _OTHER_SAMPLER),
    ("repetition_penalty", 1.0, _OTHER_SAMPLER),
    ("generation_kwargs", None, _OTHER_SAMPLER),
    ("cache_implementation", None, "only a dynamic cache can hold one slot for each loop and layer"),
    (
        "use_transformers_continuous_batching",
        False,
        "its cache has one slot a layer, not one a loop",
    ),
    ("use_liger_kernel", False, "it patches model classes by family and does not know the looped ones"),
    ("vllm_importance_sampling_correction", True, "parity is measured on the log-probs that it compares"),
    ("vllm_enable_sleep_mode", False, "the engine's weights have to stay where they are synced to"),
    ("vllm_structured_outputs_regex", None, _OTHER_SAMPLER),
)
# Measured on the quickstart over 10 updates: at most 6e-5 in fp32, and 0.24 in bf16 (2e-3 on average).
PARITY_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.5}


@dataclass
class RLTTConfig(GRPOConfig):
    """Configuration of `RLTTTrainer`: all of TRL's `GRPOConfig`, and these.

    `loss_type` also takes `reinforce`, the paper's -A·ℓ averaged over a response.
    """

    credit: str = field(
        default="exit_pdf",
        metadata={"help": f"How the policy gradient is shared among loops: {', '.join(SCHEMES)}. `final` is GRPO."},
    )
    credit_alpha: float = field(default=1.0, metadata={"help": "Exponent α of `progressive`: ω_t = t^α / Σ_s s^α."})
    credit_learning_rate: float = field(
        default=1e-2, metadata={"help": "Learning rate of the T logits of `learned`; the policy's would not move them."}
    )
    detach_exit: bool = field(
        default=True, metadata={"help": "Keep the gradient of `exit_pdf` weights from training the exit gate."}
    )
    solved_at: float = field(
        default=1.0, metadata={"help": "Value of the first reward function from which a completion counts as solved."}
    )
    parity_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Largest log-prob difference between the rollout engine and the training path at a check; "
            f"None: {PARITY_TOLERANCE[torch.float32]:g} in fp32, {PARITY_TOLERANCE[torch.bfloat16]:g} in bf16."
        },
    )
    parity_check_rollouts: int = field(
        default=10,
        metadata={"help": "Rollouts from one parity check to the next; the first is checked. All are measured."},
    )
    resample_uniform: bool = field(
        default=False,
        metadata={"help": "Replace groups whose completions all have the same reward by groups of fresh prompts."},
    )
    resample_budget: float = field(
        default=2.0,
        metadata={"help": "Fresh prompts for a rollout at most, as a multiple of the prompts that it takes."},
    )
    vllm_timeout: float = field(
        default=3600.0,
        metadata={"help": "Seconds that vLLM may take for a rollout, weights included; after that it is started anew."},
    )
    max_nonfinite_steps: int = field(
        default=5,
        metadata={"help": "Updates in a row with a NaN or infinite gradient, all skipped, that end training."},
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every so many updates."})

    def __post_init__(self) -> None:
        # TRL would ask for bf16 also where there is none.
        if self.bf16 is None and not self.fp16:  # type: ignore[has-type]
            self.bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        super().__post_init__()
        if self.credit not in SCHEMES:
            raise ValueError(f"credit must be one of {', '.join(SCHEMES)}; found {self.credit!r}")
        if self.loss_type not in REDUCTION:
            raise ValueError(f"loss_type must be one of {', '.join(REDUCTION)}; found {self.loss_type!r}")
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, found {self.beta}")
        if self.credit_alpha < 0:
            raise ValueError(f"credit_alpha must not be negative, found {self.credit_alpha}")
        if self.parity_check_rollouts < 1:
            raise ValueError(f"parity_check_rollouts must be at least 1, found {self.parity_check_rollouts}")
        if self.resample_budget <= 0:
            raise ValueError(f"resample_budget must be above 0, found {self.resample_budget}")
        if self.max_nonfinite_steps < 1:
            raise ValueError(f"max_nonfinite_steps must be at least 1, found {self.max_nonfinite_steps}")
        if self.credit == "learned" and self.loss_type not in ("reinforce", "cispo"):
            raise ValueError(
                f"credit 'learned' gets no gradient from loss_type {self.loss_type!r}: on policy every loop's ratio is "
                "1 whatever the weights; use 'reinforce' or 'cispo'"
            )
        for option, neutral, why in _UNSAFE:
            if getattr(self, option) != neutral:
                raise ValueError(
                    f"{option}={getattr(self, option)!r} is not supported for looped policies: {why}; "
                    f"leave it at {neutral!r}"
                )
        if self.use_vllm and self.loss_type == "vespo" and self.vllm_importance_sampling_mode.startswith("sequence"):
            raise ValueError(
                "loss_type 'vespo' with vLLM needs vllm_importance_sampling_mode 'token_mask' or 'token_truncate'"
            )
        if (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "gradient_checkpointing_kwargs={'use_reentrant': True} is not supported for looped policies: shared "
                "layers then get wrong gradients; leave it out"
            )

    @property
    def device(self) -> torch.device:
        """As in transformers. Of several processes without GPUs each is on `cpu`.

        accelerate says `cpu:0`, a place to which torch loads no checkpoint.
        """
        found = super().device
        return torch.device("cpu") if found.type == "cpu" else found

    @property
    def compute_dtype(self) -> torch.dtype:
        """What forward passes compute in, over fp32 weights."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def parity_bound(self) -> float:
        """`parity_tolerance`, or the bound of the dtype."""
        if self.parity_tolerance is not None:
            return self.parity_tolerance
        return PARITY_TOLERANCE.get(self.compute_dtype, PARITY_TOLERANCE[torch.bfloat16])

    @property
    def policy_loss(self) -> PolicyLoss:
        """The policy term and its constants."""
        return PolicyLoss(
            loss_type=self.loss_type,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=self.delta,
            importance_sampling_level=self.importance_sampling_level,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
        )

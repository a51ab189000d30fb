"""`RLTTTrainer`: TRL's GRPOTrainer with a policy term for every loop.

TRL samples, rewards, batches, accumulates, shards, saves and resumes. Replaced here are the three places where a loop
matters: scoring (one forward gives the log-probs of all loops), the advantages and the loss (../objective), and what is
measured. With `credit: final` the updates equal GRPOTrainer's bit for bit; tests hold that for each loss type.

Shapes: B completions, C completion tokens, T loops.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import disable_dropout_in_model, split_tensor_dict

from ..errors import PolicyError, UserError
from ..models.adapters import AdaptersOff, activate, add_adapters, check_peft_config, has_adapters, without_wrapper
from ..models.load import load_policy
from ..models.looped import LoopedForCausalLM, Score
from ..models.plt import PLTModel
from ..objective import credit as credit_schemes
from ..objective.advantage import equal_groups, group_advantages, mixed_groups, pearson, solved_of, total_reward
from ..objective.kl import k3, kl_to_last_loop
from ..objective.policy_loss import REDUCTION, reduce_tokens
from ..rollout.record import recorded_log_probs
from ..rollout.vllm import require_vllm
from .checkpoint import fingerprint
from .config import RLTTConfig
from .faults import GuardedTrainer, OutOfMemoryInStepError, ScoringMemory, UpdateShare
from .parity_gate import ParityGate, Turn
from .resample import Resampler
from .sharding import begin_trainer
from .token_means import TokenMeans

# Called with the rows of each rollout: prompt, completion, gold, rewards, advantage, ….
RolloutWriter = Callable[[list[dict[str, Any]]], None]


@dataclass
class CompletionScores:
    """The training path's view of a batch of completions.

    Attributes:
        log_probs: [B, C, T] fp32.
        entropy: [B, C, T] fp32.
        exit_log_pdf: [B, C, T] fp32, or None without a gate.
        credit: [T] learned weights, or None.
    """

    log_probs: Tensor
    entropy: Tensor
    exit_log_pdf: Tensor | None
    credit: Tensor | None


class RLTTTrainer(GuardedTrainer, GRPOTrainer):
    """GRPO/RLTT for looped policies. Used as TRL's own trainers are.

    Args:
        model: a looped policy, or the path of one.
        reward_funcs: as in TRL. The first decides `solve_rate` (see `RLTTConfig.solved_at`).
        args: an `RLTTConfig`.
        rollout_writer: receives the rows of each rollout on the main process.
        kwargs: all of GRPOTrainer's other arguments. `peft_config`: a LoraConfig, for one adapter for all loops;
            `rltt.models.adapters.add_lora` makes policies with one for each.

    Raises:
        PolicyError: the model is not looped, reads out adaptively, or lacks the gate that the credit needs.
        UserError: the dataset is smaller than one rollout, or an argument is not supported.
    """

    args: RLTTConfig
    _tag_names: ClassVar[list[str]] = ["trl", "rltt", "grpo"]
    _name = "RLTT"

    def __init__(
        self,
        model: LoopedForCausalLM | str,
        reward_funcs: Any = None,
        args: RLTTConfig | None = None,
        train_dataset: Any = None,
        *,
        rollout_writer: RolloutWriter | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str):
            model = load_policy(model, **(args.model_init_kwargs or {} if args else {}))
        if args is None:
            args = RLTTConfig(f"{model.config._name_or_path.split('/')[-1]}-RLTT")
        peft_config = kwargs.pop("peft_config", None)
        check_trainable(model, args, train_dataset, peft_config)
        begin_trainer(args)
        if peft_config is not None:
            model = add_adapters(model, peft_config)
        policy = without_wrapper(model)
        with_adapters = policy is not model
        prepare_gradients(policy, args)
        drop_generation_defaults(policy)
        # A copy of what is in memory. TRL would load the path in the configuration once more, which after an edit or
        # a resumed checkpoint holds other weights. It is made before TRL binds its patched forward to the policy.
        reference = None if with_adapters else copy.deepcopy(policy).requires_grad_(False).eval()
        self.reference_fingerprint = fingerprint(policy)
        if args.credit == "learned":
            policy.credit = credit_schemes.LearnedCredit(policy.loop_spec.loops)

        # Tells TRL to load no reference, and to start no engine: both are made here from what is in memory.
        beta, args.beta = args.beta, 0.0
        use_vllm, args.use_vllm = args.use_vllm, False
        try:
            super().__init__(model, reward_funcs, args, train_dataset, **kwargs)
        finally:
            args.beta, args.use_vllm = beta, use_vllm
        if len(set(self.reward_func_names)) < len(self.reward_func_names):
            raise UserError(f"reward functions need different names, found {', '.join(self.reward_func_names)}")
        self.beta = beta
        self.ref_model = AdaptersOff(self) if reference is None else self._prepare_reference(reference)
        if use_vllm:
            self._start_engine()
        self.parity_gate = ParityGate(self, args.parity_check_rollouts)
        self.max_nonfinite_steps = args.max_nonfinite_steps
        self.scoring_memory = ScoringMemory()
        self.add_callback(UpdateShare(self, partial(self.note, "update/changed")))
        self.rollout_writer = rollout_writer
        self._token_means = {"train": TokenMeans(), "eval": TokenMeans()}
        self._loop_log_probs: Tensor | None = None
        self._rewards: Tensor | None = None
        self.known_rewards: Tensor | None = None
        self._inputs: list[dict[str, Any]] = []
        self.resampler = Resampler(self, args.resample_budget) if args.resample_uniform else None
        self._seconds: dict[str, float] = {}
        self._train_sampler: Any = None

    def _prepare_reference(self, reference: LoopedForCausalLM) -> Any:
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _start_engine(self) -> None:
        """A vLLM engine of this policy; TRL's plumbing samples from it from now on."""
        require_vllm()
        from ..rollout.vllm.engine import ColocatedEngine
        from ..rollout.vllm.server import ServerEngine

        args = self.args
        common: dict[str, Any] = {
            "model": self.model,
            "accelerator": self.accelerator,
            "processing_class": self.processing_class,
            "dtype": args.compute_dtype,
            "stop_token_ids": list(self.eos_token_ids),
            "temperature": self.temperature,
            "max_completion_length": self.max_completion_length,
        }
        if args.vllm_mode == "server":
            self.vllm_generation = ServerEngine(
                **common,
                loops=self.policy.loop_spec.loops,
                server_base_url=args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}",
                server_timeout=args.vllm_server_timeout,
                group_port=args.vllm_group_port,
            )
        else:
            parallel = args.vllm_tensor_parallel_size
            self.vllm_generation = ColocatedEngine(
                **common,
                seed=args.seed,
                tensor_parallel_size=parallel,
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                max_model_length=args.vllm_max_model_length,
                max_num_seqs=args.per_device_train_batch_size * parallel * args.steps_per_generation,
            )
        self.use_vllm = True
        self._last_loaded_step = -1  # the engine has no weights yet: TRL sends them before the first rollout

    def _restart_engine(self) -> None:
        self.vllm_generation.restart()
        self._last_loaded_step = -1  # its weights are to be sent

    @property
    def policy(self) -> LoopedForCausalLM:
        """The looped model itself, without the wrappers of sharding and of adapters."""
        return without_wrapper(self.accelerator.unwrap_model(self.model))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in transformers; learned credit logits become a group of their own with their own learning rate."""
        optimizer = super().create_optimizer(*args, **kwargs)
        credit = self.policy.credit
        if credit is not None and all(group.get("name") != "credit" for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not credit.logits]
            optimizer.add_param_group(
                {"params": [credit.logits], "lr": self.args.credit_learning_rate, "weight_decay": 0.0, "name": "credit"}
            )
        return optimizer

    # ---------------------------------------------------------------------------------------------- checkpoints

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(*args, **kwargs)
        if self.policy is not self.accelerator.unwrap_model(self.model):
            activate(self.accelerator.unwrap_model(self.model))  # transformers leaves only the first one trainable

    def process_state(self) -> dict[str, Any]:
        """The rollout that later updates still use, and what has been counted."""
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            **super().process_state(),
            "rollout": None if used_up else self._buffered_inputs,
            "metrics": {mode: dict(metrics) for mode, metrics in self._metrics.items()},
            "token_means": {mode: means.sums for mode, means in self._token_means.items()},
            "rollouts_at_gate": self.parity_gate.rollouts,
            "resampled": 0 if self.resampler is None else self.resampler.drawn,
        }

    def load_process_state(self, state: dict[str, Any]) -> None:
        """Take `process_state` back."""
        super().load_process_state(state)
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        self._buffered_inputs = resplit(state["rollout"], self.args.steps_per_generation)
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].update(metrics)
            self._token_means[mode].sums = state["token_means"][mode]
        self.parity_gate.rollouts = state["rollouts_at_gate"]
        if self.resampler is not None:
            self.resampler.drawn = state["resampled"]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        epochs, steps = super()._init_training_state(*args, **kwargs)
        # TRL's sampler draws a new order for each pass over the data from a generator of its own.
        if epochs and self._train_sampler is not None and self._train_sampler.shuffle:
            for _ in range(epochs):
                torch.randperm(self._train_sampler.num_samples, generator=self._train_sampler.generator)
        return epochs, steps

    # ------------------------------------------------------------------------------------------------ rollout

    def _generate(self, prompts: list[Any]) -> Any:
        if self.resampler is None or self._mode != "train":
            return super()._generate(prompts)
        return self.resampler.rollout(self._inputs, prompts, super()._generate)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        # The seam for rollout engines. Each gives the log-probs that it drew its tokens with.
        with self._timed("rollout"):
            if self.use_vllm:
                from ..rollout.vllm.watch import EngineError, failures, with_one_restart

                sample = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
                restart = self._restart_engine if self.args.world_size == 1 else None
                try:
                    completions, log_probs = with_one_restart(sample, restart, self.args.vllm_timeout, failures())
                except EngineError:
                    self.save_before_end()
                    raise
                prompt_ids = self.vllm_generation.prompts_of_last_rollout
            else:
                # Sampling runs under the same autocast as scoring: one numeric path.
                with self.accelerator.autocast(), recorded_log_probs(self.policy) as record:
                    completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
                log_probs = record.of(completions)
        self.parity_gate.turns.append(Turn(prompt_ids, completions))
        return completions, log_probs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B F"]:
        if self.known_rewards is not None:  # the resampler has graded these completions
            self._rewards, self.known_rewards = self.known_rewards, None
            return self._rewards
        with self._timed("reward"):
            self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        mode = self._mode
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        self._loop_log_probs = None
        self._inputs = inputs
        start = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)

        if "old_per_token_logps" in batch:  # TRL asked for them through our scoring, which kept every loop
            batch["old_loop_log_probs"] = self._loop_log_probs
            training = batch["old_per_token_logps"]
        else:
            training = self._last_loop_log_probs(self.model, batch, mode)
        for name, value in self.parity_gate.check(batch, training, mode).items():
            self._metrics[mode][name].append(value)
        if "ref_per_token_logps" not in batch:  # with beta = 0 TRL does not; the KL is measured all the same
            batch["ref_per_token_logps"] = self._last_loop_log_probs(self.ref_model, batch, mode)

        assert self._rewards is not None
        rewards = total_reward(self._rewards, self.reward_weights.to(self._rewards.device))
        if self.multi_objective_aggregation == "sum_then_normalize":
            advantages = group_advantages(rewards, generations, self.scale_rewards)
            size = len(inputs)
            batch["advantages"] = advantages[self.accelerator.process_index * size :][:size]
            logged = self._logs["advantages"]  # TRL's own, of the same completions: replaced
            for _ in advantages:
                logged.pop()
            logged.extend(advantages.tolist())

        solved = solved_of(self._rewards, self.args.solved_at)
        as_dealt = solved
        if self.resampler is not None and mode == "train":
            assert self.resampler.spent.as_dealt is not None
            as_dealt = solved_of(self.resampler.spent.as_dealt, self.args.solved_at)
            for name, value in self.resampler.rewards_as_dealt().items():
                self._metrics[mode][name][-1] = value
            for name, value in self.resampler.cost().items():
                self._metrics[mode][name].append(value)
        self._metrics[mode]["solve_rate"].append(as_dealt.nanmean().item())
        self._metrics[mode]["mixed_groups"].append(mixed_groups(solved, generations).item())
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        certainty = self.accelerator.gather((training * mask).sum(1) / mask.sum(1).clamp(min=1))
        if (correlation := pearson(self._rewards[:, 0], certainty)) is not None:
            self._metrics[mode]["reward_logp_corr"].append(correlation)
        # TRL takes rounding noise for a spread, and with scale_rewards: batch looks at the batch.
        uniform = equal_groups(rewards, generations).float().mean()
        self._metrics[mode]["frac_reward_zero_std"][-1] = uniform.item()
        self._write_rollouts(inputs, rewards, solved, mode)
        spent = time.perf_counter() - start - self._seconds.get("rollout", 0.0) - self._seconds.get("reward", 0.0)
        for name, seconds in (*self._seconds.items(), ("score", spent)):
            self._metrics[mode][f"seconds/{name}"].append(seconds)
        self._seconds.clear()
        return batch

    @torch.no_grad()
    def _last_loop_log_probs(self, model: Any, batch: dict[str, Any], mode: str) -> Float[Tensor, "B C"]:
        args = self.args
        size = args.per_device_train_batch_size if mode == "train" else args.per_device_eval_batch_size
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].size(1)
        scores = self._score_as_fits(model, ids, mask, length, size, last_only=True)
        return scores.log_probs[..., -1]

    def _write_rollouts(
        self, inputs: list[dict[str, Any]], rewards: Float[Tensor, " B"], solved: Float[Tensor, " B"], mode: str
    ) -> None:
        """Hand each completion with its prompt, gold, rewards and advantage to the writer."""
        extra = gather_object([{key: example.get(key) for key in ("gold", "row")} for example in inputs])
        if self.rollout_writer is None or mode != "train" or not self.accelerator.is_main_process:
            return
        logs, count = self._logs, len(extra)
        prompts, completions, advantages = (
            list(logs[name])[-count:] for name in ("prompt", "completion", "advantages")
        )
        columns = {name: list(values)[-count:] for name, values in logs["rewards"].items()}
        self.rollout_writer(
            [
                {
                    "step": self.state.global_step + 1,
                    "prompt": prompts[i],
                    "completion": completions[i],
                    **extra[i],
                    "rewards": {name: _number(values[i]) for name, values in columns.items()},
                    "reward": _number(rewards[i].item()),
                    "solved": _number(solved[i].item()),
                    "advantage": advantages[i],
                }
                for i in range(count)
            ]
        )

    # ------------------------------------------------------------------------------------------------ scoring

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C"], None]:
        """TRL's hook for old and reference log-probs: the last loop's, with every loop's kept aside for the policy."""
        is_reference = model is self.ref_model
        size = batch_size or len(input_ids)
        scores = self._score_as_fits(model, input_ids, attention_mask, logits_to_keep, size, last_only=is_reference)
        if not is_reference:
            self._loop_log_probs = scores.log_probs
        return scores.log_probs[..., -1], scores.entropy[..., -1], None

    def _score_as_fits(self, *args: Any, **kwargs: Any) -> CompletionScores:
        """`_score` without a gradient; its last argument by position is how many sequences are scored at once."""
        *inputs, size = args
        if self.accelerator.num_processes > 1 and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            # Processes that hold weights for each other have to make the same number of forward passes.
            return self._score(*inputs, batch_size=size, **kwargs)
        return self.scoring_memory.fit(lambda fitting: self._score(*inputs, batch_size=fitting, **kwargs), size)

    def _score(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion_length: int,
        *,
        batch_size: int | None = None,
        last_only: bool = False,
    ) -> CompletionScores:
        """Log-probs of the completion tokens at every loop, `batch_size` sequences in a forward."""
        final = self.args.credit == "final"
        last = self.policy.loop_spec.loops - 1
        request = Score(
            temperature=self.temperature,
            last_only=last_only,
            grad_loops=(last,) if final and not last_only else None,
            compact=not final,  # GRPO's rows as TRL scores them, so that its gradient is TRL's to the bit
        )
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :-completion_length] = -100
        parts = []
        for rows in torch.arange(len(input_ids), device=input_ids.device).split(batch_size or len(input_ids)):
            with self.accelerator.autocast():
                output = model(
                    input_ids=input_ids[rows], attention_mask=attention_mask[rows], labels=labels[rows], score=request
                )
            parts.append(output)

        def completions(tensors: list[Tensor]) -> Tensor:
            """The completion's positions, of all parts. A single part is not copied."""
            cut = [tensor[:, -completion_length:] for tensor in tensors]
            return cut[0] if len(cut) == 1 else torch.cat(cut)

        has_gate = parts[0].exit_log_pdf is not None
        return CompletionScores(
            completions([part.scores.log_probs for part in parts]),
            completions([part.scores.entropy for part in parts]),
            completions([part.exit_log_pdf[:, :-1] for part in parts]) if has_gate else None,
            parts[0].credit,
        )

    # --------------------------------------------------------------------------------------------------- loss

    def _credit(self, scores: CompletionScores) -> Float[Tensor, "... T"]:
        """ω: [T], or [B, C, T] for exit_pdf."""
        loops, device = scores.log_probs.shape[-1], scores.log_probs.device
        match self.args.credit:
            case "final":
                return credit_schemes.final(loops, device)
            case "uniform":
                return credit_schemes.uniform(loops, device)
            case "progressive":
                return credit_schemes.progressive(loops, self.args.credit_alpha, device)
            case "exit_pdf":
                assert scores.exit_log_pdf is not None
                return credit_schemes.exit_pdf(scores.exit_log_pdf, self.args.detach_exit)
            case _:
                assert scores.credit is not None
                return scores.credit

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Float[Tensor, ""]:
        """Σ_t ω_t·term_t + β·k3 at each token, reduced. One micro-batch."""
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        scores = self._score(model, input_ids, attention_mask, inputs["completion_ids"].size(1))
        log_probs = scores.log_probs.unbind(-1)
        old = inputs.get("old_loop_log_probs", scores.log_probs.detach()).unbind(-1)
        advantages = inputs["advantages"].unsqueeze(1)
        credit = self._credit(scores)
        sampler_ratio = inputs.get("importance_sampling_ratio")

        policy_loss = self.args.policy_loss
        loops = range(len(log_probs)) if self.args.credit != "final" else (len(log_probs) - 1,)
        ratios = {t: policy_loss.ratio(log_probs[t], old[t], mask) for t in loops}
        kl = k3(inputs["ref_per_token_logps"], log_probs[-1])
        penalty = self.beta * (kl * ratios[loops[-1]] if self.args.use_bias_correction_kl else kl)

        per_token = torch.zeros_like(mask, dtype=torch.float32)
        for t in loops:
            term = policy_loss.term(log_probs[t], old[t], ratios[t], advantages, mask, sampler_ratio)
            per_token = per_token + credit[..., t] * term
        entropy_mask = None
        if self.top_entropy_quantile < 1.0:
            entropy_mask = self.get_high_entropy_mask(scores.entropy[..., -1], mask, 1 - self.top_entropy_quantile)
            per_token = per_token * entropy_mask
        if sampler_ratio is not None and self.loss_type != "vespo":
            per_token = per_token * sampler_ratio
        if self.beta != 0.0:
            per_token = per_token + penalty

        loss = self._reduce(per_token, mask, inputs["num_items_in_batch"])
        if self.entropy_coef != 0.0:
            bonus_mask = mask if entropy_mask is None else mask * entropy_mask
            entropy = (scores.entropy[..., -1] * bonus_mask).sum() / bonus_mask.sum().clamp(min=1.0)
            loss = loss - self.entropy_coef * (entropy / self._accumulation)
        self._measure(scores, credit, ratios[loops[-1]], inputs["ref_per_token_logps"], advantages, mask)
        return loss

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _accumulation(self) -> float:
        return self.current_gradient_accumulation_steps if self.model.training else 1.0

    def _reduce(
        self, per_token: Float[Tensor, "B C"], mask: Float[Tensor, "B C"], num_items: Float[Tensor, ""]
    ) -> Float[Tensor, ""]:
        """The micro-batch's share of the loss: shares add up to the loss of the whole batch, however it is cut."""
        reduction = REDUCTION[self.loss_type]
        if reduction != "token_mean":
            return reduce_tokens(per_token, mask, reduction, max_length=self.max_completion_length) / self._accumulation
        total = num_items.clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:  # num_items counts the whole rollout; this update uses a part of it
            total = total * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return reduce_tokens(per_token, mask, reduction, total_tokens=total)

    # ---------------------------------------------------------------------------------------------- telemetry

    @torch.no_grad()
    def _measure(
        self,
        scores: CompletionScores,
        credit: Float[Tensor, "... T"],
        ratio: Float[Tensor, "B C"],
        reference: Float[Tensor, "B C"],
        advantages: Float[Tensor, "B 1"],
        mask: Float[Tensor, "B C"],
    ) -> None:
        """Token means over the whole step, whatever the micro-batches: TRL's names, and `loop{t}/…` for each loop."""
        add = self._token_means[self._mode].add
        # In float64 without cancellation: of a policy that hardly moves, fp32's e^d - d - 1 is all rounding.
        distance = (reference - scores.log_probs[..., -1]).double()
        add("kl", (distance.expm1() - distance).float(), mask)
        add("entropy", scores.entropy[..., -1], mask)
        low, high = 1 - self.epsilon_low, 1 + self.epsilon_high
        is_low, is_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        add("clip_ratio/low_mean", is_low.float(), mask)
        add("clip_ratio/high_mean", is_high.float(), mask)
        add("clip_ratio/region_mean", (is_low | is_high).float(), mask)
        to_last = kl_to_last_loop(scores.log_probs)
        for t in range(scores.log_probs.shape[-1]):
            add(f"loop{t + 1}/logp", scores.log_probs[..., t], mask)
            add(f"loop{t + 1}/kl_to_last", to_last[..., t], mask)
            add(f"loop{t + 1}/entropy", scores.entropy[..., t], mask)
            add(f"loop{t + 1}/credit", credit[..., t].expand_as(mask), mask)
            if scores.exit_log_pdf is not None:
                add(f"loop{t + 1}/exit_prob", scores.exit_log_pdf[..., t].exp(), mask)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        # TRL samples and scores inside of this call; what is left is the update.
        start, elsewhere = time.perf_counter(), self._seconds_outside_update()
        try:
            loss = super().training_step(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryInStepError(
                f"step {self.state.global_step + 1}: the device's memory is full: {str(error).splitlines()[0]}\n"
                f"lower train.per_device_train_batch_size ({self.args.per_device_train_batch_size} now), which changes "
                "the result by rounding only (--accept-change train.per_device_train_batch_size goes on with this "
                "run), or set train.gradient_checkpointing"
            ) from error
        elsewhere = self._seconds_outside_update() - elsewhere
        self._metrics["train"]["seconds/update"].append(time.perf_counter() - start - elsewhere)
        return loss

    def _seconds_outside_update(self) -> float:
        return sum(sum(self._metrics["train"][f"seconds/{name}"]) for name in ("rollout", "reward", "score"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in TRL; token means are exact over the step, and seconds are sums over it."""
        metrics = self._metrics[self._mode]
        for name, value in self._token_means[self._mode].pop(self.accelerator).items():
            metrics[name] = [value]
        for name in [key for key in metrics if key.startswith("seconds/")]:
            metrics[name] = [sum(metrics[name])]
        super().log(logs, start_time)

    def note(self, name: str, value: float) -> None:
        """Log a metric of training with the step at hand."""
        self._metrics["train"][name].append(value)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


def resplit(rollout: list[dict[str, Any]] | None, parts: int) -> list[dict[str, Any]] | None:
    """A rollout of TRL's buffer in so many micro-batches, should the micro-batch be another than when it was made."""
    if rollout is None or len(rollout) == parts:
        return rollout
    whole = {
        key: torch.cat([part[key] for part in rollout]) if isinstance(value, Tensor) and value.dim() else value
        for key, value in rollout[0].items()
    }
    return split_tensor_dict(whole, parts)


def drop_generation_defaults(model: LoopedForCausalLM) -> None:
    """Keep only the special tokens of a checkpoint's generation defaults.

    transformers fills what TRL leaves open (min_p, no_repeat_ngram_size, …) from them, and completions would come from
    another distribution than the one that is scored.
    """
    defaults = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=defaults.eos_token_id, pad_token_id=defaults.pad_token_id, bos_token_id=defaults.bos_token_id
    )


def prepare_gradients(model: LoopedForCausalLM, args: RLTTConfig) -> None:
    """Freeze parameters that this objective gives no gradient: DDP and ZeRO would wait for one."""
    backbone, spec = model.model, model.loop_spec
    gate_trains = args.credit == "exit_pdf" and not args.detach_exit and spec.loops > 1
    if backbone.early_exit_gate is not None and not gate_trains:
        backbone.early_exit_gate.requires_grad_(False)
    if backbone.input_mixing is not None and spec.loops == 1:
        backbone.input_mixing.requires_grad_(False)
    if isinstance(backbone, PLTModel) and spec.loops == 1:
        for gate in backbone.gates:
            gate.requires_grad_(False)


def check_trainable(model: Any, args: Any, train_dataset: Any, peft_config: Any = None) -> None:
    """What `RLTTTrainer` refuses, asked before anything is made.

    Raises:
        PolicyError, UserError: see `RLTTTrainer`.
    """
    if not isinstance(args, RLTTConfig):
        raise UserError(f"args must be an RLTTConfig, found {type(args).__name__}")
    policy = without_wrapper(model)
    if not isinstance(policy, LoopedForCausalLM):
        raise PolicyError(f"the policy must be a looped model, found {type(model).__name__}; see `rltt convert`")
    spec = policy.loop_spec
    if spec.readout.adaptive:
        raise PolicyError(
            f"early_exit_threshold is {spec.readout.threshold}: rollouts would leave at adaptive loops while training "
            "reads the last one; set it to 1.0"
        )
    if args.credit == "exit_pdf" and not spec.exit_gate:
        raise PolicyError("credit 'exit_pdf' needs an exit gate, which this model does not have; use another credit")
    if policy is not model or peft_config is not None:
        check_lora(policy, args, peft_config)
    elif has_adapters(policy):
        raise PolicyError("the policy has one adapter a loop inside; train from the model under them")
    if hasattr(train_dataset, "__len__"):
        prompts = args.generation_batch_size // args.num_generations
        if len(train_dataset) < prompts:
            raise UserError(
                f"one rollout takes {prompts} prompts, but the training data has {len(train_dataset)}: no step would "
                "be made; lower the batch or bring more data"
            )


def check_lora(policy: LoopedForCausalLM, args: RLTTConfig, peft_config: Any) -> None:
    """What does not go with adapters.

    Raises:
        UserError: with the reason.
    """
    if peft_config is not None:
        check_peft_config(peft_config)
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3 and args.gradient_checkpointing:
        raise UserError(
            "LoRA with ZeRO-3 and gradient checkpointing needs reentrant checkpointing, which gives shared layers "
            "wrong gradients; turn one of the three off, or use ZeRO-2"
        )
    if args.credit == "learned":
        raise UserError("credit 'learned' with LoRA: its weights are not part of LoRA checkpoints")
    if not args.detach_exit:
        raise UserError("detach_exit=False has no effect with LoRA: the exit gate is frozen")
    if policy.model.loop_adapters and args.use_vllm:
        raise UserError(
            "one adapter a loop cannot be merged into weights that all loops share, which is what vLLM gets"
        )


def _number(value: float) -> float | None:
    """NaN as None: JSON has no NaN."""
    return None if value != value else value

"""A recipe becomes a run: `rltt train`, `rltt pretrain`, and what `--dry-run` says of them.

Read top to bottom: data and rewards are checked, the policy is loaded (and warmed up), evaluated, trained, evaluated.
"""

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from datasets import Dataset
from rich.console import Console
from transformers import Trainer, TrainerState, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from ..data import arithmetic_tokenizer, load_split
from ..data.problems import Problem
from ..errors import CheckpointError, PolicyError, RecipeError, UnwrittenError
from ..evaluate import EvalResult, evaluate_policy
from ..models.adapters import add_lora, require_peft, without_wrapper
from ..models.load import load_config, load_policy, stop_token_ids
from ..objective.credit import learned
from ..probe.filter import filtered, freeze, require_results
from ..processes import is_main, of_main, share, wait_for_everyone, world_size
from ..recipe import Recipe
from ..rewards import load_rewards
from ..rewards.golds import gold_checks, without_bad_golds
from ..rewards.preflight import preflight
from ..rewards.registry import NamedReward, check_columns, use_tokenizer
from ..rollout.vllm import require_vllm
from ..telemetry import HeldOut, LiveVerdict, flat
from ..telemetry.trackers import open_tracker, require_tracker
from .callbacks import MetricsCallback, PretrainMetricsCallback, held_out_metrics, show
from .config import RLTTConfig
from .console import ProgressCallback
from .faults import NonFiniteError
from .loop_telemetry import LoopTelemetry, held_out_texts
from .plan import plan
from .policy import (
    Policy,
    bf16,
    check_lengths,
    describe_policy,
    load,
    make_dataset,
    new_config,
    unwrapped,
    uses_chat,
)
from .preemption import Preempted, Preemption, StopAtStep, preemption
from .pretrain import LoopLMTrainer, StopWhen, pad_collator, tokenize_responses
from .resume import rewind, unfinished
from .run_directory import RunDirectory, checkpoints_of
from .sharding import (
    begin_trainer,
    can_save_alone,
    deepspeed_config,
    join_processes,
    sampling,
    whole_state_dict,
    whole_weights,
)
from .trainer import RLTTTrainer, RolloutWriter, check_trainable

# What ends a run of which the last checkpoint holds what was learned, or all that there is room for.
SAVED = (Preempted, CheckpointError, NonFiniteError, UnwrittenError)
# Training prompts on which a warm start measures its solve rate.
WARM_START_PROMPTS = 64


def train(recipe: Recipe, resume: bool = False, accept: Sequence[str] = ()) -> Path:
    """Run a train recipe, or go on with a run of it that was cut off, and return its run directory.

    Args:
        resume, accept: see `unfinished`.

    Raises:
        Preempted: on a SIGTERM, with the run saved.
        UserError: anything in the recipe, the data, the rewards or the checkpoint that cannot work, before training.
    """
    recipe.require("train")
    require_tracker(recipe.telemetry.tracker)
    console = make_console()
    say = warning_on(console)
    previous = unfinished(recipe, resume, accept, say)
    policy, rewards, dataset, eval_dataset, config, unfiltered = prepare(recipe, console)
    responses = None if recipe.pretrain is None else learnable(policy, unfiltered)
    describe_policy(policy, console)

    run = RunDirectory(recipe, of_main(previous))
    freeze(recipe, dataset)
    report_failures(rewards, run, console)
    with recorded(run), preemption() as asked, ExitStack() as open_until_end:
        if of_main((run.path / "start").is_dir()):
            policy = started(recipe, policy, run)
        elif responses is not None:
            policy = warm_start(recipe, policy, unfiltered, responses, rewards[0], run, console, asked)
        elif recipe.policy.new is not None or recipe.policy.convert is not None:
            run.save_policy(policy.model, policy.tokenizer, "start")
            wait_for_everyone()
            policy = started(recipe, policy, run)
        trainer: RLTTTrainer | None = None

        def evaluate(seed: int) -> EvalResult:
            assert eval_dataset is not None
            return measure(recipe, policy, eval_dataset, rewards[0], seed, trainer)

        if eval_dataset is not None and recipe.evaluate.before and "eval_before" not in run.summary:
            before = evaluate(recipe.train.seed)
            run.update_summary(eval_before=before.to_dict())
            console.print(f"held-out before: {before}", highlight=False)

        checkpoint = rewind(run, checkpoints_of(run.path), ("metrics.jsonl", "reward_failures.jsonl"), say)
        tracker = open_until_end.enter_context(open_tracker(recipe, run.path, run.rows(), say, is_main()))
        if run.summary.get("eval_before") and run.resumed is None:
            tracker.log(0, held_out_metrics(run.summary["eval_before"]))

        def write_rollouts(rows: list[dict[str, Any]]) -> None:
            run.write_rollouts(rows)
            tracker.log_rollouts(rows[0]["step"], rows)

        adapted = with_lora(recipe, policy)
        trainer = make_trainer(config, adapted, dataset, rewards, write_rollouts)
        diagnose_every = recipe.telemetry.diagnose_every
        if eval_dataset is not None and diagnose_every is not None:
            texts = held_out_texts(eval_dataset, policy.tokenizer, policy.model.config.max_position_embeddings)
            trainer.add_callback(LoopTelemetry(trainer, texts, diagnose_every, trainer.note))
        evaluate_during = evaluate if eval_dataset is not None and recipe.evaluate.every else None
        verdict = live_verdict(recipe, run, console)
        verdict.alert = tracker.alert
        metrics = MetricsCallback(recipe, run, console, evaluate_during, verdict, trainer.note_evaluation, tracker.log)
        show(trainer, metrics, ProgressCallback(console, "RL"), StopAtStep(trainer, asked))
        try:
            with unscored_told_once(), asked.waiting():
                trainer.train(resume_from_checkpoint=checkpoint)
        except SAVED:
            raise
        except BaseException:  # Ctrl-C or an error: what has been learned so far is kept
            if can_save_alone(trainer):
                save_trained(trainer, policy, run)
            raise
        save_trained(trainer, policy, run)

        if eval_dataset is not None and recipe.evaluate.after:
            after = evaluate(recipe.train.seed + 1)
            run.update_summary(eval_after=after.to_dict())
            tracker.log(trainer.state.global_step, held_out_metrics(after.to_dict()))
            console.print(f"held-out after:  {after}", highlight=False)
    return run.path


class Ready(NamedTuple):
    """All that training needs, loaded and checked against each other."""

    policy: Policy
    rewards: list[NamedReward]
    dataset: Dataset
    eval_dataset: Dataset | None
    config: RLTTConfig
    unfiltered: Dataset
    """Training rows before `data.filter`: those of a warm start, so that the policy is the one that was probed."""


def prepare(recipe: Recipe, console: Console) -> Ready:
    """Load what a train recipe names, and refuse what cannot work, before anything is trained or written.

    Raises:
        UserError: as in `train`.
    """
    join_processes(recipe.train)
    if recipe.rollout.engine == "vllm":
        require_vllm()
    if recipe.policy.lora is not None:
        require_peft()
    rewards = load_rewards(recipe.rewards)
    require_results(recipe)
    problems, held_out = load_split(recipe.data)
    transformers_logging.disable_progress_bar()  # loading and saving would draw over the run's own bar
    chat = False if recipe.policy.new else recipe.data.chat_template
    preflight(rewards, problems, TrainerState(), chat)
    problems, held_out = gradable(recipe, problems, held_out, console)
    set_seed(recipe.train.seed)
    policy = load(recipe)
    use_tokenizer(rewards, policy.tokenizer)
    dataset = make_dataset(problems, recipe, policy, console, "training")
    eval_dataset = make_dataset(held_out, recipe, policy, console, "evaluation") if held_out else None
    check_columns(rewards, dataset.column_names)
    longest = check_lengths(recipe, policy, [dataset, *([eval_dataset] if eval_dataset else [])])
    config = trainer_config(recipe, rewards, longest, policy.model.num_parameters())
    chosen = filtered(recipe, dataset, warning_on(console))
    check_trainable(policy.model, config, chosen)
    return Ready(policy, rewards, chosen, eval_dataset, config, dataset)


def pretrain(recipe: Recipe, resume: bool = False, accept: Sequence[str] = ()) -> Path:
    """Run a pretrain recipe, or go on with one, and return its run directory; the model is in its `policy/`.

    Args:
        resume, accept: see `unfinished`.

    Raises:
        Preempted: on a SIGTERM, with the run saved.
        UserError: as in `train`.
    """
    recipe.require("pretrain")
    join_processes(recipe.train)
    console = make_console()
    say = warning_on(console)
    previous = unfinished(recipe, resume, accept, say)
    problems, _ = load_split(recipe.data)
    transformers_logging.disable_progress_bar()  # loading and saving would draw over the run's own bar
    set_seed(recipe.train.seed)
    policy = load(recipe)
    responses = learnable(policy, make_dataset(problems, recipe, policy, console, "training"))
    describe_policy(policy, console)
    run = RunDirectory(recipe, previous)
    with recorded(run), preemption() as asked:
        trainer = looplm_trainer(recipe, policy, responses, run, console, asked)
        run.resumed = of_main(previous)  # the trainer has connected the processes
        checkpoint = rewind(run, Path(trainer.args.output_dir), ("pretrain.jsonl",), say)
        try:
            with asked.waiting():
                trainer.train(resume_from_checkpoint=checkpoint)
        except SAVED:
            raise
        except BaseException:  # Ctrl-C or an error: what has been learned so far is kept
            if can_save_alone(trainer):
                save_pretrained(trainer, policy, run, "policy", "steps")
            raise
        save_pretrained(trainer, policy, run, "policy", "steps")
    return run.path


def gradable(
    recipe: Recipe, problems: list[Problem], held_out: list[Problem], console: Console
) -> tuple[list[Problem], list[Problem]]:
    """Training and evaluation rows after `data.bad_gold`; both, for a bad gold makes a measure wrong too."""
    checks = gold_checks(recipe.rewards)
    on_bad = recipe.data.bad_gold
    if not checks and on_bad != "stop":
        raise RecipeError(
            f"data.bad_gold: {on_bad} has no effect: none of the rewards checks golds, as math does (check_golds); "
            "remove the key"
        )
    say = warning_on(console)
    return (
        without_bad_golds(problems, checks, on_bad, say, "training"),
        without_bad_golds(held_out, checks, on_bad, say, "evaluation"),
    )


def describe(recipe: Recipe, processes: int = 1) -> str:
    """What a recipe amounts to, without loading weights: for `--dry-run`."""
    load_rewards(recipe.rewards)
    notes, rows, config = [], None, None
    source = recipe.data.train
    if source.is_file or source.is_arithmetic:
        rows = len(load_split(recipe.data)[0])
    try:
        config = (
            new_config(recipe, arithmetic_tokenizer())
            if recipe.policy.new
            else load_config(str(recipe.policy.path), recipe.policy.trust_remote_code, recipe.policy.revision)
        )
    except PolicyError as error:
        notes.append(f"note: {error}")
    precision: Literal["bf16", "fp32"] = "bf16" if bf16(recipe) else "fp32"
    amounts = plan(recipe, None if config is None else config.to_dict(), rows, precision=precision, processes=processes)
    return "\n".join([amounts.render(), *notes])


# ------------------------------------------------------------------------------------------------------ warm start


def warm_start(
    recipe: Recipe,
    policy: Policy,
    dataset: Dataset,
    responses: Dataset,
    reward: NamedReward,
    run: RunDirectory,
    console: Console,
    asked: Preemption,
) -> Policy:
    """LoopLM pretraining before RL. The result is saved as `start/`, and loaded from there for a clean beginning."""
    assert recipe.pretrain is not None
    trainer = looplm_trainer(recipe, policy, responses, run, console, asked)
    target = recipe.pretrain.stop_at_solve_rate
    if target is not None:
        stride = max(1, len(dataset) // WARM_START_PROMPTS)
        sample = dataset.select(range(0, len(dataset), stride)[:WARM_START_PROMPTS])

        def reached(step: int) -> bool:
            model = Policy(unwrapped(trainer), policy.tokenizer)
            result = measure(recipe, model, sample, reward, seed=step, trainer=trainer)
            console.print(
                f"warm start step {step}: solve rate on training prompts {result}", highlight=False, soft_wrap=True
            )
            return result.solve_rate >= target

        trainer.add_callback(StopWhen(reached, recipe.pretrain.check_every))
    checkpoint = rewind(run, Path(trainer.args.output_dir), ("pretrain.jsonl",), warning_on(console))
    try:
        with asked.waiting():
            trainer.train(resume_from_checkpoint=checkpoint)
    except SAVED:
        raise
    except BaseException:  # Ctrl-C or an error: what has been learned so far is kept
        if can_save_alone(trainer):
            save_pretrained(trainer, policy, run, "policy", "pretrain_steps")
        raise
    save_pretrained(trainer, policy, run, "start", "pretrain_steps")
    if is_main():
        shutil.rmtree(trainer.args.output_dir, ignore_errors=True)  # the checkpoints, of which start/ is the outcome
    wait_for_everyone()
    return started(recipe, policy, run)


def started(recipe: Recipe, policy: Policy, run: RunDirectory) -> Policy:
    """The policy in `start/`.

    Also for the run that made it: a file puts weights at other places in memory, where the same products are rounded
    otherwise, and a run that goes on from the file would not be the whole one to the bit.
    """
    with whole_weights():
        model = load_policy(str(run.path / "start"), attn_implementation=recipe.policy.attn_implementation)
    return Policy(model, policy.tokenizer)


def save_pretrained(trainer: LoopLMTrainer, policy: Policy, run: RunDirectory, name: str, steps: str) -> None:
    """The policy of the LoopLM objective as it is now, and how many updates made it."""
    model = unwrapped(trainer)
    run.update_summary(**{steps: trainer.state.global_step})
    run.save_policy(model, policy.tokenizer, name, whole_state_dict(trainer, model))


def learnable(policy: Policy, dataset: Dataset) -> Dataset:
    """The rows of the LoopLM objective, or an error that says why the data have none."""
    return tokenize_responses(dataset, policy.tokenizer, policy.model.config.max_position_embeddings)


def looplm_trainer(
    recipe: Recipe, policy: Policy, responses: Dataset, run: RunDirectory, console: Console, asked: Preemption
) -> LoopLMTrainer:
    """The trainer of the LoopLM objective, with its console and its metrics file."""
    section = recipe.pretrain
    assert section is not None
    if not policy.model.loop_spec.exit_gate:
        without_gate = "no exit gate: pretraining is of the last loop, with pretrain.epsilon spread over all loops"
        console.print(f"{without_gate}; pretrain.beta has no effect", highlight=False, soft_wrap=True)
    micro_batch, accumulation = share(
        section.batch_size,
        section.per_device_train_batch_size or section.batch_size,
        "pretrain.batch_size",
        world_size(),
    )
    args = TrainingArguments(
        output_dir=str(checkpoints_of(run.path) / "pretrain"),
        max_steps=section.max_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=section.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        adam_beta2=section.adam_beta2,
        max_grad_norm=section.max_grad_norm,
        gradient_checkpointing=recipe.train.gradient_checkpointing,
        bf16=bf16(recipe),
        seed=recipe.train.seed,
        logging_steps=1,
        save_strategy="no" if recipe.train.save_steps is None else "steps",
        save_steps=recipe.train.save_steps or 500,
        save_total_limit=recipe.train.save_total_limit,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=policy.model.loop_spec.loops == 1,  # whose gate has nothing to decide
        deepspeed=deepspeed_config(recipe.train, policy.model.num_parameters()),
    )
    begin_trainer(args)
    trainer = LoopLMTrainer(
        policy.model,
        beta=section.beta,
        epsilon=section.epsilon,
        args=args,
        train_dataset=responses,
        data_collator=pad_collator(policy.tokenizer.pad_token_id),
    )
    show(
        trainer, PretrainMetricsCallback(run, console), ProgressCallback(console, "LoopLM"), StopAtStep(trainer, asked)
    )
    return trainer


# -------------------------------------------------------------------------------------------------------------- RL


def make_trainer(
    config: RLTTConfig,
    policy: Policy,
    dataset: Dataset,
    rewards: list[NamedReward],
    rollout_writer: RolloutWriter | None = None,
) -> RLTTTrainer:
    """The trainer of a run."""
    return RLTTTrainer(
        policy.model,
        [reward.func for reward in rewards],
        config,
        dataset,
        processing_class=policy.tokenizer,
        rollout_writer=rollout_writer,
    )


def with_lora(recipe: Recipe, policy: Policy) -> Policy:
    """The policy as RL trains it: with adapters where the recipe asks for them."""
    lora = recipe.policy.lora
    if lora is None:
        return policy
    start = recipe.run_directory / "start"  # what is not simply the recipe's checkpoint
    moved = recipe.pretrain is not None or recipe.policy.path is None or recipe.policy.convert is not None
    base = str(start.resolve()) if moved else str(recipe.policy.path)
    if Path(base).exists():
        base = str(Path(base).resolve())
    adapted = add_lora(policy.model, lora.r, lora.alpha, lora.target_modules, lora.per_loop, base)
    return Policy(adapted, policy.tokenizer)


def report_failures(rewards: list[NamedReward], run: RunDirectory, console: Console) -> None:
    """Failures of reward functions go to the run directory, and the first of each kind to the console."""
    for guard in (reward.guard for reward in rewards if reward.guard is not None):
        guard.report = run.log_reward_failure
        guard.say = warning_on(console)


def live_verdict(recipe: Recipe, run: RunDirectory, console: Console) -> LiveVerdict:
    """Judges the run at every step, and says so when the verdict changes."""
    verdict = LiveVerdict(
        run.path / "metrics.jsonl",
        flat(recipe.model_dump()),
        recipe.train.max_steps,
        warning_on(console),
        run.write_verdict,
        recipe.telemetry.on_stalled,
    )
    if (before := run.summary.get("eval_before")) is not None:
        verdict.before = HeldOut(0, before["solve_rate"], before["stderr"])
    verdict.replay()
    return verdict


def warning_on(console: Console) -> Callable[[str], None]:
    """Prints a message that must not be overlooked, as it is."""
    return partial(console.print, style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def unscored_told_once() -> Iterator[None]:
    """Without TRL's warning at each step of completions without a reward: the guards have said and counted them."""
    logger = logging.getLogger("trl.trainer.grpo_trainer")

    def passes(record: logging.LogRecord) -> bool:
        return "All reward functions returned None" not in record.getMessage()

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def trainer_config(recipe: Recipe, rewards: list[NamedReward], longest: int, parameters: int) -> RLTTConfig:
    """The recipe in TRL's terms.

    Args:
        longest: how many tokens a prompt and its completion can have.
        parameters: of the policy.
    """
    objective, rollout, section = recipe.objective, recipe.rollout, recipe.train
    micro_batch, accumulation = share(
        section.prompts_per_step * rollout.num_generations,
        section.per_device_train_batch_size or rollout.num_generations,
        "train.prompts_per_step * rollout.num_generations",
        world_size(),
    )
    return RLTTConfig(
        output_dir=str(checkpoints_of(recipe.run_directory)),
        credit=objective.credit,
        credit_alpha=objective.credit_alpha,
        credit_learning_rate=objective.credit_learning_rate,
        detach_exit=objective.detach_exit,
        loss_type=objective.loss_type,
        beta=objective.beta,
        scale_rewards=objective.scale_rewards,
        epsilon=objective.epsilon,
        epsilon_high=objective.epsilon_high,
        delta=objective.delta,
        importance_sampling_level=objective.importance_sampling_level,
        mask_truncated_completions=objective.mask_truncated_completions,
        num_generations=rollout.num_generations,
        temperature=rollout.temperature,
        max_completion_length=rollout.max_completion_length,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * section.updates_per_rollout,
        num_iterations=section.num_iterations,
        resample_uniform=rollout.resample_uniform,
        resample_budget=rollout.resample_budget,
        use_vllm=rollout.engine == "vllm",
        vllm_mode="colocate" if rollout.vllm_server is None else "server",
        vllm_server_base_url=rollout.vllm_server,
        vllm_max_model_length=longest,
        vllm_gpu_memory_utilization=rollout.vllm_gpu_memory_utilization,
        vllm_tensor_parallel_size=rollout.vllm_tensor_parallel_size,
        vllm_timeout=rollout.vllm_timeout,
        parity_tolerance=rollout.parity_tolerance,
        parity_check_rollouts=rollout.parity_check_rollouts,
        max_steps=section.max_steps,
        learning_rate=section.learning_rate,
        lr_scheduler_type=section.lr_scheduler_type,
        warmup_steps=section.warmup_steps,
        weight_decay=section.weight_decay,
        adam_beta1=section.adam_beta1,
        adam_beta2=section.adam_beta2,
        max_grad_norm=section.max_grad_norm,
        max_nonfinite_steps=section.max_nonfinite_steps,
        gradient_checkpointing=section.gradient_checkpointing,
        bf16=bf16(recipe),
        seed=section.seed,
        save_strategy="no" if section.save_steps is None else "steps",
        save_steps=section.save_steps or 500,
        save_total_limit=section.save_total_limit,
        reward_weights=[reward.weight for reward in rewards],
        solved_at=rewards[0].solved_at,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,  # what has no gradient is frozen
        deepspeed=deepspeed_config(section, parameters),
    )


def save_trained(trainer: RLTTTrainer, policy: Policy, run: RunDirectory) -> None:
    """The policy as it is now, and how many updates made it."""
    model = unwrapped(trainer)
    weights = whole_state_dict(trainer, model)
    credit = None
    if without_wrapper(model) is not model:  # adapters; see check_lora
        pass
    elif model.credit is not None:
        logits = weights.pop("credit.logits") if weights else model.credit.logits
        credit = learned(logits).tolist() if is_main() else None
        model.credit = None  # weights of the objective, not of the policy: no engine would know the key
    run.update_summary(steps=trainer.state.global_step, **({} if credit is None else {"credit": credit}))
    run.save_policy(model, policy.tokenizer, weights=weights)


def measure(
    recipe: Recipe, policy: Policy, dataset: Dataset, reward: NamedReward, seed: int, trainer: Trainer | None = None
) -> EvalResult:
    """Solve rate of the policy as it is now, sampled as the recipe's `evaluate` section says.

    Args:
        trainer: that of the policy, once there is one: it may have split the weights.
    """
    section = recipe.evaluate
    with sampling(trainer):
        return evaluate_policy(
            policy.model,
            policy.tokenizer,
            dataset,
            reward,
            num_generations=section.num_generations,
            temperature=recipe.rollout.temperature if section.temperature is None else section.temperature,
            max_completion_length=recipe.rollout.max_completion_length,
            batch_size=section.batch_size,
            stop_token_ids=stop_token_ids(policy.model, policy.tokenizer, uses_chat(recipe, policy.tokenizer)),
            seed=seed,
        )


def make_console() -> Console:
    """The console of a run, on which only the main process speaks."""
    return Console(quiet=not is_main())


@contextmanager
def recorded(run: RunDirectory) -> Iterator[None]:
    """Write how the run ended, whatever ends it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            # DeepSpeed calls collectives by names that torch has replaced: a line for each kind and process.
            warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
            yield
    except Preempted:
        run.close("preempted")
        if is_main():
            told = f"SIGTERM: saved; the same command goes on with {run.path}"
            Console(stderr=True).print(told, highlight=False, soft_wrap=True)
        raise
    except KeyboardInterrupt:
        run.close("interrupted")
        if is_main():
            told = f"interrupted; what was learned is in {run.path}"
            Console(stderr=True).print(told, highlight=False, soft_wrap=True)
        raise
    except BaseException as error:
        with suppress(UnwrittenError):  # a full disk: told is what ended the run
            run.close("failed", error=f"{type(error).__name__}: {error}")
        raise
    run.close("finished")

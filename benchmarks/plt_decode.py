"""Latency of a token at batch 1: all loops in one pass over the layers, one after another, and one loop alone.

    python benchmarks/plt_decode.py [--layers 12] [--hidden 768] [--prompt 128] [--tokens 24] [--rounds 7]

One random Parallel Loop Transformer, large enough that reading its weights takes most of a token's time. After a
prompt, every case decodes a few tokens in turn, round after round; medians over the rounds are compared.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median

import torch

from rltt.models.configuration import IQuestPLTCoderConfig
from rltt.models.plt import IQuestPLTCoderForCausalLM

LOOPS = (2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first that is timed")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that a case decodes in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(options.layers, options.hidden, options.vocabulary, getattr(torch, options.dtype))

    cases = [(1, True), *((loops, parallel) for loops in LOOPS for parallel in (True, False))]
    decoders = {case: decode(model, *case, options.prompt, options.tokens) for case in cases}
    for decoder in decoders.values():
        next(decoder)  # the prompt, and tokens that are not timed
    seconds = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case, decoder in decoders.items():
            seconds[case].append(next(decoder))

    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{parameters:.0f}M parameters, {options.dtype}, {options.threads} threads, {options.rounds} rounds")
    print(f"{'':24}{'ms a token':>12}{'range':>16}{'of R = 1':>10}{'of sequential':>15}")
    base = median(seconds[cases[0]])
    for loops, parallel in cases:
        times = seconds[loops, parallel]
        middle, spread = median(times), f"{1e3 * min(times):.1f} to {1e3 * max(times):.1f}"
        name = "R = 1" if loops == 1 else f"R = {loops}, {'parallel' if parallel else 'sequential'}"
        line = f"{name:24}{1e3 * middle:12.1f}{spread:>16}{middle / base:10.2f}"
        if loops > 1 and parallel:
            line += f"{middle / median(seconds[loops, False]):15.2f}"
        print(line)


def make_model(layers: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> IQuestPLTCoderForCausalLM:
    """A random model of LoopCoder-V2's proportions, with its window."""
    config = IQuestPLTCoderConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return IQuestPLTCoderForCausalLM(config).eval().to(dtype)


@torch.inference_mode()
def decode(model: IQuestPLTCoderForCausalLM, loops: int, parallel: bool, prompt: int, tokens: int) -> Iterator[float]:
    """Decode after a prompt; yields the seconds that each token of a round took in the mean."""
    cache = model.model.new_cache(loops)
    ids = torch.randint(model.config.vocab_size, (1, prompt))
    while True:
        model.config.parallel_decode = parallel  # the cases take turns with one model
        start = time.perf_counter()
        for _ in range(tokens):
            logits = model(ids, past_key_values=cache, loops=loops, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
        yield (time.perf_counter() - start) / tokens


if __name__ == "__main__":
    main()

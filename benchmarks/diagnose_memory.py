"""Peak memory and time of a diagnosis: 2,000 tokens, 8 layers, 4 loops within 2 GiB and a minute on 2 cores.

    python benchmarks/diagnose_memory.py [--tokens 2000] [--loops 4] [--family plt]

Everything counts: the process with its imports, the model (512 wide, 8 heads, 32,000 tokens) and the measures of one
text. Peak memory is the kernel's high-water mark of resident memory. Exits with 1 when the claim does not
hold. Linux only.
"""

import argparse
import sys
import time

CLAIM_GIB, CLAIM_SECONDS = 2.0, 60.0
SIZE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--family", choices=["plt", "looplm"], default="plt")
    options = parser.parse_args()

    import torch

    from rltt.diagnostics.diagnose import diagnose
    from rltt.models.configuration import IQuestPLTCoderConfig, OuroConfig
    from rltt.models.looplm import OuroForCausalLM
    from rltt.models.plt import IQuestPLTCoderForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(0)
    common = SIZE | {"max_position_embeddings": options.tokens}
    if options.family == "plt":
        model = IQuestPLTCoderForCausalLM(IQuestPLTCoderConfig(**common, plt_num_loops=options.loops)).eval()
    else:
        model = OuroForCausalLM(OuroConfig(**common, total_ut_steps=options.loops)).eval()
    ids = torch.randint(SIZE["vocab_size"], (options.tokens,))
    before = resident("VmRSS")
    start = time.perf_counter()
    diagnose(model, [ids], options.loops)
    seconds, peak = time.perf_counter() - start, resident("VmHWM")
    print(f"{options.family}, {options.tokens} tokens, 8 layers, R = {options.loops}, 2 threads, fp32")
    print(f"peak {peak:.2f} GiB, of which {before:.2f} GiB before the first text; {seconds:.1f} s")
    holds = peak <= CLAIM_GIB and seconds <= CLAIM_SECONDS
    print(f"at most {CLAIM_GIB:g} GiB and {CLAIM_SECONDS:g} s are claimed: {'holds' if holds else 'FAILS'}")
    sys.exit(0 if holds else 1)


def resident(name: str) -> float:
    """GiB of this process's memory that are resident now (VmRSS) or were at most (VmHWM)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(name))
    return int(line.split()[1]) / 2**20


if __name__ == "__main__":
    main()

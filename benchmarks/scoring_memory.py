"""Peak memory of scoring every loop, forward and backward: T = 4 takes at most 1.1 times what T = 1 does.

    python benchmarks/scoring_memory.py [--positions 2048] [--hidden 576] [--vocabulary 49152] [--rounds 3]

Each case runs in a process of its own, the cases in turn, and medians are compared. Peak memory is the kernel's
high-water mark of resident memory over the call, above what was resident before it, with the hidden states of all loops
in memory already. The gradients of those states are as large as they are, whoever computes them, and are taken off too.
Exits with 1 when the claim does not hold. CPU and Linux only.
"""

import argparse
import os
import subprocess
import sys
import time
from statistics import median

MIB = 2**20
LOOPS = 4
CLAIM = 1.1
CASES = {"rltt, T = 1": ("rltt", 1), f"rltt, T = {LOOPS}": ("rltt", LOOPS), f"naive, T = {LOOPS}": ("naive", LOOPS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--positions", type=int, default=2048, help="completion positions scored")
    parser.add_argument("--hidden", type=int, default=576, help="width of a hidden state")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rounds", type=int, default=3, help="times that each case runs")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = (options.positions, options.hidden, options.vocabulary)
    if options.case:
        method, loops = options.case
        print(*measure(method, int(loops), *size))
        return

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, case in CASES.items():
            found[name].append(in_a_fresh_process(case, size))
    peaks = {name: median(peak for peak, _ in runs) for name, runs in found.items()}
    seconds = {name: median(spent for _, spent in runs) for name, runs in found.items()}

    base, scored, _ = CASES
    print(f"{options.positions} positions, H = {options.hidden}, V = {options.vocabulary}, fp32")
    print(f"{'':14}{'peak MiB':>10}{'of T = 1':>10}{'seconds':>10}{'of T = 1':>10}")
    for name in CASES:
        peak, spent = peaks[name], seconds[name]
        print(f"{name:14}{peak:10.0f}{peak / peaks[base]:10.2f}{spent:10.1f}{spent / seconds[base]:10.2f}")
    ratio = peaks[scored] / peaks[base]
    holds = ratio <= CLAIM
    print(f"memory at T = {LOOPS} is {ratio:.2f} of T = 1; at most {CLAIM} is claimed: {'holds' if holds else 'FAILS'}")
    sys.exit(0 if holds else 1)


def in_a_fresh_process(case: tuple[str, int], size: tuple[int, int, int]) -> tuple[float, float]:
    """Peak in MiB and seconds of one case."""
    sizes = [f"--{name}={value}" for name, value in zip(("positions", "hidden", "vocabulary"), size, strict=True)]
    # Freed memory goes back to the system at once, so that what is resident is what is in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *sizes, "--case", case[0], str(case[1])]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    peak, spent = output.split()[-2:]
    return float(peak), float(spent)


def measure(method: str, loops: int, positions: int, hidden: int, vocabulary: int) -> tuple[float, float]:
    """Score once and go backward, in this process: MiB beyond the states and their gradients, and seconds."""
    import torch

    from rltt.objective.logprobs import loop_log_probs

    def score(states: list[torch.Tensor], head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if method == "rltt":
            return loop_log_probs(states, head, labels).log_probs
        return torch.cat([(h[:, :-1] @ head.T).log_softmax(-1).gather(-1, labels[:, 1:, None]) for h in states], -1)

    def inputs(positions: int, vocabulary: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        states = [torch.randn(1, positions + 1, hidden, requires_grad=True) for _ in range(loops)]
        head = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
        return states, head, torch.randint(vocabulary, (1, positions + 1))

    score(*inputs(8, 64)).sum().backward()  # imports, thread pools and kernels are set up by a first call
    states, head, labels = inputs(positions, vocabulary)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")  # resets VmHWM
    start = time.perf_counter()
    score(states, head, labels).sum().backward()
    spent = time.perf_counter() - start
    gradients = sum(state.numel() * state.element_size() for state in states)
    return (resident("VmHWM") - before - gradients) / MIB, spent


def resident(name: str) -> int:
    """Bytes of this process's memory that are resident now (VmRSS) or were at most (VmHWM)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()

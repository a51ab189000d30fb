"""Two processes, however they share the model, make the updates that one process makes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def layouts() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "layouts.py"
    spec = importlib.util.spec_from_file_location("layouts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_layout_gives_the_same_numbers_and_weights(layouts: ModuleType, tmp_path: Path) -> None:
    # With credit: final the exit gate has no gradient, which DDP must not wait for.
    cases = ["final grpo", "exit_pdf dapo", "learned reinforce"]
    rows = layouts.compare(cases, ["one, micro-batch 4", "ddp, micro-batch 2", "zero2", "zero3"], tmp_path)
    assert len(rows) == 12
    for row in rows:
        off = {key: row[key] for key in layouts.MEASURES}
        assert max(off.values()) < 1e-5, row
        assert row["weights"] < 2e-5, row  # of how far they moved

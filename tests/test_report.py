"""`rltt report`, `rltt watch` and `rltt dashboard`: what they show of real runs, and what they refuse."""

import json
import re
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rltt.cli.main import app
from rltt.errors import UserError
from rltt.report.charts import exit_table, smoothed
from rltt.report.page import duration, gain
from rltt.telemetry import HeldOut
from rltt.telemetry.dashboard import Imported, page_address, place, to_import
from rltt.telemetry.run_files import RunFiles, find_runs
from rltt.telemetry.trackers.trackio import project_of, runs_of
from rltt.telemetry.watch import screen, sparkline, watch


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> list[Path]:
    """The tiny run, and one as it would look while it runs: no evaluation after it, another verdict, odd rollouts."""
    folder = tmp_path_factory.mktemp("two_runs")
    first, second = folder / "tiny", folder / "second"
    for path in (first, second):
        shutil.copytree(tiny_run, path, ignore=shutil.ignore_patterns("policy", "start", "checkpoints"))
    summary = json.loads((second / "summary.json").read_text())
    del summary["eval_after"]
    (second / "summary.json").write_text(json.dumps(summary | {"status": "running"}))
    verdict = json.loads((second / "verdict.json").read_text()) | {
        "verdict": "stalled",
        "cause": "too_easy",
        "confidence": 0.97,
        "evidence": [
            {"metric": "mixed_groups", "value": 0.021, "steps": [1, 3], "meaning": "few <b>groups</b> differ"}
        ],
        "change": {"override": "data.train.difficulty=2", "advice": "now 1"},
    }
    (second / "verdict.json").write_text(json.dumps(verdict))
    rollout = second / "rollouts" / "step_000003.jsonl"
    rows = [json.loads(line) for line in rollout.read_text().splitlines()]
    for row in rows:
        row |= {"solved": 1.0, "prompt": [{"role": "user", "content": "<script>alert(1)</script>"}]}
    rollout.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [first, second]


@pytest.fixture(scope="module")
def page(two_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("report") / "report.html"
    result = CliRunner().invoke(app, ["report", *map(str, two_runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out.read_text()


def test_a_report_is_one_file_that_needs_nothing_else(page: str) -> None:
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert not re.search(r"url\((?!#)", page)
    assert "<script" not in page
    assert '<meta name="viewport"' in page
    ids = re.findall(r' id="([^"]*)"', page)
    unique = [
        name for name in ids if not name.startswith(("figure_", "axes_", "patch_", "matplotlib", "xtick", "ytick"))
    ]
    references = set(re.findall(r'(?:href="#|url\(#)([^")]*)', page))
    assert references <= set(ids)
    assert unique


def test_a_report_shows_verdict_evaluations_and_curves(page: str, tiny_run: Path) -> None:
    summary = json.loads((tiny_run / "summary.json").read_text())
    assert "stalled (97%): too easy" in page
    assert "mixed_groups 0.021 (steps 1-3): few &lt;b&gt;groups&lt;/b&gt; differ" in page
    assert "<code>data.train.difficulty=2</code>" in page
    assert f"{summary['eval_before']['solve_rate']:.3f} ± {summary['eval_before']['stderr']:.3f}" in page
    for title in ("Held-out solve rate", "Solve rate", "KL to the start", "Gradient norm", "Mixed groups", "Truncated"):
        assert f"<h3>{title}</h3>" in page, title
    for title in ("Log-prob at each loop", "Exit distribution", "Where the time goes", "Outcomes of grading"):
        assert page.count(f"<h3>{title}</h3>") == 2, title
    assert "status: killed" in page  # it says running, but nothing holds the folder
    assert "max_completion_length: 8" in page  # the recipe


def test_a_report_shows_rollouts_as_text(page: str, two_runs: list[Path]) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    rows = RunFiles(two_runs[0]).rollout(1)
    right = next(row for row in rows if row["solved"] == 1)
    assert right["prompt"] in page
    assert "early, right" in page
    assert "late, wrong" in page


def test_pngs(two_runs: list[Path], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "r.html"), "--png", str(tmp_path / "png")]
    result = CliRunner().invoke(app, ["report", str(two_runs[0]), *out])
    assert result.exit_code == 0, result.output
    names = {file.name for file in (tmp_path / "png").iterdir()}
    assert {"solve_rate.png", "kl.png", "grad_norm.png", "run0-exits.png", "evaluation.png"} <= names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (tmp_path / "png").iterdir())


def test_a_run_of_one_step_without_evaluation_has_a_report(tiny_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.mkdir()
    for name in ("recipe.yaml", "versions.json"):
        shutil.copy(tiny_run / name, path)
    (path / "summary.json").write_text(json.dumps({"name": "short", "status": "failed", "error": "ValueError: no"}))
    first = (tiny_run / "metrics.jsonl").read_text().splitlines()[0]
    for metrics in (None, first + "\n"):
        if metrics is not None:
            (path / "metrics.jsonl").write_text(metrics)
        result = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "short.html")])
        assert result.exit_code == 0, result.output
        assert "ValueError: no" in (tmp_path / "short.html").read_text()


@pytest.mark.parametrize("command", ["report", "dashboard", "watch"])
def test_what_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path}: " in result.stderr
    assert "recipe.yaml and summary.json" in result.stderr


def test_a_report_into_a_missing_folder_is_refused(tiny_run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tiny_run), "--out", str(tmp_path / "no" / "r.html")])
    assert result.exit_code == 2
    assert "name a file in a folder that exists" in result.stderr


def test_folders_of_runs(two_runs: list[Path]) -> None:
    assert find_runs([two_runs[0].parent, two_runs[0]]) == sorted(two_runs)
    with pytest.raises(UserError, match="no such folder"):
        find_runs([Path("nowhere")])


def test_numbers_of_a_report(tiny_run: Path) -> None:
    assert smoothed([0.0, 0.0, 9.0, 0.0, 0.0], width=3) == [0.0, 3.0, 3.0, 3.0, 0.0]
    assert gain(HeldOut(0, 0.4, 0.03), HeldOut(9, 0.5, 0.04)) == "+0.100 ± 0.050"
    assert gain(HeldOut(0, 0.4, None), HeldOut(9, 0.3, 0.04)) == "-0.100"
    assert [duration(seconds) for seconds in (12, 200, 7500)] == ["12 s", "3 min 20 s", "2 h 05 min"]
    steps, rows = exit_table(RunFiles(tiny_run).history)
    assert steps == [1, 2, 3]
    assert [sum(column) for column in zip(*rows, strict=True)] == pytest.approx([1, 1, 1], abs=1e-4)


# ------------------------------------------------------------------------------------------------------------- watch


def shown(path: Path, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(RunFiles(path)))
    return console.export_text()


def test_watch_shows_a_run(two_runs: list[Path]) -> None:
    text = shown(two_runs[1])
    assert "killed, step 3/3" in text
    assert "stalled (97%): too easy" in text
    assert "change: data.train.difficulty=2   (now 1)" in text
    last = RunFiles(two_runs[1]).history.rows[-1]
    row = next(line for line in text.splitlines() if line.startswith("KL  "))
    assert f"{last['kl']:.2e}" in row
    assert "loop 2" in text
    assert "step 3, right" in text
    assert max(map(len, text.splitlines())) <= 80


def test_watch_follows_a_run_until_it_ends(
    two_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "growing"
    shutil.copytree(two_runs[1], path)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").unlink()
    steps = iter(range(1, 4))

    def grow(_: float) -> None:  # in place of waiting
        step = next(steps, None)
        if step is None:
            (path / "summary.json").write_text(json.dumps({"name": "growing", "status": "finished"}))
        else:
            half = lines[step][:40] if step < 3 else ""  # as a writer leaves it for a moment
            (path / "metrics.jsonl").write_text("".join(lines[:step]) + half)

    monkeypatch.setattr(time, "sleep", grow)
    monkeypatch.setattr(RunFiles, "_held", lambda self: True)
    with open(tmp_path / "screen", "w+") as out:
        watch(path, Console(file=out, force_terminal=True, width=100))
        out.seek(0)
        text = out.read()
    assert "no step was made yet" in text
    for step in (1, 2, 3):
        assert f"step {step}/3" in text
    assert "finished, step 3/3" in text


def test_watch_ends_on_ctrl_c(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rltt.telemetry.watch.screen", interrupt)
    assert CliRunner().invoke(app, ["watch", str(two_runs[0])]).exit_code == 0


def test_sparkline() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 32)) == 32
    assert sparkline([float(i) for i in range(64)], 8) == "▁▂▃▄▅▆▇█"


# --------------------------------------------------------------------------------------------------------- dashboard


def test_a_run_is_brought_to_trackio_once_and_followed(two_runs: list[Path], tmp_path: Path) -> None:
    import trackio

    path = tmp_path / "older"
    shutil.copytree(two_runs[1], path)
    (path / "recipe.yaml").write_text((path / "recipe.yaml").read_text().replace("tracker: trackio", "tracker: none"))
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2]))
    project, names = place([path])
    (run,) = to_import([path], project, names)
    run.catch_up()
    assert trackio_steps(project, "older") == [0, 1, 1, 2, 2, 3]  # evaluation before; rollouts of each step besides
    run.catch_up()
    (path / "metrics.jsonl").write_text("".join(lines))
    run.catch_up()
    assert trackio_steps(project, "older") == [0, 1, 1, 2, 2, 3, 3, 3]
    (alert,) = trackio.Api().alerts(project, run="older")
    assert alert["title"] == "stalled (97%): too easy"
    assert "change: data.train.difficulty=2" in alert["text"]


def trackio_steps(project: str, name: str) -> list[int]:
    import trackio
    from test_trackers import logged

    folder = Path(trackio.TRACKIO_DIR)
    assert (folder / f"{project}.db").is_file()
    return sorted(row["step"] for row in logged(Path(f"/{project}/{name}")))


def test_a_run_that_trackio_has_already_is_not_brought_again(tiny_run: Path) -> None:
    project, names = place([tiny_run])
    assert names[tiny_run] in {run.name for run in runs_of(project)}
    assert to_import([tiny_run], project, names) == []


def test_runs_of_several_folders_come_together(
    two_runs: list[Path], tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    project, names = place([two_runs[0], tiny_run])
    assert project == "comparison"
    assert names == {path: f"{path.parent.name}/tiny" for path in (two_runs[0], tiny_run)}
    address = page_address("http://127.0.0.1:7860/", "runs", ["a", "b"], "^(kl)$")
    assert address == "http://127.0.0.1:7860/?project=runs&runs=a,b&metric_filter=%5E%28kl%29%24"


@pytest.fixture
def stop_serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Ends `serve` as Ctrl-C would, at its first wait after the event is set."""
    done = threading.Event()

    def wait(_: float) -> None:
        done.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr("rltt.telemetry.dashboard.sleep", wait)
    yield done
    done.set()


def test_the_page_is_served(two_runs: list[Path], stop_serving: threading.Event) -> None:
    from rltt.telemetry.dashboard import serve

    said: list[str] = []
    answers: list[str] = []

    def ask(line: str) -> None:
        said.append(line)
        if line.startswith("2 runs"):
            address = line.rpartition(" ")[2]
            answers.append(urllib.request.urlopen(address, timeout=20).read().decode())
            stop_serving.set()

    with pytest.raises(KeyboardInterrupt):
        serve(two_runs, "127.0.0.1", None, False, ask)
    assert "<title>" in answers[0]
    assert f"project={project_of(two_runs[0])}&runs=tiny,second" in said[0]
    assert {"tiny", "second"} <= {run.name for run in runs_of(project_of(two_runs[0]))}


def test_imported_runs_begin_anew_where_their_file_is_shorter(two_runs: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "rewound"
    shutil.copytree(two_runs[0], path)
    run = Imported(path, project_of(path), "rewound")
    run.catch_up()
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:1]))
    shutil.rmtree(path / "rollouts")
    run.catch_up()
    assert trackio_steps(run.project, "rewound") == [0, 1]

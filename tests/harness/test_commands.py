"""Command lines, in this process: one sentence and exit code 2 for bad input, tables and figures for sweeps."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.tiny import write_data
from windowquant.harness import runner, workers
from windowquant.harness.command import command

Run = Callable[..., int]
TASKS = {
    "run": "windowquant.harness.main.run_command",
    "table": "windowquant.harness.main.table_command",
    "calibrate": "windowquant.harness.calibrate.calibrate_command",
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with the given words; its exit code."""

    def run(config: str, *words: str) -> int:
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", [f"{config}.py", *words])
        try:
            command(config, TASKS[config])
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    return run


@pytest.fixture
def tiny(tiny_llava: Path, tiny_data: Path, tmp_path: Path) -> list[str]:
    """Words that make a run one on the tiny model and data."""
    return [
        f"model.pretrained={tiny_llava}",
        "model.frames=8",
        "data=local",
        f"data.root={tiny_data}",
        f"output={tmp_path / 'results'}",
        "limit=2",
        "task.max_new_tokens=4",
        "device=cpu",
        "wandb.mode=disabled",
    ]


def written(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "results").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=gpt"], "Unknown model 'gpt': the known ones are internvl2_5_8b, llava_1_5_13b, "),
        (["method=fp61"], "Unknown method 'fp61': the known ones are dynamic, fewer_frames, fp16, "),
        (["task=charades"], "Unknown task 'charades': the known ones are describe, egoschema, intentqa, nextqa."),
        (["protocol=guess"], "Unknown protocol 'guess': the known ones are cached, context, paper."),
        (["data=cloud"], "Unknown data 'cloud': the known ones are hub, local, mini."),
        (["method.name=fp61"], "Unknown method 'fp61'"),
        (["task.name=charades"], "Unknown task 'charades': the known ones are nextqa, egoschema"),
        (["data.root=/nowhere"], "Data folder /nowhere does not exist: check data.root."),
        (["model.pretrained=/nowhere"], "Unknown model '/nowhere': give a folder with a config.json"),
        (["method.window_size=0"], "window_size is 0"),
        (["method.backend=fast"], "There is no attention backend 'fast'; use one of cpu, reference, triton."),
        (["method=windowquant", "method.alpha=nan"], "alpha"),
        (["limit=0"], "limit is 0: give a whole number of at least 1"),
        (["limit=-1"], "limit is -1"),
        (["wandb.mode=loud"], "wandb.mode is 'loud': the known ones are offline, online, disabled."),
        (["method.alhpa=2"], "alhpa"),
        (["method=kivi", "method.window_size=16"], "method has no setting 'window_size': it has name, k_bits, v_bits"),
        (["method=hf_fp8", "method.granularity=token"], "method has no setting 'granularity': it has name."),
        (["limit=="], "Configuration:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    call: Run, tiny: list[str], words: list[str], sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    method = [] if any(word.startswith("method=") for word in words) else ["method=uniform_int2"]
    assert call("run", *tiny, *method, *words) == 2
    complaint = capfd.readouterr().err
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert written(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(
    call: Run, tiny: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert call("run", *tiny, "method=fp16", f"output={tmp_path / 'file' / 'results'}") == 2
    complaint = capfd.readouterr().err
    assert complaint.startswith(str(tmp_path / "file" / "results"))
    assert "cannot be used (Not a directory): name another" in complaint and len(complaint.splitlines()) == 1


def test_a_missing_video_is_named_before_anything_runs(
    call: Run, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_data(tmp_path / "data")
    (root / "nextqa/NExTVideo/9000000001.mp4").unlink()
    assert call("run", *tiny, "method=uniform_int2", f"data.root={root}") == 2
    complaint = capfd.readouterr().err
    assert "9000000001.mp4 is missing: put it there" in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert written(tmp_path) == []


def test_an_unreadable_video_is_recorded_named_and_exit_code_2(
    call: Run, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_data(tmp_path / "data")
    (root / "nextqa/NExTVideo/9000000001.mp4").write_bytes(b"no video")
    assert call("run", *tiny, "method=uniform_int2", f"data.root={root}") == 2
    (record,) = (tmp_path / "results").rglob("uniform_int2-*.json")
    assert [error["doc_id"] for error in json.loads(record.read_text())["errors"]] == [1]
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("Not scored, for want of a readable video: 1 of the documents. Video ")
    assert "9000000001.mp4 cannot be decoded" in last


def test_a_model_whose_visual_tokens_cannot_be_located_is_refused(
    call: Run, tiny: list[str], tmp_path: Path, tiny_llava: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tests.tiny import save_tiny_unknown

    model = save_tiny_unknown(tmp_path / "model", tiny_llava)
    assert call("run", *tiny, "method=uniform_int2", f"model.pretrained={model}") == 2
    assert "visual tokens" in capfd.readouterr().err.strip().splitlines()[-1]
    assert written(tmp_path) == []


def test_a_run_prints_its_record_and_is_not_repeated(
    call: Run, tiny: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("run", *tiny, "method=uniform_int2") == 0
    first = capfd.readouterr().out
    assert "uniform_int2 on nextqa (mini_llava_onevision, protocol context)" in first.replace("\n", " ")
    assert Path(first.strip().splitlines()[-1]).is_file()
    monkeypatch.setattr(runner, "_run", lambda *_: pytest.fail("a finished run was run again"))
    assert call("run", *tiny, "method=uniform_int2") == 0
    assert capfd.readouterr().out == first


def test_a_sweep_ends_in_one_table_and_one_figure_and_resumes(
    call: Run, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = ["method=windowquant", "method.sensitivity=online", "method.alpha=1,4", "method.window_size=4,8"]
    evaluated = []
    real = runner._evaluate

    def counted(cell: runner.Cell, *rest: object) -> object:
        evaluated.append(cell.fingerprint)
        return real(cell, *rest)

    def interrupted(cell: runner.Cell, *rest: object) -> object:
        if len(evaluated) == 2:
            raise KeyboardInterrupt
        return counted(cell, *rest)

    monkeypatch.setattr(runner, "_evaluate", interrupted)
    assert call("run", "-m", *tiny, *sweep) == 130
    assert "Interrupted: the same command continues where it stopped." in capfd.readouterr().err
    monkeypatch.setattr(
        runner, "_evaluate", lambda cell, *rest: (evaluated.append(cell.fingerprint), real(cell, *rest))[1]
    )
    assert call("run", "-m", *tiny, *sweep) == 0
    assert len(evaluated) == len(set(evaluated)) == 5  # four cells and FP16, each once
    table = json.loads((tmp_path / "results/tables/sweep_nextqa.json").read_text())
    cells = {
        (r["params"].get("alpha"), r["params"]["window_size"]) for r in table["rows"] if r["method"] == "windowquant"
    }
    assert cells == {(alpha, size) for alpha in (1.0, 4.0) for size in (4, 8)}
    assert [r["method"] for r in table["rows"]].count("fp16") == 1
    assert (tmp_path / "results/figures/sweep_nextqa.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "results/tables/sweep_nextqa.md").is_file()
    assert "sweep_nextqa.md" in capfd.readouterr().out


def test_a_sweep_over_an_unreadable_video_finishes_and_exits_with_2(
    call: Run, tiny: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_data(tmp_path / "data")
    (root / "nextqa/NExTVideo/9000000001.mp4").write_bytes(b"no video")
    words = ["method=uniform_int2", "method.window_size=4,8", f"data.root={root}", "sweep_name=broken"]
    words += ["hydra/launcher=processes", "hydra.launcher.n_jobs=1"]
    assert call("run", "-m", *tiny, *words) == 2
    table = json.loads((tmp_path / "results/tables/broken.json").read_text())
    assert [row["errors"] for row in table["rows"]] == [1, 1, 1]
    assert "9000000001.mp4 cannot be decoded" in capfd.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def tiny_table(tiny_llava: Path, tiny_data: Path, tmp_path: Path) -> list[str]:
    sensitivities = tmp_path / "sensitivities.json"
    return [
        "experiment.models=first",
        "experiment.methods=[uniform_int2,fp16,random_plan,no_video]",
        "experiment.tasks=[nextqa,egoschema]",
        "experiment.seeds={random_plan: [0, 1]}",
        "scale.data=local",
        "scale.limits={nextqa: 2, egoschema: 2}",
        f"scale.data_root={tiny_data}",
        f"scale.models.mini_llava_onevision={tiny_llava}",
        f"scale.overrides=['model.frames=8','method.window_size=8','device=cpu','model.calibration={sensitivities}']",
        f"output={tmp_path / 'results'}",
        "wandb.mode=disabled",
    ]


def test_a_table_is_planned_run_in_processes_and_resumed(
    call: Run,
    tiny_table: list[str],
    tiny_llava: Path,
    tiny_data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    words = [f"model.pretrained={tiny_llava}", "model.frames=8", "data=local", f"data.root={tiny_data}", "device=cpu"]
    assert call("calibrate", *words, f"model.calibration={tmp_path / 'sensitivities.json'}") == 0
    assert call("table", *tiny_table, "workers=1") == 0
    first = json.loads((tmp_path / "results/tables/table1.json").read_text())
    keys = [(row["task"], row["method"], row["runs"]) for row in first["rows"]]
    methods = [("fp16", 1), ("uniform_int2", 1), ("random_plan", 2), ("no_video", 1)]
    assert keys == [(task, *method) for task in ("nextqa", "egoschema") for method in methods]
    assert "stand-in" in first["title"]
    assert first["stand_in"]
    assert first["paper"][0]["model"] == "Video-LLaVA"
    assert all(Path(row["record"]).is_file() for row in first["rows"])
    printed = capfd.readouterr().out
    assert "10 cells, 0 of them finished already" in printed
    assert "table1_mini_llava_onevision_context.png" in printed.replace("\n", "")
    assert (tmp_path / "results/figures/table1_mini_llava_onevision_context.png").is_file()
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *_: pytest.fail("a finished table was run again"))
    assert call("table", *tiny_table) == 0
    second = json.loads((tmp_path / "results/tables/table1.json").read_text())
    assert second["rows"] == first["rows"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["experiment=table9"], "Unknown experiment 'table9': the known ones are "),
        (["scale=huge"], "Unknown scale 'huge': the known ones are mini, paper."),
        (["workers=0"], "workers is 0: give a whole number of at least 1"),
        (["wandb.mode=loud"], "wandb.mode is 'loud'"),
        (["experiment.methods=[fp61]"], "Unknown method 'fp61': the known ones are "),
        (["experiment.tasks=[charades]"], "Unknown task 'charades': the known ones are "),
        (["experiment.paper=table99"], "The paper's table 'table99' is not here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_table_is_one_sentence_and_exit_code_2(
    call: Run, tiny_table: list[str], words: list[str], sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call("table", *tiny_table, *words) == 2
    complaint = capfd.readouterr().err
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert written(tmp_path) == []


def test_the_paper_scale_says_what_it_needs_and_stops(
    call: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"output={tmp_path / 'results'}", "wandb.mode=disabled", "scale=paper"]
    assert call("table", *words) == 2
    out, complaint = capfd.readouterr()
    assert "GPU with 24 GB" in out
    assert "llava-hf/llava-onevision-qwen2-7b-ov-hf" in out
    assert "6.5 GB for nextqa" in " ".join(out.split())
    assert complaint.startswith("The hub has no copy of intentqa")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call("table", *words, "experiment.tasks=[nextqa]") == 2
    assert capfd.readouterr().err.strip() == "scale=paper needs a GPU with 24 GB, here is none: use scale=mini."
    assert written(tmp_path) == []


def test_calibration_measures_every_layer_and_names_its_file(
    call: Run, tiny: list[str], tiny_llava: Path, tiny_data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "sensitivities.json"
    words = [f"model.pretrained={tiny_llava}", "model.frames=8", f"model.calibration={path}", "data=local"]
    assert call("run", *tiny, "method=windowquant", f"model.calibration={path}") == 2
    assert str(path) in capfd.readouterr().err
    assert call("run", *tiny, "method=smoothquant", f"model.calibration={path}") == 2
    assert str(path.with_suffix(".safetensors")) in capfd.readouterr().err
    assert call("calibrate", *words, f"data.root={tiny_data}", "device=cpu", "samples=0") == 2
    assert "samples is 0" in capfd.readouterr().err
    assert call("calibrate", *words, f"data.root={tiny_data}", "device=cpu", "samples=2") == 0
    assert capfd.readouterr().out.split() == [str(path), str(path.with_suffix(".safetensors"))]
    assert path.with_suffix(".safetensors").is_file()
    found = json.loads(path.read_text())
    assert found["samples"] == 2
    assert len(found["values"]) == 2
    assert all(-1 <= value <= 1 for value in found["values"])
    assert call("run", *tiny, "method=windowquant", "method.window_size=8", f"model.calibration={path}") == 0
    assert call("run", *tiny, "method=smoothquant", "method.window_size=8", f"model.calibration={path}") == 0
    (record,) = (tmp_path / "results").rglob("windowquant-*.json")
    config = json.loads(record.read_text())["config"]
    assert config["calibration"] == found["values"]

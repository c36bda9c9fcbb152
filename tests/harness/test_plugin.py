"""As a plug-in of lmms-eval: by name through the library, and through its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.models import get_model
from lmms_eval.tasks import TaskManager

from tests.tiny import write_data
from windowquant.errors import UserError
from windowquant.harness import environment
from windowquant.harness.benchmarks import build_task
from windowquant.harness.data import Data
from windowquant.harness.lmms_command import CommandLineModel
from windowquant.harness.lmms_model import WindowQuantModel
from windowquant.harness.plugin import manifest
from windowquant.harness.runner import Cell, run
from windowquant.harness.video import VideoError

ROOT = Path(__file__).parents[2]


def test_lmms_eval_finds_the_model_by_name() -> None:
    assert get_model("windowquant") is WindowQuantModel
    assert manifest().model_id == "windowquant"
    assert not WindowQuantModel.is_simple


def test_simple_evaluate_gives_what_the_runner_records(make_settings, tiny_llava: Path, tiny_data: Path) -> None:
    settings = make_settings(method="uniform_int2", limit=3)
    record = run(settings)
    data = Data("local", tiny_data)
    environment.prepare(data.root)
    arguments = f"pretrained={tiny_llava},method=uniform_int2,window_size=8,frames=8,max_new_tokens=4,device=cpu"
    results = simple_evaluate(
        model="windowquant",
        model_args=arguments,
        tasks=[build_task("nextqa", data)],
        task_manager=TaskManager(include_defaults=False),
        limit=3,
        bootstrap_iters=0,
        process_docs_parallel=1,
    )
    texts = [json.loads(line)["text"] for line in Cell(settings).path.with_suffix(".jsonl").read_text().splitlines()]
    samples = sorted(results["samples"]["nextqa_mc_test"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == texts
    assert 100 * results["results"]["nextqa_mc_test"]["exact_match,none"] == record.accuracy


def test_the_command_line_of_lmms_eval_works(tiny_llava: Path, tiny_data: Path, tmp_path: Path) -> None:
    import lmms_eval

    stock = Path(lmms_eval.__file__).parent / "tasks/egoschema/egoschema_subset.yaml"
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(
        f"include: {stock}\ntask: egoschema_local\ndataset_path: {tiny_data / 'datasets/egoschema'}\n"
        "dataset_kwargs: {load_from_disk: true}\n"
    )
    arguments = (
        f"pretrained={tiny_llava},method=windowquant,alpha=2,sensitivity=online,window_size=8,frames=8,device=cpu"
    )
    command = [sys.executable, "-m", "lmms_eval", "--model", "windowquant", "--model_args", arguments]
    command += ["--tasks", "egoschema_local", "--include_path", str(tmp_path / "tasks"), "--limit", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    variables = {"HF_HOME": str(tiny_data), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("*_results.json")
    scores = json.loads(results.read_text())["results"]["egoschema_local"]
    assert 0 <= scores["score,none"] <= 1
    (samples,) = (tmp_path / "out").rglob("*_samples_egoschema_local.jsonl")
    assert len(samples.read_text().splitlines()) == 2


def test_bad_arguments_end_the_command_line_of_lmms_eval_with_one_sentence(tiny_data: Path) -> None:
    command = [sys.executable, "-m", "lmms_eval", "--model", "windowquant", "--tasks", "egoschema_subset"]
    command += ["--model_args", "method=fp61"]
    variables = {"HF_HOME": str(tiny_data), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("Unknown method 'fp61'; known methods: ")
    assert "Traceback" not in done.stderr


def test_its_script_is_told_from_a_library_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert manifest().chat_class_path.endswith("lmms_model.WindowQuantModel")
    monkeypatch.setitem(sys.modules, "lmms_eval.__main__", sys)  # which the script `lmms-eval` imports
    assert manifest().chat_class_path.endswith("lmms_command.CommandLineModel")


def test_what_goes_wrong_while_answering_ends_the_command_line_too(
    tiny_llava: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = CommandLineModel(str(tiny_llava), "fp16", frames=8, device="cpu")
    for refused in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(SystemExit) as stop:
            refused([])
        assert stop.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_an_unreadable_video_ends_the_evaluation(tiny_llava: Path, tmp_path: Path) -> None:
    """lmms-eval would score an empty answer as a random guess."""
    data = Data("local", write_data(tmp_path))
    (tmp_path / "nextqa/NExTVideo/9000000001.mp4").write_bytes(b"no video")
    environment.prepare(data.root)
    model = WindowQuantModel(str(tiny_llava), "fp16", frames=8, device="cpu")
    with pytest.raises(VideoError, match=r"9000000001\.mp4 cannot be decoded"):
        simple_evaluate(
            model=model,
            tasks=[build_task("nextqa", data)],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"method": "fp61"}, "Unknown method"),
        ({"protocol": "guess"}, "Unknown protocol"),
        ({"pretrained": "/nowhere"}, "Unknown model"),
        ({"alpha": "wide"}, "method.alpha is 'wide'"),
        ({"batch_size": 8}, "batch_size is 8"),
        ({"device": "abacus"}, "device is 'abacus'"),
    ],
)
def test_bad_arguments_are_told(tiny_llava: Path, arguments: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        WindowQuantModel(**{"pretrained": str(tiny_llava), **arguments})


def test_likelihood_and_rounds_are_refused(tiny_llava: Path) -> None:
    model = WindowQuantModel(str(tiny_llava), "fp16", frames=8)
    with pytest.raises(UserError, match="Likelihood"):
        model.loglikelihood([])
    with pytest.raises(UserError, match="several rounds"):
        model.generate_until_multi_round([])

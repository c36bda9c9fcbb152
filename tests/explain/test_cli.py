"""The command `windowquant`: what it writes, and one sentence and exit code 2 for bad input."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import write_video
from windowquant.cli import main

ROOT = Path(__file__).parents[2]
Call = Callable[..., int]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4")


@pytest.fixture
def explain(tiny_llava: Path, video: Path, tmp_path: Path) -> Call:
    """Ask the tiny model about the clip; pictures go to an empty folder."""

    def run(*words: str, output: str = "out/picture.svg", model: str = str(tiny_llava)) -> int:
        tiny = ["--model", model, "--frames", "8", "--device", "cpu", "--max-new-tokens", "3"]
        return main(["explain", str(video), *tiny, "--output", str(tmp_path / output), *words])

    return run


OWN = ["--set", "sensitivity=online", "--set", "window_size=8"]


def test_a_question_gives_a_picture_and_its_numbers(
    explain: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], video: Path
) -> None:
    assert explain("what is red?", *OWN, "--set", "alpha=1.5", "--json") == 0
    picture, numbers = tmp_path / "out/picture.svg", tmp_path / "out/picture.json"
    assert capsys.readouterr().out.split() == [str(picture), str(numbers)]
    found = json.loads(numbers.read_text())
    assert found["video"] == str(video)
    (only,) = found["questions"]
    assert (only["question"], only["alpha"], only["window_size"]) == ("what is red?", 1.5, 8)
    assert (only["method_name"], only["protocol"], only["stand_in"]) == ("windowquant", "context", False)
    assert len(only["scores"]) == 4 and len(only["plan"]) == 2
    assert only["picture_tokens"] == [4] * 7 + [5]
    assert "Q: what is red?" in picture.read_text()
    assert picture.read_text().count("<image ") == 8


def test_several_questions_give_one_row_of_scores_each(explain: Call, tmp_path: Path) -> None:
    assert explain("what is red?", "what is blue?", *OWN, "--json") == 0
    found = (tmp_path / "out/picture.svg").read_text()
    assert "Q: what is red?" in found and "Q: what is blue?" in found and "window score" in found
    assert len(json.loads((tmp_path / "out/picture.json").read_text())["questions"]) == 2


def test_method_and_protocol_are_those_asked_for(explain: Call, tmp_path: Path) -> None:
    assert explain("why?", "--method", "int2_token", "--protocol", "paper", "--json", output="a.png") == 0
    (only,) = json.loads((tmp_path / "a.json").read_text())["questions"]
    assert (only["method_name"], only["protocol"], only["scores"]) == ("uniform", "paper", None)
    assert "granularity='token'" in only["method"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "changes", "sentence"),
    [
        ([" "], {}, "A question is empty"),
        (["why?"], {"output": "a.gif"}, "a.gif does not end in .png, .svg or .pdf"),
        (["why?"], {"output": "file/a.png"}, "file/a.png cannot be written: name a file in a folder that can."),
        (["why?"], {"output": "folder.png"}, "folder.png cannot be written"),
        (["why?"], {"model": "gpt"}, "Unknown model 'gpt': the known ones are "),
        (["why?"], {"model": "/nowhere/at/all"}, "Unknown model '/nowhere/at/all'"),
        (["why?", "--method", "fp61"], {}, "Unknown method 'fp61': the known ones are "),
        (["why?", "--set", "alhpa=2"], {}, "method has no setting 'alhpa': it has name, alpha, "),
        (["why?", "--set", "alpha"], {}, "Configuration: "),
        (["why?", "--set", "alpha=-1"], {}, "alpha is -1"),
        (["why?", "--set", "window_size=big"], {}, "method.window_size is 'big': give a whole number."),
        (["why?", "--protocol", "guess"], {}, "Unknown protocol 'guess': the known ones are "),
        (["why?", "--frames", "0"], {}, "model.frames is 0: give a whole number of at least 1"),
        (["why?", "--frames", "few"], {}, "Argument --frames: invalid int value: 'few'"),
        (["why?", "--max-new-tokens", "0"], {}, "max_new_tokens is 0"),
        (["why?", "--device", "tpu9"], {}, "device is 'tpu9'"),
        (["why?"], {}, "There is no windowquant_calibration.json in "),
        (["why?", "why not?", "--method", "fp16"], {}, "fp16 gives no window scores to compare questions by"),
        ([], {}, "The following arguments are required: question"),
        (["why?", "--colour"], {}, "Unrecognized arguments: --colour"),
    ],
    ids=lambda value: (
        " ".join(map(str, value.values() if isinstance(value, dict) else value)) if not isinstance(value, str) else ""
    ),
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    explain: Call, words: list[str], changes: dict, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    assert explain(*words, **changes) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint
    assert len(complaint.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize(("name", "sentence"), [("none.mp4", "does not exist"), ("text.mp4", "cannot be decoded")])
def test_a_video_that_is_none_is_named(
    name: str, sentence: str, tiny_llava: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    output = tmp_path / "a.png"
    assert (
        main(["explain", str(tmp_path / name), "why?", "--model", str(tiny_llava), *OWN, "--output", str(output)]) == 2
    )
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"Video {tmp_path / name} {sentence}")
    assert len(complaint.strip().splitlines()) == 1
    assert not output.exists()


def test_a_misspelt_name_costs_no_heavy_import(video: Path) -> None:
    code = (
        "import sys\nfrom windowquant.cli import main\n"
        "code = main(['explain', sys.argv[1], 'why?', '--method', 'windwoquant'])\n"
        "print(code, *(m for m in ('torch', 'transformers', 'matplotlib', 'lmms_eval') if m in sys.modules))"
    )
    command = [sys.executable, "-c", code, str(video)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2"]
    assert done.stderr.startswith("Unknown method 'windwoquant': the known ones are ")


def test_sensitivities_of_models_and_folders_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own"
    own.mkdir()
    known = json.loads((ROOT / "windowquant/mini/checkpoints/llava_onevision/windowquant_calibration.json").read_text())
    known["values"] = [0.125, 0.25, 0.5]
    (own / "windowquant_calibration.json").write_text(json.dumps(known))
    output = tmp_path / "figures" / "s.svg"
    assert main(["sensitivity", "mini_llava_onevision", str(own), "--output", str(output)]) == 0
    assert capsys.readouterr().out.split() == [str(output)]
    found = output.read_text()
    for words in ("mini_llava_onevision", "own", "0.125", "0.500", "stand-ins"):
        assert f"{words}" in found
    assert main(["sensitivity", "--output", str(tmp_path / "all.png")]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpt"], "Unknown model 'gpt': the known ones are "),
        (["llava_onevision_7b"], "There is no calibration file results/calibration/llava_onevision_7b.json"),
        (["--output", "a.txt"], "a.txt does not end in .png, .svg or .pdf"),
    ],
    ids=" ".join,
)
def test_a_model_without_sensitivities_is_named(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sensitivity", *words]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(sentence)
    assert len(complaint.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"windowquant": f"{main.__module__}:{main.__name__}"}

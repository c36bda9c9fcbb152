"""Binding is undone completely, and misuse is told in words."""

import re
import warnings

import pytest
import torch
from transformers import DynamicCache

from tests.vlm import VIDEO, tiny_model, video_inputs, words
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.models import cache_keyword
from windowquant.protocols import answer

METHOD = {"name": "uniform_int2", "window_size": 8}
BELONGS = "belongs to another prompt"


def hooks(model) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def logits(model, inputs, cache=None):
    extra = {} if cache is None else {cache_keyword(model): cache}
    with torch.no_grad():
        return model(**inputs, **extra).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", [METHOD, {"name": "windowquant", "sensitivity": "online"}])
def test_the_model_is_as_it_was_afterwards(implementation: str, fails: bool, method) -> None:
    model, inputs = tiny_model(), video_inputs()
    model.set_attn_implementation(implementation)
    before, count, config = logits(model, inputs), hooks(model), model.config.to_dict()
    try:
        with get_method(**method).bind(model) as bound:
            logits(model, inputs, bound.new_cache(inputs))
            assert hooks(model) > count
            if fails:
                raise RuntimeError("on the way")
    except RuntimeError:
        assert fails
    assert model.config.text_config._attn_implementation == implementation
    assert model.config.vision_config._attn_implementation == implementation
    assert hooks(model) == count and model.config.to_dict() == config
    assert torch.equal(logits(model, inputs), before)
    with get_method(**method).bind(model) as bound:  # and can be bound again
        logits(model, inputs, bound.new_cache(inputs))


def test_a_failure_while_binding_leaves_nothing_behind(monkeypatch) -> None:
    model = tiny_model()
    count = hooks(model)
    bound = get_method(**METHOD).bind(model)
    monkeypatch.setattr(bound.adapter, "language_model", lambda model: None, raising=False)
    with pytest.raises(AttributeError):
        bound.__enter__()
    assert hooks(model) == count and model.config.text_config._attn_implementation == "sdpa"
    monkeypatch.undo()
    with get_method(**METHOD).bind(model):
        pass


def test_calls_that_do_not_use_our_cache_are_untouched_inside() -> None:
    model, inputs = tiny_model(), video_inputs()
    before = logits(model, inputs)
    with get_method(**METHOD).bind(model):
        assert torch.equal(logits(model, inputs), before)
        assert torch.equal(logits(model, inputs, DynamicCache()), before)


def test_binding_twice_is_refused() -> None:
    model = tiny_model()
    with get_method(**METHOD).bind(model), pytest.raises(UserError, match="bound to this model already"):
        get_method("fp16").bind(model).__enter__()
    with get_method("fp16").bind(model) as bound, pytest.raises(UserError, match="bound to this model already"):
        bound.__enter__()
    with get_method("fp16").bind(model), get_method("fp16").bind(tiny_model()):
        pass  # two models are two matters


def test_caches_work_inside_the_block_only() -> None:
    model, inputs = tiny_model(), video_inputs()
    bound = get_method(**METHOD).bind(model)
    with pytest.raises(UserError, match="not bound to the model now"):
        bound.new_cache(inputs)
    with bound:
        cache = bound.new_cache(inputs)
    with pytest.raises(UserError, match="not bound to the model now"):
        logits(model, inputs, cache)


def test_a_cache_serves_one_prompt() -> None:
    model, inputs, other = tiny_model(), video_inputs(), video_inputs(seed=5)
    with get_method(**METHOD).bind(model) as bound:
        keyword = bound.cache_keyword
        with pytest.raises(UserError, match=BELONGS):
            logits(model, other, bound.new_cache(inputs))
        for second in (inputs, other, video_inputs(frames=8, after=30), video_inputs(frames=2)):
            cache = bound.new_cache(inputs)
            model.generate(**inputs, **{keyword: cache}, max_new_tokens=3, do_sample=False)
            with pytest.raises(UserError, match=BELONGS):
                model.generate(**second, **{keyword: cache}, max_new_tokens=3, do_sample=False)


def test_a_conversation_may_go_on_in_the_same_cache() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHOD).bind(model) as bound:
        cache = bound.new_cache(inputs)
        first = model.generate(**inputs, **{bound.cache_keyword: cache}, max_new_tokens=3, do_sample=False)
        longer = torch.cat([first, torch.tensor([words(4)])], 1)
        out = model.generate(
            input_ids=longer,
            attention_mask=torch.ones_like(longer),
            **{bound.cache_keyword: cache},
            max_new_tokens=2,
            do_sample=False,
        )
        assert out.shape[1] == longer.shape[1] + 2 and cache.get_seq_length() == out.shape[1] - 1


def test_a_batch_of_another_size_is_refused() -> None:
    model, inputs = tiny_model(), video_inputs()
    two = {key: torch.cat([value, value]) for key, value in inputs.items()}
    with get_method(**METHOD).bind(model) as bound, pytest.raises(UserError, match=BELONGS):
        logits(model, inputs, bound.new_cache(two))


@pytest.mark.parametrize("name", ["fp16", "no_video", "uniform", "uniform_int2", "uniform_int4", "rtn", "rtn_int2"])
def test_text_only_prompts_work_and_say_so(name: str) -> None:
    model = tiny_model()
    ids = torch.tensor([words(9)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 9:].tolist()
    with get_method(name).bind(model) as bound:
        with pytest.warns(UserWarning, match="no visual tokens") as caught:
            reply, _ = answer(bound, inputs, "context", 6)
        assert len(caught) == 1 and reply.tokens == want and reply.bits == {}
    method = get_method("windowquant", sensitivity=(0.5, 0.5))
    with method.bind(model) as bound, pytest.warns(UserWarning, match="no visual tokens"):
        assert answer(bound, inputs, "context", 6)[0].tokens == want


@pytest.mark.parametrize("name", ["windowquant", "uniform_int2", "random_plan", "rtn_int2"])
def test_a_window_larger_than_the_video_warns_once_and_keeps_everything(name: str) -> None:
    model, inputs = tiny_model(), video_inputs()
    extra = {"sensitivity": (0.5, 0.5)} if name in ("windowquant", "random_plan") else {}
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 43:].tolist()
    with get_method(name, window_size=100, kv_dtype="model", **extra).bind(model) as bound:
        with pytest.warns(UserWarning, match="window_size 100 is larger") as caught:
            reply, _ = answer(bound, inputs, "context", 6)
        assert len(caught) == 1 and reply.tokens == want and reply.bits == {16: 1.0}


def test_fp16_has_no_windows_to_warn_about() -> None:
    model, inputs = tiny_model(), video_inputs(frames=2)
    with warnings.catch_warnings(), get_method("fp16").bind(model) as bound:
        warnings.simplefilter("error")
        assert answer(bound, inputs, "context", 2)[0].bits == {16: 1.0}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"name": "kivvi"}, "Unknown method 'kivvi'; known methods: .*fp16.*windowquant"),
        ({"name": "windowquant", "alfa": 2}, "no hyper-parameter 'alfa'; it has .*alpha"),
        ({"name": "windowquant", "alpha": float("nan")}, "alpha is nan"),
        ({"name": "windowquant", "alpha": float("inf")}, "alpha is inf"),
        ({"name": "windowquant", "window_size": 0}, "window_size is 0"),
        ({"name": "windowquant", "metric": "dot"}, "metric is 'dot'; use one of cosine"),
        ({"name": "windowquant", "scaling": "max"}, "scaling is 'max'; use one of minmax"),
        ({"name": "fp16", "kv_dtype": "float32"}, "kv_dtype is 'float32'; use one of auto, model"),
        ({"name": "fp16", "granularity": "row"}, "granularity is 'row'; use one of window_channel"),
        ({"name": "fp16", "zero_point": "none"}, "zero_point is 'none'; use one of integer"),
        ({"name": "uniform", "bits_per_code": 3}, "3 bits"),
    ],
)
def test_wrong_hyper_parameters_are_named(params, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        get_method(**params)
    assert len(re.findall(r"[.!?](?:\s|$)", str(error.value))) == 1, "one sentence"


def test_unknown_backend_is_refused_when_binding() -> None:
    with pytest.raises(UserError, match="backend 'cudnn'"):
        get_method("fp16", backend="cudnn").bind(tiny_model())


def test_sensitivities_must_match_the_layers() -> None:
    with pytest.raises(UserError, match="3 layer sensitivities are given, but the model has 2"):
        get_method("windowquant", sensitivity=[0.1, 0.2, 0.3]).bind(tiny_model())


def test_sliding_window_models_are_refused() -> None:
    model = tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(UserError, match="sliding-window"):
        get_method("fp16").bind(model)


@pytest.mark.parametrize("layer", [0, 1])
def test_values_that_are_not_finite_name_their_layer(layer: int) -> None:
    model, inputs = tiny_model(), video_inputs()
    model.model.language_model.layers[layer].self_attn.k_proj.bias.data[3] = float("nan")
    with get_method(**METHOD).bind(model) as bound, pytest.raises(UserError, match=f"layer {layer} K holds NaN"):
        answer(bound, inputs, "context", 2)


def test_the_placeholder_may_appear_in_an_answer() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHOD).bind(model) as bound:
        _, session = answer(bound, inputs, "context", 2)
        assert session.logits([5, VIDEO, 9]).shape[0] == 3

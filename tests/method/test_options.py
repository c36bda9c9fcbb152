"""The options of WindowQuant: each changes what it should and nothing else, from Python as from Hydra."""

import re
from functools import cache

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.core.plan import BitPlan, KVShape
from windowquant.core.search import search_plan
from windowquant.errors import UserError
from windowquant.harness.command import CONF
from windowquant.harness.measure import bytes_per_token, measure
from windowquant.harness.methods import build_method
from windowquant.harness.settings import from_config
from windowquant.method import get_method
from windowquant.models import Prompt
from windowquant.planning import kv_shape
from windowquant.protocols import answer
from windowquant.windowquant_method import WindowQuant

GIVEN = {"window_size": 4, "sensitivity": (0.45, 0.6)}
TOKEN = {"search": "token", "granularity": "token"}


@cache
def model_of(*shape: int):
    return tiny_model(*shape)


def ask(inputs: dict[str, Tensor], **options):
    """(reply, cache) of one request under WindowQuant."""
    with WindowQuant(**{**GIVEN, **options}).bind(model_of()) as bound:
        reply, session = answer(bound, inputs, "context", 2)
    return reply, session.cache


def planned(*scores: Tensor, **options) -> BitPlan:
    """The plan of requests with the given scores of their windows, or of one with 40 random scores."""
    rows = list(scores) or [torch.rand(40, generator=torch.Generator().manual_seed(5))]
    ids = torch.arange(len(rows) * 9).view(len(rows), 9)
    prompt = Prompt(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool))
    method = WindowQuant(**{**GIVEN, **options})
    return method.plan(prompt, rows, torch.tensor(GIVEN["sensitivity"]), KVShape(2, 8))


@cache
def default_facts() -> dict[str, object]:
    return facts()


def facts(**options) -> dict[str, object]:
    """What options can change, in comparable form."""
    reply, cache = ask(video_inputs(frames=24), **options)
    stored = [layer.stored for layer in cache.layers]
    blocks = [block for layer in stored for block in layer.blocks()]
    return {
        "scores": [round(x, 5) for x in cache.stats.scores[0].tolist()],
        "plan": reply.plan.bits,
        "plan of V": reply.plan.v_tensor().tolist(),
        "places": [[s.windows for s in layer.segments] for layer in stored],
        "groups": {tuple(n > 1 for n in block.scale.shape[3:]) for block in blocks if block.bits < 16},
        "offsets": [block.offset.double().sum().item() for block in blocks],
        "dtype": stored[0].kept.k.dtype,
    }


PLANS = {"plan", "plan of V", "places", "offsets"}


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"alpha": 6.0}, PLANS),
        ({"target_bits": 12.0}, PLANS),
        ({"metric": "euclidean"}, {"scores"} | PLANS),
        ({"metric": "pearson"}, {"scores"} | PLANS),
        ({"scaling": "rank"}, {"scores"} | PLANS),
        ({"scaling": "none"}, {"scores"} | PLANS),
        ({"sensitivity": (0.2, 0.9)}, PLANS),
        ({"fix_first": False}, PLANS),
        ({"search": "random"}, PLANS),
        ({"search": "random", "seed": 1}, PLANS),
        ({"seed": 1}, set()),
        ({"reorder": False}, {"places", "offsets"}),
        ({"widths": (16, 8, 4, 2)}, PLANS),
        ({"v_widths": (16, 4, 2)}, set()),
        ({"v_widths": (16, 2, 2)}, {"plan of V", "offsets"}),
        ({"zero_point": "float"}, {"offsets"}),
        ({"granularity": "token"}, {"groups", "offsets"}),
        ({"granularity": "head"}, {"groups", "offsets"}),
        ({"kv_dtype": "model"}, {"dtype", "offsets"}),
        ({"backend": "reference"}, set()),
    ],
    ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_an_option_changes_what_it_should_and_nothing_else(options, changed: set[str]) -> None:
    default, other = default_facts(), facts(**options)
    assert {name for name in default if default[name] != other[name]} == changed


def test_the_first_window_is_fixed_or_voted_on_like_any_other() -> None:
    fixed, free = (ask(video_inputs(frames=24), fix_first=x)[0].plan for x in (True, False))
    _, cache = ask(video_inputs(frames=24))
    scores = cache.stats.scores[0]
    assert free.tensor().tolist() == search_plan(scores, GIVEN["sensitivity"], 2.0, fix_first=False).tolist()
    assert [row[1:] for row in fixed.bits] == [row[1:] for row in free.bits]
    assert [row[0] for row in fixed.bits] == [16, 16] != [row[0] for row in free.bits]


def test_a_random_search_is_the_random_plan() -> None:
    inputs = video_inputs(frames=24)
    for seed in (0, 3):
        own = ask(inputs, search="random", seed=seed)[0].plan
        with get_method("random_plan", seed=seed, **GIVEN).bind(model_of()) as bound:
            assert answer(bound, inputs, "context", 1)[0].plan.bits == own.bits
    drawn = [planned(search="random", fix_first=False, seed=seed).bits for seed in range(8)]
    counts = [sorted(row) for row in planned(fix_first=False).bits]
    assert all([sorted(row) for row in bits] == counts for bits in drawn)
    assert len({row[0] for bits in drawn for row in bits}) > 1, "the first window is drawn too"


def test_a_token_search_scores_each_token_on_its_own() -> None:
    method = WindowQuant(**{**GIVEN, **TOKEN})
    assert method.window_size == 1 and "window_size=1" in method.described()
    reply, cache = ask(video_inputs(), **TOKEN)
    single, other = ask(video_inputs(), granularity="token", window_size=1)
    assert reply.plan.bits == single.plan.bits and torch.equal(cache.stats.scores[0], other.stats.scores[0])
    assert reply.plan.windows == len(cache.stats.scores[0]) == reply.visual_tokens == 33
    assert reply.plan.window_size == 1 and reply.search_s > 0
    # INT4 and INT2 with a scale and an offset for the 8 channels of a token in a head
    assert reply.average_bits == pytest.approx(reply.plan.average_bits(True, "token", KVShape(2, 8)))


SHAPES = {"grouped 3:1": (6, 2, 8), "grouped 7:1": (7, 1, 8), "one head each": (4, 4, 16)}
REQUESTS = {
    "alone": lambda: video_inputs(frames=16),
    "left padding": lambda: batch_inputs([video_ids(8, 3, 12), video_ids(8, 2, 5, seed=4)], 8),
    "fewer windows": lambda: batch_inputs([video_ids(4, 3, 6) + video_ids(4, 1, 3), video_ids(4, 2, 20, seed=4)], 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("request_kind", REQUESTS)
@pytest.mark.parametrize("options", [{}, {"v_widths": (4, 4, 2), "granularity": "token"}], ids=["paper", "tokens"])
def test_windows_in_place_generate_the_same(shape: str, request_kind: str, options) -> None:
    """The question's tokens (several queries at once), then single ones; float32 storage."""
    model, inputs = model_of(*SHAPES[shape]), REQUESTS[request_kind]()
    found = []
    for reorder in (True, False):
        method = WindowQuant(**{**GIVEN, **options}, kv_dtype="model", reorder=reorder)
        with method.bind(model) as bound:
            cache = bound.new_cache(inputs)
            out = model.generate(
                **inputs,
                **{bound.cache_keyword: cache},
                max_new_tokens=8,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            more = torch.tensor([words(5)] * len(inputs["input_ids"]))
            mask = torch.cat([inputs["attention_mask"], torch.ones(len(more), 12, dtype=torch.int64)], 1)
            with torch.no_grad():
                last = model(input_ids=more, attention_mask=mask, **{bound.cache_keyword: cache}).logits
        found.append((out.sequences, torch.stack(out.logits, 1), last, cache))
    (tokens, logits, last, together), (tokens_apart, logits_apart, last_apart, apart) = found
    assert torch.equal(tokens, tokens_apart)
    torch.testing.assert_close(logits_apart, logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(last_apart, last, atol=2e-5, rtol=1e-5)
    assert apart.stats.plan.bits == together.stats.plan.bits
    segments = [sum(len(layer.stored.segments) for layer in cache.layers) for cache in (together, apart)]
    assert segments[1] > segments[0], "or the windows are not where they were"
    assert apart.nbytes().codes == together.nbytes().codes and apart.nbytes().scale_zero == together.nbytes().scale_zero


def test_k_and_v_are_stored_in_their_own_bits() -> None:
    reply, cache = ask(video_inputs(frames=24), widths=(16, 8, 4, 2), v_widths=(16, 4, 2, 2))
    pair = {16: 16, 8: 4, 4: 2, 2: 2}
    assert {bits for row in reply.plan.bits for bits in row} == set(pair)
    assert reply.plan.v_bits == tuple(tuple(pair[bits] for bits in row) for row in reply.plan.bits)
    for layer, row in zip(cache.layers, reply.plan.bits, strict=True):
        for segment in layer.stored.segments:
            assert {row[w] for w in segment.windows} == {segment.k.bits} and segment.v.bits == pair[segment.k.bits]
    tokens = {bits: 4 * sum(r.count(bits) for r in reply.plan.bits + reply.plan.v_bits) for bits in (8, 4, 2)}
    assert {b: reply.bits[b] for b in tokens} == pytest.approx({b: n / (2 * 2 * 97) for b, n in tokens.items()})
    assert sum(reply.bits.values()) == pytest.approx(1)
    # 97 visual tokens, the last of which is in no window and stays in 16 bit
    assert reply.average_bits == pytest.approx((96 * reply.plan.average_bits() + 16) / 97)


@pytest.mark.parametrize("options", [{}, {"search": "random"}, {"v_widths": (16, 2, 2)}, {"widths": (16, 8, 4, 2)}])
def test_alpha_is_chosen_for_the_target(options) -> None:
    """Oracle: the plans of many fixed alphas."""
    bits = sorted({planned(alpha=10 ** (step / 10), **options).average_bits() for step in range(-10, 31)})
    assert len(bits) > 5
    for target in (bits[1], bits[2] + 1e-3, 16.0):
        plan = planned(target_bits=target, **options)
        assert max(b for b in bits if b <= target) <= plan.average_bits() <= target
        assert planned(alpha=plan.alpha, **options).bits == plan.bits
        assert f"alpha={plan.alpha!r}" in plan.made_by and f"target_bits={target}" in plan.made_by


def test_the_voted_plan_of_a_batch_meets_the_target() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.rand(n, generator=generator) for n in (30, 40, 35)]
    bits = sorted({planned(*rows, alpha=10 ** (step / 10)).average_bits() for step in range(-10, 31)})
    for target in bits[1:4]:
        assert planned(*rows, target_bits=target).average_bits() == pytest.approx(target)


@pytest.mark.parametrize("granularity", ["window_channel", "token", "channel", "head", "tensor"])
def test_the_target_counts_what_the_cache_will_hold(granularity: str) -> None:
    """Bits held per element of the visual tokens, measured; of 97 tokens the last is in no window."""
    inputs, kv = video_inputs(frames=24), kv_shape(model_of().config.text_config)
    wide = ask(inputs, granularity=granularity, alpha=3.0)[0]
    target = wide.plan.average_bits(True, granularity, kv)
    assert wide.average_bits == pytest.approx((96 * target + 16) / 97)
    reply, held = ask(inputs, granularity=granularity, target_bits=target)
    assert reply.average_bits == pytest.approx(wide.average_bits)
    assert held.stats.plan.alpha == reply.plan.alpha is not None


def test_a_target_that_no_alpha_reaches_is_told_with_what_can_be_reached() -> None:
    with pytest.raises(UserError, match=r"target_bits is 2, but alpha reaches \d+\.?\d* to \d+\.?\d* bits"):
        ask(video_inputs(frames=24), target_bits=2.0)


def test_a_target_asks_nothing_of_a_request_without_windows() -> None:
    ids = torch.tensor([words(9)])
    with pytest.warns(UserWarning, match="no visual tokens"):
        reply, _ = ask({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, target_bits=2.0)
    assert reply.plan.windows == 0 and reply.plan.alpha == 2.0


def test_records_tell_the_chosen_alphas() -> None:
    model = model_of()
    replies = [ask(video_inputs(frames=24, seed=seed), target_bits=12.3)[0] for seed in (0, 1, 2)]
    alphas = sorted(reply.plan.alpha for reply in replies)
    found = measure(replies, bytes_per_token(model.config))["alpha"]
    assert found["median"] == alphas[1] and alphas[0] <= found["q25"] <= found["q75"] <= alphas[2]
    with get_method("uniform_int2").bind(model) as bound:
        other = answer(bound, video_inputs(), "context", 2)[0]
    assert measure([other], bytes_per_token(model.config))["alpha"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "tokens"}, "search is 'tokens'; use one of window, random, token"),
        ({"search": "token"}, "granularity 'window_channel'; set granularity to token"),
        ({"fix_first": "yes"}, "fix_first is 'yes'; give true or false"),
        ({"reorder": 1}, "reorder is 1; give true or false"),
        (
            {"reorder": False, "granularity": "tensor"},
            "granularity 'tensor' has groups across them; set granularity to",
        ),
        ({"seed": 0.5}, "seed is 0.5; give a whole number"),
        ({"seed": True}, "seed is True; give a whole number"),
        ({"widths": (16, 4)}, r"widths is \[16, 4\]; give three or four of 16, 8, 4, 2, 1"),
        ({"widths": "16,4,2"}, "widths is '16,4,2'; give a list of whole numbers"),
        ({"widths": (16, 4.0, 2)}, "widths is .*; give a list of whole numbers"),
        ({"widths": 16}, "widths is 16; give a list of whole numbers"),
        ({"v_widths": (16, 4)}, r"v_widths is \[16, 4\]; give one bit-width out of"),
        ({"target_bits": 0}, "target_bits is 0; give a number of bits above 0 and up to 16"),
        ({"target_bits": "low"}, "target_bits is 'low'; give a number"),
        (
            {"target_bits": 4.0, "sensitivity": "online"},
            "target_bits needs every layer's sensitivity before the prefill",
        ),
        ({"sensitivity": None}, "sensitivity is None; give calibrated, online, a calibration file"),
        ({"sensitivity": ("high", "low")}, "sensitivity is .*'high'.*; give calibrated"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(options, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        WindowQuant(**options)
    assert len(re.findall(r"[.!?](?:\s|$)", str(error.value))) == 1, "one sentence"


def test_the_random_plan_stays_random() -> None:
    with pytest.raises(UserError, match="search of random_plan is 'window'"):
        get_method("random_plan", search="window")


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ([], {}),
        (["target_bits=4.5", "fix_first=false"], {"target_bits": 4.5, "fix_first": False}),
        (["search=token", "granularity=token"], TOKEN),
        (["search=random", "seed=4"], {"search": "random", "seed": 4}),
        (
            ["widths=[16,8,4,2]", "v_widths=[16,4,4,2]", "reorder=false"],
            {"widths": (16, 8, 4, 2), "v_widths": (16, 4, 4, 2), "reorder": False},
        ),
        (["sensitivity=[0.5,0.6]"], {"sensitivity": (0.5, 0.6)}),
    ],
)
def test_hydra_sets_what_the_constructor_takes(overrides: list[str], options) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        settings = from_config(compose("run", overrides=[f"method.{override}" for override in overrides]))
    assert build_method(settings.method, settings.params) == WindowQuant(**options)

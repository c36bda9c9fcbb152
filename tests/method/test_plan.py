"""The plan a request gets is the one the paper's formulas give for its embeddings."""

import math

import pytest
import torch

from tests.vlm import VIDEO, batch_inputs, tiny_model, video_ids, video_inputs
from windowquant.method import get_method
from windowquant.models import cache_keyword
from windowquant.protocols import answer

SENSITIVITY = (0.3, 0.75)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def expected_plan(visual: list, text: list, size: int, alpha: float, sensitivity) -> list[list[int]]:
    """Algorithm 1 by plain loops in double precision, scores scaled to [0, 1] within the request."""
    scores = []
    for start in range(0, len(visual) - size + 1, size):
        pairs = [cosine(t, w) for t in text for w in visual[start : start + size]]
        scores.append(sum(pairs) / len(pairs))
    low, high = min(scores), max(scores)
    scores = [(s - low) / (high - low) for s in scores]
    plan = []
    for s in sensitivity:
        t_low = (math.exp(alpha * s) - 1) / (math.exp(alpha) - 1)
        t_high = (math.exp(-alpha * s) - 1) / (math.exp(-alpha) - 1)
        plan.append([16 if score > t_high else 2 if score < t_low else 4 for score in scores])
        plan[-1][0] = 16
    return plan


def embeddings(model, inputs) -> list[tuple[list, list]]:
    """(visual, text) of every row, from the model's own modules."""
    rows = []
    with get_method("fp16").bind(model) as bound:
        for row in range(len(inputs["input_ids"])):
            alone = {key: value[row : row + 1] for key, value in inputs.items()}
            ids, on = alone["input_ids"][0], alone["attention_mask"][0].bool()
            text = model.get_input_embeddings()(ids[on & (ids != VIDEO)])
            rows.append((bound.visual_features(alone).tokens.double().tolist(), text.double().tolist()))
    return rows


@pytest.mark.parametrize(("size", "alpha"), [(8, 2.0), (4, 2.0), (5, 0.5), (2, 6.0)])
@pytest.mark.parametrize("protocol", ["context", "paper", "cached"])
def test_the_plan_is_the_papers(size: int, alpha: float, protocol) -> None:
    model, inputs = tiny_model(), video_inputs()
    ((visual, text),) = embeddings(model, inputs)
    with get_method("windowquant", window_size=size, alpha=alpha, sensitivity=SENSITIVITY).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 2)
    want = expected_plan(visual, text, size, alpha, SENSITIVITY)
    assert [list(row) for row in reply.plan.bits] == want
    assert len({width for row in want for width in row}) > 1, "a plan with one width would show nothing"
    assert "windowquant(" in reply.plan.made_by and f"alpha={alpha}" in reply.plan.made_by
    shares = {w: sum(row.count(w) for row in want) * size / (33 * 2) for w in (16, 4, 2)}
    shares[16] += 1 - sum(shares.values())
    assert reply.bits == pytest.approx({w: share for w, share in shares.items() if share})
    assert session.cache.stats.sensitivity == pytest.approx(SENSITIVITY)


def test_a_batch_takes_the_vote_of_its_requests() -> None:
    model = tiny_model()
    inputs = batch_inputs([video_ids(8, 3, 12), video_ids(8, 2, 5, seed=4), video_ids(8, 1, 9, seed=8)], 8)
    plans = [expected_plan(v, t, 8, 2.0, SENSITIVITY) for v, t in embeddings(model, inputs)]
    want = []
    for layer in range(2):
        votes = [[plan[layer][w] for plan in plans] for w in range(4)]
        want.append(tuple(max(vote, key=lambda width, vote=vote: (vote.count(width), width)) for vote in votes))
    with get_method("windowquant", window_size=8, sensitivity=SENSITIVITY).bind(model) as bound:
        cache = bound.new_cache(inputs)
        model.generate(**inputs, **{cache_keyword(model): cache}, max_new_tokens=2, do_sample=False)
        assert cache.stats.plan.bits == tuple(want)
        beams = bound.new_cache(inputs)
        model.generate(**inputs, **{cache_keyword(model): beams}, max_new_tokens=2, num_beams=3, do_sample=False)
        assert beams.stats.plan.bits == tuple(want)


def test_a_random_plan_has_the_same_counts_on_other_windows() -> None:
    model, inputs = tiny_model(), video_inputs(frames=24)
    options = {"window_size": 4, "sensitivity": SENSITIVITY}

    def plan(name: str, **more) -> tuple[tuple[int, ...], ...]:
        with get_method(name, **options, **more).bind(model) as bound:
            return answer(bound, inputs, "context", 1)[0].plan.bits

    own, drawn = plan("windowquant"), [plan("random_plan", seed=seed) for seed in range(4)]
    for bits in drawn:
        assert [sorted(row) for row in bits] == [sorted(row) for row in own]
        assert all(row[0] == 16 for row in bits)
        assert bits != own
    assert len(set(drawn)) == 4
    assert plan("random_plan", seed=2) == drawn[2]
    assert any(a != b for a, b in zip(*drawn[0], strict=True)), "layers are drawn apart"


def test_online_sensitivity_is_measured_on_the_request_itself() -> None:
    model, inputs = tiny_model(), video_inputs()
    hidden: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(model.model.language_model.layers):
        layer.input_layernorm.register_forward_pre_hook(lambda m, a, i=index: hidden.setdefault(i, []).append(a[0]))
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda m, a, i=index: hidden.setdefault(i, []).append(a[0])
        )
    with torch.no_grad():
        model(**inputs)
    want = [
        sum(cosine(a, b) for a, b in zip(before[0].tolist(), after[0].tolist(), strict=True)) / before.shape[1]
        for before, after in hidden.values()
    ]
    with get_method("windowquant", window_size=8, sensitivity="online").bind(model) as bound:
        reply, session = answer(bound, inputs, "paper", 3)
        assert session.cache.stats.sensitivity == pytest.approx(want, abs=1e-5)
        assert session.cache.packed
    ((visual, text),) = embeddings(model, inputs)
    assert [list(row) for row in reply.plan.bits] == expected_plan(visual, text, 8, 2.0, want)


def test_online_leaves_no_full_precision_copy_in_any_protocol() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("windowquant", window_size=8, sensitivity="online").bind(model) as bound:
        for protocol in ("context", "paper", "cached"):
            _, session = answer(bound, inputs, protocol, 3)
            assert all(layer.keys is None and layer.stored is not None for layer in session.cache.layers)

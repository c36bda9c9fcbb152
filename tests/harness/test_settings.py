"""From composed configurations to settings: defaults, identity, and sentences about what is wrong."""

import math
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from windowquant.errors import UserError
from windowquant.harness.command import CONF
from windowquant.harness.methods import build_method
from windowquant.harness.settings import RunSettings, digest, from_config, resolve_device
from windowquant.method import get_method, method_names


def composed(*overrides: str) -> RunSettings:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return from_config(compose("run", overrides=list(overrides)))


def test_defaults_are_the_papers() -> None:
    settings = composed()
    assert (settings.method, settings.task, settings.protocol) == ("windowquant", "nextqa", "context")
    assert settings.params["alpha"] == 2.0
    assert settings.params["window_size"] == 32
    assert settings.limit is None
    assert settings.model.stand_in


@pytest.mark.parametrize("path", sorted((CONF / "method").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_method_configuration_names_every_hyper_parameter(path: Path) -> None:
    settings = composed(f"method={path.stem}")
    known = {field.name for field in fields(get_method(settings.method))}
    assert set(settings.params) == known  # so that each can be overridden without a plus sign
    if path.stem == settings.method:
        deviating = {"q_group_size": 32} if path.stem == "hf_hqq" else {}  # its file says why
        assert build_method(settings.method, settings.params) == get_method(settings.method, **deviating)


def test_the_window_size_is_the_models_unless_the_method_has_its_own() -> None:
    assert composed("model.window_size=16").params["window_size"] == 16
    assert composed("model.window_size=16", "method.window_size=8").params["window_size"] == 8
    asked = composed("model.window_size=16", "method=fp16")
    assert asdict(build_method("fp16", asked.params)) == asdict(build_method("fp16", asked.reference().params))


def test_every_method_has_a_configuration() -> None:
    assert [name for name in method_names() if not (CONF / "method" / f"{name}.yaml").is_file()] == []


def test_a_random_plan_is_drawn_from_the_runs_seed() -> None:
    assert composed("method=random_plan", "seed=3").params["seed"] == 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["limit=0"], "limit is 0: give a whole number of at least 1"),
        (["limit=-3"], "limit is -3"),
        (["limit=0.5"], "limit is 0.5"),
        (["limit=all"], "limit is all"),
        (["task.max_new_tokens=0"], "max_new_tokens is 0"),
        (["fidelity_limit=0"], "fidelity_limit is 0"),
        (["model.frames=0"], "model.frames is 0"),
        (["protocol.name=guess"], "Unknown protocol 'guess': the known ones are context, paper, cached"),
        (["data=local"], "data.root is not set: add data.root=<value>"),
        (["+model.colour=red"], "model has no setting 'colour': it has name, pretrained"),
    ],
)
def test_a_wrong_value_is_told_by_field(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace(".", r"\.")) as caught:
        composed(*overrides)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="device is 'abacus'"):
        resolve_device("abacus")


def test_identity_is_what_decides_the_numbers(make_settings: Callable[..., RunSettings], tmp_path: Path) -> None:
    settings = make_settings()
    same = replace(settings, output=str(tmp_path), force=True, wandb={"mode": "offline", "project": "p"})
    assert settings.identity() == same.identity()
    for name, value in {
        "limit": 3,
        "seed": 1,
        "protocol": "paper",
        "max_new_tokens": 5,
        "fidelity_limit": 1,
        "params": {"window_size": 4},
        "task": "egoschema",
        "model": replace(settings.model, frames=4),
    }.items():
        assert replace(settings, **{name: value}).identity() != settings.identity(), name


def test_digest_ignores_the_order_of_keys_only() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1}) != digest({"a": 1, "b": [2, 1]})


def test_the_reference_is_fp16_on_the_same_inputs(make_settings: Callable[..., RunSettings]) -> None:
    settings = make_settings(method="random_plan", params={"seed": 4}, seed=4, protocol="paper", force=True)
    reference = settings.reference()
    assert (reference.method, reference.params, reference.seed, reference.force) == (
        "fp16",
        {"window_size": 32},
        0,
        False,
    )
    kept = {
        name: value for name, value in asdict(settings).items() if name not in ("method", "params", "seed", "force")
    }
    assert {name: asdict(reference)[name] for name in kept} == kept


@pytest.mark.parametrize(
    ("method", "params", "sentence"),
    [
        ("windowquant", {"alpha": math.nan}, "alpha"),
        ("windowquant", {"alpha": math.inf}, "alpha"),
        ("windowquant", {"alpha": "often"}, "method.alpha is 'often': give a number"),
        ("windowquant", {"alpha": True}, "method.alpha is True: give a number"),
        ("windowquant", {"window_size": 1.5}, "method.window_size is 1.5: give a whole number"),
        ("windowquant", {"window_size": "many"}, "method.window_size is 'many': give a whole number"),
        ("windowquant", {"window_size": 0}, "window_size is 0"),
        ("windowquant", {"colour": 1}, "no hyper-parameter 'colour'"),
        ("fp61", {}, "Unknown method 'fp61'.*fp16.*windowquant"),
    ],
)
def test_a_wrong_hyper_parameter_is_told_by_name(method: str, params: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_method(method, params)


def test_whole_numbers_do_for_fractions() -> None:
    assert build_method("windowquant", {"alpha": 1}).alpha == 1

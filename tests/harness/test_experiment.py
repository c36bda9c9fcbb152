"""An experiment's cells: every task under every protocol with every method, FP16 first."""

import pytest
from hydra import compose, initialize_config_dir

from windowquant.errors import UserError
from windowquant.harness.command import CONF
from windowquant.harness.experiment import from_config, plan


@pytest.fixture
def cells(tmp_path):
    def planned(*overrides: str):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("table", [f"output={tmp_path}", *overrides])
            return plan(from_config(cfg), cfg)

    return planned


def test_every_protocol_is_planned_with_fp16_first(cells):
    found = cells("experiment=protocols", "experiment.tasks=[nextqa,describe]")
    assert [(c.task, c.protocol, c.method) for c in found] == [
        (task, protocol, method)
        for task in ("nextqa", "describe")
        for protocol in ("paper", "cached", "context")
        for method in ("fp16", "no_video")
    ]


def test_group_shapes_are_settings_of_one_method(cells):
    found = cells("experiment=granularity", "experiment.tasks=[nextqa]")
    uniform = [(c.params["bits_per_code"], c.params["granularity"]) for c in found if c.method == "uniform"]
    assert uniform == [(1, "window_channel"), (2, "token")]


def test_seeds_multiply_a_method(cells):
    found = cells("experiment=table1", "experiment.tasks=[nextqa]", "experiment.models=first")
    assert [c.seed for c in found if c.method == "random_plan"] == [0, 1, 2, 3, 4]
    assert found[0].method == "fp16" and len(found) == 12


def test_limits_are_the_scales(cells):
    found = cells("experiment=protocols", "scale.limits.describe=3")
    assert {c.limit for c in found if c.task == "describe"} == {3}


def test_models_are_the_scales_first_all_or_named(cells):
    words = ("experiment=protocols", "experiment.tasks=[nextqa]", "+scale.models.llava_onevision_7b=/folder")
    first = ["mini_llava_onevision"]
    every = [*first, "mini_qwen2_vl", "mini_internvl", "llava_onevision_7b"]

    def names(*more: str) -> list[str]:
        return list(dict.fromkeys(cell.model.name for cell in cells(*words, *more)))

    assert names() == first
    assert names("experiment.models=all") == every
    assert names("experiment.models=[llava_onevision_7b]") == every[-1:]
    assert cells(*words, "experiment.models=all")[-1].model.pretrained == "/folder"
    with pytest.raises(UserError, match=r"experiment\.models has 'other': use all, first, or a list"):
        names("experiment.models=other")

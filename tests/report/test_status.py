"""What every method is called in a table: official, variant, control, or the paper's own."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.records import make_record
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.report.rows import build_rows

CONTROLS = {"dynamic", "fp16", "fewer_frames", "no_video", "random_plan", "uniform", "uniform_int2", "uniform_int4"}
OFFICIAL = {"kivi", "skvq", "hf_quanto", "hf_hqq", "hf_fp8", "smoothquant_static", "smoothquant_token"}
FILES = sorted((Path(__file__).parents[2] / "conf" / "method").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_configured_method_has_the_status_that_the_documentation_gives_it(path: Path) -> None:
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    params = {name: value for name, value in values.items() if "${" not in str(value)}
    status = get_method(**params).status
    pages = (Path(__file__).parents[2] / "docs" / "methods.md").read_text().splitlines()
    (line,) = [line for line in pages if line.startswith("|") and f"`{path.stem}`" in line.split("|")[1]]
    assert status in line.split("|")[2]


def test_status_by_method_and_hyper_parameters() -> None:
    rows = build_rows(
        (make_record(method=name, params=params), Path(f"{name}.json"))
        for name, params in [
            *((name, {}) for name in sorted(CONTROLS | OFFICIAL | {"windowquant", "rtn_int2", "token_level"})),
            ("skvq", {"clips": "searched"}),
        ]
    )
    found = {(row["method"], *row["params"]): row["status"] for row in rows}
    assert {name[0] for name, status in found.items() if status == "control"} == CONTROLS
    assert {name[0] for name, status in found.items() if status == "official"} == OFFICIAL
    assert found["windowquant",] == "paper"
    assert found["rtn_int2",] == found["token_level",] == found["skvq", "clips"] == "variant"


def test_a_record_of_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="Unknown method 'alchemy'"):
        build_rows([(make_record(method="alchemy"), Path("alchemy.json"))])

"""Benchmark configurations: what is accepted, and what each refusal says."""

from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("yaml")

from rewy.bench.config import load
from rewy.bench.harness import plan

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
TEXT = """\
title: small
device: cpu
dtype: float32
levels: [backward, autograd]
operators: [delta_rule, kda]
contestants: [rewy, rewy-conventional]
baseline: rewy-conventional
shapes:
  - {B: 2, T: 96, H: 1, K: 16, V: 16}
  - lengths: [40, 30]
    H: 1
    HV: 2
    K: 16
    V: 16
    operators: [kda]
timing:
  rounds: 3
  seconds: 0.01
"""


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load(path)
    return str(caught.value).replace(str(path), "c.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_load_and_plan(path: Path) -> None:
    config = load(path)
    points = plan(config)
    assert len({p.key for p in points}) == len(points) > 0
    assert {config.baseline, "rewy"} <= {c for p in points for c in p.contestants}


def test_plan_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    assert [p.key for p in plan(load(path))] == [
        ("backward", "delta_rule", "2×96 H1 K16"),
        ("autograd", "delta_rule", "2×96 H1 K16"),
        ("backward", "kda", "2×96 H1 K16"),
        ("autograd", "kda", "2×96 H1 K16"),
        ("backward", "kda", "2 packed, 70 H1/2 K16"),
        ("autograd", "kda", "2 packed, 70 H1/2 K16"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  rounds: 3", "  round: 3", "c.yaml:17: timing.round: unknown key; allowed: warmup, rounds, seconds, lead"),
        ("  rounds: 3", "  lead: 2", "c.yaml:17: timing.lead: Input should be a valid boolean, got 2"),
        ("dtype: float32", "dtype: float32\ntypo: 1", "c.yaml:4: typo: unknown key; allowed: title, device,"),
        ("    HV: 2", "    VH: 2", "c.yaml:12: shapes.1.VH: unknown key; allowed: B, T, lengths, H, HV, K, V,"),
        ("device: cpu", "device: tpu", "c.yaml:2: device: Input should be 'cpu', 'cuda' or 'npu', got 'tpu'"),
        ("[backward, autograd]", "[forward]", "c.yaml:4: levels.0: Input should be 'backward', 'autograd' or"),
        ("[delta_rule, kda]", "[delta, kda]", "c.yaml:5: operators: unknown delta; allowed: delta_rule, gated_"),
        ("[rewy, rewy-conv", "[rewi, rewy-conv", "c.yaml:6: contestants: unknown rewi; allowed: rewy, rewy-kept"),
        ("[rewy, ", "[rewy, rewy, ", "c.yaml:6: contestants: rewy stands twice; a contestant repeats as NAME#2"),
        ("baseline: rewy-conventional", "baseline: fla", "c.yaml:7: baseline: unknown fla; allowed: rewy, rewy-c"),
        ("    HV: 2", "    HV: 0", "c.yaml:12: shapes.1.HV: Input should be greater than 0, got 0"),
        ("H: 1\n    HV: 2", "H: 2\n    HV: 3", "c.yaml:10: shapes.1: HV must be a multiple of H = 2, got 3"),
        ("T: 96, ", "", "c.yaml:9: shapes.0: give either T or lengths"),
        ("T: 96", "T: many", "c.yaml:9: shapes.0.T: Input should be a valid integer, got 'many'"),
        ("    operators: [kda]", "    operators: [gdn2]", "shapes.1.operators: unknown gdn2; allowed: delta"),
        ("  - lengths: [40, 30]\n    H: 1\n    HV: 2", "  - B: 2\n    T: 96\n    H: 1", "shapes.1: 2×96 H1 K16 stands"),
        ("title: small\n", "", "c.yaml:1: title: missing"),
        ("dtype: float32", "device: cuda", "c.yaml:3: device: stands twice"),
        ("title: small", "title: [", "not YAML"),
        ("title: small", "? [title]\n: small", "c.yaml:1: not YAML: found unhashable key"),
        ("title: small", "title: &a [*a]", "an alias stands inside its own anchor"),
        ("[delta_rule, kda]", "[]", "c.yaml:5: operators: Tuple should have at least 1 item"),
        ("    operators: [kda]", "    operators: []", "c.yaml:15: shapes.1.operators: Tuple should have at least 1 i"),
        ("    operators: [kda]", "    contestants: []", "c.yaml:15: shapes.1.contestants: Tuple should have at le"),
        ("[40, 30]", "[]", "c.yaml:10: shapes.1.lengths: Tuple should have at least 1 item"),
        ("  seconds: 0.01", "  seconds: .inf", "c.yaml:18: timing.seconds: Input should be a finite number, got inf"),
        ("[backward, autograd]", "[model]", "level model needs a section model"),
    ],
)  # fmt: skip
def test_refusals_name_line_and_what_is_allowed(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    assert message in refusal(tmp_path, TEXT.replace(old, new, 1))


def test_a_lead_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    assert load(path).timing.lead is True
    path.write_text(TEXT + "  lead: false\n")
    assert load(path).timing.lead is False


def test_not_a_mapping(tmp_path: Path) -> None:
    assert "c.yaml:1: must be a mapping with the keys title" in refusal(tmp_path, "- 1\n")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.yaml"):
        load(tmp_path / "none.yaml")

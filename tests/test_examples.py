"""The example trains, its three backwards agree, and bad arguments are refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "char_lm.py"
SMALL = ["--dim", "16", "--heads", "2", "--layers", "1", "--context", "24", "--batch", "2", "--steps", "4"]


@pytest.fixture(scope="module")
def char_lm():
    spec = importlib.util.spec_from_file_location("char_lm", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("operator", ["delta_rule", "gated_delta_rule", "kda", "gdn2"])
def test_backwards_train_alike(char_lm, operator, tmp_path, capsys):
    options = ["--text", str(PATH), "--compare", "--dtype", "float64", "--out", str(tmp_path)]
    char_lm.main([*options, "--operator", operator, *SMALL])
    printed = capsys.readouterr().out
    gaps = re.findall(r"gradients apart by (\S+)", printed)
    assert gaps and all(float(gap) < 1e-13 for gap in gaps)
    differences = re.findall(r"largest difference (\w+ - \w+): (\S+)", printed)
    assert len(differences) == 3
    assert all(float(difference) < 1e-12 for _, difference in differences)
    assert (tmp_path / f"char_lm-{operator}-float64.png").stat().st_size > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_falls(char_lm, dtype, capsys):
    options = ["--text", str(PATH), "--dtype", dtype, "--lr", "1e-2"]
    char_lm.main([*options, *SMALL[:-1], "30"])
    losses = [float(loss) for loss in re.findall(r"step\s+\d+\s+loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/nowhere"], "--text must be a file, got /nowhere"),
        (["--text", str(PATH), "--steps", "0"], "--steps must be at least 1, got 0"),
        (
            ["--text", str(PATH), "--dim", "30", "--heads", "4"],
            "--dim must be a multiple of --heads = 4, got 30",
        ),
        (["--text", str(PATH), "--operator", "softmax"], "invalid choice: 'softmax'"),
    ],
)
def test_bad_arguments_are_refused(char_lm, options, message, capsys):
    with pytest.raises(SystemExit):
        char_lm.main(options)
    assert message in capsys.readouterr().err


def test_short_text_is_refused(char_lm, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("delta " * 20)
    with pytest.raises(SystemExit, match="at least 20 windows"):
        char_lm.main(["--text", str(text)])

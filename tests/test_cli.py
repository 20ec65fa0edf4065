"""The command line as a user meets it: output, exit status, what stands in the folder afterwards."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rewy.testing
from rewy import dispatch
from rewy.cli import app
from rewy.testing import Row

runner = CliRunner()

TEXT = """\
title: small
device: cpu
dtype: float32
levels: [autograd]
operators: [kda]
contestants: [rewy, rewy-conventional, fla]
baseline: rewy-conventional
shapes:
  - {T: 100, H: 1, K: 16, V: 16}
timing: {warmup: 1, rounds: 2, seconds: 0.01}
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with a configuration in it."""
    pytest.importorskip("pydantic")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    from rewy.bench import harness

    monkeypatch.setattr(
        harness, "ceilings", lambda clock, dtype: {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11}
    )
    (tmp_path / "small.yaml").write_text(TEXT)
    return tmp_path


def test_importing_rewy_needs_none_of_this_and_bench_says_what_it_needs() -> None:
    code = """
import sys
import rewy
print(sorted({"typer", "rich", "pydantic", "yaml", "matplotlib"} & sys.modules.keys()))
sys.modules["yaml"] = None  # as if it were not installed
from rewy.cli import main
sys.argv = ["rewy", "bench", "some.yaml"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert (done.returncode, done.stderr) == (
        2,
        "error: this command needs yaml; pip install 'rewy[bench]'\n",
    )


def test_module_and_script_are_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rewy", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in done.stdout for name in ("info", "verify", "bench", "join", "report", "compare"))


def test_info_names_every_backend() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    for name, reason in dispatch.backends().items():
        line = next(line for line in result.output.splitlines() if line.startswith(f"backend {name}"))
        assert line.endswith("  usable" if reason is None else f"not usable: {reason}")


def rows(ok: bool) -> list[Row]:
    return [
        Row("kda", "a tail", "o", 1e-7, 1e-6, True),
        Row("kda", "a tail", "dk", 2e-6 if not ok else 2e-7, 1e-6, ok),
        Row("gdn2", "one token", "call", float("inf"), 0.0, ok, "" if ok else "RuntimeError: no kernel"),
    ]


@pytest.mark.parametrize("ok", [True, False])
def test_verify_reports_and_exits(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    asked = []
    monkeypatch.setattr(rewy.testing, "verify", lambda *args: asked.append(args) or rows(ok))
    monkeypatch.setenv("COLUMNS", "140")
    result = runner.invoke(app, ["verify", "--device", "cuda:1", "--backend", "cuda", "--full"])
    assert asked == [("cuda:1", "cuda", True)]
    assert result.exit_code == (0 if ok else 1)
    assert ("3 of 3" if ok else "1 of 3") + " within budget" in result.output
    assert ("WRONG" in result.output) != ok
    assert ("RuntimeError: no kernel" in result.output) != ok


def test_verify_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = [Row("kda", name, "call", 0.0, 0.0, True, f"{name} is too wide") for name in ("one", "two")]
    monkeypatch.setattr(rewy.testing, "verify", lambda *_: rows(True) + left_out)
    result = runner.invoke(app, ["verify"])
    assert result.exit_code == 0
    assert "3 of 3 within budget\n2 cases left out, the first because one is too wide\n" in result.output


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_verify_on_an_npu_needs_torch_npu() -> None:
    result = runner.invoke(app, ["verify", "--device", "npu"])
    assert result.exit_code == 2
    assert (
        "'ascend' cannot be verified on npu: torch_npu is not installed (pip install 'rewy[ascend]')"
        in result.output
    )


def test_verify_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dict(list(rewy.testing.verify.__globals__["QUICK"].items())[-1:])
    monkeypatch.setitem(rewy.testing.verify.__globals__, "QUICK", one)
    result = runner.invoke(app, ["verify"])
    assert result.exit_code == 0, result.output
    assert all(title in result.output for title in ("DeltaNet", "GDN", "KDA", "GDN2"))


def test_verify_refuses_an_unusable_backend() -> None:
    result = runner.invoke(app, ["verify", "--backend", "tpu"])
    assert result.exit_code == 2
    assert "error: backend must be one of" in result.output and "'tpu'" in result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--backend", "", "error: backend must be one of"),
        ("--device", "npu:x", "npu:x"),
        ("--device", "tpu", "error: device must be one that torch knows, got 'tpu'"),
        ("--device", "", "error: device must be one that torch knows, got ''"),
    ],
)
def test_verify_refuses_what_is_no_name(option: str, value: str, message: str) -> None:
    result = runner.invoke(app, ["verify", option, value])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.usefixtures("workplace")
def test_files_where_folders_belong_and_the_reverse() -> None:
    Path("file").write_text("")
    for command in (
        ["bench", "small.yaml", "--out", "file"],
        ["bench", "small.yaml", "--out", "file/below"],
        ["bench", "."],
    ):
        result = runner.invoke(app, command)
        assert result.exit_code == 2, result.output
        assert result.output.startswith("error: ") and command[-1] in result.output
    assert runner.invoke(app, ["bench", "small.yaml", "--out", "out"]).exit_code == 0
    for docs in (".", "none.md"):
        result = runner.invoke(app, ["report", "out", "--docs", docs])
        assert result.exit_code == 2 and f"'{docs}'" in result.output


@pytest.mark.usefixtures("workplace")
def test_bench_writes_everything_and_never_twice() -> None:
    result = runner.invoke(app, ["bench", "small.yaml", "--out", "out"])
    assert result.exit_code == 0, result.output
    files = {p.name for p in Path("out").iterdir()}
    assert files == {"results.jsonl", "results.csv", "results.md", "autograd.png"}
    header = json.loads(Path("out/results.jsonl").read_text().splitlines()[0])
    assert header["command"] == "rewy bench small.yaml"
    assert (
        "- fla: absent (everywhere): runs on cuda and npu, not on cpu" in Path("out/results.md").read_text()
    )
    assert "[1/1] autograd · kda · 1×100 H1 K16: rewy " in result.output

    again = runner.invoke(app, ["bench", "small.yaml", "--out", "out"])
    assert again.exit_code == 2
    assert "out/results.jsonl exists; --resume goes on with it" in again.output
    assert runner.invoke(app, ["bench", "small.yaml", "--out", "out", "--resume"]).exit_code == 0


@pytest.mark.usefixtures("workplace")
def test_bench_says_what_an_interruption_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewy.bench.harness import Harness

    def interrupt(self: Harness, point: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Harness, "measure", interrupt)
    result = runner.invoke(app, ["bench", "small.yaml"])
    assert result.exit_code == 130
    folder = next(Path("runs/small").iterdir())
    told = f"interrupted: 0 of 1 points are kept; `rewy bench small.yaml --out {folder} --resume` goes on"
    assert told in result.output


@pytest.mark.usefixtures("workplace")
def test_bench_resumes_the_latest_run() -> None:
    refused = runner.invoke(app, ["bench", "small.yaml", "--resume"])
    assert refused.exit_code == 2 and "nothing under runs/small" in refused.output
    assert runner.invoke(app, ["bench", "small.yaml", "--time-limit", "1000"]).exit_code == 0
    resumed = runner.invoke(app, ["bench", "small.yaml", "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert len(list(Path("runs/small").iterdir())) == 1


def told(result: Any, message: str) -> bool:
    """Whether a command refused its input in one line, without a traceback."""
    return result.exit_code == 2 and result.output.startswith("error: ") and message in result.output


@pytest.fixture
def grid(workplace: Path) -> Path:
    """A configuration of two operators."""
    path = Path("grid.yaml")
    path.write_text(TEXT.replace("[kda]", "[kda, gdn2]").replace(", rewy-conventional, fla]", ", fla]")
                    .replace("baseline: rewy-conventional", "baseline: rewy"))  # fmt: skip
    return path


@pytest.mark.usefixtures("grid")
def test_parts_of_a_grid_are_measured_apart_and_joined() -> None:
    unknown = runner.invoke(app, ["bench", "grid.yaml", "--operator", "kad"])
    assert told(unknown, "--operator: unknown kad; allowed: kda, gdn2")
    dry = runner.invoke(app, ["bench", "grid.yaml", "--operator", "gdn2", "--dry-run"])
    assert {line.split(" · ")[1] for line in dry.output.splitlines()} == {"gdn2"}
    for operator in ("gdn2", "kda"):
        done = runner.invoke(app, ["bench", "grid.yaml", "--operator", operator, "--out", operator])
        assert done.exit_code == 0 and f"[1/1] autograd · {operator} · " in done.output, done.output
    whole = runner.invoke(app, ["join", "whole", "gdn2", "kda"])
    assert whole.exit_code == 0, whole.output
    assert {p.name for p in Path("whole").iterdir()} == {
        "results.jsonl", "results.csv", "results.md", "autograd.png"
    }  # fmt: skip
    rows = [json.loads(line) for line in Path("whole/results.jsonl").read_text().splitlines()[1:]]
    assert [row["operator"] for row in rows] == ["kda"] * 2 + ["gdn2"] * 2
    resumed = runner.invoke(app, ["bench", "grid.yaml", "--out", "whole", "--resume"])
    assert resumed.exit_code == 0 and "[" not in resumed.output


@pytest.mark.usefixtures("grid")
def test_join_refuses_what_is_no_whole() -> None:
    assert runner.invoke(app, ["bench", "grid.yaml", "--operator", "kda", "--out", "kda"]).exit_code == 0
    assert (
        runner.invoke(app, ["bench", "small.yaml", "--time-limit", "1000", "--out", "small"]).exit_code == 0
    )
    header, rows = Path("kda/results.jsonl").read_text().split("\n", 1)
    for name, text in (("cut", f"{header}\n{rows[:-9]}"), ("empty", f"{header}\n")):
        Path(name).mkdir()
        Path(name, "results.jsonl").write_text(text)
    for parts, message in (
        (["kda", "gone"], "cannot read gone: No such file or directory"),
        (["kda", "cut"], "cut/results.jsonl:3: cut off here"),
        (["kda", "kda"], "a point stands in two of the parts"),
        (["kda", "small"], "are of different runs: config: operators was ['kda', 'gdn2'], is ['kda']"),
        (["empty"], "nothing was measured in any of the parts"),
    ):
        assert told(runner.invoke(app, ["join", "whole", *parts]), message), message
    assert not Path("whole").exists()
    before = Path("small/results.jsonl").read_text()
    assert told(runner.invoke(app, ["join", "small", "kda"]), "small/results.jsonl exists")
    assert Path("small/results.jsonl").read_text() == before


@pytest.mark.usefixtures("grid")
def test_a_part_that_stopped_is_resumed_as_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewy.bench.harness import Harness

    def interrupt(self: Harness, point: object) -> list[object]:
        raise KeyboardInterrupt

    seen: set[Path] = set()
    with monkeypatch.context() as patched:
        patched.setattr(Harness, "measure", interrupt)
        for operators in (["kda"], ["gdn2"], []):
            options = [word for operator in operators for word in ("--operator", operator)]
            stopped = runner.invoke(app, ["bench", "grid.yaml", *options])
            assert stopped.exit_code == 130
            (folder,) = {*Path("runs/grid").iterdir()} - seen
            seen.add(folder)
            again = " ".join(["rewy bench grid.yaml", *options, f"--out {folder} --resume"])
            assert f"`{again}` goes on" in stopped.output
    resumed = runner.invoke(app, ["bench", "grid.yaml", "--operator", "kda", "--resume"])
    assert resumed.exit_code == 0 and "[1/1] autograd · kda" in resumed.output
    (filled,) = [p for p in seen if Path(p, "results.md").exists()]
    assert filled.name.endswith("-kda")
    nothing = runner.invoke(app, ["bench", "small.yaml", "--operator", "kda", "--resume"])
    assert told(nothing, "--resume: nothing of kda under runs/small")


@pytest.mark.usefixtures("workplace")
def test_bench_dry_run_measures_nothing() -> None:
    result = runner.invoke(app, ["bench", "small.yaml", "--dry-run"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "autograd · kda · 1×100 H1 K16 · rewy",
        "autograd · kda · 1×100 H1 K16 · rewy-conventional",
        "autograd · kda · 1×100 H1 K16 · fla: runs on cuda and npu, not on cpu",
    ]
    assert not Path("runs").exists()


@pytest.mark.usefixtures("workplace")
def test_bench_refuses_a_bad_file_with_its_line() -> None:
    Path("bad.yaml").write_text(TEXT.replace("warmup", "warmups"))
    result = runner.invoke(app, ["bench", "bad.yaml"])
    assert result.exit_code == 2
    assert (
        "error: bad.yaml:10: timing.warmups: unknown key; allowed: warmup, rounds, seconds" in result.output
    )
    assert "Traceback" not in result.output


@pytest.mark.usefixtures("workplace")
def test_bench_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("cuda.yaml").write_text(TEXT.replace("device: cpu", "device: cuda"))
    result = runner.invoke(app, ["bench", "cuda.yaml"])
    assert (result.exit_code, result.output) == (2, "error: device cuda is not available here\n")
    assert not Path("runs").exists()


@pytest.mark.usefixtures("workplace")
def test_report_and_its_check() -> None:
    assert runner.invoke(app, ["bench", "small.yaml", "--out", "results/small"]).exit_code == 0
    page = "# Page\n<!-- rewy:report small autograd -->\n<!-- /rewy:report -->\n"
    Path("README.md").write_text(page)
    stale = runner.invoke(app, ["report", "results", "--check"])
    assert (stale.exit_code, stale.output) == (1, "out of date: README.md\n")
    assert Path("README.md").read_text() == page
    assert runner.invoke(app, ["report", "results"]).output == "rebuilt: README.md\n"
    assert "| KDA | 1×100 H1 K16 |" in Path("README.md").read_text()
    assert runner.invoke(app, ["report", "results", "--check"]).exit_code == 0
    Path("results/small/results.csv").write_text("")
    assert "results.csv" in runner.invoke(app, ["report", "results", "--check"]).output
    missing = runner.invoke(app, ["report", "results/none"])
    assert missing.exit_code == 2 and "holds no results.jsonl" in missing.output


@pytest.mark.usefixtures("workplace")
def test_compare() -> None:
    for name in ("a", "b"):
        assert runner.invoke(app, ["bench", "small.yaml", "--out", name]).exit_code == 0
    result = runner.invoke(app, ["compare", "a", "b"])
    assert result.exit_code == 0
    assert "| autograd | KDA | 1×100 H1 K16 | rewy |" in result.output
    missing = runner.invoke(app, ["compare", "a", "c"])
    assert missing.exit_code == 2 and "cannot read" in missing.output


def test_committed_tables_match_committed_results() -> None:
    """Documents show what `results/` holds."""
    pytest.importorskip("pydantic")
    pytest.importorskip("matplotlib")
    root = Path(__file__).parents[1]
    documents = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    options = [f"--docs={path}" for path in documents if path.exists()]
    if not list(root.glob("results/**/results.jsonl")):
        pytest.skip("no results are committed")
    result = runner.invoke(app, ["report", str(root / "results"), "--check", *options])
    assert result.exit_code == 0, result.output

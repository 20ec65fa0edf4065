"""scripts/build_ascend.sh names what is missing. The ladder runs it to its end, with the fake CANN."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_ascend.sh"
DEVKIT, COMPILER = "share/info/asc-devkit/version.info", "compiler/version.info"

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="CANN is for Linux")


def refusal(folder: Path, home: str | None, **programs: str) -> str:
    """What it says before it gives up, with these programs, the texts of shell scripts, in its PATH."""
    bin = folder / "bin"
    bin.mkdir()
    for tool in ("bash", "dirname", "sed", "sort"):
        (bin / tool).symlink_to(str(shutil.which(tool)))
    for name, text in programs.items():
        (bin / name).write_text(f"#!{bin}/bash\n{text}\n")
        (bin / name).chmod(0o755)
    environment = {"PATH": str(bin)} | ({} if home is None else {"ASCEND_HOME_PATH": home})
    run = subprocess.run([bin / "bash", SCRIPT], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stderr


def cann(folder: Path, version: str, file: str = DEVKIT) -> str:
    path = folder / "cann" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"Version={version}\ntimestamp=20260101_000000000\n")
    return str(folder / "cann")


def test_no_home(tmp_path: Path) -> None:
    assert "build_ascend.sh: ASCEND_HOME_PATH is not set; source set_env.sh" in refusal(tmp_path, None)


def test_home_is_no_folder(tmp_path: Path) -> None:
    assert "ASCEND_HOME_PATH is /nowhere, which is no folder" in refusal(tmp_path, "/nowhere")


def test_home_without_cann(tmp_path: Path) -> None:
    said = refusal(tmp_path, str(tmp_path))
    assert f"ASCEND_HOME_PATH is {tmp_path}, where no version.info tells of a CANN toolkit" in said


@pytest.mark.parametrize(
    ("version", "file"), [("8.5.0", DEVKIT), ("8.3.RC1", COMPILER), ("9.0.0", DEVKIT), ("7.0.1.5", COMPILER)]
)
def test_cann_too_old(version: str, file: str, tmp_path: Path) -> None:
    home = cann(tmp_path, version, file)
    assert f"the operators need CANN 9.1 or later, {home} has {version}" in refusal(tmp_path, home)


@pytest.mark.parametrize("version", ["9.1.0", "9.1.0.alpha003", "9.10.0", "10.0.0"])
def test_cann_is_new_enough(version: str, tmp_path: Path) -> None:
    assert "cmake is not installed" in refusal(tmp_path, cann(tmp_path, version))


GOOD = "exit 0"


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({"cmake": GOOD}, "python3 is not installed"),
        ({"cmake": GOOD, "python3": "exit 1"}, "python3 does not import torch_npu; pip install '.[ascend]'"),
        (
            {"cmake": GOOD, "python3": "[[ $2 != *rewy* ]]"},
            "python3 does not run rewy; pip install '.[ascend]'",
        ),
        ({"cmake": "exit 1", "python3": GOOD}, "cmake did not configure the operators with CANN 9.1.0"),
        ({"cmake": "[[ $1 != --build ]]", "python3": GOOD}, "CANN 9.1.0 did not compile the operators"),
    ],
    ids=["python", "torch_npu", "rewy", "ASC", "compiler"],
)
def test_missing_program(programs: dict[str, str], said: str, tmp_path: Path) -> None:
    assert f"build_ascend.sh: {said}" in refusal(tmp_path, cann(tmp_path, "9.1.0"), **programs)

"""csrc/launch.asc with its launches written as C++ (emulation/launch.sed): every kernel gets its arguments in order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import gxx
import pytest

HERE = Path(__file__).parent / "launch"
SOURCE = (gxx.CSRC / "launch.asc").read_text()
LAUNCH = ">>>(REWY_STATE_PASS_NAMES, tiling)"
ENTRY = "rewy::StatePass<T, V>(REWY_STATE_PASS_NAMES, tiling)"

pytestmark = [pytest.mark.slow, gxx.needed]


def as_cpp(source: str) -> str:
    command = ["sed", "-E", "-f", gxx.EMULATION / "launch.sed"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def compiled(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "launch.cpp").write_text(as_cpp(source))
    return gxx.compiled(folder / "every", folder / "launch.cpp", HERE / "every.cpp", headers=HERE)


def printed(source: str, folder: Path) -> str:
    run = compiled(source, folder)
    assert run.returncode == 0, run.stderr
    return gxx.output(folder / "every")


def tensors(kernel: str) -> list[str]:
    """As launch.h declares them."""
    header = (gxx.CSRC / "launch.h").read_text().split(f"#define REWY_{kernel}_TENSORS(TYPE)")[1]
    return re.findall(r"TYPE (\w+)", header.split("#define")[0])


def expected() -> str:
    kernels = {
        ("scalar gates", "channel decay", "channel gates"): (tensors("CHUNK_GRADIENT"), 3),
        ("tile 64", "tile 128"): (tensors("STATE_PASS"), 2),
    }
    lines = []
    for dtype in ("bf16", "fp16"):
        for names, (parameters, blocks) in kernels.items():
            places = " ".join(f"{name}={i}" for i, name in enumerate(parameters, 1))
            lines += [f"{name} {dtype} {places} blocks={blocks}" for name in names]
    return "\n".join(lines) + "\n"


def test_nothing_but_launches_is_rewritten() -> None:
    before, after = SOURCE.splitlines(), as_cpp(SOURCE).splitlines()
    changed = [line for line, other in zip(before, after, strict=True) if line != other]
    assert changed == [line for line in before if "<<<" in line] != []
    assert "<<<" not in "".join(after)


def test_every_launch(tmp_path: Path) -> None:
    assert printed(SOURCE, tmp_path) == expected()


SHORT = ", ".join(tensors("STATE_PASS")[1:])
SWAPPED = ", ".join([*tensors("STATE_PASS")[1::-1], *tensors("STATE_PASS")[2:]])


@pytest.mark.parametrize(
    ("there", "wrong", "message"),
    [
        (LAUNCH, f">>>({SHORT}, tiling)", "no match for call|too few arguments"),
        (LAUNCH, ">>>(tiling, REWY_STATE_PASS_NAMES)", "no match for call|cannot convert"),
        (ENTRY, f"rewy::StatePass<T, V>({SHORT}, tiling)", "no matching function|too few arguments"),
        ("REWY_TILES(REWY_STATE_PASS_ENTRIES)", "", "was not declared"),
    ],
    ids=["launch without an argument", "tiling first", "entry without an argument", "no entry"],
)
def test_does_not_compile(there: str, wrong: str, message: str, tmp_path: Path) -> None:
    assert SOURCE.count(there) == 1
    failed = compiled(SOURCE.replace(there, wrong), tmp_path)
    assert failed.returncode != 0
    assert re.search(message, failed.stderr), failed.stderr


@pytest.mark.parametrize(
    ("there", "wrong"),
    [
        (LAUNCH, f">>>({SWAPPED}, tiling)"),
        (ENTRY, f"rewy::StatePass<T, V>({SWAPPED}, tiling)"),
        ("REWY_KERNEL(half, V)", "REWY_KERNEL(bfloat16_t, V)"),
        ("<<<tiling.blocks, 0, stream>>>(REWY_STATE", "<<<1, 0, stream>>>(REWY_STATE"),
    ],
    ids=["launch in another order", "entry in another order", "wrong type", "wrong number of blocks"],
)
def test_is_noticed(there: str, wrong: str, tmp_path: Path) -> None:
    assert SOURCE.count(there) == 1
    assert printed(SOURCE.replace(there, wrong), tmp_path) != expected()

"""Compiling C++ of these tests with g++ and its sanitizers."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EMULATION = HERE / "emulation"
CSRC = HERE.parents[1] / "rewy" / "backends" / "ascend" / "csrc"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

needed = pytest.mark.skipif(
    shutil.which("g++") is None or platform.system() != "Linux", reason="needs g++ on Linux"
)


def build(source: str, folder: Path) -> Path:
    """The program of emulation/`source`."""
    program = folder / Path(source).stem
    run = compiled(program, EMULATION / source)
    assert run.returncode == 0, run.stderr
    return program


def compiled(program: Path, *sources: Path, headers: Path = EMULATION) -> subprocess.CompletedProcess[str]:
    """g++ making a program of sources; what they include is looked for in `headers` first."""
    warnings = ["-Wall", "-Wextra", "-Werror"]
    includes = [f"-I{headers}", f"-I{EMULATION}", f"-I{CSRC}"]
    command = ["g++", "-std=c++20", "-O1", "-g", *warnings, *SANITIZERS, *includes]
    return subprocess.run([*command, *sources, "-o", program, "-lpthread"], stderr=subprocess.PIPE, text=True)


def output(program: Path, *arguments: str) -> str:
    """What it prints; a non-zero exit fails."""
    run = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout

"""Flags dropped from the kernels one by one: the emulation reports what then goes wrong."""

from __future__ import annotations

from pathlib import Path

import gxx
import pytest


def flags(name: str, ids: int = 1) -> list[str]:
    return [f"{name}({i})" for i in range(ids)]


MULTIPLY = flags("MTE1_MTE2") + flags("MTE1_M", 2) + flags("M_FIX", 2)
VECTOR = flags("MTE2_V") + flags("V_MTE2") + flags("V_MTE3")
GRADIENT = (
    MULTIPLY
    + flags("M_MTE1", 2)
    + flags("FIX_M", 2)
    + VECTOR
    + ["V_MTE3(1)"]
    + flags("MTE3_V")
    + flags("MTE2_MTE1", 3)
    + flags("CROSS_CORE", 4)
)
ROW_GATES = ["MTE3_V(1)"]  # gradients of gates with one number a token
PASSES = ["MTE2_V(1)", "V_MTE2(1)"]  # masks of the passes over the pairs
# Waits for what arrives last before it reads any of it: MTE2_MTE1(2) says what MTE2_MTE1(1) says.
CONVENTIONAL = [flag for flag in GRADIENT if flag != "MTE2_MTE1(1)"] + flags("FIX_MTE1")
SUMS = ["M_FIX(2)"]  # q kᵀ and b k kᵀ, which grow over tiles of keys
# In the state passes cube and vector cores take turns, which orders some of what the shared parts' own flags order too;
# those are tried where they matter.
REVERSE = (
    MULTIPLY
    + flags("M_MTE1", 2)
    + VECTOR
    + flags("MTE3_V")
    + flags("MTE2_MTE1")
    + flags("FIX_MTE1")
    + flags("MTE3_MTE2")
    + ["CROSS_CORE(0)", "CROSS_CORE(3)"]
)
# What each kernel cannot do without.
NEEDED = {
    "chunk_gradient": GRADIENT + ROW_GATES,
    "chunk_gradient_shared": GRADIENT + ROW_GATES,
    "chunk_gradient_channel_decay": GRADIENT + ROW_GATES + PASSES,
    "chunk_gradient_channel_gates": GRADIENT + PASSES,
    "chunk_gradient_conventional": CONVENTIONAL + ROW_GATES + SUMS,
    "chunk_gradient_conventional_no_decay": CONVENTIONAL + ROW_GATES,
    "chunk_gradient_conventional_channel_decay": CONVENTIONAL + ROW_GATES + PASSES,
    "chunk_gradient_conventional_channel_gates": CONVENTIONAL + PASSES,
    "state_forward": MULTIPLY
    + VECTOR
    + ["V_MTE3(1)"]
    + flags("MTE2_MTE1")
    + flags("FIX_MTE1")
    + flags("MTE3_MTE2")
    + flags("CROSS_CORE", 4),
    "state_reverse": REVERSE,
    "state_reverse_conventional": REVERSE,
}
REPORTED = ("with no wait between", "that nothing has written")

pytestmark = [pytest.mark.slow, gxx.needed]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gxx.build("kernel_faults.cpp", tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize("kernel", NEEDED)
def test_whole(kernels: Path, kernel: str) -> None:
    assert gxx.output(kernels, kernel) == "no failure\n"


@pytest.mark.parametrize(("kernel", "flag"), [(k, flag) for k, needed in NEEDED.items() for flag in needed])
def test_dropped(kernels: Path, kernel: str, flag: str) -> None:
    found = gxx.output(kernels, kernel, flag)
    assert any(words in found for words in REPORTED), found


def test_every_event_is_tried() -> None:
    source = "".join((gxx.CSRC / name).read_text() for name in ("core.h", "chunk_gradient.h", "state_pass.h"))
    used = {word.split(">")[0] for word in source.split("HardEvent::")[1:]}
    tried = {flag.split("(")[0] for needed in NEEDED.values() for flag in needed}
    assert used == tried - {"CROSS_CORE"}

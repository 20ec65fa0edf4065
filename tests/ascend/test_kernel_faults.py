"""Flags dropped from the kernels one by one: the emulation reports what then goes wrong."""

from __future__ import annotations

from pathlib import Path

import cost_model
import gxx
import pytest


def flags(name: str, ids: int = 1) -> list[str]:
    return [f"{name}({i})" for i in range(ids)]


MULTIPLY = flags("MTE1_MTE2", 2) + flags("MTE1_M", 2) + flags("M_FIX", 2)
VECTOR = flags("MTE2_V") + flags("V_MTE2") + flags("V_MTE3")
GRADIENT = (
    MULTIPLY
    + flags("M_MTE1", 2)
    + flags("FIX_M", 2)
    + VECTOR
    + ["V_MTE3(1)"]
    + flags("MTE3_V")
    + flags("MTE2_MTE1", 6)
    + flags("CROSS_CORE", 4)
)
ROW_GATES = ["MTE3_V(1)"]  # gradients of gates with one number a token
PASSES = ["MTE2_V(1)", "V_MTE2(1)"]  # masks of the passes over the pairs
# Waits for what arrives last before it reads any of it, so that MTE2_MTE1(2) says what MTE2_MTE1(1) says.
CONVENTIONAL = [f for f in GRADIENT if f not in ("MTE2_MTE1(1)", "MTE2_MTE1(4)")] + flags("FIX_MTE1")
SUMS = ["M_FIX(2)"]  # q kᵀ and b k kᵀ, which grow over tiles of keys
# In the state passes cube and vector cores take turns, which orders some of what the shared parts' own flags order too;
# those are tried where they matter.
STATE = ["MTE2_V(1)", "MTE2_V(2)", "V_MTE2(1)", "MTE2_MTE1(0)", "MTE2_MTE1(1)"]
REVERSE = (
    MULTIPLY
    + flags("M_MTE1", 2)
    + VECTOR
    + STATE
    + flags("MTE3_V")
    + flags("FIX_MTE1")
    + flags("MTE3_MTE2")
    + ["CROSS_CORE(0)", "CROSS_CORE(3)"]
)
FORWARD = (
    MULTIPLY
    + VECTOR
    + STATE
    + ["V_MTE3(1)"]
    + flags("FIX_MTE1")
    + flags("MTE3_MTE2")
    + flags("CROSS_CORE", 4)
)
# What each kernel cannot do without.
NEEDED = {
    "chunk_gradient": GRADIENT + ROW_GATES,
    "chunk_gradient_shared": GRADIENT + ROW_GATES,
    "chunk_gradient_channel_decay": GRADIENT + ROW_GATES + PASSES,
    "chunk_gradient_channel_gates": GRADIENT + PASSES,
    "chunk_gradient_large": ["MTE1_MTE2(0)", *flags("MTE2_MTE1", 3)],
    "chunk_gradient_conventional": CONVENTIONAL + ROW_GATES + SUMS,
    "chunk_gradient_conventional_no_decay": CONVENTIONAL + ROW_GATES,
    "chunk_gradient_conventional_channel_decay": CONVENTIONAL + ROW_GATES + PASSES,
    "chunk_gradient_conventional_channel_gates": CONVENTIONAL + PASSES,
    "state_forward": FORWARD,
    "state_forward_v_first": [*FORWARD, "S_V(0)"],
    "state_reverse": REVERSE,
    "state_reverse_conventional": REVERSE,
    "state_forward_by_sequence": FORWARD,
    "state_reverse_by_sequence": REVERSE,
}
REPORTED = ("with no wait between", "that nothing has written")

pytestmark = [pytest.mark.slow, gxx.needed]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gxx.build("kernel_faults.cpp", tmp_path_factory.mktemp("kernel"))


@pytest.mark.parametrize("kernel", NEEDED)
def test_whole(kernels: Path, kernel: str) -> None:
    assert gxx.output(kernels, kernel).startswith("no failure\n")


def test_room(kernels: Path) -> None:
    """The host knows what every kernel takes of the buffers: what it touches, over all sizes."""
    assert gxx.output(kernels, "room").startswith("no failure\n")


# Products that run while what a later chunk multiplies is loaded, of those of a core's four chunks, or of two sequences
# of four. The last chunk has none after it, the first products of a chunk do not wait for its own last loads.
BESIDE_LOADS = {
    "state_forward": (3 / 4, 3 / 4),
    "state_reverse": (3 / 4, 3 / 4),
    "state_reverse_conventional": (3 / 4, 3 / 4),
    "chunk_gradient": (3 / 4, 4 / 5),
    "chunk_gradient_channel_decay": (7 / 10, 4 / 5),  # the last chunk takes more passes than others
    "chunk_gradient_conventional": (3 / 4, 4 / 5),
    "chunk_gradient_large": (0, 1 / 10),  # two chunks do not fit L1
}


@pytest.mark.parametrize("kernel", BESIDE_LOADS)
def test_loads_beside_products(kernels: Path, kernel: str) -> None:
    beside, products = map(int, gxx.output(kernels, kernel).splitlines()[1].split(" of "))
    least, most = BESIDE_LOADS[kernel]
    assert least <= beside / products <= most


@pytest.mark.parametrize(("kernel", "flag"), [(k, flag) for k, needed in NEEDED.items() for flag in needed])
def test_dropped(kernels: Path, kernel: str, flag: str) -> None:
    found = gxx.output(kernels, kernel, flag)
    assert any(words in found for words in REPORTED), found


@pytest.mark.parametrize(
    ("kind", "form"), [(k, form) for k, forms in cost_model.VECTOR.items() for form in forms]
)
def test_vector_work_of_the_model(kernels: Path, kind: str, form: str) -> None:
    assert int(gxx.output(kernels, f"{kind}, {form}").splitlines()[2]) == cost_model.VECTOR[kind][form]


def test_every_event_is_tried() -> None:
    source = "".join((gxx.CSRC / name).read_text() for name in ("core.h", "chunk_gradient.h", "state_pass.h"))
    used = {word.split(">")[0] for word in source.split("HardEvent::")[1:]}
    tried = {flag.split("(")[0] for needed in NEEDED.values() for flag in needed}
    assert used == tried - {"CROSS_CORE"}

"""What the custom operators should cost on an Ascend 950DT: a model from public rates, not a measurement.

python tests/ascend/cost_model.py prints the table of docs/ascend.md: per chunk of 64 tokens and value head, with
K = V = 128 in bf16, on one AI core of 32 with its share of the memory's bandwidth; fixed costs and waits are left out.
"""

from __future__ import annotations

from math import prod

C, K, V = 64, 128, 128
CORES, CLOCK, BANDWIDTH = 32, 1.65e9, 4e12
MULTIPLY_ADDS = 16**3  # a cycle
# Results of the chunk gradient's vector instructions in units of 256 bytes, counted in the emulation; a unit takes a
# cycle at least. Row sums are left out. By gates and form; decays of ordinary strength.
VECTOR = {
    "no decay": {"ReWY": 2446, "conventional": 2446},
    "scalar": {"ReWY": 2446, "conventional": 2411},
    "decay per channel": {"ReWY": 3921, "conventional": 12509},
    "all gates per channel": {"ReWY": 4040, "conventional": 12628},
}

Product = tuple[int, int, int]
FORWARD: list[Product] = [(C, K, V), (C, C, V), (K, C, V)]  # X S, T R, K̃ᵀ U
REVERSE: list[Product] = [
    (C, C, V),
    (C, K, V),
    (C, C, V),
    (K, C, V),
    (K, C, V),
]  # Aᵀ do, K̃ dS, Tᵀ dU, Q̃ᵀ do, Xᵀ dR
SHARED: list[Product] = [(C, V, C), (C, V, K), (C, V, K)]  # do Uᵀ, do Sᵀ, U dS⁺ᵀ
PAIRS: list[Product] = [(C, C, K)] * 4  # M_A k, M_L k, M_Aᵀ q, M_Lᵀ b k
REWY: list[Product] = [(C, V, C), (C, V, K)]  # dR Uᵀ, dR Sᵀ
W: list[Product] = [(C, C, K)]  # T X
CONVENTIONAL: list[Product] = [
    (C, V, K),  # dU Sᵀ
    *[(C, K, C), (C, V, C)],  # dW Xᵀ + dU (w ⊙ v)ᵀ
    *[(C, C, C)] * 2,  # Tᵀ dT Tᵀ
    (C, C, K),  # Tᵀ dW
]
GRAM: list[Product] = [(C, K, C)] * 2  # q kᵀ, b k kᵀ


def cycles(products: list[Product]) -> float:
    return sum(map(prod, products)) / MULTIPLY_ADDS


def own(kind: str, form: str) -> list[Product]:
    """The products of the chunk gradient that the forms do not share, and W."""
    if form == "ReWY":
        return REWY + PAIRS
    # Decay per channel: pairs of blocks of 16 tokens in two passes; those inside are left to the vector cores.
    pairs = {"no decay": PAIRS, "scalar": PAIRS + GRAM}.get(kind, PAIRS * 2)
    return CONVENTIONAL + W + pairs


def traffic(kind: str, conventional: bool) -> dict[str, int]:
    """Bytes that each operator moves. 16-bit operands, fp32 gates, states and what leaves for them."""
    keys, values, scores, state = C * K, C * V, C * C, K * V
    forward = 2 * (2 * keys + scores) + 4 * (values + K) + 4 * (state + values)
    reverse = 2 * (3 * keys + 2 * scores + values) + 4 * K + 4 * (state + values)
    gradient = 2 * (2 * keys + 5 * values + 2 * state) + 2 * (2 * keys + values)
    if "per channel" in kind:
        gradient += 4 * 3 * keys  # G, dG, remaining
    if kind == "all gates per channel":
        gradient += 4 * 2 * (keys + values)  # b, w and their gradients
    w = 0
    if conventional:
        reverse += 4 * values  # dU
        gradient += 2 * (values + keys + scores)  # w ⊙ v, −X, T
        w = 2 * (scores + keys) + (4 + 4 + 2) * keys  # T X in fp32, then rounded
    return {"state_forward": forward, "state_reverse": reverse, "chunk_gradient": gradient, "W": w}


def table() -> str:
    """The backward of each operator in both forms, with the states made again."""
    lines = [
        "| operator | form | multiply-adds | cube µs | vector µs | KiB | memory µs | conventional / ReWY |",
        "|---|---|---|---|---|---|---|---|",
    ]
    operators = {
        "DeltaNet": "no decay",
        "Gated DeltaNet": "scalar",
        "Kimi Delta Attention": "decay per channel",
        "Gated DeltaNet-2": "all gates per channel",
    }
    for operator, kind in operators.items():
        bounds = []
        for form in ("ReWY", "conventional"):
            products = FORWARD + REVERSE + SHARED + own(kind, form)
            moved = sum(traffic(kind, form == "conventional").values())
            cube, vector = cycles(products) / CLOCK, VECTOR[kind][form] / CLOCK
            memory = moved / (BANDWIDTH / CORES)
            bounds.append(max(cube, vector, memory))
            ratio = "" if form == "ReWY" else f"{bounds[1] / bounds[0]:.2f}"
            numbers = [
                f"{cycles(products) * MULTIPLY_ADDS / 1e6:.2f} M",
                *(f"{t * 1e6:.2f}" for t in (cube, vector)),
            ]
            numbers += [f"{moved / 1024:.0f}", f"{memory * 1e6:.2f}", ratio]
            lines.append(f"| {operator} | {form} | {' | '.join(numbers)} |".replace("|  |", "| |"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

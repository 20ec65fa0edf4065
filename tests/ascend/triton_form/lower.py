"""Lowers kernel.py with triton-ascend: python lower.py FOLDER writes FOLDER/<gates>_<dtype>_<K>_<V>.mlir, in linalg,
and FOLDER/oversized.mlir, with tiles that no unified buffer holds.

Runs in an environment of its own, with triton-ascend in place of Triton and without torch.
"""

import itertools
import sys
from pathlib import Path

from kernel import chunk_gradient
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

GATES = {"scalar": (False, False), "channel_decay": (True, False), "channel_gates": (True, True)}
DTYPES = ("bf16", "fp16")
SIZES = ((64, 64), (128, 128))
CHUNK = 64
TARGET = "Ascend950DT_9595"
IN_DTYPE = ("q", "k", "v", "do", "U", "dR", "S", "dS", "dv")


def linalg(gates: str, dtype: str, K: int, V: int, BK: int) -> str:
    decay, channels = GATES[gates]
    constants = {"K": K, "V": V, "C": CHUNK, "BK": BK, "BV": 64}
    constants |= {"CHANNEL_DECAY": decay, "CHANNEL_GATES": channels}
    kinds = {"N": "i32", "scale": "fp32"} | dict.fromkeys(IN_DTYPE, f"*{dtype}")
    signature = {name: kinds.get(name, "*fp32") for name in chunk_gradient.arg_names if name not in constants}
    target = GPUTarget("npu", TARGET, 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({"compile_on_910_95": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(chunk_gradient, signature=signature, constants=constants)
    module = source.make_ir(options, backend.get_codegen_implementation(), {}, context)
    metadata = {"target": target, **vars(options)}
    module = compiler.make_ttir(module, metadata, options)
    text = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    return compiler._parse_linalg_metadata(text, metadata)[0]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for gates, dtype, (K, V) in itertools.product(GATES, DTYPES, SIZES):
        BK = 32 if GATES[gates][0] else 64
        (folder / f"{gates}_{dtype}_{K}_{V}.mlir").write_text(linalg(gates, dtype, K, V, BK))
    (folder / "oversized.mlir").write_text(linalg("channel_gates", "bf16", 128, 128, 128))

"""Trains a small character model, built of delta attention, on a text file.

    python examples/char_lm.py --text FILE --operator kda
    python examples/char_lm.py --text FILE --compare

`--compare` trains the same model from the same seed three times: with the ReWY backward, with the
conventional backward, and with autograd through the chunked forward. All along the first run it prints how far
the three gradients are apart at the same weights: by rounding. Training amplifies any rounding, so the curves part
in the end, those of the two yardsticks as far from each other as from ReWY's.
"""

from __future__ import annotations

import argparse
import time
from itertools import combinations
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rewy

OPERATORS = ("delta_rule", "gated_delta_rule", "kda", "gdn2")
ALGEBRAS = ("rewy", "conventional", "autograd")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class DeltaAttention(nn.Module):
    """Projections, a short causal convolution, the operator, and a gated norm on the way out."""

    def __init__(self, dim: int, heads: int, operator: str, algebra: str) -> None:
        super().__init__()
        self.heads, self.operator, self.algebra = heads, operator, algebra
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Conv1d(3 * dim, 3 * dim, kernel_size=4, padding=3, groups=3 * dim, bias=False)
        per_channel = operator == "gdn2"
        self.erase = nn.Linear(dim, dim if per_channel else heads)
        self.write = nn.Linear(dim, dim) if per_channel else None
        self.decay = None
        if operator != "delta_rule":
            self.decay = nn.Linear(dim, heads if operator == "gated_delta_rule" else dim)
            nn.init.constant_(self.decay.bias, -3.0)
            self.A_log = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.gate = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        mixed = F.silu(self.conv(self.qkv(x).mT)[..., :T]).mT
        q, k, v = (self._split(t) for t in mixed.chunk(3, dim=-1))
        erase = self.erase(x).sigmoid()
        if self.write is None:
            gates = {"beta": erase}
        else:
            gates = {"erase": self._split(erase), "write": self._split(self.write(x).sigmoid())}
        if self.decay is not None:
            gates["g"] = self._log_decay(self.decay(x))
        q, k = F.normalize(q, dim=-1).to(v.dtype), F.normalize(k, dim=-1).to(v.dtype)
        o, _ = rewy.delta_attention(q, k, v, **gates, algebra=self.algebra)
        return self.out(
            (self.norm(o.to(self.norm.weight.dtype)) * self._split(F.silu(self.gate(x)))).flatten(2)
        )

    def _log_decay(self, raw: Tensor) -> Tensor:
        """−exp(A_log) · softplus(raw), in the precision of the weights: decays add up along a sequence."""
        rate = F.softplus(raw.to(self.A_log.dtype))
        A = self.A_log.exp()
        return -A * rate if self.operator == "gated_delta_rule" else -A[:, None] * self._split(rate)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, operator: str, algebra: str) -> None:
        super().__init__()
        self.mix_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.mix = DeltaAttention(dim, heads, operator, algebra)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def character_model(vocabulary: int, args: argparse.Namespace, algebra: str) -> nn.Module:
    blocks = [Block(args.dim, args.heads, args.operator, algebra) for _ in range(args.layers)]
    return nn.Sequential(
        nn.Embedding(vocabulary, args.dim), *blocks, nn.RMSNorm(args.dim), nn.Linear(args.dim, vocabulary)
    )


def windows(data: Tensor, args: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of random windows of the text, and the same windows one character on."""
    starts = torch.randint(len(data) - args.context, (args.batch, 1), generator=generator)
    rows = data[starts + torch.arange(args.context + 1)].to(args.device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, args: argparse.Namespace) -> Tensor:
    dtype = DTYPES[args.dtype]
    with torch.autocast(args.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(inputs)
    logits = logits.float() if dtype is torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradient_gap(model: nn.Module, inputs: Tensor, targets: Tensor, args: argparse.Namespace) -> float:
    """The largest relative difference between the gradients of any two backwards, at these weights."""
    layers = [module for module in model.modules() if isinstance(module, DeltaAttention)]
    trained_under = layers[0].algebra
    found = []
    for algebra in ALGEBRAS:
        for layer in layers:
            layer.algebra = algebra
        grads = torch.autograd.grad(loss_of(model, inputs, targets, args), list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    for layer in layers:
        layer.algebra = trained_under
    return max(float((a - b).norm() / b.norm()) for a, b in combinations(found, 2))


def train(data: Tensor, vocabulary: int, args: argparse.Namespace, algebra: str) -> list[float]:
    """The training loss of every step; weights and batches follow from the seed alone."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    weights = torch.float64 if args.dtype == "float64" else torch.float32
    model = character_model(vocabulary, args, algebra).to(args.device, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    held_out = len(data) // 10
    train_data, validation = data[:-held_out], data[-held_out:]

    losses, started = [], time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, 10 * (step + 1) / args.steps)
        batch = windows(train_data, args, generator)
        loss = loss_of(model, *batch, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % max(1, args.steps // 10) == 0:
            line = f"{algebra:>13}  step {step + 1:5d}  loss {losses[-1]:.4f}"
            if args.compare and algebra == ALGEBRAS[0]:
                line += f"  gradients apart by {gradient_gap(model, *batch, args):.1e}"
            print(line, flush=True)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        held = sum(loss_of(model, *windows(validation, args, generator), args).item() for _ in range(8)) / 8
    print(f"{algebra:>13}  {seconds:.1f} s, held-out loss {held:.4f}\n", flush=True)
    return losses


def compare(curves: dict[str, list[float]], args: argparse.Namespace) -> None:
    """The curves side by side, the largest differences, and a plot."""
    print("  step  " + "  ".join(f"{name:>12}" for name in curves))
    shown = {round(i * (args.steps - 1) / 10) for i in range(11)}
    for step in sorted(shown):
        print(f"{step + 1:6d}  " + "  ".join(f"{curve[step]:12.8f}" for curve in curves.values()))
    differences = {
        f"{one} - {other}": [abs(a - b) for a, b in zip(curves[one], curves[other], strict=True)]
        for one, other in combinations(curves, 2)
    }
    for pair, difference in differences.items():
        print(f"largest difference {pair}: {max(difference):.2e}")
    plot(curves, differences, args)


def plot(
    curves: dict[str, list[float]], differences: dict[str, list[float]], args: argparse.Namespace
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for width, (name, curve) in zip((5, 3, 1), curves.items(), strict=True):
        above.plot(curve, label=name, linewidth=width)
    above.set(ylabel="training loss", title=f"{args.operator}, {args.dtype}, {args.text.name}")
    above.legend()
    rounding = torch.finfo(DTYPES[args.dtype]).eps  # what a logarithmic axis shows for 0
    for pair, difference in differences.items():
        below.semilogy([max(d, rounding) for d in difference], label=pair)
    below.set(xlabel="step", ylabel="difference")
    below.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"char_lm-{args.operator}-{args.dtype}.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    print(f"plot: {path}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text to learn")
    parser.add_argument("--operator", choices=OPERATORS, default="gated_delta_rule")
    parser.add_argument("--compare", action="store_true", help="train under all three backwards")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4, help="reached after a tenth of the steps")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"--text must be a file, got {args.text}")
    for name in ("steps", "dim", "heads", "layers", "context", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads = {args.heads}, got {args.dim}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    text = args.text.read_text(encoding="utf-8")
    if len(text) < 20 * (args.context + 1):
        raise SystemExit(
            f"--text must have at least 20 windows of --context + 1 = {args.context + 1} characters, "
            f"got {len(text)} characters in {args.text}"
        )
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    print(f"{args.text}: {len(text)} characters, {len(alphabet)} different")
    algebras = ALGEBRAS if args.compare else ALGEBRAS[:1]
    curves = {algebra: train(data, len(alphabet), args, algebra) for algebra in algebras}
    if args.compare:
        compare(curves, args)


if __name__ == "__main__":
    main()

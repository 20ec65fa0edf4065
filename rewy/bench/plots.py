"""Plots made from results: one picture a level, a panel an operator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rewy.bench.results import Results, Row
from rewy.bench.tables import LEVELS, contestants_of, digits, merged, speedup
from rewy.problem import OPERATORS

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's, which everyone can tell apart."""


def draw(sets: Sequence[Results], folder: Path) -> list[Path]:
    """Writes `LEVEL.png` for every level, with the points where the baseline has a time."""
    written = []
    for level, title in LEVELS.items():
        rows = [row for row in merged(sets) if row.level == level]
        based = {row.point for row in rows if row.time and row.contestant == sets[0].baseline}
        rows = [row for row in rows if row.point in based]
        if rows:
            path = folder / f"{level}.png"
            figure = _figure(rows, sets[0], title)
            figure.savefig(path, dpi=150, metadata={"Software": None})
            written.append(path)
    return written


def _figure(rows: list[Row], results: Results, title: str) -> Figure:
    operators = list(dict.fromkeys(row.operator for row in rows))
    contestants = [c for c in contestants_of(rows) if any(r.contestant == c and r.time for r in rows)]
    panels = [(OPERATORS[op].title, [row for row in rows if row.operator == op]) for op in operators]
    most = max(len({row.shape for row in own}) for _, own in panels)
    if most == 1:
        panels = [(rows[0].shape, rows)]
        most = len(operators)
    width = min(18.0, max(7.0, 0.45 * most * len(contestants) + 2))
    figure = Figure(figsize=(width, 2.9 * len(panels) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(panels), 1, squeeze=False).flat)
    base = {row.point: row for row in rows if row.contestant == results.baseline}
    for axis, (heading, own) in zip(axes, panels, strict=True):
        points = list(dict.fromkeys(row.point for row in own))
        bar = 0.84 / len(contestants)
        for i, contestant in enumerate(contestants):
            shown = [row for row in own if row.contestant == contestant and row.time]
            factors = [speedup(row, base.get(row.point)) or 0.0 for row in shown]
            at = [points.index(row.point) - 0.42 + bar * (i + 0.5) for row in shown]
            bars = axis.bar(at, factors, bar * 0.94, label=contestant, color=COLOURS[i % len(COLOURS)])
            labels = [f"{digits(row.time.median)} ms" for row in shown if row.time]
            axis.bar_label(bars, labels, fontsize=7, padding=2, rotation=0 if bar * 60 / most > 6 else 90)
        names = [OPERATORS[op].title if len(panels) == 1 and most > 1 else shape for _, op, shape in points]
        axis.axhline(1, color="0.4", linewidth=0.8, zorder=0)
        axis.set_title(heading, loc="left", fontsize=10, fontweight="bold")
        axis.set_xticks(range(len(points)), [n.replace(" H", "\nH", 1) for n in names], fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_ylabel(f"speedup over\n{results.baseline}", fontsize=8)
        axis.margins(y=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    h = results.header
    figure.suptitle(f"{title}\n{h['machine']['device']}, {h['config']['dtype']}", fontsize=10)
    return figure

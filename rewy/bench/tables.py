"""Tables made from results: Markdown to read, CSV with every figure. Nothing here measures."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rewy.bench.results import Results, Row, Spread, readable
from rewy.problem import OPERATORS

LEVELS = {
    "backward": "Backward alone, from saved forward results",
    "autograd": "Public function through torch.autograd: the backward",
    "model": "Training step of a decoder",
}


def merged(sets: Sequence[Results]) -> list[Row]:
    """Rows of several sets as one; where two sets hold the same row, the first counts."""
    rows: dict[tuple[str, str, str, str], Row] = {}
    for results in sets:
        for row in results.rows:
            rows.setdefault(row.key, row)
    return list(rows.values())


def time_table(sets: Sequence[Results], level: str) -> str:
    """Milliseconds and the factor over the baseline, a column a contestant; geometric means by operator."""
    rows = [row for row in merged(sets) if row.level == level]
    baseline = sets[0].baseline

    def cell(row: Row, base: Row | None) -> str:
        if row.time is None:
            return row.status
        text = f"{digits(row.time.median)} ms"
        if row.model:
            text = f"{row.model.tokens_per_s:,.0f} tokens/s"
        return text if row.contestant == baseline else f"{text}{_factor(row, base)}"

    return _grid(rows, baseline, cell, means=True)


def factor_table(sets: Sequence[Results], level: str) -> str:
    """Factors over the baseline in short: for each operator and contestant their mean over all shapes, and extremes."""
    rows = [row for row in merged(sets) if row.level == level]
    bases = {row.point: row for row in rows if row.contestant == sets[0].baseline}
    forward = any(row.forward for row in rows)
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for row in rows:
        base = bases.get(row.point)
        if base and base is not row and base.time and row.time:
            groups.setdefault((row.operator, row.contestant), []).append((row, base))
    body = []
    for (operator, contestant), pairs in groups.items():
        line = [OPERATORS[operator].title, contestant, str(len(pairs))]
        for spread in ("time", "forward") if forward else ("time",):
            factors = [(ratio(getattr(base, spread), getattr(row, spread)), row.shape) for row, base in pairs]
            found = [(factor, shape) for factor, shape in factors if factor is not None]
            (least, at_least), (most, at_most) = min(found), max(found)
            mean = geometric_mean(factor for factor, _ in found)
            line += [f"**{mean:.2f}×**", f"{least:.2f}× ({at_least})", f"{most:.2f}× ({at_most})"]
        body.append(line)
    backward = ("geometric mean", "least", "most")
    head = [*backward, *(f"forward: {name}" for name in backward if forward)]
    return _table(("operator", "contestant", "shapes", *head), body)


def memory_table(sets: Sequence[Results], level: str) -> str:
    """Peak workspace of the backward, or peak memory of the training step."""
    rows = [row for row in merged(sets) if row.level == level]

    def cell(row: Row, base: Row | None) -> str:
        size = row.model.peak_bytes if row.model else row.workspace
        return row.status if size is None else readable(size)

    return _grid(rows, sets[0].baseline, cell, means=False)


def details_table(sets: Sequence[Results], level: str) -> str:
    """A row a contestant and point: quartiles, forward, host, memory, cold start, shares of the ceilings."""
    if level == "model":
        return _model_details(sets)
    head = (
        "operator", "shape", "contestant", "backward ms (quartiles)", "forward ms", "host ms", "workspace",
        "kept by the forward", "cold start s", "GB", "of copy ceiling", "GFLOP", "of matmul ceiling", "largest error",
    )  # fmt: skip
    body = []
    for results in sets:
        for row in results.rows:
            if row.level == level and row.time:
                copy, matmul = shares(row, results)
                body.append([
                    _title(row), row.shape, row.contestant, _quartiles(row),
                    digits(row.forward.median) if row.forward else "",
                    digits(row.host_ms), "" if row.workspace is None else readable(row.workspace),
                    "" if row.saved is None else readable(row.saved), digits(row.cold_s),
                    digits((row.floor_bytes or 0) / 1e9), f"{copy:.0%}",
                    digits((row.floor_flops or 0) / 1e9), f"{matmul:.0%}",
                    _largest(row),
                ])  # fmt: skip
    return _table(head, body)


def _model_details(sets: Sequence[Results]) -> str:
    head = (
        "operator", "model", "contestant", "parameters", "step ms (quartiles)", "tokens/s", "peak memory",
        "time in the operator", "first loss", "last loss", "largest loss difference",
    )  # fmt: skip
    body = []
    for results in sets:
        base = {row.point: row for row in results.rows if row.contestant == results.baseline}
        for row in results.rows:
            if row.model:
                m, reference = row.model, base.get(row.point)
                apart = ""
                if reference and reference.model and reference is not row:
                    pairs = zip(m.losses, reference.model.losses, strict=True)
                    apart = f"{max(abs(a - b) for a, b in pairs):.1e}"
                body.append([
                    _title(row), row.shape, row.contestant, f"{m.parameters / 1e6:.0f} M", _quartiles(row),
                    f"{m.tokens_per_s:,.0f}", readable(m.peak_bytes), f"{m.operator_share:.0%}",
                    f"{m.losses[0]:.4f}", f"{m.losses[-1]:.4f}", apart,
                ])  # fmt: skip
    return _table(head, body)


def machine_note(sets: Sequence[Results], level: str = "") -> str:
    """Where the figures come from, in a line a set."""
    lines = []
    for results in sets:
        h, lead = results.header, _lead(results)
        timed = "" if lead is None else f" Timed {'behind' if lead else 'without'} a lead."
        versions = ", ".join(f"{name} {version}" for name, version in h["versions"].items())
        lines.append(
            f"{h['machine']['device']}, {h['config']['dtype']}, {h['started'][:10]}, commit {h['commit']}; "
            f"{versions}. Made by `{h['command']}`; copy {digits(h['ceilings']['copy_bytes_per_s'] / 1e9)} GB/s, "
            f"matmul {digits(h['ceilings']['matmul_flops_per_s'] / 1e12)} TFLOP/s.{timed}"
        )
    return "\n".join(lines)


def _lead(results: Results) -> bool | None:
    """Whether samples had a lead; None where none could have one."""
    config = results.header["config"]
    if config["device"] == "cpu" or config["levels"] == ["model"]:
        return None
    return bool(config["timing"]["lead"])


def reasons(sets: Sequence[Results], level: str) -> str:
    """Why cells hold a word instead of a figure."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for row in merged(sets):
        if row.level == level and row.reason:
            places = where.setdefault((row.contestant, row.status, row.reason), [])
            places.append(f"{_title(row)} {row.shape}")
    total = len({row.point for row in merged(sets) if row.level == level})
    lines = []
    for (contestant, status, reason), places in where.items():
        at = "everywhere" if len(places) == total else "; ".join(places)
        lines.append(f"- {contestant}: {status} ({at}): {reason}")
    return "\n".join(lines)


VIEWS: dict[str, Callable[[Sequence[Results], str], str]] = {
    "time": time_table,
    "factors": factor_table,
    "memory": memory_table,
    "details": details_table,
    "reasons": reasons,
    "machine": machine_note,
}


def summary(sets: Sequence[Results]) -> str:
    """The times at every level, and where they come from."""
    present = {row.level for row in merged(sets)}
    parts = [
        part
        for level, title in LEVELS.items()
        if level in present
        for part in (f"{title}:", time_table(sets, level), reasons(sets, level))
    ]
    return "\n\n".join(part for part in (*parts, machine_note(sets)) if part)


def report(sets: Sequence[Results]) -> str:
    """The whole Markdown page of one or several result sets."""
    parts = [f"# {sets[0].header['config']['title']}", machine_note(sets)]
    present = {row.level for row in merged(sets)}
    for level, title in LEVELS.items():
        if level in present:
            memory = "Peak memory" if level == "model" else "Peak workspace of the backward"
            parts += [f"## {title}", time_table(sets, level), reasons(sets, level)]
            parts += [f"### {memory}", memory_table(sets, level), "### Details", details_table(sets, level)]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_csv(results: Results) -> str:
    """Every figure of every row, one line each."""
    out = io.StringIO()
    names = [
        "level", "operator", "shape", "contestant", "status", "reason", "ms", "ms_q1", "ms_q3", "samples",
        "forward_ms", "forward_q1", "forward_q3", "host_ms", "speedup", "workspace_bytes", "saved_bytes",
        "cold_start_s", "floor_bytes", "floor_flops", "copy_share", "matmul_share", "largest_error", "parameters",
        "tokens_per_s", "peak_bytes", "operator_share", "first_loss", "last_loss",
    ]  # fmt: skip
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    bases = {row.point: row for row in results.rows if row.contestant == results.baseline}
    for row in results.rows:
        record: dict[str, Any] = {
            "level": row.level, "operator": row.operator, "shape": row.shape, "contestant": row.contestant,
            "status": row.status, "reason": row.reason, "host_ms": row.host_ms,
            "speedup": speedup(row, bases.get(row.point)),
            "workspace_bytes": row.workspace, "saved_bytes": row.saved, "cold_start_s": row.cold_s,
            "floor_bytes": row.floor_bytes, "floor_flops": row.floor_flops,
            "largest_error": max(row.errors.values(), default=None),
        }  # fmt: skip
        if row.time:
            t = row.time
            record |= {"ms": t.median, "ms_q1": t.q1, "ms_q3": t.q3, "samples": t.n}
            if row.floor_bytes:
                record["copy_share"], record["matmul_share"] = shares(row, results)
        if row.forward:
            f = row.forward
            record |= {"forward_ms": f.median, "forward_q1": f.q1, "forward_q3": f.q3}
        if row.model:
            m = row.model
            record |= {"parameters": m.parameters, "tokens_per_s": m.tokens_per_s, "peak_bytes": m.peak_bytes}
            record |= {"first_loss": m.losses[0], "last_loss": m.losses[-1]}
            record |= {"operator_share": m.operator_share}
        writer.writerow(record)
    return out.getvalue()


def compare(a: Results, b: Results) -> str:
    """Two result sets side by side: how much faster B is where both have a figure, and what only one has."""
    ours = {row.key: row for row in a.rows if row.time}
    theirs = {row.key: row for row in b.rows if row.time}
    body = []
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for key in [k for k in ours if k in theirs]:
        row, other = ours[key], theirs[key]
        assert row.time and other.time
        ratio = row.time.median / other.time.median
        ratios.setdefault((row.level, row.operator, row.contestant), []).append(ratio)
        body.append([
            row.level, _title(row), row.shape, row.contestant, _quartiles(row), _quartiles(other), f"{ratio:.2f}×"
        ])  # fmt: skip
    for (level, operator, contestant), values in ratios.items():
        if len(values) > 1:
            title = OPERATORS[operator].title
            mean = f"**{geometric_mean(values):.2f}×**"
            body.append([level, title, "**geometric mean**", contestant, "", "", mean])
    names = (f"A: {a.path.parent}", f"B: {b.path.parent}")
    parts = [f"{name}: {machine_note([r])}" for name, r in zip(names, (a, b), strict=True)]
    if bool(_lead(a)) != bool(_lead(b)):
        led, alone = "AB" if _lead(a) else "BA"
        parts.append(
            f"{led} was timed behind a lead (levels backward and autograd), {alone} was not: where the host is "
            f"slower than the device, {alone} shows the host."
        )
    head = ("level", "operator", "shape", "contestant", "A ms", "B ms", "A / B")
    parts.append(_table(head, body) if body else "Nothing was measured in both.")
    for name, mine, other_rows in (("A", ours, theirs), ("B", theirs, ours)):
        lonely = [" · ".join(key) for key in mine if key not in other_rows]
        if lonely:
            parts.append(f"Only in {name}:\n" + "\n".join(f"- {line}" for line in lonely))
    return "\n\n".join(parts) + "\n"


def speedup(row: Row, base: Row | None) -> float | None:
    """How many times faster than the baseline at the same point."""
    return None if base is None else ratio(base.time, row.time)


def ratio(a: Spread | None, b: Spread | None) -> float | None:
    """Of two medians, where both were measured."""
    return None if a is None or b is None else a.median / b.median


def shares(row: Row, results: Results) -> tuple[float, float]:
    """What the necessary bytes and products, over the time taken, are of the device's ceilings."""
    assert row.time
    seconds, limits = row.time.median / 1e3, results.header["ceilings"]
    copy = (row.floor_bytes or 0) / seconds / limits["copy_bytes_per_s"]
    return copy, (row.floor_flops or 0) / seconds / limits["matmul_flops_per_s"]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def contestants_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.contestant for row in rows))


def _grid(rows: list[Row], baseline: str, cell: Callable[[Row, Row | None], str], means: bool) -> str:
    columns = contestants_of(rows)
    found = {row.key: row for row in rows}
    body = []
    for operator in dict.fromkeys(row.operator for row in rows):
        points = list(dict.fromkeys(row.point for row in rows if row.operator == operator))
        factors: dict[str, list[float]] = {}
        for point in points:
            base = found.get((*point, baseline))
            line = [OPERATORS[operator].title, point[2]]
            for contestant in columns:
                row = found.get((*point, contestant))
                line.append(cell(row, base) if row else "")
                factor = speedup(row, base) if row else None
                if factor:
                    factors.setdefault(contestant, []).append(factor)
            body.append(line)
        if means and len(points) > 1:
            line = [OPERATORS[operator].title, "**geometric mean**"]
            for contestant in columns:
                values = factors.get(contestant)
                shown = bool(values) and contestant != baseline
                line.append(f"**{geometric_mean(values or []):.2f}×**" if shown else "")
            body.append(line)
    heads = [f"{c} (baseline)" if means and c == baseline else c for c in columns]
    return _table(("operator", "shape", *heads), body)


def _factor(row: Row, base: Row | None) -> str:
    factor = speedup(row, base)
    return "" if factor is None else f" ({factor:.2f}×)"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _title(row: Row) -> str:
    return OPERATORS[row.operator].title


def _quartiles(row: Row) -> str:
    t = row.time
    return f"{digits(t.median)} ({digits(t.q1)}–{digits(t.q3)})" if t else row.status


def _largest(row: Row) -> str:
    if not row.errors:
        return ""
    name, error = max(row.errors.items(), key=lambda item: item[1])
    return f"{error:.1e} ({name})"


def digits(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"

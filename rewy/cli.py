"""The command line: `rewy info`, `verify`, `bench`, `join`, `report`, `compare`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

app = typer.Typer(
    help="Delta-rule linear attention with the ReWY backward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
RUNS = Path("runs")


def main() -> None:
    app()


@contextmanager
def _complaints() -> Iterator[None]:
    """Bad input ends in its message and status 2, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as e:
        if e.name not in ("yaml", "pydantic", "matplotlib"):
            raise
        typer.echo(f"error: this command needs {e.name}; pip install 'rewy[bench]'", err=True)
        raise typer.Exit(2) from None


@app.command()
def info() -> None:
    """Versions, devices, and every backend with the reason if it is not usable here."""
    import torch

    from rewy import __version__, dispatch

    lines = [("rewy", __version__), ("python", platform.python_version()), ("torch", torch.__version__)]
    lines.append(("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads"))
    usable = dispatch.backends()  # registers the devices that a backend brings along
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            lines.append((kind, "none"))
            continue
        for i in range(module.device_count()):
            p = module.get_device_properties(i)
            lines.append((f"{kind}:{i}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB"))
    for name, reason in usable.items():
        lines.append((f"backend {name}", "usable" if reason is None else f"not usable: {reason}"))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        typer.echo(f"{name:<{width}}  {value}")


@app.command()
def verify(
    device: Annotated[str, typer.Option(help="Device to verify, such as cpu, cuda or npu.")] = "cpu",
    backend: Annotated[
        str | None, typer.Option(help="Backend; the one made for the device by default.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="More shapes, gates and chunk sizes.")] = False,
) -> None:
    """All four operators against the fp64 recurrence on a device; status 1 if any error exceeds its budget."""
    from rewy.problem import OPERATORS
    from rewy.testing import Row
    from rewy.testing import verify as run

    console = Console()
    with _complaints(), console.status(f"verifying {backend or 'the backend made for'} {device}"):
        rows = run(device, backend, full)
    left_out = [row.note for row in rows if row.ok and row.note]
    rows = [row for row in rows if not (row.ok and row.note)]
    table = Table("operator", "case", "worst tensor", "error", "budget", "", box=box.SIMPLE)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.operator, row.case), []).append(row)
    for (operator, case), own in groups.items():
        worst = max(own, key=lambda row: (not row.ok, row.error / row.budget if row.budget else row.error))
        figures = (f"{worst.error:.1e}", f"{worst.budget:.1e}") if not worst.note else (worst.note, "")
        verdict = "[green]ok[/]" if worst.ok else "[red]WRONG[/]"
        table.add_row(OPERATORS[operator].title, case, worst.tensor, *figures, verdict)
    console.print(table)
    wrong = sum(not row.ok for row in rows)
    console.print(f"{device}: {len(rows) - wrong} of {len(rows)} within budget")
    if left_out:
        console.print(f"{len(left_out)} cases left out, the first because {left_out[0]}", markup=False)
    raise typer.Exit(1 if wrong else 0)


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the results; under runs/ by default.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run stopped.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and measure nothing.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which no further point is started.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that compile first; then no cold start is seen.")
    ] = 0,
    operators: Annotated[
        list[str] | None, typer.Option("--operator", help="Measure this one's points alone; may be repeated.")
    ] = None,
) -> None:
    """Measures a configuration: JSON lines, CSV, Markdown tables and plots."""
    alone = tuple(dict.fromkeys(operators or ()))
    with _complaints():
        from rewy.bench import harness, report, results
        from rewy.bench.config import load

        chosen = load(config)
        if unknown := [name for name in alone if name not in chosen.operators]:
            raise ValueError(f"--operator: unknown {unknown[0]}; allowed: {', '.join(chosen.operators)}")
        if dry_run:
            for point, contestant, reason in harness.outlook(chosen, alone):
                typer.echo(" · ".join((*point.key, contestant)) + (f": {reason}" if reason else ""))
            return
        folder = out or _default_folder(config.stem, alone, resume)
        path = folder / results.FILE
        if path.exists() and not resume:
            raise ValueError(f"{path} exists; --resume goes on with it, --out chooses another folder")
        console = Console(soft_wrap=True, highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(chosen.title, total=len(harness.plan(chosen, alone)))
            outcome = harness.run(
                chosen,
                path,
                command=f"rewy bench {_relative(config)}",
                say=lambda line: console.print(line, markup=False),
                progress=lambda finished: progress.update(task, completed=finished),
                resume=resume,
                deadline=None if time_limit is None else time.monotonic() + time_limit,
                workers=workers,
                alone=alone,
            )
        measured = results.load(path)
        if measured.rows:
            for written in (path, *report.write_beside(measured)):
                console.print(f"wrote {written}", markup=False)
        if outcome.stopped:
            again = "".join(f"--operator {operator} " for operator in alone)
            console.print(
                f"{outcome.stopped}: {outcome.finished} of {outcome.total} points are kept; "
                f"`rewy bench {config} {again}--out {folder} --resume` goes on",
                markup=False,
            )
    ours = [row for row in measured.rows if row.contestant.startswith(("rewy", "reference"))]
    if outcome.stopped.startswith("stopped by") or any(row.status in ("wrong", "failed") for row in ours):
        raise typer.Exit(1)
    if outcome.stopped == "interrupted":
        raise typer.Exit(130)


@app.command()
def join(
    out: Annotated[Path, typer.Argument(help="Folder for the whole; it must have no results yet.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of its parts, from `bench --operator`.")],
) -> None:
    """Joins parts of one configuration that were measured apart, as on the devices of one machine side by side."""
    with _complaints():
        from rewy.bench import report, results

        path = out / results.FILE
        if path.exists():
            raise ValueError(f"{path} exists; results are never overwritten")
        results.join([results.load(folder) for folder in folders], path)
        for written in (path, *report.write_beside(results.load(path))):
            typer.echo(f"wrote {written}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Result folders, or folders that hold such.")],
    docs: Annotated[
        list[Path] | None, typer.Option(help="Documents with markers; README.md and docs/*.md by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; status 1 if anything would.")
    ] = False,
) -> None:
    """Rebuilds tables and plots beside results, and the tables between markers in README.md and docs/."""
    with _complaints():
        from rewy.bench import report as building

        found = building.find(folders)
        files = docs or [p for p in (Path("README.md"), *sorted(Path("docs").glob("*.md"))) if p.exists()]
        stale = []
        for one in found.values():
            for name, text in building.derived(one).items():
                path = one.path.parent / name
                if not path.exists() or path.read_text(encoding="utf-8") != text:
                    stale.append(path)
            if not check:
                building.write_beside(one)
        for path in files:
            before = path.read_text(encoding="utf-8")
            after = building.rebuilt(before, found, str(path))
            if after != before:
                stale.append(path)
                if not check:
                    path.write_text(after, encoding="utf-8")
    for path in stale:
        typer.echo(f"{'out of date' if check else 'rebuilt'}: {path}")
    raise typer.Exit(1 if check and stale else 0)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A results folder or file.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Two result sets side by side: before and after, or two devices."""
    with _complaints():
        from rewy.bench import results, tables

        typer.echo(tables.compare(results.load(a), results.load(b)), nl=False)


def _default_folder(name: str, alone: tuple[str, ...], resume: bool) -> Path:
    """By time and operators: parts that start together, or are resumed side by side, keep apart."""
    part = "".join(f"-{operator}" for operator in alone)
    if resume:
        earlier = sorted((RUNS / name).glob(f"{'[0-9]' * 8}-{'[0-9]' * 6}{part}/results.jsonl"))
        if not earlier:
            of = f" of {', '.join(alone)}" if alone else ""
            raise ValueError(
                f"--resume: nothing{of} under {RUNS / name}; --out names the folder to go on with"
            )
        return earlier[-1].parent
    return RUNS / name / (datetime.now().strftime("%Y%m%d-%H%M%S") + part)


def _relative(path: Path) -> Path:
    """Without the folders of this machine."""
    path = path.absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)

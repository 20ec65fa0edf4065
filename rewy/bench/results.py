"""Results on disk: one JSON-lines file, a header and then a row per contestant and point.

Rows of a finished point are appended in one flushed write, so an interruption loses the point in flight only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

SCHEMA = 1
FILE = "results.jsonl"
STATUSES = ("ok", "wrong", "absent", "declined", "skipped", "failed")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` samples, in milliseconds."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        q1, median, q3 = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median, q1, q3, len(samples))


@dataclass(frozen=True)
class ModelFigures:
    """What a training step shows besides its time."""

    parameters: int
    tokens_per_s: float
    peak_bytes: int
    operator_share: float
    losses: list[float]


@dataclass(frozen=True)
class Row:
    """One contestant at one point. Times are None unless `status` is ok; `reason` says why it is not."""

    level: str
    operator: str
    shape: str
    contestant: str
    status: str
    reason: str = ""
    time: Spread | None = None
    """The backward; the whole step at level model."""
    forward: Spread | None = None
    host_ms: float | None = None
    """What the host needs to issue the call; above the device's time it is the bound, which `time` behind a lead
    does not show."""
    workspace: int | None = None
    """Peak bytes above inputs, saved results and outputs."""
    saved: int | None = None
    """Bytes kept from the forward for the backward, besides inputs."""
    cold_s: float | None = None
    floor_bytes: int | None = None
    floor_flops: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    model: ModelFigures | None = None

    @property
    def point(self) -> tuple[str, str, str]:
        return self.level, self.operator, self.shape

    @property
    def key(self) -> tuple[str, str, str, str]:
        return *self.point, self.contestant

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Row:
        for name, kind in (("time", Spread), ("forward", Spread), ("model", ModelFigures)):
            if record.get(name) is not None:
                record[name] = kind(**record[name])
        row = cls(**record)
        if row.status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {row.status!r}")
        return row


@dataclass(frozen=True)
class Results:
    path: Path
    header: dict[str, Any]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def baseline(self) -> str:
        return str(self.header["config"]["baseline"])


def header(config: Any, ceilings: dict[str, float], versions: dict[str, str], switches: dict[str, str],
           command: str) -> dict[str, Any]:  # fmt: skip
    """What a reader needs to judge or repeat the figures."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": machine(torch.device(config.device)),
        "versions": versions,
        "switches": switches,
        "ceilings": ceilings,
        "config": config.model_dump(mode="json"),
    }


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """In what two headers are of different runs, or "": configuration, device, versions or commit."""
    for name, of in (
        ("config", lambda header: header["config"]),
        ("device", lambda header: header["machine"]["device"]),
        ("versions", lambda header: header["versions"]),
        ("commit", lambda header: header["commit"]),
    ):
        a, b = of(before), of(now)
        if a == b:
            continue
        if isinstance(a, dict):
            names = [n for n in {**a, **b} if a.get(n) != b.get(n)]
            return f"{name}: " + "; ".join(f"{n} was {a.get(n)!r}, is {b.get(n)!r}" for n in names)
        return f"{name}: was {a!r}, is {b!r}"
    return ""


def join(parts: Sequence[Results], path: Path) -> None:
    """One file of parts of a grid that were measured apart; ValueError unless they are of one run."""
    first, *others = parts
    for other in others:
        if differs := difference(first.header, other.header):
            raise ValueError(f"{other.path} and {first.path} are of different runs: {differs}")
    rows = [row for part in parts for row in part.rows]
    if not rows:
        raise ValueError("nothing was measured in any of the parts")
    if len({row.key for row in rows}) < len(rows):
        raise ValueError("a point stands in two of the parts: join takes parts that have none in common")
    operators, shapes = first.header["config"]["operators"], list(dict.fromkeys(row.shape for row in rows))
    create(path, first.header)
    append(path, sorted(rows, key=lambda row: (shapes.index(row.shape), operators.index(row.operator))))


def create(path: Path, header: dict[str, Any]) -> None:
    """A new file; FileExistsError when there is one, for results are never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        _write(file, [header])


def append(path: Path, rows: Iterable[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        _write(file, ({"kind": "row"} | _compact(row) for row in rows))


def load(path: Path) -> Results:
    """Reads a results file or the one in a folder. ValueError names the line, and a foreign schema's version."""
    path = path / FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"cannot read {path}: {e.strerror}") from None
    lines = text.split("\n")
    if lines.pop() or not lines:  # a finished line ends in a newline
        raise ValueError(f"{path}:{len(lines) + 1}: cut off here; `rewy bench --resume` repairs it")
    header, rows = _record(path, 1, lines[0]), []
    if header.get("kind") != "header":
        raise ValueError(f"{path}:1: not a results file: the first line is no header")
    if header.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: has schema version {header.get('schema')!r}; this version of rewy reads {SCHEMA}"
        )
    header["config"]["timing"].setdefault("lead", False)  # older files were measured without
    for number, line in enumerate(lines[1:], 2):
        record = _record(path, number, line)
        try:
            if record.pop("kind", None) != "row":
                raise ValueError("not a row")
            rows.append(Row.parse(record))
        except (TypeError, ValueError) as e:
            raise ValueError(f"{path}:{number}: {e}") from None
    # A point that was cut off in the middle and measured again stands twice; the whole one is the later one.
    return Results(path, header, list({row.key: row for row in rows}.values()))


def drop_cut_line(path: Path) -> bool:
    """Removes a last line that an abrupt end left unfinished."""
    with path.open("rb+") as file:
        text = file.read()
        end = text.rfind(b"\n") + 1
        file.truncate(end)
        return end < len(text)


def _write(file: Any, records: Iterable[dict[str, Any]]) -> None:
    file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    file.flush()
    os.fsync(file.fileno())


def _compact(row: Row) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(row).items() if value not in (None, "", {})}


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}:{number}: not JSON: {e.msg}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}:{number}: not a JSON object")
    return record


def readable(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:,.1f} MiB" if size < 1 << 30 else f"{size / 2**30:,.2f} GiB"


def machine(device: torch.device) -> dict[str, Any]:
    """The machine's parts that decide speed."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cpu":
        return found | {"device": found["cpu"]}
    module = torch.get_device_module(device)
    properties = module.get_device_properties(module.current_device())
    found |= {"device": properties.name, "memory_bytes": int(properties.total_memory)}
    if device.type == "cuda":
        found |= {"capability": f"{properties.major}.{properties.minor}", "driver": _driver()}
        found |= {"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}
    return found


def commit() -> str:
    """The source's commit: REWY_COMMIT where it is set, or git's answer, `-dirty` when files differ from it.

    A copy may lie in a repository that stands elsewhere, so what was said outright comes first.
    """
    if said := os.environ.get("REWY_COMMIT"):
        return said

    def git(*arguments: str) -> str:
        where = Path(__file__).resolve().parents[2]
        return subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"

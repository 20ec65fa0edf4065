"""A benchmark's YAML file as frozen values; every complaint names the file, the line and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rewy.bench.contestants import CONTESTANTS, split_label
from rewy.problem import MAX_K, MAX_V, OPERATORS

Count = Annotated[int, Field(gt=0, strict=True)]
Level = Literal["backward", "autograd", "model"]
Size = Literal["30M", "130M", "370M", "1.3B"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(Section):
    """One shape of the grid: B sequences of T tokens, or sequences of `lengths` packed in one row."""

    B: Count = 1
    T: Count | None = None
    lengths: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    H: Count
    HV: Count | None = None
    K: Annotated[int, Field(gt=0, le=MAX_K, strict=True)] = 128
    V: Annotated[int, Field(gt=0, le=MAX_V, strict=True)] = 128
    operators: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    contestants: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Shape:
        if (self.T is None) == (self.lengths is None):
            raise ValueError("give either T or lengths")
        if self.lengths is not None and self.B != 1:
            raise ValueError(f"packed lengths lie in one row (B = 1), got B = {self.B}")
        if self.value_heads % self.H:
            raise ValueError(f"HV must be a multiple of H = {self.H}, got {self.HV}")
        return self

    @property
    def value_heads(self) -> int:
        return self.HV or self.H

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.lengths else self.B * (self.T or 0)

    @property
    def label(self) -> str:
        """How tables and results name this shape."""
        size = f"{len(self.lengths)} packed, {self.tokens}" if self.lengths else f"{self.B}×{self.T}"
        heads = f"H{self.H}" if self.value_heads == self.H else f"H{self.H}/{self.value_heads}"
        channels = f"K{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        return f"{size} {heads} {channels}"


class Timing(Section):
    """How to measure: `seconds` per contestant and point, spread over `rounds` taken in turns, after `warmup` calls.

    With `lead` a device is given other work before each sample, for as long as the host needs to issue it, so that
    times are the device's whatever the host. Without, the device may wait for the host within a sample. Level model
    has no lead: its steps follow one another, as in training.
    """

    warmup: Count = 3
    rounds: Count = 10
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    lead: Annotated[bool, Field(strict=True)] = True


class ModelRun(Section):
    size: Size
    B: Count
    T: Count


class ModelGrid(Section):
    """Training steps of decoders: `steps` are timed, after `warmup` that are not; losses are kept from all."""

    runs: tuple[ModelRun, ...] = Field(min_length=1)
    steps: Count = 20
    warmup: Count = 5
    vocabulary: Annotated[int, Field(ge=256, strict=True)] = 32768


class Config(Section):
    title: str
    device: Literal["cpu", "cuda", "npu"]
    dtype: Literal["float32", "bfloat16", "float16"]
    levels: tuple[Level, ...] = Field(min_length=1)
    operators: tuple[str, ...] = Field(default=tuple(OPERATORS), min_length=1)
    contestants: tuple[str, ...] = Field(min_length=1)
    baseline: str
    chunk_size: Literal[16, 32, 64] = 64
    initial_state: bool = False
    threads: Count | None = None
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    shapes: tuple[Shape, ...] = ()
    timing: Timing = Timing()
    model: ModelGrid | None = None

    @field_validator("operators", "contestants", "levels")
    @classmethod
    def _distinct(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({v for v in values if values.count(v) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} stands twice; a contestant repeats as NAME#2")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        _known(("operators",), self.operators, OPERATORS)
        _known(("contestants",), map(split_label, self.contestants), CONTESTANTS)
        _known(("baseline",), [self.baseline], self.contestants)
        labels = [shape.label for shape in self.shapes]
        for i, shape in enumerate(self.shapes):
            _known(("shapes", i, "operators"), shape.operators or (), self.operators)
            _known(("shapes", i, "contestants"), shape.contestants or (), self.contestants)
            if shape.label in labels[:i]:
                raise Misplaced(("shapes", i), f"{shape.label} stands twice")
        if not self.shapes and set(self.levels) != {"model"}:
            raise ValueError("levels backward and autograd need shapes")
        if self.model is None and "model" in self.levels:
            raise ValueError("level model needs a section model")
        return self


class Misplaced(ValueError):
    """A complaint about one place, found while looking at several."""

    def __init__(self, loc: tuple[int | str, ...], message: str) -> None:
        super().__init__(message)
        self.loc = loc


def _known(loc: tuple[int | str, ...], names: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    unknown = [n for n in names if n not in allowed]
    if unknown:
        raise Misplaced(loc, f"unknown {', '.join(unknown)}; allowed: {', '.join(allowed)}")


def load(path: Path) -> Config:
    """Reads and checks a configuration; ValueError with one `file:line: key: complaint` a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {path}: {e}") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        repeated = list(_repeated_keys(root))
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise ValueError(f"{path}:{line}: not YAML: {e.problem}") from None
    except yaml.YAMLError as e:
        raise ValueError(f"{path}: not YAML: {e}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deep, or an alias stands inside its own anchor") from None
    if repeated:
        raise ValueError("\n".join(f"{path}:{line}: {key}: stands twice" for line, key in repeated))
    if root is None or not isinstance(values, dict):
        raise ValueError(f"{path}:1: must be a mapping with the keys {', '.join(Config.model_fields)}")
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        complaints = (_complaint(path, root, error) for error in e.errors(include_url=False))
        raise ValueError("\n".join(complaints)) from None


def _repeated_keys(node: yaml.Node | None) -> Iterator[tuple[int, str]]:
    """YAML lets a later key win in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # what else stands as a key, the loader refuses
                if key.value in seen:
                    yield key.start_mark.line + 1, key.value
                seen.add(key.value)
            yield from _repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)


def _complaint(path: Path, root: yaml.Node, error: Any) -> str:
    loc, message = error["loc"], error["msg"].removeprefix("Value error, ")
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, Misplaced):
        loc = raised.loc
    elif error["type"] == "extra_forbidden":
        message = f"unknown key; allowed: {', '.join(_section_at(loc[:-1]).model_fields)}"
    elif error["type"] == "missing":
        message = "missing"
    elif loc and not isinstance(error["input"], dict):
        message += f", got {error['input']!r}"
    where = ".".join(map(str, loc))
    return f"{path}:{_line(root, loc)}: {where + ': ' if where else ''}{message}"


def _section_at(loc: tuple[int | str, ...]) -> type[Section]:
    named: dict[tuple[str, ...], type[Section]] = {
        (): Config,
        ("shapes",): Shape,
        ("timing",): Timing,
        ("model",): ModelGrid,
        ("model", "runs"): ModelRun,
    }
    return named[tuple(part for part in loc if isinstance(part, str))]


def _line(node: yaml.Node, loc: tuple[int | str, ...]) -> int:
    """The line of the deepest part of `loc` that stands in the file."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line

"""Tables in documents, rebuilt from results: what stands between two markers is generated.

A block opens with `<!-- rewy:report SETS [LEVEL [VIEW]] -->` and closes with `<!-- /rewy:report -->`. SETS names
result folders, joined by `+` when one table shows several. Alone it stands for the times at every level and where
they come from; with a LEVEL, VIEW is one of `rewy.bench.tables.VIEWS`, the times when left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rewy.bench import results, tables
from rewy.bench.plots import draw
from rewy.bench.results import FILE, Results

OPEN = re.compile(r"<!-- rewy:report (?P<name>[^>]*?) -->\n")
CLOSE = "<!-- /rewy:report -->"


def find(folders: Iterable[Path]) -> dict[str, Results]:
    """Results in these folders and below, by folder name."""
    found: dict[str, Results] = {}
    for folder in folders:
        paths = sorted(folder.rglob(FILE))
        if not paths:
            raise ValueError(f"{folder} holds no {FILE}")
        for path in paths:
            loaded = results.load(path)
            if loaded.name in found and found[loaded.name].path != path:
                raise ValueError(
                    f"two result folders are called {loaded.name}: {found[loaded.name].path}, {path}"
                )
            found[loaded.name] = loaded
    return found


def derived(one: Results) -> dict[str, str]:
    """Text files that stand beside a results file, made from it."""
    return {"results.csv": tables.to_csv(one), "results.md": tables.report([one])}


def write_beside(one: Results) -> list[Path]:
    """Writes the tables and plots of one result set into its folder."""
    folder = one.path.parent
    written = []
    for name, text in derived(one).items():
        (folder / name).write_text(text, encoding="utf-8")
        written.append(folder / name)
    return written + draw([one], folder)


def rebuilt(text: str, found: Mapping[str, Results], where: str) -> str:
    """`text` with every block made anew. ValueError names a marker that asks for what is not there."""
    parts, at = [], 0
    while match := OPEN.search(text, at):
        end = text.find(CLOSE, match.end())
        line = text.count("\n", 0, match.start()) + 1
        if end < 0:
            raise ValueError(f"{where}:{line}: the block has no {CLOSE}")
        try:
            block = _block(match["name"], found)
        except ValueError as e:
            raise ValueError(f"{where}:{line}: {e}") from None
        parts += [text[at : match.end()], block, "\n"]
        at = end
    return "".join([*parts, text[at:]])


def _block(name: str, found: Mapping[str, Results]) -> str:
    words = name.split()
    if len(words) not in (1, 2, 3):
        raise ValueError(f"a marker reads SETS [LEVEL [VIEW]], got {name!r}")
    sets = _known("result set", words[0].split("+"), found)
    if len(words) == 1:
        return tables.summary([found[s] for s in sets])
    (level,) = _known("level", words[1:2], tables.LEVELS)
    (view,) = _known("view", words[2:] or ["time"], tables.VIEWS)
    return tables.VIEWS[view]([found[s] for s in sets], level)


def _known(kind: str, names: list[str], allowed: Iterable[str]) -> list[str]:
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(allowed) or 'none'}")
    return names

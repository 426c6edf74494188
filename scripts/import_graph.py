"""The import graph of the package, read from the code: rules that a test checks, and the picture in the docs.

`python scripts/import_graph.py docs/images/imports.svg` draws the packages. An arrow means "imports". Arrows that
follow from others are not drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
ROOT = "consilience"
# From the bottom to the top. A module imports only from packages in lower rows, or from its own package.
LAYERS = [
    ["core"],
    ["figures", "secure"],
    ["data"],
    ["compute"],
    ["metrics", "models"],
    ["tasks"],
    ["matching"],
    ["optim", "server"],
    ["inference"],
    ["algorithms"],
    ["evaluation"],
    ["engines"],
    ["runs"],
    ["studies"],
    ["config"],
    ["report"],
    ["diagnostics"],
    ["flower"],
    ["recipes"],
    [ROOT],
    ["cli"],
    ["__main__"],
]
RANK = {package: rank for rank, row in enumerate(LAYERS) for package in row}
Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((SOURCE / ROOT).rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of this package that a file imports anywhere: inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in inner if name in known)
            if any(name not in known for name in inner):
                yield node.module


def module_graph() -> Graph:
    """Which modules each module imports."""
    known = modules()
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def package_of(module: str) -> str:
    """The package below the root, or the root itself."""
    return [*module.split("."), ROOT][1]


def package_graph(graph: Graph) -> Graph:
    """Which packages each package imports."""
    found: Graph = {package_of(module): set() for module in graph}
    for module, imported in graph.items():
        found[package_of(module)] |= {package_of(other) for other in imported} - {package_of(module)}
    return found


def upward(graph: Graph) -> list[str]:
    """Imports that do not point to a lower row."""
    return [
        f"{module} imports {other}"
        for module, imported in sorted(graph.items())
        for other in sorted(imported)
        if package_of(module) != package_of(other) and RANK[package_of(other)] >= RANK[package_of(module)]
    ]


def cycle(graph: Graph) -> list[str]:
    """A cycle of modules that import each other, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := visit(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def reduced(graph: Graph) -> Graph:
    """The graph without edges that follow from others."""

    def below(package: str) -> set[str]:
        return graph[package].union(*(below(other) for other in graph[package]))

    return {a: {b for b in out if not any(b in below(c) for c in out - {b})} for a, out in graph.items()}


def svg(graph: Graph) -> str:
    """The packages as boxes, in rows by the longest way down."""
    depth: dict[str, int] = {}
    for package in sorted(graph, key=RANK.__getitem__):
        depth[package] = 1 + max((depth[other] for other in graph[package]), default=-1)
    rows = [[p for p in graph if depth[p] == d] for d in range(max(depth.values()) + 1)]
    width, step, box, height = 760, 62, 104, 28
    place = {
        package: (width * (i + 1) / (len(row) + 1), 30 + step * (len(rows) - 1 - d))
        for d, row in enumerate(rows)
        for i, package in enumerate(row)
    }
    lines = []
    for package, others in reduced(graph).items():
        x, y = place[package]
        for other in sorted(others):
            u, v = place[other]
            bend = 0 if depth[package] - depth[other] == 1 else 60 if u + x > width else -60
            lines.append(
                f'<path d="M{x:.0f},{y + height / 2} C{x + bend:.0f},{y + 45} {u + bend:.0f},{v - 45} '
                f'{u:.0f},{v - height / 2 - 3}" marker-end="url(#tip)"/>'
            )
    boxes = [
        f'<rect x="{x - box / 2:.0f}" y="{y - height / 2}" width="{box}" height="{height}" rx="5"/>'
        f'<text x="{x:.0f}" y="{y + 4}">{package if package != ROOT else "consilience"}</text>'
        for package, (x, y) in place.items()
    ]
    style = (
        "path{fill:none;stroke:#8a94a6} rect{fill:#eef2f8;stroke:#5b6b86} "
        "text{font:13px sans-serif;text-anchor:middle;fill:#1c2533}"
    )
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip += '<path d="M0,0 L8,4 L0,8 z" style="fill:#8a94a6;stroke:none"/></marker>'
    size = f'viewBox="0 0 {width} {30 + step * len(rows)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Packages and what they import">'
    return "\n".join([head, f"<style>{style}</style><defs>{tip}</defs>", *lines, *boxes, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(package_graph(module_graph())))

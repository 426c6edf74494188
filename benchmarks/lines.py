"""Sizes of the library: code lines of single methods, and lines, names and longest parts of the whole.

python benchmarks/lines.py prints one `name value` a line. Code lines are those of statements: imports, docstrings,
comments and blank lines do not count.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import consilience

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "consilience", ROOT / "tests"
METHODS = {
    "FedAvg": "fedavg", "FedProx": "fedprox", "SCAFFOLD": "scaffold", "FedEP": "fedep", "FedNP": "fednp",
    "PFNM": "pfnm", "EPGAN": "gan/epgan",
}  # fmt: skip
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines with code, without imports and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in SKIPPED for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def longest_function(files: list[Path]) -> tuple[int, str]:
    """(lines, where) of the longest function, with its docstring."""
    found = (0, "")
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                found = max(found, (size, f"{path.relative_to(SOURCE)}:{node.name}"))
    return found


def main() -> None:
    source, tests = sorted(SOURCE.rglob("*.py")), sorted(TESTS.rglob("*.py"))
    for name, path in METHODS.items():
        print(f"code_lines_{name} {code_lines((SOURCE / 'algorithms' / f'{path}.py').read_text())}")
    sizes = {path: len(path.read_text().splitlines()) for path in (*source, *tests)}
    print(f"source_lines {sum(sizes[path] for path in source)}")
    print(f"test_lines {sum(sizes[path] for path in tests)}")
    top = [p.name for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    print(f"top_level_modules {len([name for name in top if name != '__init__.py'])}")
    print(f"public_names {len(consilience.__all__)}")
    largest = max(source, key=sizes.__getitem__)
    print(f"longest_file {largest.relative_to(SOURCE)}")
    print(f"longest_file_lines {sizes[largest]}")
    lines, where = longest_function(source)
    print(f"longest_function {where}")
    print(f"longest_function_lines {lines}")


if __name__ == "__main__":
    main()

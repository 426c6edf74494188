"""Write the table of docs/models.md: every network of tests/support/zoo.py, many clients at once and one by one.

    python scripts/models_table.py

It takes a few minutes. Packages that cannot be imported are written as not tried.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: scripts/models_table.py -->", "<!-- end -->"
METHODS = ("FedAvg", "FedEP", "FedEP(L)")
PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft")


def cells(row, zoo) -> list[str]:
    """A line of the table."""
    first = [row.package, row.name, row.about]
    try:
        size = f"{zoo.task(row).size:,}"
    except ImportError:
        return [*first, "–", *["not tried"] * len(METHODS)]
    found = {}
    for name, method in zoo.methods(row).items():
        many, single = (zoo.learned(row, method, chunk) for chunk in (len(zoo.EACH), 1))
        found[name] = f"{zoo.apart(many, single):.0e}"
    print(row.id, found, file=sys.stderr, flush=True)
    return [*first, size, *(found.get(name, "–") for name in METHODS)]


def version(package: str, zoo) -> str:
    """A package with its version, or that it was not tried."""
    try:
        zoo.torchvision()
        return f"{package} {importlib.import_module(package).__version__}"
    except ImportError:
        return f"{package} (not tried)"


def main() -> None:
    """Replace the part of the page between the marks."""
    sys.path.insert(0, str(ROOT / "tests"))
    zoo = importlib.import_module("support.zoo")
    head = ["package", "network", "what is special", "parameters", *METHODS]
    lines = [head, ["---"] * len(head), *(cells(row, zoo) for row in zoo.ROWS)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    versions = ", ".join(version(package, zoo) for package in PACKAGES)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    made = f"{START}\n\n{table}\n\nVersions: {versions}.\n\n{END}"
    PAGE.write_text(before + made + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()

"""Methods since 2023 on CIFAR with ResNet-20, on one GPU: the rows of `after2023-cifar` side by side.

    python benchmarks/after2023_cifar.py run runs/cifar --minutes 9 --side 4 --rounds 20 --epochs 5  # until all is done
    python benchmarks/after2023_cifar.py run runs/cifar10 --data cifar10 --methods FedAvg BayesADMM --seeds 1
    python benchmarks/after2023_cifar.py run runs/quick --quick       # small networks and few images, on any machine
    python benchmarks/after2023_cifar.py table rows.jsonl             # the table of docs/results/after2023.md

A row is a data set, a method and a seed, in a process of its own; the first seed of all rows comes first. A row that is
stopped goes on from its checkpoint at the next call with the same options: take another folder for other rounds or
epochs. A finished row is one line of JSON, on the output and in rows.jsonl of the folder; `--known` names a file with
the lines of earlier calls, which are not run again. partial.jsonl has the scores so far of the rows that have begun.
One process leaves a part of a GPU idle; with NVIDIA's MPS running (`nvidia-cuda-mps-control -d`) several share it well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import consilience as cs
from consilience.recipes.after2023_cifar import DATA, QUICK, Study, read_curve
from crew import cell, folder_of, gap, read_lines, side_by_side, stoppable

METHODS = tuple(Study().methods("cifar10"))
PLAIN = "FedAvg"
ROWS, PARTIAL = "rows.jsonl", "partial.jsonl"


@dataclass(frozen=True)
class Row:
    """A data set, a method and a seed."""

    data: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.data}|{self.method}|{self.seed}"

    @classmethod
    def of(cls, key: str) -> Row:
        data, method, seed = key.split("|")
        return cls(data, method, int(seed))

    @property
    def folder(self) -> str:
        return folder_of(self.key)


def rows(options: argparse.Namespace) -> list[Row]:
    """All rows, the first seed of each first."""
    return [
        Row(data, method, seed)
        for seed in range(options.seeds)
        for data in options.data
        for method in options.methods
    ]  # fmt: skip


def study(options: argparse.Namespace) -> Study:
    """The sizes, and an engine for this machine."""
    if options.quick:
        return QUICK
    if torch.cuda.is_available():
        engine = cs.Simulator(chunk=Study().clients, workers=1, precision="bf16", compile=True)
    else:
        engine = cs.Simulator(device="cpu", chunk=1, workers=1, threads=1)
    return replace(Study(), rounds=options.rounds, epochs=options.epochs, every=options.every, engine=engine)


def learn(options: argparse.Namespace) -> None:
    """One row in this process."""
    row, here = Row.of(options.row), Path(options.out)
    line = study(options).learn(row.data, row.method, row.seed, here / row.folder)
    line["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = json.dumps({**line, "beside": options.side})
    with open(here / ROWS, "a") as file:
        file.write(text + "\n")
    print(text, flush=True)


def finished(here: Path, known: list[dict]) -> list[dict]:
    """The lines of all finished rows, one a row."""
    lines = {_row(line): line for line in (*known, *read_lines(here / ROWS))}
    return [lines[row] for row in sorted(lines, key=lambda row: (row.data, METHODS.index(row.method), row.seed))]


def _row(line: dict) -> Row:
    return Row(line["data"], line["method"], line["seed"])


def write_partial(here: Path, options: argparse.Namespace, done: list[dict]) -> None:
    """The scores so far of rows that have begun and not ended, in a file and in words."""
    ended, rounds, lines = {_row(line) for line in done}, study(options).rounds, []
    for row in rows(options):
        curve = read_curve(here / row.folder)
        if curve and row not in ended:
            lines.append({"data": row.data, "method": row.method, "seed": row.seed, "rounds": rounds, "curve": curve})
            last, accuracy, nll = (curve[-1][name] for name in ("round", "accuracy", "nll"))
            print(f"{row.key}: round {last} of {rounds}, accuracy {accuracy:.3f}, NLL {nll:.3f}")
    (here / PARTIAL).write_text("".join(json.dumps(line) + "\n" for line in lines))


def table(lines: list[dict]) -> str:
    """Markdown tables: means ± standard deviations over seeds, and the differences to FedAvg by seed."""
    said = list[str]()
    for data, title in DATA.items():
        some = [line for line in lines if line["data"] == data]
        if not some:
            continue
        sizes = sorted({(line["rounds"], line["epochs"]) for line in some})
        said += [f"**{title}** ({', '.join(f'{rounds} rounds of {epochs} epochs' for rounds, epochs in sizes)})", ""]
        said += ["| method | seeds | accuracy, % | to FedAvg | NLL | to FedAvg | ECE | s a round |", "|---" * 8 + "|"]
        plain = {line["seed"]: line for line in some if line["method"] == PLAIN}
        for name in dict.fromkeys(line["method"] for line in some):
            mine = [line for line in some if line["method"] == name]
            said.append(_shown(name, mine, plain, name == PLAIN))
            marginal = [{**line, **line["marginal"]} for line in mine if line["marginal"]]
            if marginal:
                said.append(_shown(f"{name}, marginal", marginal, plain, False))
        said.append("")
    return "\n".join(said)


def _shown(name: str, lines: list[dict], plain: dict[int, dict], itself: bool) -> str:
    pairs = [] if itself else [(line, plain[line["seed"]]) for line in lines if line["seed"] in plain]
    above, apart = ([mine[metric] - its[metric] for mine, its in pairs] for metric in ("accuracy", "nll"))
    accuracy = cell([100 * line["accuracy"] for line in lines], 1)
    nll, ece = (cell([line[metric] for line in lines], 3) for metric in ("nll", "ece"))
    seconds = f"{statistics.fmean(line['round_seconds'] for line in lines):.1f}"
    cells = (name, str(len(lines)), accuracy, gap([100 * d for d in above], 1), nll, gap(apart, 3), ece, seconds)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """One of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("out", help="a directory, which may hold an earlier call's; for table, a file of lines")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--side", type=int, default=4, help="rows at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=Study().rounds)
    parser.add_argument("--epochs", type=int, default=Study().epochs)
    parser.add_argument("--every", type=int, default=2, help="rounds from one evaluation to the next")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--known", help="a file with the lines of earlier calls")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.command == "table":
        print(table(read_lines(options.out)))
        return
    if options.row:
        with stoppable():
            torch.set_num_threads(1)
            learn(options)
        return
    here, until, known = Path(options.out), time.time() + 60 * options.minutes, read_lines(options.known)
    here.mkdir(parents=True, exist_ok=True)
    done = {_row(line) for line in finished(here, known)}
    todo = [row.key for row in rows(options) if row not in done]
    outcome = side_by_side(todo, "--row", until=until, at_once=options.side)
    found = finished(here, known)
    print(table(found))
    write_partial(here, options, found)
    if outcome.failed:
        print(f"failed, with a message above: {', '.join(outcome.failed)}")
    print("all is done" if outcome.done else f"{len(outcome.left)} rows are left: call again")


if __name__ == "__main__":
    main()

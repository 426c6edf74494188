"""The table of speech on one GPU: pooled training, methods of federated learning and EP-GAN on AN4, rows side by side.

    python benchmarks/speech.py prepare folder                 # where soundfile is: features in place of the audio
    python benchmarks/speech.py check runs/check               # the GPU's gradients against the CPU's; ms of a step
    python benchmarks/speech.py run runs/speech --minutes 9    # again and again, until it says that all is done
    python benchmarks/speech.py run runs/quick --quick         # small networks and few rounds, on any machine
    python benchmarks/speech.py table rows.jsonl               # the tables of docs/results/speech.md

A row is a method and a seed, in a process of its own; `--side` of them run at once, the most important ones first. A
row that is stopped goes on from its checkpoint at the next call. A finished row is one line of JSON, on the output and
in rows.jsonl of the directory; `--known` names a file with the lines of earlier calls, which are not run again. One
process leaves a part of a GPU idle; with NVIDIA's MPS running (`nvidia-cuda-mps-control -d`) several share it well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import consilience as cs
from consilience.data.loaders.files import data_root
from consilience.data.loaders.parquet import find_shards
from consilience.data.loaders.speech import features
from consilience.recipes import epgan_speech, fednp_speech
from consilience.recipes.speech_setting import QUICK, WORST, Speech, worst_speaker
from crew import cell, folder_of, gap, read_lines, side_by_side, stoppable

COLUMNS = ("audio", "text", "speaker_id")
METRICS = ("wer", "cer", WORST, "ece", "brier", "sequence_error_rate", "nll")
TITLES = {
    "pooled": "All utterances in one place",
    "groups": "16 clients, groups of speakers",
    "speakers": "74 clients, one speaker each",
    "gan": "EP-GAN, 16 clients",
}
FEDERATED = [name for name in fednp_speech.methods(Speech()) if name != "Pooled"]
CHECKED = (("pooled", "SRU", 1), ("groups", "FedAvg", 16), ("speakers", "FedAvg", 74), ("pooled", "GRU", 1))
GANS = [name for name in epgan_speech.methods(Speech()) if name != epgan_speech.PLAIN]  # that one is FedAvg


@dataclass(frozen=True)
class Row:
    """A part of the table, a method and a seed."""

    part: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.part}|{self.method}|{self.seed}"

    @property
    def folder(self) -> str:
        return folder_of(self.key)


def rows(seeds: int) -> Iterator[Row]:
    """All rows, the most important ones first."""
    order = [("pooled", ["SRU"]), ("groups", FEDERATED), ("gan", GANS), ("speakers", FEDERATED), ("pooled", ["GRU"])]
    yield from (Row("pooled", "SRU", seed) for seed in range(seeds))
    for seed in range(seeds):
        for part, methods in order[1:] if not seed else order[1:-1]:
            yield from (Row(part, method, seed) for method in methods)


def study(row: Row, options: argparse.Namespace) -> Speech:
    """The sizes of a row. A speaker has few utterances, so batches are smaller there."""
    if options.quick:
        cell = row.method.lower() if row.part == "pooled" else QUICK.cell
        return replace(QUICK, clients="speakers" if row.part == "speakers" else "groups", cell=cell)
    base = Speech(rounds=options.rounds, pooled_rounds=options.pooled_rounds, hidden=options.hidden)
    if row.part == "pooled":
        return replace(base, cell=row.method.lower(), engine=cs.Simulator(chunk=1, workers=1, compile=False))
    clients = "speakers" if row.part == "speakers" else "groups"
    size = 4 if row.part == "speakers" else 8
    engine = cs.Simulator(chunk=74 if row.part == "speakers" else 16, workers=1, compile=False)
    return replace(base, clients=clients, train=replace(base.train, batch_size=size), engine=engine)


def learn(options: argparse.Namespace) -> None:
    """One row in this process; its line goes into its own file."""
    row = Row(*options.row.split("|")[:2], int(options.row.split("|")[2]))
    here, mine = Path(options.out), study(row, options)
    start, rounds = time.time(), mine.pooled_rounds if row.part == "pooled" else mine.rounds
    if row.part == "gan":
        gans = epgan_speech.QUICK_GANS if options.quick else epgan_speech.Gans()
        at = epgan_speech.setting(mine, gans, row.method, here / f"{row.folder}-gan")(row.seed)
        method = epgan_speech.methods(mine)[row.method]
    else:
        at = mine.setting(row.seed)
        method = fednp_speech.methods(mine)["Pooled" if row.part == "pooled" else row.method]
    run = cs.fit(
        method, at.task, at.federation, rounds=rounds, test=at.test, seed=row.seed, progress=False,
        out=cs.runs.Storage(here / row.folder, checkpoint_every=max(1, rounds // 4)), resume=True,
        engine=mine.engine, evaluate_every=min(mine.every, rounds),
    )  # fmt: skip
    found = run.evaluation
    line = {
        "part": row.part,
        "method": row.method,
        "seed": row.seed,
        "rounds": rounds,
        "clients": len(at.federation),
        "parameters": at.task.size,
        **{name: value for name, value in {**found.point, **worst_speaker(run, at)}.items() if name in METRICS},
        "marginal": found.marginal and {name: value for name, value in found.marginal.items() if name in METRICS},
        "seconds": round(sum(line["seconds"] for line in run.history), 1),
        "wall": round(time.time() - start, 1),
        "curve": [[line["round"], line["eval"]["wer"]] for line in run.history if "eval" in line],
    }
    (here / f"{row.folder}.json").write_text(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def collected(here: Path, known: list[dict]) -> list[dict]:
    """The lines of all finished rows, also written to rows.jsonl."""
    found = {(line["part"], line["method"], line["seed"]): line for line in known}
    for path in sorted(here.glob("*.json")):
        line = json.loads(path.read_text())
        found[line["part"], line["method"], line["seed"]] = line
    lines = [found[key] for key in sorted(found)]
    (here / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def prepare(options: argparse.Namespace) -> None:
    """Write AN4's features to a folder that then stands for CONSILIENCE_DATA."""
    source, target = data_root(None) / "an4", Path(options.out) / "an4"
    target.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        (file,) = find_shards(source, split)
        (target / f"{split}.safetensors").write_bytes(features(file, COLUMNS).packed())


def check(options: argparse.Namespace) -> None:
    """The gradient of FedAvg's first batch on the GPU and on the CPU, and the milliseconds of a step."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for part, method, k in CHECKED:
        mine, found = study(Row(part, method, 0), options), {}
        at = mine.setting(0)
        federation = at.federation.pooled() if part == "pooled" else at.federation
        for device in devices:
            task, held = at.task.prepare(device), federation.to(device)
            cohort = cs.data.Cohort(held, held.sizes.argsort(descending=True)[:k], round=1, round_size=k, seed=0)
            _, batch = next(cohort.epoch(0, mine.train.batch_size))
            theta, gradient = task.initial().expand(len(cohort), -1), task.gradient()
            for n in range(6 if device == "cuda" else 1):
                if n == 1:
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                found[device] = gradient(theta, batch)[0].cpu()
            if device == "cuda":
                torch.cuda.synchronize()
                ms, most = 200 * (time.perf_counter() - start), torch.cuda.max_memory_allocated() / 2**30
                gap = float((found["cuda"] - found["cpu"]).norm() / found["cpu"].norm())
                print(f"{part} {method}, {k} clients: apart by {gap:.1e}, {ms:.0f} ms a step, {most:.1f} GiB")
                torch.cuda.reset_peak_memory_stats()


def table(lines: list[dict]) -> str:
    """Markdown tables: means ± standard deviations over seeds, and the paired difference to FedAvg."""
    said = list[str]()
    plain = {(line["part"], line["seed"]): line for line in lines if line["method"] == "FedAvg"}
    for part, title in TITLES.items():
        some = [line for line in lines if line["part"] == part]
        if not some:
            continue
        said += [f"**{title}** ({some[0]['rounds']} rounds)", ""]
        said += ["| method | seeds | WER, % | to FedAvg | CER, % | worst speaker | ECE | Brier | s a run |"]
        said += ["|---|---|---|---|---|---|---|---|---|"]
        for name in dict.fromkeys(line["method"] for line in some):
            mine = [line for line in some if line["method"] == name]
            base = "groups" if part == "gan" else part
            gaps = [
                100 * (line["wer"] - plain[base, line["seed"]]["wer"]) for line in mine if (base, line["seed"]) in plain
            ]
            said.append(_row(name, mine, gaps if name != "FedAvg" else []))
            marginal = [line["marginal"] for line in mine if line["marginal"]]
            if marginal:
                said.append(_row(f"{name}, marginal", marginal, []))
        said.append("")
    return "\n".join(said)


def fill(page: Path, made: str) -> None:
    """Put tables between a page's two marks."""
    before, rest = page.read_text(encoding="utf-8").split("<!-- rows -->")
    _, after = rest.split("<!-- end of rows -->")
    page.write_text(f"{before}<!-- rows -->\n{made}<!-- end of rows -->{after}", encoding="utf-8")


def _row(name: str, lines: list[dict], gaps: list[float]) -> str:
    wer, cer, worst = (cell([100 * line[m] for line in lines if m in line], 1) for m in ("wer", "cer", WORST))
    calibration = [cell([line[m] for line in lines], 3) for m in ("ece", "brier")]
    seconds = cell([line["seconds"] for line in lines if "seconds" in line], 0)
    cells = (name, str(len(lines)), wer, gap(gaps, 1), cer, worst, *calibration, seconds)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """One of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "check", "run", "table"))
    parser.add_argument("out", help="a directory, which may hold an earlier call's; for table, a file of lines")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--side", type=int, default=8, help="rows at once")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--methods", nargs="+", help="all unless told")
    parser.add_argument("--rounds", type=int, default=Speech().rounds)
    parser.add_argument("--pooled-rounds", type=int, default=Speech().pooled_rounds, help="of five epochs")
    parser.add_argument("--hidden", type=int, default=Speech().hidden)
    parser.add_argument("--known", help="a file with the lines of earlier calls")
    parser.add_argument("--page", help="for table: a page of Markdown to write the tables into")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if options.command == "prepare":
        return prepare(options)
    if options.command == "check":
        return check(options)
    if options.command == "table":
        made = table(read_lines(options.out))
        print(made)
        if options.page:
            fill(Path(options.page), made)
        return None
    if options.row:
        with stoppable():
            torch.set_num_threads(1)
            return learn(options)
    here, until, known = Path(options.out), time.time() + 60 * options.minutes, read_lines(options.known)
    here.mkdir(parents=True, exist_ok=True)
    done = {(line["part"], line["method"], line["seed"]) for line in collected(here, known)}
    chosen = [
        row
        for row in rows(options.seeds)
        if row.part in options.parts and (options.methods is None or row.method in options.methods)
    ]
    todo = [row.key for row in chosen if (row.part, row.method, row.seed) not in done]
    outcome = side_by_side(todo, "--row", until=until, at_once=options.side)
    print(table(collected(here, known)))
    if outcome.failed:
        print(f"failed, with a message above: {', '.join(outcome.failed)}")
    print("all is done" if outcome.done else "not all is done: call again")


if __name__ == "__main__":
    main()

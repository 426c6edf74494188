"""Rows of the tables of docs/results/epgan.md, one run at a time, in commands that resume each other.

    python benchmarks/gan_rows.py toy --seeds 5 --minutes 9         # again until it says that all rows are there
    python benchmarks/gan_rows.py toy --rounds 60 --seeds 5         # 60 rounds of two epochs, on a slow machine
    python benchmarks/gan_rows.py epgan-fmnist --minutes 9
    python benchmarks/gan_rows.py epgan-cifar10 --split pooled --methods GAN --epochs 1 --rounds 128 --device cuda
    python benchmarks/gan_rows.py epgan-cifar10 --epochs 3 --rounds 200 --seeds 3 --device cuda
    python benchmarks/gan_rows.py epgan-cifar10-ls --split pooled --methods GAN --epochs 1 --rounds 51 --device cuda
    python benchmarks/gan_rows.py toy --table                       # print what is there

A run that is cut by `--minutes` ends at its next checkpoint and is continued by the same command. Rows lie in `--out`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import consilience as cs
from consilience.core.errors import CallbackError
from consilience.metrics import spread
from consilience.recipes import epgan, epgan_toy
from consilience.runs import Storage
from consilience.studies.scores import paired_test

SETUPS = {setup.name: setup for setup in (epgan.FMNIST, epgan.CIFAR10, epgan.CIFAR10_LS)}
TOY = (epgan_toy.WGAN, epgan_toy.PROB, epgan_toy.EP, epgan_toy.SPRING, epgan_toy.PRINTED)


class OutOfTimeError(Exception):
    """The minutes of this command are over."""


def toy_row(label, seed, options):
    """Scores by both protocols, or after `--rounds` of two epochs."""
    scores, often = {}, epgan_toy.Protocol(", often", options.rounds, 2, 2) if options.rounds else None
    for protocol in epgan_toy.PROTOCOLS if often is None else (often,):
        learned = epgan_toy.learn(label, protocol, seed, quick=False, compile=options.compile)
        last = learned.scores[-1][1]
        scores |= {f"{name}{protocol.suffix}": value for name, value in last.items()}
        for metric in (epgan_toy.MODES, epgan_toy.GOOD):
            scores[f"{metric}, last quarter{protocol.suffix}"] = learned.late(metric)
    return scores


def image_row(setup, label, seed, options, end):
    """The scores of every evaluation of a run that is continued where it was cut."""
    setting, method = setup.setting(options.split, seed, False), setup.methods()[label]
    if options.epochs:
        method = replace(method, train=replace(method.train, epochs=options.epochs))
    rounds = options.rounds or setup.rounds
    where = Path(options.out) / setup.name / options.split / f"{label}-{seed}"

    def watch(run, line):
        if time.time() > end and line["round"] < rounds:
            raise OutOfTimeError

    workers = {"workers": 1, "threads": 1} if options.device == "cpu" else {}
    engine = cs.Simulator(device=options.device, chunk=10, compile=options.compile, **workers)
    run = cs.fit(
        method, setting.task, setting.federation, test=setting.test, rounds=rounds, seed=seed, engine=engine,
        evaluate_every=max(1, rounds // 10), out=Storage(where, checkpoint_every=1), resume=where.exists(),
        callbacks=[watch], progress=False,
    )  # fmt: skip
    evaluated = [line for line in run.history if "eval" in line]
    seconds = sorted(line["seconds"] for line in run.history)[len(run.history) // 2]
    return {**evaluated[-1]["eval"], "seconds a round": seconds, "curve": [(x["round"], x["eval"]) for x in evaluated]}


def table(folder, against):
    """Means and deviations over seeds, and paired differences of one method from the others."""
    rows = {}
    for path in sorted(folder.glob("*.json")):
        row = json.loads(path.read_text())
        rows.setdefault(row["method"], {})[row["seed"]] = row["scores"]
    for method, seeds in rows.items():
        print(f"{method}, {len(seeds)} seeds")
        for metric in [name for name in next(iter(seeds.values())) if name != "curve"]:
            mean, deviation = spread([scores[metric] for scores in seeds.values()])
            line = f"    {metric}: {mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")
            both = sorted(set(seeds) & set(rows.get(against, {})))
            if method != against and len(both) > 1:
                found = paired_test([(rows[against][seed][metric], seeds[seed][metric]) for seed in both])
                line += f"; {against} minus it: {found}"
            print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=["toy", *SETUPS])
    parser.add_argument("--methods", nargs="+", help="labels of the recipe's methods")
    parser.add_argument("--split", default=epgan.NON_IID)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, help="local epochs a round")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", default="runs/gan-rows")
    options = parser.parse_args()
    toy, end = options.setup == "toy", time.time() + 60 * options.minutes
    parts = (
        ["toy", f"{options.rounds}"] if toy else [options.setup, options.split, f"{options.rounds}-{options.epochs}"]
    )
    rows = Path(options.out).joinpath("rows", *parts)
    if options.table:
        return table(rows, epgan_toy.EP)
    labels = options.methods or (TOY if toy else list(SETUPS[options.setup].methods()))
    rows.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for label in labels:
            path = rows / f"{label}-{seed}.json"
            if path.exists():
                continue
            if time.time() > end:
                return print("out of time: run the same command again")
            try:
                one = toy_row(label, seed, options) if toy else image_row(
                    SETUPS[options.setup], label, seed, options, end
                )  # fmt: skip
            except CallbackError as error:
                if not isinstance(error.__cause__, OutOfTimeError):
                    raise
                return print(f"{label}, seed {seed}, was cut: run the same command again")
            path.write_text(json.dumps({"method": label, "seed": seed, "scores": one}))
            print(f"{label}, seed {seed}, is done", flush=True)
    return print("all rows are there")


if __name__ == "__main__":
    main()

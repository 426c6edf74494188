"""The fault drill: real processes that are killed or misbehave, and the model in the end.

    python benchmarks/drill.py [SCENARIO …] [--out FOLDER]

Three hospitals learn with FedEP over a SuperLink and SuperNodes on this machine (benchmarks/drill_app). For each
scenario the table shows the run's status, the rejected updates, the distance of the global posterior from the product
of the factors on the sites' disks, and its distance from the simulator's posterior without the rejected updates.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import consilience as cs
from consilience.core.records import leaves, tree_map
from consilience.flower.loopback import SUPERLINK, Loopback
from consilience.flower.messages import Token
from consilience.flower.registry import Registry
from consilience.flower.storage import ClientStorage
from consilience.runs.directory import RunDirectory

APP = Path(__file__).parent / "drill_app"
sys.path.insert(0, str(APP))
from drill.setting import METHODS, hospitals, task  # noqa: E402

SITES = ("Cleveland", "Hungary", "Switzerland")
VICTIM, WHEN, ROUNDS = "Hungary", 2, 3
METHOD = METHODS["FedEP"]


@dataclass
class Drill:
    """A federation of three sites, one of which is the victim, and the folder of its files."""

    folder: Path
    net: Loopback

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def states(self, site: str) -> Path:
        return self.folder / "states" / site

    def nodes(self, **victim: object) -> None:
        for site in SITES:
            self.net.node(site, states=str(self.states(site)), **(victim if site == VICTIM else {}))

    def start(self, **config: object) -> str:
        options = {"clients": 3, "rounds": ROUNDS, "out": str(self.out), "timeout": 60.0, **config}
        return self.net.start(APP, **options)

    def wait_for(self, seen: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not seen():
            if time.monotonic() > end:
                raise TimeoutError(f"the drill is stuck: see {self.folder}")
            time.sleep(0.05)

    def rounds(self) -> list[dict]:
        return RunDirectory(self.out).history() if self.out.exists() else []

    def mark(self, what: str) -> Path:
        return self.folder / what


def plain(drill: Drill) -> str:
    drill.nodes()
    return drill.net.wait(drill.start())


def misbehaving(fault: str, **settings: object) -> Callable[[Drill], str]:
    def scenario(drill: Drill) -> str:
        drill.nodes(fault=fault, when=WHEN, marks=str(drill.folder), **settings)
        return drill.net.wait(drill.start(**({"timeout": 25.0} if fault == "sleep" else {})))

    return scenario


def boast(drill: Drill) -> str:
    drill.nodes(fault="boast")
    return drill.net.wait(drill.start())


def killed_node(linger: str, **config: object) -> Callable[[Drill], str]:
    """Kill a node in a round, and start it again. If it has a key, the SuperLink refuses it for a minute."""

    def scenario(drill: Drill) -> str:
        drill.nodes(linger=linger, marks=str(drill.folder), seconds=8)
        run = drill.start(**config)
        drill.wait_for(drill.mark(linger).exists)
        drill.net.kill(VICTIM)
        drill.net.node(VICTIM, states=str(drill.states(VICTIM)))
        return drill.net.wait(run)

    return scenario


def killed_superlink(drill: Drill) -> str:
    """Kill the SuperLink, and the server's app with it, in a round; start a new SuperLink and run the app again."""
    linger = f"begun-{WHEN}"
    drill.nodes(linger=linger, marks=str(drill.folder), seconds=5)
    drill.start()
    drill.wait_for(drill.mark(linger).exists)
    drill.net.kill(SUPERLINK)
    drill.net.start_superlink()
    return drill.net.wait(drill.start())


def lost_disk(drill: Drill) -> str:
    """Delete a site's states after the first round."""
    drill.nodes(linger="begun-2", marks=str(drill.folder), seconds=4)
    run = drill.start(rounds=ROUNDS + 1)
    drill.wait_for(drill.mark("begun-2").exists)
    shutil.rmtree(drill.states(VICTIM))
    return drill.net.wait(run)


@dataclass(frozen=True)
class Scenario:
    run: Callable[[Drill], str]
    rejected: bool = False  # whether the victim's update of round WHEN is rejected
    same: bool = True  # whether the simulator has the same posterior
    secure: bool = False  # whether the sites have keys, and connect to a gate


SCENARIOS = {
    "nothing goes wrong": Scenario(plain),
    "node killed before it computed": Scenario(killed_node(f"begun-{WHEN}")),
    "node killed after it computed": Scenario(killed_node(f"computed-{WHEN}")),
    "node with a key killed before it computed": Scenario(
        killed_node(f"begun-{WHEN}", rounds=ROUNDS + 2), same=False, secure=True
    ),
    "SuperLink killed and run again": Scenario(killed_superlink),
    "reply lost after computing": Scenario(misbehaving("lose"), rejected=True),
    "sends NaN": Scenario(misbehaving("nan"), rejected=True),
    "sends wrong shapes": Scenario(misbehaving("shape"), rejected=True),
    "raises": Scenario(misbehaving("raise"), rejected=True),
    "sleeps past the timeout": Scenario(misbehaving("sleep", seconds=40.0), rejected=True),
    "claims 1e9 examples": Scenario(boast, same=False),
    "loses its disk": Scenario(lost_disk, same=False),
}


@dataclass(frozen=True)
class Without(cs.FedEP):
    """The method of the drill, with NaN in the victim's update of some rounds, which is therefore rejected."""

    rounds: tuple[int, ...] = ()

    def local(self, task, message, state, cohort):
        update, new = super().local(task, message, state, cohort)
        bad = (cohort.ids == SITES.index(VICTIM)) & (cohort.round in self.rounds)
        return tree_map(lambda leaf: leaf.masked_fill(bad.view(-1, *[1] * (leaf.dim() - 1)), torch.nan), update), new


def expected(absent: tuple[int, ...], rounds: int) -> cs.Gaussian:
    """The simulator's posterior, where the victim has no part in some rounds."""
    everyone = hospitals()[0]
    federation = cs.Federation.from_silos({site: everyone.client(everyone.names.index(site)) for site in SITES})
    engine = cs.Simulator(device="cpu", chunk=1, workers=1)
    return cs.fit(
        Without(METHOD.infer, rounds=absent), task(), federation, rounds=rounds, engine=engine, progress=False
    ).posterior


def apart(a: cs.Gaussian, b: cs.Gaussian) -> float:
    """The distance of two factors, relative to the norm of the second."""
    return float((a / b).norm / b.norm)


def product_of_sites(drill: Drill, tokens: torch.Tensor) -> cs.Gaussian:
    """Π q_k from the sites' own disks, in double precision."""
    registry, product = Registry.read(drill.out), None
    for site, token in zip(registry.names, tokens.tolist(), strict=True):
        result, _ = ClientStorage(drill.states(site), registry.experiment, site).read(Token(*token))
        factor = tree_map(lambda leaf: leaf[0].double(), result.state.factor)
        product = factor if product is None else product * factor
    return product


def play(name: str, folder: Path) -> dict[str, object]:
    scenario, start = SCENARIOS[name], time.monotonic()
    folder.mkdir(parents=True)
    with Loopback(folder / "net", secure=scenario.secure) as net:
        drill = Drill(folder, net)
        ended = scenario.run(drill)
    history = drill.rounds()
    done, saved = RunDirectory(drill.out).latest()
    q = saved.server.q
    assert all(leaf.isfinite().all() for _, leaf in leaves(q)), "the model is not finite"
    rejected = [(line["round"], entry["client"]) for line in history for entry in line["rejected"]]
    absent = tuple(number for number, site in rejected if site == VICTIM)
    assert {site for _, site in rejected} <= {VICTIM}, "another site was rejected"
    assert not scenario.same or (WHEN in absent) == scenario.rejected, f"the victim was rejected in rounds {absent}"
    return {
        "scenario": name,
        "ended": ended,
        "rounds": f"{len(history)} of {done}",
        "rejected": f"{VICTIM} in {', '.join(map(str, absent))}" if absent else "none",
        "q from Π sites": apart(tree_map(torch.Tensor.double, q), product_of_sites(drill, saved.states[0])),
        "q from simulator": apart(q, expected(absent, done)) if scenario.same else None,
        "seconds": round(time.monotonic() - start),
    }


def in_words(value: object) -> str:
    return "" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", help=f"of: {'; '.join(SCENARIOS)}. All, if none is given")
    parser.add_argument("--out", type=Path, help="keep what was written here")
    given = parser.parse_args()
    unknown = [name for name in given.scenario if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}")
    root = given.out or Path(tempfile.mkdtemp(prefix="drill-"))
    columns = ["scenario", "ended", "rounds", "rejected", "q from Π sites", "q from simulator", "seconds"]
    print("|", " | ".join(columns), "|\n|", " | ".join("---" for _ in columns), "|", flush=True)
    for name in given.scenario or SCENARIOS:
        row = play(name, root / name.replace(" ", "-"))
        cells = [in_words(row[column]) for column in columns]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()

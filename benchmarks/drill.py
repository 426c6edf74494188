"""The fault drill: real processes, killed and misled in every way we could think of; what is left in the end?

    python benchmarks/drill.py [SCENARIO …] [--out FOLDER]

Three hospitals learn with FedEP over a link and nodes on this machine (benchmarks/drill_app). After each scenario the
table says how the run ended, whom the server named, how far the global posterior is from the product of the factors on
the sites' own disks, and how far from what the simulator learns where the same updates are left out.
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
from consilience.flower.loopback import Loopback
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
    """A federation of three sites, one of which is the victim, and the folder of all that it writes."""

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
                raise TimeoutError(f"nothing came: see {self.folder}")
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


def killed_node(linger: str) -> Callable[[Drill], str]:
    """kill -9 of a node in mid-round, and up again."""

    def scenario(drill: Drill) -> str:
        drill.nodes(linger=linger, marks=str(drill.folder), seconds=8)
        run = drill.start()
        drill.wait_for(drill.mark(linger).exists)
        drill.net.kill(VICTIM)
        drill.net.node(VICTIM, states=str(drill.states(VICTIM)))
        return drill.net.wait(run)

    return scenario


def killed_link(drill: Drill) -> str:
    """kill -9 of the link, and the server's app with it, in the middle of a round; a new link, the same command."""
    linger = f"begun-{WHEN}"
    drill.nodes(linger=linger, marks=str(drill.folder), seconds=5)
    drill.start()
    drill.wait_for(drill.mark(linger).exists)
    drill.net.kill("link")
    drill.net.start_superlink()
    return drill.net.wait(drill.start())


def lost_disk(drill: Drill) -> str:
    """A site's states are gone after the first round."""
    drill.nodes(linger="begun-2", marks=str(drill.folder), seconds=4)
    run = drill.start(rounds=ROUNDS + 1)
    drill.wait_for(drill.mark("begun-2").exists)
    shutil.rmtree(drill.states(VICTIM))
    return drill.net.wait(run)


@dataclass(frozen=True)
class Scenario:
    play: Callable[[Drill], str]
    left_out: bool = False  # whether the victim has no part in round WHEN
    same: bool = True  # whether the simulator can say what should come of it


SCENARIOS = {
    "nothing goes wrong": Scenario(plain),
    "node killed before it computed": Scenario(killed_node(f"begun-{WHEN}")),
    "node killed after it computed": Scenario(killed_node(f"computed-{WHEN}")),
    "link killed and run again": Scenario(killed_link),
    "reply lost after computing": Scenario(misbehaving("lose"), left_out=True),
    "sends NaN": Scenario(misbehaving("nan"), left_out=True),
    "sends wrong shapes": Scenario(misbehaving("shape"), left_out=True),
    "raises": Scenario(misbehaving("raise"), left_out=True),
    "sleeps past the timeout": Scenario(misbehaving("sleep", seconds=40.0), left_out=True),
    "claims 1e9 examples": Scenario(boast, same=False),
    "loses its disk": Scenario(lost_disk, same=False),
}


@dataclass(frozen=True)
class Without(cs.FedEP):
    """The method of the drill, where the victim's update of some rounds is spoilt, and so left out."""

    rounds: tuple[int, ...] = ()

    def local(self, task, message, state, cohort):
        update, new = super().local(task, message, state, cohort)
        sick = (cohort.ids == SITES.index(VICTIM)) & (cohort.round in self.rounds)
        return tree_map(lambda leaf: leaf.masked_fill(sick.view(-1, *[1] * (leaf.dim() - 1)), torch.nan), update), new


def expected(left_out: tuple[int, ...], rounds: int) -> cs.Gaussian:
    """What the simulator makes of it, where the victim has no part in some rounds."""
    everyone = hospitals()[0]
    federation = cs.Federation.from_silos({site: everyone.client(everyone.names.index(site)) for site in SITES})
    engine = cs.Simulator(device="cpu", chunk=1, workers=1)
    return cs.fit(
        Without(METHOD.infer, rounds=left_out), task(), federation, rounds=rounds, engine=engine, progress=False
    ).posterior


def apart(a: cs.Gaussian, b: cs.Gaussian) -> float:
    """The distance of two factors by the length of the second."""
    return float((a / b).norm / b.norm)


def product_of_sites(drill: Drill, tokens: torch.Tensor) -> cs.Gaussian:
    """Π q_k from the sites' own disks, in double precision."""
    roster, product = Registry.read(drill.out), None
    for site, token in zip(roster.names, tokens.tolist(), strict=True):
        work, _ = ClientStorage(drill.states(site), roster.experiment, site).read(Token(*token))
        factor = tree_map(lambda leaf: leaf[0].double(), work.state.factor)
        product = factor if product is None else product * factor
    return product


def practise(name: str, folder: Path) -> dict[str, object]:
    scenario, start = SCENARIOS[name], time.monotonic()
    folder.mkdir(parents=True)
    with Loopback(folder / "net") as net:
        drill = Drill(folder, net)
        ended = scenario.play(drill)
    history = drill.rounds()
    done, saved = RunDirectory(drill.out).latest()
    q = saved.server.q
    assert all(leaf.isfinite().all() for _, leaf in leaves(q)), "the model is spoilt"
    left_out = [(line["round"], entry["client"]) for line in history for entry in line["rejected"]]
    absent = tuple(number for number, site in left_out if site == VICTIM)
    assert {site for _, site in left_out} <= {VICTIM}, "somebody else was left out"
    assert not scenario.same or (WHEN in absent) == scenario.left_out, f"the victim was left out in rounds {absent}"
    return {
        "scenario": name,
        "ended": ended,
        "rounds": f"{len(history)} of {done}",
        "left out": f"{VICTIM} in {', '.join(map(str, absent))}" if absent else "nobody",
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
    columns = ["scenario", "ended", "rounds", "left out", "q from Π sites", "q from simulator", "seconds"]
    print("|", " | ".join(columns), "|\n|", " | ".join("---" for _ in columns), "|", flush=True)
    for name in given.scenario or SCENARIOS:
        row = practise(name, root / name.replace(" ", "-"))
        cells = [
            f"{row[c]:.2g}" if isinstance(row[c], float) else "" if row[c] is None else str(row[c]) for c in columns
        ]
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()

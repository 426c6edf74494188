"""The pictures of reports in these docs: `python scripts/screenshots.py` (two minutes; needs chromium or chrome).

report.png and demo-phone.png are what `consilience demo` writes, survival.png is that of `examples/patients.toml`. The
others are of digits at ten clients: nobody has ever seen an 8 or a 9, which are the examples of another kind. All data
comes with the installation.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import consilience as cs
from consilience.data import Dataset, partition
from consilience.models import mlp
from consilience.recipes import RECIPES, Options
from consilience.report import write_report
from consilience.studies.compare import compare
from consilience.studies.setting import Setting

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
FRAME = (
    '<!doctype html><body style="margin:0;background:#888"><iframe src="{page}" '
    'style="border:0;width:{width}px;height:{bottom}px;margin-top:-{top}px"></iframe>'
)
DARK = "--blink-settings=preferredColorScheme=0"


def unseen() -> tuple[Dataset, Dataset]:
    """The digits 0 to 7, and 8 and 9."""
    data = cs.load("digits")
    x, y = (torch.cat([getattr(part, name) for part in (data.train, data.test)]) for name in ("x", "y"))
    known = y < 8
    rest = {"scale": data.train.scale, "shift": data.train.shift}
    inside = Dataset(x[known], y[known], classes=tuple("01234567"), name="digits 0 to 7", **rest)
    return inside, Dataset(x[~known], y[~known], name="8 and 9", **rest)


def hospitals(out: Path) -> None:
    """The demo."""
    recipe = RECIPES["hospitals"]
    recipe.run(Options(quick=False, seeds=recipe.seeds, out=out))


def patients(out: Path) -> None:
    """The survival study of `docs/clinical.md`."""
    setting = ["--set", f"data.root={ROOT / 'examples' / 'patients'}", "--out", str(out)]
    command = [sys.executable, "-m", "consilience", "run", str(ROOT / "examples" / "patients.toml"), *setting]
    subprocess.run(command, check=True, capture_output=True)


def digits(out: Path) -> None:
    """A comparison whose runs have reports too."""
    inside, outside = unseen()

    def setting(seed: int) -> Setting:
        train, test = partition.dirichlet(inside, clients=10, alpha=0.3, seed=seed).split(0.3, seed=seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Setting(cs.Classification(mlp(inside.x.shape[1:], 8, hidden=(24,))), train, test)

    train = cs.SGD(lr=0.05, epochs=2, batch_size=16, weight_decay=1e-3)
    methods = {
        "FedAvg": cs.FedAvg(train),
        "FedProx": cs.FedProx(train, mu=0.1),
        "FedEP": cs.FedEP(cs.inference.Laplace(train, kappa=20.0), damping=0.3),
        "LocalOnly": cs.LocalOnly(train),
    }
    result = compare(
        methods,
        setting,
        seeds=3,
        out=out,
        title="Digits at ten clients",
        text="Ten clients hold handwritten digits, most of them only a few kinds, and nobody has an 8 or a 9.",
        command="python scripts/screenshots.py",
        rounds=20,
        evaluate_every=2,
        outside=outside,
        engine=cs.Simulator(device="cpu", workers=1),
        progress=False,
    )
    for run in result.runs:
        write_report(out / run["directory"])


def shoot(page: Path, image: Path, width: int, height: int, *flags: str, top: int = 0) -> None:
    """A picture of a page from `top` on in a window of this size. A frame, as no window is as narrow as a phone."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("no chromium, chromium-browser or google-chrome found")
    with tempfile.TemporaryDirectory() as scratch:
        frame = Path(scratch) / "frame.html"
        frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width, bottom=height + top, top=top))
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            f"--user-data-dir={scratch}/profile", "--virtual-time-budget=3000", "--force-device-scale-factor=2",
            f"--window-size={width},{height}", f"--screenshot={image.resolve()}", *flags, frame.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    """Run, report, shoot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the runs are kept, and found again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch)
        for make in (hospitals, patients, digits):
            if not (out / make.__name__).exists():
                make(out / make.__name__)
            write_report(out / make.__name__)
        shoot(out / "hospitals" / "report.html", IMAGES / "report.png", 1100, 1790)
        shoot(out / "hospitals" / "report.html", IMAGES / "demo-phone.png", 390, 900, top=1800)
        shoot(out / "patients" / "report.html", IMAGES / "survival.png", 900, 1290, top=150)
        shoot(out / "digits" / "report.html", IMAGES / "comparison-dark.png", 1100, 1500, DARK)
        shoot(out / "digits" / "FedEP" / "seed-0" / "report.html", IMAGES / "phone.png", 360, 780)


if __name__ == "__main__":
    main()

"""The report of one run."""

from pathlib import Path
from typing import Any

from consilience.core import text
from consilience.report.page import Link, Page, Tile
from consilience.report.sections.clients import run_clients
from consilience.report.sections.clinical import coefficient_section, survival_section
from consilience.report.sections.configuration import footer, run_configuration
from consilience.report.sections.curves import run_curves, server_section
from consilience.report.sections.federation import communication_section, data_section
from consilience.report.sections.samples import sample_section
from consilience.report.sections.sets import SETS, run_sets
from consilience.report.sections.transcripts import transcript_section
from consilience.report.sections.uncertainty import posterior_section, run_calibration, run_entropy
from consilience.report.sections.words import KINDS, POINT
from consilience.runs.reading import read_json
from consilience.runs.stored import RunFiles


def run_page(directory: Path) -> Page:
    """The report of the run in `directory`."""
    run = RunFiles.read(directory)
    sections = [
        coefficient_section(run),
        survival_section(run),
        run_curves(run),
        sample_section(run),
        transcript_section(run),
        run_calibration(run),
        run_entropy(run),
        run_sets(run),
        run_clients(run),
        posterior_section(run),
        server_section(run),
        communication_section(run),
        data_section(run),
        run_configuration(run),
    ]
    tiles, title = _tiles(run), f"{run.method} on {run.part('federation').get('data', 'data')}"
    averaged = any(tile.note for tile in tiles)
    caption = "On the test data. Large: the posterior average. Small: the point model." if averaged else ""
    caption = f"{caption} {_tests(run)}".strip() if tiles else ""
    return Page("Federated run", title, _lead(run), tiles, caption, sections, footer(run), up=_comparison(directory))


def _comparison(directory: Path) -> Link | None:
    """The comparison that a run is part of: method/seed, or kind/method/seed for warm starts."""
    for up in ("../..", "../../.."):
        if (directory.resolve() / up / "comparison.json").is_file():
            title = read_json(directory.resolve() / up / "comparison.json").get("title")
            return Link(str(title or "Comparison"), f"{up}/report.html")
    return None


def _lead(run: RunFiles) -> str:
    fed, done, planned = run.part("federation"), len(run.rounds), run.config.get("rounds") or 0
    sentences = []
    if fed.get("clients"):
        hold = "holds" if fed["clients"] == 1 else "hold"
        split = f" ({fed['how']})" if fed.get("how") else ""
        held = f"{hold} {text.plural(fed.get('examples') or 0, 'example')}{split}"
        sentences.append(f"{text.plural(fed['clients'], 'client')} {held}.")
    rounds = text.plural(done, "round") if done >= planned else f"{done} of {planned:,} rounds"
    cohort = f" with {text.plural(run.config['cohort'], 'client')} each" if run.config.get("cohort") else ""
    seed = f", seed {run.config['seed']}" if "seed" in run.config else ""
    best = ""
    if run.best_round is not None:
        examples = text.plural(run.part("validation")["examples"], "validation example")
        best = f" The model is that of round {run.best_round}, the best on {examples}."
    return " ".join([*sentences, f"{rounds}{cohort}{seed}.{best}"])


def _tests(run: RunFiles) -> str:
    """The size of the test data, intervals and the majority baseline, in words."""
    found = run.evaluation
    size, sentences = sum(client.get("examples") or 0 for client in found.get("clients") or []), []
    if size:
        sentences.append(f"{text.plural(size, 'test example')} of {text.plural(len(found['clients']), 'client')}.")
    if found.get("level"):
        sentences.append(f"Brackets: {found['level']:.0%} confidence intervals.")
    if text.is_number(found.get("majority")):
        about = "the most frequent class of each client's training data"
        sentences.append(f"Majority baseline, {about}: accuracy {found['majority']:.3f}.")
    return " ".join(sentences)


def _tiles(run: RunFiles) -> list[Tile]:
    """The final scores: of the posterior average if there is one, with those of the point model below."""
    scores = {kind: (run.evaluation.get(kind) or {}).get("metrics") or {} for kind in KINDS}
    if not any(scores.values()):
        last: dict[str, Any] = next((line for line in reversed(run.rounds) if line.get("eval")), {})
        scores = {"point": last.get("eval") or {}, "marginal": last.get("marginal") or {}}
    found = []
    ends = {kind: (run.evaluation.get(kind) or {}).get("intervals") or {} for kind in KINDS}
    listed = text.in_order(metric for kind in ("marginal", "point") for metric in scores[kind] if metric not in SETS)
    for metric in listed[:10]:
        point, marginal = scores["point"].get(metric), scores["marginal"].get(metric)
        large = "point" if marginal is None else "marginal"
        notes = [text.interval(ends[large].get(metric))]
        notes += [] if marginal is None else [f"{POINT} {text.with_interval(point, ends['point'].get(metric))}"]
        found.append(Tile(text.short(metric), text.number(scores[large].get(metric)), "\n".join(filter(None, notes))))
    return found

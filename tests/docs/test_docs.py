"""Every Python block of the documentation runs, every config too; every command is understood, every link leads on."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml

import consilience as cs
from consilience import cli
from consilience.config import read_config
from consilience.recipes import RECIPES
from support.scenarios import blobs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    """The Python that a reader would type, in order."""
    return [text for language, title, text in FENCE.findall(page.read_text()) if language == "python" and not title]


def files(page: Path) -> dict[str, str]:
    """The files that a reader would write, by name."""
    return {title: text for _, title, text in FENCE.findall(page.read_text()) if title}


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TYPED = [page for page in PAGES if blocks(page)]
CONFIGS = [(page, name) for page in PAGES for name in files(page) if name.endswith(".toml")]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder to work in, with the examples, from which Python files can be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    with torch.random.fork_rng():
        yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write(page: Path, desk: Path) -> None:
    for name, text in files(page).items():
        (desk / name).write_text(text)


@pytest.mark.parametrize("page", TYPED, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page, desk, capsys):
    write(page, desk)
    namespace = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
    assert capsys.readouterr().out


def test_the_hazard_ratios_of_the_clinical_page_are_those_that_it_prints(desk, capsys):
    page = DOCS / "clinical.md"
    exec(compile(blocks(page)[0], str(page), "exec"), {})
    assert capsys.readouterr().out in page.read_text()


@pytest.mark.parametrize(("page", "name"), CONFIGS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_config_of_a_page_runs_with_all_methods_that_it_compares(page, name, desk):
    write(page, desk)
    loaded = read_config(desk / name)
    setting = loaded.setting()
    engine = cs.Simulator(device="cpu", chunk=4, workers=1)
    for method in (loaded.algorithm(), *loaded.methods().values()):
        run = cs.fit(
            method, setting.task, setting.federation, test=setting.test, rounds=1, engine=engine, progress=False
        )
        assert 0 <= run.history[-1]["eval"]["accuracy"] <= 1


def test_the_example_of_the_readme_prints_what_stands_there(desk, capsys):
    (code, printed), *_ = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_prose_and_code_have_at_most_100_characters(page):
    """Rows of tables and pictures cannot be broken."""
    lines = [line for line in page.read_text().splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in lines if len(line) > 100] == []


def test_the_pages_with_examples_are_known():
    assert {page.name for page in TYPED} >= {
        "README.md",
        "index.md",
        "quickstart.md",
        "adding.md",
        "fedep.md",
        "pfnm.md",
    }
    assert {name for _, name in CONFIGS} == {"clinics.toml", "focal.toml", "pumps.toml"}


def test_the_algorithm_of_the_guide_works_and_does_what_it_says(desk):
    write(DOCS / "adding.md", desk)
    from clipped import FedClip

    task, federation, _ = blobs()
    options = {"rounds": 1, "engine": cs.Simulator(device="cpu", chunk=4, workers=1), "progress": False}
    short = cs.fit(FedClip(cs.SGD(lr=0.1), length=1e-3), task, federation, **options)
    assert 0 < (short.posterior.mean - task.initial()).norm() <= 1.001e-3
    free = cs.fit(FedClip(cs.SGD(lr=0.1), length=1e6), task, federation, **options)
    fedavg = cs.fit(cs.FedAvg(cs.SGD(lr=0.1)), task, federation, **options)
    torch.testing.assert_close(free.posterior.mean, fedavg.posterior.mean)


def test_every_page_is_in_the_navigation():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    nav = pages(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"])
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_pictures_lead_to_files(page):
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_example_is_named_on_its_page():
    text = (DOCS / "examples.md").read_text()
    for file in (ROOT / "examples").glob("*.*"):
        assert f"`{file.name}`" in text, file.name


def test_the_pictures_of_the_concepts_are_those_of_the_script(tmp_path):
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    with torch.random.fork_rng():
        pictures.main([str(tmp_path)])
    made, kept = ({file.name for file in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "images"))
    shown = set(re.findall(r"images/(concept-[\w-]+\.svg)", (DOCS / "concepts.md").read_text()))
    assert made == shown == {name for name in kept if name.startswith("concept-")}


COMMANDS = sorted(
    {
        (page, line.removeprefix("$ ").split("  #")[0].strip())
        for page in PAGES
        for language, _, text in FENCE.findall(page.read_text())
        if language == "console"
        for line in text.replace("\\\n", " ").splitlines()
        if line.startswith("$ ")
    }
)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_command_of_a_page_is_understood(page, line, desk, monkeypatch):
    """Options, files and names: what a command then does is tested elsewhere, or takes hours."""
    first, *words = shlex.split(line)
    if first in ("pip", "make", "python"):
        makefile = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert first == "pip" or words[0] in makefile or (ROOT / words[0]).is_file()
        return
    assert first == "consilience"
    command = typer.main.get_command(cli.app).commands[words[0]]
    given = command.make_context(words[0], words[1:]).params
    if "config" in given:
        write(page, desk)
        monkeypatch.chdir(desk if (desk / given["config"]).exists() else ROOT)
        listed = [f"compare.algorithms={json.dumps(given['algorithms'].split(','))}"] if given.get("algorithms") else []
        assert read_config(Path(given["config"]), [*(given["set_"] or []), *listed]).methods()
    if words[0] == "reproduce":
        assert given["name"] in RECIPES

"""Reports in a real browser: an empty console, tables that sort, no sideways scrolling on a phone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from consilience.evaluation.samples import image_samples
from consilience.figures.pictures import Pictures, Row, heat
from consilience.flower.activity import FILE, SiteActivity, Snapshot
from consilience.flower.audit import AuditLog
from consilience.flower.status_page import html_of
from consilience.report import write_report
from support.pages import PAIRED, check_page, evaluation, make_comparison, make_run, rewrite
from support.sealed import put

PHONE = 360
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=3000",
    "--enable-logging=stderr", "--v=0", "--dump-dom",
]  # fmt: skip
# A window cannot be as narrow as a phone, but a frame can. It says what it sees; the page around it writes that down.
AROUND = """<!doctype html><body>{frames}<script>
addEventListener("message", (event) => {{
  const seen = document.createElement("pre");
  seen.textContent = event.data;
  document.body.append(seen);
}});
</script>"""
INSIDE = """<script>
addEventListener("load", () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const root = document.documentElement;
  const tables = [...document.querySelectorAll("table")].map((table) => {
    const column = (at) => [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.key);
    const last = table.tHead.rows[0].cells.length - 1;
    const orders = [];
    for (const click of [1, 2]) {
      table.tHead.rows[0].cells[last].querySelector("button").click();
      orders.push(column(last));
    }
    const scroll = table.parentElement;
    scroll.scrollLeft = 1000;
    const first = table.tBodies[0].rows[0].cells[0].getBoundingClientRect().left;
    return { orders, first: first - scroll.getBoundingClientRect().left };
  });
  const told = { name: NAME, width: innerWidth, content: root.scrollWidth, body: document.body.scrollWidth, tables };
  parent.postMessage(JSON.stringify(told), "*");
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome on PATH")
    return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run's report, a comparison's, and a federation's status, with long names and everything folded that can be."""
    place = tmp_path_factory.mktemp("pages")
    long = "a-hospital-whose-name-is-one-very-long-word-that-cannot-be-broken-anywhere"
    run = make_run(place / "run", clients=14, classes=10, names=[f"{long}-{k}" for k in range(14)])
    found = evaluation(names=[f"{long}-{k}" for k in range(14)])
    for index, client in enumerate(found["clients"]):
        client["metrics"] = {f"{metric} {long}": index / 7 for metric in ("accuracy", "nll", "ece", "brier", "mse")}
    found["samples"] = image_samples(torch.zeros(64, 1, 28, 28), torch.zeros(64, 1, 28, 28))
    put(run / "evaluation.json", found)
    tuning = [{"method": "FedEP", "chosen": {long: 1}, "score": 0.5, "all": [{"settings": {long: 1}, "score": 0.5}]}]
    comparison = make_comparison(place / "comparison")
    rewrite(comparison, paired=PAIRED, tuning=tuning, command=f"consilience reproduce {long}", title=long)
    wide = Pictures(long, long, [long, *"bcdefgh"], [Row(long, [heat([[0.0]], note=long), *[None] * 7])])
    rewrite(comparison, figures=[asdict(wide)])
    written = {where.name: write_report(where).read_text(encoding="utf-8") for where in (run, comparison)}
    sites = {f"{long}-{k}": SiteActivity(online=True, asked=k, refused_round=k, reason=long) for k in range(14)}
    (run / FILE).write_text(Snapshot(time=1.0, sites=sites).model_dump_json())
    for site in [*sites][:9]:
        AuditLog(run).write("admitted", site=site)
    return {**written, "status": html_of(run)}


@pytest.fixture(scope="module")
def visit(browser: str, pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """What the pages say of themselves, by name, and what the browser had to say."""
    place = tmp_path_factory.mktemp("visit")
    frames = ""
    for name, page in pages.items():
        (place / f"{name}.html").write_text(page + INSIDE.replace("NAME", json.dumps(name)), encoding="utf-8")
        frames += f'<iframe src="{name}.html" style="border:0;width:{PHONE}px;height:740px"></iframe>'
    (place / "around.html").write_text(AROUND.format(frames=frames))
    command = [browser, *FLAGS, f"--user-data-dir={place / 'profile'}", (place / "around.html").as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = [json.loads(html.unescape(found)) for found in re.findall(r"<pre>(.*?)</pre>", ended.stdout, re.DOTALL)]
    return {entry["name"]: entry for entry in told}, ended.stderr


NAMES = pytest.mark.parametrize("name", ["run", "comparison", "status"])


def test_the_console_stays_empty(visit: tuple[Any, str]) -> None:
    assert [line for line in visit[1].splitlines() if "CONSOLE" in line] == []


@NAMES
def test_a_phone_does_not_scroll_sideways(visit: tuple[Any, str], name: str) -> None:
    seen = visit[0][name]
    assert seen["width"] == PHONE
    assert max(seen["content"], seen["body"]) <= PHONE


@NAMES
def test_a_click_on_a_heading_sorts_and_another_the_other_way(visit: tuple[Any, str], name: str) -> None:
    tables = visit[0][name]["tables"]
    assert len(tables) >= 3

    def order(key: str) -> tuple[bool, Any]:
        return (False, float(key)) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", key) else (True, key)

    for up, down in (table["orders"] for table in tables):
        rest = [key for key in up if key != ""]
        assert rest == sorted(rest, key=order)
        assert [key for key in down if key != ""] == rest[::-1]
        assert "" not in down[: len(rest)]  # what has no number comes last both times
    assert any(len(set(up)) > 1 for up, _ in (table["orders"] for table in tables))


@NAMES
def test_the_first_column_stays_where_it_is(visit: tuple[Any, str], name: str) -> None:
    assert [table["first"] for table in visit[0][name]["tables"]] == pytest.approx([0] * len(visit[0][name]["tables"]))


@NAMES
def test_nothing_is_loaded_from_elsewhere(pages: dict[str, str], name: str) -> None:
    check_page(pages[name])
    page = re.sub(r"<a [^>]*>", "", pages[name])  # links in text lead elsewhere
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.search(r"url\(\s*['\"]?(?:https?:)?//|@import", page)


def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path, classes=10)
    put(run / "evaluation.json", evaluation())
    here = write_report(run).read_bytes()
    subprocess.run([sys.executable, "-m", "consilience", "report", str(run)], check=True, capture_output=True)
    assert (run / "report.html").read_bytes() == here

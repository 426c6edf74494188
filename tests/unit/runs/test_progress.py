"""The bar of a run appears in a notebook."""

import os
from pathlib import Path

import pytest

CODE = """
import consilience as cs, torch
x = torch.randn(40, 3)
data = cs.Federation.from_owner(cs.Dataset(x, (x.sum(1) > 0).long()), torch.arange(40) % 4)
engine = cs.Simulator(device="cpu", chunk=4, workers=1)
run = cs.fit(cs.FedAvg(), cs.Classification(torch.nn.Linear(3, 2)), data, rounds=7, engine=engine{options})
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shown", [True, False])
def test_a_notebook_shows_one_bar_that_ends_at_the_last_round(monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    pytest.importorskip("ipykernel")
    client, formats = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH')}")
    cell = formats.v4.new_code_cell(CODE.format(options="" if shown else ", progress=False"))
    notebook = formats.v4.new_notebook(cells=[cell])
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    pages = [output["data"]["text/html"] for output in notebook.cells[0].outputs if "data" in output]
    assert len(pages) == shown
    assert all("7/7" in page and "loss" in page for page in pages)

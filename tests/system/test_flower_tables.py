"""Tables at real sites: the preparation is the simulator's, differences end the run before it starts, latecomers."""

import pytest
import torch

import consilience as cs
from consilience.core.errors import DataError
from consilience.data.site import read_site
from consilience.flower import client_app
from consilience.tasks.balance import balanced
from support.flower_grid import FEDAVG, World, assert_same

pytestmark = pytest.mark.usefixtures("_unhurried")
SEXES = ("m", "f", "f")
FILES = {
    "Basel": "id;age;sex;chol;ill\n" + "".join(f"{i};{50 + i},5;{SEXES[i % 3]};{180 + i};{i % 2}\n" for i in range(14)),
    "Bern": "age,sex,id,ill\n" + "".join(f"{40 + i},{SEXES[i % 3]},{i},{i % 3 == 0:d}.0\n" for i in range(11)),
    "Chur": "age,sex,chol,ill\n60,x,,1\n" + "".join(f"{61 + i},m,{'?' if i % 4 else 200 + i},1\n" for i in range(8)),
}


def task(preparation):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = torch.nn.Linear(len(preparation.feature_names), 2)
    return balanced(cs.Classification(module, weights="balanced"), preparation.target.counts)


class Tables(World):
    """Sites with CSV files."""

    def start(self, site):
        def load(node):
            return read_site(self.folder / f"{node['site']}.csv", classes=("0", "1"), target="ill", categorical=["sex"])

        return self.grid.start(client_app(self.method, self.task, load), site=site, states=str(self.disk(site)))


@pytest.fixture
def world(tmp_path):
    def make(**files):
        for name, text in {**FILES, **files}.items():
            (tmp_path / f"{name}.csv").write_text(text)
        tables = {name: tmp_path / f"{name}.csv" for name in FILES}
        federation = cs.Federation.from_tables(tables, target="ill") if not files else None
        return Tables(FEDAVG, task, federation or cs.Federation.from_silos(dict.fromkeys(FILES, DUMMY)), tmp_path)

    return make


DUMMY = cs.Dataset(torch.zeros(1, 1), torch.tensor([0]))


def test_preparation_and_model_are_the_simulators(world):
    there = world()
    run, simulator = there.serve(2), there.federation.data.preparation
    assert run.federation.data.preparation == simulator == cs.load_run(there.out).preparation
    assert run.federation.data.features == ("age", "sex=f", "sex=m", "sex=other", "chol", "chol missing")
    there.task = task(simulator)
    assert_same(run.server, there.simulated(2).server)
    assert_same(run.predict(there.folder / "Basel.csv"), run.predict(there.federation.client("Basel").x))


def test_a_resumed_run_and_a_site_that_comes_later_use_the_stored_preparation(world):
    there = world()
    before = there.serve(1).federation.data.preparation
    (there.folder / "Basel.csv").write_text(FILES["Basel"].replace(";50,5;", ";99,5;"))
    there.restart("Chur")
    assert there.serve(2).federation.data.preparation == before


def test_differences_between_sites_end_the_run_before_it_starts_and_quote_no_cell(world):
    there = world(Bern="age,sex,ill\n" + "old,m,1\nyoung,f,0\n" * 4, Chur="Age,sex,ill\n" + "1,m,1\n2,f,0\n" * 4)
    with pytest.raises(DataError) as caught:
        there.serve(1)
    assert "columns 'age' and 'Age': give them one name, or ignore one; column 'age' holds numbers" in str(caught.value)
    assert "'Basel' and text at 'Bern'" in str(caught.value)
    assert "young" not in str(caught.value)
    assert not there.out.exists()


def test_a_site_that_sends_an_impossible_summary_is_rejected(world, caplog):
    there = world()
    there.participation = {"patience": 30.0}

    def claims(reply):
        content = reply.content.config_records["payload"]
        content["json"] = content["json"].replace('"missing":0', '"missing":99', 1)
        return reply

    there.instead["query", "Bern"] = claims
    with pytest.raises(cs.ConsilienceError, match="only 2 of 3 sites came online"):
        there.serve(1)
    assert "column 'age' has more cells than rows" in caplog.text


def test_all_that_a_site_says_about_its_table_is_its_summary(world):
    there, texts = world(), []
    there.instead["query", "Basel"] = lambda reply: texts.append(str(reply.content.config_records["payload"])) or reply
    there.serve(1)
    said, *later = texts
    assert '"categories":{"m":5,"f":9}' in said
    assert all('summary":null' in text for text in later)

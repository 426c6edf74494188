"""A site's policy is followed, whatever the server asks."""

import re
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import consilience as cs
from consilience.core.errors import ConfigError
from consilience.data.site import read_site
from consilience.flower.client import FlowerClient, summary_info
from consilience.flower.deployment.node import run_node
from consilience.flower.messages import CalibrateRequest, EvaluateRequest, SecurePart, StatisticsRequest, encode
from consilience.flower.policy import Policy, SiteError
from consilience.flower.site_data import Parts
from support.deployment import SILOS
from support.flower_grid import FEDAVG, TRAIN, assert_same, content, unhurried
from support.scenarios import NAMES, blobs
from support.secure_sums import TERMS
from support.trust import Sites

BASEL = NAMES[0]
SECURE_PART = SecurePart(terms=TERMS, clients=3, largest=1, examples=3, counted=1, reach=1.0)


@pytest.fixture(autouse=True)
def quick():
    with unhurried():
        yield


def merged(federation, names, classes):
    """The federation with these names of sites, and no more classes than these."""
    data = replace(federation.data, y=federation.data.y.clamp(max=classes - 1), classes=tuple("abc"[:classes]))
    return replace(federation, data=data, names=names)


@pytest.fixture
def world(tmp_path):
    """Four sites with held-out examples; the first one has this policy."""

    def world(policy="", method=FEDAVG, all_sites=False, classes=3, place="world", **options):
        task, train, test = blobs(clients=4)
        names = NAMES[:4]
        policies = dict.fromkeys(names if all_sites else names[:1], policy)
        if classes == 2:
            task = cs.Classification(torch.nn.Linear(2, 2))
        train, test = (merged(part, names, classes) for part in (train, test))
        return Sites(method, task, train, tmp_path / place, test, policies=policies, **options)

    return world


def refused(run):
    """The reasons why updates were rejected, by site."""
    return {entry["client"]: entry["reason"] for line in run.history for entry in line["rejected"]}


# The file


def test_the_template_explains_every_option_and_shows_its_default(tmp_path):
    text = files("consilience.flower.deployment").joinpath("templates", "policy.toml.j2").read_text()
    (tmp_path / "policy.toml").write_text(text)
    assert Policy.read(tmp_path / "policy.toml") == Policy()
    shown = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    (tmp_path / "shown.toml").write_text(shown)
    found = Policy.read(tmp_path / "shown.toml")
    assert found.model_dump() == Policy().model_dump()
    assert found.model_fields_set == set(Policy.model_fields)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("secure_onyl = true", "secure_onyl: unknown key; did you mean 'secure_only'?"),
        ('scores = "sometimes"', "scores must be"),
        ("secure_only = 1", "secure_only must be True or False, got 1"),
        ("smallest_cohort = 2\nsecure_only = true", "smallest_cohort must be at least 3, got 2"),
        ("smallest_cohort = 5", "smallest_cohort = 5 is about secure sums, and the server may ask outside of them"),
        ("round_examples = 0", "round_examples must be at least 1, got 0"),
        ("scores = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path, text, sentence):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Policy.read(tmp_path / "policy.toml")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_node_does_not_start_with_a_policy_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r"policy .* cannot be read: No such file"):
        run_node(9094, ["--node-config", f'site="Basel" policy="{tmp_path / "none.toml"}"'])


@pytest.mark.parametrize("text", ["scores = 3", None])
def test_a_site_whose_policy_cannot_be_used_sends_nothing(world, caplog, text):
    there = world("")
    path = there.disk(BASEL) / "policy.toml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(cs.core.ConsilienceError, match="only 3 of 4 sites came online"):
        there.serve(1)
    assert "its policy cannot be used; the log of its node says why" in caplog.text
    assert all("its policy cannot be used" in text for text in there.texts(BASEL))


# What leaves


def test_the_defaults_let_everything_leave_that_a_run_needs(world):
    run = world("").serve(1, evaluate_every=1)
    assert refused(run) == {}
    assert {"loss", "eval"} <= run.history[0].keys()


def test_a_site_with_secure_only_sends_no_update_and_no_scores_of_its_own(world, caplog):
    there = world("secure_only = true")
    run = there.serve(1, evaluate_every=1)
    assert "its policy has secure_only = true" in refused(run)[BASEL]
    assert f"the scores of {BASEL!r} are rejected: SiteError: its policy has secure_only = true" in caplog.text
    assert not any(b"__metadata__" in data for site, kind, data in there.sent if site == BASEL), "a packed record left"
    assert any(b"__metadata__" in data for site, kind, data in there.sent if site != BASEL)


def test_a_site_with_secure_only_takes_part_in_secure_sums(world):
    there = world("secure_only = true", all_sites=True, secure=True)
    run = there.serve(1, evaluate_every=1)
    assert refused(run) == {}
    assert {"loss", "eval"} <= run.history[0].keys()


def test_a_secure_sum_of_fewer_sites_than_a_site_wants_is_refused_by_it(world):
    there = world("secure_only = true\nsmallest_cohort = 5", secure=True)
    run = there.serve(1)
    assert "its policy has smallest_cohort = 5, and the sum would be of 4 sites" in refused(run)[BASEL]
    assert (run.history[0]["clients"], "train" in {kind for site, kind, _ in there.sent if site == BASEL}) == (3, False)


@pytest.mark.parametrize("level", ["summed", "never"])
def test_scores_that_are_not_open_stay_at_the_site(world, caplog, level):
    there = world(f'scores = "{level}"')
    run = there.serve(1, evaluate_every=1)
    assert BASEL not in [client["name"] for client in content(there.out / "evaluation.json")["clients"]]
    assert "eval" in run.history[0], "the others' scores count"
    texts = there.texts(BASEL, "evaluate")
    if level == "never":
        assert texts == [], "it holds nothing out, as far as the server knows"
    else:
        assert texts
        assert all('its policy has scores = "summed"' in text for text in texts)
        assert 'its policy has scores = "summed", so it does not send these numbers' in caplog.text


def test_summed_scores_leave_in_secure_sums(world):
    assert "eval" in world('scores = "summed"', all_sites=True, secure=True).serve(1, evaluate_every=1).history[0]


@pytest.mark.parametrize("secure", [False, True])
def test_losses_that_stay_count_as_none(world, secure):
    plain = world("", secure=secure).serve(1)
    run = world('losses = "never"', secure=secure, place="other").serve(1)
    assert_same(run.server, plain.server)
    assert run.history[0]["loss"] != pytest.approx(plain.history[0]["loss"]), "the mean of the other sites"
    assert refused(run) == {}


def test_no_loss_of_any_site_is_no_loss(world):
    assert "loss" not in world('losses = "never"', all_sites=True).serve(1).history[0]


def test_class_counts_that_are_not_open_stay_at_the_site(world, caplog):
    there = world('class_counts = "summed"', classes=2)
    run = there.serve(1, evaluate_every=1)
    assert "eval" in run.history[0]
    assert not any("ScoreCounts" in text for text in there.texts(BASEL))
    assert any("ScoreCounts" in text for text in there.texts(NAMES[1]))
    assert f"the AUROC is a mean of the sites' own: {BASEL!r} keep their counts" in caplog.text


@pytest.mark.parametrize("option", ["calibration", "statistics"])
@pytest.mark.parametrize(
    ("level", "leaves"), [("open", (True, True)), ("summed", (False, True)), ("never", (False,) * 2)]
)
def test_calibration_and_statistics_that_are_not_open_stay_at_the_site(world, option, level, leaves):
    there = world(f'{option} = "{level}"')
    about = {"fingerprint": "f", "seed": 0, "precision": "float32"}
    request = {
        "calibration": CalibrateRequest(**about, samples=1, score="lac"), "statistics": StatisticsRequest(**about)
    }[option]  # fmt: skip
    for secure, may_leave in zip((None, SECURE_PART), leaves, strict=True):
        message = Message(encode(request.model_copy(update={"secure": secure})), there.nodes[BASEL], f"query.{option}")
        message.metadata.__dict__["_message_id"] = "1"
        node = there.grid.nodes[there.nodes[BASEL]]
        with pytest.raises(cs.core.ConsilienceError) as caught:  # at the latest, the request has another fingerprint
            node.app(message, Context(1, 7, node.settings, RecordDict(), {}))
        assert (f'its policy has {option} = "{level}", so it does' in str(caught.value)) != may_leave


def test_a_site_that_sends_no_scores_holds_nothing_out_as_far_as_the_server_knows(tmp_path):
    task, train, test = blobs(clients=1)
    data = cs.Data(train.client(0), test.client(0), test.client(0))
    policies = (Policy(scores="never", calibration="never"), Policy(scores="summed", calibration="summed"))
    found = [FlowerClient(BASEL, FEDAVG, task, lambda: data, tmp_path, policy=one).info() for one in policies]
    assert [(one.held_out, one.calibration) for one in found] == [(0, 0), (len(data.test), len(data.test))]


@pytest.mark.parametrize(
    "method",
    [
        cs.algorithms.Ensemble(TRAIN, by_class=True),
        cs.algorithms.FedCGS(plug_in=True),
        cs.algorithms.FedNPClasses(TRAIN),
    ],
    ids=lambda method: type(method).__name__,
)
def test_an_update_with_class_counts_does_not_leave(world, method):
    run = world('class_counts = "summed"', method).serve(1)
    assert 'its policy has class_counts = "summed"' in refused(run)[BASEL]


def silo(site="north"):
    return read_site(SILOS / f"{site}.csv", classes=("0", "1"), target="target", holdout=0.25)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"table_sums": False}, "table_sums = false"),
        ({"secure_only": True}, "secure_only = true and no line table_sums = true"),
        ({"round_examples": 10}, "round_examples = 10, and the sums over a table count its rows"),
        ({"class_counts": "summed"}, 'class_counts = "summed", and the sums over a table count its classes'),
        ({}, ""),
        ({"secure_only": True, "table_sums": True}, ""),
    ],
)
def test_sums_over_a_table_leave_if_all_that_they_tell_may(policy, reason):
    if reason:
        with pytest.raises(SiteError, match=f"its policy has {re.escape(reason)}, so the sums over its table stay"):
            summary_info("north", FEDAVG, silo, Policy(**policy))
    else:
        assert summary_info("north", FEDAVG, silo, Policy(**policy)).summary


# Numbers of examples


def test_a_site_with_rounded_numbers_does_what_a_site_with_so_many_examples_does(tmp_path):
    task, train, test = blobs(clients=1, each=40)
    whole, step = cs.Data(train.client(0), test.client(0)), 7
    fewer = cs.Data(*(part[torch.arange(len(part) // step * step)] for part in (whole.train, whole.test)))
    one, other = (
        FlowerClient(BASEL, FEDAVG, task, lambda data=data: data, tmp_path / str(n), policy=Policy(round_examples=n))
        for n, data in ((step, whole), (1, fewer))
    )
    assert one.info() == other.info()
    assert (one.info().examples, one.info().held_out) == (28, 7)
    belief = {"belief": cs.core.pack(cs.core.Point(task.initial()))}
    request = EvaluateRequest(fingerprint=one.fingerprint, seed=0, precision="float32", samples=1)
    assert one.evaluate(request, belief) == other.evaluate(request, belief)


def test_the_weight_of_an_update_is_the_rounded_number(world):
    there = world("round_examples = 7")
    weights = []
    there.always[BASEL] = lambda delivery: delivery.with_update(
        lambda update: weights.append(float(update.weight)) or update
    )
    there.serve(1)
    size = int(there.federation.sizes[0])
    assert size % 7
    assert weights == [size // 7 * 7]


def test_a_site_with_fewer_examples_than_it_rounds_to_is_refused():
    _, train, _ = blobs(clients=1)
    with pytest.raises(SiteError, match="its policy has round_examples = 1000, and it has fewer examples"):
        Parts.of(train.client(0), 1000)


# Errors


SECRET = "Anna Muster"


@contextmanager
def failing(there, where):
    """The code of the user at all sites fails, with an error that quotes data."""

    def fails(*args, **kwargs):
        raise KeyError(SECRET)

    with pytest.MonkeyPatch.context() as patch:
        kind, name = {
            "loader": (Sites, "data"),
            "train": (FlowerClient, "share"),
            "evaluate": (FlowerClient, "scores"),
        }[where]
        patch.setattr(kind, name, fails)
        yield


@pytest.mark.parametrize("where", ["loader", "train", "evaluate"])
@pytest.mark.parametrize("allowed", [False, True])
def test_texts_of_errors_in_users_code_leave_only_if_the_policy_says_so(world, where, allowed, caplog):
    there = world("error_texts = true" if allowed else "", all_sites=True, participation={"patience": 1.0})
    with failing(there, where):
        try:
            there.serve(1, evaluate_every=1)
        except cs.core.ConsilienceError:
            assert where != "evaluate"
    texts = "".join(there.texts(BASEL))
    assert (SECRET in texts) == allowed
    if not allowed:
        failed = {"train": "round 1 failed", "evaluate": "its scores could not be computed"}
        assert f"{failed.get(where, 'its data cannot be read')}; the log of its node says why" in texts


def test_the_reason_of_a_failure_is_in_the_log_of_the_node(world, caplog):
    there = world("", participation={"patience": 1.0})
    with failing(there, "train"), pytest.raises(cs.core.ConsilienceError):
        there.serve(1)
    assert SECRET in "".join(record.exc_text or "" for record in caplog.records)

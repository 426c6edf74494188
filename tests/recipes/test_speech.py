"""Speech: word error rates that fall, features of discriminators, and the EP prior on a supervised network."""

import pytest
import torch

import consilience as cs
from consilience.core import TaskError
from consilience.core.errors import DataError
from consilience.recipes.epgan_speech import QUICK_GANS, EPAveraging, joined, windows
from consilience.recipes.fednp_speech import methods
from consilience.recipes.speech_setting import QUICK, WORST, speaker_groups, worst_speaker


@pytest.fixture(scope="module")
def setting():
    try:
        return QUICK.setting(0)
    except DataError as error:
        if "needs the file" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(("method", "most"), [("Pooled", 0.5), ("FedAvg", 0.95)])
def test_the_word_error_rate_of_the_quick_size_falls(setting, method, most):
    run = cs.fit(
        methods(QUICK)[method], setting.task, setting.federation, rounds=QUICK.rounds, test=setting.test,
        engine=QUICK.engine, progress=False,
    )  # fmt: skip
    rates = [line["eval"]["wer"] for line in run.history]
    assert rates[-1] < most
    assert rates[-1] < rates[0] or rates[0] < most
    assert worst_speaker(run, setting)[WORST] >= rates[-1]
    read = run.task.decode(run.predict(setting.test.x))
    said = run.task.text(setting.test.targets(torch.arange(len(setting.test))))
    assert cs.metrics.text_errors(said, [one.text for one in read])[2] / len(" ".join(said).split()) == rates[-1]


def test_a_client_is_a_group_of_whole_speakers(setting):
    data = setting.test
    fed = speaker_groups(data, 5, seed=1)
    groups = [set(data.groups["speaker"][fed.indices(k)].tolist()) for k in range(5)]
    speakers = len(set(data.groups["speaker"].tolist()))
    assert sum(map(len, groups)) == speakers
    assert len(set.union(*groups)) == speakers
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


# Features of discriminators


def two_utterances() -> cs.Ragged:
    values = torch.arange(1.0, 8.0).unsqueeze(1).expand(-1, 2).contiguous()
    return cs.Ragged.from_values(values, torch.tensor([0, 3, 7]), lengths="lengths")


def test_windows_stay_within_their_utterance():
    found, rows = windows(two_utterances(), 3, every=2)
    assert found[:, ::2].tolist() == [[0, 1, 2], [2, 3, 0], [0, 4, 5], [5, 6, 7]]
    assert rows.tolist() == [0, 0, 1, 1]


def test_every_frame_gets_the_features_of_its_window_beside_its_own():
    data = cs.Dataset(two_utterances(), torch.zeros(2), groups={"speaker": torch.tensor([0, 0])})
    made = joined(data, torch.nn.Linear(6, 3), 3)
    assert made.x.shape == (2, 4, 5)
    assert torch.equal(made.x.values[:, :2], data.x.values)
    torch.testing.assert_close(made.x.values[:, 2:].mean(0), torch.zeros(3), atol=1e-3, rtol=0)


def test_a_trunk_has_the_features_of_the_discriminators():
    task = QUICK_GANS.task(4, seed=0).prepare()
    theta = task.initial() + 0.1
    x = torch.randn(3, QUICK_GANS.context * 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(task.trunk(theta)(x), task.features_one(theta, x)[0])


# The EP prior on a supervised network


def classes() -> tuple[cs.Classification, cs.Federation]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    torch.manual_seed(0)
    task = cs.Classification(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)))
    data = cs.Dataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    return task, cs.partition.quantity(data, 3, alpha=2.0, minimum=8)


def learn(method, task, fed, chunk=3, rounds=3, **options):
    engine = cs.Simulator(device="cpu", chunk=chunk, workers=1, threads=1, precision="float64")
    return cs.fit(method, task, fed, rounds=rounds, engine=engine, progress=False, **options)


def test_without_strength_it_is_fedavg():
    task, fed = classes()
    train = cs.SGD(lr=0.1)
    ours, plain = learn(EPAveraging(train, strength=0.0), task, fed), learn(cs.FedAvg(train), task, fed)
    torch.testing.assert_close(ours.posterior.mean[: task.size], plain.posterior.mean)


def test_a_narrow_prior_holds_the_weights_where_they_are():
    task, fed = classes()
    train, moves = cs.SGD(lr=1e-3, epochs=20), []
    for scale in (0.05, 10.0):
        end = learn(EPAveraging(train, strength=1.0, scale=scale), task, fed).posterior.mean[: task.size]
        moves.append(float((end - task.initial().double()).norm()))
    assert moves[0] < 0.5 * moves[1]


def test_clients_side_by_side_and_sites_that_multiply_to_the_prior():
    task, fed = classes()
    together, alone = (
        learn(EPAveraging(cs.SGD(lr=0.1), hidden=6), task, fed, chunk=chunk, debug=True) for chunk in (3, 1)
    )
    torch.testing.assert_close(together.posterior.mean, alone.posterior.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together.server.sites.lam, alone.server.sites.lam, rtol=1e-10, atol=1e-12)
    assert float(together.server.sites.lam.min()) > 0


def test_what_it_cannot_do_is_refused():
    without = cs.Classification(torch.nn.Conv1d(1, 3, 4))
    for method, task, sentence in (
        (EPAveraging(components=2), classes()[0], "has one prior"),
        (EPAveraging(), QUICK_GANS.task(4, seed=0), "needs a likelihood of labels"),
        (EPAveraging(), without, "needs a linear layer"),
    ):
        with pytest.raises(TaskError, match=sentence):
            method.adapt(task, 0)

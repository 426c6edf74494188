import json
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, DataError
from consilience.data import load, partition
from consilience.data.loaders import stackoverflow
from consilience.models import bag_of_words
from consilience.tasks.supervised import MultiLabel
from support.published import (
    USERS,
    WORDS,
    WRITERS,
    columns,
    inks,
    write_femnist,
    write_hdf5,
    write_parquet_questions,
    write_tff_emnist,
    write_tff_questions,
    written,
)

HERE = cs.Simulator(device="cpu", chunk=4, workers=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# EMNIST


def test_tff_emnist_has_ink_255_on_0_and_writers_as_a_group(tmp_path):
    write_tff_emnist(tmp_path)
    data = load("emnist-62", tmp_path)
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.shape == (22, 1, 28, 28)
    assert np.array_equal(data.train.x[:12, 0], inks(12, seed=0))
    assert data.train.y.tolist()[12:15] == [1, 8, 15]
    assert "".join(data.train.classes) == "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert data.train.groups["writer"].bincount().tolist() == [12, 7, 3]
    assert "MNIST" in data.train.note
    inputs = data.train.inputs(torch.arange(22))
    assert (float(inputs.min()), float(inputs.max())) == (0, pytest.approx(1, abs=1e-6))


def test_writers_have_the_same_numbers_in_train_and_test(tmp_path):
    write_tff_emnist(tmp_path, test=written({"f0002_09": 2, "f0009_99": 4}))
    data = load("emnist-62", tmp_path)
    train, test = partition.by_group(data.train, "writer"), partition.by_group(data.test, "writer")
    assert train.names == tuple(WRITERS)
    assert test.names == (*WRITERS, "f0009_99")
    assert train.sizes.tolist() == [12, 7, 3]
    assert test.sizes.tolist() == [0, 0, 2, 4]


def test_hugging_faces_emnist_holds_out_a_tenth_of_each_writer(tmp_path):
    write_femnist(tmp_path)
    data = load("emnist-62", tmp_path)
    assert data.train.group_names["writer"] == data.test.group_names["writer"] == ("f0000_14", "f0001_41")
    assert data.train.groups["writer"].bincount().tolist() == [9, 28]
    assert data.test.groups["writer"].bincount(minlength=2).tolist() == [0, 3]
    assert data.train.classes[10:12] == ("A", "B")
    everything = np.concatenate([inks(29, 0), inks(11, 1)])
    found = torch.cat([data.train.x, data.test.x]).squeeze(1).numpy()
    assert sorted(map(bytes, found)) == sorted(map(bytes, everything))
    assert torch.equal(data.test.x, load("emnist-62", tmp_path).test.x)


def test_ink_stays_255_where_the_page_is_black(tmp_path):
    write_femnist(tmp_path, page=0)
    assert float(load("emnist-62", tmp_path).train.x.float().mean()) < 50


def test_missing_emnist_says_which_files_where_and_whence(tmp_path):
    message = r"needs the file fed_emnist_train\.h5 .*emnist-62: .*tff-datasets-public/fed_emnist.*flwrlabs/femnist"
    with pytest.raises(DataError, match=message):
        load("emnist-62", tmp_path)
    write_tff_emnist(tmp_path)
    (tmp_path / "emnist-62" / "fed_emnist_test.h5").unlink()
    with pytest.raises(DataError, match=r"needs the file fed_emnist_test\.h5"):
        load("emnist-62", tmp_path)


def one_writer(**change):
    columns = {**written({"f0000_14": 3})["f0000_14"], **change}
    return {"f0000_14": {name: column for name, column in columns.items() if column is not None}}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, r"fed_emnist_train\.h5 is not in TFF's form: it has no group 'examples' with a group for each client"),
        (one_writer(label=None), r"client 'f0000_14' has no dataset 'label'; allowed: pixels"),
        (one_writer(label=np.arange(2)), r"client 'f0000_14' has 3 rows of 'pixels' but 2 rows of 'label'"),
        (one_writer(label=np.array([0, 62, 1])), r"client 'f0000_14' holds the label 62; .* the labels 0 to 61"),
        (one_writer(label=np.array([0, -1, 1])), r"holds the label -1"),
        (one_writer(label=np.zeros(3)), r"'label' of one integer an image, found float64 in 1-d"),
        (one_writer(pixels=np.zeros((3, 28, 27))), r"'pixels' of 28 × 28 floats, found 28 × 27 float64"),
        (one_writer(pixels=np.zeros((3, 28, 28), np.uint8)), r"28 × 28 floats, found 28 × 28 uint8"),
        (one_writer(pixels=np.full((3, 28, 28), 255.0)), r"pixels outside 0 \(ink\) to 1 \(background\)"),
        (one_writer(pixels=np.full((3, 28, 28), np.nan)), r"pixels outside 0 \(ink\) to 1 \(background\)"),
    ],
)
def test_an_hdf5_file_that_is_not_what_it_says(tmp_path, train, message):
    write_tff_emnist(tmp_path, train=train)
    with pytest.raises(DataError, match=message):
        load("emnist-62", tmp_path)


def test_a_file_that_is_not_hdf5_or_lacks_its_group(tmp_path):
    write_tff_emnist(tmp_path)
    path = tmp_path / "emnist-62" / "fed_emnist_train.h5"
    whole = path.read_bytes()
    for content in (b"<html>no such page</html>", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"fed_emnist_train\.h5 is not an HDF5 file, or is damaged"):
            load("emnist-62", tmp_path)
    with h5py.File(path, "w") as file:
        file.create_dataset("examples", data=[1, 2])
    with pytest.raises(DataError, match="no group 'examples'"):
        load("emnist-62", tmp_path)


def test_without_h5py_the_extra_is_named(tmp_path, monkeypatch):
    write_tff_emnist(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"fed_emnist_train\.h5 is an HDF5 file.*pip install 'consilience\[tff\]'"):
        load("emnist-62", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [62, *range(10)], "sizes": ((11,),)}, r"holds the label 62; emnist-62 has the labels 0 to 61"),
        ({"side": 20}, r"is not emnist-62: it holds images of 1 × 20 × 28"),
    ],
)
def test_other_images_are_not_emnist(tmp_path, change, message):
    write_femnist(tmp_path, **change)
    with pytest.raises(DataError, match=message):
        load("emnist-62", tmp_path)


def test_images_without_a_writer_are_refused(tmp_path):
    write_femnist(tmp_path, sizes=((3,),))
    (path,) = (tmp_path / "emnist-62" / "data").iterdir()
    table = pq.read_table(path)
    writers = pa.array(["f0000_14", None, None])
    pq.write_table(table.set_column(table.schema.get_field_index("writer_id"), "writer_id", writers), path)
    with pytest.raises(DataError, match="groups must be named, one an image; found 2 missing"):
        load("emnist-62", tmp_path)


# Stack Overflow

forms = pytest.mark.parametrize("write", [write_tff_questions, write_parquet_questions])


@forms
def test_texts_become_token_ids_and_tags_bytes(tmp_path, write):
    write(tmp_path)
    train = load("stackoverflow", tmp_path).train
    assert (train.x.dtype, train.y.dtype) == (torch.int16, torch.uint8)
    the, python, list_, sort, java = range(2, 7)
    assert train.x.tolist() == [
        [the, the, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [sort, the, list_, python, list_, 0, 0, 0],
        [1, 1, 1, the, list_, 1, python, list_],
        [1, java, 0, 0, 0, 0, 0, 0],
        [python, java, the, sort, 0, 0, 0, 0],
    ]
    assert train.classes == ("python", "java", "sorting")
    assert train.y.tolist() == [[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 0, 1], [0, 1, 0], [1, 1, 0]]
    assert train.groups["client"].tolist() == [0, 0, 1, 1, 1, 2]
    assert train.group_names["client"] == ("00000007", "00000013", "00000021")


@forms
def test_the_test_set_is_of_the_same_clients_unless_all_are_read(tmp_path, write):
    write(tmp_path)
    test = load("stackoverflow", tmp_path).test
    assert test.groups["client"].tolist() == [2]
    assert partition.by_group(test, "client").sizes.tolist() == [0, 0, 1]
    everyone = stackoverflow(tmp_path, clients=None).test
    assert everyone.group_names["client"] == ("00000007", "00000013", "00000021", "00000099")
    assert everyone.groups["client"].tolist() == [2, 3]


@forms
def test_clients_examples_words_tags_and_tokens_can_be_limited(tmp_path, write):
    write(tmp_path)
    train = stackoverflow(tmp_path, clients=2, examples=2, words=2, tags=1, length=3).train
    assert train.group_names["client"] == ("00000007", "00000013")
    assert train.x.tolist() == [[2, 2, 0], [0, 0, 0], [1, 2, 1], [1, 1, 1]]
    assert train.y.tolist() == [[0], [0], [1], [1]]
    assert train.note == "2 clients, at most 2 examples each, 2 texts cut to 3 tokens"
    with pytest.raises(ConfigError, match="stackoverflow: clients must be at least 1, got 0"):
        stackoverflow(tmp_path, clients=0)


def test_chosen_clients_are_spread_over_the_sorted_ids(tmp_path):
    users = {f"{i:08d}": USERS["00000021"] for i in range(10)}
    write_tff_questions(tmp_path, train=users)
    names = stackoverflow(tmp_path, clients=3).train.group_names["client"]
    assert names == ("00000000", "00000003", "00000006")


@pytest.mark.parametrize("pack", [json.dumps, lambda counts: "\n".join(f"{word} {n}" for word, n in counts.items())])
def test_counts_are_json_or_lines_in_any_order(tmp_path, pack):
    write_tff_questions(tmp_path)
    backwards = dict(reversed(WORDS.items()))
    (tmp_path / "stackoverflow" / "stackoverflow.word_count").write_text(pack(backwards))
    assert load("stackoverflow", tmp_path).train.x[0, 0] == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("python\njava\n", "holds neither lines 'name count' nor a JSON object of counts"),
        ('{"python": "many"}', "holds neither lines"),
        ('{"python": 3', "holds neither lines"),
        ("{}", "holds no counts"),
    ],
)
def test_counts_that_are_none(tmp_path, content, message):
    write_tff_questions(tmp_path)
    (tmp_path / "stackoverflow" / "stackoverflow.tag_count").write_text(content)
    with pytest.raises(DataError, match=rf"stackoverflow\.tag_count {message}"):
        load("stackoverflow", tmp_path)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("stackoverflow.word_count", r"stackoverflow\.word_count\.tar\.bz2"),
        ("stackoverflow.tag_count", r"stackoverflow\.tag_count\.tar\.bz2"),
        ("stackoverflow_train.h5", r"stackoverflow\.tar\.bz2"),
        ("stackoverflow_test.h5", r"stackoverflow\.tar\.bz2"),
    ],
)
def test_a_missing_file_of_stack_overflow_is_named(tmp_path, file, source):
    write_tff_questions(tmp_path)
    (tmp_path / "stackoverflow" / file).unlink()
    with pytest.raises(DataError, match=rf"needs the file {file}, .*tff-datasets-public/{source}"):
        load("stackoverflow", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": None}, r"client '00000021' has no dataset 'title'; .*allowed: tags, tokens"),
        ({"tags": [b"java", b"c"]}, r"has 1 rows of 'tokens' but 2 rows of 'tags'"),
        ({"tokens": [4]}, r"must have 'tokens' of one string an example, found int64 in 1-d"),
    ],
)
def test_questions_that_are_none(tmp_path, change, message):
    write_tff_questions(tmp_path)
    rows = {name: column for name, column in {**columns(USERS["00000021"]), **change}.items() if column is not None}
    write_hdf5(tmp_path / "stackoverflow" / "stackoverflow_train.h5", {"00000021": rows})
    with pytest.raises(DataError, match=message):
        load("stackoverflow", tmp_path)


def test_parquet_questions_need_their_columns_as_strings(tmp_path):
    write_parquet_questions(tmp_path, train={"00000021": USERS["00000021"]})
    (path,) = (tmp_path / "stackoverflow").glob("train-*")
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["tags"]), path)
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet has no column 'tags'"):
        load("stackoverflow", tmp_path)
    pq.write_table(table.set_column(1, "tokens", pa.array([None], pa.string())), path)
    with pytest.raises(DataError, match=r"'tokens' must hold one string an example, found string, 1 missing"):
        load("stackoverflow", tmp_path)


def test_users_learn_tags_together(tmp_path):
    write_tff_questions(tmp_path)
    algorithm = cs.FedAvg(cs.SGD(lr=1.0, batch_size=2))
    data = load("stackoverflow", tmp_path)
    federation, test = partition.by_group(data.train, "client"), partition.by_group(data.test, "client")
    task = MultiLabel(bag_of_words(data.train.x.shape[1:], 3, vocabulary=5))
    run = cs.fit(algorithm, task, federation, test=test, rounds=4, engine=HERE, progress=False)
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert "f1" in " ".join(run.history[-1]["eval"])


# Targets in bytes


def test_bytes_of_labels_become_floats_batch_by_batch():
    y = torch.tensor([[0, 1], [1, 1], [0, 0]], dtype=torch.uint8)
    data = cs.Dataset(torch.zeros(3, 4), y)
    targets = data.targets(torch.tensor([[2, 1]]), torch.float64)
    assert targets.tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    assert targets.dtype == torch.float64


def test_multi_label_takes_bytes_of_0_and_1_alone():
    task = MultiLabel(nn.Linear(4, 2))
    x = torch.zeros(3, 4)
    task.check(cs.Dataset(x, torch.ones(3, 2, dtype=torch.uint8)))
    with pytest.raises(DataError, match="must be 0 or 1"):
        task.check(cs.Dataset(x, torch.full((3, 2), 2, dtype=torch.uint8)))
    with pytest.raises(DataError, match=r"\[N, 2\] of floats or uint8 expected, got torch\.int64 \(3, 2\)"):
        task.check(cs.Dataset(x, torch.ones(3, 2, dtype=torch.int64)))


def test_bytes_and_floats_are_learned_alike():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator)
    y = torch.randint(2, (12, 2), generator=generator, dtype=torch.uint8)
    owner, module = torch.arange(12) % 3, nn.Linear(4, 2)
    ends = []
    for targets in (y, y.float()):
        federation = cs.Federation.from_owner(cs.Dataset(x, targets), owner)
        method = cs.FedAvg(cs.SGD(lr=0.1, batch_size=4))
        run = cs.fit(method, MultiLabel(module), federation, rounds=2, engine=HERE, progress=False)
        ends.append(run.posterior.mean)
    assert torch.equal(*ends)

"""Rows that are read by index: from every kind of source, with the results of the same data in memory to the bit."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn

import consilience as cs
from consilience.core.errors import CheckpointError, ConsilienceError, DataError
from consilience.core.records import leaves
from consilience.data.read_ahead import read_ahead

N = 60
X = np.random.default_rng(0).normal(size=(N, 2, 3)).astype(np.float32)
Y = torch.arange(N) % 3
INDEX = torch.tensor([[5, 0, 59], [5, 33, 7]])


class Listed:
    """Like a Hugging Face data set: a length, and columns by name for a list of indices, in increasing order only."""

    def __init__(self, **columns: Any) -> None:
        self.columns_ = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns_.values())))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.columns_[index]
        assert index == sorted(set(index))
        return {name: [column[i] for i in index] for name, column in self.columns_.items()}


def mapped(folder: Path, mode: Any = "r", array: Any = X) -> Any:
    np.save(folder / "x.npy", array)
    return np.load(folder / "x.npy", mmap_mode=mode)


def arrow(folder: Path, make: Any, step: int = 7, **columns: Any) -> Path:
    path = folder / "table.arrow"
    table = pa.table(columns)
    with make(path, table.schema) as writer:
        for start in range(0, len(table), step):
            writer.write_table(table.slice(start, step))
    return path


def vectors(array: np.ndarray = X) -> pa.Array:
    inner = pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[-1])
    return pa.FixedSizeListArray.from_arrays(inner, array.shape[1])


def raw(folder: Path) -> Any:
    X.tofile(folder / "x.raw")
    return np.memmap(folder / "x.raw", np.float32, "r", shape=X.shape)


SOURCES = {
    "a map": lambda folder: cs.Rows(mapped(folder)),
    "a view of a map": lambda folder: cs.Rows(np.asarray(mapped(folder))[:]),
    "a .npy file": lambda folder: cs.Rows(mapped(folder).filename),
    "a raw file": lambda folder: cs.Rows(raw(folder)),
    "a map of doubles": lambda folder: cs.Rows(mapped(folder, array=X.astype(np.float64))),
    "an Arrow file": lambda folder: cs.Rows(arrow(folder, pa.ipc.new_file, x=vectors()), "x"),
    "an Arrow stream": lambda folder: cs.Rows(arrow(folder, pa.ipc.new_stream, x=vectors()), "x"),
    "an Arrow table": lambda folder: cs.Rows(pa.table({"x": vectors(), "z": list(range(N))}), "x"),
    "an Arrow column": lambda folder: cs.Rows(pa.chunked_array([vectors()[:20], vectors()[20:]])),
    "lists in a file": lambda folder: cs.Rows(arrow(folder, pa.ipc.new_file, x=pa.array(X.tolist())), "x"),
    "an object": lambda folder: cs.Rows(Listed(x=X, z=range(N)), "x"),
    "silos": lambda folder: cs.Rows.cat([cs.Rows(mapped(folder))[:25], torch.from_numpy(X[25:40]), cs.Rows(X)[40:]]),
}
every = pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))


@every
def test_rows_are_those_of_the_array(source: Any, tmp_path: Path) -> None:
    rows, whole = source(tmp_path), torch.from_numpy(X)
    assert (rows.shape, rows.dtype, rows.dim(), len(rows)) == (whole.shape, torch.float32, 3, N)
    assert torch.equal(rows.take(INDEX), whole[INDEX])
    assert torch.equal(rows[-1], whole[-1])
    assert torch.equal(rows[10:50:3][torch.tensor([4, 0])].take(torch.tensor([1, 0, 1])), whole[[10, 22, 10]])
    assert torch.equal(rows[Y == 2].take(torch.arange(20)), whole[Y == 2])
    assert rows[:0].shape == rows.take(INDEX[:0].reshape(-1)).shape == (0, 2, 3)


def test_bytes_and_columns_of_an_arrow_file(tmp_path: Path) -> None:
    pixels = np.arange(N * 4, dtype=np.uint8).reshape(N, 4)
    columns = {"b": pa.array([row.tobytes() for row in pixels], pa.binary(4)), "a": np.arange(N), "c": np.ones(N)}
    path = arrow(tmp_path, pa.ipc.new_file, **columns)
    assert torch.equal(cs.Rows(path, "b").take(INDEX), torch.from_numpy(pixels)[INDEX])
    both = cs.Rows(path, ["a", "c"])
    assert torch.equal(both.take(torch.tensor([3, 1])), torch.tensor([[3.0, 1.0], [1.0, 1.0]]))
    assert both.dtype == torch.float32
    assert torch.equal(cs.Rows(Listed(a=range(N), c=[1.0] * N), ["a", "c"]).take(INDEX), both.take(INDEX))
    assert torch.equal(cs.Rows(pixels, factor=1 / 255).take(INDEX), torch.from_numpy(pixels)[INDEX] * (1 / 255))


def test_a_map_is_not_read_into_memory_and_targets_are(tmp_path: Path) -> None:
    data = cs.Dataset(mapped(tmp_path), raw(tmp_path)[:, 0])
    assert isinstance(data.x, cs.Rows)
    assert isinstance(data[:5].x, cs.Rows)
    assert isinstance(data.y, torch.Tensor)
    labels = cs.Dataset(cs.Rows(X), cs.Rows(np.asarray(Y, dtype=np.int16))).y
    assert torch.equal(labels, Y)
    assert isinstance(cs.Dataset.of((mapped(tmp_path), Y)).x, cs.Rows)
    assert not cs.Dataset(mapped(tmp_path)[[1, 2]], Y[:2]).by_index  # NumPy has read these rows already


def test_what_was_written_to_a_map_is_read(tmp_path: Path) -> None:
    own = mapped(tmp_path, "c")
    own[3] = 7
    rows = cs.Rows(own)
    for _ in range(3):
        assert rows.take(torch.tensor([3])).eq(7).all()
    shared = mapped(tmp_path, "r+")
    shared[3] = 8
    assert all(cs.Rows(shared).take(torch.tensor([3])).eq(8).all() for _ in range(3))


def resident(path: Path) -> int:
    """Bytes of a file that are mapped into this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    return sum(int(line.split()[1]) << 10 for i in starts for line in lines[i : i + 6] if line.startswith("Rss:"))


@pytest.mark.parametrize("kind", ["npy", "arrow"])
def test_rows_of_a_file_are_not_mapped(kind: str, tmp_path: Path) -> None:
    array = np.arange(4096 * 2048, dtype=np.int32).reshape(4096, 2048)
    if kind == "npy":
        np.save(path := tmp_path / "big.npy", array)
    else:
        path = arrow(tmp_path, pa.ipc.new_file, 500, x=pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), 2048))
    rows = cs.Rows(path, None if kind == "npy" else "x")
    for part in torch.randperm(4096).split(32):
        assert torch.equal(rows.take(part), torch.from_numpy(array)[part])
    assert resident(path) < 4 << 20


def test_views_of_a_map_are_read_from_its_file(tmp_path: Path) -> None:
    whole = mapped(tmp_path)
    views = (
        whole[7:],
        whole[::3],
        whole[:, 1],
        whole[:, :, 1],
        whole[3:, 1, 1:],
        whole[:, :, ::2],
        whole.swapaxes(1, 2),
    )
    for view in views:
        index = torch.tensor([0, 1, 2, 9, 4])
        assert torch.equal(cs.Rows(view).take(index), torch.from_numpy(np.array(view))[index])


def test_a_file_that_was_replaced_is_read_through_the_map(tmp_path: Path) -> None:
    whole = mapped(tmp_path)
    (tmp_path / "x.npy").rename(tmp_path / "old.npy")
    assert torch.equal(cs.Rows(whole).take(INDEX), torch.from_numpy(X)[INDEX])
    np.save(tmp_path / "x.npy", X + 1)
    assert torch.equal(cs.Rows(whole).take(INDEX), torch.from_numpy(X)[INDEX])


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    rows = cs.Rows(mapped(tmp_path).filename)
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(DataError, match=r"x\.npy is shorter than when it was opened"):
        rows.take(torch.tensor([50]))


# Runs


def net(x: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(x.shape[1:])), 3))


def learned(data: cs.Dataset, algorithm: Any = None, workers: int = 1, **options: Any) -> cs.runs.Run:
    federation = cs.partition.dirichlet(data, 5, alpha=1.0, minimum=3)
    train, test = federation.split(0.25)
    engine = cs.Simulator(device="cpu", chunk=2, workers=workers, threads=1)
    method = algorithm or cs.FedAvg(cs.SGD(lr=0.1, epochs=2, batch_size=4))
    task = cs.Classification(net(data.x))
    return cs.fit(method, task, train, test=test, rounds=3, engine=engine, progress=False, **options)


def same(one: cs.runs.Run, other: cs.runs.Run) -> None:
    for (name, a), (_, b) in zip(leaves(one.server), leaves(other.server), strict=True):
        assert torch.equal(a, b), name
    assert one.evaluation.point == other.evaluation.point
    assert [line["loss"] for line in one.history] == [line["loss"] for line in other.history]


@every
def test_a_run_is_that_of_the_data_in_memory_to_the_bit(source: Any, tmp_path: Path) -> None:
    same(learned(cs.Dataset(source(tmp_path), Y)), learned(cs.Dataset(torch.from_numpy(X), Y)))


METHODS = {
    "FedEP": cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.1, batch_size=4), scale=0.5)),
    "SCAFFOLD": cs.SCAFFOLD(cs.SGD(lr=0.1, batch_size=4)),
    "Laplace": cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.1, batch_size=4))),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("workers", [1, 2])
def test_methods_and_workers_share_a_map(algorithm: Any, workers: int, tmp_path: Path) -> None:
    bytes_ = (X * 50 + 100).clip(0, 255).astype(np.uint8)
    how: dict[str, Any] = {"scale": torch.tensor(1 / 255), "shift": torch.tensor(-0.5)}
    inside = cs.Dataset(torch.from_numpy(bytes_), Y, **how)
    same(
        learned(cs.Dataset(mapped(tmp_path, array=bytes_), Y, **how), algorithm, workers),
        learned(inside, algorithm, workers),
    )


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(10, 3)

    def forward(self, ids: Any, pixels: Any, mask: Any) -> Any:
        words = (self.embed(ids) * mask.unsqueeze(-1)).sum(1)
        return self.out(torch.cat([words, pixels.flatten(1)], 1))


def test_rows_beside_rows_of_different_lengths(tmp_path: Path) -> None:
    ids = cs.Ragged([[i % 9] * (1 + i % 4) for i in range(N)], mask="mask")

    def run(x: Any) -> cs.runs.Run:
        torch.manual_seed(0)
        clients = cs.partition.iid(cs.Dataset({"ids": ids, "pixels": x}, Y), 4)
        task, engine = cs.Classification(Both()), cs.Simulator(device="cpu", chunk=4, workers=1)
        method = cs.FedAvg(cs.SGD(batch_size=4))
        return cs.fit(method, task, clients, test=clients.data, rounds=2, engine=engine, progress=False)

    same(run(mapped(tmp_path)), run(torch.from_numpy(X)))


def test_real_targets_by_index(tmp_path: Path) -> None:
    def run(x: Any, y: Any) -> cs.runs.Run:
        torch.manual_seed(0)
        clients = cs.partition.iid(cs.Dataset(x, y), 4)
        task, engine = cs.Regression(nn.Linear(3, 3)), cs.Simulator(device="cpu", chunk=4, workers=1)
        method = cs.FedAvg(cs.SGD(lr=0.01, batch_size=4))
        return cs.fit(method, task, clients, test=clients.data, rounds=2, engine=engine, progress=False)

    inside = torch.from_numpy(X)
    same(run(cs.Rows(mapped(tmp_path)[:, 0]), cs.Rows(mapped(tmp_path)[:, 1])), run(inside[:, 0], inside[:, 1]))


def test_silos_are_joined_without_being_read(tmp_path: Path) -> None:
    whole = mapped(tmp_path)
    silos = {name: cs.Dataset(whole[part], Y[part]) for name, part in (("a", slice(20)), ("b", slice(20, N)))}
    federation = cs.Federation.from_silos(silos)
    assert isinstance(federation.data.x, cs.Rows)
    assert torch.equal(federation.client("b").x.take(torch.tensor([0, 39])), torch.from_numpy(X)[[20, 59]])


def test_a_run_resumes_and_refuses_other_examples(tmp_path: Path) -> None:
    data = cs.Dataset(mapped(tmp_path), Y)
    out = tmp_path / "run"
    learned(data, out=out)
    resumed = learned(data, out=out, resume=True)
    same(resumed, learned(cs.Dataset(torch.from_numpy(X), Y)))
    other = X.copy()
    other[17] += 1
    with pytest.raises(CheckpointError, match=r"contents\.inputs"):
        learned(cs.Dataset(mapped(tmp_path, array=other), Y), out=out, resume=True)


def test_training_examples_do_not_calibrate(tmp_path: Path) -> None:
    data = cs.Dataset(mapped(tmp_path), Y)
    with pytest.raises(DataError, match="training examples too"):
        learned(data, calibration=data)


def test_predictions_for_a_map(tmp_path: Path) -> None:
    run = learned(cs.Dataset(torch.from_numpy(X), Y))
    assert torch.equal(run.predict(mapped(tmp_path)), run.predict(X))


# Sources with columns


def test_a_table_with_lazy_inputs() -> None:
    flat = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 6)
    table = pa.table({"x": flat, "ward": ["a", "b"] * (N // 2), "y": ["ill", "well", "well"] * (N // 3)})
    lazy, held = (cs.Dataset.of(table, target="y", inputs="x", groups=["ward"], lazy=flag) for flag in (True, False))
    assert isinstance(lazy.x, cs.Rows)
    assert lazy.classes == held.classes == ("ill", "well")
    assert torch.equal(lazy.y, held.y)
    assert torch.equal(lazy.groups["ward"], held.groups["ward"])
    assert torch.equal(lazy.inputs(INDEX), held.inputs(INDEX))
    numbers = pa.table({"a": range(N), "b": np.linspace(0, 1, N), "y": Y.numpy()})
    lazy, held = (cs.Dataset.of(numbers, target="y", lazy=flag) for flag in (True, False))
    assert isinstance(lazy.x, cs.Rows)
    assert lazy.features == held.features == ("a", "b")
    assert torch.equal(lazy.inputs(INDEX), held.inputs(INDEX))


def test_images_of_an_object_are_read_by_index() -> None:
    images = [Image.fromarray(np.full((4, 5), i, np.uint8)) for i in range(N)]
    source = Listed(image=images, age=np.arange(N), label=Y.tolist())
    lazy, held = (cs.Dataset.of(source, target="label", inputs="image", lazy=flag) for flag in (True, False))
    assert isinstance(lazy.x, cs.Rows)
    assert lazy.x.dtype == torch.uint8
    assert torch.equal(lazy.inputs(INDEX), held.inputs(INDEX))
    lazy, held = (cs.Dataset.of(source, target="label", lazy=flag) for flag in (True, False))
    for name in ("image", "age"):
        assert torch.equal(lazy.inputs(INDEX)[name], held.inputs(INDEX)[name])


# Reading ahead


def test_a_thread_reads_in_order_and_not_too_far() -> None:
    seen: list[int] = []

    def read(item: int) -> tuple[int, int]:
        seen.append(item)
        return item, threading.get_ident()

    found = read_ahead(read, iter(range(10)), torch.device("cpu"))
    assert next(found)[0] == 0
    assert max(seen) <= 3
    rest = list(found)
    assert [item for item, _ in rest] == list(range(1, 10))
    assert threading.get_ident() not in {who for _, who in rest}


def test_an_error_of_the_thread_is_the_callers() -> None:
    found = read_ahead(lambda item: 1 // item, iter([1, 0]), torch.device("cpu"))
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)
    assert threading.active_count() == 1 or not any(t.name.startswith("read ahead") for t in threading.enumerate())


# Refusals


def test_rows_that_are_not_finite_are_named_when_they_are_read(tmp_path: Path) -> None:
    wrong = X.copy()
    wrong[41, 0, 2] = np.inf
    with pytest.raises(ConsilienceError, match="row 41 of the data holds values that are not finite"):
        learned(cs.Dataset(mapped(tmp_path, array=wrong), Y))


def compressed(folder: Path) -> cs.Rows:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    table = pa.table({"x": np.zeros(1000)})
    with pa.ipc.new_file(folder / "t.arrow", table.schema, options=options) as writer:
        writer.write_table(table)
    return cs.Rows(folder / "t.arrow", "x")


def images_of_two_sizes(folder: Path) -> Any:
    images = [Image.fromarray(np.zeros((size, 4), np.uint8)) for size in (4, 5)]
    return cs.Rows(Listed(image=images), "image").take(torch.tensor([1]))


REFUSED = {
    "a Parquet file has no rows by index": lambda folder: cs.Rows(folder / "x.parquet", "x"),
    "is compressed": compressed,
    "cannot be read": lambda folder: cs.Rows(folder / "none.npy"),
    r"a \.npy, \.arrow or \.feather file is expected": lambda folder: cs.Rows(folder / "x.csv"),
    "say which column": lambda folder: cs.Rows(pa.table({"x": [1.0]})),
    "there is no column 'z'": lambda folder: cs.Rows(pa.table({"x": [1.0]}), "z"),
    "has missing values": lambda folder: cs.Rows(pa.table({"x": [1.0, None]}), "x"),
    "lists of different lengths": lambda folder: cs.Rows(pa.array([[1], [2, 3]])),
    "Arrow's type string": lambda folder: cs.Rows(pa.array(["a"])),
    "need one number in each row": lambda folder: cs.Rows(pa.table({"x": vectors(), "z": range(N)}), ["x", "z"]),
    "a ndarray has no columns": lambda folder: cs.Rows(X, "x"),
    "this machine's byte order": lambda folder: cs.Rows(X.astype(">f4")),
    "a int has no rows by index": lambda folder: cs.Rows(3),
    "there are none": lambda folder: cs.Rows([]),
    "must return two rows": lambda folder: cs.Rows([[1.0], [2.0]]),
    "rows must have one shape and type": images_of_two_sizes,
    "must have one shape and type, found": lambda folder: cs.Rows.cat([cs.Rows(X), torch.zeros(2, 2)]),
    "lazy is for": lambda folder: cs.Dataset.of((X, Y), lazy=True),
    "the brightest pixel": lambda folder: cs.Data(
        *[cs.Dataset(cs.Rows(np.zeros((3, 1, 4, 4), np.uint8)), Y[:3], scale=torch.tensor(1 / 255))] * 2
    ).signed(),
    "these are read by index": lambda folder: cs.MultiLabel(net(X)).check(cs.Dataset(X, cs.Rows(X[:, 0]))),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.items())
def test_what_cannot_be_read_by_index_is_refused_in_a_sentence(words: str, make: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)

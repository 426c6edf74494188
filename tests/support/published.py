"""Tiny data sets of writers and of users, in the forms in which the real ones are published."""

import io
import json

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

WRITERS = {"f0000_14": 12, "f0001_41": 7, "f0002_09": 3}
WORDS = {"the": 90, "python": 50, "list": 40, "sort": 30, "java": 20}
TAGS = {"python": 9, "java": 7, "sorting": 5}
USERS = {
    "00000013": [
        (b"sort the list", b"python list", b"python|sorting"),
        (b"use sorted ( the list )", b"python list", b"python|sorting"),
        (b"frobnicate", b"java", b"java|frobnication"),
    ],
    "00000007": [(b"the the", b"", b"c++"), (b"", b"", b"java")],
    "00000021": [(b"python java", b"the sort", b"java|python")],
}
LATER = {"00000021": [(b"python", b"sort list", b"python")], "00000099": [(b"java", b"java", b"java")]}


def write_hdf5(path, clients):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for client, columns in clients.items():
            group = examples.create_group(client)
            for name, column in columns.items():
                strings = h5py.string_dtype() if isinstance(column[0], bytes) else None
                group.create_dataset(name, data=column, dtype=strings)


def inks(count, seed=0):
    """Pages of white with a few strokes: what MNIST would hold of them."""
    ink = np.zeros((count, 28, 28), np.uint8)
    ink[:, 10:14, 5:20] = np.random.default_rng(seed).integers(1, 256, (count, 4, 15))
    return ink


def written(sizes=WRITERS, seed=0):
    return {
        writer: {
            "pixels": (1 - inks(size, seed + i) / 255).astype(np.float32),
            "label": ((np.arange(size) * 7 + i) % 62).astype(np.int32),
        }
        for i, (writer, size) in enumerate(sizes.items())
    }


def write_tff_emnist(root, train=None, test=None):
    write_hdf5(root / "emnist-62" / "fed_emnist_train.h5", written() if train is None else train)
    write_hdf5(
        root / "emnist-62" / "fed_emnist_test.h5", written({"f0000_14": 2, "f0002_09": 1}) if test is None else test
    )


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_femnist(root, sizes=((20, 9), (11,)), labels=None, page=255, side=28):
    """Shards as Hugging Face has them; a writer's images may go on in the next one."""
    names = ["f0001_41", "f0000_14"]
    for part, counts in enumerate(sizes):
        writers = [names[i] for i, count in enumerate(counts) for _ in range(count)]
        images = [{"bytes": png(abs(page - ink)[:side]), "path": None} for ink in inks(len(writers), part)]
        character = labels or list(np.arange(len(writers)) % 62)
        columns = {"image": images, "writer_id": writers, "hsf_id": [0] * len(writers), "character": character}
        path = root / "emnist-62" / "data" / f"train-{part:05d}-of-{len(sizes):05d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)


def columns(rows):
    return dict(zip(("tokens", "title", "tags"), (list(column) for column in zip(*rows, strict=True)), strict=True))


def write_counts(root, words=WORDS, tags=TAGS):
    folder = root / "stackoverflow"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stackoverflow.word_count").write_text("".join(f"{word} {count}\n" for word, count in words.items()))
    (folder / "stackoverflow.tag_count").write_text(json.dumps(tags))


def write_tff_questions(root, train=USERS, test=LATER):
    write_counts(root)
    for split, users in (("train", train), ("test", test)):
        clients = {user: columns(rows) for user, rows in users.items()}
        write_hdf5(root / "stackoverflow" / f"stackoverflow_{split}.h5", clients)


def write_parquet_questions(root, train=USERS, test=LATER):
    """One shard a user, so that no client's rows are where they would be in HDF5."""
    write_counts(root)
    for split, users in (("train", train), ("test", test)):
        for part, (user, rows) in enumerate(users.items()):
            table = {name: [text.decode() for text in column] for name, column in columns(rows).items()}
            path = root / "stackoverflow" / f"{split}-{part:05d}-of-{len(users):05d}.parquet"
            pq.write_table(pa.table({"client_id": [user] * len(rows), **table}), path)


def write_tiny_images(root, classes=3, each=10):
    """Tiny-ImageNet's folders, with noise for pictures."""
    folder, noise = root / "tiny-imagenet-200", np.random.default_rng(0)
    names = [f"n{label:08}" for label in range(classes)]
    notes = []
    for label, name in enumerate(names):
        for number in range(each):
            in_training = folder / "train" / name / "images" / f"{name}_{number}.JPEG"
            in_validation = folder / "val" / "images" / f"val_{label * each + number}.JPEG"
            notes.append(f"{in_validation.name}\t{name}\t0\t0\t63\t63\n")
            for path in (in_training, in_validation):
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(noise.integers(256, size=(64, 64, 3), dtype=np.uint8)).save(path, "JPEG")
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    (folder / "words.txt").write_text("".join(f"{name}\tthing {name}\n" for name in names))
    (folder / "val" / "val_annotations.txt").write_text("".join(notes))


def write_addresses(root, years=(1790, 1850, 1934, 2001)):
    """Addresses of two presidents before 1933 and two after, in the layout of "sotu"."""
    (root / "sotu").mkdir(parents=True)
    text = [" ".join(f"In {year} the state of the union is number {i}." for i in range(40)) for year in years]
    names = [f"President {year}" for year in years]
    columns = {"year": pa.array(years, pa.int32()), "president": names, "party": [""] * len(years), "text": text}
    pq.write_table(pa.table(columns), root / "sotu" / "train.parquet")

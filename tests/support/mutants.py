"""Config files that a user could have damaged: random changes of good ones, in their tables and in their text."""

import copy
import inspect
import math
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w

from consilience.config import read_config
from consilience.config.build import ALGORITHMS, PARTITIONS
from consilience.config.files import read_deployment
from consilience.config.schema import TaskSection
from consilience.config.tasks import TASKS
from consilience.core.errors import ConsilienceError
from consilience.data import DATASETS
from consilience.engines import Simulator
from consilience.models import MODELS

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOYMENT = """
[model]
name = "mlp"
hidden = [8]
[task]
kind = "classification"
[algorithm]
name = "FedEP"
lr = 0.1
[federation]
clients = 4
min_clients = 2
inputs = [13]
outputs = 2
classes = ["well", "ill"]
[run]
cohort = 3
[engine]
precision = "float32"
[site]
holdout = 0.2
"""
KEYS = (
    "name", "lr", "epochs", "batch_size", "hidden", "clients", "alpha", "group", "seed", "rounds", "cohort", "holdout",
    "outside", "infer", "train", "server", "how", "at", "then", "first", "mu", "damping", "objective", "kind", "noise",
    "weights", "augment", "batch_norm", "arguments", "steps", "chunk", "workers", "threads", "compile", "precision",
    "device", "algorithms", "seeds", "tune", "target", "label", "root", "inputs", "outputs", "classes", "scale", "",
    "ключ", "a b", "self", "__class__", "train.lr",
)  # fmt: skip
NAMES = (
    "FedAvg", "FedProx", "FedEP", "FedSEP", "PFNM", "Switch", "Private", "Robust", "LocalOnly", "Adam", "SGD",
    "Laplace",
    "Identity", "mlp", "cnn", "dcgan", "lenet5", "transformer", "dirichlet", "iid", "by_group", "one_label", "digits",
    "heart-disease", "csv-silos", "regression", "adversarial", "ordinal", "cox", "binary", "Crop", "Flip",
    "Distributed",
    "os:system", "subprocess:run", "builtins:eval", "nowhere.py:Name", "a:b:c", ":", "x:", ":x", ".py:x", "torch:nn",
    "torch.nn:Linear", "torch:zeros", "torch.nn:Module", "consilience:FedAvg", "consilience:fit",
    "consilience:Federation",
    "consilience.models:mlp", "consilience.core:ConsilienceError", "../examples:x", "no such:y", "fedavg", "", " ",
    "🙂",
    "a" * 5000, "\u202e", "float32", "bf16", "cpu", "cuda:9", "meta", "/", "~", "../..", "nan",
)  # fmt: skip
NUMBERS = (
    0, 1, 2, -1, 3, 1000, 2**31, 2**63 - 1, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, -0.5, 1e-320, 1e308, -1e308,
    math.nan, math.inf, -math.inf, True, False,
)  # fmt: skip

COMPONENTS: dict[str, Any] = {
    "algorithm": ALGORITHMS,
    "engine": {"Simulator": Simulator},
    "model": MODELS,
    "partition": PARTITIONS,
    "data": {"digits": DATASETS["digits"], "heart-disease": DATASETS["heart-disease"]},
}

Table = dict[str, Any]


def good() -> list[str]:
    """Configs that are read and built without an error; those of large data read small ones."""
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.toml"))]
    return [text.replace('"mnist"', '"digits"').replace("examples/silos", str(EXAMPLES / "silos")) for text in texts]


def mutants(count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` damaged configs."""
    rng = random.Random(seed)
    texts = [*good(), DEPLOYMENT]
    for _ in range(count):
        text = rng.choice(texts)
        if rng.random() < 0.75:
            table = tomllib.loads(text)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                rng.choice(IN_TABLES)(table, rng)
            text = tomli_w.dumps(table)
        if rng.random() < 0.3:
            text = rng.choice(IN_TEXT)(text, rng)
        content = text.encode()
        if rng.random() < 0.03:
            place = rng.randrange(len(content))
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        yield content


def problem(path: Path) -> str | None:
    """What a user would see when the config is read and built, unless it is one sentence or nothing."""
    try:
        if b"[federation" in path.read_bytes():
            deployment = read_deployment(path)
            deployment.task(0), deployment.algorithm(), deployment.classes
            return None
        loaded = read_config(path)
        for make in (loaded.algorithm, loaded.methods, loaded.engine, loaded.outside, loaded.setting):
            make()
    except ConsilienceError as error:
        return f"several lines: {str(error)[:200]!r}" if "\n" in str(error) or not str(error) else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(NUMBERS)
    if kind < 0.75 or depth > 2:
        return rng.choice(NAMES)
    if kind < 0.88:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): _value(rng, depth + 1) for _ in range(rng.randrange(3))}


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of everything in a table."""
    for key, part in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        yield node, key
        if isinstance(part, dict | list):
            yield from _places(part)


def _place(table: Table, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(list(_places(table)) or [(table, "run")])


def _replace(table: Table, rng: random.Random) -> None:
    node, key = _place(table, rng)
    node[key] = _value(rng)


def _remove(table: Table, rng: random.Random) -> None:
    node, key = _place(table, rng)
    if key in node if isinstance(node, dict) else key < len(node):
        del node[key]


def _rename(table: Table, rng: random.Random) -> None:
    tables = [table, *(part for part in table.values() if isinstance(part, dict))]
    node = rng.choice(tables)
    if node:
        old = rng.choice(list(node))
        new = rng.choice((rng.choice(KEYS), old[:-1], old + "s", old.upper()))
        node[new] = node.pop(old)


def _add(table: Table, rng: random.Random) -> None:
    nodes = [node for node, _ in _places(table) if isinstance(node, dict)] or [table]
    rng.choice(nodes)[rng.choice(KEYS)] = _value(rng)


def _wrap(table: Table, rng: random.Random) -> None:
    node, key = _place(table, rng)
    if key in node if isinstance(node, dict) else True:
        node[key] = [node[key]] if rng.random() < 0.5 else {rng.choice(KEYS): node[key]}


def _swap(table: Table, rng: random.Random) -> None:
    (one, a), (other, b) = _place(table, rng), _place(table, rng)
    parts = copy.deepcopy(one.get(a) if isinstance(one, dict) else one[a]), _value(rng)
    other[b] = parts[0] if parts[0] is not None else parts[1]


def _known(table: Table, rng: random.Random) -> None:
    """Another component of a section, and values for its own arguments."""
    section, choices = rng.choice(list(COMPONENTS.items()))
    name = rng.choice(list(choices))
    keys = [key for key in inspect.signature(choices[name]).parameters if key not in ("data", "root", "folder")]
    table[section] = {"name": name} | {key: _value(rng) for key in rng.sample(keys, min(len(keys), rng.randrange(3)))}


def _task(table: Table, rng: random.Random) -> None:
    task = table["task"] = {"kind": rng.choice(TASKS)}
    for key in rng.sample(list(TaskSection.model_fields), rng.randrange(3)):
        task[key] = _value(rng)


def _duplicate_line(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    return "".join([*lines, rng.choice(lines)])


def _drop_characters(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text) + 1)
    return text[:start] + text[start + rng.randrange(1, 4) :]


def _insert_characters(text: str, rng: random.Random) -> str:
    start = rng.randrange(len(text) + 1)
    return (
        text[:start] + rng.choice(('"', "'", "[", "]", "=", "\n", "\0", "🙂", "{", "#", ".", "\ufeff")) + text[start:]
    )


def _truncate(text: str, rng: random.Random) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _nest(text: str, rng: random.Random) -> str:
    depth = rng.choice((10, 100, 400, 3000, 20_000))
    nested = rng.choice(
        (
            f"deep = {'[' * depth}{']' * depth}",
            f"deep = {'[' * depth}",
            f"deep = {'{a=' * depth}1{'}' * depth}",
            f"{'a.' * min(depth, 3000)}a = 1",
            f"[{'a.' * min(depth, 3000)}a]",
        )
    )
    section = rng.choice(("", "[model]", "[algorithm]", "[engine]", "[task]", "[compare]", "[data]"))
    if section and section in text and not nested.startswith("[a"):
        return text.replace(section, f"{section}\n{nested}", 1)
    return f"{nested}\n{text}"


IN_TABLES: tuple[Callable[[Table, random.Random], None], ...] = (
    _replace, _replace, _known, _known, _task, _remove, _rename, _add, _wrap, _swap,
)  # fmt: skip
IN_TEXT: tuple[Callable[[str, random.Random], str], ...] = (
    _duplicate_line,
    _drop_characters,
    _insert_characters,
    _truncate,
    _nest,
)

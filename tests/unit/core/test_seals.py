"""Sealed bytes are read again as they were written, or refused."""

import json

import pytest
import safetensors.torch
import torch

from consilience.core.errors import RecordError
from consilience.core.records import Point, pack
from consilience.core.seals import seal, seal_json, unseal, unseal_json

POINT = Point(torch.tensor([1.0, -2.0, 3.5]))
ABOUT = {"run": "r", "client": "Zürich", "round": "7"}


def test_a_sealed_record_is_read_again():
    found = unseal(seal(POINT, **ABOUT), like=POINT, **ABOUT)
    assert torch.equal(found.theta, POINT.theta)


def test_a_sealed_record_is_a_safetensors_file_and_the_same_each_time():
    assert torch.equal(safetensors.torch.load(seal(POINT, **ABOUT))["theta"], POINT.theta)
    assert len({seal(POINT, **ABOUT) for _ in range(8)}) == 1


def test_a_change_of_any_byte_is_found():
    whole = seal(POINT, **ABOUT)
    for at in range(len(whole)):
        for bit in (1, 128):
            data = bytearray(whole)
            data[at] ^= bit
            with pytest.raises(RecordError):
                unseal(bytes(data))


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"", lambda _: pack(POINT)]
)
def test_what_was_not_sealed_or_is_longer_or_shorter_is_refused(change):
    with pytest.raises(RecordError):
        unseal(change(seal(POINT, **ABOUT)))


@pytest.mark.parametrize("name", ABOUT)
def test_a_record_about_something_else_is_refused_in_a_sentence(name):
    with pytest.raises(RecordError, match=f"a record of {name} {ABOUT[name]}, not of {name} other"):
        unseal(seal(POINT, **ABOUT), **ABOUT | {name: "other"})
    with pytest.raises(RecordError, match=f"a record of {name} unknown"):
        unseal(seal(POINT), **{name: "other"})


CONTENT = {"round": 3, "eval": {"nll": float("inf")}, "names": ["Zürich", "\u2028", "\ud800"], "tuple": (1, None)}


@pytest.mark.parametrize("indent", [None, 1])
def test_sealed_json_is_read_again_whatever_its_layout(indent):
    text = seal_json({"names": ["Zürich"], "size": 1e-300}, indent=indent, run="r")
    assert unseal_json(text, run="r") == {"names": ["Zürich"], "size": 1e-300}
    assert unseal_json(json.dumps(json.loads(text), indent=3), run="r") == {"names": ["Zürich"], "size": 1e-300}


def test_a_sealed_line_is_one_line_of_ascii():
    text = seal_json(CONTENT)
    assert text.isascii()
    assert "\n" not in text
    assert unseal_json(text) == json.loads(json.dumps(CONTENT))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace('"round": 3', '"round": 4'), r"is damaged, or of another run \(its contents"),
        (lambda text: text.replace("digest", "digests"), "is damaged, or of another run"),
        (lambda text: text[:-1], "is not valid JSON"),
        (lambda text: "[" * 100_000, "is not valid JSON"),
        (lambda text: f"[{text}]", "must hold a JSON object, found list"),
        (lambda text: seal_json(CONTENT, run="other"), "or of another run"),
        (lambda text: seal_json(CONTENT), "or of another run"),
    ],
)
def test_altered_json_and_that_of_another_run_are_refused(change, sentence):
    with pytest.raises(RecordError, match=sentence):
        unseal_json(change(seal_json(CONTENT, run="r")), run="r")

"""Speech in parquet files: features, texts, speakers, and audio that cannot be used."""

import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

import consilience as cs
from consilience.core.errors import DataError
from consilience.data import speech_parquet
from consilience.data.loaders import speech
from consilience.data.loaders.audio import log_mel, mel_filters

RATE = 16_000
TEXTS, SPEAKERS = ("YES", "NO GO", "GO"), ("bob", "ann", "bob")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tone(hertz=440.0, seconds=0.3, level=0.3):
    """A tone with a little noise, so that no band is silent."""
    noise = 1e-3 * np.random.default_rng(0).standard_normal(round(seconds * RATE))
    return level * np.sin(2 * math.pi * hertz * np.arange(len(noise)) / RATE) + noise


def flac(wave, rate=RATE, kind="FLAC"):
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype="PCM_16")
    return file.getvalue()


def write(path, audio, texts=TEXTS, speakers=SPEAKERS, nested=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": part, "path": f"{i}.flac"} for i, part in enumerate(audio)] if nested else list(audio)
    pq.write_table(pa.table({"audio": cells, "text": list(texts), "speaker_id": list(speakers)}), path)
    return path


@pytest.fixture
def good():
    return [flac(tone(300 + 200 * i, 0.2 + 0.1 * i)) for i in range(3)]


@pytest.mark.parametrize("nested", [True, False])
def test_utterances_become_frames_characters_and_speakers(good, tmp_path, nested):
    data = speech_parquet(write(tmp_path / "a.parquet", good, nested=nested), bands=20)
    assert data.x.sizes.tolist() == [18, 28, 38]  # 1 + (N − 400) // 160
    assert data.x.values.shape[1] == 20
    assert data.classes == ("<blank>", " ", "E", "G", "N", "O", "S", "Y")
    task = cs.CTC(torch.nn.Linear(1, 1), data.classes[1:])
    assert task.text(data.targets(torch.arange(3))) == list(TEXTS)
    assert data.group_names["speaker"] == ("ann", "bob")
    assert data.groups["speaker"].tolist() == [1, 0, 1]


def test_features_are_normalised_by_speaker_or_by_utterance(good, tmp_path):
    file = write(tmp_path / "a.parquet", good)
    for how, rows in (("speaker", [0, 2]), ("utterance", [2])):
        data = speech_parquet(file, normalise=how)
        frames = torch.cat([data.x[row].double() for row in rows])
        torch.testing.assert_close(frames.mean(0), torch.zeros(40, dtype=torch.float64), atol=1e-3, rtol=0)
        deviation = frames.square().mean(0).sqrt()
        torch.testing.assert_close(deviation, torch.ones_like(deviation), atol=2e-3, rtol=0)


def test_a_tone_is_loudest_in_its_own_band_and_powers_add_up():
    found = log_mel(torch.from_numpy(tone(1000.0)).float())
    mel = 2595 * math.log10(1 + 1000 / 700)
    ends = [2595 * math.log10(1 + f / 700) for f in (20, 8000)]
    band = (mel - ends[0]) / (ends[1] - ends[0]) * 41 - 1
    assert abs(int(found.mean(0).argmax()) - band) <= 0.5
    louder = log_mel(2 * torch.from_numpy(tone(1000.0)).float())
    torch.testing.assert_close((louder - found)[:, round(band)], torch.full((28,), math.log(4.0)), atol=1e-3, rtol=0)
    filters = mel_filters(RATE, 512, 40)
    torch.testing.assert_close(filters[:, 20:200].sum(0), torch.ones(180, dtype=torch.float64))  # triangles overlap


def test_frames_beyond_the_samples_are_not_made():
    wave = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(log_mel(wave)[:2], log_mel(wave[:560]))


def test_features_come_from_the_cache_unless_the_file_or_an_option_changes(good, tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", good)
    first = speech_parquet(file)
    monkeypatch.setattr(speech, "waveform", None)
    assert torch.equal(speech_parquet(file).x.values, first.x.values)
    with pytest.raises(TypeError):
        speech_parquet(file, bands=24)
    (entry,) = (tmp_path / "cache" / "consilience").iterdir()
    entry.write_bytes(b"damaged")
    with pytest.raises(TypeError):
        speech_parquet(file)


def test_an4_numbers_characters_as_in_training_and_takes_features_in_place_of_audio(good, tmp_path):
    for split in ("train", "test"):
        write(tmp_path / "an4" / f"{split}-00000-of-00001.parquet", good)
    data = cs.load("an4", tmp_path)
    assert data.train.classes == data.test.classes
    columns, bare = ("audio", "text", "speaker_id"), tmp_path / "bare"
    (bare / "an4").mkdir(parents=True)
    for split in ("train", "test"):
        kept = speech.features(tmp_path / "an4" / f"{split}-00000-of-00001.parquet", columns)
        (bare / "an4" / f"{split}.safetensors").write_bytes(kept.packed())
    again = cs.load("an4", bare)
    assert torch.equal(again.train.x.values, data.train.x.values)
    assert again.test.group_names == data.test.group_names
    with pytest.raises(DataError, match="has 40 bands, and 80 are asked for"):
        cs.load("an4", bare, bands=80)
    (bare / "an4" / "train.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="holds no features of speech"):
        cs.load("an4", bare)


BAD = {
    "has no audio": b"",
    "is not FLAC (it begins with b'RIFF')": flac(tone(), kind="WAV"),
    "is damaged FLAC": flac(tone())[:80],
    "is sampled at 8,000 Hz, and the features are for 16,000 Hz": flac(tone(), rate=8000),
    "has 2 channels": flac(np.stack([tone(), tone()], 1)),
    "is clipped: ": flac(np.clip(tone(level=3.0), -1, 1)),
    "has 200 samples, fewer than the 400 of one window": flac(tone()[:200]),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_audio_is_refused_in_one_sentence_that_names_the_row(sentence, good, tmp_path):
    file = write(tmp_path / "a.parquet", [good[0], BAD[sentence], good[2]])
    with pytest.raises(DataError) as error:
        speech_parquet(file)
    said = str(error.value)
    assert sentence in said
    assert said.startswith(f"{file}: row 1 ")
    assert "\n" not in said
    assert ":" in said.split(sentence)[1]  # the way out follows


def test_clipped_audio_may_be_accepted(good, tmp_path):
    file = write(tmp_path / "a.parquet", [BAD["is clipped: "], *good[1:]])
    assert len(speech_parquet(file, clipped=1.0)) == 3


@pytest.mark.parametrize(
    ("texts", "speakers", "options", "sentence"),
    [
        (("YES", " ", "GO"), SPEAKERS, {}, "row 1 has no text"),
        (("YES", None, "GO"), SPEAKERS, {}, "every utterance must have a text"),
        (TEXTS, ("bob", None, "ann"), {}, "every utterance must have a speaker_id"),
        (TEXTS, SPEAKERS, {"alphabet": "YESNO "}, "row 1 has the character 'G', which is not in alphabet"),
        (TEXTS, SPEAKERS, {"normalise": "word"}, "normalise is 'speaker' or 'utterance'"),
        (TEXTS, SPEAKERS, {"speaker": "talker"}, "has no column 'talker'"),
    ],
)
def test_bad_columns_and_options_are_refused(texts, speakers, options, sentence, good, tmp_path):
    with pytest.raises(DataError, match=sentence):
        speech_parquet(write(tmp_path / "a.parquet", good, texts, speakers), **options)

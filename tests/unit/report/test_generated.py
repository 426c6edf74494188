"""What a generator makes: as it is kept, and as a run's report shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from consilience.evaluation.samples import cells, image_samples, point_samples
from consilience.figures.pictures import GAP, Picture, heat
from support.pages import HOSTILE, Tags, check_page, make_run, report, section
from support.pictures import BLANK, HIGH, LOW, WHITE, at, brightness, pixels, tile

LOWER, UPPER = [-2.0, -1.0], [2.0, 3.0]
NAN = float("nan")


def make_generator(directory: Path, samples: Any) -> Path:
    """A run of a task that has no predictions, and so no calibration, entropies or scores of clients."""
    run = make_run(directory, label_counts=None)
    scored = {"metrics": {"modes": 7.0}, "reliability": None, "entropy": None}
    found = {"belief": "Mixture", "point": scored, "marginal": None, "clients": [], "samples": samples}
    (run / "evaluation.json").write_text(json.dumps(found))
    return run


def shades(count: int) -> torch.Tensor:
    """Images [count, 1, 4, 4], each of one grey of its own."""
    return (torch.arange(count) / (count - 1)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)


def points(count: int) -> torch.Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


def img(page: str) -> list[Picture]:
    return [Picture(found) for found in re.findall(r'<img src="data:image/png;base64,([^"]*)"', page)]


# As it is kept


def test_64_images_are_kept_eight_a_row_from_all_parts() -> None:
    kept = image_samples(shades(200), shades(20))
    assert (kept["kind"], kept["count"]) == ("images", 200)
    json.dumps(kept, allow_nan=False)
    image = pixels(Picture(kept["generated"]))
    factor = image.shape[0] // (8 * (4 + GAP) - GAP)
    greys = [tile(image[::factor, ::factor], i // 8, i % 8, 4, 4)[0, 0, 0] for i in range(64)]
    assert (greys[0], greys[-1]) == (0, 255)
    assert greys == sorted(set(greys))
    real = pixels(Picture(kept["real"]))
    assert real.shape[0] / real.shape[1] == pytest.approx((3 * (4 + GAP) - GAP) / (8 * (4 + GAP) - GAP))


def test_points_are_kept_in_four_digits_and_at_most_500() -> None:
    kept = point_samples(points(2000), points(30), LOWER, UPPER, torch.rand(60, 60))
    assert (len(kept["generated"]), len(kept["real"])) == (500, 30)
    assert (kept["low"], kept["high"]) == (LOWER, UPPER)
    assert kept["real"] == [[round(x, 4), round(y, 4)] for x, y in points(30).tolist()]
    assert kept["generated"][0] == [round(value, 4) for value in points(2000)[0].tolist()]
    assert kept["generated"][-1] == [round(value, 4) for value in points(2000)[-1].tolist()]
    assert len(json.dumps(kept, allow_nan=False)) < 50_000
    assert point_samples(points(3), points(3), LOWER, UPPER)["map"] is None


def test_a_generator_that_broke_down_is_kept_too() -> None:
    broken = torch.tensor([[NAN, 0.0], [0.5, float("inf")], [0.5, 0.25]])
    kept = point_samples(broken, points(3), LOWER, UPPER, torch.tensor([[0.5, NAN]]))
    assert kept["generated"] == [[0.5, 0.25]]
    assert kept["map"] == [[0.5, None]]
    assert point_samples(broken[:1], points(3), LOWER, UPPER)["generated"] == []
    json.dumps(image_samples(torch.full((2, 1, 4, 4), NAN), shades(2)), allow_nan=False)


def test_a_fine_map_is_averaged_to_60_cells_a_side() -> None:
    fine = torch.arange(120.0).view(-1, 1).expand(120, 30)
    kept = point_samples(points(3), points(3), LOWER, UPPER, fine)["map"]
    assert (len(kept), len(kept[0])) == (60, 30)
    assert [row[0] for row in kept] == [2 * row + 0.5 for row in range(60)]


def test_scores_at_cells_are_a_map_of_the_plane() -> None:
    places = cells(LOWER, UPPER, 8)
    assert places[0].tolist() == [-1.75, -0.75]
    assert places[1].tolist() == [-1.25, -0.75]
    assert places[-1].tolist() == [1.75, 2.75]
    right, up = (heat(places[:, axis].reshape(8, 8)) for axis in (0, 1))
    assert (at(right, 0.05, 0.95), at(right, 0.95, 0.05)) == (LOW, HIGH)
    assert (at(up, 0.95, 0.05), at(up, 0.05, 0.95)) == (LOW, HIGH)


# As it is shown


def test_a_run_shows_generated_and_real_images(tmp_path: Path) -> None:
    kept = image_samples(shades(200), shades(20))
    page = report(make_generator(tmp_path, kept))
    check_page(page)
    assert Tags(page).headings == ["Learning curves", "Samples", "Communication", "Data", "Configuration"]
    shown = section(page, "Samples")
    assert img(shown) == [Picture(kept["generated"]), Picture(kept["real"])]
    assert re.findall(r"<b>(.*?)</b>", shown) == ["Generated", "Real examples"]
    assert "<figcaption>64 of 200 samples of the final generators.</figcaption>" in shown
    few = report(make_generator(tmp_path, image_samples(shades(12), shades(20))))
    assert "<figcaption>12 samples of the final generators.</figcaption>" in few


def test_a_run_shows_points_on_the_discriminator_s_map_and_over_real_ones(tmp_path: Path) -> None:
    made = torch.tensor([[1.0, 0.0], [1.0, 0.2], [5.0, 0.0]])  # at 3/4 to the right and 1/4 up; the last is outside
    score = cells(LOWER, UPPER)[:, 1].reshape(60, 60)
    page = report(make_generator(tmp_path, point_samples(made, points(40), LOWER, UPPER, score)))
    check_page(page)
    assert Tags(page).headings == ["Learning curves", "Samples", "Communication", "Data", "Configuration"]
    shown = section(page, "Samples")
    (picture,) = img(shown)
    assert at(picture, 0.75, 0.25) == WHITE
    assert brightness(picture, 0.2, 0.9) > brightness(picture, 0.2, 0.1)
    assert 20 < (pixels(picture) != pixels(heat(score))).any(-1).sum() < 120
    dots = "3 samples of the final generators, 1 of them outside the picture"
    assert f"score: brighter is more like the data. Dots are {dots}.</figcaption>" in shown.replace("&#39;", "'")
    assert f"<figcaption>{dots}, over 40 real examples.</figcaption>" in shown
    assert len(re.findall(r"<use [^>]*fill: var\(--s0\)", shown)) == 40
    assert len(re.findall(r"<use [^>]*fill: var\(--s1\)", shown)) in (2, 3)
    assert [re.sub("<.*?>", "", key) for key in re.findall(r"<li>.*?</li>", shown)] == ["real", "generated"]
    assert shown.count('class="swatch"') == 2


def test_without_a_map_there_are_still_points(tmp_path: Path) -> None:
    shown = section(report(make_generator(tmp_path, point_samples(points(5), points(0), LOWER, UPPER))), "Samples")
    assert img(shown) == []
    assert "<figcaption>5 samples of the final generators, over 0 real examples.</figcaption>" in shown
    assert "discriminator" not in shown


def test_what_the_discriminator_could_not_say_is_blank(tmp_path: Path) -> None:
    score = torch.tensor([[0.0, NAN], [0.5, 1.0]])
    (picture,) = img(report(make_generator(tmp_path, point_samples(points(0), points(5), LOWER, UPPER, score))))
    assert [at(picture, x, y) for x, y in ((0.25, 0.25), (0.75, 0.25), (0.75, 0.75))] == [LOW, BLANK, HIGH]


@pytest.mark.parametrize("samples", [None, {}, {"kind": "sounds"}])
def test_without_samples_there_is_no_section(tmp_path: Path, samples: Any) -> None:
    page = report(make_generator(tmp_path, samples))
    assert Tags(page).headings == ["Learning curves", "Communication", "Data", "Configuration"]
    assert "<img" not in page


def test_what_stands_for_a_picture_is_escaped(tmp_path: Path) -> None:
    kept = {"kind": "images", "generated": f'">{HOSTILE}', "real": "", "count": 3}
    page = report(make_generator(tmp_path, kept))
    check_page(page)
    assert [tag for tag, _ in Tags(page).tags].count("script") == 1

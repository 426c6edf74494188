"""Generated samples as evaluation.json stores them."""

import json

import pytest
import torch

from consilience.evaluation.samples import cells, image_samples, point_samples
from consilience.figures.pictures import GAP, Picture, heat
from support.pictures import HIGH, LOW, at, pixels, tile

LOWER, UPPER = [-2.0, -1.0], [2.0, 3.0]
NAN = float("nan")


def shades(count: int) -> torch.Tensor:
    """Images [count, 1, 4, 4], each of one grey of its own."""
    return (torch.arange(count) / (count - 1)).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)


def points(count: int) -> torch.Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


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

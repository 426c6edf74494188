"""Pictures: maps, grids of images, and tables of both."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from consilience import figures
from consilience.core.errors import ConsilienceError
from consilience.figures.pictures import GAP, Picture, Pictures, Row, heat, photo
from support.pictures import BLANK, HIGH, LOW, MIDDLE, WHITE, at, brightness, pixels, tile

NAN = float("nan")


def small(picture: Picture, height: int, width: int) -> np.ndarray:
    """A picture as it was before it was enlarged, by whole pixels."""
    image = pixels(picture)
    factor = image.shape[0] // height
    assert image.shape[:2] == (height * factor, width * factor)
    assert (image == image[::factor, ::factor].repeat(factor, 0).repeat(factor, 1)).all()
    return image[::factor, ::factor]


# Maps


@pytest.mark.parametrize("values", [[[0.0, 1.0], [2.0, 3.0]], torch.tensor([[0.0, 1.0], [2.0, 3.0]])])
def test_the_first_row_of_a_map_is_at_the_bottom(values: list[list[float]] | torch.Tensor) -> None:
    picture = heat(values)
    assert at(picture, 0.25, 0.25) == LOW
    assert at(picture, 0.75, 0.75) == HIGH
    along = [brightness(picture, x, y) for x, y in ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))]
    assert along == sorted(set(along))


def test_a_map_that_is_highest_at_high_y_is_bright_on_top() -> None:
    y = torch.linspace(0, 1, 40)[:, None].expand(40, 30)
    image = small(heat(y), 40, 30)
    assert tuple(image[0, 0]) == HIGH
    assert tuple(image[-1, 0]) == LOW
    assert (np.diff(image[:, 0, :3].astype(int).sum(1)) < 0).all()


def test_shades_go_from_the_least_to_the_largest_value_unless_told() -> None:
    values = [[-4.0, 1.0, 6.0]]
    assert [at(heat(values), x, 0.5) for x in (0.1, 0.5, 0.9)] == [LOW, MIDDLE, HIGH]
    assert at(heat(values, low=-9.0, high=11.0), 0.5, 0.5) == MIDDLE
    assert LOW != at(heat(values, low=-9.0), 0.1, 0.5) != HIGH
    assert [at(heat(values, low=1.0), x, 0.5) for x in (0.1, 0.5, 0.9)] == [LOW, LOW, HIGH]  # what is below is lowest
    assert [at(heat(values, high=-4.0 + 1e-9), x, 0.5) for x in (0.1, 0.5, 0.9)] == [LOW, HIGH, HIGH]


@pytest.mark.parametrize("value", [0.0, -3.5, 1e30])
def test_a_map_of_one_value_is_of_one_shade(value: float) -> None:
    image = pixels(heat([[value] * 3] * 2))
    assert (image == MIDDLE).all()


@pytest.mark.parametrize("lost", [NAN, float("inf"), -float("inf"), None])
def test_what_is_not_finite_is_blank_and_leaves_the_others_their_shades(lost: float | None) -> None:
    picture = heat([[0.0, lost], [1.0, 2.0]])
    found = [at(picture, x, y) for x, y in ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))]
    assert found == [LOW, BLANK, MIDDLE, HIGH]


def test_a_map_of_nothing_is_blank() -> None:
    assert (pixels(heat([[NAN, NAN]])) == BLANK).all()
    assert (pixels(heat([[NAN, NAN]], low=0.0, high=1.0)) == BLANK).all()


@pytest.mark.parametrize("marks", [[(0.9, 0.2)], torch.tensor([[0.9, 0.2]])])
def test_marks_are_dots_at_their_places(marks: list[tuple[float, float]] | torch.Tensor) -> None:
    y = torch.linspace(0, 1, 60)[:, None].expand(60, 60)
    picture, bare = heat(y, marks), heat(y)
    assert at(picture, 0.9, 0.2) == WHITE
    changed = np.argwhere((pixels(picture) != pixels(bare)).any(-1))
    assert changed.mean(0) / 360 == pytest.approx([0.8, 0.9], abs=0.005)  # from the top, from the left
    assert 20 < len(changed) < 60
    assert np.ptp(changed, axis=0).max() < 10


def test_marks_outside_are_left_out() -> None:
    corners = [(0.0, 0.0), (1.0, 1.0)]
    outside = [(-0.002, 0.5), (1.002, 0.5), (0.5, -0.002), (0.5, 1e30), (NAN, 0.5), (float("inf"), 0.5)]
    assert heat([[1.0]], outside) == heat([[1.0]])
    assert heat([[1.0]], [*corners, *outside]) == heat([[1.0]], corners) != heat([[1.0]])


def test_a_map_with_hundreds_of_marks_is_small() -> None:
    t = torch.linspace(-3, 3, 60)
    bump = torch.exp(-t[:, None].square() - (t - 1).square())
    assert len(heat(bump).png) < 8_000
    assert len(heat(bump, torch.rand(500, 2, generator=torch.Generator().manual_seed(0))).png) < 24_000


@pytest.mark.parametrize("values", [[], [[]], [1.0, 2.0], torch.zeros(2, 2, 2)])
def test_a_map_has_rows_and_columns(values: list[list[float]]) -> None:
    with pytest.raises(ConsilienceError, match="rows and columns"):
        heat(values)


# Grids of images


def test_images_are_placed_row_by_row() -> None:
    images = torch.rand(5, 1, 4, 6, generator=torch.Generator().manual_seed(0))
    image = small(photo(images, columns=3), 2 * 4 + GAP, 3 * 6 + 2 * GAP)
    for index, expected in enumerate((255 * images[:, 0]).round().numpy()):
        found = tile(image, index // 3, index % 3, 4, 6)
        assert (found[..., :3] == expected[..., None]).all(), index
        assert (found[..., 3] == 255).all()
    assert (image[..., 3] == 255).sum() == 5 * 4 * 6  # gaps and the empty place are transparent
    assert (tile(image, 1, 2, 4, 6) == BLANK).all()


def test_colours_stay_what_they_are() -> None:
    images = torch.zeros(2, 3, 2, 2)
    images[0, 0, 0, 1] = 1.0  # red, above on the right
    images[1, 2] = 0.5
    image = small(photo(images, columns=8), 2, 4 + GAP)  # no wider than there are images
    assert image[0, 1].tolist() == [255, 0, 0, 255]
    assert image[1, 1].tolist() == image[0, 0].tolist() == [0, 0, 0, 255]
    assert (tile(image, 0, 1, 2, 2) == [0, 0, 128, 255]).all()


def test_an_image_out_of_bounds_is_clipped_and_what_is_no_number_is_transparent() -> None:
    image = small(photo(torch.tensor([-1.0, 2.0, NAN, 0.2]).view(1, 1, 2, 2), columns=1), 2, 2)
    assert image[..., 0].tolist() == [[0, 255], [0, 51]]
    assert image[..., 3].tolist() == [[255, 255], [0, 255]]


@pytest.mark.parametrize("shape", [(4, 4), (2, 2, 4, 4), (0, 1, 4, 4), (1, 4, 4)])
def test_a_grid_is_of_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConsilienceError, match=r"found torch\.float32"):
        photo(torch.zeros(shape), columns=2)


def test_bytes_are_not_taken_for_numbers_from_nought_to_one() -> None:
    with pytest.raises(ConsilienceError, match=r"0\.\.1, found torch\.uint8"):
        photo(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), columns=1)


# Tables of pictures


def figure(title: str = "Maps", label: str = "first") -> Pictures:
    dot = heat([[0.0, 1.0]], note=f"note of {label}")
    rows = [Row(label, [dot, None]), Row("second", [None, photo(torch.ones(1, 1, 2, 2), 1)])]
    return Pictures(title, f"A caption of {label}.", ["FedAvg", f"{label} column"], rows)


def test_pictures_come_back_from_json_as_they_were() -> None:
    assert figures.read(json.loads(json.dumps(asdict(figure())))) == figure()


def test_every_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ConsilienceError, match=r"2 columns has rows of length \[2, 1\]"):
        Pictures("", "", ["a", "b"], [Row("", [None, None]), Row("", [None])])

"""Experiments by name: `consilience reproduce NAME`."""

from consilience.recipes import fedep, hospitals
from consilience.recipes.base import Options, Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (hospitals.RECIPE, *fedep.RECIPES)}

__all__ = ["RECIPES", "Options", "Recipe"]

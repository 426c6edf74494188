"""Experiments by name: `consilience reproduce NAME`."""

from consilience.recipes import hospitals
from consilience.recipes.base import Options, Recipe

RECIPES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in (hospitals,)}

__all__ = ["RECIPES", "Options", "Recipe"]

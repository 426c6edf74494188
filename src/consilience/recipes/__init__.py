"""Named experiments: `consilience reproduce NAME`."""

from consilience.recipes import (
    after2023,
    after2023_cifar,
    batchnorm,
    dp,
    dp_sites,
    epgan,
    epgan_speech,
    epgan_toy,
    fedep,
    fedep_hospitals,
    fedep_linear,
    fedep_stackoverflow,
    fedep_tags,
    fedep_toy,
    fednp,
    fednp_moments,
    fednp_published,
    fednp_speech,
    fednp_toy,
    fednp_toy_published,
    hospital_methods,
    hospital_sets,
    hospitals,
    last_layer,
    leaderboard,
    one_shot,
    personal_hospitals,
    personal_images,
    pfnm,
    pfnm_more,
    sa,
    sa_ode,
    sotu,
    survival,
)
from consilience.recipes.base import Options, Recipe

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        hospitals.RECIPE, hospital_methods.RECIPE, personal_hospitals.RECIPE, *personal_images.RECIPES,
        hospital_sets.RECIPE, survival.RECIPE, dp.RECIPE, after2023.RECIPE, after2023_cifar.RECIPE,
        dp_sites.RECIPE, batchnorm.RECIPE,
        fedep_hospitals.RECIPE, *fedep.RECIPES, fedep_toy.RECIPE, fedep_linear.RECIPE, fedep_stackoverflow.RECIPE,
        fedep_tags.RECIPE, last_layer.RECIPE,
        *epgan.RECIPES, epgan_toy.RECIPE, epgan_speech.RECIPE, *fednp.RECIPES, *fednp_published.RECIPES,
        fednp_moments.RECIPE, fednp_toy.RECIPE, fednp_toy_published.RECIPE, fednp_speech.RECIPE, *pfnm.RECIPES,
        *pfnm_more.RECIPES, one_shot.RECIPE, leaderboard.RECIPE, *sa.RECIPES, sa_ode.RECIPE, *sotu.RECIPES,
    )
}  # fmt: skip

__all__ = ["RECIPES", "Options", "Recipe"]

"""Networks sized by the shape of the data."""

from consilience.compute.layers import freeze_batchnorm, replace_batchnorm
from consilience.models.acoustic import acoustic
from consilience.models.gan import (
    Pair,
    dcgan,
    dcgan_discriminator,
    dcgan_generator,
    initialised,
    mlp_discriminator,
    mlp_gan,
    mlp_generator,
)
from consilience.models.laplace import LaplaceHead
from consilience.models.lora import LoRALinear, add_lora, merge_lora
from consilience.models.residual_gan import cnn_gan, resnet_gan
from consilience.models.resnet import resnet9, resnet18, resnet18_v2, resnet20
from consilience.models.spectral import spectral_norm
from consilience.models.sru import SRU
from consilience.models.student import StudentHead
from consilience.models.survival import ProportionalHazards
from consilience.models.text import bag_of_words
from consilience.models.transformer import transformer, vit
from consilience.models.zoo import MODELS, cnn, lenet5, logistic, mlp

__all__ = [
    "MODELS",
    "SRU",
    "LaplaceHead",
    "LoRALinear",
    "Pair",
    "ProportionalHazards",
    "StudentHead",
    "acoustic",
    "add_lora",
    "bag_of_words",
    "cnn",
    "cnn_gan",
    "dcgan",
    "dcgan_discriminator",
    "dcgan_generator",
    "freeze_batchnorm",
    "initialised",
    "lenet5",
    "logistic",
    "merge_lora",
    "mlp",
    "mlp_discriminator",
    "mlp_gan",
    "mlp_generator",
    "replace_batchnorm",
    "resnet9",
    "resnet18",
    "resnet18_v2",
    "resnet20",
    "resnet_gan",
    "spectral_norm",
    "transformer",
    "vit",
]  # fmt: skip

"""A small zoo: networks that federate as they are (no BatchNorm), sized by the data they are given."""

from consilience.models.lenet import lenet5
from consilience.models.resnet import resnet9, resnet18
from consilience.models.text import bag_of_words
from consilience.models.zoo import MODELS, cnn, logistic, mlp

__all__ = ["MODELS", "bag_of_words", "cnn", "lenet5", "logistic", "mlp", "resnet9", "resnet18"]

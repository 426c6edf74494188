"""Messages that name the nearest allowed word."""

import pytest

from consilience.core.errors import nearest

METHODS = ["FedAvg", "FedPA", "FedEP", "SCAFFOLD"]


@pytest.mark.parametrize(
    ("word", "meant"), [("FedAVG", "FedAvg"), ("fedavg", "FedAvg"), ("FEDPA", "FedPA"), ("Scafold", "SCAFFOLD")]
)
def test_the_nearest_name_is_found_whatever_the_case(word, meant):
    assert nearest(word, METHODS).startswith(f"did you mean {meant!r}? allowed: FedAvg, FedEP, FedPA, SCAFFOLD")


def test_a_word_that_is_near_to_none_gets_the_list_alone():
    assert nearest("quux", METHODS) == "allowed: FedAvg, FedEP, FedPA, SCAFFOLD"

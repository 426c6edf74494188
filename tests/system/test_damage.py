"""The campaign of benchmarks/damage.py on stored files, in a small size: nothing is silently another result."""

import random
from pathlib import Path

import pytest

from damage import DAMAGES, Victims, altered, directories, exchanged

pytestmark = pytest.mark.usefixtures("sketched")


def test_altered_bytes_and_exchanged_files_are_never_used_silently(tmp_path: Path) -> None:
    victims, chance = Victims(tmp_path), random.Random(0)
    for found in (altered(victims, 18, chance), exchanged(victims, 16, chance)):
        assert set(found) <= {"same result", "refused"}
        assert found["refused"]


def test_damaged_directories_give_no_traceback(tmp_path: Path) -> None:
    found, errors = directories(tmp_path, 2 * len(DAMAGES), random.Random(0))
    assert not errors
    assert found["refused in a sentence"] > 5

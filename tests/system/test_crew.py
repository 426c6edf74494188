"""benchmarks/crew.py: rows side by side end, fail, or stop and are resumed."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = """
    import sys, time
    from pathlib import Path
    from crew import side_by_side, stoppable

    here, seconds, at_once = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    if "--row" in sys.argv:
        row = sys.argv[-1]
        with stoppable():
            (here / f"began {row}").touch()
            (here / f"beside {row}").write_text(str(len(list(here.glob("began *"))) - len(list(here.glob("end *")))))
            if row == "wrong":
                raise ValueError(row)
            time.sleep(60 if row == "long" and not (here / "stopped long").exists() else 0.5)
            (here / f"end {row}").touch()
        time.sleep(10 if row == "leaving" else 0)
    else:
        outcome = side_by_side(sys.argv[4:], "--row", until=time.time() + seconds, at_once=at_once, logs=here / "logs")
        print(outcome.failed, outcome.left, outcome.done)
"""


@pytest.fixture
def crew(tmp_path):
    """The last line of the program with these arguments; `ignored`, as a background job with Ctrl-C ignored."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def run(seconds, at_once, *rows, ignored=False):
        command = [sys.executable, tmp_path / "program.py", tmp_path, str(seconds), str(at_once), *rows]
        before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        try:
            done = subprocess.run(
                command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=120, check=True
            )
        finally:
            signal.signal(signal.SIGINT, before)
        return done.stdout.splitlines()[-1]

    return run


def environment():
    return os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{BENCHMARKS}"}


def test_a_row_that_fails_is_named_and_the_others_end_one_at_a_time(crew, tmp_path):
    assert crew(100, 1, "a", "wrong", "b") == "['wrong'] [] False"
    assert (tmp_path / "end a").exists()
    assert (tmp_path / "end b").exists()
    assert (tmp_path / "beside wrong").read_text() == "1"
    assert "ValueError: wrong" in (tmp_path / "logs" / "wrong.txt").read_text()


@pytest.mark.parametrize("seconds", [0.5, 8])
def test_at_the_end_of_the_time_rows_are_stopped_even_if_they_still_import(crew, tmp_path, seconds):
    assert crew(seconds, 1, "long", "next", ignored=True) == "[] ['long', 'next'] False"
    assert not (tmp_path / "end long").exists()
    assert "Traceback" not in (tmp_path / "logs" / "long.txt").read_text()
    (tmp_path / "stopped long").touch()
    assert crew(100, 2, "long", "next", ignored=True) == "[] [] True"


def test_a_row_that_is_stopped_after_its_work_is_done(crew, tmp_path):
    assert crew(8, 1, "leaving") == "[] [] True"
    assert (tmp_path / "end leaving").exists()

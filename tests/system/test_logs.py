"""A process logs lines of JSON, if the environment asks for them."""

import json
import os
import subprocess
import sys

from consilience.core.logs import VARIABLE

PROGRAM = """
import logging
logging.getLogger("flwr").addHandler(logging.StreamHandler())
from consilience.core.logs import set_up_logs, tell
set_up_logs()
tell("round 1", round=1)
logging.getLogger("consilience").warning("%r has\\nrestarted", "Basel")
logging.getLogger("flwr").warning("of Flower")
try:
    raise KeyError("x")
except KeyError:
    logging.getLogger("consilience").exception("round 2")
"""


def output(**environment):
    """(standard output, standard error) of a program that logs."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=True)
    return done.stdout, done.stderr


def test_all_logs_of_a_process_are_lines_of_json():
    stdout, stderr = output(**{VARIABLE: "json"})
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert stdout == ""
    assert [(line["logger"], line["level"], line["message"]) for line in lines] == [
        ("consilience.told", "info", "round 1"),
        ("consilience", "warning", "'Basel' has\nrestarted"),
        ("flwr", "warning", "of Flower"),
        ("consilience", "error", "round 2"),
    ]
    assert lines[0]["round"] == 1
    assert "KeyError: 'x'" in lines[3]["error"]


def test_without_the_variable_logs_are_text():
    stdout, stderr = output()
    assert stdout == "round 1\n"
    assert stderr.startswith("'Basel' has\nrestarted\n")

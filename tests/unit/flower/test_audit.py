import pytest

from consilience.core.errors import CheckpointError
from consilience.flower.audit import AuditLog


@pytest.fixture
def log(tmp_path):
    log = AuditLog(tmp_path / "run", clock=lambda: 0.0)
    log.write("admitted", site="Basel")
    log.write("refused", site="Genève", reason="line\u2028break")
    log.write("removed", site="Basel")
    return log


def test_events_are_read_in_the_order_in_which_they_were_written(log):
    assert [event["event"] for event in log.read()] == ["admitted", "refused", "removed"]
    assert log.read()[1] == {
        "time": "1970-01-01T00:00:00Z", "event": "refused", "site": "Genève", "reason": "line\u2028break",
    }  # fmt: skip
    assert log.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "line"),
    [(lambda lines: [lines[0].replace("Basel", "Bern"), *lines[1:]], 2), (lambda lines: lines[1:], 1),
     (lambda lines: [lines[0], lines[2]], 2), (lambda lines: [lines[1], lines[0], lines[2]], 1)],
    ids=["altered", "first removed", "middle removed", "exchanged"],
)  # fmt: skip
def test_a_line_that_was_altered_or_removed_is_named(log, change, line):
    log.path.write_text("\n".join(change(log.path.read_text().splitlines())) + "\n")
    with pytest.raises(CheckpointError, match=f"line {line} of"):
        log.read()


def test_a_line_that_a_kill_cut_short_is_replaced(log):
    with open(log.path, "a") as file:
        file.write('{"time": "1970')
    assert len(log.read()) == 3
    log.write("admitted", site="Chur")
    assert [event["event"] for event in log.read()] == ["admitted", "refused", "removed", "admitted"]

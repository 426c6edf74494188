"""Lines of JSON."""

import json
import logging

from consilience.core.logs import JsonLines


def test_facts_cannot_replace_what_a_line_says_of_itself():
    record = logging.LogRecord("consilience", logging.WARNING, "", 0, "text", (), None)
    record.facts = {"level": "info", "site": "Basel"}
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["site"], line["message"]) == ("warning", "Basel", "text")

"""What a model of speech read, beside what was said."""

from consilience.core import text
from consilience.report.page import Cell, Section, Table
from consilience.runs.stored import RunFiles

TITLE = "Transcripts"


def transcript_section(run: RunFiles) -> Section:
    """Some test utterances with their text, what the model read, and its confidence."""
    found = run.evaluation.get("transcripts") or []
    if not found:
        return Section(TITLE)
    rows = [
        [
            Cell(one["speaker"] or str(one["row"])),
            Cell(one["reference"]),
            Cell(one["hypothesis"] or "–"),
            Cell.of(one["confidence"], 2),
            Cell.of(one["errors"], 0),
        ]
        for one in found
    ]
    who = "speaker" if found[0]["speaker"] else "utterance"
    caption = "A click on a head sorts the table."
    about = (
        f"{text.plural(len(found), 'test utterance')}. The confidence is the probability of exactly this hypothesis, "
        "over all alignments with the frames."
    )
    head = [who, "reference", "hypothesis", "confidence", "wrong words"]
    return Section(TITLE, about, tables=[Table(head, rows, caption, prose=True)])

"""Tables as people have them, prepared alike at all sites: from text to model inputs by sums that add up."""

from consilience.data.tables.agreement import Agreement, agree
from consilience.data.tables.preparation import FILE, Preparation
from consilience.data.tables.reading import CSV, Table, as_table, is_table, joined, read_csv
from consilience.data.tables.roles import MINIMUM, Roles
from consilience.data.tables.statistics import Summary, summarise

__all__ = [
    "CSV", "FILE", "MINIMUM", "Agreement", "Preparation", "Roles", "Summary", "Table", "agree", "as_table", "is_table",
    "joined", "read_csv", "summarise",
]  # fmt: skip

"""The preparation of tables, from the summaries of all sites that are online when a run begins."""

import logging

from consilience.core.errors import DataError
from consilience.data.tables import Preparation, agree
from consilience.flower.coordinator import Coordinator

log = logging.getLogger("consilience")


def prepare_at_sites(coordinator: Coordinator) -> Preparation:
    """The preparation of the sites' tables, as soon as all sites that the run needs are online. A DataError has a
    sentence for each difference between their tables; the log names the columns that are not used as they are."""
    sites = coordinator.gather(coordinator.participation.clients)
    summaries = {site.name: site.summary for site in sites if site.summary is not None}
    if len(summaries) < len(sites):
        other = next(site.name for site in sites if site.summary is None)
        raise DataError(f"{other!r} has sent no summary of a table: let all sites load tables")
    found = agree(summaries)
    for remark in found.remarks:
        log.warning("%s", remark)
    names = ", ".join(sorted(summaries))
    log.warning("the tables of %s are prepared: %d features", names, len(found.preparation.feature_names))
    return found.preparation

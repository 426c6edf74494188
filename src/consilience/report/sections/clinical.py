"""Sections for clinical studies: coefficients of a linear model, and survival curves."""

from collections.abc import Sequence

from consilience.report.drawing.canvas import SERIES, Drawing, swatch
from consilience.report.drawing.clinical import Estimates, Survival, coefficient_plot, survival_plot
from consilience.report.page import Cell, Key, Plot, Section, Table
from consilience.report.sections.words import Folded
from consilience.runs.coefficients import EVERYONE, NEWCOMER, Coefficients, from_json
from consilience.runs.stored import RunFiles

MOST = 40  # covariates of a drawing
ABOUT = (
    "An interval holds the {what} with a probability of {level:.0%} given the model, its prior and the data. P(sign) "
    "is the probability that the {what} lies on the same side of {none} as its estimate. "
)
INPUTS = "A covariate's unit is that of the data."
COLUMNS = (
    "A number is compared over the difference in brackets, a category with the first one of its column, and a missing "
    "number with the mean."
)


def coefficient_section(run: RunFiles) -> Section:
    """The coefficients of all clients together, of a new client, and of each client with a belief of its own."""
    content = run.evaluation.get("coefficients")
    if not content:
        return Section("Coefficients")
    found = from_json(content)
    everyone, clients = found[EVERYONE], [one for name, one in found.items() if name not in (EVERYONE, NEWCOMER)]
    what = everyone.title if everyone.exp else "coefficient"
    about = ABOUT.format(what=what, level=everyone.level, none=1 if everyone.exp else 0)
    about += COLUMNS if everyone.per else INPUTS
    shared = [one for name in (EVERYONE, NEWCOMER) if (one := found.get(name)) is not None]
    few = len(clients) + 1 <= len(SERIES)
    coloured = [everyone, *clients] if few else shared
    legend = [Key(one.of, swatch(index)) for index, one in enumerate(coloured)] if len(coloured) > 1 else []
    plots = [Plot(_drawing(coloured, [] if few else clients), _caption(what, clients, few), wide=True, whole=True)]
    tables = [_table(everyone, found.get(NEWCOMER), clients)]
    folded: Folded = [("Coefficients of each client", _own_table(clients))] if clients else []
    return Section("Coefficients", about, legend=legend, plots=plots, tables=tables, folded=folded)


def _drawing(coloured: Sequence[Coefficients], pale: Sequence[Coefficients]) -> Drawing:
    """The first `MOST` covariates."""

    def estimates(one: Coefficients, colour: int | None) -> Estimates:
        return Estimates(one.estimate[:MOST].tolist(), one.lower[:MOST].tolist(), one.upper[:MOST].tolist(), colour)

    groups = [estimates(one, None) for one in pale] + [estimates(one, i) for i, one in enumerate(coloured)]
    first = coloured[0]
    label = f"{first.title}, log scale" if first.exp else first.title
    title = f"{first.title[:1].upper()}{first.title[1:]}s with {first.level:.0%} intervals"
    return coefficient_plot(title, first.labels[:MOST], groups, label, first.exp)


def _caption(what: str, clients: Sequence[Coefficients], few: bool) -> str:
    if not clients:
        return f"The {what} of each covariate, the same for all clients."
    own = "of each client" if few else "of a new client; pale dots are the clients' own estimates"
    return f"The {what} of each covariate for the mean of all clients, and {own}."


def _table(everyone: Coefficients, newcomer: Coefficients | None, clients: Sequence[Coefficients]) -> Table:
    """A row for each covariate."""
    head = ["covariate", everyone.title, f"{everyone.level:.0%} interval", "P(sign)"]
    head += [f"interval of {NEWCOMER}"] if newcomer else []
    head += ["estimates of clients"] if clients else []
    rows = []
    for row, name in enumerate(everyone.labels):
        cells = [name, *everyone.cells()[row]]
        cells += [newcomer.cells()[row][1]] if newcomer else []
        if clients:
            own = [float(one.estimate[row]) for one in clients]
            cells.append(f"{min(own):.3f} to {max(own):.3f}")
        rows.append([Cell(cell) for cell in cells])
    return Table(head, rows, "Estimates are posterior medians." if everyone.exp else "Estimates are posterior means.")


def _own_table(clients: Sequence[Coefficients]) -> Table:
    """A row for each client and covariate."""
    rows = [
        [Cell(one.of), *(Cell(cell) for cell in (name, *cells))]
        for one in clients
        for name, cells in zip(one.labels, one.cells(), strict=True)
    ]
    return Table(["client", "covariate", *clients[0].head], rows)


def survival_section(run: RunFiles) -> Section:
    """The survival curves of test patients at the quartiles of risk."""
    content = run.evaluation.get("survival")
    if not content:
        return Section("Survival")
    curves = content["curves"]
    drawn = [Survival(c["mean"], c["lower"], c["upper"], colour) for colour, c in enumerate(curves)]
    legend = [Key(str(c["name"]), swatch(colour)) for colour, c in enumerate(curves)]
    about = (
        "Three patients of the test data, at the quartiles of predicted risk, at a new client. The baseline hazard is "
        "that of the patients of all clients. Bands hold each point of a curve with a probability of "
        f"{content['level']:.0%}. They have the uncertainty of the coefficients and of the baseline, and not that of a "
        "single patient's time."
    )
    caption = "The probability to have had no event, over time in the unit of the data."
    plot = Plot(survival_plot("Predicted survival", content["times"], drawn), caption, wide=True, whole=True)
    return Section("Survival", about, legend=legend, plots=[plot])

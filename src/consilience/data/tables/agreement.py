"""From the summaries of all sites to one preparation."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

from consilience.core.errors import DataError, nearest
from consilience.core.text import listing
from consilience.data.tables.preparation import OTHER, Categorical, Numeric, Preparation, Target
from consilience.data.tables.roles import (
    Roles,
    may_name_identifier,
    names_identifier,
    same_but_for_spelling,
    same_words,
)
from consilience.data.tables.statistics import Column, Summary

SHOWN = 10  # differences in one message
MANY = 10  # classes that are numbers, such as digits


@dataclass(frozen=True)
class Agreement:
    """A preparation, and a sentence for each column that is not used as it is."""

    preparation: Preparation
    remarks: tuple[str, ...]


def agree(summaries: Mapping[str, Summary]) -> Agreement:
    """The preparation of these sites' tables. It is the same however their rows are divided among sites. A DataError
    has a sentence for each difference between sites."""
    sites = dict(sorted(summaries.items()))
    roles = _common_roles(sites)
    problems, remarks = _differences(sites, roles), []
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise DataError("; ".join(problems[:SHOWN]) + more)
    columns: list[Numeric | Categorical] = []
    ignored: list[str] = []
    for name in _order(sites, roles):
        with_it = {site: summary.columns[name] for site, summary in sites.items() if name in summary.columns}
        lacking = [site for site in sites if site not in with_it]
        total = reduce(add, with_it.values())
        absent = sum(sites[site].rows for site in lacking)
        found, remark = _column(name, total, absent, roles)
        if found is None:
            ignored.append(name)
            remarks.append(f"column {name!r} is not used: {remark}")
            continue
        columns.append(found)
        if isinstance(found, Categorical) and (pair := same_words(found.categories)):
            remarks.append(
                f"categories {pair[0]!r} and {pair[1]!r} of column {name!r} differ in spelling alone, and count as two"
            )
        if lacking:
            remarks.append(f"column {name!r} counts as missing at {listing(lacking)}, which {_verb(lacking)} it")
    target = _target(sites, roles)
    remarks += _target_remarks(sites, target, roles)
    return Agreement(Preparation(tuple(columns), target, tuple(ignored), roles.missing), tuple(remarks))


def _verb(sites: list[str]) -> str:
    return "lacks" if len(sites) == 1 else "lack"


def _common_roles(sites: Mapping[str, Summary]) -> Roles:
    (first, one), *others = sites.items()
    for name, other in others:
        if other.roles != one.roles:
            raise DataError(f"{first!r} and {name!r} declare the columns differently: give all sites the same settings")
    return one.roles


def _order(sites: Mapping[str, Summary], roles: Roles) -> list[str]:
    """The columns in the order of `features`, or as they first occur."""
    found = dict.fromkeys(name for summary in sites.values() for name in summary.columns)
    return list(found) if roles.features is None else [name for name in roles.features if name in found]


def _differences(sites: Mapping[str, Summary], roles: Roles) -> list[str]:
    """What makes it impossible to read the columns of all sites alike, a sentence for each."""
    known = dict.fromkeys(name for summary in sites.values() for name in summary.columns)
    found = [
        f"no site has a column {name!r}; {nearest(name, known)}"
        for name in dict.fromkeys((*(roles.features or ()), *roles.categorical))
        if name not in known
    ]
    if pair := same_but_for_spelling(known):
        found.append(f"there are columns {pair[0]!r} and {pair[1]!r}: give them one name, or ignore one")
    for name in known:
        kinds: dict[str, str] = {}
        for site, summary in sites.items():
            if name in summary.columns and (kind := summary.columns[name].kind) != "nothing":
                kinds.setdefault("numbers" if kind == "numbers" else "text", site)
        if len(kinds) > 1:
            found.append(
                f"column {name!r} holds numbers at {kinds['numbers']!r} and text at {kinds['text']!r}: write it alike "
                f"at both, or declare it as categorical or to be ignored"
            )
    return found + _target_differences(sites)


def _target_differences(sites: Mapping[str, Summary]) -> list[str]:
    """Refuse 0 and 1 at one site where another has well and ill, unless one site has both kinds."""
    numbers = [site for site, summary in sites.items() if summary.target in ("whole", "real")]
    names = [site for site, summary in sites.items() if summary.target == "names"]
    if not numbers or not names or len(numbers) + len(names) < len(sites) or next(iter(sites.values())).roles.classes:
        return []
    return [f"the targets of {numbers[0]!r} are numbers and those of {names[0]!r} names: write the same classes alike"]


def _column(name: str, total: Column, absent: int, roles: Roles) -> tuple[Numeric | Categorical | None, str]:
    """The column of a preparation, or None and the reason why it is not used."""
    declared = name in roles.named
    missing = total.missing + absent > 0
    if total.kind == "nothing" and not total.categories:
        return None, "all its cells are missing"
    if total.kind == "numbers":
        if may_name_identifier(name) and total.distinct and not declared:
            return None, "it holds the numbers of patients or rows, which are all different"
        if names_identifier(name) and not declared:
            raise DataError(
                f"column {name!r} seems to identify patients or rows, some more than once: declare it as to be "
                "ignored, as categorical, or among the features"
            )
        sd = float(total.variance) ** 0.5 if total.variance > 0 else 0.0
        missing |= bool(total.categories)  # "none", at a site without numbers
        found = Numeric(name, total.mean, sd, missing)
        return (found, "") if found.features else (None, "it is constant")
    if total.kind == "text" and roles.declared and name not in roles.categorical:
        return None, "it holds text, and is not declared as categorical"
    if total.kind == "dates" and not declared:
        return None, "it holds dates: compute numbers from them, such as days"
    return _categories(name, total, missing, roles, declared)


def _categories(
    name: str, total: Column, missing: bool, roles: Roles, declared: bool
) -> tuple[Categorical | None, str]:
    counts = total.categories
    if not declared and len(counts) > 1 and max(counts.values()) == 1:
        return None, "it holds text that differs in all rows"
    frequent = tuple(sorted(c for c, count in counts.items() if count >= roles.minimum and c != OTHER))
    found = Categorical(name, frequent, other=len(frequent) < len(counts), missing=missing)
    if len(found.features) > 1 or (found.features and missing):
        return found, ""
    rare = f"each of its categories has fewer than {roles.minimum} rows" if not frequent else "it is constant"
    return None, rare


def _target(sites: Mapping[str, Summary], roles: Roles) -> Target:
    """Real numbers if all are numbers and some are not whole, or if the roles say so; else classes, in their order."""
    kinds = {summary.target for summary in sites.values()}
    if "survival" in kinds and not any(summary.labels.get("1") for summary in sites.values()):
        raise DataError(f"column {roles.target[1]!r} has no event (1) at any site, so there is nothing to learn")
    if kinds & {"survival"} or (kinds <= {"whole", "real"} and "real" in kinds):
        return Target(roles.target)
    if "real" in kinds:
        raise DataError("the targets are decimal numbers at some sites and names at others: write them alike")
    counts: dict[str, int] = {}
    for summary in sites.values():
        for label, count in summary.labels.items():
            counts[label] = counts.get(label, 0) + count
    names = sorted(counts, key=int) if kinds == {"whole"} and not roles.classes else sorted(counts)
    if not roles.classes and (pair := same_words(names)):
        raise DataError(f"the classes {pair[0]!r} and {pair[1]!r} differ in spelling alone: write them alike")
    names = list(roles.classes) or names
    if len(names) < 2:
        raise DataError(f"all targets are {names[0]!r}: at least two classes are needed")
    return Target(roles.target, tuple(names), tuple(counts.get(name, 0) for name in names))


def _target_remarks(sites: Mapping[str, Summary], target: Target, roles: Roles) -> list[str]:
    """A sentence for each class that sites lack, perhaps because they write it in another way, and for many classes."""
    found = []
    for name in target.classes:
        if lacking := [site for site, summary in sites.items() if name not in summary.labels]:
            more = [f"{len(lacking) - SHOWN} more"] if len(lacking) > SHOWN else []
            found.append(f"no target of {listing([*lacking[:SHOWN], *more])} is {name!r}")
    numbers = not roles.classes and {summary.target for summary in sites.values()} == {"whole"}
    if numbers and len(target.classes) > MANY:
        what = f"the {len(target.classes)} whole numbers of the target {roles.target[0]!r} are classes"
        return [f'{what}: to predict numbers, set task.kind = "regression", or numbers=True in from_tables']
    return found

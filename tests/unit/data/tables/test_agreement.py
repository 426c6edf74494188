"""From the tables of several sites to one preparation: roles of columns, differences, privacy."""

from pathlib import Path
from typing import Any

import pytest

from consilience.core.errors import ConfigError, DataError
from consilience.data.tables import Agreement, Preparation, Roles, Table, agree, read_csv, summarise
from consilience.data.tables.preparation import Categorical, Numeric


def table(name: str = "a", /, **columns: list[Any]) -> Table:
    cells = {key: [None if cell is None else str(cell) for cell in column] for key, column in columns.items()}
    return Table(name, cells, range(2, 2 + len(next(iter(cells.values())))))


def agreed(*tables: Table, target: Any = "y", **roles: Any) -> Agreement:
    declared = Roles.of(target, **{"minimum": 1, **roles})
    return agree({one.name: summarise(one, declared) for one in tables})


def features(*tables: Table, **roles: Any) -> tuple[str, ...]:
    return agreed(*tables, **roles).preparation.feature_names


def refused(*tables: Table, **roles: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        agreed(*tables, **roles)
    return str(caught.value)


Y = [0, 1, 0, 1]


def test_numbers_text_and_declared_codes_become_features() -> None:
    one = table(age=[40, 50, 60, 61], sex=["m", "f", "f", "m"], cp=[1, 2, 2, 3], y=Y)
    assert features(one) == ("age", "sex=f", "sex=m", "cp")
    assert features(one, categorical="cp") == ("age", "sex=f", "sex=m", "cp=1", "cp=2", "cp=3")
    assert features(one, features=["cp", "age"]) == ("cp", "age")
    assert features(one, ignore=["sex", "cp"]) == ("age",)


def test_codes_are_the_same_category_however_programs_write_them() -> None:
    one, two = table("a", cp=[1, 2], x=[1, 2], y=[0, 1]), table("b", cp=["1.0", "02"], x=[1, 2], y=[0, 1])
    assert features(one, two, categorical="cp", ignore="x") == ("cp=1", "cp=2")


def test_truth_is_the_same_category_however_programs_write_it() -> None:
    one, two = table("a", s=["TRUE", "FALSE"], y=["True", "False"]), table("b", s=[True, False], y=["true", "false"])
    found = agreed(one, two).preparation
    assert found.feature_names == ("s=false", "s=true")
    assert (found.target.classes, found.target.counts) == (("false", "true"), (2, 2))


def test_categories_that_differ_in_spelling_alone_are_named() -> None:
    one, two = table("a", sex=["Male", "f"], y=[0, 1]), table("b", sex=["male", "f"], y=[0, 1])
    assert agreed(one, two).remarks == (
        "categories 'Male' and 'male' of column 'sex' differ in spelling alone, and count as two",
    )
    assert agreed(table(grade=["A+", "A-", "A+", "A-"], y=Y)).remarks == ()


def test_numbers_of_something_are_left_out_only_if_they_all_differ() -> None:
    assert agreed(table(x=[1, 2, 1, 2], case_nr=[7, 8, 9, 10], y=Y)).preparation.ignored == ("case_nr",)
    assert features(table(x=[1, 2, 1, 2], vessel_number=[0, 1, 2, 2], y=Y)) == ("x", "vessel_number")


@pytest.mark.parametrize("cells", [["70 kg", "81 kg"], ["1%", "20%"], ["1 234,5", "2 000,0"], ["1'234.50", "2'000.10"]])
def test_numbers_with_units_or_blanks_are_no_categories(cells: list[str]) -> None:
    message = refused(table(x=cells * 2, y=Y))
    assert f"a, line 2: column 'x' holds {cells[0]!r}, as all rows hold a number with a unit" in message
    assert features(table(x=cells * 2, y=Y), categorical="x") == tuple(f"x={cell}" for cell in sorted(cells))


@pytest.mark.parametrize("cells", [["40-49", "50-59"], ["08:30", "09:15"], ["1st", "2nd"], ["1A", "2B"]])
def test_text_that_begins_with_digits_may_be_categories(cells: list[str]) -> None:
    assert features(table(x=cells * 2, y=Y)) == tuple(f"x={cell}" for cell in cells)


def test_a_column_with_gaps_at_any_site_has_an_indicator() -> None:
    one, two = table("a", x=[1, None, 3], y=[0, 1, 0]), table("b", x=[1, 2], y=[0, 1])
    assert features(one, two) == ("x", "x missing")
    assert features(table(sex=["m", "f", "f", None], y=Y)) == ("sex=f", "sex=m", "sex missing")


def test_a_column_that_one_site_lacks_is_missing_there_and_named() -> None:
    one, two = table("basel", age=[1, 2], chol=[3, 4], y=[0, 1]), table("chur", age=[1, 2], y=[0, 1])
    found = agreed(one, two)
    assert found.preparation.feature_names == ("age", "chol", "chol missing")
    assert found.remarks == ("column 'chol' counts as missing at chur, which lacks it",)


@pytest.mark.parametrize(
    ("column", "why"),
    [
        ({"patient_id": [7, 8, 9, 10]}, "it holds the numbers of patients or rows, which are all different"),
        ({"": [0, 1, 2, 3]}, "it holds the numbers of patients or rows, which are all different"),
        ({"name": ["Ann", "Bea", "Cleo", "Dora"]}, "it holds text that differs in all rows"),
        ({"unit": ["mg"] * 4}, "it is constant"),
        ({"unit": [5] * 4}, "it is constant"),
        ({"notes": [None] * 4}, "all its cells are missing"),
        ({"day": ["2020-01-31", "2020-02-01"] * 2}, "it holds dates: compute numbers from them, such as days"),
        ({"day": ["31.01.2020", "1.2.2020"] * 2}, "it holds dates: compute numbers from them, such as days"),
    ],
)
def test_columns_that_say_nothing_are_left_out_with_a_sentence(column: dict[str, list[Any]], why: str) -> None:
    found = agreed(table(x=[1, 2, 3, 4], **column, y=Y))
    (name,) = column
    assert found.preparation.feature_names == ("x",)
    assert found.preparation.ignored == (name,)
    assert found.remarks == (f"column {name!r} is not used: {why}",)


def test_a_constant_with_gaps_says_where_it_is_missing() -> None:
    assert features(table(died=[1, None, 1, None], y=Y)) == ("died missing",)


def test_a_constant_is_found_exactly_not_by_a_small_variance() -> None:
    assert features(table(x=[0.1] * 4, z=[1e6, 1e6 + 1e-9, 1e6, 1e6], y=Y)) == ("z",)


def test_identifiers_that_occur_twice_must_be_declared() -> None:
    twice = table(x=[1, 2, 3, 4], patient_id=[7, 7, 8, 9], y=Y)
    assert "'patient_id' seems to identify patients or rows, some more than once: declare it" in refused(twice)
    assert features(twice, ignore="patient_id") == ("x",)
    assert features(twice, categorical="patient_id")[1:] == ("patient_id=7", "patient_id=8", "patient_id=9")


def test_numbers_at_one_site_and_text_at_another_are_a_sentence_without_a_cell() -> None:
    one, two = table("basel", chol=[212, 300], y=[0, 1]), table("chur", chol=["high", "low"], y=[0, 1])
    message = refused(one, two)
    assert "column 'chol' holds numbers at 'basel' and text at 'chur': write it alike at both, or declare" in message
    assert "212" not in message
    assert "high" not in message
    assert features(one, two, categorical="chol") == ("chol=212", "chol=300", "chol=high", "chol=low")


def test_every_difference_between_sites_has_a_sentence() -> None:
    one = table("basel", chol=[212, 300], Age=[1, 2], y=[0, 1])
    two = table("chur", chol=["a", "b"], age=[1, 2], y=["ill", "well"])
    message = refused(one, two)
    assert "there are columns 'Age' and 'age': give them one name, or ignore one; column 'chol' holds" in message
    assert "the targets of 'basel' are numbers and those of 'chur' names: write the same classes alike" in message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"x": [1, "<5", 3, 4]},
            "a, line 3: column 'x' holds '<5', which is not a number, and other rows",
        ),
        ({"x": [1, "inf", 3, 4]}, "a, line 3: column 'x' holds 'inf', which is not a number"),
        ({"x": ["a", "12,5", "b", "c"]}, "a, line 2: column 'x' holds 'a', which is not a number"),
        ({"x": [1, "1e200", 3, 4]}, "a, line 3: column 'x' holds '1e200', which is too large"),
    ],
)
def test_a_column_of_numbers_and_text_is_refused_with_its_line(columns: dict[str, list[Any]], message: str) -> None:
    assert message in refused(table(**columns, y=Y))


def test_none_is_a_missing_number_and_a_category_of_text() -> None:
    assert features(table(x=[1, "None", 3, 4], y=Y)) == ("x", "x missing")
    assert features(table(before=["none", "stroke", "none", "stroke"], y=Y)) == ("before=none", "before=stroke")


def test_other_marks_of_missing_cells_are_declared() -> None:
    one = table(x=[1, "-9.0", 3, 4], c=["a", "unknown", "a", "b"], y=Y)
    made = agreed(one, missing=["-9", "unknown"]).preparation
    assert made.feature_names == ("x", "x missing", "c=a", "c=b", "c missing")
    assert made.transform(table(x=["-9"], c=["unknown"])).tolist() == [[0, 1, 0, 0, 1]]
    assert "line 2: the target is missing" in refused(table(x=[1, 2], y=["-9", 1]), missing="-9")


# Rare categories


def test_rare_categories_fall_together_and_are_not_named() -> None:
    one = table("a", job=["nurse"] * 3 + ["spy"], y=Y)
    two = table("b", job=["nurse"] * 2 + ["king"] * 2, y=Y)
    found = agreed(one, two, minimum=5).preparation
    assert found.feature_names == ("job=nurse", "job=other")
    assert "spy" not in str(found.to_json())
    assert "king" not in str(found.to_json())


def test_a_column_of_rare_categories_alone_is_left_out() -> None:
    found = agreed(table(x=[1, 2, 3, 4], job=["spy", "king", "spy", "fool"], y=Y), minimum=5)
    assert found.remarks == ("column 'job' is not used: each of its categories has fewer than 5 rows",)


def test_sites_that_declare_categories_keep_the_values_of_other_text() -> None:
    one = table(x=[1, 2, 3, 4], name=["Ann", "Ann", "Bea", "Bea"], sex=["m", "f", "m", "f"], y=Y)
    roles = Roles.of("y", categorical="sex", minimum=1, declared=True)
    summary = summarise(one, roles)
    assert summary.columns["name"].categories == {}
    assert summary.columns["sex"].categories == {"m": 2, "f": 2}
    found = agree({"a": summary})
    assert found.preparation.feature_names == ("x", "sex=f", "sex=m")
    assert found.remarks == ("column 'name' is not used: it holds text, and is not declared as categorical",)


# Targets


@pytest.mark.parametrize(
    ("targets", "options", "classes"),
    [
        ([0, 1, 1], {}, ("0", "1")),
        (["0.0", "1.0", "1"], {}, ("0", "1")),
        (["10", "9", "+9"], {}, ("9", "10")),
        (["well", "ill", "ill"], {}, ("ill", "well")),
        (["2", "1.5", "-1"], {}, ()),
        ([0, 1, 1], {"numbers": True}, ()),
    ],
)
def test_targets_are_classes_unless_one_is_a_decimal_number(targets, options, classes) -> None:
    assert agreed(table(x=[1, 2, 3], y=targets), **options).preparation.target.classes == classes


def test_a_class_that_one_site_lacks_has_its_place_and_count() -> None:
    found = agreed(table("a", x=[1, 2], y=["ill", "ill"]), table("b", x=[1, 2], y=["ill", "well"])).preparation.target
    assert (found.classes, found.counts) == (("ill", "well"), (3, 1))


def test_the_sites_that_lack_a_class_are_named() -> None:
    one, two = table("basel", x=[1, 2], y=[1, 2]), table("chur", x=[1, 2], y=[0, 1])  # 2 may be 1 at Chur
    assert agreed(one, two).remarks == ("no target of basel is '0'", "no target of chur is '2'")


def test_many_whole_numbers_may_be_meant_as_numbers() -> None:
    days = table(x=list(range(11)), y=list(range(11)))
    assert agreed(days).remarks == (
        "the 11 whole numbers of the target 'y' are classes: to predict numbers, set task.kind = \"regression\", or "
        "numbers=True in from_tables",
    )
    assert agreed(days, numbers=True).remarks == ()


@pytest.mark.parametrize(
    ("columns", "target", "message"),
    [
        ({"x": Y, "outcome": Y}, "y", "a has no column 'y'; name the column to predict as target=, perhaps 'outcome'"),
        ({"outcome": Y, "x": [1, 2, 3, 4]}, "death", "perhaps 'outcome' or 'x'"),
        ({"x": [1, 2, 3, 4], "targets": Y}, "target", "has no column 'target'; did you mean 'targets'?"),
        ({"x": [1, 2, 3, 4], "y": [0, None, 1, 1]}, "y", "a, line 3: the target is missing: drop the row"),
        ({"y": Y}, "y", "a target and at least one feature are needed"),
        ({"x": Y, "y": Y}, ["y", "x"], "a target and at least one feature are needed"),
        ({"x": Y, "t": [1, 2, 3, 4], "e": [0, 1, 2, 1]}, ["t", "e"], "line 4: column 'e' must be 1 for an event, or 0"),
        ({"x": Y, "t": [1, "a", 3, 4], "e": Y}, ["t", "e"], "the target 'a' is not a number, which the task needs"),
        ({"x": Y, "t": [1, 2, 3, 4], "e": [0] * 4}, ["t", "e"], "column 'e' has no event (1) at any site"),
        ({"x": Y, "t": [1, 2, -0.5, 4], "e": Y}, ["t", "e"], "line 4: column 't' holds '-0.5', and times are not neg"),
        ({"x": Y, "y": ["yes", "no", "Yes ", "no"]}, "y", "the classes 'Yes ' and 'yes' differ in spelling alone"),
        ({"x": Y, "y": [1, 1, 1, 1]}, "y", "all targets are '1': at least two classes are needed"),
        ({"age": Y, "sex": Y, "x": [1, 2, 3, 4]}, "target", "'target'; name the column to predict as target=, perhaps"),
        ({"x": [], "y": []}, "y", "a has no rows"),
        ({"x": Y, "t": Y}, ["t", "t"], "target is one column, or two different ones"),
        ({"x": [1, 1, 1, 1], "y": Y}, "y", "no column is left to predict from"),
    ],
)
def test_targets_that_cannot_be_used_get_a_sentence(columns: dict[str, list[Any]], target: Any, message: str) -> None:
    assert message in refused(table(**columns), target=target)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"categorical": ["cpp"]}, "no site has a column 'cpp'; did you mean 'cp'?"),
        ({"features": ["agee"]}, "a has no column 'agee'; did you mean 'age'?"),
        ({"features": ["cp", "agee"]}, "no site has a column 'agee'; allowed: cp"),
        ({"ignore": "cp", "categorical": "cp"}, "'cp' cannot be a feature and also a target or ignored"),
        ({"minimum": 0}, "minimum must be at least 1, got 0"),
    ],
)
def test_declarations_that_do_not_fit_are_named(roles: dict[str, Any], message: str) -> None:
    assert message in refused(table(age=[1, 2, 3, 4], cp=[1, 2, 1, 2], y=Y), **roles)


def test_a_column_may_not_be_called_as_a_feature_of_another() -> None:
    with pytest.raises(DataError, match="two features are called 'x missing': rename the column"):
        Preparation(
            (Numeric("x", 0.0, 1.0, True), Numeric("x missing", 0.0, 1.0)),
            agreed(table(x=[1, 2, 3, 4], y=Y)).preparation.target,
        )
    assert Categorical("a", ("b",)).features == ("a=b",)


def test_sites_with_other_declarations_are_refused() -> None:
    one, two = (summarise(table(x=[1, 2], z=[1, 2], y=[0, 1]), Roles.of("y", ignore=name)) for name in "xz")
    with pytest.raises(DataError, match="'a' and 'b' declare the columns differently"):
        agree({"a": one, "b": two})


def test_the_place_of_a_table_is_in_its_messages(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,0\nold,1\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: column 'x' holds 'old'"):
        summarise(read_csv(tmp_path / "a.csv"), Roles.of("y"))

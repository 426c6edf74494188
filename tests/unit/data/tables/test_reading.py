"""Tables as people have them: delimiters, decimal signs, encodings, gaps, and refusals."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from consilience.core.errors import DataError
from consilience.data.tables import Table, as_table, read_csv


def read(folder: Path, text: str | bytes) -> Table:
    path = folder / "a.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_csv(path)


def columns(folder: Path, text: str | bytes) -> dict[str, list[str | None]]:
    return {name: list(cells) for name, cells in read(folder, text).columns.items()}


def refused(folder: Path, text: str | bytes) -> str:
    with pytest.raises(DataError) as caught:
        read(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_cells_are_separated_by_commas_semicolons_or_tabs(tmp_path: Path, sign: str) -> None:
    text = "age,dose,target\n40,1.5,a b\n".replace(",", sign)
    assert columns(tmp_path, text) == {"age": ["40"], "dose": ["1.5"], "target": ["a b"]}


def test_a_name_may_hold_another_delimiter_if_the_rows_tell_which_one_separates_cells(tmp_path: Path) -> None:
    assert list(columns(tmp_path, "age;height, cm;y\n40;180;1\n")) == ["age", "height, cm", "y"]
    assert "has commas and semicolons, and it is not clear" in refused(tmp_path, "age;height, cm;y\n40;1,80;1\n")
    assert list(columns(tmp_path, 'age;"height, cm";y\n40;180;1\n')) == ["age", "height, cm", "y"]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["12,5", "3", "-0,5"], ["12.5", "3", "-0.5"]),
        (["1.234,56", "12,5"], ["1234.56", "12.5"]),
        (["1.234.567", "12"], ["1234567", "12"]),
        (["12.5", "3"], ["12.5", "3"]),
        (["1,234.56"], ["1234.56"]),
        (["0.123", "1.234"], ["0.123", "1.234"]),
        (["1,5e3"], ["1.5e3"]),
        (["1234", "12"], ["1234", "12"]),
    ],
)
def test_the_decimal_sign_is_the_one_with_which_a_whole_column_is_numbers(tmp_path: Path, cells, numbers) -> None:
    rows = "".join(f"{cell};a\n" for cell in cells)
    assert columns(tmp_path, f"x;y\n{rows}")["x"] == numbers


def test_another_column_decides_where_a_column_alone_is_not_clear(tmp_path: Path) -> None:
    assert columns(tmp_path, "x;y\n1,234;12,5\n")["x"] == ["1.234"]
    assert columns(tmp_path, "x;y\n1.234;12.5\n")["x"] == ["1.234"]
    assert columns(tmp_path, "x,y\n1.234,12\n")["x"] == ["1.234"]


@pytest.mark.parametrize(
    "text", ["x;y\n1.234;2\n", "x;y\n1,234;2\n", "x;y\n1.234;12,5\n", "x;y\n1,234;12.5\n", 'x,y\n"1,234",2\n']
)
def test_numbers_that_may_have_thousands_separators_are_refused(tmp_path: Path, text: str) -> None:
    message = refused(tmp_path, text)
    assert "a.csv, line 2: column 'x' holds '1" in message
    assert "may be a decimal number or one with a thousands separator: write numbers with decimal points" in message


def test_decimal_commas_in_a_file_with_commas_between_cells_are_refused(tmp_path: Path) -> None:
    assert "has a decimal comma, in a file with commas" in refused(tmp_path, 'x,y\n"12,5",2\n"3,5",1\n')


def test_gaps_have_many_spellings(tmp_path: Path) -> None:
    marks = ["", " ", "?", "-", ".", "NA", "n/a", "#N/A", "NaN", "null", "NULL"]
    assert columns(tmp_path, "x,y\n" + "".join(f"{mark},1\n" for mark in marks))["x"] == [None] * len(marks)


def test_rows_of_empty_cells_are_no_rows(tmp_path: Path) -> None:
    assert len(read(tmp_path, "x;y\n1;2\n;\n\n3;4\n;\n")) == 2


def test_columns_without_names_and_cells_are_no_columns(tmp_path: Path) -> None:
    assert columns(tmp_path, "x;y;;\n1;2;;\n3;4;;\n") == {"x": ["1", "3"], "y": ["2", "4"]}
    assert "each column needs its own name, got ['', '', 'y']" in refused(tmp_path, ",,y\n0,5,2\n1,6,4\n")


def test_a_first_line_may_name_the_separator(tmp_path: Path) -> None:
    assert columns(tmp_path, "sep=;\r\nx;y, z\r\n1,5;2\r\n") == {"x": ["1.5"], "y, z": ["2"]}
    assert "line 4: 1 cells" in refused(tmp_path, "sep=;\nx;y\n1;2\n3\n")


def test_encodings_of_spreadsheets_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "größe;y\n1;2\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert list(columns(tmp_path, text.encode(encoding))) == ["größe", "y"]
    assert not caplog.text
    assert list(columns(tmp_path, text.encode("cp1252"))) == ["größe", "y"]
    assert "a.csv is not in UTF-8: it is read as Windows-1252 (Western European)" in caplog.text
    assert "is no text: save the table as CSV" in refused(tmp_path, b"PK\x03\x04\x00\xff\x00")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,dose,target\n1,1\n", "line 2: 2 cells, but the first line names 3 columns"),
        ("age,dose,target\n", "has no rows"),
        ("", "is empty"),
        ('age,target\n1,0\n1,"0\n1,1\n1,1\n', "line 3: unexpected end of data; is a quote that opens here"),
        ('age,target\n1,"0\n1,1\n1,"\n1,1\n', "line 2: a quote that opens here is not closed in the same"),
        ('age,target\n1,"0"1\n', "line 2: ',' expected after '\"'"),
        ('age,"dose\n(mg)",target\n1,1,0\n1,1\n', "line 4: 2 cells, but the first line names 3 columns"),
        ("age,age,target\n1,1,0\n", "each column needs its own name"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_a_data_frame_is_the_table_of_its_csv_file(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "age": [40, 50],
            "dose": [0.1, np.nan],
            "sex": ["m", None],
            "ill": [True, False],
            "day": pd.to_datetime(["2020-01-31", None]),
            "count": pd.array([1, None], dtype="Int64"),
        }
    )
    frame.to_csv(tmp_path / "a.csv", index=False)
    found, wanted = as_table(frame, "Basel"), read_csv(tmp_path / "a.csv")
    assert {name: list(cells) for name, cells in found.columns.items() if name != "day"} == {
        name: list(cells) for name, cells in wanted.columns.items() if name != "day"
    }
    assert list(found.columns["day"]) == ["2020-01-31 00:00:00", None]
    assert found.where(1, "sex") == "Basel, line 2: column 'sex'"


def test_text_of_a_data_frame_may_have_decimal_commas() -> None:
    assert as_table(pd.DataFrame({"x": ["12,5", "3"]})).columns["x"] == ["12.5", "3"]


def test_numbers_of_a_data_frame_are_clear_whatever_their_decimals() -> None:
    frame = pd.DataFrame({"x": [1.234, 61.257], "n": [1234, 2345]})
    assert as_table(frame).columns == {"x": ["1.234", "61.257"], "n": ["1234", "2345"]}


def test_what_has_no_columns_is_refused() -> None:
    with pytest.raises(DataError, match="a CSV file or a table with columns is expected, got list"):
        as_table([1, 2])

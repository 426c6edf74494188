"""Figures as plain data: panels of lines and dots, and tables of pictures. `consilience.report` draws them."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from consilience.figures.panels import Panels
from consilience.figures.pictures import Pictures

__all__ = ["Panels", "Pictures", "read"]


def read(content: Mapping[str, Any]) -> Panels | Pictures:
    """A figure from the plain data that JSON stores."""
    kind: Any = Pictures if "rows" in content else Panels
    figure: Panels | Pictures = TypeAdapter(kind).validate_python(content)
    return figure

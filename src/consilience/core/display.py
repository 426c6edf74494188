"""Short reprs for notebooks: a line of text or a small HTML table, without tensors."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch import Tensor

from consilience.core import text

FACT = 160  # characters of a fact
NAME = 22  # characters of a name in a table
CELL = 40  # characters of another cell
SCORES = 6  # metrics in a line
LEFT = ' style="text-align: left"'


def clip(value: object, limit: int = FACT) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(str(value).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def scores(metrics: Mapping[str, float]) -> str:
    """Metrics in one line: accuracy 0.9830, NLL 0.0512."""
    return ", ".join(f"{text.short(name)} {text.number(metrics[name])}" for name in text.in_order(metrics)[:SCORES])


def span(values: Tensor) -> str:
    """The range of a tensor's values; empty if there are none, or inside `vmap`."""
    if not values.numel() or values.is_meta:
        return ""
    try:
        low, high = (float(end) for end in values.detach().aminmax())
    except RuntimeError:
        return ""
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def facts(title: str, pairs: Sequence[tuple[str, object]]) -> str:
    """A heading and label–value pairs as HTML; pairs without a value are dropped."""
    cells = [f"<tr><th{LEFT}>{escape(k)}</th><td{LEFT}>{escape(clip(v))}</td></tr>" for k, v in pairs if str(v)]
    return f"<div><b>{escape(clip(title))}</b><table>{''.join(cells)}</table></div>"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """An HTML table whose first column holds names. A cell may have its own HTML (`__html__`)."""
    names = "".join(f"<th>{escape(clip(name, NAME))}</th>" for name in head)
    lines = [(_cell(name, NAME), [_cell(value, CELL) for value in values]) for name, *values in rows]
    body = "".join(f"<tr><th{LEFT}>{name}</th><td>{'</td><td>'.join(cells)}</td></tr>" for name, cells in lines)
    below = f"<small>{escape(clip(caption, 2 * FACT))}</small>" if caption else ""
    return f"<div><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>{below}</div>"


def _cell(value: Any, limit: int) -> str:
    return str(value.__html__()) if hasattr(value, "__html__") else escape(clip(value, limit))


def summary(method: str, data: str, history: Sequence[Mapping[str, Any]], out: object, best: int | None = None) -> str:
    """A run in one line; its scores are those of the `best` round, if there is one."""
    chosen = "" if best is None else f", best {best}"
    found = [f"{text.plural(len(history), 'round')}{chosen}"]
    found += [f"{kind}{scores(s)}" for kind, s in _last(history, best)[-1:]]
    place = f", in {out}" if out is not None else ""
    return f"Run({clip(method, 60)} on {clip(data, 60)}: {', '.join(found)}{place})"


def summary_table(
    method: str,
    federation: str,
    task: str,
    history: Sequence[Mapping[str, Any]],
    out: object,
    best: int | None = None,
) -> str:
    """A run as HTML: its data and task, its rounds, and its last scores or those of the `best` round."""
    seconds = sum(line.get("seconds") or 0 for line in history)
    at = best or max((line["round"] for line in history if line.get("eval")), default=0)
    rows: list[tuple[str, object]] = [
        ("data", federation),
        ("task", task),
        ("rounds", f"{len(history):,}" + (f" in {text.duration(seconds)}" if seconds else "")),
        *((f"{kind}scores, round {at}", scores(found)) for kind, found in _last(history, best)),
        ("directory", "" if out is None else out),
    ]
    return facts(f"Run of {method}", rows)


def _last(history: Sequence[Mapping[str, Any]], best: int | None) -> list[tuple[str, Mapping[str, float]]]:
    """The last scores on test data, or those of the `best` round: of the point model, then of the posterior average."""
    scored = (line for line in reversed(history) if line.get("eval") and best in (None, line["round"]))
    line: Mapping[str, Any] = next(scored, {})
    kinds = (("eval", ""), ("marginal", "marginal "))
    return [(name, line[key]) for key, name in kinds if line.get(key)]

"""Numbers, names and lists as text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

SHORT = {
    "accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "brier": "Brier", "mse": "MSE", "rmse": "RMSE", "mae": "MAE",
    "r2": "R²", "micro_f1": "micro F1", "macro_f1": "macro F1", "fid": "FID", "d_mse": "D-MSE",
    "wer": "WER", "cer": "CER", "auroc": "AUROC", "auprc": "AUPRC", "f1": "F1", "auroc_error": "AUROC error at most",
}  # fmt: skip
LONG = {
    "loss": "Loss",
    "accuracy": "Accuracy",
    "nll": "Negative log-likelihood",
    "ece": "Expected calibration error",
    "brier": "Brier score",
    "mse": "Mean squared error",
    "rmse": "Root mean squared error",
    "mae": "Mean absolute error",
    "r2": "R², share of variance explained",
    "perplexity": "Perplexity of a token",
    "bits_per_token": "Bits per token",
    "wer": "Word error rate",
    "cer": "Character error rate",
    "label_error_rate": "Label error rate",
    "sequence_error_rate": "Share of wrong sequences",
    "concordance": "Concordance, pairs in the right order",
    "integrated_brier": "Integrated Brier score of survival curves",
    "auroc": "Area under the ROC curve",
    "auprc": "Area under the precision-recall curve",
    "balanced_accuracy": "Balanced accuracy",
    "f1": "F1",
    "coverage": "Coverage of prediction sets",
    "set_size": "Classes in a prediction set",
    "interval_width": "Width of a prediction interval",
    "naive_coverage": "Share of targets in a set that takes the model to be right",
    "naive_set_size": "Classes in a set that takes the model to be right",
    "naive_interval_width": "Width of an interval that takes the model to be right",
    "fid": "Fréchet inception distance",
    "classifier_distance": "Fréchet distance of a classifier's features",
    "classifier_score": "Score by a classifier, exp E KL(p(y|x) ‖ p(y))",
    "classes": "Classes found by a classifier",
    "class_coverage": "Coverage of classes by a classifier",
    "modes": "Modes found",
    "good_share": "Share of samples near a mode",
    "d_mse": "Squared error of the density map",
}
NONE = "–"
LONGEST = 1000  # characters of a text from elsewhere


def short(metric: str) -> str:
    """The short name of a metric, for a table."""
    head, comma, rest = metric.partition(", ")  # such as "nll, m = 20"
    head, _, at = head.partition("@")  # such as "fid@10000"
    name = SHORT.get(head, head.replace("_", " "))
    if at:
        name = f"{name} at specificity {at}" if head == "sensitivity" else f"{name}@{at}"
    return name + comma + rest


def long(metric: str) -> str:
    """The long name of a metric, for the title of a plot."""
    head, at, count = metric.partition("@")
    name = LONG[head] + (at and f", {count} samples") if head in LONG and count.isdigit() else short(metric)
    name = LONG.get(metric, name)
    return name[:1].upper() + name[1:]


def in_order(metrics: Iterable[str]) -> list[str]:
    """Metrics without duplicates: first those of `LONG`, then the others in their order."""
    found = list(dict.fromkeys(metrics))
    places = {metric: place for place, metric in enumerate(LONG)}
    return sorted(found, key=lambda metric: places.get(metric.partition("@")[0], len(LONG)))


def is_number(value: Any) -> bool:
    """True for a finite number that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decimals(values: Iterable[Any]) -> int:
    """Decimals that give a column about four significant digits; none for whole numbers."""
    numbers = [abs(float(value)) for value in values if is_number(value)]
    if not numbers or all(value.is_integer() and value > 1 for value in numbers):
        return 0
    return max(0, 4 - sum(max(numbers) >= bound for bound in (1, 10, 100, 1000)))


def fixed(value: Any, places: int) -> str:
    """A number with `places` decimals, or with an exponent if these would all be 0; a dash for other values."""
    if not is_number(value):
        return NONE
    if 0 < abs(value) < min(10**-places / 2, 1e-3):
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:,.{places}f}"


def number(value: Any) -> str:
    """A number with about four significant digits."""
    return fixed(value, decimals([value]))


def interval(ends: Sequence[float] | None) -> str:
    """An interval: [0.782, 0.871]; empty if there is none."""
    places = 0 if ends is None else min(3, decimals(ends))
    return f"[{fixed(ends[0], places)}, {fixed(ends[1], places)}]" if ends else ""


def with_interval(value: Any, ends: Sequence[float] | None) -> str:
    """A number with its interval: 0.831 [0.782, 0.871]."""
    if not ends or not is_number(value):
        return number(value)
    return f"{fixed(value, min(3, decimals(ends)))} {interval(ends)}"


def data_size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 client, 1,200 clients."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listing(parts: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def plain(text: str, longest: int = LONGEST) -> str:
    """A text from elsewhere for a log or a report: one line of at most `longest` characters. Characters that are not
    printable, such as escape codes of terminals, are written as escapes."""
    line = " ".join(text[: 2 * longest].split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= longest and len(text) <= 2 * longest else f"{line[: longest - 1]}…"


def call(config: Any) -> str:
    """Nested hyperparameters as a call: FedEP(infer=Identity(scale=0.05), damping=None)."""
    if isinstance(config, dict):
        inner = ", ".join(f"{key}={call(value)}" for key, value in config.items() if key != "name")
        return f"{config['name']}({inner})" if "name" in config else f"({inner})"
    if isinstance(config, Sequence) and not isinstance(config, str):
        return f"[{', '.join(call(item) for item in config)}]"
    return str(config)

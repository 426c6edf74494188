"""The text of a new app's config.toml, with comments and short tables on one line."""

from collections.abc import Iterator
from typing import Any

import tomli_w

_COMMENTS = {
    "federation": "The sites of a run and the form of their examples. timeout: seconds that the sites of a round\n"
    "have; patience: seconds that the server waits for sites before it gives up. With secure = true the server\n"
    "learns sums over sites and no answer of a single one (docs/trust.md).",
    "site": "The arguments of `load` in site_data.py, the same at every site.",
    "run": "rounds, seed and out are in pyproject.toml; ./run.sh --run-config 'rounds=50' overrides them.",
    "engine": "For the server. The device of a site is a setting of its node.",
}


def config_text(sections: dict[str, Any]) -> str:
    """The TOML text of all sections that are not empty."""
    lines = ["# The same for the server and all sites (docs/deploy.md). The server sends this folder to every site."]
    for name, section in sections.items():
        if section:
            lines += ["", *(f"# {line}" for line in _COMMENTS.get(name, "").splitlines()), *_toml(name, section)]
    return "\n".join([*lines, ""])


def _toml(name: str, section: dict[str, Any]) -> Iterator[str]:
    """A section with lists and small tables on one line. A table of tables gets a section of its own."""
    tables = {key: value for key, value in section.items() if _is_table(value) and all(map(_is_table, value.values()))}
    yield f"[{name}]"
    for key, value in section.items():
        if key not in tables:
            yield f"{_key(key)} = {_inline(value)}"
    for key, table in tables.items():
        yield from ("", *_toml(f"{name}.{_key(key)}", table))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _key(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_inline(part)}' for key, part in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")

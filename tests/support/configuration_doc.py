"""Renders the generated parts of docs/configuration.md from the settings themselves.

``make docs`` rewrites the file; a unit test fails when it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cdc_relay.config import ENV_PREFIX, REFUSED_KAFKA_PROPERTIES, Settings, seconds

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def render(page: str) -> str:
    """Return the page with its generated parts made anew."""
    page = _replace(page, "settings", _settings())
    return _replace(page, "refused", _refused())


def _replace(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{PAGE.name} has no part between {begin} and {end}")
    return f"{head}{begin}\n{table}{end}{tail}"


def _settings() -> str:
    lines = ["| key | variable | default | |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        variable = f"{ENV_PREFIX}{name.upper()}" + ("_<NAME>" if name == "kafka" else "")
        words = (field.description or "").replace("|", "\\|")
        choices = _choices(field.annotation)
        if choices:
            words += " One of " + ", ".join(f"`{one}`" for one in choices) + "."
        lines.append(f"| `{name}` | `{variable}` | {_default(field)} | {words} |")
    return "\n".join(lines) + "\n"


def _refused() -> str:
    lines = ["| property | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in REFUSED_KAFKA_PROPERTIES.items()]
    return "\n".join(lines) + "\n"


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined or value in (None, "", ()):
        return ""
    is_duration = any(
        isinstance(item, BeforeValidator) and item.func is seconds for item in field.metadata
    )
    return f"`{_duration(value) if is_duration else value}`"


def _duration(value: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if value >= size and value % size == 0:
            return f"{int(value // size)}{unit}"
    return f"{round(value * 1000)}ms"


def main() -> int:
    PAGE.write_text(render(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

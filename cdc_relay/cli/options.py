"""Flags that set settings: one for each field a command names, from the field's own words."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from cdc_relay.config import Settings, load, seconds, table_name
from cdc_relay.telemetry import configure_logging

LOGGING: Final = ("log_format", "log_level")
DATABASE: Final = (
    *("database_url", "database_password_file"),
    *("database_tls_ca", "database_tls_cert", "database_tls_key", "table", "columns"),
)
KAFKA: Final = ("kafka_bootstrap", "name")


def settings_options(*fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command ``--config`` and a flag for each of ``fields``, and call it with the merged
    ``Settings`` as its first argument, logging set up."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def with_settings(config: Path | None, **arguments: Any) -> Any:
            flags = {field: arguments.pop(field) for field in fields}
            settings = load(config, flags=flags)
            configure_logging(settings)
            return function(settings, **arguments)

        decorated: Any = with_settings
        # In the help the command's own flags come first, whatever the order of the decorators.
        own = decorated.__dict__.pop("__click_params__", [])
        for field in reversed(fields):
            decorated = _flag(field)(decorated)
        decorated = click.option(
            "--config",
            type=click.Path(path_type=Path),
            envvar="CDC_RELAY_CONFIG",
            metavar="FILE",
            help="TOML file with settings. [variable: CDC_RELAY_CONFIG]",
        )(decorated)
        decorated.__click_params__ += own
        command: Callable[..., Any] = decorated
        return command

    return decorate


def duration(_context: object, parameter: click.Parameter, value: str) -> float:
    """Callback of an option that is a duration and no setting: seconds."""
    try:
        return seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None


def table(_context: object, parameter: click.Parameter, value: str) -> str:
    """Callback of an option that names a table and is no setting."""
    try:
        return table_name(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from None


def _flag(field: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    info = Settings.model_fields[field]
    default = _written(info.get_default(call_default_factory=True))
    hint = f" [default: {default}]" if default else ""
    # Values go to the settings as they were typed: one place checks files, variables and flags.
    return click.option(
        "--" + field.replace("_", "-"),
        field,
        metavar=_metavar(field, info.annotation),
        help=f"{info.description}{hint}",
        shell_complete=lambda _context, _flag, begun: _completed(info.annotation, begun),
    )


def _completed(kind: object, begun: str) -> list[CompletionItem]:
    """What a shell may offer for a value."""
    if kind == Path | None:
        return [CompletionItem(begun, type="file")]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return [CompletionItem(one) for one in choices if one.startswith(begun)]


def _metavar(field: str, kind: object) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    kinds: dict[object, str] = {float: "DURATION", int: "N", int | None: "N", Path | None: "FILE"}
    if field.endswith(("_timeout", "_interval")):
        return "DURATION"
    return kinds.get(kind, field.rpartition("_")[2].upper())


def _written(default: object) -> str:
    """A default as a user would write it; floats are durations."""
    if isinstance(default, float):
        for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
            if default and default % size == 0:
                return f"{default / size:g}{unit}"
        return f"{default:g}s"
    return "" if default in (None, (), {}) else str(default)

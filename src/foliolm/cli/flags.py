"""Command-line flags made from ``EngineConfig``, so that a setting is written down once."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from foliolm.core.config import EngineConfig, config_fields

_PANEL = "Engine"


def with_engine_flags(command: Callable[..., Any], skip: frozenset[str] = frozenset({"model"})) -> Callable[..., Any]:
    """The command with a flag for every engine setting; it is called with ``settings``, a dict of those given.

    Args:
        command: takes ``settings`` and options of its own.
        skip: settings that the command takes in its own way.
    """
    hints = typing.get_type_hints(EngineConfig)
    own = inspect.signature(command, eval_str=True)
    names = [name for name in config_fields() if name not in skip]

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        settings = {name: given.pop(name) for name in names}
        return command(settings={name: value for name, value in settings.items() if value is not None}, **given)

    texts = _help_texts()
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "settings"]
    for name in names:
        default = config_fields()[name]
        flag = "--" + name.replace("_", "-")
        kind = _kind(hints[name])
        shown = "" if default in (None, (), False, True) else f" Default: {default}."
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(declared, help=texts[name] + shown, show_default=False, rich_help_panel=_PANEL)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
        )
    # Typer reads both: the signature for order and defaults, the annotations for types.
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapper.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return wrapper


def engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """The config that flags describe.

    Raises:
        ConfigError: as ``EngineConfig``.
    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return EngineConfig(model=model, **values)


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if options else hint


def _help_texts() -> dict[str, str]:
    """Each setting's line in the class's docstring."""
    documented = inspect.getdoc(EngineConfig) or ""
    section = documented.split("Attributes:")[1].split("Raises:")[0]
    texts: dict[str, str] = {}
    for match in re.finditer(r"^ {4}([a-z_, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        text = " ".join(match[2].split()).replace("``", "")
        for name in match[1].split(", "):
            texts[name] = text[0].upper() + text[1:]
    return texts

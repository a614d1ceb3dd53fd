"""Command-line flags made from classes of settings, so that a setting is written down once; and their config file."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from foliolm.core.config import EngineConfig
from foliolm.core.errors import ConfigError


@dataclass(frozen=True)
class FlagGroup:
    """Flags for every field of a class of settings.

    Attributes:
        parameter: name of the command's parameter that takes them: a dict of those that were given.
        settings: a dataclass whose docstring has a line for each field under ``Attributes:``.
        panel: their heading in the help.
        skip: fields that the command takes in its own way.
    """

    parameter: str
    settings: type[Any]
    panel: str
    skip: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """The fields that have a flag."""
        return [f.name for f in fields(self.settings) if f.name not in self.skip]


ENGINE_FLAGS = FlagGroup("settings", EngineConfig, "Engine", frozenset({"model"}))


def with_flags(command: Callable[..., Any], groups: Sequence[FlagGroup] = (ENGINE_FLAGS,)) -> Callable[..., Any]:
    """The command with the groups' flags beside its own, and ``--config FILE.yaml`` for all of them.

    Args:
        command: takes a dict for each group, and options of its own.
        groups: of flags.
    """
    own = inspect.signature(command, eval_str=True)
    taken = {group.parameter for group in groups}

    @functools.wraps(command)
    def wrapper(**given: Any) -> Any:
        given.pop("config")
        for group in groups:
            values = {name: given.pop(name) for name in group.names}
            given[group.parameter] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if value is not None
            }
        return command(**given)

    parameters = [parameter for parameter in own.parameters.values() if parameter.name not in taken]
    parameters.append(_parameter("config", Annotated[Path | None, _CONFIG_OPTION]))
    for group in groups:
        parameters += [_parameter(name, annotation) for name, annotation in _annotations(group).items()]
    # Typer reads both: the signature for order and defaults, the annotations for types.
    keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    wrapper.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword}
    return wrapper


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The config that flags describe.

    Raises:
        ConfigError: as ``EngineConfig``.
    """
    return EngineConfig(model=model, **settings)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotations(group: FlagGroup) -> dict[str, Any]:
    hints = typing.get_type_hints(group.settings)
    defaults = {f.name: f.default for f in fields(group.settings)}
    texts = _help_texts(group.settings)
    annotations: dict[str, Any] = {}
    for name in group.names:
        kind, default = _kind(hints[name]), defaults[name]
        flag = "--" + name.replace("_", "-")
        shown = "" if default in (None, (), False, True) and default != 1 else f" Default: {default}."
        declared = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        option = typer.Option(declared, help=texts[name] + shown, show_default=False, rich_help_panel=group.panel)
        annotations[name] = Annotated[kind | None, option]
    return annotations


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if options else hint


def _help_texts(settings: type[Any] = EngineConfig) -> dict[str, str]:
    """Each setting's line in the class's docstring."""
    documented = inspect.getdoc(settings) or ""
    section = documented.split("Attributes:")[1].split("Raises:")[0]
    texts: dict[str, str] = {}
    for match in re.finditer(r"^ {4}([a-z_, ]+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        text = " ".join(match[2].split()).replace("``", "")
        for name in match[1].split(", "):
            texts[name] = text[0].upper() + text[1:]
    return texts


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of flags that are not given; eager, so that it comes before them all."""
    if path is None:
        return None
    known = {parameter.name: parameter for parameter in context.command.params if parameter.name != "config"}
    values: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: {str(key)[:200]!r} is no flag of {context.info_name}")
        if name in values:
            raise ConfigError(f"--config {path}: {key!r} is there twice, once with - and once with _")
        parameter = known[name]
        many = bool(getattr(parameter, "multiple", False))
        if many and isinstance(value, str):
            value = [value]
        if isinstance(value, dict) or isinstance(value, list) != many:
            kind = "a list" if many else "one value"
            raise ConfigError(f"--config {path}: {key} is {type(value).__name__}; it must be {kind}")
        if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
            raise ConfigError(f"--config {path}: {key} is {str(value).lower()}; it must be a value, not a switch")
        values[name] = value
    context.default_map = values
    return path


def _mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {str(path)!r}, which cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"--config {path} holds a {type(loaded).__name__}; it must hold names of flags and values")
    return {key: value for key, value in (loaded or {}).items() if value is not None}


_CONFIG_OPTION = typer.Option(
    "--config",
    help="YAML file with names of flags and their values; flags that are given beat it.",
    callback=_read_config,
    is_eager=True,
    show_default=False,
)

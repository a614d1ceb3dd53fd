"""Commands whose wrong input ends in one line on stderr and exit code 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from foliolm.core.errors import FolioError

# The class of every error of the command line's own (a missing option, a word where a number belongs).
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]


class OneLineCommand(TyperCommand):
    """A command that says what is wrong with its input in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; a usage error ends the process with code 2."""
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            raise _ended(error.format_message()) from None

    def invoke(self, ctx: Any) -> Any:
        """Run; an error that FolioLM raises on purpose ends the process with code 2."""
        try:
            return super().invoke(ctx)
        except FolioError as error:
            raise _ended(str(error)) from None


class OneLineGroup(TyperGroup):
    """A group that names an unknown command in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an unknown one ends the process with code 2."""
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            raise _ended(error.format_message()) from None


def _ended(message: str) -> typer.Exit:
    typer.echo("foliolm: " + " ".join(message.split()), err=True)
    return typer.Exit(2)

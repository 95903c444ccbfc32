"""A command group whose commands are imported when they are called, not when help is shown."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True, kw_only=True)
class LazyCommand:
    """Where a command is.

    Attributes:
        module: the module that defines it.
        attribute: its name there.
        short_help: its line in the group's help; a test compares it with the command's own.
    """

    module: str
    attribute: str
    short_help: str


class LazyGroup(click.Group):
    """A group over a table of `LazyCommand`."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        """Make a group of `lazy_commands`; the rest is click's."""
        super().__init__(*args, **kwargs)
        self.lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the table's order, which is the order of use."""
        return list(self.lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command's module and return the command."""
        lazy = self.lazy_commands.get(cmd_name)
        if lazy is None:
            return None
        command = getattr(importlib.import_module(lazy.module), lazy.attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, lazy.short_help) for name, lazy in self.lazy_commands.items()]
            )

"""Every command's --help, and `docs/cli.md` with it.

`python -m tests.cli.help_pages` writes the current help into `docs/cli.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from trace_audit.cli.main import PROGRAM, cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "cli.md"
_WIDTH = 80
_HEADING = re.compile(r"#+ `(trace-audit[^`]*)`")
_OPEN, _CLOSE = "```text", "```"


def help_pages() -> dict[str, str]:
    """Command -> the text of its --help, groups before what is in them."""
    settings = {**cli.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    root = click.Context(cli, info_name=PROGRAM, **settings)
    return dict(_pages(root))


def documented_pages(text: str) -> dict[str, str]:
    """Command -> the help that the page shows, in the page's order."""
    blocks: dict[str, list[str]] = {}
    for line, command in _lines(text):
        if command is not None:
            blocks.setdefault(command, [])
            if line != _OPEN:
                blocks[command].append(line + "\n")
    return {command: "".join(lines) for command, lines in blocks.items()}


def refreshed(text: str) -> str:
    """The page with every block replaced by the current help."""
    pages = help_pages()
    kept = []
    for line, command in _lines(text):
        if command is None:
            kept.append(line + "\n")
        elif line == _OPEN:
            kept.append(f"{_OPEN}\n{pages[command]}")
    return "".join(kept)


def _lines(text: str) -> Iterator[tuple[str, str | None]]:
    """Every line, with the command whose help block it opens or is in."""
    heading: str | None = None
    inside = False
    for line in text.splitlines():
        match = _HEADING.fullmatch(line)
        if match:
            heading = match[1]
        if line == _CLOSE:
            inside = False
        elif line == _OPEN:
            inside = True
        yield line, heading if inside else None


def _pages(context: click.Context) -> Iterator[tuple[str, str]]:
    yield context.command_path, context.get_help() + "\n"
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _pages(click.Context(inner, info_name=name, parent=context))


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""The pictures of docs/: a report on terminals of 80 and 160 columns.

`python -m tests.report.screenshots AUDIT [OPTION ...]` runs `diff report` on an audit with these
options and draws what it prints, in Chromium.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
from contextlib import suppress
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.report.chromium import chromium_binary, running

DOCS = Path(__file__).parents[2] / "docs"
_CHARACTER = (8, 16)  # of the page below, pixels
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 12px; background: #fff; color: #111 }}
pre {{ margin: 0; font: 13.33px/16px "DejaVu Sans Mono", monospace; width: WIDTHch }}
</style><pre>{code}</pre>"""


def main() -> None:
    """Draw both widths."""
    binary = chromium_binary()
    if binary is None:
        raise SystemExit("no Chromium on the path")
    audit, *options = sys.argv[1:]
    for width in (80, 160):
        printed = report(audit, options, width)
        draw(binary, printed, width, DOCS / f"terminal-{width}.png")


def report(audit: str, options: list[str], width: int) -> str:
    """What `diff report` prints on a terminal of that width, with its colors."""
    command = [sys.executable, "-m", "trace_audit", "diff", "report", audit, *options, "--no-save"]
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width)}
    with subprocess.Popen(command, env=environment, stdout=theirs):
        os.close(theirs)
        return read_all(ours).replace("\r\n", "\n")


def read_all(terminal: int) -> str:
    """Everything written to a terminal until its last writer is gone."""
    parts = []
    # Linux tells the end of a pseudo-terminal by an error.
    with suppress(OSError):
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def draw(binary: str, printed: str, width: int, path: Path) -> None:
    """Text with ANSI styles as a picture."""
    console = Console(record=True, width=width + 40, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(printed), soft_wrap=True)
    html = console.export_html(inline_styles=True, code_format=_PAGE.replace("WIDTH", str(width)))
    columns, rows = max(width, 80), printed.count("\n") + 2
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(html, encoding="utf-8")
        with running(binary) as browser:
            size = (columns * _CHARACTER[0] + 40, rows * _CHARACTER[1] + 24)
            browser.open(page.as_uri(), width=size[0], height=size[1])
            browser.screenshot(path)


if __name__ == "__main__":
    main()

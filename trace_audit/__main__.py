"""`python -m trace_audit`."""

from __future__ import annotations

import sys

from trace_audit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

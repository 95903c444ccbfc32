"""trace-audit: record a token trace once, replay it under other numerics, diff per token."""

from __future__ import annotations

__version__ = "0.1.0"

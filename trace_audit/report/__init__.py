"""Renders the summaries of :mod:`trace_audit.diff` for people and programs."""

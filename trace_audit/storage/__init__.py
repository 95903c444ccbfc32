"""Audit directories: formats, checks, and writers that survive interruption."""

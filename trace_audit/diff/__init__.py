"""Aligns, measures and summarizes pairs of runs; no torch, no rendering."""

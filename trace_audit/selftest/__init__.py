"""Negative controls: faults planted on purpose, which the instrument must find.

A fault is a description in `faults`. `runners` has a model runner for each, and a replay is given
one in place of the engine's own: nothing else in the package knows of them, and no configuration
reaches them.
"""

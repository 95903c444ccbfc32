"""Profiles as TOML files: what `gate learn` writes and `--profile FILE` reads."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_audit.diff.gate_expression import gated_metric
from trace_audit.diff.profiles import PROFILE_FLOOR_FACTOR, Profile
from trace_audit.diff.verdict import Gate
from trace_audit.errors import UsageError

FORMAT_NAME = "trace-audit profile"
# 1: first version.
FORMAT_VERSION = 1
_KEYS = {
    "format": str,
    "format_version": int,
    "name": str,
    "purpose": str,
    "baseline": str,
    "model_fingerprint": str,
    "runs": list,
    "gate": list,
}
_GATE_KEYS = {"metric": str, "bound": float, "watch": bool, "source": str}


def profile_text(profile: Profile) -> str:
    """The profile as TOML, with a final newline."""
    fields: dict[str, object] = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "name": profile.name,
        "purpose": profile.purpose,
        "baseline": profile.baseline,
        "model_fingerprint": profile.model_fingerprint or "",
        "runs": list(profile.runs),
    }
    lines = ["# Bounds depend on the model and its trace: learn them again when either changes."]
    lines += [f"{key} = {_toml(value)}" for key, value in fields.items()]
    for gate in profile.gates:
        lines += ["", "[[gate]]", f"metric = {_toml(gate.metric)}", f"bound = {gate.bound!r}"]
        lines += [f"watch = {_toml(gate.watch)}", f"source = {_toml(gate.source)}"]
    return "\n".join(lines) + "\n"


def read_profile(path: Path) -> Profile:
    """Reads a profile file.

    Raises:
        UsageError: It cannot be read, is no profile of this version, or a key or value is wrong.
    """
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML file: {error}.") from error
    if values.get("format") != FORMAT_NAME or values.get("format_version") != FORMAT_VERSION:
        raise UsageError(
            f"{path} is no profile of version {FORMAT_VERSION}.",
            hint="`trace-audit gate learn DIR -o FILE` writes one.",
        )
    _check(path, values, _KEYS)
    gates = values.get("gate")
    if not gates or "name" not in values:
        raise UsageError(f"{path} needs a name and at least one [[gate]].")
    return Profile(
        name=values["name"],
        purpose=values.get("purpose", ""),
        gates=tuple(_gate(path, gate) for gate in gates),
        baseline=values.get("baseline", "record"),
        model_fingerprint=values.get("model_fingerprint") or None,
        runs=tuple(str(run) for run in values.get("runs", [])),
    )


def _gate(path: Path, values: Any) -> Gate:
    if not isinstance(values, dict):
        raise UsageError(f"{path}: every gate is a table, [[gate]].")
    _check(path, values, _GATE_KEYS)
    if "metric" not in values or "bound" not in values:
        raise UsageError(f"{path}: a gate needs a metric and a bound.")
    gated_metric(values["metric"])
    bound = float(values["bound"])
    if not (math.isfinite(bound) and bound >= 0):
        raise UsageError(
            f"{path}: the bound of {values['metric']} must be finite and not negative."
        )
    # As in the profile bitwise: a census has no floor.
    census = values["metric"] == "rows.unequal" and bound == 0
    return Gate(
        metric=values["metric"],
        bound=bound,
        floor_factor=0.0 if census else PROFILE_FLOOR_FACTOR,
        watch=values.get("watch", False),
        source=values.get("source", str(path)),
    )


def _check(path: Path, values: Mapping[str, Any], known: Mapping[str, type]) -> None:
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Keys are {', '.join(known)}."
            raise UsageError(f"{path}: unknown key {key!r}.", hint=hint)
        wanted = (int, float) if known[key] is float else known[key]
        if not isinstance(value, wanted) or (isinstance(value, bool) and known[key] is not bool):
            raise UsageError(f"{path}: {key} must be of type {known[key].__name__}.")


def _toml(value: object) -> str:
    # A TOML basic string is a JSON one, but for DEL.
    return json.dumps(value).replace("\x7f", "\\u007f")

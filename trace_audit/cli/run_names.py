"""How a replay's run is called."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from trace_audit.config import MAX_NAME_LENGTH, RUN_NAME_RULE, is_run_name
from trace_audit.errors import ConfigError

RESERVED = ("record", "imported")  # made by `record`; no replay may stand in for them


def base_name(config_name: str, overrides: Mapping[str, object]) -> str:
    """A configuration's name with what `--set` gave appended: `bf16-sdpa-block_size=32`.

    Args:
        overrides: dotted key -> value, as from `parse_set`.

    Raises:
        ConfigError: the name is reserved, or no run can be called so.
    """
    parts = [str(overrides.get("name", config_name))]
    for key, value in overrides.items():
        if key != "name":
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"{key.rpartition('.')[2]}={re.sub(r'[^A-Za-z0-9._+-]', '_', text)}")
    name = "-".join(parts)
    if len(name) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"the name that --set makes has {len(name)} characters, of which a run's name may have "
            f"{MAX_NAME_LENGTH}: {name}",
            hint="put the keys that all runs share into a TOML file",
        )
    return checked_name(name)


def checked_name(name: str) -> str:
    """`name`, if a replay can be called so.

    Raises:
        ConfigError: it is reserved or not a valid name.
    """
    if name in RESERVED:
        raise ConfigError(
            f"a replay cannot be called {name}: that is what `record` made",
            hint="give the run another name with --name",
        )
    if not is_run_name(name):
        raise ConfigError(
            f"{name!r} is no name for a run: it must be {RUN_NAME_RULE}",
            hint="give the run a name with --name",
        )
    return name


def free_name(
    base: str, *, taken: Collection[str], interrupted: Collection[str], force: bool
) -> str:
    """`base`, or `base-2`, `base-3` and so on when that is already there.

    An interrupted run under one of these names comes first: going on with it is what running the
    same command again means. Whether it is the same job is for the writer to say.

    Args:
        taken: names of runs that are complete, or being written.
        interrupted: names of runs that were begun and that nobody works on.
        force: replace `base` rather than look for another name.
    """
    if force:
        return base
    # One of these is free, since each taken name can rule out only one.
    candidates = [base, *(f"{base}-{number}" for number in range(2, len(taken) + 3))]
    begun = [name for name in candidates if name in interrupted and name not in taken]
    free = [name for name in candidates if name not in taken]
    return (begun or free)[0]

"""Environment variables: those that there are, and those that are on or off."""

import os
from collections.abc import Collection

from moescope.errors import UserError


def only(known: Collection[str]) -> None:
    """Raises UserError for a variable that begins as these do and is none of them: a misspelt one
    would be passed over in silence."""
    for name in sorted(os.environ):
        if name.startswith("MOESCOPE_FUSED") and name not in known:
            raise UserError(f"no such variable; there are {', '.join(known)}", name)


def flag(variable: str) -> bool:
    """Whether it is 1; unset, empty, 0 and off are off. Raises UserError naming the variable."""
    value = os.environ.get(variable, "")
    if value.lower() not in ("", "0", "off", "1"):
        raise UserError(f'"{value}" is not allowed; write 1, or 0 or off', variable)
    return value == "1"

"""Environment variables that are on or off."""

import os

from moescope.errors import UserError


def flag(variable: str) -> bool:
    """Whether it is 1; unset, empty, 0 and off are off. Raises UserError naming the variable."""
    value = os.environ.get(variable, "")
    if value.lower() not in ("", "0", "off", "1"):
        raise UserError(f'"{value}" is not allowed; write 1, or 0 or off', variable)
    return value == "1"

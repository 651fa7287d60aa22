"""The one error that a user sees as a line instead of a traceback."""


class UserError(Exception):
    """Something the user can mend: says what is wrong, where, what is allowed, what to do.

    ``where`` is a file and key ("config.yaml: shape.prompt"); the command line prints
    ``moescope: <where>: <message>`` and exits with 2.
    """

    def __init__(self, message: str, where: str | None = None):
        super().__init__(message)
        self.where = where

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.where}: {message}" if self.where else message

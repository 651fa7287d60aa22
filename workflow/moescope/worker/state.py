"""What a worker keeps between requests, and how it refuses one."""

from typing import Any

PACKAGES = ("mlx-lm", "mlx-vlm")


class Refusal(Exception):
    """A request that cannot be served; the worker stays usable.

    kind: not_applicable (this model has nothing of the sort), unsupported (the runtime or this
    version cannot do it), out_of_memory or failed.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class State:
    """The loaded model.

    model: as the runtime's loader returns it. package: "mlx-lm" or "mlx-vlm".
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.package: str | None = None

    def loaded(self) -> Any:
        """The model; a Refusal if there is none."""
        if self.model is None:
            raise Refusal("failed", "no model is loaded; send load first")
        return self.model

    @property
    def root(self) -> Any:
        """The module that the runtime calls once a step: the whole text model."""
        model = self.loaded()
        return model.language_model if self.package == "mlx-vlm" else model


def check_package(package: str) -> None:
    if package not in PACKAGES:
        raise Refusal("unsupported", f"package is {package!r}; {' and '.join(PACKAGES)} are known")


def check_ids(name: str, ids: Any) -> list[int]:
    """A non-empty list of token ids; a Refusal otherwise."""
    if not isinstance(ids, list) or not ids:
        raise Refusal("failed", f"{name} must be a non-empty list of token ids")
    if not all(type(i) is int and i >= 0 for i in ids):
        raise Refusal("failed", f"{name} holds something that is not a token id")
    return ids

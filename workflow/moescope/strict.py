"""What users write is checked key by key: unknown ones are named, with those that are allowed."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError


def known_keys(model: type[BaseModel], data: Any) -> Any:
    """For a "before" validator: refuses a mapping that has keys which the model does not know."""
    if isinstance(data, dict):
        allowed = [field.alias or name for name, field in model.model_fields.items()]
        unknown = [str(key) for key in data if key not in allowed]
        if unknown:
            raise PydanticCustomError(
                "unknown_key",
                "unknown key {unknown}; allowed: {allowed}",
                {"unknown": ", ".join(unknown), "allowed": ", ".join(allowed)},
            )
    return data

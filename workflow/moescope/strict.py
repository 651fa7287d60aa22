"""The base of what users write: unknown keys are named, with those that are allowed."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            allowed = [field.alias or name for name, field in cls.model_fields.items()]
            unknown = [str(key) for key in data if key not in allowed]
            if unknown:
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key {unknown}; allowed: {allowed}",
                    {"unknown": ", ".join(unknown), "allowed": ", ".join(allowed)},
                )
        return data

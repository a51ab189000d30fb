"""What every section of a recipe has: strict types, a way to report conflicts, and a walk over its keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

Loc = tuple[int | str, ...]
"""The way to a value: keys of mappings and indices of lists."""

Problem = tuple[str, str]
"""A key, relative to the section that reports it, and what is wrong with its value."""

DATA_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")

Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class ConflictError(ValueError):
    """All the problems that the values of one section have with each other."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message in problems))
        self.problems = problems


class Idle(str):
    """What is wrong with a key that has no effect."""


class Section(BaseModel):
    """A mapping of the recipe: strict, frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    shorthand: ClassVar[str | None] = None
    """The key meant by a plain string that stands where this section is expected."""

    def problems(self) -> Iterator[Problem]:
        """Yield the combinations of values that cannot work."""
        yield from ()

    def idle(self, *keys: str, unless: str) -> Iterator[Problem]:
        """Yield those of `keys` that the user changed although they have no effect here."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].default:
                yield key, Idle(f"has no effect unless {unless}; change that or remove the key")

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand and isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self.problems()):
            raise ConflictError(problems)
        return self


def _beside_recipe(path: str, info: ValidationInfo) -> str:
    """Turn a local path that only exists relative to the recipe's folder into one relative to the current directory.

    Anything else (a Hub id, the name of a reward, a path that exists from here) is returned as it is.
    """
    folder: Path | None = (info.context or {}).get("folder")
    file = path.rpartition(":")[0] if ".py:" in path else path
    looks_local = file.lower().endswith((".py", *DATA_FILE_SUFFIXES)) or "/" in file
    if folder is not None and looks_local and not Path(file).exists() and (folder / file).exists():
        return str(folder / path)
    return path


LocalPath = Annotated[str, Field(min_length=1), AfterValidator(_beside_recipe)]


def section_in(annotation: Any) -> type[Section] | None:
    """The section inside `X`, `X | None` or `list[X]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(section_in, get_args(annotation))), None)


def section_at(root: type[Section], loc: Loc) -> type[Section] | None:
    """The section that `loc` leads to; None when it leads to no section."""
    section: type[Section] | None = root
    for key in loc:
        if isinstance(key, int):  # an entry of a list, whose section was found with the list
            continue
        if section is None or key not in section.model_fields:
            return None
        section = section_in(section.model_fields[key].annotation)
    return section


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key of `section` and, dotted, of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        if inner := section_in(field.annotation):
            yield from keys_of(inner, f"{prefix}{name}.")

"""The YAML that recipes are written in: safe YAML 1.1 with its traps for this use removed.

- `1e-6` is a number. YAML 1.1 asks for a dot and a sign in the exponent and reads a learning rate as text.
- `2026-01-01` is text, so that it can name a run.
- A key given twice is an error; plain YAML lets the second one win without a word.
"""

import re
from typing import Any

import yaml

from rltt.errors import RecipeError

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?[0-9]+[eE][-+]?[0-9]+$"
    r"|[-+]?\.(?:inf|Inf|INF)$"
    r"|\.(?:nan|NaN|NAN)$"
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table of plain scalars, by first character, without its floats and dates and with ours."""
    table = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (_FLOAT_TAG, _TIMESTAMP_TAG)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+.0123456789":
        table.setdefault(first, []).append((_FLOAT_TAG, _FLOAT))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    # Checked while composing: later, when mappings are constructed, `<<` merges have already mixed two mappings' keys.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                problem = f"the key '{key.value}' is given twice, first on line {lines[key.value]}"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            lines[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    # The same table as the loader, so that text that looks like a number in this dialect is quoted.
    yaml_implicit_resolvers = _resolvers()


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds; a `RecipeError` naming `source` and the line when it is not valid YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{source}: {where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:  # a character that YAML does not allow: its message is all there is
        raise RecipeError(f"{source}: {error}") from None


def dump_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML that `parse_yaml` reads back to an equal value, keys in their given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

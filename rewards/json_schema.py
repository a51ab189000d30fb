"""The share of required keys that a JSON answer has with the right type; 0.0 when it is no JSON object.

    rewards: [rewards/json_schema.py:json_schema]

The answer is the completion after its thinking part, bare or in a ```json fence. Change SCHEMA to what you ask for.
"""

import json
import re

from rltt.rewards.extract import completion_text, visible

SCHEMA = {"name": str, "age": int, "hobbies": list}
FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def json_schema(completions, **kwargs):
    return [share(visible(completion_text(completion))) for completion in completions]


def share(text: str) -> float:
    fenced = FENCE.findall(text)
    try:
        answer = json.loads(fenced[-1] if fenced else text)
    except (json.JSONDecodeError, RecursionError):
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    return sum(fits(answer.get(key), kind) for key, kind in SCHEMA.items()) / len(SCHEMA)


def fits(value, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))  # True is an int to Python

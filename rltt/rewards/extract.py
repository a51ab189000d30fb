"""Which part of a completion is its final answer.

In this order, and nothing else:

1. the last complete `\\boxed{...}` (or `\\fbox{...}`); when that is empty there is no answer;
2. the last line `#### 42`, as in GSM8K;
3. the last `answer is 42`, `answer: 42` or `answer = 42`, up to the end of its line or sentence.

Only text after a closed thinking part counts, and none of a thinking part that was never closed. There is no "last
number in the text" rule: it rewards whatever number a completion happens to end on, and a policy learns to do that.
"""

import re
from collections.abc import Sequence
from typing import Any

from rltt.data.boxed import last_boxed

_THINK_OPEN, _THINK_CLOSE = re.compile("<think(?:ing)?>"), re.compile("</think(?:ing)?>")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)$", re.MULTILINE)
_PHRASE = re.compile(r"\banswer(?:\s+is\b\s*:?|(?:\*\*)?\s*[:=])\s*(?:\*\*)?\s*(\S[^\n]*)", re.IGNORECASE)
# A sentence ends at a full stop that is not a decimal point, and bold type where it is closed.
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\*\*")
_BOX = re.compile(r"\\(?:boxed|fbox)")


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion as TRL passes it: a string, or messages of which the assistant's last counts."""
    if isinstance(completion, str):
        return completion
    contents = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    content = contents[-1] if contents else ""
    if isinstance(content, list):  # blocks, as in {"type": "text", "text": ...}
        return "".join(block.get("text", "") for block in content)
    return content or ""


def visible(text: str) -> str:
    """The text after the last closed thinking part, up to one that is not closed."""
    return _THINK_OPEN.split(_THINK_CLOSE.split(text)[-1], maxsplit=1)[0]


def final_answer(text: str) -> str | None:
    """The final answer of a completion by the rules above, or None."""
    text = visible(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    for rule in (_HASHES, _PHRASE):
        found = rule.findall(text)
        if found:
            answer = _SENTENCE_END.split(found[-1], maxsplit=1)[0].strip()
            return None if _BOX.search(answer) else answer or None  # the box was cut off: so was the answer
    return None


def gold_answer(gold: str) -> str:
    """The answer in a gold column, which may be the bare answer, a boxed one, or a GSM8K solution."""
    boxed = last_boxed(gold)
    if boxed is not None:
        return boxed.strip()
    hashes = _HASHES.findall(gold)
    return (hashes[-1] if hashes else gold).strip()


def quoted(text: str, length: int) -> str:
    """The beginning of a text in quotes, for a message; a mark says that there is more."""
    return f"{text[:length]!r}{'…' if len(text) > length else ''}"

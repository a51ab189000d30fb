"""1.0 for `<think>...</think>` followed by an answer, else 0.0.

    rewards: [math, {use: rewards/format_thinking.py:format_thinking, weight: 0.2}]

There must be one thinking part with something in it, nothing before it and something after it. When the chat template
already ends the prompt with `<think>`, the completion holds only the closing tag: that is fine too.
"""

import re

from rltt.rewards.extract import completion_text

PATTERN = re.compile(r"\s*(?:<think>)?(?P<thinking>.+?)</think>(?P<answer>.+)", re.DOTALL)


def format_thinking(completions, **kwargs):
    return [float(well_formed(completion_text(completion))) for completion in completions]


def well_formed(text: str) -> bool:
    match = PATTERN.fullmatch(text)
    if match is None or not match["thinking"].strip() or not match["answer"].strip():
        return False
    return not any(tag in match["thinking"] + match["answer"] for tag in ("<think>", "</think>"))

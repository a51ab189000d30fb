r"""Finding the answer in `\boxed{}`, the convention of MATH and of nearly every prompt for maths."""

import re

# `\boxed`, optional space, then what it boxes: a brace that opens a group, or a bare number (`\boxed 9`, as in two
# solutions of MATH). Only numbers may go bare: "the \boxed form" in a sentence is not an answer.
_BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
_TOKEN = re.compile(rf"{_BOX}(?P<open>\{{)|{_BOX}(?P<bare>[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?)|\\.|[{{}}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}` of `text`, or None when there is none.

    Braces inside must balance; `\{` and `\}` are LaTeX's printed braces and do not count. A box that never closes (a
    completion cut off) is passed over for an earlier, complete one; of nested boxes the inner one is the last. An empty
    box gives the empty string, so that a caller can tell it from no box.
    """
    # One pass with a stack, so that a completion of nothing but open boxes costs no more than any other.
    open_braces: list[tuple[int, int] | None] = []  # for a box its start and the start of its content; else None
    last_start, content = -1, None
    for token in _TOKEN.finditer(text):
        if token["open"]:
            open_braces.append((token.start(), token.end()))
        elif token["bare"]:
            last_start, content = token.start(), token["bare"].rstrip(",")
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (box := open_braces.pop()) and box[0] > last_start:
            last_start, content = box[0], text[box[1] : token.start()].strip()
    return content

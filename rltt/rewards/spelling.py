r"""One spelling for LaTeX that means the same: `\dfrac12`, `\tfrac{1}{2}` and `½` all become `\frac{1}{2}`.

Only spelling is touched here, never meaning: what is removed (spacing, sizes, `\left`) is what a reader does not see.
"""

import re

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∙": r"\cdot ", "±": r"\pm ",
        "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "≤": r"\leq ", "≥": r"\geq ",
        "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R} ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "’": "'", "′": "'", "，": ",", "：": ":", "（": "(", "）": ")",
        "\u00a0": " ", "\u202f": " ",
    }
)  # fmt: skip

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm"
_UNIT = r"\\text\{([^{}]*)\}((?:\^-?\d)?)"
_ORDINAL = "(?:st|nd|rd|th)"

# In this order. A pattern sees the text as the ones above left it.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Invisible: delimiter sizes, styles, phantoms, negative space.
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits)(?![A-Za-z])", ""),
        (r"\\h?phantom\s*(?:\{[^{}]*\}|.)", ""),
        (r"\\[hv]space\*?\s*\{[^{}]*\}", " "),
        # Thousands: `11,\!111` and `11{,}111` say clearly that the comma is no separator.
        (r"(?<=\d)\s*(?:,\s*\\!|\{\s*,\s*\}|\\!\s*,)\s*(?:\\!\s*)*(?=\d{3}(?!\d))", ""),
        (r"\\!\s*", ""),
        (r"\\\\\s*\[[^\[\]]*(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (r"(?<!\\)\\[ ,;:]|~|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|\n|\t", " "),
        (r"\\R(?![A-Za-z])|\\math(?:bf|rm)\s*\{\s*R\s*\}|\\Reals(?![A-Za-z])|\\mathbb\s*R(?![A-Za-z])", r"\\mathbb{R}"),
        # Fonts. What they hold counts, so one of them stands for all; a single letter or a number needs none.
        (r"\\(?:math(?:rm|bf|it|sf|tt|normal)|text(?:rm|bf|it|sf|tt|sc|up|normal)|emph|mbox|hbox|operatorname\*?|boldsymbol)"
         r"\s*(?=\{)", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\(?:underline|bm|pmb)\s*(\{[^{}]*\})", r"\1"),
        (r"\\color\s*\{[^{}]*\}|\\textcolor\s*\{[^{}]*\}|\\checkmark(?![A-Za-z])", ""),
        (r"\\(?:math(?:rm|bf|it)|bf|rm|it|bm)(?![A-Za-z])\s*", " "),  # that no brace follows, or needs none
        # What only introduces the answer: `Answer: B`, `\text{The answer is } 10`.
        (r"(?i)^(\s*(?:\\text\{)?)\s*(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*[:=])\s*:?\s*", r"\1"),
        (r"(?i)^\s*\\text\{\s*(?:about|around|approximately|approx\.?)\s*\}", ""),
        (r"(\\text\{[^{}]*\})\s*\^\s*\{?\s*(-?\d)\s*\}?", r"\1^\2"),
        # Units with a fraction or a dot: `\frac{\text{m}}{\text{s}^2}`, `\text{kg}\cdot\text{m}`.
        (rf"(\d\}}?\s*)\\frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}\s*\}}", r"\1\\text{ \2\3/\4\5}"),
        (rf"{_UNIT}\s*(?:\\cdot|\\times)\s*\\text\{{", r"\\text{\1\2 "),
        (r"\\text\{\s*,?\s*(and|or)\s*\}", r" \1 "),
        (r"\\text\{\s*\\?&\s*\}", " and "),
        (r"\\text\{([^{}]*[^{},\s])\s*,?\s+(and|or)\s*\}", r"\\text{\1} \2 "),
        (r"(?<=\d)\s*(?:\\text\{\s*(?::|to)\s*\}|\sto\s)\s*(?=\d)", ":"),
        (rf"\{{\s*\\text\{{\s*({_ORDINAL})\s*\}}\s*\}}", r"{\1}"),
        (rf"(?<=\d)\s*\^\s*(?:\\text)?\{{\s*{_ORDINAL}\s*\}}", ""),
        (rf"(?<=\d){_ORDINAL}(?![A-Za-z])", ""),
        (r"\\text\{\s*(?:percent|percentage|pct)\.?\s*\}|(?<![A-Za-z])(?:percent|pct)(?![A-Za-z])", "%"),
        (r"\\text\{\s*(?:degrees?|\^\\circ)\s*\}|\\textdegree(?![A-Za-z])", r"^\\circ"),
        (r"\\text\{\s*(\\?\$|[€£¥₹]|USD|EUR|Rs\.?)\s*\}", r"\1 "),
        (rf"\\text\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"\\text\{\s*([ei]|[-+]?[\d.,/]+)\s*\}", r"\1"),
        (r"(?<![\d})])(?<![\d})] )\\text\{\s*([A-Za-z])\s*(?:\}|\.\s*\}$)", r"\1"),  # behind a number it is a unit
        (r"\\text\{\s*\}", " "),
        # Signs.
        (r"\\(?:le|leqslant|leqq)(?![A-Za-z])|<=|=<", r"\\leq "),
        (r"\\(?:ge|geqslant|geqq)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\ne(?![A-Za-z])|!=|\\not\s*=", r"\\neq "),
        (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
        (r"\\vee(?![A-Za-z])", r"\\lor "),
        (r"\\wedge(?![A-Za-z])", r"\\land "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:simeq|thickapprox)(?![A-Za-z])|~=", r"\\approx "),
        (r"^\s*(?:=|\\approx(?![A-Za-z]))", ""),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\[lr]vert(?![A-Za-z])|\\vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\%", "%"),
        (r"\\\$|\\textdollar(?![A-Za-z])", "$"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\w})\]])\+\s*(?=\\infty)", ""),
        # Plain text as in a program: `2**3`, `pi/2`, `x^-1`, `2^10`.
        (r"\*\*", "^"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"\^\s*(-\s*\w+|\d{2,})", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        # Fractions and roots.
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"(?<=[\d.])\s*\\(?:bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))", r"\\overline{\1\2}"),
        (r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (r"(?<!\\)\\sqrt\s*\(([^()]*)\)|(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
    ]
]  # fmt: skip
_WITH_ARGUMENTS = re.compile(r"\\((?:frac|binom)(?![A-Za-z])|sqrt(?![A-Za-z])(?:\s*\[[^\[\]]*\])?)\s*")
_ARGUMENT = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]")


def tidy(text: str) -> str:
    """`text` in the one spelling that the rest of the grader knows."""
    text = _without_delimiters(text.strip().strip("*").translate(_UNICODE))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _braced(text)
    text = re.sub(r"\s+", " ", text).strip()
    while text.endswith((".", ",", ";", ":", "\\", " ")):
        text = text[:-1]
    return text


def squeezed(text: str) -> str:
    """For comparing spellings: without needless spaces and braces. `2 2/3` is not `22/3`."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text))


def _without_delimiters(text: str) -> str:
    """Without the dollars or brackets around a formula. A lone dollar is money."""
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left + right) and left not in inside:
            return inside.strip()
    return text


def _braced(text: str) -> str:
    r"""`\frac12`, `\frac1{72}`, `\frac \pi 2` and `\sqrt[3]2` with braces around every argument, also inside others."""
    out, position = "", 0
    for match in _WITH_ARGUMENTS.finditer(text):
        if match.start() < position:
            continue
        out += text[position : match.start()] + match[0].replace(" ", "")
        position = match.end()
        for _ in range(1 if match[1].startswith("sqrt") else 2):
            while text[position : position + 1] == " ":
                position += 1
            argument = _ARGUMENT.match(text, position)
            if argument:
                out += "{" + argument[0] + "}"
                position = argument.end()
            elif text[position : position + 1] == "{":
                end = _group_end(text, position)
                out += "{" + _braced(text[position + 1 : end - 1]) + "}"
                position = end
    return out + text[position:]


def _group_end(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return len(text)

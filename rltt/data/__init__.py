"""Prompts and golds in: from the Hub, local files or the arithmetic generator to the dataset that the trainer reads.

sources.py     where problems come from          files.py       rows of local files
problems.py    from a row to a `Problem`         boxed.py       the answer in a box
arithmetic.py  word problems made here           tokenizer.py   the tokenizer that fits them
split.py       training and evaluation           prompts.py     templates, length filter, columns
check.py       prompts that occur twice
"""

from rltt.data.arithmetic import arithmetic_problems
from rltt.data.boxed import last_boxed
from rltt.data.problems import Problem
from rltt.data.prompts import DropReport, build_dataset, prompt_ids
from rltt.data.sources import read_problems
from rltt.data.split import load_split
from rltt.data.tokenizer import arithmetic_tokenizer

__all__ = [
    "DropReport",
    "Problem",
    "arithmetic_problems",
    "arithmetic_tokenizer",
    "build_dataset",
    "last_boxed",
    "load_split",
    "prompt_ids",
    "read_problems",
]

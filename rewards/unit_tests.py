"""1.0 when the last ```python block passes the row's `tests`, else 0.0. Runs in a sandbox: needs bubblewrap.

    rewards: [rewards/unit_tests.py:unit_tests]

`tests` is a column of your data: a string of asserts, or a list of such strings. Reward is given only for a word that
the program gets at its start and prints after the tests: leaving early, printed output or a new AssertionError earn
nothing. Code and tests share a process: code that searches its frames for the word, or returns objects that equal
anything, can still cheat. Look at rollouts whose rewards are too good.
"""

import re
import secrets
from concurrent.futures import ThreadPoolExecutor

from rltt.rewards.extract import completion_text, visible
from rltt.rewards.sandbox import run

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAM = """import os
def main(word, names={{"__name__": "solution"}}, write=os.write, exec=exec, compile=compile, out=os.dup(1)):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for text in {texts!r}:
        exec(compile(text, "solution", "exec"), names)
    write(out, word)
main(os.read(0, 32))
"""


def unit_tests(completions, tests, **kwargs):
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(passes, [completion_text(completion) for completion in completions], tests))


def passes(text, tests):
    blocks, word = BLOCK.findall(visible(text)), secrets.token_hex(16)
    texts = [blocks[-1] if blocks else "raise SystemExit", tests if isinstance(tests, str) else "\n".join(tests)]
    return float(run(PROGRAM.format(texts=texts), stdin=word).stdout.endswith(word))

"""What became of one graded completion."""

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["right", "wrong", "unparseable", "bad_gold", "timeout", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Outcome:
    """The verdict on one completion.

    - `right`, `wrong`: both answers were understood and compared.
    - `unparseable`: no final answer in the completion, or one that cannot be read.
    - `bad_gold`: the gold answer itself cannot be read: nothing can be said about the completion.
    - `timeout`: the comparison passed its deadline.
    - `error`: the grader itself failed, which says nothing about the completion.

    `detail` says why, for a person.
    """

    status: Status
    detail: str = ""

"""From what a recipe calls a reward to a function that the trainer can call.

`use:` names a reward in one of three ways:

    math                            an entry point of the group `rltt.rewards`, or one of rltt's own
    rewards/my_reward.py:score      a function in a file, relative to the recipe or to the working directory
    my_package.rewards:score        a function in an importable module

The function has TRL's signature: it takes `completions` and the columns of the data set as keywords, and returns one
number or None (does not apply) for each completion. Whatever is wrong with it is found here, before any work is done,
or at a call (`guard.py`).
"""

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rltt.errors import RewardError
from rltt.rewards.calls import TOKENIZER_NAMES, InProcess, Isolated, OnEventLoop, give_tokenizer
from rltt.rewards.guard import Guard, OnError

ENTRY_POINT_GROUP = "rltt.rewards"
# Also known when rltt runs from a checkout that is not installed, and so has no entry points.
BUILT_IN = {"math": "rltt.rewards.math:math_reward"}

SIGNATURE = "def {name}(completions, **kwargs) -> list[float | None]"
# What TRL passes beside the columns of the data set.
FROM_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


class RewardEntry(Protocol):
    """One item of a recipe's `rewards`."""

    @property
    def use(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def solved_at(self) -> float | None: ...
    @property
    def on_error(self) -> OnError: ...
    @property
    def timeout(self) -> float: ...
    @property
    def isolate(self) -> bool: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class NamedReward:
    """A reward function ready for the trainer, under the name that its metrics carry.

    `func` is called as TRL does; what becomes of its failures is the guard's business.
    """

    name: str
    func: Callable[..., Any]
    weight: float
    solved_at: float
    columns: tuple[str, ...] = ()
    """Columns of the data set that the function cannot be called without."""
    args: tuple[str, ...] = ()
    """Keywords that come from the recipe."""
    tokenizer_names: tuple[str, ...] = ()
    """Keywords under which the function takes the policy's tokenizer."""
    guard: Guard | None = None
    """What stands behind `func`; None for a plain function, whose failures are the caller's."""


def load_rewards(entries: Iterable[RewardEntry], base: Path | None = None) -> list[NamedReward]:
    """Resolve each entry and put its function under guard (see `guard.py`).

    Names are unique: a second `score` becomes `score_2`.

    Raises `RewardError` as `resolve_reward` does, and for `args` or an `isolate` that do not fit the function.
    """
    rewards: list[NamedReward] = []
    for entry in entries:
        function = resolve_reward(entry.use, base)
        _check_args(entry, function)
        name = unique_name(_short_name(entry.use), {reward.name for reward in rewards})
        guard = Guard(name, _calls(entry, function, base), entry.on_error, counted=not is_built_in(function))
        names = set(inspect.signature(function).parameters)
        columns = sorted(_required(function) - FROM_TRL - set(entry.args) - set(TOKENIZER_NAMES))
        rewards.append(
            NamedReward(
                name,
                guard.function(),
                entry.weight,
                1.0 if entry.solved_at is None else entry.solved_at,
                columns=tuple(columns),
                args=tuple(entry.args),
                tokenizer_names=tuple(sorted(names & set(TOKENIZER_NAMES))),
                guard=guard,
            )
        )
    return rewards


def use_tokenizer(rewards: Iterable[NamedReward], tokenizer: Any) -> None:
    """Give the policy's tokenizer to the functions that name it in their signature."""
    for reward in rewards:
        if reward.tokenizer_names and reward.guard is not None:
            give_tokenizer(reward.guard.calls, reward.tokenizer_names, tokenizer)


def is_built_in(function: Callable[..., Any]) -> bool:
    """Whether it is one of rltt's own, which grade in workers and count what became of each completion themselves."""
    place = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
    return place in BUILT_IN.values()


def _calls(entry: RewardEntry, function: Callable[..., Any], base: Path | None) -> InProcess | OnEventLoop | Isolated:
    """How the function is to be called."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        if not entry.isolate:
            raise RewardError(f"reward {entry.use!r}: isolate has no effect on an `async def`; remove the key.")
        return OnEventLoop(function, dict(entry.args), entry.timeout)
    if is_built_in(function) or not entry.isolate:
        return InProcess(function, dict(entry.args))
    takes_state = "trainer_state" in inspect.signature(function).parameters
    return Isolated(absolute_use(entry.use, base), dict(entry.args), entry.timeout, takes_state)


def absolute_use(use: str, base: Path | None) -> str:
    """`use` with a file's absolute path, for worker processes, which run in another folder perhaps."""
    place, colon, name = use.strip().partition(":")
    if place.endswith(".py") or "/" in place:
        place = str(_find_file(use, place, base))
    return place + colon + name


def _check_args(entry: RewardEntry, function: Callable[..., Any]) -> None:
    """Every name in `args` must be a parameter that nothing else fills."""
    fills_up = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    given = {*FROM_TRL, *TOKENIZER_NAMES}
    own = [parameter.name for parameter in parameters if parameter.kind not in fills_up and parameter.name not in given]
    for name in entry.args:
        if name in given:
            raise RewardError(f"reward {entry.use!r}: args.{name} is what the trainer passes; remove it.")
        if name not in own:
            takes = f" It takes {', '.join(own)}." if own else " It takes none of its own."
            raise RewardError(
                f"reward {entry.use!r}: args.{name} is not a parameter of the function{_nearest(name, own)}{takes}"
            )


def check_columns(rewards: Iterable[NamedReward], columns: Iterable[str]) -> None:
    """Raises `RewardError` when a reward function needs a column that the data set does not have."""
    columns = sorted(columns)
    for reward in rewards:
        for both in (name for name in reward.args if name in columns):
            raise RewardError(
                f"reward function {reward.name!r}: args.{both} is also a column of the data set; rename one"
            )
        for missing in (column for column in reward.columns if column not in columns):
            raise RewardError(
                f"reward function {reward.name!r} needs the column {missing!r}, and the data set has "
                f"{', '.join(columns)}{_nearest(missing, columns)}"
            )


def resolve_reward(use: str, base: Path | None = None) -> Callable[..., Any]:
    """The function that `use` names. `base` is the folder of the recipe.

    Raises `RewardError` when there is no such function or when TRL could not call it.
    """
    place, colon, name = use.strip().partition(":")
    if place.endswith(".py") or "/" in place:
        module = _load_file(_find_file(use, place, base))
    elif colon:
        module = _import_module(use, place)
    else:
        return _named(place)
    if not name:
        raise RewardError(f"reward {use!r}: say which function, as in {place}:{_example(module)}{_has(module)}")
    function = getattr(module, name, None)
    if function is None:
        nearest = _nearest(name, _functions(module))
        raise RewardError(f"reward {use!r}: {place} has no function {name!r}{nearest}{_has(module)}")
    _check_callable(use, function)
    return function


def unique_name(name: str, taken: set[str]) -> str:
    number = 2
    unique = name
    while unique in taken:
        unique = f"{name}_{number}"
        number += 1
    return unique


def _short_name(use: str) -> str:
    return use.strip().rpartition(":")[2]


def _named(name: str) -> Callable[..., Any]:
    """A built-in reward or an installed entry point."""
    installed = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in BUILT_IN:
        return resolve_reward(BUILT_IN[name])
    if name not in installed:
        known = sorted({*BUILT_IN, *installed})
        raise RewardError(
            f"reward {name!r} is not known{_nearest(name, known)} Known rewards: {', '.join(known)}. "
            "A function of your own is named as path/to/file.py:function or package.module:function."
        )
    try:
        function = installed[name].load()
    except Exception as error:
        raise RewardError(
            f"reward {name!r}: its entry point {installed[name].value} cannot be loaded: {_in_words(error)}"
        ) from error
    _check_callable(name, function)
    return function


def _find_file(use: str, place: str, base: Path | None) -> Path:
    path = Path(place).expanduser()
    tried = [path] if path.is_absolute() else [folder / path for folder in ([base] if base else []) + [Path.cwd()]]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    # The nearest name among the Python files of the folder that was meant, or of the one above it.
    for folder in (folder for candidate in tried for folder in (candidate.parent, candidate.parent.parent)):
        if folder.is_dir():
            near = get_close_matches(path.name, [found.name for found in folder.glob("*.py")], n=1)
            if near:
                raise RewardError(f"reward {use!r}: there is no file {tried[0]}; did you mean {folder / near[0]}?")
    raise RewardError(f"reward {use!r}: there is no file {' nor '.join(str(candidate) for candidate in tried)}.")


def _load_file(path: Path) -> ModuleType:
    """Run a Python file as a module, once: two functions of one file share its globals."""
    module_name = f"rltt_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward file {path} is not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise RewardError(f"reward file {path} cannot be imported: {_in_words(error, path)}") from error
    return module


def _import_module(use: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward {use!r}: module {place} cannot be imported: {_in_words(error)}") from error


def _in_words(error: BaseException, path: Path | None = None) -> str:
    """`ModuleNotFoundError: No module named 'foo' (line 3)`, with the line of `path` where it came up."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None and line is None and path is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" + (f" (line {line})" if line else "")


def _check_callable(use: str, function: Any) -> None:
    name = re.sub(r"\W", "_", _short_name(use))
    wanted = SIGNATURE.format(name=name)
    if not callable(function):
        raise RewardError(f"reward {use!r} is {_a(function)}, not a function. It should be `{wanted}`.")
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise RewardError(f"reward {use!r}: {name} does not show its signature. It should be `{wanted}`.") from error
    parameters = signature.parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    takes_completions = any(p.name == "completions" and p.kind in by_keyword for p in parameters) or takes_any
    problem = None
    if positional:
        problem = f"takes {', '.join(positional)} by position, and it is called with keywords only"
    elif not takes_completions:
        problem = "does not take `completions`"
    elif not takes_any:
        problem = "does not take `**kwargs`, and it is called with every column of the data set as a keyword"
    if problem:
        raise RewardError(f"reward {use!r}: {name}{signature} {problem}. It should be `{wanted}`.")


def _required(function: Callable[..., Any]) -> set[str]:
    """The keywords without which a function cannot be called."""
    fills_up = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in fills_up}


def _functions(module: ModuleType) -> list[str]:
    """The public functions that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _example(module: ModuleType) -> str:
    return next(iter(_functions(module)), "score")


def _has(module: ModuleType) -> str:
    names = _functions(module)
    return f" Functions there: {', '.join(names)}." if names else " It defines no functions."


def _nearest(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def _a(value: Any) -> str:
    if isinstance(value, ModuleType):
        return "a module"
    return f"{type(value).__name__} {str(value)[:40]!r}"

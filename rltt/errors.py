"""Errors that a user can cause and mend.

The command line prints the message of a `UserError` and exits with status 2; any other exception is a bug in rltt and
keeps its traceback. A message says where (file, row or key), what was found, and what would be right.
"""


class UserError(Exception):
    """Bad input: a recipe, a data file, a reward function or a checkpoint."""


class RecipeError(UserError):
    """A recipe key is unknown, has the wrong type, or cannot be combined with another."""


class DataError(UserError):
    """A data source cannot be read, or a row of it is malformed."""


class RewardError(UserError):
    """A reward function cannot be found, imported or called."""


class PolicyError(UserError):
    """A checkpoint cannot be loaded, is not looped, or does not have the depth asked for."""


class ParityError(UserError):
    """The rollout engine and the training path give the same tokens different log-probs."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, is damaged, or belongs to another run."""


class UnwrittenError(UserError):
    """A file of a run cannot be written: the disk is full, or may not be written to."""

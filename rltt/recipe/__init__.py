"""What a run is: the typed recipe, checked before anything heavy is imported.

schema.py        the sections: every key, its type and default, and which values cannot work together
section.py       what all sections share
load.py          YAML files and overrides in
messages.py      what a user reads when something is wrong
yaml_dialect.py  safe YAML in which 1e-6 is a number and a key given twice an error
"""

from rltt.recipe.load import check, load_recipe
from rltt.recipe.schema import (
    ConvertSection,
    DataFilter,
    DataSection,
    DataSource,
    EvaluateSection,
    LoraSection,
    NewPolicy,
    ObjectiveSection,
    PolicySection,
    PretrainSection,
    Recipe,
    RewardEntry,
    RolloutSection,
    TelemetrySection,
    TrainSection,
)

__all__ = [
    "ConvertSection",
    "DataFilter",
    "DataSection",
    "DataSource",
    "EvaluateSection",
    "LoraSection",
    "NewPolicy",
    "ObjectiveSection",
    "PolicySection",
    "PretrainSection",
    "Recipe",
    "RewardEntry",
    "RolloutSection",
    "TelemetrySection",
    "TrainSection",
    "check",
    "load_recipe",
]

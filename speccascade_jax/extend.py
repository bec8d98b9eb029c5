"""The extension API: what a user's rule, stop policy, drafter, verifier, model, method, task or metric needs.

The names of this module are stable. A name that will be removed, or whose arguments or result will change, works as
before for at least one minor version. It warns (`DeprecationWarning`) and names its successor, and `CHANGELOG.md` lists
it under "Deprecated", then under "Breaking". A new argument or field has a default, so older code still works. Modules
below this one may move at any time: `runtime.moved` keeps an old import working for one minor version.

Examples:
    >>> from speccascade_jax import extend
    >>> def favourite(pair, alpha):
    ...     return pair.q.max(-1, keepdims=True) < 1.0 - alpha
    >>> extend.Rule(name="favourite", deferral=favourite).name
    'favourite'
"""

from speccascade_jax.core import rngs
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import (
    Decision,
    Drafter,
    DraftStep,
    LanguageModel,
    LayeredModel,
    Outcome,
    Planner,
    ReadsLayers,
    Request,
    Start,
    StopPolicy,
)
from speccascade_jax.core.sampling import laws_and_token
from speccascade_jax.core.types import BoundModel, Controls, Draft, LawPair, Laws, LMOutput, Prompt, Sampling
from speccascade_jax.data.tasks.file_task import FileTask
from speccascade_jax.data.tasks.seqio_task import SeqioTask
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.data.tasks.task import Example, Task
from speccascade_jax.methods.checking import check_rule
from speccascade_jax.methods.generations import Alone, SequenceMethod
from speccascade_jax.methods.method import Decoder, Method
from speccascade_jax.methods.settings import Arm, Level, Settings
from speccascade_jax.methods.speculation import Speculation
from speccascade_jax.metrics.quality import Metric
from speccascade_jax.models.teacher_forcing import catch_up, layer_states, plain_params
from speccascade_jax.pairs import drafter_files
from speccascade_jax.pairs.prompts import make_prompt
from speccascade_jax.rules.rule import Alpha, Rule
from speccascade_jax.rules.verification import Acceptance, TokenWise, Verdict, Verifier
from speccascade_jax.stopping.policies import Capped

__all__ = [
    "Acceptance", "Alone", "Alpha", "Arm", "BoundModel", "Capped", "Controls", "Decision", "Decoder", "Draft",
    "DraftStep", "Drafter", "Example", "FileTask", "LMOutput", "LanguageModel", "LawPair", "Laws", "LayeredModel",
    "Level", "Method", "Metric", "Outcome", "Planner", "Prompt", "ReadsLayers", "Request", "Rule", "Sampling",
    "SeqioTask", "SequenceMethod", "Settings", "Speculation", "Start", "StopPolicy", "Task", "TokenWise", "Verdict",
    "Verifier", "catch_up", "check_rule", "drafter_files", "get_task", "laws_and_token", "layer_states",
    "make_controls", "make_prompt", "plain_params", "rngs",
]  # fmt: skip

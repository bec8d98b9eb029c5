"""★ Knowledge distillation of a student from a teacher, on the data's, the teacher's or the student's own outputs.

The better a draft's distribution agrees with the target's on the sequences that occur in decoding, the more of its
tokens are accepted. So a draft is trained to match the target at every position, preferably on sequences that the draft
samples itself. Sources: Zhou et al.,
2024 (DistillSpec, https://arxiv.org/abs/2310.08461), sections 3 and 4; Agarwal et al., 2024 (GKD,
https://arxiv.org/abs/2306.13649). A new divergence is one function and one row in `DIVERGENCES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import rngs
from speccascade_jax.core.checks import whole
from speccascade_jax.core.names import shown, unknown
from speccascade_jax.core.types import Array, Params
from speccascade_jax.training.finetune.batches import Batch
from speccascade_jax.training.finetune.outputs import CHOICE, STUDENT, TEACHER, Sampler, step_seed

_LEAST = math.log(np.finfo(np.float32).tiny)
"""Log probability that replaces -inf for a token that a model excludes: the log of the smallest normal float32."""


def log_probabilities(logits: Array, vocab_size: int) -> Array:
    """Returns float32 log probabilities `[..., vocab_size]`, all finite, of logits `[..., V]`.

    Entries from `vocab_size` on are padding and are dropped. Entries of -inf among the others become the constant
    `_LEAST`, so that divergences and their gradients stay finite.
    """
    real = logits[..., :vocab_size].astype(jnp.float32)
    excluded = real == -jnp.inf
    # The logits are replaced before the softmax too, because the gradient of `where` would multiply 0 by NaN.
    logs = jax.nn.log_softmax(jnp.where(excluded, jnp.finfo(jnp.float32).min / 2, real))
    return jnp.where(excluded, _LEAST, logs)


def forward_kl(teacher: Array, student: Array) -> Array:
    """Returns `KL(p ‖ q)` in nats of two log distributions `[..., V]`; `p` is the teacher's."""
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def reverse_kl(teacher: Array, student: Array) -> Array:
    """Returns `KL(q ‖ p)` in nats, which makes the student seek a mode of the teacher."""
    return forward_kl(student, teacher)


def jsd(teacher: Array, student: Array, beta: float) -> Array:
    """Returns the generalised Jensen-Shannon divergence `β KL(p ‖ m) + (1 − β) KL(q ‖ m)` with `m = β p + (1 − β) q`.

    Divided by β it tends to `KL(p ‖ q)` as β tends to 0, and divided by 1 − β to `KL(q ‖ p)` as β tends to 1.
    """
    middle = jnp.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(teacher, middle) + (1.0 - beta) * forward_kl(student, middle)


def tvd(teacher: Array, student: Array) -> Array:
    """Returns the total variation distance `½ Σ abs(p − q)`, which is 1 minus the draft's acceptance rate."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(teacher) - jnp.exp(student)), axis=-1)


class Divergence(NamedTuple):
    """A divergence as a function of two log distributions `[..., V]`, the teacher's first, and whether it has a β."""

    function: Callable[..., Array]
    has_beta: bool = False


DIVERGENCES = {
    "forward_kl": Divergence(forward_kl),
    "reverse_kl": Divergence(reverse_kl),
    "jsd": Divergence(jsd, has_beta=True),
    "tvd": Divergence(tvd),
}
OUTPUTS = ("data", "teacher", "student", "mixed")


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """Settings of distillation: per target token, the loss is `(1 − w)` cross-entropy `+ w` divergence.

    The cross-entropy is computed on the targets of the data, and the divergence on the sequences that `outputs` names.
    If these are other sequences than the data and `w` is below 1, a step computes the student's logits on both.

    Attributes:
        teacher: folder of the teacher's checkpoint; the teacher has the student's vocabulary.
        divergence: a name in `DIVERGENCES`.
        beta: the β of "jsd", in (0, 1).
        weight: the weight w, in (0, 1].
        outputs: the sequences on which the divergence is computed: "data" (the task's targets), "teacher" or "student"
            (sampled at every step), or "mixed".
        student_share: with "mixed", the probability that an example has the student's output.
        others: with "mixed", the outputs of all other examples, "data" or "teacher".
        temperature: temperature of sampled outputs; 0 decodes greedily.
        max_new_tokens: largest number of sampled tokens; 0: as many as the batch's rows hold.

    Raises:
        ValueError: a setting is unknown, out of range, or has no effect.
    """

    teacher: str
    divergence: str = "forward_kl"
    beta: float = 0.5
    weight: float = 1.0
    outputs: str = "data"
    student_share: float = 0.5
    others: str = "data"
    temperature: float = 1.0
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.teacher or not isinstance(self.teacher, str):
            raise ValueError(f"teacher={shown(self.teacher)} is no folder: name the teacher's checkpoint")
        for name, known in (("divergence", DIVERGENCES), ("outputs", OUTPUTS), ("others", OUTPUTS[:2])):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {shown(value)}: {unknown(value, known)}")
        for name in ("beta", "student_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a share: give a number between 0 and 1")
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight} is not in (0, 1]: give 1 for the divergence alone")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} is not a temperature: give 0 (greedy) or more")
        whole("max_new_tokens", self.max_new_tokens, 0)

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names of the models from which a step samples outputs: "student", "teacher", both or none."""
        names = ("student", self.others) if self.outputs == "mixed" else (self.outputs,)
        return tuple(name for name in names if name != "data")

    def divergences(self, teacher_logits: Array, student_logits: Array, vocab_size: int) -> Array:
        """Returns the divergence at every position, float32 `[B, T]`; its gradient ignores the teacher.

        Args:
            teacher_logits: `[B, T, V]` of any float dtype and any number of padding entries.
            student_logits: as `teacher_logits`; its number of padding entries may differ.
            vocab_size: number of real vocabulary entries.
        """
        teacher = jax.lax.stop_gradient(log_probabilities(teacher_logits, vocab_size))
        student = log_probabilities(student_logits, vocab_size)
        function, has_beta = DIVERGENCES[self.divergence]
        return function(teacher, student, self.beta) if has_beta else function(teacher, student)


def check_teacher(teacher: Any, student: Any) -> None:
    """Raises a ValueError if two models have different vocabularies, or only one of them is an encoder-decoder."""
    if teacher.vocab_size != student.vocab_size:
        raise ValueError(
            f"the teacher has {teacher.vocab_size} tokens, but the student has {student.vocab_size}: choose a teacher "
            "with the student's vocabulary"
        )
    kinds = [
        "an encoder-decoder" if getattr(model, "is_encoder_decoder", False) else "a decoder-only model"
        for model in (teacher, student)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the teacher is {kinds[0]}, but the student is {kinds[1]}: choose two models of one kind")


@dataclass(frozen=True)
class OutputSource:
    """Callable that makes the sequences on which a student is distilled, inside a jitted training step; hashable.

    Attributes:
        distillation: the settings.
        student: the student's model.
        teacher: the teacher's model.
        stop_ids: token ids that end an output.
    """

    distillation: Distillation
    student: Any
    teacher: Any
    stop_ids: tuple[int, ...]

    def __call__(
        self, params: Params, teacher_params: Params, batch: Batch, seed: Array | int, step: Array | int
    ) -> Batch:
        """Replaces the batch's outputs as `distillation.outputs` says; shapes stay, so that nothing is compiled again.

        The random bits depend on the seed, the step, the row and the purpose of a draw, so a resumed run draws the same
        outputs as an unbroken one.

        Args:
            params: the student's current parameters.
            teacher_params: the teacher's parameters.
            batch: the data's batch.
            seed: the run's random seed, below 2³².
            step: number of the step.
        """
        settings, seed = self.distillation, step_seed(seed, step)
        models = {"student": (self.student, params, STUDENT), "teacher": (self.teacher, teacher_params, TEACHER)}
        batches = {"data": batch}
        for name in settings.drawn:
            model, model_params, level = models[name]
            sampler = Sampler(model, self.stop_ids, settings.temperature, settings.max_new_tokens, level)
            batches[name] = sampler(model_params, batch, seed)
        if settings.outputs != "mixed":
            return batches[settings.outputs]
        is_student = chosen_rows(batch.tokens.shape[0], seed, settings.student_share)
        student, other = batches["student"], batches[settings.others]
        return batch._replace(
            tokens=jnp.where(is_student[:, None], student.tokens, other.tokens),
            lengths=jnp.where(is_student, student.lengths, other.lengths),
        )


def chosen_rows(rows: int, seed: Array, share: float) -> Array:
    """Chooses each row independently with probability `share`; returns the choice, bool `[rows]`."""
    first = jnp.zeros((rows,), jnp.int32)
    keys = rngs.RoundKeys(rngs.row_keys(rngs.root(seed), jnp.arange(rows), CHOICE), first, first)
    return keys.uniform(first, rngs.CHOOSE) < share

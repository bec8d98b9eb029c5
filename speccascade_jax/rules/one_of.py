"""A verifier that contains several others, so that one compiled program serves several rules; each call uses one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.logit_laws import as_law_pair
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules.verification import TokenWise, Verdict


@dataclass(frozen=True)
class OneOf:
    """Verifiers of one kind that share a compiled program; `Controls.rule` says which one runs (`jax.lax.switch`).

    A rule adds a few operations to a program that has more than a thousand, so it is cheap to compile all rules of a
    sweep into one program, and the models are compiled once. The engine reads the flags of its verifier, such as
    `lossless`, while JAX traces the program. So all verifiers must have the same flags.

    Raises:
        ValueError: the verifiers differ in their kind or in a flag.

    Examples:
        >>> import jax.numpy as jnp
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.rules.acceptance import Speculative
        >>> from speccascade_jax.rules.one_of import OneOf
        >>> rules = OneOf((Speculative(sc.RULES["chow"]), Speculative(sc.RULES["diff"])))
        >>> rules.name, rules.reads_q
        ('chow | diff', True)
    """

    verifiers: tuple[TokenWise, ...]

    def __post_init__(self) -> None:
        if len(set(map(kind, self.verifiers))) != 1:
            raise ValueError(
                f"{self.name} cannot share a program: their flags or acceptances differ; use an engine for each"
            )

    @property
    def name(self) -> str:
        """The names of the verifiers, joined by " | "."""
        return " | ".join(verifier.name for verifier in self.verifiers)

    @property
    def reads_q(self) -> bool:
        """Whether each verifier reads the draft's distribution."""
        return self.verifiers[0].reads_q

    @property
    def lossless(self) -> bool:
        """Whether each verifier is lossless."""
        return self.verifiers[0].lossless

    @property
    def defers(self) -> bool:
        """Whether the rule of each verifier has a deferral function."""
        return self.verifiers[0].defers

    @property
    def reads_logs(self) -> bool:
        """Whether each verifier reads exact logs of the draft's distributions."""
        return self.verifiers[0].reads_logs

    @property
    def joint(self) -> bool:
        """Whether each verifier decides about all tokens of a block jointly."""
        return self.verifiers[0].joint

    def chosen(self, place: Array) -> "Chosen":
        """Returns the verifier at `place`, a traced int32 scalar, for one round."""
        return Chosen(self, place)


def kind(verifier: TokenWise) -> tuple[Any, ...]:
    """Returns the properties in which all verifiers of a program must agree: their class and the flags."""
    flags = verifier.reads_q, verifier.lossless, verifier.defers, verifier.reads_logs, verifier.joint
    return type(verifier), *flags


@dataclass
class Chosen:
    """The verifier with index `place` among those of `all`, for one round; `place` is a traced number.

    `verify` must be called before `deferred`. It computes the deferrals too, because XLA then shares work between them
    and the verdict.
    """

    all: OneOf
    place: Array
    counted: tuple[Array, Array] | None = field(default=None, init=False)

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """Returns the verdict of the chosen verifier."""

        def verdict(verifier: TokenWise) -> Verdict:
            return verifier.verify(pair, draft, keys, alpha, bonus)

        def decided(verifier: TokenWise) -> tuple[Verdict, tuple[Array, Array]]:
            deferred = verifier.deferred(as_law_pair(pair), alpha, draft.tokens)
            return verdict(verifier)._replace(law=alpha), deferred

        short: Verdict
        short, self.counted = self._switch(decided)
        # `law` has a switch of its own, because only traces read it: XLA removes a switch that is not read, but cannot
        # remove one of several outputs. The conversion is needed because all branches must return the same dtype, and
        # a user's law may return int or float16.
        return short._replace(law=self._switch(lambda verifier: verdict(verifier).law.astype(jnp.float32)))

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns the deferrals of the block that `verify` has decided."""
        assert self.counted is not None, "call verify before deferred"
        return self.counted

    def _switch(self, branch: Callable[[TokenWise], Any]) -> Any:
        return jax.lax.switch(self.place, [partial(branch, verifier) for verifier in self.all.verifiers])

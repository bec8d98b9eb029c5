"""Several verifiers in one compiled program, of which every call runs one."""

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

    A round under a rule takes a few operations, and a program has more than a thousand, so a sweep over rules compiles
    its models once. The engine reads flags of its verifier when it is traced. So the verifiers must agree in them.

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
            raise ValueError(f"{self.name} cannot share a program: their flags or acceptances differ")

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
        """Whether each verifier has deferrals to count."""
        return self.verifiers[0].defers

    @property
    def reads_logs(self) -> bool:
        """Whether each verifier reads exact logs of the draft's distributions."""
        return self.verifiers[0].reads_logs

    @property
    def joint(self) -> bool:
        """Whether each verifier examines a block as a whole."""
        return self.verifiers[0].joint

    def chosen(self, place: Array) -> "Chosen":
        """Returns the verifier at `place`, a traced int32 scalar, for one round."""
        return Chosen(self, place)


def kind(verifier: TokenWise) -> tuple[Any, ...]:
    """Returns what verifiers of one program must agree in: their acceptance and the flags that an engine reads."""
    flags = verifier.reads_q, verifier.lossless, verifier.defers, verifier.reads_logs, verifier.joint
    return type(verifier), *flags


@dataclass
class Chosen:
    """The verifier that a traced number selects, with what an engine calls in one round.

    Deferrals are computed in the branch of `verify`, where XLA shares work between the two.
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
        # Only traces read the distributions. XLA removes a whole switch that nothing reads, but no output of one.
        # A user's law may be int or float16, and all branches need one dtype.
        return short._replace(law=self._switch(lambda verifier: verdict(verifier).law.astype(jnp.float32)))

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Returns the deferrals of the block that `verify` has decided."""
        assert self.counted is not None, "verify comes first"
        return self.counted

    def _switch(self, branch: Callable[[TokenWise], Any]) -> Any:
        return jax.lax.switch(self.place, [partial(branch, verifier) for verifier in self.all.verifiers])

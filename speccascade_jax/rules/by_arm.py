"""Drafters with rules of their own beside each other: every row's block is decided by its own drafter's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.sampling import expand
from speccascade_jax.core.types import Array, Draft, LawPair
from speccascade_jax.rules.verification import Verdict, Verifier


@dataclass(frozen=True)
class ByArm:
    """`verifiers[k]` decides blocks of arm `k` (`Draft.arm`); those that are alike are asked once.

    Which rule a row is under hangs on its drafter, which a law at a position does not know: `law` refuses, and
    deferrals are not counted.
    """

    verifiers: tuple[Verifier, ...]

    @property
    def name(self) -> str:
        return " | ".join(dict.fromkeys(verifier.name for verifier in self.verifiers))

    @property
    def reads_q(self) -> bool:
        return any(verifier.reads_q for verifier in self.verifiers)

    @property
    def lossless(self) -> bool:
        return all(verifier.lossless for verifier in self.verifiers)

    @property
    def defers(self) -> bool:
        return False

    @property
    def reads_logs(self) -> bool:
        return any(verifier.reads_logs for verifier in self.verifiers)

    @property
    def joint(self) -> bool:
        return any(verifier.joint for verifier in self.verifiers)

    def verify(self, pair: LawPair, draft: Draft, keys: rngs.RoundKeys, alpha: Array, bonus: str) -> Verdict:
        """As of `Verifier`; a row has the verdict of its own arm's."""
        assert draft.arm is not None, "blocks must say which arm wrote them: SelectedDrafter(tells_arm=True)"
        first, *others = dict.fromkeys(self.verifiers)
        merged = first.verify(pair, draft, keys, alpha, bonus)
        for verifier in others:
            verdict = verifier.verify(pair, draft, keys, alpha, bonus)
            rows = jnp.isin(draft.arm, jnp.asarray([n for n, v in enumerate(self.verifiers) if v == verifier]))
            merged = _merged(rows, verdict, merged)
        return merged

    def law(self, pair: LawPair, alpha: Array) -> Array:
        """Refuses.

        Raises:
            ValueError: always: engines inside a drafter need one rule.
        """
        raise ValueError(f"the law of {self.name!r} hangs on who drafted: give a level below the target one rule")

    def deferred(self, pair: LawPair, alpha: Array, tokens: Array) -> tuple[Array, Array]:
        """Zeros: see the class."""
        rows, block = tokens.shape
        return jnp.zeros((rows, block + 1)), jnp.zeros((rows, block))


def _merged(rows: Array, new: Verdict, old: Verdict) -> Verdict:
    """The new verdict in these rows, bool `[B]`, the old one elsewhere."""
    merged: Verdict = jax.tree.map(lambda x, y: jnp.where(expand(rows, x.ndim), x, y), new, old)
    return merged

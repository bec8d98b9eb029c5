"""One model writes alone: the two ends of every plot."""

from dataclasses import dataclass, replace

from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.types import Controls
from speccascade_jax.drafters.none import NoDrafter
from speccascade_jax.engine.engine import Engine
from speccascade_jax.methods.method import Decoder, Method
from speccascade_jax.methods.settings import Settings, meant
from speccascade_jax.pairs.head_files import Head
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.rules.acceptance import Speculative
from speccascade_jax.rules.deferral import RULES


def engine_of(model: LanguageModel, stop_ids: tuple[int, ...]) -> Engine:
    """An engine in which a model writes alone, in the target's place; parameters are `{"target", "drafter": {}}`."""
    lossless = Speculative(RULES["spec_decode"])
    return Engine(target=model, drafter=NoDrafter(), verifier=lossless, stop_ids=stop_ids, bonus="target")


@dataclass(frozen=True, kw_only=True)
class Alone(Method):
    """One model writes alone, through the same loop; rule, block size and bonus mean nothing.

    Attributes:
        model: which of the pair's.
    """

    model: str

    @property
    def draft_alone(self) -> bool:
        return self.model != "target"

    def resolved(self, settings: Settings) -> Settings:
        """Without rule, block size and bonus, which a sweep may name for all; what else is drafted by is refused."""
        parts = ("accept", "verify", "stop", "stop_threshold", "tree", "drafters")
        for name, given in meant(settings, *parts, "choose", "policy", "lossy_arms", "tail"):
            raise ValueError(f"method {self.name!r} has no {name}, got {given!r}: one model writes; leave it out")
        return replace(settings, rule=None, block_size=None, bonus=None)

    def controls(self, settings: Settings, rows: int) -> Controls:
        """The sampling of the model's last word: the draft's own where it writes alone, else the target's."""
        heat = settings.draft_temperature
        own = heat if self.draft_alone and heat is not None else settings.temperature
        return make_controls(rows, temperature=own, draft_temperature=heat, top_p=settings.top_p, top_k=settings.top_k)

    def build(
        self, pair: Pair, settings: Settings, stop_ids: tuple[int, ...] = (), head: Head | None = None
    ) -> Decoder:
        self.resolved(settings)
        bound = pair.model(self.model)
        params = {"target": bound.params, "drafter": {}}
        return Decoder(self, settings, pair, engine_of(bound.model, stop_ids), params)

"""The engine and its round: draft → score → accept/replace → commit/rollback. `engine.loop` loops over rounds.

What tells the methods apart is which drafter, stop policy and acceptance are plugged in, never the loop.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core import rngs
from speccascade_jax.core.arrays import is_stop, write_slots
from speccascade_jax.core.protocols import (
    Drafter,
    LanguageModel,
    Outcome,
    Planner,
    Request,
    Start,
    Target,
    layers_read_by,
)
from speccascade_jax.core.sampling import make_law_pair
from speccascade_jax.core.trees import Tree
from speccascade_jax.core.types import Array, Cache, Controls, Draft, LawPair, Laws, Params, Prompt, PyTree, Round
from speccascade_jax.engine import scoring
from speccascade_jax.engine.counters import Counters, Tally, count_round
from speccascade_jax.engine.scoring import Judged, Scored, cut, prompt_features
from speccascade_jax.rules.verification import Verifier

BONUSES = ("rule", "target", "none")


def check_bonus(bonus: str) -> None:
    """Refuse a bonus that there is not, with a ValueError that names the choices."""
    if bonus not in BONUSES:
        raise ValueError(f"unknown bonus {bonus!r}: choose one of {', '.join(BONUSES)}")


@flax.struct.dataclass
class DecodeState:
    """Everything that moves; a pytree.

    Attributes:
        tokens: int32 `[B, L]`, prompt and committed tokens; slots at or beyond `length` are junk.
        length: int32 `[B]`; start: its value before the first round; limit: the most it may become.
        done: bool `[B]`.
        rounds: int32 `[B]`, the row's own counter, part of its keys.
        keys: one key per row.
        target_cache, drafter: the caches. Invariant: the target's has consumed exactly `length − 1` tokens; the last
            committed one is pending and is fed with the next block.
        laws: the buffers of the block's laws, which the drafter writes; a planner's engines have their own.
        tally: statistics per row, read as `counters`.
        failed_at: int32 `[B, 2]`, position of the first non-finite logits of (target, draft), or -1.
    """

    tokens: Array
    length: Array
    start: Array
    limit: Array
    done: Array
    rounds: Array  # per row: a row's bits must not depend on how often its neighbours took part
    keys: Array
    target_cache: Cache
    drafter: PyTree
    laws: Laws
    tally: Tally
    failed_at: Array

    @property
    def counters(self) -> Counters:
        return self.tally.counters


class Drafted(NamedTuple):
    """A block that the target has not seen.

    `unverified` bool `[B]`: the row's block is to be committed as it is (`Engine.verify_final`).
    """

    draft: Draft
    drafter: PyTree
    target_cache: Cache
    keys: rngs.RoundKeys
    unverified: Array


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a generation is made of: static and hashable; parameters are passed beside it.

    Parameters are `{"target": …, "drafter": …}`.

    Attributes:
        target: the model whose calls are to be saved.
        drafter: writes the blocks; or settles which of several does, phase after phase (`engine.loop`).
        verifier: decides what is kept, and draws one token after it.
        stop_ids: token ids that end a row; they are committed.
        bonus: what follows a fully kept block: "rule" (from `π`, the default), "target" (from `p̃`) or
            "none". A block of length 0 gives one token from `π` under "none" too.
        verify_final: whether a block that ends its row, in a drafted stop id or at the length limit, is scored like any
            other. If not, it is committed as it is: published token cascades and Big-Little do so (METHODS section 4).
    """

    target: LanguageModel
    drafter: Drafter | Planner
    verifier: Verifier
    stop_ids: tuple[int, ...] = ()
    bonus: str = "rule"
    verify_final: bool = True

    def __post_init__(self) -> None:
        check_bonus(self.bonus)
        # without drafts `q` is a buffer of one entry: a rule would read zeros and never notice
        if self.block == 0 and self.verifier.reads_q:
            raise ValueError(f"rule {self.verifier.name!r} reads the draft's law, but nothing drafts: use spec_decode")
        if self.tree != getattr(self.verifier, "tree", None):
            raise ValueError("drafts that branch go with a verifier of the same tree (rules.branching.BranchWise)")
        # a tree's tokens are no sequence before a verdict: there is nothing to commit unseen
        if self.tree is not None and not self.verify_final:
            raise ValueError("drafts that branch are always verified: set verify_final=True")
        scoring.check_layers(self.target, self.layers)
        # whatever a caller gives, arrays too: a static argument is hashed
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Cached because jit hashes static arguments on every call, and an engine has about sixty parts."""
        return self._hash

    @property
    def block(self) -> int:
        """`G`, the longest block of a round."""
        return self.drafter.block

    @cached_property
    def planner(self) -> Planner | None:
        """What stands in the drafter's place and settles who drafts; known once, since every call asks."""
        return self.drafter if isinstance(self.drafter, Planner) else None

    @property
    def round_drafter(self) -> Drafter:
        """What drafts in this engine's rounds; a planner's rounds are those of other engines."""
        assert not isinstance(self.drafter, Planner), "a planner drafts in phases: see engine.loop"
        return self.drafter

    @property
    def tree(self) -> Tree | None:
        """What its drafts branch into; `None`: they are chains."""
        return getattr(self.drafter, "tree", None)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states the drafter reads; where there are none, no call computes any."""
        return layers_read_by(self.drafter)

    @property
    def complete(self) -> bool:
        """Whether the drafter must give its law at the bonus position.

        It then takes one more pass per round, and its cache is complete; otherwise the token that its cache lacks is
        caught up at the start of the next round (`models.teacher_forcing.catch_up`).
        """
        return self.bonus == "rule" and self.verifier.reads_q

    def init(
        self,
        params: Params,
        prompt: Prompt,
        rng: Array,
        example_ids: Array,
        max_new_tokens: int,
        level: int = 0,
        taken_back: int = 0,
    ) -> DecodeState:
        """The state before the first round; prefills both models.

        Args:
            params: `{"target", "drafter"}`; prompt: `[B, P]`; rng: a key.
            example_ids: int32 `[B]`; a row's random bits depend on its id only.
            max_new_tokens: static; the buffers' room.
            level: this engine's depth when it drafts for another one; taken_back: how far that one may roll this one's
                caches back, beyond this engine's own blocks.
        """
        # `G` of what may be settled: a planner without a model's parameters needs no room for that model's blocks
        (rows, width), block = prompt.tokens.shape, self._longest(params)
        room = max_new_tokens + block + 1  # a block is scored, and written, before it is cut to what fits
        back = taken_back + block + 1  # a cache that forgets must keep what a rejection may bring back
        whole = None if self.tree is not None else back  # a tree's slots are no positions
        cache, hidden = scoring.prefilled(self.target, params["target"], prompt, width + room, whole, self.layers)
        features = prompt_features(self.target, cache) if self.drafter.reads_features else None
        target = Target(params["target"], cache)
        return DecodeState(
            # rows end at different places: each writes behind its own prompt, whose padding it overwrites
            tokens=jnp.pad(prompt.tokens, [(0, 0), (0, room)]),
            length=prompt.length,
            start=prompt.length,
            limit=prompt.length + max_new_tokens,
            done=jnp.zeros((rows,), bool),
            rounds=jnp.zeros((rows,), jnp.int32),
            # by id, not by place in the batch: a row alone draws what it draws among others
            keys=rngs.row_keys(rng, example_ids, level),
            target_cache=cache,
            drafter=self.drafter.init(
                params["drafter"],
                Start(prompt, rng, example_ids, features, width + room, back, level, hidden=hidden, target=target),
            ),
            laws=self.blank_laws(rows),
            tally=Tally.zeros(rows, self.block),
            failed_at=jnp.full((rows, 2), -1, jnp.int32),
        )

    def _longest(self, params: Params) -> int:
        """The longest block with these parameters: a planner without some of them may settle less."""
        if self.planner is None:
            return self.block
        return max(self.planner.drafters[place].block for place in self.planner.places(params["drafter"]))

    def blank_laws(self, rows: int) -> Laws:
        """Buffers for the laws of this engine's blocks."""
        # a planner's phases carry buffers of their own widths; the state then holds a stub
        drafts = self.block > 0 and self.planner is None
        shape = (rows, self.block + 1, self.target.vocab_size) if drafts else (rows, 1, 1)
        blank = Laws(q=jnp.zeros(shape, jnp.float32), q_tilde=jnp.zeros(shape, jnp.float32))
        # logs double what a round carries, so only rules that read them pay for them
        return replace(blank, logs=blank) if self.verifier.reads_logs else blank

    def draft(self, params: Params, state: DecodeState, controls: Controls, room: Array, complete: bool) -> Drafted:
        """A block of at most `room` `[B]` tokens."""
        keys = self.round_keys(state)
        request = Request(
            tokens=state.tokens,
            length=state.length,
            room=room,
            active=~state.done,
            keys=keys,
            controls=controls,
            target=Target(params["target"], state.target_cache),
            block=state.laws,
            complete=complete,
            stop_ids=self.stop_ids,
        )
        with jax.named_scope("draft"):
            draft, drafter, cache = self.round_drafter.propose(params["drafter"], state.drafter, request)
            # drafters without logits have laws alone; what float32 cannot hold they never knew
            if self.verifier.reads_logs and draft.logs is None:
                draft = replace(draft, logs=Laws(jnp.log(draft.q), jnp.log(draft.q_tilde)))
        return Drafted(draft, drafter, cache, keys, self._unverified(state, draft))

    def score(
        self, params: Params, state: DecodeState, drafted: Drafted, controls: Controls, width: int, cache: Cache
    ) -> tuple[LawPair, Array, Array | None, Array | None, Cache]:
        """Calls the target on a block's first `width` positions.

        Returns:
            The laws `[B, width, V]`; where logits are unusable, bool `[B, width]`; the target's final states
            `[B, width, D]` and those after `layers`, `[B, width, L, D]`, each if the drafter reads it; its cache.
        """
        draft = cut(drafted.draft, width)
        # the last committed token is not in the cache yet: with it `G` drafts give `G + 1` laws, the bonus's included
        pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        with jax.named_scope("score"):
            tokens = jnp.concatenate([pending, draft.tokens], axis=1)
            out, cache = scoring.extended(self.target, self.tree, params["target"], cache, tokens, self.layers)
            logits = out.logits[..., : self.target.vocab_size]  # padding entries must get no probability
        with jax.named_scope("sampling"):
            pair = make_law_pair(draft.q, draft.q_tilde, draft.greedy, logits, controls.target, draft.logs)
        features = out.hidden if self.drafter.reads_features else None
        # a maximum is NaN or +inf if any logit is; -inf alone is a token that is masked
        bad = ~jnp.isfinite(logits.max(-1)) & ~drafted.unverified[:, None]
        return pair, bad, features, out.layer_states, cache

    def _unverified(self, state: DecodeState, draft: Draft) -> Array:
        """bool `[B]`: rows whose block ends them and is therefore not verified."""
        if self.verify_final:
            return jnp.zeros_like(state.done)
        last = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.length - 1, 0)[:, None], axis=1)[:, 0]
        ends = is_stop(last, self.stop_ids) | (draft.length >= state.limit - state.length)
        return ends & (draft.length > 0) & ~state.done

    def round_keys(self, state: DecodeState) -> rngs.RoundKeys:
        """This round's bits."""
        return rngs.RoundKeys(state.keys, state.rounds, state.length)

    def step(self, params: Params, state: DecodeState, controls: Controls) -> tuple[DecodeState, Round]:
        """One round of speculation (METHODS section 2; paper 1, Algorithm 4). Jittable alone."""
        drafted = self.draft(params, state, controls, state.limit - state.length, self.complete)
        # the buffers as the drafter left them, before a tree is straightened: they go on to the next round in place
        judged, laws = self._judged(params, state, drafted, controls), drafted.draft.laws
        if self.tree is not None:
            drafted = drafted._replace(draft=scoring.straight_draft(drafted.draft, judged.verdict, self.tree))
        with jax.named_scope("commit"):
            turn = self._cut(state, drafted, judged)
            # failures first: they are looked for at tokens about to be committed, and then these are not
            failed_at = self._failures(state, drafted, judged, turn.num_new)
            turn = scoring.without_failed(turn, (failed_at >= 0).any(-1))
            return replace(self._commit(params, state, drafted, judged, turn, failed_at), laws=laws), turn

    def _judged(self, params: Params, state: DecodeState, drafted: Drafted, controls: Controls) -> Judged:
        """Score and decide the block, as wide as it is; no call of the target where all active rows go unverified."""

        def judge(width: int, cache: Cache) -> Judged:
            # one width is no loop: there is nothing that XLA could move out of it
            own = self._tied(state, drafted, cache) if len(choices) > 1 else drafted
            draft = cut(own.draft, width)
            pair, bad, features, hidden, cache = self.score(params, state, own, controls, width, cache)
            with jax.named_scope("verify"):
                verdict = self.verifier.verify(pair, draft, own.keys, controls.alpha, self.bonus)
            scored = Scored(pair, draft, bad, features, hidden, cache)
            if self.tree is not None:  # from here on a tree is the path that was kept, as a block
                scored, verdict = scoring.straightened(self.target, self.tree, state.length - 1, scored, verdict)
            pair, draft, bad, features, hidden, cache = scored
            with jax.named_scope("commit"):
                eta, deferred = self.verifier.deferred(pair, controls.alpha, draft.tokens)
            return Judged(cache, pair, verdict, bad, eta, deferred, features, hidden)

        choices = self._widths()  # read by `judge` too, which is called below
        needed = None if self.verify_final else jnp.any(~drafted.unverified & ~state.done)
        judged = scoring.by_width(choices, drafted.draft.length.max(), judge, drafted.target_cache, needed)
        return judged._replace(verdict=scoring.kept_whole(judged.verdict, drafted.draft, drafted.unverified))

    def _widths(self) -> tuple[int, ...]:
        """Numbers of positions that a block is scored at: those that the drafter's blocks have, if it says so."""
        own: tuple[int, ...] = getattr(self.drafter, "scored_widths", ())
        return own or scoring.widths(self.block) if self.drafter.adaptive else (self.block + 1,)

    def _tied(self, state: DecodeState, drafted: Drafted, cache: Cache) -> Drafted:
        """The block as something that hangs on the cache; not its laws, which would be copied.

        XLA moves what no turn of a loop changes out of it. Of the loops over widths all but one have no turn: the
        others' bits and gathers would be computed all the same.
        """
        # rounds, because all of the round's bits are made from them
        held = drafted.draft.tokens, state.rounds, self.target.consumed(cache)
        tokens, rounds, _ = jax.lax.optimization_barrier(held)
        keys = self.round_keys(replace(state, rounds=rounds))
        return drafted._replace(draft=replace(drafted.draft, tokens=tokens), keys=keys)

    def _cut(self, state: DecodeState, drafted: Drafted, judged: Judged) -> Round:
        """Which of the kept tokens and the final one are committed: up to a stop id and the row's limit."""
        draft, verdict = drafted.draft, judged.verdict
        kept = verdict.num_kept
        slots = jnp.arange(self.block + 1, dtype=jnp.int32)[None]
        padded = jnp.pad(draft.tokens, [(0, 0), (0, 1)])  # `G + 1` places: a whole block and its bonus
        # the replacement or bonus stands behind the kept ones; entries behind it are rejected drafts, cut below
        tokens = jnp.where(slots == kept[:, None], verdict.final[:, None], padded)
        # a block of length 0 must give a token under any bonus, or the row would stand still
        has_final = verdict.rejected | (self.bonus != "none") | (draft.length == 0)
        num_new = jnp.minimum(kept + (has_final & ~drafted.unverified), state.limit - state.length)
        # the limit before stop ids: one that the limit cuts away ends nothing
        stops = is_stop(tokens, self.stop_ids) & (slots < num_new[:, None])
        num_new = jnp.minimum(num_new, jnp.where(stops, slots, self.block + 1).min(-1) + 1)
        num_new = jnp.where(state.done, 0, num_new)  # rows that are done are computed like the others
        final = jnp.where(verdict.rejected, 1, jnp.where(draft.length > 0, 2, 3))  # places in `core.names.SOURCES`
        # what the cut took away was neither kept nor rejected: counters are of what a row's output shows
        num_kept, rejected = jnp.minimum(kept, num_new), verdict.rejected & (kept < num_new)
        return Round(
            start=state.length,
            active=~state.done,
            draft=draft,
            num_kept=num_kept,
            rejected=rejected,
            examined=jnp.where(rejected, draft.length, num_kept) if self.verifier.joint else num_kept + rejected,
            tokens=tokens,
            num_new=num_new,
            source=jnp.where(slots < kept[:, None], 0, final[:, None]),
            pair=judged.pair,
            law=verdict.law,
            unverified=drafted.unverified,
            eta=judged.eta,
            deferred=judged.deferred,
        )

    def _failures(self, state: DecodeState, drafted: Drafted, judged: Judged, num_new: Array) -> Array:
        """Where logits behind a committed token were not finite: int32 `[B, 2]`, first position or -1.

        A NaN law keeps no draft, so that one that matters always stands at a position about to be committed.
        """
        slots = jnp.arange(self.block + 1)[None]

        def first(bad: Array) -> Array:
            at = jnp.where(bad & (slots < num_new[:, None]), slots, self.block + 1).min(-1)
            return jnp.where(at <= self.block, state.length + at, -1)

        new = jnp.stack([first(judged.bad), first(drafted.draft.bad)], axis=-1)
        return jnp.where(state.failed_at >= 0, state.failed_at, new)  # the first failure is the cause of later ones

    def _commit(
        self, params: Params, state: DecodeState, drafted: Drafted, judged: Judged, turn: Round, failed_at: Array
    ) -> DecodeState:
        """Append, roll both caches back to `length − 1`, count."""
        length = state.length + turn.num_new
        committed = jnp.arange(self.block + 1)[None] < turn.num_new[:, None]
        stopped = (is_stop(turn.tokens, self.stop_ids) & committed).any(-1)
        draft = drafted.draft
        outcome = Outcome(
            draft=draft,
            num_kept=turn.num_kept,
            num_new=turn.num_new,
            length=length,
            rejected=turn.rejected,
            active=turn.active,
            features=judged.features,
            path=judged.verdict.path,
            hidden=judged.hidden,
        )
        return replace(
            state,
            # all `G + 1` are written: what lies at or beyond `length` is junk that the next round overwrites
            tokens=write_slots(state.tokens, turn.tokens, state.length, axis=1),
            length=length,
            done=state.done | stopped | (length >= state.limit) | (failed_at >= 0).any(-1),
            rounds=state.rounds + turn.active,
            # the last committed token stays pending: a replacement or bonus was never fed to any cache
            target_cache=self.target.rollback(judged.target_cache, length - 1),
            drafter=self.round_drafter.commit(params["drafter"], drafted.drafter, outcome),
            tally=count_round(state.tally, turn, self.verifier.defers, self.bonus),
            failed_at=failed_at,
        )

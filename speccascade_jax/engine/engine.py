"""The engine, which runs one round: draft → score → accept or replace → commit or roll back.

`engine.loop` loops over rounds. Methods differ in the drafter, stop policy and verifier that the engine contains; the
loop is the same for all.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp

from speccascade_jax.core import logit_laws, rngs
from speccascade_jax.core.arrays import is_stop, write_few_slots, write_slots
from speccascade_jax.core.logit_laws import LogitPair, as_law_pair
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
from speccascade_jax.core.types import (
    Array,
    Cache,
    Controls,
    Draft,
    LawPair,
    Laws,
    LogitLaws,
    Params,
    Prompt,
    PyTree,
    Round,
)
from speccascade_jax.engine import scoring
from speccascade_jax.engine.counters import Counters, Tally, count_round
from speccascade_jax.engine.proposals import proposed
from speccascade_jax.engine.scoring import Judged, Scored, cut, prompt_features
from speccascade_jax.rules.acceptance import VERIFIERS
from speccascade_jax.rules.one_of import Chosen, OneOf
from speccascade_jax.rules.verification import Verifier
from speccascade_jax.runtime import platforms

BONUSES = ("rule", "target", "none")


def check_bonus(bonus: str) -> None:
    """Raises a ValueError for an unknown value of the setting `bonus`; the message names the choices."""
    if bonus not in BONUSES:
        raise ValueError(f"unknown bonus {bonus!r}: choose one of {', '.join(BONUSES)}")


@flax.struct.dataclass
class DecodeState:
    """The state of a generation: everything that changes from round to round, as a pytree.

    Attributes:
        tokens: int32 `[B, L]`, prompt and committed tokens; entries at or beyond `length` are meaningless.
        length: int32 `[B]`, the number of tokens of each row.
        start: int32 `[B]`, `length` before the first round.
        limit: int32 `[B]`, the largest value that `length` may reach.
        done: bool `[B]`, whether the row has ended.
        rounds: int32 `[B]`, how many rounds the row took part in; the row's random bits depend on it.
        keys: one random key per row.
        target_cache: the target's cache. Invariant: it has consumed exactly `length − 1` tokens; the last committed
            token is pending and is fed with the next block.
        drafter: the drafter's state.
        laws: buffers for the block's draft distributions, which the drafter writes. With a planner they are
            placeholders, because each phase (a run of rounds with one drafter) makes its own buffers.
        tally: statistics per row in packed form; `counters` unpacks them.
        failed_at: int32 `[B, 2]`, position of the first non-finite logits of (target, draft), or -1.
    """

    tokens: Array
    length: Array
    start: Array
    limit: Array
    done: Array
    rounds: Array  # counted per row, because a row's random bits must not depend on the rounds of other rows
    keys: Array
    target_cache: Cache
    drafter: PyTree
    laws: Laws | LogitLaws
    tally: Tally
    failed_at: Array

    @property
    def counters(self) -> Counters:
        """The statistics of each row, unpacked from `tally`."""
        return self.tally.counters


class Drafted(NamedTuple):
    """A drafted block before the target scores it, and the state after drafting.

    Attributes:
        draft: the block.
        drafter: the drafter's new state.
        target_cache: the target's cache, which a drafter may have changed.
        keys: the round's random bits.
        unverified: bool `[B]`, whether the row's block is committed without verification (`Engine.verify_final`).
    """

    draft: Draft
    drafter: PyTree
    target_cache: Cache
    keys: rngs.RoundKeys
    unverified: Array


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The static, hashable components of a generation: target, drafter, verifier and their options.

    Model parameters are passed separately, as `{"target": …, "drafter": …}`.

    Attributes:
        target: the large model, whose calls speculative decoding saves.
        drafter: a drafter, which writes the blocks, or a planner, which chooses one of several drafters for each run of
            rounds (`engine.loop`).
        verifier: decides which draft tokens are kept, and draws one token after them.
        stop_ids: token ids that end a row; they are committed.
        bonus: the token after a fully kept block: "rule" (from `π`, the default), "target" (from `p̃`) or "none". A
            block of length 0 gives one token from `π` under "none" too.
        verify_final: whether the target also scores a block that ends its row, by a drafted stop id or at the length
            limit. If not, such a block is committed as drafted, as published token cascades and Big-Little do
            (docs/methods.md, section 4).
    """

    target: LanguageModel
    drafter: Drafter | Planner
    verifier: Verifier
    stop_ids: tuple[int, ...] = ()
    bonus: str = "rule"
    verify_final: bool = True

    def __post_init__(self) -> None:
        check_bonus(self.bonus)
        # if nothing is drafted, `q` is a placeholder of one entry, and a rule that reads it would silently get zeros
        if self.block == 0 and self.verifier.reads_q:
            raise ValueError(
                f"rule {self.verifier.name!r} reads the draft's distribution, but there is no drafter: use spec_decode"
            )
        if self.tree != getattr(self.verifier, "tree", None):
            raise ValueError(
                "a drafter of trees needs a verifier of the same tree, and other drafters need one without a tree: "
                "for trees, use rules.branching.BranchWise"
            )
        # before verification a tree's tokens do not form one sequence, so there is no block to commit unverified
        if self.tree is not None and not self.verify_final:
            raise ValueError("tree drafts are always verified: set verify_final=True")
        scoring.check_layers(self.target, self.layers)
        # lists and arrays become a tuple of ints, because a static argument must be hashable
        object.__setattr__(self, "stop_ids", tuple(int(i) for i in self.stop_ids))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        """Returns the cached hash: jit hashes static arguments on every call, and an engine has about sixty fields."""
        return self._hash

    @property
    def block(self) -> int:
        """`G`, the longest block of a round."""
        return self.drafter.block

    @cached_property
    def planner(self) -> Planner | None:
        """The drafter if it is a `Planner`, otherwise `None`; cached because every call reads it."""
        return self.drafter if isinstance(self.drafter, Planner) else None

    @property
    def round_drafter(self) -> Drafter:
        """The drafter, which must not be a planner: with a planner, each phase runs an engine with its own drafter."""
        assert not isinstance(self.drafter, Planner), "an engine with a planner has no drafter: run it by engine.loop"
        return self.drafter

    @property
    def tree(self) -> Tree | None:
        """The shape of the token tree that the drafter drafts, or `None` if it drafts plain blocks."""
        return getattr(self.drafter, "tree", None)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose hidden states the drafter reads; empty if it reads none."""
        return layers_read_by(self.drafter)

    @property
    def complete(self) -> bool:
        """Whether the drafter must give its distribution at the bonus position.

        If so, the draft model makes one more pass per round, in which it also reads the block's last token. Otherwise
        it reads that token at the start of the next round (`models.teacher_forcing.catch_up`).
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
        """Prefills the target and the drafter, and returns the state before the first round.

        Args:
            params: the parameters, `{"target": …, "drafter": …}`.
            prompt: the prompts, `[B, P]`.
            rng: the generation's random key.
            example_ids: int32 `[B]`; a row's random bits depend on its id only.
            max_new_tokens: the number of new tokens for which the buffers have room (static).
            level: this engine's number in a hierarchy of engines (`core.rngs`); random bits depend on it.
            taken_back: how many tokens, beyond this engine's own blocks, an outer engine may roll the caches back.
        """
        # `block` is the longest block that can occur with these parameters
        (rows, width), block = prompt.tokens.shape, self._longest(params)
        room = max_new_tokens + block + 1  # a block is scored and written before it is cut to the limit
        back = taken_back + block + 1  # a windowed cache must keep the entries that a rollback makes visible again
        # nodes of a tree share positions, so a windowed cache must keep all slots (`None`: any rollback)
        whole = None if self.tree is not None else back
        cache, hidden = scoring.prefilled(self.target, params["target"], prompt, width + room, whole, self.layers)
        features = prompt_features(self.target, cache) if self.drafter.reads_features else None
        target = Target(params["target"], cache)
        return DecodeState(
            # prompts end at different columns, so each row writes after its own prompt and overwrites the padding
            tokens=jnp.pad(prompt.tokens, [(0, 0), (0, room)]),
            length=prompt.length,
            start=prompt.length,
            limit=prompt.length + max_new_tokens,
            done=jnp.zeros((rows,), bool),
            rounds=jnp.zeros((rows,), jnp.int32),
            # keys depend on ids and not on indices, so a row draws the same tokens alone and in any batch
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
        """Returns the longest block that can occur; a planner without the draft model's parameters never drafts."""
        if self.planner is None:
            return self.block
        return max(self.planner.drafters[place].block for place in self.planner.places(params["drafter"]))

    @property
    def _keeps_logits(self) -> bool:
        """Whether a block's distributions are stored as logits (`core.logit_laws`), as for plain blocks on a TPU."""
        if not platforms.uses_kernels() or self.planner is not None or self.tree is not None:
            return False
        simple = self.verify_final and not self.drafter.adaptive and not self.verifier.reads_logs
        # the drafter's own class must set `leaves_logits`: a subclass that inherits it may expect probabilities
        return simple and bool(vars(type(self.drafter)).get("leaves_logits", False))

    def blank_laws(self, rows: int) -> Laws | LogitLaws:
        """Returns zeroed buffers for the distributions of this engine's blocks."""
        if self._keeps_logits:
            return logit_laws.blank(rows, self.block + 1, self.target.vocab_size)
        # with a planner, each phase makes buffers of its own width, so the state has only one-entry placeholders
        drafts = self.block > 0 and self.planner is None
        shape = (rows, self.block + 1, self.target.vocab_size) if drafts else (rows, 1, 1)
        blank = Laws(q=jnp.zeros(shape, jnp.float32), q_tilde=jnp.zeros(shape, jnp.float32))
        # logs double the size of the buffers, so they are allocated only if the rule reads them
        return replace(blank, logs=blank) if self.verifier.reads_logs else blank

    def draft(self, params: Params, state: DecodeState, controls: Controls, room: Array, complete: bool) -> Drafted:
        """Drafts a block for each row, of at most the row's `room` (`[B]`) tokens."""
        keys = self.round_keys(state)
        request = Request(
            tokens=state.tokens,
            length=state.length,
            room=room,
            active=~state.done,
            keys=keys,
            controls=controls,
            target=Target(params["target"], state.target_cache),
            block=cast(Laws, state.laws),
            complete=complete,
            stop_ids=self.stop_ids,
        )
        with jax.named_scope("draft"):
            draft, drafter, cache = proposed(self.round_drafter, params["drafter"], state.drafter, request)
            # a drafter without logits gives only float32 probabilities, so their logs are the best available
            if self.verifier.reads_logs and draft.logs is None:
                draft = replace(draft, logs=Laws(jnp.log(draft.q), jnp.log(draft.q_tilde)))
        return Drafted(draft, drafter, cache, keys, self._unverified(state, draft))

    def score(
        self, params: Params, state: DecodeState, drafted: Drafted, controls: Controls, width: int, cache: Cache
    ) -> tuple[LawPair | LogitPair, Array, Array | None, Array | None, Cache]:
        """Calls the target on a block's first `width` positions.

        Returns:
            Five values: the distributions `[B, width, V]`; whether logits are non-finite, bool `[B, width]`; the
            target's final hidden states `[B, width, D]`; its hidden states after the `layers`, `[B, width, L, D]`; and
            its cache. Hidden states are `None` unless the drafter reads them.
        """
        draft = cut(drafted.draft, width)
        # the last committed token is not in the cache yet, so it is fed first; `G` drafts give `G + 1` distributions
        pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        with jax.named_scope("score"):
            tokens = jnp.concatenate([pending, draft.tokens], axis=1)
            out, cache = scoring.extended(self.target, self.tree, params["target"], cache, tokens, self.layers)
            size = self.target.vocab_size
            # the logits of vocabulary padding are cut off, so that padding gets no probability; a `LogitPair` does this
            # itself
            logits = out.logits[..., :size] if draft.logits is None else out.logits
        with jax.named_scope("sampling"):
            pair: LawPair | LogitPair
            if draft.logits is None:
                pair = make_law_pair(draft.q, draft.q_tilde, draft.greedy, logits, controls.target, draft.logs)
            else:
                pair = LogitPair.of(draft.logits, logits, controls, size)
        features = out.hidden if self.drafter.reads_features else None
        # the maximum is NaN or +inf if any logit is; a single logit of -inf only means a masked token
        bad = ~jnp.isfinite(logits.max(-1)) & ~drafted.unverified[:, None]
        return pair, bad, features, out.layer_states, cache

    def _unverified(self, state: DecodeState, draft: Draft) -> Array:
        """Returns bool `[B]`: whether the block ends the row and is committed without a call of the target."""
        if self.verify_final:
            return jnp.zeros_like(state.done)
        last = jnp.take_along_axis(draft.tokens, jnp.maximum(draft.length - 1, 0)[:, None], axis=1)[:, 0]
        ends = is_stop(last, self.stop_ids) | (draft.length >= state.limit - state.length)
        return ends & (draft.length > 0) & ~state.done

    def round_keys(self, state: DecodeState) -> rngs.RoundKeys:
        """Returns the keys of this round's random bits."""
        return rngs.RoundKeys(state.keys, state.rounds, state.length)

    def step(self, params: Params, state: DecodeState, controls: Controls) -> tuple[DecodeState, Round]:
        """Runs one round of speculation; jittable.

        Sources: docs/methods.md, section 2; Narasimhan et al., 2024, Algorithm 4.
        """
        drafted = self.draft(params, state, controls, state.limit - state.length, self.complete)
        # the next round reuses the buffers in place, so they are saved before a tree is reduced to its kept path
        judged, laws = self._judged(params, state, drafted, controls), drafted.draft.laws
        if drafted.draft.logits is not None:
            pair = judged.pair
            drafted = drafted._replace(draft=replace(drafted.draft, q=pair.q, q_tilde=pair.q_tilde, logits=None))
        if self.tree is not None:
            drafted = drafted._replace(draft=scoring.straight_draft(drafted.draft, judged.verdict, self.tree))
        with jax.named_scope("commit"):
            turn = self._cut(state, drafted, judged)
            # only failures at tokens that are about to be committed count; rows that failed then commit nothing
            failed_at = self._failures(state, drafted, judged, turn.num_new)
            turn = scoring.without_failed(turn, (failed_at >= 0).any(-1))
            return replace(self._commit(params, state, drafted, judged, turn, failed_at), laws=laws), turn

    def _judged(self, params: Params, state: DecodeState, drafted: Drafted, controls: Controls) -> Judged:
        """Scores and verifies the block; the target scores only as many positions as the longest draft needs.

        If no row's block needs verification, the target is not called.
        """

        def judge(width: int, cache: Cache) -> Judged:
            # `_tied` keeps computations inside the loop of each width; with a single width there is no loop
            block = self._tied(state, drafted, cache) if len(choices) > 1 else drafted
            draft = cut(block.draft, width)
            pair, bad, features, hidden, cache = self.score(params, state, block, controls, width, cache)
            # the verifiers in this table also accept logits; all others get probabilities
            reads_logits, verifier = type(self.verifier) in VERIFIERS.values(), self._verifier_of(controls)
            with jax.named_scope("verify"):
                compared: Any = pair if reads_logits else as_law_pair(pair)
                verdict = verifier.verify(compared, draft, block.keys, controls.alpha, self.bonus)
            scored = Scored(as_law_pair(pair), draft, bad, features, hidden, cache)
            if self.tree is not None:  # from here on, the kept path of the tree is treated as a block
                scored, verdict = scoring.straightened(self.target, self.tree, state.length - 1, scored, verdict)
            pair, draft, bad, features, hidden, cache = scored
            with jax.named_scope("commit"):
                eta, deferred = verifier.deferred(pair, controls.alpha, draft.tokens)
            return Judged(cache, pair, verdict, bad, eta, deferred, features, hidden)

        choices = self._widths()  # `judge` reads `choices` too, but is called only below
        needed = None if self.verify_final else jnp.any(~drafted.unverified & ~state.done)
        judged = scoring.by_width(choices, drafted.draft.length.max(), judge, drafted.target_cache, needed)
        return judged._replace(verdict=scoring.kept_whole(judged.verdict, drafted.draft, drafted.unverified))

    def _verifier_of(self, controls: Controls) -> Verifier | Chosen:
        """Returns the verifier; if the program contains several (`OneOf`), the controls say which one."""
        if not isinstance(self.verifier, OneOf):
            return self.verifier
        assert controls.rule is not None, "set Controls.rule: this program serves several rules"
        return self.verifier.chosen(controls.rule[0])

    def _widths(self) -> tuple[int, ...]:
        """Returns the numbers of positions for which target calls are compiled; a drafter may define its own."""
        drafter_widths: tuple[int, ...] = getattr(self.drafter, "scored_widths", ())
        return drafter_widths or scoring.widths(self.block) if self.drafter.adaptive else (self.block + 1,)

    def _tied(self, state: DecodeState, drafted: Drafted, cache: Cache) -> Drafted:
        """Makes the block depend on the cache, so that XLA does not move computations out of a loop.

        The target call is compiled for several widths (numbers of positions). Each is in a loop of its own, of at most
        one iteration, and only the loop of the chosen width runs (`scoring.by_width`). XLA moves everything that does
        not change between iterations out of a loop, so every round would compute the random bits and gathers of all
        widths. An optimization barrier prevents this: drafted tokens and random keys depend on the cache. The draft's
        distributions do not pass through it, because it would copy them.
        """
        # the round counter is made dependent too, because all random bits of the round are derived from it
        tied = drafted.draft.tokens, state.rounds, self.target.consumed(cache)
        tokens, rounds, _ = jax.lax.optimization_barrier(tied)
        keys = self.round_keys(replace(state, rounds=rounds))
        return drafted._replace(draft=replace(drafted.draft, tokens=tokens), keys=keys)

    def _cut(self, state: DecodeState, drafted: Drafted, judged: Judged) -> Round:
        """Returns the round's record, which says which tokens are committed.

        These are the kept tokens and the one after them, up to the first stop id or the length limit.
        """
        draft, verdict = drafted.draft, judged.verdict
        kept = verdict.num_kept
        slots = jnp.arange(self.block + 1, dtype=jnp.int32)[None]
        padded = jnp.pad(draft.tokens, [(0, 0), (0, 1)])  # `G + 1` entries hold a whole block and its bonus
        # the replacement or bonus follows the kept tokens; later entries are rejected drafts, which `num_new` cuts off
        tokens = jnp.where(slots == kept[:, None], verdict.final[:, None], padded)
        # an empty block must give a token even if there is no bonus, or the row would never advance
        has_final = verdict.rejected | (self.bonus != "none") | (draft.length == 0)
        num_new = jnp.minimum(kept + (has_final & ~drafted.unverified), state.limit - state.length)
        # the limit is applied before stop ids, because a stop id beyond the limit does not end the row
        stops = is_stop(tokens, self.stop_ids) & (slots < num_new[:, None])
        num_new = jnp.minimum(num_new, jnp.where(stops, slots, self.block + 1).min(-1) + 1)
        num_new = jnp.where(state.done, 0, num_new)  # rows that have ended are computed too, but commit nothing
        final = jnp.where(verdict.rejected, 1, jnp.where(draft.length > 0, 2, 3))  # indices into `core.names.SOURCES`
        # tokens that were cut off count neither as kept nor as rejected, because counters describe the output only
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
        """Returns int32 `[B, 2]`: each model's first position with non-finite logits for a committed token, or -1.

        Non-finite logits give NaN probabilities, and a draft with a NaN probability is not kept. So a failure that
        affects the output is always at a position that is about to be committed.
        """
        slots = jnp.arange(self.block + 1)[None]

        def first(bad: Array) -> Array:
            slot = jnp.where(bad & (slots < num_new[:, None]), slots, self.block + 1).min(-1)
            return jnp.where(slot <= self.block, state.length + slot, -1)

        new = jnp.stack([first(judged.bad), first(drafted.draft.bad)], axis=-1)
        return jnp.where(state.failed_at >= 0, state.failed_at, new)  # later failures may follow from the first

    def _commit(
        self, params: Params, state: DecodeState, drafted: Drafted, judged: Judged, turn: Round, failed_at: Array
    ) -> DecodeState:
        """Appends the round's tokens, rolls both caches back to `length − 1` and counts the round."""
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
            # all `G + 1` tokens are written, because the next round overwrites those at or beyond `length`
            tokens=_appended(state.tokens, turn.tokens, state.length),
            length=length,
            done=state.done | stopped | (length >= state.limit) | (failed_at >= 0).any(-1),
            rounds=state.rounds + turn.active,
            # the last committed token stays pending, because a replacement or bonus has not been fed to any cache
            target_cache=self.target.rollback(judged.target_cache, length - 1),
            drafter=self.round_drafter.commit(params["drafter"], drafted.drafter, outcome),
            tally=count_round(state.tally, turn, self.verifier.defers, self.bonus),
            failed_at=failed_at,
        )


def _appended(tokens: Array, new: Array, length: Array) -> Array:
    """Writes `new` `[B, G + 1]` into `tokens` `[B, L]`, in each row from its `length` on; returns int32 `[B, L]`."""
    # `write_few_slots` reads all slots of the rows. This pays on a TPU with several rows only: a single row is written
    # at once on every platform, and a CPU writes several rows faster than it reads all their slots.
    few = platforms.platform() == "tpu" and len(length) > 1
    return write_few_slots(tokens, new, length) if few else write_slots(tokens, new, length, axis=1)

"""Protocols that connect the subpackages: models, drafters, stop policies."""

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import flax.struct

from speccascade_jax.core.rngs import RoundKeys
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, BoundModel, Cache, Controls, Draft, Laws, LMOutput, Params, Prompt, PyTree


@runtime_checkable
class LanguageModel(Protocol):
    """A language model that predicts the next token, with a functional cache in which each row has its own length.

    Implementations are frozen and hashable, because they are static arguments of jit; parameters are passed separately.
    A round drafts one block of tokens and verifies it. Invariant between rounds: *a cache has consumed exactly
    `length - 1` tokens*. The last committed token is *pending*: it is fed together with the next block. If drafters
    read a model's prompt features or hidden states, the model also implements `PromptSummary` or `LayeredModel`.

    Examples:
        >>> from dataclasses import dataclass
        >>> import jax.numpy as jnp
        >>> from speccascade_jax.extend import BoundModel, LanguageModel, LMOutput
        >>> @dataclass(frozen=True)
        ... class Uniform:
        ...     vocab_size: int
        ...     def prefill(self, params, prompt, max_len, max_rollback=None):
        ...         return prompt.length - 1  # the cache: how many tokens each row has consumed
        ...     def extend(self, params, cache, tokens):
        ...         logits = jnp.zeros((*tokens.shape, self.vocab_size))
        ...         return LMOutput(logits), cache + tokens.shape[1]
        ...     def rollback(self, cache, length):
        ...         return length
        ...     def consumed(self, cache):
        ...         return cache
        >>> bound = BoundModel(params=(), model=Uniform(8))
        >>> isinstance(bound.model, LanguageModel)
        True
    """

    @property
    def vocab_size(self) -> int:
        """The number of real vocabulary entries, padding excluded."""

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        """Returns a cache of `max_len` slots that has consumed `prompt.length - 1` tokens of each row.

        `max_rollback` is the largest number of consumed tokens that one rollback removes (`None`: any number). Only
        models that overwrite old cache entries, such as those with attention windows, need it.
        """

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feeds `tokens` `[B, T]` to the model; returns its output for them and the new cache.

        Each row's tokens follow those that it has consumed. `T` is 1 for a single step, and `G + 1` for the pending
        token with a block of `G` draft tokens.
        """

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """Returns the cache as if each row had consumed only its first `length` `[B]` tokens.

        This takes O(1) time, because only the length is set. Slots at or beyond the length are masked, so they need not
        be cleared.
        """

    def consumed(self, cache: Cache) -> Array:
        """Returns int32 `[B]`: how many tokens each row of the cache has consumed."""


class DraftedBlock(NamedTuple):
    """A block that a model drafted in one call (`BlockModel`).

    Attributes:
        logits: float32 `[B, turns, V]`, after the pending token and after each drafted one that was fed.
        tokens: int32 `[B, turns]`; token `j` was drawn from `logits[:, j]`.
        cache: the cache. Its slots contain the tokens that were fed, but its length is still the one before the call,
            so the caller must set it.
    """

    logits: Array
    tokens: Array
    cache: Cache


@runtime_checkable
class BlockModel(LanguageModel, Protocol):
    """A model that may draft a whole block in one call, which is faster than its single steps."""

    def can_draft(self, params: Params, cache: Cache, turns: int) -> bool:
        """Returns whether `draft` accepts these parameters, this cache and this number of tokens."""

    def draft(
        self,
        params: Params,
        cache: Cache,
        tokens: Array,
        missed: Array,
        uniforms: Array,
        temperature: Array,
        turns: int,
    ) -> DraftedBlock:
        """Feeds the pending token, draws a token, feeds it, and so on: `turns` tokens are fed and drawn.

        If the previous round kept all its drafts, the cache may also lack the token before the pending one. It is then
        fed first.

        Args:
            params: the model's parameters.
            cache: the model's cache.
            tokens: int32 `[B, 2]`, the token that the cache may lack, and the pending one.
            missed: bool `[B]`, whether a row's cache lacks the first of `tokens`.
            uniforms: float32 `[B, G]`, random numbers in [0, 1) for the draws; tokens after the first `G` are
                meaningless.
            temperature: float32 `[B]`; 0 is greedy.
            turns: how many tokens are fed, beginning with the pending one (static).
        """


class BranchingModel(LanguageModel, Protocol):
    """A model that can be fed a tree of tokens (`core.trees`)."""

    def extend_branch(self, params: Params, cache: Cache, tokens: Array, branch: Branch) -> tuple[LMOutput, Cache]:
        """Feeds entries of a tree, `tokens` `[B, T]`; an entry attends only to committed tokens and to its own path.

        The entries occupy adjacent slots; the cache must have been prefilled with `max_rollback=None`.
        """

    def keep(self, cache: Cache, start: Array, entries: Array) -> Cache:
        """Moves one path of the tree to consecutive slots and returns the cache.

        Slot `start + j` then holds entry `entries[:, j]`; `start` is `[B]` and `entries` `[B, W]`. The length is
        unchanged, and slots after the path are meaningless.
        """


@runtime_checkable
class PromptSummary(Protocol):
    """A model that summarises a prompt in one vector per row, for drafters that set `reads_features`."""

    def prompt_features(self, cache: Cache) -> Array:
        """Returns the summary of each row's prompt that the prefill computed, float `[B, D]`."""


@runtime_checkable
class LayeredModel(Protocol):
    """A model whose hidden states a drafter can read (`ReadsLayers`).

    The states of layer `k` are the residual stream after `k` layers. Layer 0 is the embedding, and `unembed` takes the
    states after the last layer.

    Examples:
        >>> import jax.numpy as jnp
        >>> import speccascade_jax as sc
        >>> from speccascade_jax.extend import LayeredModel, Prompt
        >>> bound = sc.TableLM(jnp.eye(3))
        >>> isinstance(bound.model, LayeredModel), isinstance(sc.FakeLM(3).model, LayeredModel)
        (True, False)
        >>> prompt = Prompt(jnp.array([[0, 1]]), jnp.array([2]))
        >>> _, states = bound.model.prefill_layers(bound.params, prompt, max_len=4, layers=(0, 1))
        >>> states.shape, states[0, :, 0].tolist()  # the pending token's states are zero
        ((1, 2, 2, 3), [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    """

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Cache, Array]:
        """Returns the cache as `prefill` does, and the hidden states `[B, P, L, D]` of the consumed tokens.

        The states at the pending token and after it are zero.
        """

    def extend_layers(
        self, params: Params, cache: Cache, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Cache]:
        """Feeds `tokens` as `extend` does (`extend_branch` if `branch` is given); fills `LMOutput.layer_states`."""

    def embed(self, params: Params, tokens: Array) -> Array:
        """Returns the embeddings `[B, T, D]` of `tokens` `[B, T]`: layer 0's states, the input of the first layer."""

    def unembed(self, params: Params, states: Array) -> Array:
        """Returns the logits `[B, T, V]` that belong to hidden states `[B, T, D]` after the last layer."""


@runtime_checkable
class AttachedModel(Protocol):
    """A draft model that reads the hidden states or the cache of one target, and cannot draft without that target."""

    @property
    def about(self) -> str:
        """Describes the model in one line: what it drafts, and what it reads of its target."""

    def attached(self, params: Params, target: BoundModel) -> BoundModel:
        """Returns the model with all its parameters, some of which it may take from the target (as an embedding).

        Raises:
            ValueError: the model does not fit the target.
        """

    def check(self, target: BoundModel) -> None:
        """Raises a `ValueError` if the model does not fit the target."""


@runtime_checkable
class TargetHead(AttachedModel, Protocol):
    """A draft model that reads its target's hidden states, such as an EAGLE-3 head (`drafters.heads`).

    It is a `LanguageModel` whose `extend` continues from its own states, but it has no `prefill` of its own.
    """

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the target's layers whose hidden states the head reads, as in `LayeredModel`."""

    def begin(self, params: Params, prompt: Prompt, hidden: Array, max_len: int) -> Cache:
        """Returns a cache that has consumed `prompt.length - 1` tokens, from the prompt's states `[B, P, L, D]`."""

    def read(self, params: Params, cache: Cache, tokens: Array, hidden: Array, length: Array, active: Array) -> Cache:
        """Returns the head's cache after a round, updated with the target's hidden states of the kept tokens.

        Args:
            params: the head's parameters.
            cache: the head's cache after drafting.
            tokens: int32 `[B, G]`, the drafted block; its first tokens were kept.
            hidden: `[B, G + 1, L, D]`, the target's hidden states at the pending token and at the block's tokens
                (`Outcome.hidden`).
            length: int32 `[B, 2]`, the rows' lengths before and after the round.
            active: bool `[B]`, the rows that took part.
        """


# A drafter that shares the target's cache, such as an early exit, writes to it and returns it from `propose`.
class Target(NamedTuple):
    """The target model as a drafter may use it: its parameters and its cache before the round."""

    params: Params
    cache: Cache


@flax.struct.dataclass
class Start:
    """The inputs of `Drafter.init`, from which a drafter makes its initial state for a generation.

    Attributes:
        prompt: the prompts, `[B, P]`.
        rng: the generation's random key.
        example_ids: int32 `[B]`, the ids that determine the rows' random bits.
        features: float `[B, D]`, the target's summary of the prompt from its prefill; `None` unless
            `Drafter.reads_features`.
        slots: a number of cache slots that suffices for the whole generation.
        max_rollback: the largest number of tokens that one rollback removes (`LanguageModel.prefill`).
        level: the number of the engine that uses this drafter (`core.rngs`); an engine inside the drafter has the
            number `rngs.below(level, arm)`.
        hidden: float `[B, P, L, D]`, the target's hidden states at each prompt position, after the layers that the
            drafter names; zero from the pending token on, which the target has not read. `None` unless the drafter is a
            `ReadsLayers`.
        target: the target's parameters, and its cache after the prefill.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Prompt, Start, rngs
        >>> def init(params, start):  # a method of a drafter: the last token of each prompt that the target has read
        ...     return jnp.take_along_axis(start.prompt.tokens, start.prompt.length[:, None] - 2, axis=1)[:, 0]
        >>> prompt, ids = Prompt(np.array([[5, 7, 0], [4, 2, 6]]), np.array([2, 3])), np.arange(2)
        >>> start = Start(prompt, rngs.root(0), ids, features=None, slots=16, max_rollback=4, level=0)
        >>> init({}, start).tolist()
        [5, 2]
    """

    prompt: Prompt
    rng: Array
    example_ids: Array
    features: Array | None
    # These fields are static, because the shapes of the drafter's own cache depend on the first two.
    slots: int = flax.struct.field(pytree_node=False)
    max_rollback: int = flax.struct.field(pytree_node=False)
    level: int = flax.struct.field(pytree_node=False)
    hidden: Array | None = None
    target: Target | None = None


@flax.struct.dataclass
class Request:
    """A drafter's inputs at the start of a round.

    Attributes:
        tokens: int32 `[B, L]`, all committed tokens.
        length: int32 `[B]`, how many tokens are committed (the last one is pending).
        room: int32 `[B]`, how many tokens still fit under the length limit; a longer draft is useless.
        active: bool `[B]`, rows that still generate; other rows get an empty draft.
        keys: this round's random bits.
        controls: α, temperatures and other settings that are traced numbers.
        target: the target's parameters and cache.
        block: the buffers that the block's distributions are written into.
        complete: whether the drafter must also give the distribution at the bonus position (`draft.q[:, length]`).
        stop_ids: ids that end a row.

    Examples:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Request
        >>> def pending(request):  # the last committed token of each row
        ...     return jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)[:, 0]
        >>> unread = dict.fromkeys(("keys", "controls", "target", "block"))
        >>> counts = {"length": np.array([2, 3]), "room": np.array([4, 3]), "active": np.array([True, True])}
        >>> tokens = np.array([[5, 7, 0], [4, 2, 6]])
        >>> pending(Request(tokens=tokens, **counts, **unread, complete=False, stop_ids=())).tolist()
        [7, 6]
    """

    tokens: Array
    length: Array
    room: Array
    active: Array
    keys: RoundKeys
    controls: Controls
    target: Target
    block: Laws
    # `complete` is static, so that a program without it contains no draft pass for the bonus position.
    complete: bool = flax.struct.field(pytree_node=False)
    stop_ids: tuple[int, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Outcome:
    """The result of verifying a block; rows that were not active have `num_new = 0`.

    Attributes:
        draft: the drafted block.
        num_kept: int32 `[B]`, how many draft tokens were committed.
        num_new: int32 `[B]`, how many tokens were committed.
        length: int32 `[B]`, the rows' new lengths.
        rejected: bool `[B]`, whether a draft token was rejected.
        active: bool `[B]`, whether the row took part in the round.
        features: float `[B, G + 1, D]`, the target's final hidden states at the pending token and at the block's
            tokens, zero where the target did not score. `None` unless `Drafter.reads_features`. In a hierarchy of
            engines, it is also `None` when an outer engine commits tokens to an inner engine's drafter.
        path: int32 `[B, N + 1]`, the tree entries on the accepted path, entry 0 first; `None` unless the drafts form a
            tree (`core.trees`).
        hidden: float `[B, G + 1, L, D]`, the target's hidden states after the layers that the drafter names. Entry `j`
            is the state at position `length - num_new - 1 + j`, so entry 0 belongs to the token that was pending. The
            first `num_new` entries belong to committed tokens that the target has now read. Later entries belong to
            rejected tokens, or are zero where the target did not score. The new pending token has no state before the
            next round. `None` unless the drafter is a `ReadsLayers`.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Outcome
        >>> def commit(params, state, outcome):  # a method of a drafter that counts its accepted tokens
        ...     return state + outcome.num_kept
        >>> kept, new, length = np.array([3, 0]), np.array([4, 1]), np.array([9, 6])
        >>> flags = {"rejected": np.array([False, True]), "active": np.array([True, True])}
        >>> commit({}, np.array([2, 2]), Outcome(None, kept, new, length, **flags, features=None)).tolist()
        [5, 2]
    """

    draft: Draft
    num_kept: Array
    # `num_new` exceeds `num_kept` by one if a replacement or a bonus was committed.
    num_new: Array
    length: Array
    rejected: Array
    active: Array
    features: Array | None
    path: Array | None = None
    hidden: Array | None = None


class _Drafting(Protocol):
    """The members that drafters and planners share.

    Attributes:
        block: the longest block (static).
        adaptive: whether blocks are often shorter than `block`; the target then scores no more positions than needed.
        reads_features: whether the target's features are read.
    """

    @property
    def block(self) -> int: ...
    @property
    def adaptive(self) -> bool: ...
    @property
    def reads_features(self) -> bool: ...

    def init(self, params: Params, start: Start) -> PyTree:
        """Returns the initial state of the drafter or planner, before the first round."""

    def stats(self, state: PyTree) -> Any:
        """Returns statistics of engines inside the drafter, or `None`."""


class Drafter(_Drafting, Protocol):
    """A component that writes blocks of tokens and reports the distribution of each token. Frozen and hashable.

    Attributes:
        block: the longest block that it proposes (static); `propose` pads its arrays to this length.
        adaptive: whether blocks are often shorter than `block`; the target then scores no more positions than needed.
        reads_features: whether it reads the target's features, in `Start.features` and `Outcome.features`; otherwise
            these are `None`.

    Examples:
        >>> from dataclasses import dataclass
        >>> from types import SimpleNamespace
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Draft, Drafter, Request
        >>> @dataclass(frozen=True)
        ... class Again:
        ...     vocab_size: int
        ...     block: int = 1
        ...     adaptive: bool = False
        ...     reads_features: bool = False
        ...     def init(self, params, start):
        ...         return ()  # no state
        ...     def propose(self, params, state, request):  # the pending token once more
        ...         token = jnp.take_along_axis(request.tokens, request.length[:, None] - 1, axis=1)
        ...         q = jax.nn.one_hot(jnp.pad(token, [(0, 0), (0, 1)]), self.vocab_size)
        ...         length = jnp.where(request.active, jnp.minimum(request.room, 1), 0)
        ...         none, bad = jnp.zeros_like(length), jnp.zeros(q.shape[:2], bool)
        ...         draft = Draft(token, length, q, q, greedy=none == 0, steps=none, bad=bad, lawful=none > 0)
        ...         return draft, state, request.target.cache
        ...     def commit(self, params, state, outcome):
        ...         return state
        ...     def stats(self, state):
        ...         return None
        >>> drafter: Drafter = Again(vocab_size=8)
        >>> tokens, length, room = np.array([[5, 7, 0], [4, 2, 6]]), np.array([2, 3]), np.array([4, 0])
        >>> unread = {"keys": None, "controls": None, "target": SimpleNamespace(cache=None), "block": None}
        >>> request = Request(tokens, length, room, np.array([True, True]), **unread, complete=False, stop_ids=())
        >>> draft, _, _ = drafter.propose({}, (), request)
        >>> draft.tokens.tolist(), draft.length.tolist(), draft.q_tilde.shape  # the second row has no room
        ([[7], [6]], [1, 0], (2, 2, 8))
    """

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Drafts a block; returns the block, the drafter's new state, and the target's cache.

        A drafter that writes to the target's cache returns the changed cache; other drafters return it unchanged.
        """

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Rolls the drafter's state back to `outcome.length` after a round; a drafter that learns can learn here."""


@runtime_checkable
class ReadsLayers(Protocol):
    """A drafter that reads the target's hidden states, in `Start.hidden` and `Outcome.hidden`.

    Attributes:
        reads_layers: the numbers of `L` layers of the target (static), as in `LayeredModel`; the drafter gets their
            states in this order.

    Examples:
        >>> from dataclasses import dataclass
        >>> from speccascade_jax.extend import ReadsLayers
        >>> @dataclass(frozen=True)
        ... class Head:  # with the members of a `Drafter`
        ...     reads_layers: tuple[int, ...] = (0, 2, 4)
        >>> isinstance(Head(), ReadsLayers), isinstance("a drafter without layers", ReadsLayers)
        (True, False)
    """

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The target's layers that the drafter reads."""
        ...


def layers_read_by(drafter: Any) -> tuple[int, ...]:
    """Returns the target's layers that a drafter or planner reads; an empty tuple if it reads none."""
    return tuple(drafter.reads_layers) if isinstance(drafter, ReadsLayers) else ()


class Counted(NamedTuple):
    """Counts over the rounds of a phase (a run of rounds with one drafter, see `Planner`), int32 `[B]` each.

    Attributes:
        rounds: rounds that the row took part in.
        kept: the row's accepted draft tokens.
        tried: the row's draft tokens up to and including the first rejected one of each round.
    """

    rounds: Array
    kept: Array
    tried: Array


@runtime_checkable
class Planner(_Drafting, Protocol):
    """A component that takes a drafter's place in an engine and chooses one of several `drafters` for each phase.

    A phase is a run of rounds in which only the chosen drafter drafts (`engine.loop`). A planner is frozen and
    hashable. Its state has two int32 scalars: `place`, the index of the phase's drafter, and `turns`, the number of
    rounds that remain in the phase. Before the first phase `turns` is 0.

    Attributes:
        block: the longest block of any drafter.
        adaptive, reads_features: always False.

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import NamedTuple
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Planner
        >>> class Phase(NamedTuple):
        ...     place: jnp.ndarray
        ...     turns: jnp.ndarray
        >>> @dataclass(frozen=True)
        ... class First:  # always the first drafter, which has no state, in phases of 16 rounds
        ...     drafters: tuple
        ...     block, adaptive, reads_features = 5, False, False
        ...     def init(self, params, start):
        ...         return Phase(jnp.int32(0), jnp.int32(0))
        ...     def stats(self, state):
        ...         return None
        ...     def places(self, params):
        ...         return (0,)
        ...     def settle(self, params, state, tokens, length, room, active):
        ...         return Phase(state.place, jnp.int32(16)), jnp.zeros_like(length)
        ...     def entered(self, state, place):
        ...         return ()
        ...     def left(self, state, place, own, counted):
        ...         return Phase(state.place, state.turns - counted.rounds.max())
        >>> planner = First(drafters=())
        >>> state, _ = planner.settle({}, planner.init({}, None), None, np.array([3, 5]), None, None)
        >>> isinstance(planner, Planner), int(state.turns)
        (True, 16)
    """

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters that a phase may use; a drafter's *place* is its index in this tuple."""
        ...

    def places(self, params: Params) -> tuple[int, ...]:
        """Returns the indices of the `drafters` that may be chosen; other drafters are not compiled.

        The result may depend on the structure of the parameters, but not on their values.
        """

    def settle(
        self, params: Params, state: PyTree, tokens: Array, length: Array, room: Array, active: Array
    ) -> tuple[PyTree, Array]:
        """Chooses the next phase's drafter and number of rounds, at least one, and prepares the state for them.

        The choice may depend on finished rounds only.

        Args:
            params: the planner's parameters.
            state: the planner's state.
            tokens: int32 `[B, L]`, as in `Request`.
            length: int32 `[B]`, as in `Request`.
            room: int32 `[B]`, as in `Request`.
            active: bool `[B]`, as in `Request`.

        Returns:
            The new state, and int32 `[B]`, how many draft passes the preparation took.
        """

    def entered(self, state: PyTree, place: int) -> PyTree:
        """Returns the state with which drafter number `place` begins a phase."""

    def left(self, state: PyTree, place: int, own: PyTree, counted: Counted) -> PyTree:
        """Returns the planner's state after rounds of drafter number `place`, whose own final state is `own`."""


class DraftStep(NamedTuple):
    """A stop policy's inputs before a token is drawn; the token itself is not among them.

    Attributes:
        q: float32 `[B, V]`, the draft's raw distribution of the token.
        max_q: float32 `[B]`, the maximum of `q`.
        hidden: `[B, D]`, the draft's final hidden state at the previous token (at slot 0, the last committed token);
            `None` if the draft model returns none.
        slot: int32 scalar, the slot in the block.
        position: int32 `[B]`, the position that the drawn token would have in the row.
        drawn: float32 `[B]`, the probability `q̃` that the previous token was drawn with; meaningless at slot 0.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import DraftStep
        >>> q = np.array([[0.75, 0.25], [0.5, 0.5]])
        >>> step = DraftStep(q, q.max(-1), None, slot=np.array(0), position=np.array([4, 7]), drawn=np.ones(2))
        >>> (1.0 - step.max_q).tolist()  # the draft's doubt, row by row
        [0.25, 0.5]
    """

    q: Array
    max_q: Array
    # The drawn token is not a field: a policy that saw it would not be a stopping time, and outputs would be biased.
    hidden: Array | None
    slot: Array
    position: Array
    drawn: Array


class Decision(NamedTuple):
    """A stop policy's decision at one slot of the block.

    Attributes:
        draw: bool `[B]`, whether to draw a token here.
        proceed: bool `[B]`, whether to continue the block after this token.
        value: float32 `[B]`, the number that the policy compared with `controls.stop_threshold`, for traces; `None` if
            it compared none.

    Examples:
        >>> import numpy as np
        >>> from speccascade_jax.extend import Decision
        >>> doubt = np.array([0.25, 0.5])
        >>> decision = Decision(draw=doubt <= 0.9, proceed=doubt <= 0.4, value=doubt)
        >>> decision.draw.tolist(), decision.proceed.tolist()  # the second row's block ends after this token
        ([True, True], [True, False])
    """

    draw: Array
    proceed: Array
    value: Array | None = None


class StopPolicy(Protocol):
    """A policy that decides at which token a drafted block ends; in probability theory, a stopping time.

    A policy cannot remove a token that was drawn, so the output has the right distribution whatever the policy decides.
    It is frozen and hashable. `block` is the largest number of tokens that it allows in a block.

    Attributes:
        adaptive: whether blocks may end early.
        threshold: how the policy uses `controls.stop_threshold`, in words; empty if it does not read the threshold.
        between: the smallest and the largest meaningful threshold.
        on_rejection: whether the threshold is compared with an estimate of P(some token of the block is rejected), as
            in theorem 3.1 of Huang et al., 2024 (SpecDec++).

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import ClassVar
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from speccascade_jax.extend import Decision, DraftStep, StopPolicy
        >>> @dataclass(frozen=True)
        ... class EvenPositions:
        ...     block: int
        ...     adaptive: ClassVar[bool] = True
        ...     threshold: ClassVar[str] = ""
        ...     between: ClassVar[tuple[float, float]] = (0.0, 1.0)
        ...     on_rejection: ClassVar[bool] = False
        ...     def init(self, batch_size):
        ...         return ()
        ...     def __call__(self, params, state, step, controls):
        ...         even = step.position % 2 == 0
        ...         return Decision(jnp.ones_like(even), ~even & (step.slot + 1 < self.block)), state
        >>> policy: StopPolicy = EvenPositions(block=4)
        >>> q = np.full((2, 2), 0.5)
        >>> step = DraftStep(q, q.max(-1), None, slot=np.array(0), position=np.array([4, 7]), drawn=np.ones(2))
        >>> policy((), policy.init(2), step, None)[0].proceed.tolist()
        [False, True]
    """

    adaptive: ClassVar[bool]
    threshold: ClassVar[str]
    between: ClassVar[tuple[float, float]]
    on_rejection: ClassVar[bool]

    @property
    def block(self) -> int:
        """The largest number of tokens that the policy allows in a block."""

    def init(self, batch_size: int) -> PyTree:
        """Returns the policy's initial state, which is carried from round to round."""

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Returns the decision for every row, and the policy's next state."""

"""What the rooms ask of each other: models, drafters, stop policies."""

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import flax.struct

from speccascade_jax.core.rngs import RoundKeys
from speccascade_jax.core.trees import Branch
from speccascade_jax.core.types import Array, Cache, Controls, Draft, Laws, LMOutput, Params, Prompt, PyTree


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model over a functional cache with one length per row.

    Implementations are frozen and hashable (they are static arguments of jit); parameters live outside. Invariant
    between rounds: *a cache has consumed exactly `length - 1` tokens; the last committed token is pending*, and is fed
    with the next block. A model that drafters read has the methods of `PromptSummary` or `LayeredModel` too.
    """

    @property
    def vocab_size(self) -> int:
        """Real vocabulary entries, padding excluded."""

    def prefill(self, params: Params, prompt: Prompt, max_len: int, max_rollback: int | None = None) -> Cache:
        """A cache of `max_len` slots that has consumed `prompt.length - 1` tokens of each row.

        `max_rollback`: how far behind what was fed the length will ever be set back (`None`: any distance). Only
        models that forget, such as those with windows, need it.
        """

    def extend(self, params: Params, cache: Cache, tokens: Array) -> tuple[LMOutput, Cache]:
        """Feed `tokens` `[B, T]` at each row's own length: `T = 1` steps, `T = G + 1` scores."""

    def rollback(self, cache: Cache, length: Array) -> Cache:
        """The cache as if each row had consumed `length` `[B]` tokens. O(1): sets the length.

        Slots at or beyond the length are masked by position, never trusted and never cleared.
        """

    def consumed(self, cache: Cache) -> Array:
        """int32 `[B]`: how many tokens each row of the cache has consumed."""


class BranchingModel(LanguageModel, Protocol):
    """A model that can be fed a tree of tokens (`core.trees`)."""

    def extend_branch(self, params: Params, cache: Cache, tokens: Array, branch: Branch) -> tuple[LMOutput, Cache]:
        """`extend` with entries of a tree, `tokens` `[B, T]`: each sees what is committed and its own path alone.

        They lie in slots side by side; the cache must have been prefilled with `max_rollback=None`.
        """

    def keep(self, cache: Cache, start: Array, entries: Array) -> Cache:
        """The cache with a path in one row: slot `start + j` `[B]` holds entry `entries[:, j]`, `[B, W]`.

        The length is left as it is; what lies behind the path is junk.
        """


@runtime_checkable
class PromptSummary(Protocol):
    """A model that summarises a prompt in one vector per row, for drafters that set `reads_features`."""

    def prompt_features(self, cache: Cache) -> Array:
        """Returns float `[B, D]`, computed by the prefill."""


@runtime_checkable
class LayeredModel(Protocol):
    """A model whose hidden states a drafter can read (`ReadsLayers`).

    Layer `k` names the residual stream after `k` layers: 0 is the embedding, and `unembed` takes the last one.
    """

    def prefill_layers(
        self, params: Params, prompt: Prompt, max_len: int, layers: tuple[int, ...], max_rollback: int | None = None
    ) -> tuple[Cache, Array]:
        """Returns `LanguageModel.prefill`'s cache and the states `[B, P, L, D]` of the tokens that it consumed.

        The states at the pending token and behind it are zero.
        """

    def extend_layers(
        self, params: Params, cache: Cache, tokens: Array, layers: tuple[int, ...], branch: Branch | None = None
    ) -> tuple[LMOutput, Cache]:
        """Feeds `tokens` as `extend` does (`extend_branch` with a `branch`) and fills `LMOutput.layer_states`."""

    def embed(self, params: Params, tokens: Array) -> Array:
        """Returns the states `[B, T, D]` that the first layer reads for `tokens` `[B, T]`: those of layer 0."""

    def unembed(self, params: Params, states: Array) -> Array:
        """Returns the logits `[B, T, V]` that follow from states `[B, T, D]` after the last layer."""


class Target(NamedTuple):
    """The model that is drafted for, as a drafter may use it: its parameters and its cache before the round."""

    params: Params
    cache: Cache


@flax.struct.dataclass
class Start:
    """What a drafter begins with.

    Attributes:
        prompt: `[B, P]`; rng: a key; example_ids: int32 `[B]`, what the rows' bits hang on.
        features: float `[B, D]`, what the target's prefill made of the prompt; `None` unless `Drafter.reads_features`.
        slots: cache slots that suffice; max_rollback: how far the engine will ever roll back (`LanguageModel.prefill`).
        level: of the engine that is drafted for; engines inside a drafter have `rngs.below(level, arm)`.
        hidden: float `[B, P, L, D]`, the target's states by prompt position after the layers that the drafter names;
            zero at the pending token and behind it, which the target has not read. `None` unless `ReadsLayers`.
        target: the target's parameters, and its cache after the prefill.
    """

    prompt: Prompt
    rng: Array
    example_ids: Array
    features: Array | None
    slots: int = flax.struct.field(pytree_node=False)
    max_rollback: int = flax.struct.field(pytree_node=False)
    level: int = flax.struct.field(pytree_node=False)
    hidden: Array | None = None
    target: Target | None = None


@flax.struct.dataclass
class Request:
    """What a drafter gets to see at the start of a round.

    Attributes:
        tokens: int32 `[B, L]`, all committed tokens; length: int32 `[B]`, how many (the last one is pending).
        room: int32 `[B]`, the most tokens worth drafting: what still fits under the length limit.
        active: bool `[B]`, rows that still generate; the others get an empty draft.
        keys: this round's bits.
        controls: every traced number.
        target: the target's parameters and cache.
        block: the buffers that the block's laws are written into.
        complete: whether the law at the bonus position is wanted too (`draft.q[:, length]`); stop_ids: end a row.
    """

    tokens: Array
    length: Array
    room: Array
    active: Array
    keys: RoundKeys
    controls: Controls
    target: Target
    block: Laws
    complete: bool = flax.struct.field(pytree_node=False)
    stop_ids: tuple[int, ...] = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Outcome:
    """What became of a block; rows that were not active have `num_new = 0`.

    Attributes:
        draft: the block; num_kept: int32 `[B]`, how many of its tokens were committed.
        num_new: int32 `[B]`, how many tokens were committed; length: int32 `[B]`, the rows' new lengths.
        rejected: bool `[B]`; active: bool `[B]`.
        features: float `[B, G + 1, D]`, the target's hidden states of the pending token and of the block, as far as it
            was scored (zero beyond); `None` unless `Drafter.reads_features`, and where an engine further up takes back
            what was committed.
        path: int32 `[B, N + 1]`, of a tree the entries that were kept, entry 0 first; `None` of a block.
        hidden: float `[B, G + 1, L, D]`, the target's states after the layers that the drafter names. Entry `j` stands
            at position `length - num_new - 1 + j`: entry 0 is the token that was pending. The first `num_new` entries
            belong to committed tokens that the target has now read; those behind them belong to rejected tokens, or
            are zero where nothing was scored. The new pending token has no state before the next round. `None` unless
            `ReadsLayers`.
    """

    draft: Draft
    num_kept: Array
    num_new: Array
    length: Array
    rejected: Array
    active: Array
    features: Array | None
    path: Array | None = None
    hidden: Array | None = None


class _Drafting(Protocol):
    """What drafters and planners share.

    Attributes:
        block: the longest block it may hand over (static); adaptive: whether blocks are often shorter than that, so
            that they are worth scoring no wider than they are; reads_features: whether it wants the target's.
    """

    @property
    def block(self) -> int: ...
    @property
    def adaptive(self) -> bool: ...
    @property
    def reads_features(self) -> bool: ...

    def init(self, params: Params, start: Start) -> PyTree:
        """The state before the first round, or phase."""

    def stats(self, state: PyTree) -> Any:
        """Statistics of engines inside, or `None`."""


class Drafter(_Drafting, Protocol):
    """Anything that writes a block and says what each token was drawn from. Frozen and hashable."""

    def propose(self, params: Params, state: PyTree, request: Request) -> tuple[Draft, PyTree, Cache]:
        """Write a block.

        The target's cache is threaded through for drafters that share it; most hand it back untouched.
        """

    def commit(self, params: Params, state: PyTree, outcome: Outcome) -> PyTree:
        """Roll back (and adapt) after a round that left the rows at `outcome.length`."""


@runtime_checkable
class ReadsLayers(Protocol):
    """A drafter that reads the target's hidden states, in `Start.hidden` and `Outcome.hidden`.

    Attributes:
        reads_layers: which layers of the target (static), numbered as `LayeredModel` numbers them; `L` of them, in the
            order in which the drafter wants their states.
    """

    @property
    def reads_layers(self) -> tuple[int, ...]: ...


def layers_read_by(drafter: Any) -> tuple[int, ...]:
    """Returns the target's layers that a drafter or planner reads: none where it does not say."""
    return tuple(drafter.reads_layers) if isinstance(drafter, ReadsLayers) else ()


class Counted(NamedTuple):
    """What became of the rounds of a phase, int32 `[B]` each: rounds the row took part in; its drafts of these rounds
    that were kept, and those up to the first that was not."""

    rounds: Array
    kept: Array
    tried: Array


@runtime_checkable
class Planner(_Drafting, Protocol):
    """Stands in a drafter's place, and settles before each phase of some rounds which of its `drafters` drafts in them.

    Each phase is rounds of an engine that has just that drafter (`engine.loop`). Frozen and hashable. Its state has
    two attributes, int32 scalars: `place`, that of the phase's drafter, and `turns`, how many rounds are left of the
    phase, 0 before the first one.

    Attributes:
        block: the longest block of any; adaptive, reads_features: False.
    """

    @property
    def drafters(self) -> tuple[Drafter, ...]: ...

    def places(self, params: Params) -> tuple[int, ...]:
        """Those that may be settled with these parameters; by their structure alone, for others are not compiled."""

    def settle(
        self, params: Params, state: PyTree, tokens: Array, length: Array, room: Array, active: Array
    ) -> tuple[PyTree, Array]:
        """A place, at least one turn, and all that its drafter needs; reads finished rounds alone.

        Args:
            tokens, length, room, active: as of `Request`.

        Returns:
            The state, and int32 `[B]`, passes of the draft that this took.
        """

    def entered(self, state: PyTree, place: int) -> PyTree:
        """The state that the drafter in `place` begins a phase with."""

    def left(self, state: PyTree, place: int, own: PyTree, counted: Counted) -> PyTree:
        """With what that drafter's state is after some rounds of the phase, or all of them."""


class DraftStep(NamedTuple):
    """What a policy sees before a token is drawn: never the token itself.

    `q` float32 `[B, V]` (raw), `max_q` `[B]` its maximum; `hidden` `[B, D]` or `None`, the features of the token before
    it, which at slot 0 is the last committed one; `slot` int32 scalar; `position` int32 `[B]`, where in the row the
    drawn token would stand; `drawn` float32 `[B]`, the probability `q̃` that the token before it was drawn with (means
    nothing at slot 0).
    """

    q: Array
    max_q: Array
    hidden: Array | None
    slot: Array
    position: Array
    drawn: Array


class Decision(NamedTuple):
    """bool `[B]` each: draw a token here? and go on after this one?

    `value` float32 `[B]`: what was compared with `controls.stop_threshold`, for traces; `None` where nothing was.
    """

    draw: Array
    proceed: Array
    value: Array | None = None


class StopPolicy(Protocol):
    """When a draft ends: a stopping time. Frozen and hashable.

    It can take no token back, so the law holds whatever it says. `block` is the most tokens it ever lets through.

    Attributes:
        adaptive: whether blocks may end early.
        threshold: what it does with `controls.stop_threshold`, in words, or empty where it reads none;
            between: the least and the largest threshold that means something.
        on_rejection: whether the threshold is compared with an estimate of P(some token of the block is rejected), as
            paper 3's theorem 3.1 has it.
    """

    adaptive: ClassVar[bool]
    threshold: ClassVar[str]
    between: ClassVar[tuple[float, float]]
    on_rejection: ClassVar[bool]

    @property
    def block(self) -> int:
        """The longest block."""

    def init(self, batch_size: int) -> PyTree:
        """The policy's own state, carried from round to round."""

    def __call__(self, params: Any, state: PyTree, step: DraftStep, controls: Controls) -> tuple[Decision, PyTree]:
        """Decide for every row."""

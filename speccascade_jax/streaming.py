"""The function `stream`, which yields the tokens of one output as they are committed, each with its source.

`generate` runs the same rounds in a loop on the device (`engine.loop`). Here the loop is in Python: each round takes
one dispatch and one transfer of a few integers, and all other data stay on the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from speccascade_jax.core import rngs
from speccascade_jax.core.checks import check_example_ids, check_seed
from speccascade_jax.core.names import SOURCES
from speccascade_jax.core.types import Array, Controls, Params, Prompt
from speccascade_jax.data.vocabularies.vocabulary import Ids, TextVocabulary, settled
from speccascade_jax.engine.engine import DecodeState, Engine
from speccascade_jax.engine.generate import argument, failures, model_names, raise_if_failed
from speccascade_jax.engine.loop import one_round
from speccascade_jax.methods.build import check_pair, decoder_for
from speccascade_jax.methods.build_drafter import check_length
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import with_settings
from speccascade_jax.methods.settings_dict import SettingsDict
from speccascade_jax.pairs.chat import read_prompts
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import decoder_context, make_prompt
from speccascade_jax.runtime import platforms


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """One committed token, with its text, its source and its place in the output.

    Attributes:
        id: the token's id in the vocabulary; a stop id is streamed too.
        text: the text that the token adds; all texts joined are the output of `decode`. It is empty without a
            vocabulary and for a stop id. If a character takes several tokens, the last of them has the character as its
            text, and the others have none.
        source: "draft" (drafted and kept), "replaced" (by the target, after a rejection), "bonus" (after a fully kept
            block) or "target" (nothing was drafted); always "draft" if the draft writes alone.
        round: the round that committed the token, from 0.
        slot: the token's place in that round, from 0.
        position: the token's place in the output, from 0.

    Examples:
        >>> import speccascade_jax as sc
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> next(sc.stream(pair, [1, 2], method="chow", alpha=0.5, block_size=3, max_new_tokens=6))
        StreamedToken(id=1, text='', source='replaced', round=0, slot=0, position=0)
    """

    id: int
    text: str
    source: str
    round: int
    slot: int
    position: int


@with_settings
def stream(
    pair: Pair,
    prompt: Any = None,
    *,
    messages: Any = None,
    template_variables: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    example_id: int = 0,
    stop_ids: Sequence[int] | None = None,
    **settings: Unpack[SettingsDict],
) -> Iterator[StreamedToken]:
    """Streams the tokens that `decode` would return for one prompt, as they are committed.

    Nothing is computed before the first token is requested, and a caller may drop the iterator before its end. The
    function compiles once for each combination of models, method, padded prompt length and `max_new_tokens`. Other
    values of α, temperature or seed compile nothing.

    Args:
        pair: the models, from `load_pair` or made by hand.
        prompt: one text, or one list of token ids.
        messages: in place of a prompt, one conversation, as in `decode`.
        template_variables: further variables of the chat template, as in `decode`.
        max_new_tokens: the largest number of tokens to generate.
        seed: the random seed.
        example_id: determines the random bits, together with the seed; `decode` gives its first prompt the id 0.
        stop_ids: ids that end the output, as in `decode`.
        settings: the method, its rule and drafters, and sampling, as in `decode`.

    Returns:
        An iterator over `StreamedToken`.

    Raises:
        ValueError: an argument is invalid, there are several prompts, or the method runs more than one generation. The
            call itself raises it, before anything is compiled.
        FloatingPointError: logits are NaN; raised when the iterator reaches them.

    Examples:
        >>> import speccascade_jax as sc
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> for token in sc.stream(pair, [1, 2], method="chow", alpha=0.5, block_size=3, max_new_tokens=6):
        ...     print(token.round, token.source, token.id)
        0 replaced 1
        1 draft 6
        1 draft 3
        1 replaced 6
        2 draft 0
        2 draft 1
    """
    check_pair(pair)
    pair, prompt, _ = read_prompts(pair, prompt, messages, template_variables)
    decoder = decoder_for(pair, "stream", settings, stop_ids)
    longest = check_length(max_new_tokens, decoder.settings)
    decoder.require_engine()
    padded = make_prompt(pair, prompt, max_new_tokens=longest)
    rows = padded.tokens.shape[0]
    if rows != 1:
        raise ValueError(f"stream takes one prompt, not {rows}: give one text or one list of ids, or call decode")
    decoder.controls(1)  # checks the numbers in the settings
    decoder.method.warn_of_alpha(decoder.settings, pair.target.model.vocab_size)
    rounds = _rounds(decoder, padded, check_seed(seed), check_example_ids([example_id], 1), longest)
    return _tokens(rounds, pair.vocabulary, decoder.method.draft_alone, decoder_context(padded)[0])


class _Round(NamedTuple):
    """The results of a round that are copied to the host.

    Attributes:
        tokens: the committed tokens of the round.
        sources: the sources of these tokens, as indices into `SOURCES`.
        done: whether it was the last round.
        failed_at: int `[1, 2]`, the positions of the first non-finite logits of target and draft, -1 if there are none.
    """

    tokens: list[int]
    sources: list[int]
    done: bool
    failed_at: np.ndarray


def _rounds(decoder: Decoder, prompt: Prompt, seed: int, ids: np.ndarray, longest: int) -> Iterator[_Round]:
    """Yields rounds until the row is done; the device runs the next round while the caller handles the previous one."""
    engine, controls, params = decoder.require_engine(), decoder.controls(1), decoder.ready(prompt, longest)
    with decoder.compiling("stream", prompt, longest):
        state = _init(engine, params, prompt, argument(seed, np.uint32), argument(ids, np.int32), longest)
        step: _Step = partial(_step, engine)
        if platforms.platform() == "tpu":
            step, state = _with_free_layout(decoder, params, state, controls)
        state, seen = step(params, state, controls)
    while True:
        turn = _unpack(np.asarray(seen))
        if not turn.done:
            state, seen = step(params, state, controls)
        yield turn
        if turn.done:
            return


@partial(jax.jit, static_argnames=("engine", "max_new_tokens"))
def _init(
    engine: Engine, params: Params, prompt: Prompt, seed: Array, example_ids: Array, max_new_tokens: int
) -> DecodeState:
    return engine.init(params, prompt, rngs.root(seed), example_ids, max_new_tokens)


_Step = Callable[[Params, DecodeState, Controls], tuple[DecodeState, Array]]


def _one_round(engine: Engine, params: Params, state: DecodeState, controls: Controls) -> tuple[DecodeState, Array]:
    """Runs one round; returns the state, and the round's results in one array, int32 `[4 + 2 (G + 1)]`.

    The array holds the number of committed tokens, whether the row is done, two positions of failures, the tokens and
    their sources; `_unpack` reads it. The distributions of the round are not returned, so XLA does not keep them.
    """
    state, turn = one_round(engine, params, state, controls)
    head = jnp.stack([turn.num_new[0], state.done[0].astype(jnp.int32), *state.failed_at[0]])
    return state, jnp.concatenate([head, turn.tokens[0], turn.source[0]])


_step = partial(jax.jit, static_argnames="engine", donate_argnames="state")(_one_round)


def _with_free_layout(
    decoder: Decoder, params: Params, state: DecodeState, controls: Controls
) -> tuple[_Step, DecodeState]:
    """Returns the program of `_free_round`, compiled on first use, and the state in that program's memory layout."""
    key = tuple(leaf.shape for leaf in jax.tree.leaves(state))
    if key not in decoder.rounds:
        compiled = _free_round(decoder.require_engine(), params, state, controls)
        decoder.rounds[key] = compiled, jax.jit(lambda state: state, out_shardings=compiled.input_formats[0][1])
    compiled, laid_out = decoder.rounds[key]
    return compiled, laid_out(state)


def _free_round(engine: Engine, params: Params, state: DecodeState, controls: Controls) -> jax.stages.Compiled:
    """Compiles `_one_round` and lets XLA choose the memory layout of the state, the same before and after a round.

    With JAX's default layout, a TPU would copy the cached values of attention heads of size 128 and more at the
    beginning and at the end of every round.
    """
    free = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    step = jax.jit(
        partial(_one_round, engine), in_shardings=(None, free, None), out_shardings=(free, None), donate_argnums=1
    )
    return step.lower(params, shapes, controls).compile()


def _unpack(seen: np.ndarray) -> _Round:
    number, done, *failed_at = seen[:4].tolist()
    tokens, sources = seen[4:].reshape(2, -1)[:, :number].tolist()
    return _Round(tokens, sources, bool(done), np.asarray([failed_at]))


def _tokens(
    rounds: Iterator[_Round], vocabulary: TextVocabulary | None, draft_alone: bool, after: Ids = ()
) -> Iterator[StreamedToken]:
    """Yields the tokens of the rounds one by one, with their text; `after` holds the ids that the output continues."""
    ids: list[int] = []
    shown = ""
    for number, turn in enumerate(rounds):
        raise_if_failed(failures(turn.failed_at, model_names(draft_alone)))
        for slot, (token, source) in enumerate(zip(turn.tokens, turn.sources, strict=True)):
            ids.append(token)
            last = turn.done and slot + 1 == len(turn.tokens)
            text = "" if vocabulary is None else settled(vocabulary.decode(ids, after=after), last)[len(shown) :]
            shown += text
            name = "draft" if draft_alone else SOURCES[source]
            yield StreamedToken(token, text, name, number, slot, position=len(ids) - 1)


def compilations() -> int:
    """Returns how many programs `stream` has compiled in this process.

    There are two programs for each engine, padded prompt length and `max_new_tokens`: one reads the prompt, and one
    runs a round. On a TPU, only the first of them is counted.
    """
    return _init._cache_size() + _step._cache_size()  # type: ignore[attr-defined]

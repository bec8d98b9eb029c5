"""The public functions `decode` and `target_law`."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.checks import check_example_ids, check_seed
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import law_pair_of
from speccascade_jax.core.transfers import fetch
from speccascade_jax.core.types import Array, Controls, Prompt
from speccascade_jax.data.vocabularies.vocabulary import Ids, added_texts
from speccascade_jax.engine.counters import summarise
from speccascade_jax.engine.generate import Failure, Generation, failures, model_names, raise_if_failed
from speccascade_jax.methods.build import check_pair, decoder_for
from speccascade_jax.methods.build_drafter import check_length, threshold_text
from speccascade_jax.methods.method import Decoder
from speccascade_jax.methods.settings import with_settings
from speccascade_jax.methods.settings_dict import SettingsDict
from speccascade_jax.pairs.chat import read_prompts
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import decoder_context, make_prompt
from speccascade_jax.results.store.trace import Trace, Traces
from speccascade_jax.results.store.trace import read as read_trace
from speccascade_jax.rules import deferral
from speccascade_jax.rules.rule import Rule, checked_alpha


@dataclass(frozen=True)
class DecodeOutput:
    """The output of `decode`, in host memory.

    Attributes:
        texts: the decoded outputs; `None` for a pair without a vocabulary. For a decoder-only pair each text continues
            its prompt, spaces included.
        tokens: int32 `[B, max_new_tokens]`, 0 after the end.
        lengths: int32 `[B]`, the number of tokens in each row, including a stop id.
        stats: the measures that docs/methods.md, section 9, defines, over the rows that did not fail; `stats["rows"]`
            holds the counters of each row.
        failed: for each row with NaN or infinite logits, the row, the model and the position
            (`engine.generate.Failure`); the row's output ends there. Empty if no row failed.
        generation: the raw result, with all counters (`engine.generate.Generation`).
        trace: if requested, for each row the tokens that were proposed, kept and rejected, with their probabilities
            (`results.store.trace.Trace`); a notebook shows a trace in colours.

    Examples:
        >>> import speccascade_jax as sc
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> output = sc.decode(pair, [[1, 2], [3]], method="chow", alpha=0.5, block_size=3, max_new_tokens=6)
        >>> output
        DecodeOutput of 2 rows: 12 tokens, 2.40 per target call, 73% of drafts accepted, 5 target calls, 16 draft steps
          [1, 6, 3, 6, 0, 1]
          [0, 2, 6, 0, 7, 4]
        >>> output.tokens.shape, output.lengths.tolist(), output.failed
        ((2, 6), [6, 6], ())
        >>> output.stats["kept"], output.stats["rejected"], round(output.stats["acceptance_rate"], 2)
        (8, 3, 0.73)
    """

    texts: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    stats: dict[str, Any]
    generation: Generation
    failed: tuple[Failure, ...] = ()
    trace: Traces | None = None

    def __repr__(self) -> str:
        """Returns the main counts in one line, then the first rows' texts, or their tokens, each cut to one line."""
        rows, failures = len(self.lengths), len(self.failed)
        begin = f"DecodeOutput of {rows} {'row' if rows == 1 else 'rows'}"
        counts = [f"{failures} failed"] * bool(failures) + [*_counts(self.stats)]
        shown = [_in_one_line(self.texts[row] if self.texts else self._ids(row)) for row in range(min(rows, _FEW_ROWS))]
        more = [f"… and {rows - _FEW_ROWS} more"] * (rows > _FEW_ROWS)
        return "\n  ".join([f"{begin}: {', '.join(counts)}", *shown, *more])

    def _ids(self, row: int) -> list[int]:
        ids: list[int] = self.tokens[row, : self.lengths[row]].tolist()
        return ids


_FEW_ROWS, _LINE = 5, 78
"""Numbers of rows, and of characters of a row, that the text of a `DecodeOutput` shows."""
_SHOWN = {
    "committed": "{} tokens",
    "block_efficiency": "{:.2f} per target call",
    "acceptance_rate": "{:.0%} of drafts accepted",
    "target_calls": "{} target calls",
    "draft_steps": "{} draft steps",
}
"""Measures that the text of a `DecodeOutput` shows, with their formats."""


def _in_one_line(value: Any) -> str:
    """Returns a value's text; a text of more than `_LINE` characters ends early."""
    text = repr(value)
    return text if len(text) <= _LINE else f"{text[: _LINE - 1]}…"


def _counts(stats: Mapping[str, Any]) -> Iterator[str]:
    """Yields the measures of `_SHOWN` as texts, except undefined ones: without drafts there is no acceptance rate."""
    for name, form in _SHOWN.items():
        if stats.get(name) is not None:
            yield form.format(stats[name])


@with_settings
def decode(
    pair: Pair,
    prompts: Any = None,
    *,
    messages: Any = None,
    template_variables: Mapping[str, Any] | None = None,
    max_new_tokens: int = 64,
    seed: int = 0,
    example_ids: Any = None,
    stop_ids: Sequence[int] | None = None,
    trace: bool = False,
    **settings: Unpack[SettingsDict],
) -> DecodeOutput:
    """Generates tokens for prompts with a draft and a target model, by the method and the rule in the settings.

    Args:
        pair: the models, from `load_pair` or made by hand.
        prompts: texts (`prompts.text_ids` converts them to ids), or token ids: `[B, P]` or a list of lists (a flat list
            is a single prompt).
        messages: in place of prompts, a conversation (a list of `{"role": "user", "content": "text"}`) or a list of
            conversations. The chat template that is stored beside the tokenizer turns each of them into a prompt, as
            `apply_chat_template` of transformers does. The token that ends a turn becomes a stop id.
        template_variables: further variables of the chat template, such as `{"enable_thinking": False}`.
        max_new_tokens: the largest number of tokens to generate.
        seed: the random seed; the random bits of a row depend only on the seed and its example id.
        example_ids: `[B]`, default `0 … B − 1`; rows with the same id have the same random bits.
        stop_ids: ids that end a row; by default those of the vocabulary, or none without a vocabulary. With `messages`,
            the token that the chat template writes after an answer also ends a row (`ChatTemplate.end_of_turn`).
        trace: whether to return a trace for every row; the tokens are the same, and the call takes longer.
        settings: the method, its rule and drafters, and sampling; `help(speccascade_jax.extend.Settings)` describes
            each setting.

    Returns:
        A `DecodeOutput`.

    Raises:
        ValueError: an argument is invalid; the message names it and the remedy, and nothing has been compiled yet.
        TypeError: a setting is unknown.
        FloatingPointError: logits are NaN in every row; the message names the model, the row and the position. If only
            some rows fail, the call warns, returns all rows, and lists these in `failed`.

    Examples:
        >>> import speccascade_jax as sc
        >>> pair = sc.Pair(target=sc.FakeLM(8), draft=sc.FakeLM(8, noise=0.5, seed=1))
        >>> for alpha in (0.0, 0.5, 0.9):  # one program for all; at 0 the target alone decides
        ...     output = sc.decode(pair, [[1, 2], [3]], method="chow", alpha=alpha, block_size=3, max_new_tokens=6)
        ...     print(output.tokens.tolist(), output.stats["target_calls"])
        [[1, 6, 3, 6, 0, 3], [0, 2, 5, 6, 5, 7]] 5
        [[1, 6, 3, 6, 0, 1], [0, 2, 6, 0, 7, 4]] 5
        [[3, 2, 7, 4, 5, 6], [0, 2, 6, 0, 7, 1]] 4
    """
    check_pair(pair)
    pair, prompts, shown = read_prompts(pair, prompts, messages, template_variables)
    decoder = decoder_for(pair, "decode", settings, stop_ids)
    longest = check_length(max_new_tokens, decoder.settings)
    prompt = make_prompt(pair, prompts, max_new_tokens=longest)
    rows = prompt.tokens.shape[0]
    decoder.controls(rows)  # checks the numbers in the settings
    decoder.method.warn_of_alpha(decoder.settings, pair.target.model.vocab_size)
    ids = check_example_ids(example_ids, rows)
    generation = (decoder.fetch_traced if trace else decoder.fetch)(prompt, check_seed(seed), ids, longest)
    output = _output(pair, generation, prompt, decoder.method.draft_alone)
    return replace(output, trace=_traces(decoder, prompt, shown, generation)) if trace else output


def _traces(decoder: Decoder, prompt: Prompt, prompts: Any, generation: Generation) -> Traces:
    """Builds a trace for each row from the recorded generation."""
    vocabulary, contexts, method = decoder.pair.vocabulary, decoder_context(prompt), decoder.method
    prompt_texts = [prompts] if isinstance(prompts, str) else [p if isinstance(p, str) else "" for p in prompts]
    threshold = threshold_text(method, decoder.settings)

    def texts(context: Ids, ids: list[int], before: list[int]) -> list[str]:
        return [f" {n}" for n in ids] if vocabulary is None else added_texts(vocabulary, ids, [*context, *before])

    def trace(row: int, context: Ids) -> Trace:
        prompt_text = prompt_texts[row] if row < len(prompt_texts) else ""
        pieces = partial(texts, context)
        return read_trace(
            generation.record, row, pieces, prompt=prompt_text, threshold=threshold, alone=method.draft_alone
        )

    return Traces(trace(row, context) for row, context in enumerate(contexts))


def collect(
    pair: Pair, generation: Generation, prompt: Prompt | None = None, *, draft_alone: bool = False
) -> DecodeOutput:
    """Returns a generation as a `DecodeOutput` on the host, with texts if the pair has a vocabulary.

    Args:
        pair: the models.
        generation: the raw result of `engine.generate.generate`.
        prompt: the prompts that the generation continues; without them, texts are decoded as if there were no prompt.
        draft_alone: whether the draft wrote alone.

    Raises:
        FloatingPointError: logits are NaN in every row.
    """
    return _output(pair, fetch(generation), prompt, draft_alone)


def _output(pair: Pair, generation: Generation, prompt: Prompt | None, draft_alone: bool) -> DecodeOutput:
    """Builds a `DecodeOutput` from a generation that is already on the host."""
    tokens, lengths = np.asarray(generation.tokens), np.asarray(generation.lengths)
    failed = failures(generation.failed_at, model_names(draft_alone))
    if len(failed) == len(tokens):
        raise_if_failed(failed)
    if failed:
        warnings.warn(
            f"{len(failed)} of {len(tokens)} rows failed and end early (DecodeOutput.failed): {failed[0]}", stacklevel=3
        )
    texts = None
    if pair.vocabulary is not None:
        begins: list[Ids] = [()] * len(tokens) if prompt is None else decoder_context(prompt)
        rows = zip(tokens.tolist(), lengths.tolist(), begins, strict=True)
        texts = [pair.vocabulary.decode(row[:n], after=begin) for row, n, begin in rows]
    well = np.delete(np.arange(len(tokens)), [failure.row for failure in failed]) if failed else None
    measured = summarise(generation.stats, lengths, rows=well, draft_alone=draft_alone)
    measured["rows"] = dict(vars(generation.stats))
    return DecodeOutput(texts, tokens, lengths, measured, generation, failed)


def target_law(
    rule: str | Rule,
    q_logits: Any,
    p_logits: Any,
    *,
    alpha: Any = None,
    temperature: Any = 1.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    draft_temperature: Any = None,
) -> Array:
    """Returns `π`, the distribution of the tokens that decoding under a rule generates.

    Args:
        rule: a rule's name, or a `Rule`.
        q_logits: `[..., V]`, raw logits of the draft.
        p_logits: `[..., V]`, raw logits of the target.
        alpha: a number, or an array with the shape of the leading axes of the logits.
        temperature: a number, as in `decode`.
        top_p: a number, as in `decode`.
        top_k: a number, as in `decode`.
        draft_temperature: a number, as in `decode`; `None`: the same as `temperature`.

    Returns:
        float32 `[..., V]`.

    Raises:
        ValueError: an argument is invalid.
        FloatingPointError: logits are NaN or infinite; the message names the model.

    Examples:
        >>> import numpy as np
        >>> import speccascade_jax as sc
        >>> q, p = np.log([0.5, 0.3, 0.2]), np.log([0.1, 0.2, 0.7])
        >>> for alpha in (0.1, 0.9):  # Chow's rule defers to the target if max q < 1 - α
        ...     print(np.asarray(sc.target_law("chow", q, p, alpha=alpha)).round(2))
        [0.1 0.2 0.7]
        [0.5 0.3 0.2]
    """
    chosen = deferral.get(rule)
    q_logits, p_logits = jnp.asarray(q_logits, jnp.float32), jnp.asarray(p_logits, jnp.float32)
    if q_logits.shape != p_logits.shape:
        raise ValueError(f"q_logits have shape {q_logits.shape} and p_logits {p_logits.shape}: pass equal shapes")
    for name, logits in (("draft", q_logits), ("target", p_logits)):
        # A position whose largest logit is not finite is an error, as in `decode`. A logit of -inf beside finite ones
        # only masks a token.
        if (bad := ~np.isfinite(np.asarray(logits).max(-1, initial=-np.inf))).any():
            row = ", ".join(map(str, np.argwhere(bad)[0])) or "the only row"
            raise FloatingPointError(
                f"the {name} model's logits have NaN or infinity, or only -inf, at [{row}]: "
                "each position needs a finite largest logit"
            )
    lead = p_logits.shape[:-1]
    rows = math.prod(lead)
    chosen.check_temperatures(temperature, draft_temperature)
    alpha = np.reshape(alpha, -1) if np.ndim(alpha) and np.shape(alpha) == lead else alpha
    values = checked_alpha(chosen.alpha, f"rule {chosen.name!r}", alpha, rows)
    controls = make_controls(
        rows, alpha=values, temperature=temperature, top_p=top_p, top_k=top_k, draft_temperature=draft_temperature
    )
    q_flat, p_flat = q_logits.reshape(rows, -1), p_logits.reshape(rows, -1)
    return _target_law(chosen, q_flat, p_flat, controls).reshape(p_logits.shape)


@partial(jax.jit, static_argnames="rule")
def _target_law(rule: Rule, q_logits: Array, p_logits: Array, controls: Controls) -> Array:
    return rule.target_law(law_pair_of(q_logits, p_logits, controls), controls.alpha[:, None])

"""Conversations with a pair at batch 1: each prompt contains the answers before it, each answer is timed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from speccascade_jax.api import collect, make_prompt
from speccascade_jax.core.checks import check_seed, whole
from speccascade_jax.core.types import Array, Round
from speccascade_jax.evaluation import code_digests
from speccascade_jax.evaluation.heads import Heads
from speccascade_jax.evaluation.studies.spec_bench.questions import Conversation, Question
from speccascade_jax.evaluation.validation import warn_of_ranges
from speccascade_jax.methods.build import build
from speccascade_jax.methods.settings import Settings
from speccascade_jax.pairs.pair import Pair
from speccascade_jax.pairs.prompts import excess, stop_ids, text_ids


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer: text, generated tokens, calls of the target, seconds, and the tokens that each round committed."""

    text: str
    new_tokens: int
    target_calls: int
    seconds: float
    accept_lengths: list[int]


class ConversationTooLong(ValueError):  # noqa: N818 (no fault of anyone's: answers grow as they like)
    """A turn has no room left; says which, and how much it needs."""


def committed(turn: Round) -> Array:
    """int32 `[B]`: the tokens that a round committed."""
    return turn.num_new


class Speaker:
    """One method that holds conversations; it stops at the ends of turns that the vocabulary has as one token.

    Args:
        pair: with a vocabulary; settings: as of a point.
        conversation: how texts are written; instruction: what the system says first.
        max_new_tokens: of one answer; seed: of all randomness.

    Raises:
        ValueError: as `build` and `Method.controls`; a method that is more than one generation; a pair without a
            vocabulary.
    """

    def __init__(
        self,
        pair: Pair,
        settings: Settings,
        conversation: Conversation,
        *,
        instruction: str = "",
        max_new_tokens: int = 1024,
        seed: int = 0,
    ):
        self.pair, self.settings, self.conversation, self.instruction = pair, settings, conversation, instruction
        self.max_new_tokens, self.seed = whole("max_new_tokens", max_new_tokens, 1), check_seed(seed)
        if pair.vocabulary is None:
            raise ValueError(f"pair {pair.name!r} has no vocabulary, but Spec-Bench is text; give one to Pair.load")
        ends = stop_ids(pair.vocabulary, conversation.stop)
        heads = Heads(pair)
        heads.check([settings])
        warn_of_ranges([settings], pair.target.model.vocab_size)
        self.decoder = build(pair, settings, stop_ids=ends, head=heads.of(settings))
        self.method = self.decoder.method
        if self.decoder.engine is None:
            raise ValueError(
                f"method {self.method.name!r} decides about whole outputs, which conversations do not wait for"
            )
        self.controls = self.decoder.controls(1)
        self._compiled: set[tuple[int, ...]] = set()

    def code(self) -> str:
        """Returns the digest of the method's rule, stop policy and drafter."""
        return code_digests.digest(self.decoder, lambda: self.controls)

    def converse(self, question: Question) -> list[Turn]:
        """All turns of a question; each prompt contains the answers before it; errors as `prompt`."""
        said: list[Turn] = []
        for _ in question.turns:
            said.append(self.answer(self.prompt(question, [turn.text for turn in said]), question.question_id))
        return said

    def prompt(self, question: Question, answers: Sequence[str] = ()) -> str:
        """The text before a question's next answer.

        Raises:
            ConversationTooLong: it has more tokens than the pair takes, or than the models have positions for.
        """
        turn = len(answers) + 1
        text = self.conversation.prompt(question.turns[:turn], answers, self.instruction)
        if too_long := excess(self.pair, len(text_ids(self.pair, text)), self.max_new_tokens):
            raise ConversationTooLong(
                f"question {question.question_id} ({question.group}), turn {turn}, has {too_long}"
            )
        return text

    def answer(self, text: str, example_id: int = 0) -> Turn:
        """What the models write after `text`; compilation is not timed."""
        prompt = jax.device_put(make_prompt(self.pair, [text], max_new_tokens=self.max_new_tokens))
        inputs = prompt.tokens if prompt.encoder_tokens is None else prompt.encoder_tokens

        given: dict[str, Any] = {"controls": self.controls, "max_new_tokens": self.max_new_tokens, "record": committed}
        given |= {"example_ids": np.asarray([example_id])}
        run = partial(self.decoder.generate, prompt, self.seed, **given)
        if inputs.shape not in self._compiled:
            jax.block_until_ready(run())
            self._compiled.add(inputs.shape)
        begin = time.perf_counter()
        generation = jax.block_until_ready(run())
        seconds = time.perf_counter() - begin
        out = collect(self.pair, generation, prompt, draft_alone=self.method.draft_alone)
        assert out.texts is not None  # a pair without a vocabulary was refused
        return Turn(
            text=self.conversation.postprocess(out.texts[0]),
            new_tokens=int(out.lengths[0]),
            target_calls=int(out.stats["rows"]["target_calls"][0]),
            seconds=seconds,
            accept_lengths=np.asarray(generation.record)[: int(generation.num_rounds), 0].tolist(),
        )

"""A worker of this package: decodes ids with `sc.decode`, measures quality, and compares logits of differing tokens."""

from __future__ import annotations

from typing import Any

import jax

import speccascade_jax as sc
from benchmarks.peers.protocol import Ids, Options, serve
from speccascade_jax.core.arrays import right_pad
from speccascade_jax.data.tasks.table import get_task
from speccascade_jax.evaluation.environment import package, versions
from speccascade_jax.metrics import quality
from speccascade_jax.models import decoder, t5
from speccascade_jax.pairs.pair import Pair, load_pair
from speccascade_jax.runtime import compilation_cache

BATCH = 25
EXACT = "float32"
"""The dtype of weights if no other is requested."""


class Ours:
    """Operations of this package; keeps the pair, loaded as users load it, in each requested dtype."""

    told: dict[str, Any]

    def versions(self) -> dict[str, str]:
        """Returns the versions of this package, its revision and its dependencies."""
        revision = package()["revision"]
        return versions() | ({"revision": revision} if revision else {})

    def load(self, pair: dict[str, Any]) -> None:
        """Sets the pair; models are read at their first use."""
        self.told = pair
        self._pairs: dict[str, Pair] = {}

    def held(self, dtype: str = EXACT) -> Pair:
        """Returns the pair in a dtype, loaded by its name if it has one, else from the folders of all libraries."""
        if dtype not in self._pairs:
            folder, name = self.told["folder"], self.told["ours"]
            paths = f"{folder}/target", f"{folder}/draft"
            dtypes: dict[str, Any] = {"dtype": dtype, "draft_dtype": None}
            self._pairs[dtype] = load_pair(name, **dtypes) if name else Pair.load(*paths, **dtypes)
        return self._pairs[dtype]

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """Returns greedy outputs; options: `dtype`, and the settings of `sc.decode`."""
        settings = {"max_new_tokens": pair["new_tokens"], "stop_ids": pair["stop"], "temperature": 0.0} | options
        out = sc.decode(self.held(settings.pop("dtype")), prompts, **settings)
        rows = zip(out.tokens, out.lengths, strict=True)
        return [row[:length].tolist() for row, length in rows]

    def quality(self, options: Options, task: str, limit: int) -> dict[str, Any]:
        """Returns the quality of a task's outputs, its metric's name, and tokens per call of the target."""
        chosen = get_task(task)
        examples = chosen.load(limit=limit)
        texts: list[str] = []
        committed = calls = 0
        for start in range(0, len(examples), BATCH):
            prompts = [chosen.build_prompt(example) for example in examples[start : start + BATCH]]
            out = sc.decode(self.held(), prompts, max_new_tokens=64, temperature=0.0, **options)
            assert out.texts is not None
            texts += [chosen.postprocess(text) for text in out.texts]
            committed += out.stats["committed"]
            calls += out.stats["target_calls"]
        metric = chosen.main_metric
        score = quality.score([metric], texts, [example.reference for example in examples])[metric]
        return {"quality": score, "metric": metric, "tokens_per_call": committed / calls}

    def gaps(self, prompts: Ids, rows: Ids, others: list[int]) -> list[float]:
        """Returns, per row, the target's logit of the row's last token minus the logit of another library's token.

        Args:
            rows: our outputs up to and including the first token that differs from another library's output; others:
                the other library's tokens at these positions.
        """
        return [self._gap(*arguments) for arguments in zip(prompts, rows, others, strict=True)]

    def _gap(self, prompt: list[int], row: list[int], other: int) -> float:
        """Returns the difference of logits for one row, see `gaps`; all rows are padded alike, to share one program."""
        pair = self.held()
        model: Any = pair.target.model
        params, width, longest = pair.target.params, self.told["width"], self.told["new_tokens"]
        if pair.encoder_decoder:
            fed, position = right_pad([[0, *row[:-1]]], longest + 1), len(row) - 1
            logits = self._t5(model, params, right_pad([prompt], width), fed)
        else:
            fed, position = right_pad([[*prompt, *row[:-1]]], width + longest), len(prompt) + len(row) - 2
            logits = self._decoder(model, params, fed)
        return float(logits[0, position, row[-1]] - logits[0, position, other])

    _t5 = staticmethod(jax.jit(t5.teacher_forced_logits, static_argnums=0))
    _decoder = staticmethod(jax.jit(decoder.teacher_forced_logits, static_argnums=0))


if __name__ == "__main__":
    compilation_cache.switch_on()
    ours = Ours()
    serve(ours, {"quality": ours.quality, "gaps": ours.gaps})

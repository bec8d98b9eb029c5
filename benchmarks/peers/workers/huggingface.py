"""A worker of transformers, release 4 or 5, whichever is installed: plain, assisted by the draft, and prompt lookup."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
import transformers

from benchmarks.peers.protocol import Ids, Options, serve

LOOKUP = 10
"""The number of tokens that prompt lookup proposes, as in the example of transformers' documentation."""


class HuggingFace:
    """Operations of transformers; keeps the target and the draft in each requested dtype."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of transformers and torch."""
        return {name: metadata.version(name) for name in ("transformers", "torch")}

    def load(self, pair: dict[str, Any]) -> None:
        """Sets the pair; a model is read at its first use."""
        self._folder, self._family = pair["folder"], pair["family"]
        self._models: dict[tuple[str, str], Any] = {}

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """Returns greedy outputs; options: `dtype`, `mode`, `tokens`, `mended`.

        `tokens` is the block size (`None`: the library's default), and `mended` lists the models whose caches are
        patched (see the function `mended`).
        """
        target = self._model("target", options["dtype"])
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": pair["new_tokens"], "pad_token_id": 0}
        settings["eos_token_id"] = pair["stop"]
        if options["mode"] == "assisted":
            settings["assistant_model"] = self._assistant(options)
        elif options["mode"] == "lookup":
            settings["prompt_lookup_num_tokens"] = options["tokens"] or LOOKUP
        ids = self._padded(prompts)
        with torch.inference_mode(), mended([self._model(name, options["dtype"]) for name in options["mended"]]):
            out = target.generate(ids, attention_mask=(ids != 0).long(), **settings)
        first = 1 if self._family == "t5" else ids.shape[1]
        rows: Ids = out[:, first:].tolist()
        return rows

    def _assistant(self, options: Options) -> Any:
        """Returns the draft with a constant block size and no early stop, or with the library's default schedule."""
        draft = self._model("draft", options["dtype"])
        generation_config = copy.deepcopy(self._defaults)
        if options["tokens"] is not None:
            generation_config.num_assistant_tokens = options["tokens"]
            generation_config.num_assistant_tokens_schedule = "constant"
            generation_config.assistant_confidence_threshold = 0.0
        draft.generation_config = generation_config
        return draft

    def _padded(self, prompts: Ids) -> torch.Tensor:
        """Pads prompts on the right for an encoder, on the left for a decoder; 0 is padding."""
        width = max(map(len, prompts))
        sides = [(row, [0] * (width - len(row))) for row in prompts]
        return torch.tensor([row + pad if self._family == "t5" else pad + row for row, pad in sides])

    def _model(self, which: str, dtype: str) -> Any:
        if (which, dtype) not in self._models:
            kind = {"t5": "T5ForConditionalGeneration", "llama": "LlamaForCausalLM"}[self._family]
            folder, loaded = f"{self._folder}/{which}", getattr(transformers, kind)
            model = loaded.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            self._models[which, dtype] = model
            if which == "draft":
                self._defaults = copy.deepcopy(model.generation_config)
        return self._models[which, dtype]


@contextlib.contextmanager
def mended(models: Sequence[Any]) -> Iterator[None]:
    """Patches transformers, so that the cache of a T5 has as many layers as the T5's decoder.

    Both releases make a cache of `config.num_hidden_layers` layers from the whole model's configuration, and a T5's
    `num_hidden_layers` is that of its encoder. If the decoder has more layers, its last layers find no cache entry
    (IndexError; release 4 does not use the configuration when it verifies drafts). If the decoder has fewer layers,
    some entries of the cache are never filled.
    """
    configs = [model.config for model in models]
    kind: Any = transformers.T5Config
    original = kind.get_text_config

    def decoders(self: Any, *args: Any, **named: Any) -> Any:
        config = original(self, *args, **named)
        if not named.get("decoder") or not any(self is known for known in configs):
            return config
        if id(config) not in _DECODERS:
            decoder_config = copy.copy(config)
            decoder_config.num_layers = config.num_decoder_layers
            _DECODERS[id(config)] = config, decoder_config  # keeps both alive: the id of a dead object can be reused
        return _DECODERS[id(config)][1]

    kind.get_text_config = decoders
    try:
        yield
    finally:
        kind.get_text_config = original


_DECODERS: dict[int, tuple[Any, Any]] = {}


if __name__ == "__main__":
    serve(HuggingFace())

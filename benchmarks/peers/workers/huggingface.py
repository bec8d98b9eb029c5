"""transformers, release 4 or 5, whichever is installed: plain, assisted by the draft, and prompt lookup."""

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
"""Candidates of prompt lookup, as the documentation's example has them."""


class HuggingFace:
    """Target and draft in each dtype that was asked for."""

    def versions(self) -> dict[str, str]:
        """transformers' and torch's."""
        return {name: metadata.version(name) for name in ("transformers", "torch")}

    def load(self, pair: dict[str, Any]) -> None:
        """Nothing is read before it is needed."""
        self._folder, self._family = pair["folder"], pair["family"]
        self._models: dict[tuple[str, str], Any] = {}

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """As in the protocol; options: `dtype`, `mode`, `tokens` (the block, `None` for the library's own),
        `mended` (the models whose caches are, see `mended`).
        """
        target = self._model("target", options["dtype"])
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": pair["new_tokens"], "pad_token_id": 0}
        settings["eos_token_id"] = pair["stop"]
        if options["mode"] == "assisted":
            settings["assistant_model"] = self._assistant(options)
        elif options["mode"] == "lookup":
            settings["prompt_lookup_num_tokens"] = options["tokens"] or LOOKUP
        ids = self._padded(prompts)
        with torch.inference_mode(), mended([self._model(which, options["dtype"]) for which in options["mended"]]):
            out = target.generate(ids, attention_mask=(ids != 0).long(), **settings)
        first = 1 if self._family == "t5" else ids.shape[1]
        rows: Ids = out[:, first:].tolist()
        return rows

    def _assistant(self, options: Options) -> Any:
        """The draft with a constant block and without the rule that ends it early, or as the library has it."""
        draft = self._model("draft", options["dtype"])
        own = copy.deepcopy(self._defaults)
        if options["tokens"] is not None:
            own.num_assistant_tokens = options["tokens"]
            own.num_assistant_tokens_schedule = "constant"
            own.assistant_confidence_threshold = 0.0
        draft.generation_config = own
        return draft

    def _padded(self, prompts: Ids) -> torch.Tensor:
        """Right-padded for an encoder, left-padded for a decoder; 0 is padding."""
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
    """Let the caches of T5s have as many layers as their decoders.

    Both releases make a cache of `config.num_hidden_layers` layers from the whole model's configuration, and a T5's
    `num_hidden_layers` is the encoder's. Where the decoder has more, its last layers have no place (IndexError; release
    4 leaves the configuration out where it verifies drafts); where it has fewer, layers are left that are never filled.
    """
    configs = [model.config for model in models]
    kind: Any = transformers.T5Config
    original = kind.get_text_config

    def decoders(self: Any, *args: Any, **named: Any) -> Any:
        config = original(self, *args, **named)
        if not named.get("decoder") or not any(self is other for other in configs):
            return config
        if id(config) not in _DECODERS:
            held = copy.copy(config)
            held.num_layers = config.num_decoder_layers
            _DECODERS[id(config)] = config, held  # both: an id is an object's as long as that lives
        return _DECODERS[id(config)][1]

    kind.get_text_config = decoders
    try:
        yield
    finally:
        kind.get_text_config = original


_DECODERS: dict[int, tuple[Any, Any]] = {}


if __name__ == "__main__":
    serve(HuggingFace())

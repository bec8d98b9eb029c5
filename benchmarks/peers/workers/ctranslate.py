"""A worker of CTranslate2, whose own converter reads the common model folders; the library has no speculation."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter

from benchmarks.peers.protocol import Ids, Options, serve


class Names:
    """A replacement for a tokenizer: a token's name is its id, as text."""

    pad_token, eos_token, unk_token, bos_token = "0", "1", "0", "0"

    def __init__(self, size: int):
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        """Returns name -> id."""
        return {str(n): n for n in range(self._size)}

    def convert_ids_to_tokens(self, token: int) -> str:
        """Returns a token's name."""
        return str(token)


class Converter(TransformersConverter):
    """The library's converter, for models without a tokenizer."""

    size = 0

    def load_model(self, kind: Any, path: str, **settings: Any) -> Any:
        """Returns the model and keeps the size of its vocabulary for the names."""
        model = super().load_model(kind, path, **settings)
        self.size = model.config.vocab_size
        return model

    def load_tokenizer(self, kind: Any, path: str, **settings: Any) -> Names:
        """Returns names for ids."""
        return Names(self.size)


class CTranslate:
    """Operations of CTranslate2; keeps one target per dtype of weights and number of threads."""

    def versions(self) -> dict[str, str]:
        """Returns CTranslate2's version."""
        return {"ctranslate2": metadata.version("ctranslate2")}

    def load(self, pair: dict[str, Any]) -> None:
        """Sets the pair; a model is converted at its first use."""
        self._folder, self._t5 = Path(pair["folder"]), pair["family"] == "t5"
        self._models: dict[tuple[str, int], Any] = {}

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """Returns greedy outputs; options: `dtype` ("float32" or "int8"), `threads`."""
        model, tokens = self._model(options["dtype"], options["threads"]), [list(map(str, row)) for row in prompts]
        if self._t5:
            results = model.translate_batch(
                tokens,
                beam_size=1,
                max_decoding_length=pair["new_tokens"],
                end_token=pair["stop"],
                return_end_token=True,
            )
            return [[int(name) for name in result.hypotheses[0]] for result in results]
        results = model.generate_batch(
            tokens,
            beam_size=1,
            max_length=pair["new_tokens"],
            include_prompt_in_result=False,
            end_token=pair["stop"],
            return_end_token=True,
        )
        return [list(result.sequences_ids[0]) for result in results]

    def _model(self, dtype: str, threads: int) -> Any:
        if (dtype, threads) not in self._models:
            folder = self._folder / f"ctranslate2_{dtype}"
            if not folder.exists():
                Converter(str(self._folder / "target")).convert(str(folder), quantization=dtype)
            kind = ctranslate2.Translator if self._t5 else ctranslate2.Generator
            self._models[dtype, threads] = kind(
                str(folder), device="cpu", compute_type=dtype, intra_threads=threads, inter_threads=1
            )
        return self._models[dtype, threads]


if __name__ == "__main__":
    serve(CTranslate())

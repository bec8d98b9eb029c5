"""A worker of llama.cpp through its C interface, without speculation: one call for all prompts, then one per token."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.peers import gguf_file
from benchmarks.peers.protocol import Ids, Options, serve

ROWS = 32
"""The number of sequences for which a context has room; unused sequences cost only memory."""


class LlamaCpp:
    """Operations of llama.cpp; keeps the target in each requested dtype of weights."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def versions(self) -> dict[str, str]:
        """Returns the versions of the bindings, which include llama.cpp itself."""
        return {"llama-cpp-python": metadata.version("llama-cpp-python"), "gguf": metadata.version("gguf")}

    def load(self, pair: dict[str, Any]) -> None:
        """Sets the pair and frees the previous one; a model is converted at its first use."""
        for context, model in getattr(self, "_contexts", {}).values():
            llama_cpp.llama_free(context)
            llama_cpp.llama_model_free(model)
        self._folder, self._contexts = Path(pair["folder"]), dict[tuple[str, int], tuple[Any, Any]]()

    def write(self, options: Options, prompts: Ids, pair: dict[str, Any]) -> Ids:
        """Returns greedy outputs; options: `dtype` (of `gguf_file.TYPES`), `threads`."""
        longest = max(map(len, prompts)) + pair["new_tokens"]
        context = self._context(options["dtype"], len(prompts), longest)
        llama_cpp.llama_set_n_threads(context, options["threads"], options["threads"])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
        try:
            return self._rows(context, batch, prompts, pair)
        finally:
            llama_cpp.llama_batch_free(batch)

    def _rows(self, context: Any, batch: Any, prompts: Ids, pair: dict[str, Any]) -> Ids:
        out: Ids = [[] for _ in prompts]
        ends = self._feed(context, batch, [list(enumerate(prompt)) for prompt in prompts])
        for step in range(pair["new_tokens"]):
            for row, end in enumerate(ends):
                out[row].append(llama_cpp.llama_sampler_sample(self._sampler, context, end))
            if all(any(token in pair["stop"] for token in row) for row in out):
                break
            if step + 1 < pair["new_tokens"]:
                fed = [[(len(prompt) + step, row[-1])] for prompt, row in zip(prompts, out, strict=True)]
                ends = self._feed(context, batch, fed)
        return out

    @staticmethod
    def _feed(context: Any, batch: Any, rows: list[list[tuple[int, int]]]) -> list[int]:
        """Feeds lists of (position, token), one per row; returns the index of each row's last logits."""
        index, ends = 0, []
        for number, row in enumerate(rows):
            for position, token in row:
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, number
                batch.logits[index] = position == row[-1][0]
                index += 1
            ends.append(index - 1)
        batch.n_tokens = index
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        return ends

    def _context(self, dtype: str, rows: int, longest: int) -> Any:
        if (dtype, rows) not in self._contexts:
            file = self._folder / f"target_{dtype}.gguf"
            if not file.exists():
                gguf_file.write(self._folder / "target", file, dtype)
            model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
            settings = llama_cpp.llama_context_default_params()
            settings.n_seq_max = rows
            settings.n_ctx = rows * -(-longest // 256) * 256
            settings.n_batch = settings.n_ubatch = settings.n_ctx
            self._contexts[dtype, rows] = (llama_cpp.llama_init_from_model(model, settings), model)
        return self._contexts[dtype, rows][0]


if __name__ == "__main__":
    serve(LlamaCpp())

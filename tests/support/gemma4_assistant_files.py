"""Folders of random Gemma 4 assistants and their targets, in the format of transformers.

The names are written here a second time on purpose: an error in the package's tables must not appear here too.
"""

from pathlib import Path

import numpy as np

from tests.support import huggingface_files

KIND = "gemma4"
"""Kind of the assistants' target (`huggingface_files.KINDS`)."""
TARGET = huggingface_files.KINDS[KIND]
ROWS = TARGET.num_embeddings
WIDTH, UNITS, CLUSTERS, ACTIVE = 12, 20, ROWS, 10


def entries(text=(), **changes) -> dict:
    """Returns `config.json`; `text` changes entries of the layers. An entry changed to `None` is left out."""
    layers = huggingface_files.entries(KIND) | {
        "model_type": "gemma4_text", "vocab_size": ROWS, "hidden_size": WIDTH, "intermediate_size": UNITS,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False,
    }  # fmt: skip
    whole = {
        "model_type": "gemma4_assistant", "backbone_hidden_size": TARGET.d_model, "use_ordered_embeddings": True,
        "num_centroids": CLUSTERS, "centroid_intermediate_top_k": ACTIVE, "tie_word_embeddings": True,
        "text_config": {key: value for key, value in (layers | dict(text)).items() if value is not None},
    }  # fmt: skip
    return {key: value for key, value in (whole | changes).items() if value is not None}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors."""
    rng, size = np.random.default_rng(seed), (TARGET.head_dim, TARGET.global_head_dim)
    shapes = {
        "model.embed_tokens": (ROWS, WIDTH), "pre_projection": (WIDTH, 2 * TARGET.d_model),
        "post_projection": (TARGET.d_model, WIDTH), "masked_embedding.centroids": (CLUSTERS, WIDTH),
    }  # fmt: skip
    norms = ["model.norm"]
    drawn = {}
    for number in range(2):
        layer, heads = f"model.layers.{number}", TARGET.num_heads * size[number]
        shapes |= {f"{layer}.self_attn.q_proj": (heads, WIDTH), f"{layer}.self_attn.o_proj": (WIDTH, heads)}
        shapes |= {f"{layer}.mlp.{name}_proj": (UNITS, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (WIDTH, UNITS), f"{layer}.self_attn.q_norm": (size[number],)}
        norms += [f"{layer}.{name}_layernorm" for name in ("input", "post_attention")]
        norms += [f"{layer}.{name}_feedforward_layernorm" for name in ("pre", "post")]
        drawn[f"{layer}.layer_scalar"] = np.ones(1, np.float32)
    shapes |= {name: (WIDTH,) for name in norms}
    drawn |= {f"{name}.weight": rng.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    return drawn | {"masked_embedding.token_ordering": rng.permutation(ROWS)}


def write(folder: Path, config: dict | None = None, arrays: dict[str, np.ndarray] | None = None) -> Path:
    """Writes an assistant's folder and returns it."""
    return huggingface_files.write(folder, config or entries(), tensors() if arrays is None else arrays)


def write_target(folder: Path) -> Path:
    """Writes the folder of the assistants' target."""
    arrays = huggingface_files.tensors(KIND, huggingface_files.random_parameters(KIND))
    arrays = {name: array / 4 if array.ndim > 1 else array for name, array in arrays.items()}
    return huggingface_files.write(folder, huggingface_files.entries(KIND), arrays)

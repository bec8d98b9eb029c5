"""Folders of random EAGLE-3 heads, in the format of speculators or of EAGLE's authors.

The names are written here a second time on purpose: an error in the package's tables must not appear here too.
"""

from pathlib import Path

import numpy as np

from tests.support import huggingface_files

KIND = "llama2"
"""Kind of the heads' target (`huggingface_files.KINDS`)."""
TARGET = huggingface_files.KINDS[KIND]
DRAFTED = tuple(range(1, TARGET.num_embeddings, 2))
WIDTH, HEADS, UNITS, LAYERS = 16, 2, 24, (1, 2, 4)


def entries(**changes) -> dict:
    """Returns `config.json` as speculators writes it; an entry changed to `None` is left out."""
    layer = {
        "model_type": "llama", "vocab_size": TARGET.num_embeddings, "hidden_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": WIDTH // HEADS, "intermediate_size": UNITS,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    inner = {key: changes.pop(key) for key in list(changes) if key in layer}
    whole = {
        "speculators_model_type": "eagle3", "draft_vocab_size": len(DRAFTED), "target_hidden_size": TARGET.d_model,
        "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "transformer_layer_config": layer | inner,
    }  # fmt: skip
    return {key: value for key, value in (whole | changes).items() if value is not None}


def authors_entries(**changes) -> dict:
    """Returns `config.json` as EAGLE's authors write it."""
    ours = entries(speculators_model_type=None, eagle_aux_hidden_state_layer_ids=None, norm_before_residual=None)
    return ours.pop("transformer_layer_config") | ours | changes


def tensors(first: str = "layers.0", seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors; `first` is the name of the first layer, `midlayer` in files of EAGLE's authors."""
    rng, size = np.random.default_rng(seed), WIDTH // HEADS
    shapes = {
        "embed_tokens": (TARGET.num_embeddings, WIDTH), "fc": (WIDTH, 3 * TARGET.d_model),
        "lm_head": (len(DRAFTED), WIDTH), f"{first}.self_attn.q_proj": (HEADS * size, 2 * WIDTH),
        f"{first}.self_attn.k_proj": (size, 2 * WIDTH), f"{first}.self_attn.v_proj": (size, 2 * WIDTH),
        f"{first}.self_attn.o_proj": (WIDTH, HEADS * size), f"{first}.mlp.gate_proj": (UNITS, WIDTH),
        f"{first}.mlp.up_proj": (UNITS, WIDTH), f"{first}.mlp.down_proj": (WIDTH, UNITS),
    }  # fmt: skip
    drawn = {f"{name}.weight": (rng.normal(size=shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    norms = ("norm", *(f"{first}.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    drawn |= {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}
    offsets = np.array(DRAFTED) - np.arange(len(DRAFTED))
    return drawn | {"d2t": offsets, "t2d": np.isin(np.arange(TARGET.num_embeddings), DRAFTED)}


def write(folder: Path, config: dict | None = None, arrays: dict[str, np.ndarray] | None = None) -> Path:
    """Writes a head's folder and returns it."""
    return huggingface_files.write(folder, config or entries(), arrays or tensors())


def write_target(folder: Path) -> Path:
    """Writes the folder of the heads' target, with weights that change hidden states from layer to layer."""
    arrays = huggingface_files.tensors(KIND, huggingface_files.random_parameters(KIND))
    arrays = {name: array / 4 if array.ndim > 1 else array for name, array in arrays.items()}
    return huggingface_files.write(folder, huggingface_files.entries(KIND), arrays)

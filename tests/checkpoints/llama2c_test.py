"""Tests of llama2.c's files: the layout of version 0, its header, the published models."""

import struct

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from speccascade_jax.checkpoints import CheckpointError, describe, load
from speccascade_jax.models.decoder_config import DecoderConfig
from tests.support import memory

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, LENGTH = 8, 12, 3, 4, 2, 11, 16
KV = DIM // HEADS * KV_HEADS
KINDS = {  # in the order of the file
    "rms_att": (DIM,), "wq": (DIM, DIM), "wk": (KV, DIM), "wv": (KV, DIM), "wo": (DIM, DIM), "rms_ffn": (DIM,),
    "w1": (HIDDEN, DIM), "w2": (DIM, HIDDEN), "w3": (HIDDEN, DIM),
}  # fmt: skip
OURS = {
    "rms_att": "pre_self_attention_layer_norm/scale", "wq": "self_attention/query/kernel",
    "wk": "self_attention/key/kernel", "wv": "self_attention/value/kernel", "wo": "self_attention/out/kernel",
    "rms_ffn": "pre_mlp_layer_norm/scale", "w1": "mlp/wi_0/kernel", "w2": "mlp/wo/kernel", "w3": "mlp/wi_1/kernel",
}  # fmt: skip


def write(file, tied=True):
    """Writes a file of random weights; returns the weights by kind."""
    rng = np.random.default_rng(0)
    shapes = {"embedding": (VOCAB, DIM)} | {kind: (LAYERS, *shape) for kind, shape in KINDS.items()}
    shapes |= {"final": (DIM,), "cosines": (LENGTH, 1), "sines": (LENGTH, 1)}
    shapes |= {} if tied else {"output": (VOCAB, DIM)}
    weights = {name: rng.normal(size=shape).astype("<f4") for name, shape in shapes.items()}
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB if tied else -VOCAB, LENGTH)
    file.write_bytes(header + b"".join(array.tobytes() for array in weights.values()))
    return weights


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_read_into_its_parameter(tmp_path, tied):
    weights = write(tmp_path / "model.bin", tied)
    model, params = load(tmp_path / "model.bin")
    assert model.config == DecoderConfig(
        vocab_size=VOCAB, num_embeddings=VOCAB, d_model=DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM // HEADS, d_ff=HIDDEN, tied=tied, rope_pairs="adjacent", norm_epsilon=1e-5, max_length=LENGTH,
    )  # fmt: skip
    expected = {"token_embedder/embedding": weights["embedding"], "decoder/decoder_norm/scale": weights["final"]}
    expected |= {} if tied else {"decoder/logits_dense/kernel": weights["output"].T}
    for kind, name in OURS.items():
        expected |= {f"decoder/layers_{i}/{name}": weights[kind][i].T for i in range(LAYERS)}
    flat = flatten_dict(params, sep="/")
    assert flat.keys() == expected.keys()
    assert all(np.array_equal(flat[name], array) for name, array in expected.items())


def test_a_directory_with_a_tokenizer_is_read(tmp_path):
    write(tmp_path / "stories.bin")
    (tmp_path / "tok512.bin").write_bytes(bytes(range(200)))
    assert "format: llama2.c, version 0" in describe(tmp_path)
    write(tmp_path / "other.bin")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: looked for .*one \*.bin file of llama2.c"):
        load(tmp_path)


def put(place, value):
    """Returns a change of a file that sets the header's number `place` to `value`."""
    return lambda whole: whole[: 4 * place] + struct.pack("<i", value) + whole[4 * place + 4 :]


@pytest.mark.parametrize(("change", "said"), [
    (lambda whole: whole[:-4], r"model.bin has 6,488 bytes, but .* needs 6,492"),
    (lambda whole: whole + b"more", r"model.bin has 6,496 bytes, but .* needs 6,492"),
    (lambda whole: whole[:20], r"model.bin has 20 bytes: too short for llama2.c's header"),
    (put(0, 0x616B3432), r"has llama2.c's version 12, but only version 0 is supported: export it with --version 0"),
    (put(0, 7), r"not a version-0 file of llama2.c: its header says \{'dim': 7"),
    (put(1, 0), r"not a version-0 file of llama2.c: d_ff is 0"),
    (put(3, 0), r"not a version-0 file of llama2.c: its header says"),
    (put(4, 0), r"not a version-0 file of llama2.c: num_kv_heads is 0"),
    (put(4, 3), r"num_heads 4 is not a multiple of num_kv_heads 3"),
    (put(5, 0), r"vocab_size is 0: give a positive number"),
])  # fmt: skip
def test_files_of_other_versions_or_lengths_are_refused(tmp_path, change, said):
    file = tmp_path / "model.bin"
    write(file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=said):
        load(file)


@pytest.mark.parametrize(("name", "count"), [("stories260K", 260_032), ("llama2xs", 279_232)])
def test_the_published_models_are_read(golden, name, count):
    text = describe(golden("models", name))
    assert f"parameters: {count:,} in 49 arrays, float32" in text
    params = flatten_dict(load(golden("models", name))[1], sep="/")
    scales = [np.asarray(array).mean() for path, array in params.items() if path.endswith("scale")]
    assert min(scales) > 0.1 and max(scales) < 10  # Plausible for trained norms, so the offsets are right.


@pytest.mark.parametrize("layers", [2 * 10**7, 2**31 - 1])
def test_implausible_headers_are_refused(tmp_path, layers):
    """Reads 28 bytes that claim so many layers that a list of them would not fit into memory."""
    (tmp_path / "model.bin").write_bytes(struct.pack("<7i", 8, 12, layers, 4, 2, 11, 16))
    said = rf"model.bin has 28 bytes, but its header \(d_model 8, {layers} layers"

    def refused():
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path / "model.bin")
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            load(tmp_path)

    assert memory.peak(refused) < 5_000_000

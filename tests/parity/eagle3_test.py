"""EAGLE-3 heads against a reference made of transformers' Llama layers: drafted tokens, and exact distributions."""

import json

import jax
import numpy as np
import pytest
from safetensors.torch import save_file

import speccascade_jax as sc
from speccascade_jax.core import rngs
from speccascade_jax.engine.loop import one_round
from speccascade_jax.methods.build import assemble
from speccascade_jax.pairs.prompts import make_prompt
from tests.support import engines
from tests.parity.transformers_test import SIZES, their_decoder, torch, transformers

pytestmark = pytest.mark.parity
llama = pytest.importorskip("transformers.models.llama.modeling_llama")


class Reference(torch.nn.Module):
    """A head without a cache, whose parameters have the names of speculators.

    Its inputs are the tokens from position 1 on, and the state before each of them.
    """

    def __init__(self, config, draft_ids, target_width, aux=3, norm_before_residual=False):
        super().__init__()
        width, heads = config.hidden_size, (config.num_attention_heads, config.num_key_value_heads)
        self.config, self.norm_before_residual = config, norm_before_residual
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, width)
        self.fc = torch.nn.Linear(aux * target_width, width, bias=False)
        layer = llama.LlamaDecoderLayer(config, 0)
        for name, count in zip("qkv", (heads[0], heads[1], heads[1]), strict=True):
            setattr(layer.self_attn, f"{name}_proj", torch.nn.Linear(2 * width, count * config.head_dim, bias=False))
        layer.hidden_norm = llama.LlamaRMSNorm(width, config.rms_norm_eps)
        self.layers, self.norm = torch.nn.ModuleList([layer]), llama.LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(width, len(draft_ids), bias=False)
        self.register_buffer("d2t", torch.tensor(draft_ids) - torch.arange(len(draft_ids)))
        self.rotary = llama.LlamaRotaryEmbedding(config)

    @torch.no_grad()
    def states(self, tokens, before):
        """Returns the head's states `[T, E]` after `tokens` `[T]`, with the states `before` `[T, E]` them."""
        layer, count = self.layers[0], len(tokens)
        normalized = layer.hidden_norm(before)
        inputs = torch.cat([layer.input_layernorm(self.embed_tokens(tokens)), normalized], -1)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        by = self.rotary(inputs, torch.arange(count)[None])
        attended = layer.self_attn(hidden_states=inputs, position_embeddings=by, attention_mask=mask)[0][0]
        x = (normalized if self.norm_before_residual else before) + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))

    @torch.no_grad()
    def logits(self, states):
        """Returns logits over the target's vocabulary."""
        out = torch.full((*states.shape[:-1], self.config.vocab_size), -torch.inf)
        out[..., torch.arange(len(self.d2t)) + self.d2t] = self.lm_head(self.norm(states))
        return out


def written(folder, head):
    """Writes a head as speculators does; returns its folder."""
    layer = head.config.to_diff_dict() | {"model_type": "llama", "vocab_size": head.config.vocab_size}
    entries = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": len(head.d2t),
        "transformer_layer_config": layer, "norm_before_residual": head.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries))
    t2d = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(head.d2t)) + head.d2t] = True
    save_file({k: v.contiguous() for k, v in head.state_dict().items()} | {"t2d": t2d}, folder / "model.safetensors")
    return folder


LAYERS = (1, 2, 3)


def random_head(vocab_size, draft_ids, favourites, **options):
    config = transformers.LlamaConfig(
        **SIZES | {"vocab_size": vocab_size, "num_hidden_layers": 1, "pad_token_id": None}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    head = Reference(config, draft_ids, SIZES["hidden_size"], **options).eval()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (1.0 if "embed" in name else 1.2) * weight.shape[-1] ** -0.5)
        head.lm_head.weight[[draft_ids.index(token) for token in favourites]] *= 3.0
    return head


@torch.no_grad()
def fused(target, head, tokens):
    """Returns the state `[T, E]` of each of `tokens` `[T]`, fused from the target's states."""
    states = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return head.fc(torch.cat([states[layer][0] for layer in LAYERS], -1))


def chain(target, head, prefix, count):
    """Returns the logits `[count, V]` of a greedy chain after the committed tokens `prefix`."""
    prefix = torch.tensor(prefix).long()
    (tokens, before), out = entries(target, head, prefix), []
    for _ in range(count):
        states = head.states(tokens, before)
        out.append(head.logits(states[-1]))
        old = len(tokens) * (len(prefix) > 1 or len(out) > 1)  # the first token's entry is seen by itself alone
        tokens = torch.cat([tokens[:old], out[-1].argmax()[None]])
        before = torch.cat([before[:old], states[-1:]])
    return torch.stack(out).numpy()


def entries(target, head, prefix):
    """Returns the committed tokens that a head reads, and the state before each of them."""
    if len(prefix) == 1:
        return prefix, torch.zeros(1, head.config.hidden_size)
    return prefix[1:], fused(target, head, prefix[:-1])


DRAFTED = list(range(5, 99, 2))
PROMPTS = [[7], [3, 9, 27, 40, 51], [int(x) for x in np.random.default_rng(3).integers(3, 99, 23)]]


@pytest.fixture(scope="module", params=[False, True], ids=["", "norm_before_residual"])
def models(request, tmp_path_factory):
    """Returns the reference's target and head, and the pair that is loaded from their folders."""
    folder, favourites = tmp_path_factory.mktemp("eagle3"), [7, 15, 31, 47]
    target, head = their_decoder("llama2"), random_head(99, DRAFTED, favourites, norm_before_residual=request.param)
    with torch.no_grad():
        target.lm_head.weight[favourites] *= 3.0  # both models prefer these tokens, so some drafts are kept
    target.save_pretrained(folder / "target")
    return target, head, sc.Pair.load(folder / "target", written(folder / "head", head))


def rounds(pair, prompts, count, **settings):
    """Yields the committed tokens before each round, and the round."""
    engine, params = assemble(pair, **settings)
    prompt, controls = make_prompt(pair, prompts), engines.controls(len(prompts))
    state = jax.jit(engine.init, static_argnums=(4,))(params, prompt, rngs.root(0), np.arange(len(prompts)), count)
    step = jax.jit(lambda state: one_round(engine, params, state, controls))
    while not np.all(state.done):
        after, turn = step(state)
        yield state.tokens, turn
        state = after


def test_drafted_tokens_equal_the_reference(models):
    """Compares all greedy blocks of several rows, after kept and after rejected tokens."""
    target, head, pair = models
    kept = rejected = 0
    for tokens, turn in rounds(pair, PROMPTS, 24, method="spec_decode", block_size=4):
        for row in np.flatnonzero(turn.active):
            length = int(turn.draft.length[row])
            wanted = chain(target, head, np.asarray(tokens[row, : turn.start[row]]), length).argmax(-1)
            np.testing.assert_array_equal(turn.draft.tokens[row, :length], wanted)
        kept, rejected = kept + int(turn.num_kept.sum()), rejected + int(turn.rejected.sum())
    print(kept, rejected)
    assert kept > 8 and rejected > 8

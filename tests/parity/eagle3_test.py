"""EAGLE-3 heads against a reference made of transformers' Llama layers: drafted tokens, and exact distributions."""

import functools
import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.trees import Tree
from tests.parity.transformers_test import SIZES, their_decoder, torch, transformers
from tests.support import conformance, reference
from tests.support.drafted_rounds import drafted_rounds

pytestmark = pytest.mark.parity
# The lossless rule and one that defers; by SPECCASCADE_CASES=all, another too, though drafters do not know the rule.
RULES = [("spec_decode", 0.0), ("token_v3", 0.4)]
if os.environ.get("SPECCASCADE_CASES") == "all":
    RULES += [("opt", 0.2)]
llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs the parity extra: make parity")


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
    from safetensors.torch import save_file  # not above: without torch, this module is skipped where it imports it

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


LAYERS = (0, 1, 2)


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
        head.lm_head.weight[[draft_ids.index(token) for token in favourites]] *= 4.0
    return head


@torch.no_grad()
def fused(target, head, tokens):
    """Returns the state `[T, E]` of each of `tokens` `[T]`, fused from the target's states."""
    states = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return head.fc(torch.cat([states[layer][0] for layer in LAYERS], -1))


def after(target, head, prefix, drafted):
    """Returns the head's logits `[len(drafted) + 1, V]` after the committed tokens `prefix`, and after each draft."""
    prefix = torch.tensor(prefix).long()
    if len(prefix) == 1:  # there is no state before the first token
        tokens, before = prefix, torch.zeros(1, head.config.hidden_size)
    else:
        tokens, before = prefix[1:], fused(target, head, prefix[:-1])
    out = []
    for token in [*drafted, 0]:
        states = head.states(tokens, before)
        out.append(head.logits(states[-1]))
        old = len(tokens) * (len(prefix) > 1 or len(out) > 1)  # the first token's entry is seen by itself alone
        tokens = torch.cat([tokens[:old], torch.tensor([int(token)])])
        before = torch.cat([before[:old], states[-1:]])
    return torch.stack(out).numpy()


DRAFTED = list(range(5, 99, 2))
PROMPTS = [[7], [3, 9, 27, 40, 51], [int(x) for x in np.random.default_rng(3).integers(3, 99, 23)]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Lets torch use one thread: its matrices are tiny here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def models(folder, norm_before_residual=False):
    """Returns the reference's target and head, and the pair that is loaded from their folders."""
    favourites = [7, 15, 31]
    target = their_decoder("llama2", num_hidden_layers=3)
    head = random_head(99, DRAFTED, favourites, norm_before_residual=norm_before_residual)
    with torch.no_grad():
        target.lm_head.weight[favourites] *= 4.0  # both models prefer these tokens, so some drafts are kept
    target.save_pretrained(folder / "target")
    return target, head, sc.Pair.load(folder / "target", written(folder / "head", head))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_drafted_blocks_equal_the_reference(norm_before_residual, tmp_path):
    """Compares all greedy blocks of several rows, after kept and after rejected tokens."""
    target, head, pair = models(tmp_path, norm_before_residual)
    kept = rejected = 0
    for tokens, draft, turn in drafted_rounds(pair, PROMPTS, 16, method="spec_decode", block_size=4):
        for row in np.flatnonzero(turn.active):
            block = draft.tokens[row, : int(turn.draft.length[row])]
            wanted = after(target, head, np.asarray(tokens[row, : turn.start[row]]), block[:-1])
            np.testing.assert_array_equal(block, wanted.argmax(-1))
        kept, rejected = kept + int(turn.num_kept.sum()), rejected + int(turn.rejected.sum())
    assert kept > 5 and rejected > 5


def test_drafted_trees_equal_the_reference(tmp_path):
    """Compares all nodes of several trees: a node's children are the most likely tokens after its path."""
    target, head, pair = models(tmp_path)
    shape = (2, 1, 1)  # nodes of the second level, whose parents differ, are fed to the head
    tree, kept = Tree.of_branching(shape), 0
    for tokens, draft, turn in itertools.islice(drafted_rounds(pair, PROMPTS, 20, method="spec_decode", tree=shape), 6):
        for row, entry in itertools.product(np.flatnonzero(turn.active), range(5)):
            path, node = [], entry - 1
            while node >= 0:
                path, node = [draft.tokens[row, node], *path], tree.parents[node]
            wanted = after(target, head, np.asarray(tokens[row, : turn.start[row]]), path)[-1]
            children = [child for child in tree.children[entry] if child]
            likely = np.argsort(-wanted)[: len(children)]
            np.testing.assert_array_equal(draft.tokens[row, np.array(children) - 1], likely)
        kept += int(turn.num_kept.sum())
    assert kept >= 2


# --- exact distributions

SMALL, LENGTH, GAMMA, PROMPT = 5, 4, 2, (1, 3, 2)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a function from a prefix and a round's begin to both models' logits, and the pair.

    The models have five tokens, three of which the head can draft.
    """
    folder = tmp_path_factory.mktemp("small")
    target = their_decoder("llama2", vocab_size=SMALL, num_hidden_layers=3)
    head = random_head(SMALL, [0, 3, 4], [])
    target.save_pretrained(folder / "target")

    @functools.cache
    def logits(prefix, begin):
        with torch.no_grad():
            p = target(input_ids=torch.tensor(prefix)[None]).logits[0, -1].numpy()
        return after(target, head, prefix[:begin], prefix[begin:])[-1], p

    return logits, sc.Pair.load(folder / "target", written(folder / "head", head))


def sequence_law(logits, prompt, rule, alpha):
    """Returns the probability of each sequence of `LENGTH` tokens, float64 `[SMALL ** LENGTH]`, by enumeration.

    The head's distribution depends on where a round began, so kept and rejected tokens lead to different states.
    """
    states = {(prompt, len(prompt)): 1.0}
    for _ in range(LENGTH):
        following = Counter()
        for (prefix, begin), mass in states.items():
            q, p = logits(prefix, begin)
            out = mass * reference.target_law(rule, q, p, alpha, 1.0)
            # after a whole block the token is the bonus, and the next round begins behind it
            drafts = len(prefix) - begin < GAMMA
            kept = np.minimum(out, mass * reference.softmax(q)) if drafts else np.zeros(SMALL)
            for token in range(SMALL):
                following[(*prefix, token), begin] += kept[token]
                following[(*prefix, token), len(prefix) + 1] += out[token] - kept[token]
        states = {state: mass for state, mass in following.items() if mass > 0}
    law = np.zeros((SMALL,) * LENGTH)
    for (prefix, _), mass in states.items():
        law[prefix[len(prompt) :]] += mass
    return law.reshape(-1)


def sampled(pair, rows, **settings):
    """Returns how often each sequence was sampled at temperature 1."""
    out = sc.decode(pair, [list(PROMPT)] * rows, max_new_tokens=LENGTH, temperature=1.0, stop_ids=(), **settings)
    assert out.stats["kept"] > 100 and out.stats["rejected"] > 100
    index = (np.asarray(out.tokens) * SMALL ** np.arange(LENGTH - 1, -1, -1)).sum(-1)
    return np.bincount(index, minlength=SMALL**LENGTH)


@pytest.mark.parametrize(("rule", "alpha"), RULES)
def test_sampled_sequences_have_the_exact_distribution(small, rule, alpha):
    """Compares with the enumeration by a chi-square test; the tree's output is compared for the lossless rule."""
    (logits, pair), rows = small, 10_000
    law = sequence_law(logits, PROMPT, rule, alpha)
    assert abs(law.sum() - 1) < 1e-6 and law.max() < 0.5
    ways = [{"block_size": GAMMA}, *([{"tree": (2, 1)}] if rule == "spec_decode" else [])]
    for way in ways:
        counts = sampled(pair, rows, rule=rule, **({"alpha": alpha} if alpha else {}), **way)
        assert conformance.pooled_p_value(counts, law * rows) > 1e-3

"""Gemma 4's assistants against transformers: drafted tokens, distributions, and exact output distributions."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.core.trees import Tree
from tests.parity.transformers_test import torch, transformers
from tests.support import conformance, reference
from tests.support.drafted_rounds import drafted_rounds

pytestmark = pytest.mark.parity
# One rule that defers and, by SPECCASCADE_CASES=all, others too: the drafter does not know the rule.
RULES = [("token_v3", 0.4)]
if os.environ.get("SPECCASCADE_CASES") == "all":
    RULES += [("spec_decode", 0.0), ("opt", 0.2)]
generation = pytest.importorskip(
    "transformers.generation.candidate_generator", reason="needs the parity extra: make parity"
)

WINDOW, CLUSTERS, ACTIVE = 6, 12, 3
KINDS = ["sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": None,
}  # fmt: skip
SMALL, LENGTH, GAMMA = 6, 4, 2


def sharing(config):
    """Replaces a property of transformers 5.23, which raises an error if all layers share keys and values."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: number for number, kind in enumerate(config.layer_types[:first])}
    return ["store" if i in last.values() else "reuse" if i >= first else None for i in range(config.num_hidden_layers)]


def random_models(vocab_size, clusters, shared=0, preference=5.0, gain=1.5):
    """Returns a random target and a random assistant of transformers."""
    sizes = SIZES | {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size}
    more = {"num_hidden_layers": 4, "layer_types": KINDS * 2, "num_kv_shared_layers": shared}
    large = transformers.Gemma4TextConfig(**sizes | more, hidden_size_per_layer_input=6 if shared else 0)
    more = {"num_hidden_layers": 2, "layer_types": KINDS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 0}
    small = transformers.Gemma4TextConfig(
        **sizes | more | {"hidden_size": 16, "intermediate_size": 24}, hidden_size_per_layer_input=0
    )
    config = transformers.Gemma4AssistantConfig(
        text_config=small, backbone_hidden_size=32, use_ordered_embeddings=clusters is not None,
        num_centroids=clusters or 1, centroid_intermediate_top_k=min(ACTIVE, clusters or 1),
    )  # fmt: skip
    for part in (large, small, config):
        part._attn_implementation = "eager"
    torch.manual_seed(0)
    with mock.patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", property(sharing)):
        target = transformers.Gemma4ForCausalLM(large).eval()
        assistant = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in itertools.chain(target.named_parameters(), assistant.named_parameters()):
            if name.endswith("norm.weight"):
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * (0.5 if "embed" in name else gain) * weight.shape[-1] ** -0.5)
        for model in (target, assistant):  # both models prefer these tokens, so some drafts are kept
            model.model.embed_tokens.weight[[1, 3, 4]] *= preference
        if clusters is not None:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return target, assistant


def loaded(folder, target, assistant, **options):
    """Returns the pair that is loaded from folders of transformers."""
    for name, model in (("target", target), ("assistant", assistant)):
        model.save_pretrained(folder / name)
    size = assistant.config.text_config.vocab_size
    return sc.Pair.load(folder / "target", folder / "assistant", vocab_size=size, **options)


@torch.no_grad()
def read_by(target, prefixes):
    """Returns what the target gives to an assistant after `prefixes` `[N, L]`, the last of which is pending."""
    ids = torch.tensor(np.asarray(prefixes)).long()
    options = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": False}
    return ids, target(input_ids=ids[:, :-1], **options)


@torch.no_grad()
def after(target, assistant, prefixes, drafted):
    """Returns the assistant's logits `[N, k + 1, V]` after the tokens `prefixes` `[N, L]`, and each of `[N, k]` drafts.

    Tokens without logits get -inf.
    """
    ids, read = read_by(target, prefixes)
    state, out = read.hidden_states[-1][:, -1:], []
    for tokens in torch.cat([ids[:, -1:], torch.tensor(np.asarray(drafted)).long()], 1).T:
        embedded = target.get_input_embeddings()(tokens[:, None])
        step = assistant(
            inputs_embeds=torch.cat([embedded, state], -1), position_ids=torch.tensor([[ids.shape[1] - 1]]),
            shared_kv_states=dict(read.shared_kv_states),
        )  # fmt: skip
        state, logits = step.last_hidden_state, step.logits[:, 0].numpy()
        # the smallest logit is that of tokens outside the clusters
        blank = logits == logits.min() if assistant.masked_embedding else np.zeros_like(logits, bool)
        out.append(np.where(blank, -np.inf, logits))
    return np.stack(out, axis=1)


@torch.no_grad()
def candidates(target, assistant, prefix, count):
    """Returns the tokens that transformers drafts after the tokens `prefix`, the last of which is pending."""
    ids, read = read_by(target, [prefix])
    assistant.generation_config.num_assistant_tokens = count
    make = generation.SinglePositionMultiTokenCandidateGenerator
    maker = make(assistant, target.get_input_embeddings(), transformers.GenerationConfig(max_length=256))
    return maker.get_candidates(ids, {}, read, False, 0)[0][0, ids.shape[1] :].numpy()


PROMPTS = [[7], [3, 9, 27, 40, 51], [int(x) for x in np.random.default_rng(3).integers(3, 96, 23)]]


def models(folder, clusters, shared):
    """Returns a target and an assistant of transformers, and the pair that is loaded from their folders."""
    theirs = random_models(96, clusters, shared)
    return *theirs, loaded(folder, *theirs)


def test_drafted_blocks_equal_transformers(tmp_path):
    """Compares greedy blocks and `q` of several rows, beyond windows, after kept and after rejected tokens.

    The reference reads the target's states of committed tokens only. In `generate` of transformers 5.23, the assistant
    also sees the entry of the token that was rejected last.
    """
    target, assistant, pair = models(tmp_path, CLUSTERS, shared=2)
    kept = rejected = 0
    for tokens, draft, turn in drafted_rounds(pair, PROMPTS, 24, method="spec_decode", block_size=4):
        for row in np.flatnonzero(turn.active):
            prefix, count = tokens[row, : turn.start[row]], int(turn.draft.length[row])
            if len(prefix) == 1:  # the target has read no token, so there is no state to draft from
                assert count == 0
                continue
            np.testing.assert_array_equal(draft.tokens[row, :count], candidates(target, assistant, prefix, count))
            wanted = after(target, assistant, [prefix], draft.tokens[row : row + 1, : count - 1])[0]
            np.testing.assert_allclose(
                draft.q[row, :count], [reference.softmax(logits) for logits in wanted], atol=2e-5
            )
            assert ((draft.q[row, :count] > 0).sum(-1) <= 96 // CLUSTERS * ACTIVE).all()
        kept, rejected = kept + int(turn.num_kept.sum()), rejected + int(turn.rejected.sum())
    assert kept > 3 and rejected > 3, (kept, rejected)


def test_drafted_trees_equal_transformers(tmp_path):
    """Compares all nodes of several trees: a node's children are the most likely tokens after its path.

    This assistant has no centroids, and the target's layers share no keys and values.
    """
    target, assistant, pair = models(tmp_path, None, shared=0)
    tree = Tree.of_branching((2, 2))
    for tokens, draft, turn in itertools.islice(drafted_rounds(pair, PROMPTS[1:], 16, tree=(2, 2)), 5):
        for row, entry in itertools.product(np.flatnonzero(turn.active), (0, 1, 2)):
            path = draft.tokens[row, : entry and 1] if entry < 2 else draft.tokens[row, 1:2]
            wanted = after(target, assistant, [tokens[row, : turn.start[row]]], [path])[0, -1]
            np.testing.assert_array_equal(draft.tokens[row, tree.children[entry] - 1], np.argsort(-wanted)[:2])


# --- exact distributions


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns models of six tokens, four of which have logits in the assistant after each token."""
    theirs = random_models(SMALL, 3, preference=1.0)
    with torch.no_grad():
        theirs[1].masked_embedding.centroid_intermediate_top_k = 2
    theirs[1].config.centroid_intermediate_top_k = 2
    return *theirs, loaded(tmp_path_factory.mktemp("small"), *theirs)


PROMPT = (1, 3, 2)


@pytest.fixture(scope="module")
def laws(small):
    """Returns `q` `[SMALL] * (b + d) + [SMALL]` of draft `d` in a round that begins after `b` tokens, by (b, d)."""
    target, assistant, _ = small
    by_place = {}
    for begin, depth in itertools.product(range(LENGTH), range(GAMMA + 1)):
        if (count := begin + depth) < LENGTH:
            rows = np.array(list(itertools.product(range(SMALL), repeat=count)), int).reshape(SMALL**count, count)
            prefixes = np.concatenate([np.tile(PROMPT, (len(rows), 1)), rows[:, :begin]], axis=1)
            logits = after(target, assistant, prefixes, rows[:, begin:])[:, -1]
            by_place[begin, depth] = softmax(logits).reshape((SMALL,) * (count + 1))
    return by_place


def softmax(logits):
    return np.stack([reference.softmax(row) for row in logits])


def sequence_law(target, laws, rule, alpha):
    """Returns the probability of each sequence of `LENGTH` tokens, float64 `[SMALL ** LENGTH]`, by enumeration.

    The assistant's distribution depends on where a round began, so kept and rejected tokens lead to different states.
    """
    rows = np.array(list(itertools.product(range(SMALL), repeat=LENGTH - 1)))
    with torch.no_grad():
        logits = target(input_ids=torch.tensor(np.concatenate([np.tile(PROMPT, (len(rows), 1)), rows], 1))).logits
    logits = logits[:, len(PROMPT) - 1 :].numpy().reshape(*(SMALL,) * (LENGTH - 1), LENGTH, SMALL)
    law = np.zeros((SMALL,) * LENGTH)

    def visit(tokens, begin, mass):
        count = len(tokens)
        if count == LENGTH:
            law[tokens] += mass
            return
        drawn = laws[begin, count - begin][tokens]
        with np.errstate(divide="ignore"):
            p = logits[(*tokens, *(0,) * (LENGTH - 1 - count), count)]
            out = reference.target_law(rule, np.log(drawn), p, alpha, 1.0)
        # after a whole block the token is the bonus, and the next round begins behind it
        kept = np.minimum(out, drawn) if count - begin < GAMMA else np.zeros(SMALL)
        for token in range(SMALL):
            for start, share in ((begin, kept[token]), (count + 1, out[token] - kept[token])):
                if share > 0:
                    visit((*tokens, token), start, mass * share)

    visit((), 0, 1.0)
    return law.reshape(-1)


@pytest.mark.parametrize(("rule", "alpha"), RULES)
def test_sampled_sequences_have_the_exact_distribution(small, laws, rule, alpha):
    """Compares with the enumeration by a chi-square test."""
    law, rows = sequence_law(small[0], laws, rule, alpha), 10_000
    assert abs(law.sum() - 1) < 1e-6 and law.max() < 0.5
    numbers = {"rule": rule, "block_size": GAMMA, **({"alpha": alpha} if alpha else {})}
    out = sc.decode(small[2], [list(PROMPT)] * rows, max_new_tokens=LENGTH, temperature=1.0, stop_ids=(), **numbers)
    assert out.stats["kept"] > 100 and out.stats["rejected"] > 100
    index = (np.asarray(out.tokens) * SMALL ** np.arange(LENGTH - 1, -1, -1)).sum(-1)
    assert conformance.pooled_p_value(np.bincount(index, minlength=SMALL**LENGTH), law * rows) > 1e-3

"""Requirements on a rule, as functions; tests apply all of them to each row of `RULES` (docs/extending.md)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import speccascade_jax as sc
from speccascade_jax.core.controls import make_controls
from speccascade_jax.core.sampling import log_laws, make_law_pair, softmax, transform
from speccascade_jax.core.types import LawPair, Prompt
from speccascade_jax.engine.generate import compilations, generate
from speccascade_jax.methods import table
from speccascade_jax.methods.build import assemble
from speccascade_jax.methods.settings import Settings
from speccascade_jax.rules.acceptance import Deferral, Speculative
from speccascade_jax.rules.rule import Rule
from tests.support import reference

# The twenty rules of fuzzy decoding are one function with five divergences, which have separate tests. So only two of
# the rules are tested here, one with a symmetric divergence and one with a divergence that can be infinite. The two
# further forms are tested with `top_k=2`, because these tests' vocabularies are smaller than the table's top 50.
_FUZZY = ("fuzzy_js", "fuzzy_kl")
_FORMS = (sc.fuzzy("js", top_k=2), sc.fuzzy("tv", scaled=True))
REPRESENTATIVE = {name: rule for name, rule in sc.RULES.items() if not name.startswith("fuzzy_") or name in _FUZZY}
REPRESENTATIVE |= {rule.name: rule for rule in _FORMS}

SAMPLINGS = [(0.5, 1.0), (0.5, 0.8), (1.0, 1.0), (1.0, 0.8)]


def alphas(rule, vocab_size):
    """Returns three values inside the rule's range; one if it has no α."""
    if rule.alpha is None:
        return [0.0]
    low, high = rule.alpha.bounds(vocab_size)
    return [low + (high - low) * f for f in (0.15, 0.5, 0.85)]


def telling_alpha(rule, q_table, p_table, temperature=1.0):
    """Returns the α != 0 of a fine grid at which `π` is farthest from both `q̃` and `p̃`.

    With an α at which a rule always or never defers, a test would check nothing.
    """
    if rule.alpha is None:
        return 0.0
    low, high = rule.alpha.bounds(len(q_table))
    ends = [np.stack([reference.scale(row, temperature) for row in table]) for table in (q_table, p_table)]

    def distance(alpha):
        law = law_by_rule(rule, q_table, p_table, alpha, temperature, 1.0)
        return min(np.abs(law - end).sum(-1).mean() for end in ends)

    grid = [a for a in np.linspace(low, high, 41)[1:-1] if abs(a) > 1e-6]
    best = max(grid, key=distance)
    assert distance(best) > 0.01, f"no alpha separates {rule.name} from both of its models on these tables"
    return float(best)


def accept_fns(rule):
    """Returns all token-wise verifiers that a rule can be used with: `Speculative`, and `Deferral` if it defers."""
    return [Speculative(rule)] + ([Deferral(rule)] if rule.deferral is not None else [])


def logit_pairs(seed=0, count=40, vocab_size=11):
    """Returns random and adversarial pairs of logits `[N, V]`: equal, disjoint, one-hot, near-tied."""
    rng = np.random.default_rng(seed)
    p = rng.normal(size=(count, vocab_size)) * rng.choice([0.3, 1, 4], size=(count, 1))
    q = p + rng.normal(size=p.shape) * rng.choice([0.01, 0.5, 3], size=(count, 1))
    q[0] = p[0]
    p[1, : vocab_size // 2], q[1, vocab_size // 2 :] = -np.inf, -np.inf
    p[2], q[2] = -np.inf, -np.inf
    p[2, 3], q[2, 3] = 0, 0
    p[3], q[3] = -np.inf, -np.inf
    p[3, 3], q[3, 4] = 0, 0
    p[4], q[4] = 0, 0
    p[5] = np.where(np.arange(vocab_size) < 2, 3.0, 0.0)
    q[5] = np.where(np.arange(vocab_size) < 2, [3.0, 3.0 + 1e-6] + [0] * (vocab_size - 2), 0.0)
    q[6] = -np.inf
    q[6, 0] = 0
    return q.astype(np.float32), p.astype(np.float32)


@jax.jit
def _law_pair(q_logits, p_logits, controls):
    q, q_tilde = softmax(q_logits), transform(q_logits, controls.draft)
    logs = log_laws(q_logits, q_tilde, controls.draft)
    return make_law_pair(q, q_tilde, controls.draft.temperature <= 0, p_logits, controls.target, logs)


def law_pair(q_logits, p_logits, temperature, top_p=1.0, draft_temperature=None):
    """Returns a `LawPair` over rows."""
    controls = make_controls(len(q_logits), temperature=temperature, top_p=top_p, draft_temperature=draft_temperature)
    return _law_pair(jnp.asarray(q_logits), jnp.asarray(p_logits), controls)


def implied_law(acceptance):
    """Computes `kept + (1 − Σ kept) · replacement`, the distribution of the output, exactly, without sampling."""
    rejected = 1.0 - acceptance.kept.sum(-1, keepdims=True)
    return acceptance.kept + rejected * acceptance.replacement


@partial(jax.jit, static_argnames="accept")
def evaluate(accept, pair, alpha):
    """Returns `(kept, replacement, implied distribution, π)` of the verifier `accept`, by row; `alpha` is a number."""
    column = jnp.full(pair.q.shape[:-1] + (1,), alpha, jnp.float32)
    acceptance = accept(pair, column)
    return acceptance.kept, acceptance.replacement, implied_law(acceptance), accept.law(pair, column)


@partial(jax.jit, static_argnums=0)
def kept_at(accept, pair, alpha, tokens):
    """Returns `accept.kept_at` of the tokens, in a program that is compiled once per verifier."""
    return accept.kept_at(pair, jnp.full((*tokens.shape, 1), alpha), tokens)


def check_identity(accept, pair, alpha, tolerance=1e-5):
    """Checks that `kept + (1 − Σ kept) · replacement = π`, that `π` sums to 1, and that no part is negative."""
    kept, replacement, implied, law = (np.asarray(x) for x in evaluate(accept, pair, alpha))
    np.testing.assert_allclose(implied, law, atol=tolerance)
    np.testing.assert_allclose(law.sum(-1), 1.0, atol=tolerance)
    np.testing.assert_allclose(replacement.sum(-1), 1.0, atol=tolerance)
    assert law.min() >= 0 and replacement.min() >= 0 and kept.min() >= 0
    assert (kept <= np.asarray(pair.q_tilde) + 1e-7).all()
    for token in range(kept.shape[-1]):  # one token at a time, because the engine calls `kept_at`
        probability = kept_at(accept, pair, alpha, jnp.full(kept.shape[:-1], token, jnp.int32))
        np.testing.assert_allclose(probability, kept[..., token], atol=tolerance)


def target_law(rule, q, p, alpha=0.0, temperature=1.0, top_p=1.0, **more):
    """Returns `π` of the public function as a NumPy array."""
    return np.asarray(sc.target_law(rule, q, p, alpha=alpha, temperature=temperature, top_p=top_p, **more))


def controls(rows, **settings):
    """Returns the controls that `decode` makes of its settings."""
    chosen = Settings(**settings)
    return table.get(chosen.method).controls(chosen, rows)


def tables(vocab_size, seed):
    """Returns logits `[V, V]` of a tabular draft and target that disagree, neither of them one-hot."""
    rng = np.random.default_rng(seed)
    p = rng.normal(size=(vocab_size, vocab_size)) * 1.2
    q = p + rng.normal(size=p.shape) * 0.9
    return q.astype(np.float32), p.astype(np.float32)


def tabular_pair(q_table, p_table):
    """Returns a `Pair` of tabular models."""
    return sc.Pair(target=sc.TableLM(p_table), draft=sc.TableLM(q_table))


def law_by_rule(rule, q_table, p_table, alpha, temperature, top_p):
    """Returns `π` `[V, V]` in NumPy, from the second implementation `reference`.

    A rule that `reference` lacks is evaluated by its own function, and mixed with the models' distributions here.
    """
    if rule.name in reference.DECISIONS or rule.name in ("spec_decode", "lossy", "lossy_tuned", "sd_reference"):
        return reference.transitions(rule.name, q_table, p_table, alpha, temperature, top_p)
    qt = np.stack([reference.scale(q, temperature, top_p) for q in q_table])
    pt = np.stack([reference.scale(p, temperature, top_p) for p in p_table])
    pair = LawPair(
        q=jnp.asarray(np.stack([reference.softmax(q) for q in q_table]), jnp.float32),
        p=jnp.asarray(np.stack([reference.softmax(p) for p in p_table]), jnp.float32),
        q_tilde=jnp.asarray(qt, jnp.float32),
        p_tilde=jnp.asarray(pt, jnp.float32),
        greedy=jnp.full((len(qt), 1), temperature == 0),
    )
    column = jnp.full((len(qt), 1), alpha)
    if rule.deferral is None:
        return np.asarray(rule.law(pair, column), np.float64)
    r = np.broadcast_to(np.asarray(rule.deferral(pair, column), np.float64), qt.shape)
    return (1 - r) * qt + pt * (r * qt).sum(-1, keepdims=True)


def run_rows(engine, params, rows, alpha, samplings, *, length, start=0, seed=0, conclusive=False, **more):
    """Samples `rows` outputs with each of the `samplings` in one call; returns tokens `[len(samplings), rows, length]`.

    A `conclusive` run fails unless it keeps some draft tokens and rejects some, because it would test only one case.
    """
    total = rows * len(samplings)
    temperature, top_p = (np.repeat(np.array(x, np.float32), rows) for x in zip(*samplings, strict=True))
    controls = make_controls(total, alpha=alpha, temperature=temperature, top_p=top_p, **more)
    prompt = Prompt(jnp.full((total, 1), start, jnp.int32), jnp.ones((total,), jnp.int32))
    out = generate(engine, params, prompt, seed, controls=controls, max_new_tokens=length)
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    assert (lengths == length).all()
    assert not conclusive or (out.stats.kept.sum() > 0 and out.stats.rejected.sum() > 0)
    return tokens.reshape(len(samplings), rows, length)


def sequence_p_value(tokens, law, start=0):
    """Returns the p-value of tokens `[N, L]` under the Markov chain `law` `[V, V]`.

    Two chi-square tests are combined with Bonferroni's correction, because each misses something. The test of whole
    sequences sees dependence between positions, but has hundreds of cells, so a small error of all distributions is
    lost in noise: if every deferral rule kept tokens with 1% less probability, 10,000 rows each would show it with a
    probability of 0.06. The test of transitions, which counts (previous token, token) over all positions, shows it with
    a probability of 0.99.
    """
    whole, pairs = sequence_statistic(tokens, law, start), transition_statistic(tokens, law, start)
    return min(1.0, 2 * min(p_of(*whole), p_of(*pairs)))


def stopped_p_value(tokens, lengths, stop, law):
    """Returns `sequence_p_value` of rows that end at the token `stop`.

    `stop` becomes an absorbing state of the chain, and fills the positions after a row's end.
    """
    beyond, absorbing = np.arange(tokens.shape[1])[None] >= np.asarray(lengths)[:, None], law.copy()
    absorbing[stop] = np.eye(len(law))[stop]
    assert beyond.any()
    return sequence_p_value(np.where(beyond, stop, tokens), absorbing)


def sequence_statistic(tokens, law, start=0):
    """Returns the chi-square statistic of whole sequences and its degrees of freedom."""
    count, length = tokens.shape
    vocab = len(law)
    probability = np.ones(1)
    last = np.array([start])
    for _ in range(length):
        probability = (probability[:, None] * law[last]).reshape(-1)
        last = np.tile(np.arange(vocab), len(probability) // vocab)
    index = (tokens * vocab ** np.arange(length - 1, -1, -1)).sum(-1)
    return pooled_statistic(np.bincount(index, minlength=vocab**length), probability * count)


def transition_statistic(tokens, law, start=0):
    """Returns the chi-square statistic of (previous token, token) over all positions, and its degrees of freedom."""
    return _transitions(_previous(tokens, start).ravel(), np.ravel(tokens), law)


def transition_p_values(tokens, law, start=0):
    """Returns p-values of `transition_statistic`, one per position."""
    columns = zip(_previous(tokens, start).T, np.asarray(tokens).T, strict=True)
    return [p_of(*_transitions(*columns_of_pair, law)) for columns_of_pair in columns]


def _previous(tokens, start):
    return np.concatenate([np.full((len(tokens), 1), start), tokens[:, :-1]], axis=1)


def _transitions(before, after, law):
    counts = np.zeros((len(law), len(law)))
    np.add.at(counts, (before, after), 1)
    statistics = [pooled_statistic(seen, row_law * seen.sum()) for seen, row_law in zip(counts, law, strict=True)]
    return sum(statistic for statistic, _ in statistics), sum(freedom for _, freedom in statistics)


def check_laws(samples):
    """Checks samples, a dictionary from name to tokens and their distribution; requires a corrected p-value > 1e-3.

    It tests each sample (Holm's correction), and the transitions of all samples together. Their sum reveals small
    errors that all samples share, such as the planted bug in `laws_test` that keeps tokens with 1% less probability.
    """
    alone = {name: sequence_p_value(*sample) for name, sample in samples.items()}
    together = p_of(*np.sum([transition_statistic(*sample) for sample in samples.values()], axis=0))
    worst = sorted(alone.items(), key=lambda sample: sample[1])[:5]
    assert 2 * min(holm(list(alone.values())), together) > 1e-3, f"all transitions: p = {together:.1e}; worst: {worst}"


def pooled_statistic(observed, expected, least=5.0):
    """Returns the chi-square statistic and its degrees of freedom, with cells expected below `least` pooled."""
    assert abs(observed.sum() - expected.sum()) <= 1e-3 * observed.sum()
    if ((expected <= 1e-9) & (observed > 0)).any():
        return np.inf, 1  # an event with probability 0 occurred
    small = expected < least
    o = np.append(observed[~small], observed[small].sum())
    e = np.append(expected[~small], expected[small].sum())
    if e[-1] < least and len(e) > 1:
        smallest = int(np.argmin(e[:-1]))
        e[smallest] += e[-1]
        o[smallest] += o[-1]
        o, e = o[:-1], e[:-1]
    o, e = o[e > 0], e[e > 0]
    return (((o - e) ** 2) / e).sum(), max(len(e) - 1, 0)


def pooled_p_value(observed, expected):
    """Returns the p-value of a chi-square test with small cells pooled."""
    return p_of(*pooled_statistic(observed, expected))


def p_of(statistic, freedom):
    """Returns the p-value of a chi-square statistic; with a single cell, a difference can only be a rounding error."""
    return float(stats.chi2.sf(statistic, freedom)) if freedom else float(statistic < 1e-6)


def holm(p_values):
    """Returns the smallest p-value after Holm's correction."""
    ordered = np.sort(np.asarray(p_values))
    return float(np.minimum(np.maximum.accumulate(ordered * np.arange(len(ordered), 0, -1)), 1.0)[0])


def _sampled(rule, rows, length, vocab_size, seed, engine):
    """Samples with every sampling setting in one call, at `telling_alpha`; returns tokens `[rows, length]` and `π`."""
    q_table, p_table = tables(vocab_size, seed=seed)
    alpha = telling_alpha(rule, q_table, p_table)
    built, params = assemble(tabular_pair(q_table, p_table), rule=rule, **engine)
    tokens = run_rows(built, params, rows, alpha, SAMPLINGS, length=length, seed=seed, conclusive=True)
    return {s: (tokens[i], law_by_rule(rule, q_table, p_table, alpha, *s)) for i, s in enumerate(SAMPLINGS)}


def check_sequence_law(rule, *, rows=10_000, length=7, seed=5, **engine):
    """Checks whole sequences of 7 tokens over V = 3, all sampling settings in one call; p > 1e-3 corrected."""
    check_laws(_sampled(rule, rows, length, 3, seed, engine))


_APART = 64.0


def mixed(rules):
    """Combines several deferral rules into one: the control `_APART · i + α` selects rule `i` with this α.

    Programs of deferral rules differ only in the decision, so one program can run all of them.
    """

    def deferral(pair, alpha):
        index = jnp.round(alpha / _APART)
        rule_alpha = alpha - _APART * index
        decisions = [jnp.broadcast_to(rule.deferral(pair, rule_alpha), pair.q.shape) for rule in rules]
        return jnp.select([index == i for i in range(len(rules))], decisions)

    return Rule(name="mixed", deferral=deferral)


def check_sequence_laws(rules, *, rows=10_000, length=7, seed=5, **engine):
    """Runs `check_sequence_law` for several deferral rules in one program, with `rows` rows per rule and sampling."""
    q_table, p_table = tables(3, seed=seed)
    shift = _APART * np.arange(len(rules), dtype=np.float32)
    coded = shift + np.float32([telling_alpha(rule, q_table, p_table) for rule in rules])
    built, params = assemble(tabular_pair(q_table, p_table), rule=mixed(rules), **engine)
    alpha = np.tile(np.repeat(coded, rows), len(SAMPLINGS))
    tokens = run_rows(built, params, rows * len(rules), alpha, SAMPLINGS, length=length, seed=seed, conclusive=True)
    tokens = tokens.reshape(len(SAMPLINGS), len(rules), rows, length)
    samples = {
        (rule.name, *s): (tokens[n, i], law_by_rule(rule, q_table, p_table, float(rule_alpha), *s))
        for i, (rule, rule_alpha) in enumerate(zip(rules, coded - shift, strict=True))
        for n, s in enumerate(SAMPLINGS)
    }
    check_laws(samples)


def check_transition_law(rule, *, rows=5_000, length=16, vocab_size=4, seed=16, **engine):
    """Checks transition counts at each position and over all positions, with all sampling settings in one call."""
    p_values = []
    for tokens, law in _sampled(rule, rows, length, vocab_size, seed, engine).values():
        p_values += [*transition_p_values(tokens, law), p_of(*transition_statistic(tokens, law))]
    assert holm(p_values) > 1e-3, sorted(p_values)[:5]


def check_greedy(rule, *, vocab_size=12, length=16, block=3):
    """Checks that the output at temperature 0 equals that of the NumPy implementation, token by token."""
    q_table, p_table = tables(vocab_size, seed=6)
    engine, params = assemble(tabular_pair(q_table, p_table), rule=rule, block_size=block)
    for alpha in alphas(rule, vocab_size):
        law = law_by_rule(rule, q_table, p_table, alpha, 0.0, 1.0)
        assert (law.max(-1) == 1).all()
        expected, last = np.zeros(length, int), 0
        for i in range(length):
            last = expected[i] = law[last].argmax()
        tokens = run_rows(engine, params, 2, alpha, [(0.0, 1.0), (0.0, 0.8)], length=length)
        assert (tokens == expected).all(), alpha


def check_cold_draft_law(rule, **engine):
    """Checks the output's distribution in fuzzy decoding's setting: a greedy (one-hot) draft, and a sampling target."""
    q_table, p_table = tables(3, seed=7)
    alpha = telling_alpha(rule, q_table, p_table)
    built, params = assemble(tabular_pair(q_table, p_table), rule=rule, **engine)
    tokens = run_rows(built, params, 10_000, alpha, [(1.0, 1.0)], length=6, draft_temperature=0.0)
    law = reference.transitions(rule.name, q_table, p_table, alpha, 1.0, draft_temperature=0.0)
    assert sequence_p_value(tokens[0], law) > 1e-3


def check_one_compilation(rule, **engine):
    """Checks that a sweep over α, temperature, top-p, top-k and seed, as Python numbers or arrays, compiles once.

    The shapes are those of `check_greedy`, so that both checks share a program.
    """
    built, params = assemble(tabular_pair(*tables(12, seed=6)), rule=rule, **engine or {"block_size": 3})
    settings = [
        (0.25, 0, 1, 0, 0, None),
        (np.float64(0.5), 1.0, np.float32(0.9), 3, 1, 0.5),
        (jnp.float32(0.5), 0.3, 0.5, np.int64(2), np.int64(7), np.float32(1)),
        (np.array([0.1, 0.2, 0.3, 0.4]), 0, [1, 0.5, 1, 0.9], [0, 1, 2, 3], 2**31, None),
    ]
    compiled = None
    for turn, (alpha, temperature, top_p, top_k, seed, cold) in enumerate(settings):
        more = {"temperature": 0} if rule.greedy_only else {"temperature": temperature, "draft_temperature": cold}
        controls = make_controls(4, alpha=alpha, top_p=top_p, top_k=top_k, **more)
        prompt = Prompt(jnp.full((4, 1), turn, jnp.int32), jnp.ones((4,), jnp.int32))
        ids = [turn, 5, 9, 11]
        generate(built, params, prompt, seed, controls=controls, max_new_tokens=16, example_ids=ids)
        compiled = compilations() if compiled is None else compiled
    assert compilations() == compiled


def check_rule(rule):
    """Runs all checks of one rule: the identity, greedy tokens, the distribution at γ 1, 3 and 5, one compilation."""
    q, p = logit_pairs()
    for temperature, top_p in [(0.0, 1.0), *SAMPLINGS]:
        pair = law_pair(q, p, temperature, top_p)
        for alpha in alphas(rule, q.shape[-1]):
            for accept in accept_fns(rule):
                check_identity(accept, pair, alpha)
    check_greedy(rule)
    check_sequence_law(rule, block_size=1)
    check_sequence_law(rule, block_size=3)
    check_transition_law(rule, block_size=5)
    check_one_compilation(rule)

"""A second implementation of the methods, in NumPy and float64, from METHODS section 3 alone and deliberately naive."""

from __future__ import annotations

import math

import numpy as np


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def scale(logits, temperature, top_p=1.0, top_k=0):
    """Returns `S` at one position, by sorting; ties go to the lowest index (a stable sort)."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        law = np.zeros(len(logits))
        law[int(np.argmax(logits))] = 1.0
        return law
    law = softmax(logits / temperature)
    order = np.argsort(-law, kind="stable")
    if top_k > 0:
        law[order[top_k:]] = 0.0
        law /= law.sum()
    if top_p < 1:
        before = np.cumsum(law[order]) - law[order]
        law[order[before >= top_p]] = 0.0
        law /= law.sum()
    return law


def entropy(law):
    law = law[law > 0]
    return float(-(law * np.log(law)).sum())


def total_variation(p, q):
    return float(np.maximum(p - q, 0).sum())


def lossy(q, p, alpha, beta=1.0):
    kept = np.minimum(q, p / (1 - alpha))
    residual = np.maximum(p / beta - q, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    return kept + (1 - kept.sum()) * residual


def lossy_tuned(q, p, alpha):
    excess = np.maximum(q - p / (1 - alpha), 0).sum()
    if excess <= 0:
        return q.copy()
    low, high = 0.0, 1 / (1 - alpha)
    for _ in range(200):
        middle = (low + high) / 2
        if np.maximum(middle * p - q, 0).sum() < excess:
            low = middle
        else:
            high = middle
    return np.maximum(np.minimum(q, p / (1 - alpha)), high * p)


def cross_entropy(q, p, greedy):
    with np.errstate(divide="ignore"):
        surprise = -np.log(p)
    if greedy:
        return float(surprise[int(np.argmax(q))])
    return float(np.where(q > 0, q * np.where(q > 0, surprise, 0), 0).sum())


def divergence(name, p, q, top_k=0):
    """Returns `Div(p, q)`, computed entry by entry.

    With `top_k`, the entries are the `top_k` likeliest tokens of `p`, and one for all other tokens together.
    """
    with np.errstate(divide="ignore"):
        return divergence_of_logs(name, np.log(p), np.log(q), top_k)


def log_law(logits, temperature, top_p=1.0):
    """Returns the log of `scale`, float64 `[V]`; -inf only for excluded tokens."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        if temperature == 0 or top_p < 1:
            return np.log(scale(logits, temperature, top_p))
    scaled = logits / temperature - (logits / temperature).max()
    return scaled - np.log(np.exp(scaled).sum())


def divergence_of_logs(name, log_p, log_q, top_k=0):
    """Returns `divergence` of distributions given as logs."""
    if top_k:
        order = sorted(range(len(log_p)), key=lambda v: (-log_p[v], v))
        parts = [(law[order[:top_k]], law[order[top_k:]]) for law in (log_p, log_q)]
        log_p, log_q = (np.append(top, np.logaddexp.reduce(rest)) for top, rest in parts)
    log_m = np.logaddexp(log_p, log_q) - math.log(2)

    def kl(x, y):
        return sum(
            0.0 if a == -np.inf else math.inf if b == -np.inf else math.exp(a) * (a - b)
            for a, b in zip(x, y, strict=True)
        )

    return {
        "kl": lambda: kl(log_p, log_q),
        "kl_reversed": lambda: kl(log_q, log_p),
        "js": lambda: (kl(log_p, log_m) + kl(log_q, log_m)) / 2 / math.log(2),
        "js_reference": lambda: (kl(log_m, log_p) + kl(log_m, log_q)) / 2,
        "tv": lambda: np.abs(np.exp(log_p) - np.exp(log_q)).sum() / 2,
    }[name]()


# the decision of every deferral rule: (q, p, q̃, p̃, α, greedy) -> a number or a vector, true if it defers
DECISIONS = {
    "chow": lambda q, p, qt, pt, a, g: q.max() < 1 - a,
    "chow_log": lambda q, p, qt, pt, a, g: entropy(q) > a,
    "diff": lambda q, p, qt, pt, a, g: q.max() < p.max() - a,
    "diff_log": lambda q, p, qt, pt, a, g: entropy(p) < entropy(q) - a,
    "opt": lambda q, p, qt, pt, a, g: q.max() < p.max() - a * total_variation(pt, qt),
    "opt_log": lambda q, p, qt, pt, a, g: entropy(p) < entropy(q) - a * total_variation(pt, qt),
    "bild_star": lambda q, p, qt, pt, a, g: cross_entropy(q, p, g) > a,
    "token_v1": lambda q, p, qt, pt, a, g: q < p.max() - a,
    "token_v2": lambda q, p, qt, pt, a, g: p < p.max() - a,
    "token_v3": lambda q, p, qt, pt, a, g: p < (1 - a) * p.max(),
    "lossy_greedy": lambda q, p, qt, pt, a, g: p[int(np.argmax(q))] < (1 - a) * p.max(),
    "random_accept": lambda q, p, qt, pt, a, g: 1 - a,
    **{
        f"fuzzy_{name}": lambda q, p, qt, pt, a, g, name=name: divergence(name, p, q) >= a
        for name in ("js", "js_reference", "kl", "kl_reversed", "tv")
    },
    "fuzzy_js_top2": lambda q, p, qt, pt, a, g: divergence("js", p, q, 2) >= a,
    "fuzzy_tv_scaled": lambda q, p, qt, pt, a, g: divergence("tv", pt, qt) >= a,
}


def sd_reference(q, qt, pt):
    """Returns the output's distribution if verification divides by `q`, although tokens are drawn from `qt`."""
    kept = np.array([d * min(1.0, b / a) if a > 0 else d for a, b, d in zip(q, pt, qt, strict=True)])
    residual = np.maximum(pt - q, 0)
    return kept + (1 - kept.sum()) * (residual / residual.sum() if residual.sum() > 0 else pt)


def decision(rule, q_logits, p_logits, alpha, temperature, top_p=1.0, top_k=0, draft_temperature=None):
    """Returns the deferral decision `r(v)` of every token, float64 `[V]`."""
    cold = temperature if draft_temperature is None else draft_temperature
    q, p = softmax(q_logits), softmax(p_logits)
    qt, pt = scale(q_logits, cold, top_p, top_k), scale(p_logits, temperature, top_p, top_k)
    return np.broadcast_to(np.asarray(DECISIONS[rule](q, p, qt, pt, alpha, cold == 0), np.float64), q.shape)


def target_law(rule, q_logits, p_logits, alpha, temperature, top_p=1.0, top_k=0, draft_temperature=None):
    """Returns `π` at one position, float64 `[V]`."""
    cold = temperature if draft_temperature is None else draft_temperature
    qt, pt = scale(q_logits, cold, top_p, top_k), scale(p_logits, temperature, top_p, top_k)
    if rule == "spec_decode":
        return pt
    if rule == "lossy":
        return lossy(qt, pt, alpha)
    if rule == "lossy_tuned":
        return lossy_tuned(qt, pt, alpha)
    if rule == "sd_reference":
        return sd_reference(softmax(q_logits), qt, pt)
    r = decision(rule, q_logits, p_logits, alpha, temperature, top_p, top_k, draft_temperature)
    return (1 - r) * qt + pt * (r * qt).sum()


def transitions(rule, q_table, p_table, alpha, temperature, top_p=1.0, **more):
    """Returns `π` after every token: float64 `[V, V]` for tabular models."""
    rows = [target_law(rule, q, p, alpha, temperature, top_p, **more) for q, p in zip(q_table, p_table, strict=True)]
    return np.stack(rows)


def law_over_handed(rule, raw_logits, handed, p_table, alpha, temperature):
    """Returns `π` for a draft whose raw logits and sampled distribution `q̃` (`handed`) are given separately."""
    rows = []
    for raw, q_tilde, p in zip(raw_logits, handed, p_table, strict=True):
        p_tilde = scale(p, temperature)
        if rule == "spec_decode":
            rows.append(p_tilde)
            continue
        r = DECISIONS[rule](softmax(raw), softmax(p), q_tilde, p_tilde, alpha, False)
        r = np.broadcast_to(np.asarray(r, float), q_tilde.shape)
        rows.append((1 - r) * q_tilde + p_tilde * (r * q_tilde).sum())
    return np.stack(rows)

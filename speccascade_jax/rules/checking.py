"""A check of a user's rule before its first use: the rule's functions must return valid decisions or distributions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.types import LawPair
from speccascade_jax.rules.rule import Rule

_ENTRIES, _NEAR = 64, 1e-3
_MEANT = {
    "deferral": "a number between 0 (keep the draft) and 1 (defer it), or False and True, shape [..., V] or [..., 1]",
    "law": "probabilities [..., V] that add up to 1",
    "kept": "min(q̃, π) of the same token, shape [..., V]",
    "at_most": "at least π of the same token, shape [..., V]",
}


@functools.cache  # a rule is checked only once, even if several programs use it
def check(rule: Rule) -> None:
    """Runs a rule on a few test distributions; raises a ValueError if its functions return invalid results.

    The test distributions have 64 tokens. A rule that contains an array of another vocabulary's size cannot be applied
    to them and is not checked.

    Raises:
        ValueError: the message names the rule, the result that it returned, and the result that is expected.
    """
    parts = [part for part in _MEANT if getattr(rule, part) is not None]
    if not all([_check_shapes(rule, part) for part in parts]):
        return
    pair, tried = _laws(rule.greedy_only), jax.jit(functools.partial(_tried, rule))
    for alpha in _alphas(rule):
        arguments = pair, np.full(pair.greedy.shape, alpha, np.float32)
        returned = jax.tree.map(np.asarray, tried(*arguments))
        _check_values(rule, pair, alpha, returned)
        # The same positions, arranged as rows of blocks, must give the same result. If they do not, the rule's result
        # at a position depends on other positions or rows.
        folded = tried(*jax.tree.map(lambda x: x.reshape(2, -1, x.shape[-1]), arguments))
        if np.abs(folded["law"].reshape(returned["law"].shape) - returned["law"]).max() > _NEAR:
            raise ValueError(
                f"rule {rule.name!r}: its result at a position depends on other positions or rows: "
                "reduce over axis -1 only"
            )


def _check_shapes(rule: Rule, part: str) -> bool:
    """Returns whether a rule's function accepts `_ENTRIES` tokens; raises a ValueError if it returns a wrong shape."""
    for lead in ((2,), (2, 3)):
        full: Any = jax.ShapeDtypeStruct((*lead, _ENTRIES), jnp.float32)
        thin: Any = jax.ShapeDtypeStruct((*lead, 1), jnp.float32)
        pair = LawPair(full, full, full, full, thin.update(dtype=bool))
        try:
            shape = jax.eval_shape(getattr(rule, part), pair, thin).shape
        except Exception as error:
            said = str(error).partition("\n")[0]
            if "incompatible shapes" in said.lower():
                return False
            said = f"fails on distributions of shape {full.shape}: {type(error).__name__}: {said}"
            raise ValueError(f"rule {rule.name!r}: its {part} {said}") from error
        allowed = [{whole, 1} if part == "deferral" else {whole} for whole in full.shape]
        if len(shape) != len(allowed) or any(axis not in sizes for axis, sizes in zip(shape, allowed, strict=True)):
            said = f"returned shape {shape} for distributions of shape {full.shape}: expected {_MEANT[part]}"
            raise ValueError(f"rule {rule.name!r}: its {part} {said}")
    return True


def _tried(rule: Rule, pair: LawPair, alpha: Any) -> dict[str, Any]:
    returned: dict[str, Any] = {"law": rule.target_law(pair, alpha)}
    if rule.deferral is not None:
        returned["deferral"] = rule.deferral(pair, alpha)
    alone = jax.tree.map(lambda x: jnp.broadcast_to(x, pair.q.shape)[..., None], pair)
    for name, part in (("kept", rule.kept), ("at_most", rule.at_most)):
        if part is not None:  # verification calls these functions with one token at a time
            returned[name] = part(alone, alpha[..., None])[..., 0]
    return returned


def _check_values(rule: Rule, pair: LawPair, alpha: float, returned: dict[str, np.ndarray]) -> None:
    place = f"at alpha={alpha:g}" if rule.alpha is not None else "on distributions"

    def refuse(part: str, bad: np.ndarray, values: np.ndarray, meant: str) -> None:
        if bad.any():
            raise ValueError(f"rule {rule.name!r}: its {part} returned {values[bad][0]:g} {place}: expected {meant}")

    law = returned["law"]
    if "deferral" in returned:
        decided = returned["deferral"].astype(np.float32)
        refuse("deferral", ~((decided >= 0) & (decided <= 1)), decided, _MEANT["deferral"])
    else:
        refuse("law", ~(law >= -_NEAR), law, _MEANT["law"])
        refuse("law", ~(np.abs(law.sum(-1) - 1) <= _NEAR), law.sum(-1), f"{_MEANT['law']}, not to this sum")
    if "kept" in returned:
        kept = np.minimum(np.asarray(pair.q_tilde), law)
        refuse("kept", ~(np.abs(returned["kept"] - kept) <= _NEAR), returned["kept"], _MEANT["kept"])
    if "at_most" in returned:
        refuse("at_most", ~(returned["at_most"] >= law - _NEAR), returned["at_most"], _MEANT["at_most"])
    if rule.lossless:
        refuse("law", ~(np.abs(law - pair.p_tilde) <= _NEAR), law, "p̃, because the rule is declared lossless")


def _alphas(rule: Rule) -> tuple[float, ...]:
    """Returns values of α to test: the ends and the middle of the sweep range, except those outside the domain."""
    if rule.alpha is None:
        return (0.0,)
    low, high = rule.alpha.domain
    return tuple(alpha for alpha in rule.alpha.even(3, _ENTRIES).tolist() if low <= alpha < high) or (low,)


def _laws(greedy_only: bool) -> LawPair:
    """Returns test pairs of draft and target distributions `[N, V]`: equal ones, different ones, and some with zeros.

    Each pair occurs with a greedy draft and, unless `greedy_only`, also with a sampled draft.
    """
    rng = np.random.default_rng(0)
    spread = (0.02, 0.3, 0.3, 1.0)  # from nearly certain to nearly even
    q, p = (np.asarray([rng.dirichlet(np.full(_ENTRIES, weight)) for weight in spread], np.float32) for _ in range(2))
    p[1], q[2, ::2], p[3, 1::2] = q[1], 0.0, 0.0
    q, p = (law / law.sum(-1, keepdims=True) for law in (q, p))
    best_q, best_p = (np.eye(_ENTRIES, dtype=np.float32)[law.argmax(-1)] for law in (q, p))
    raw_q, raw_p, top_q, top_p = (jnp.asarray(law, jnp.float32) for law in (q, p, best_q, best_p))
    greedy = LawPair(raw_q, raw_p, top_q, top_p, greedy=jnp.ones((4, 1), bool))
    sampled = LawPair(raw_q, raw_p, raw_q, raw_p, greedy=jnp.zeros((4, 1), bool))
    return greedy if greedy_only else jax.tree.map(lambda *parts: jnp.concatenate(parts), greedy, sampled)

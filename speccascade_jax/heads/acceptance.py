"""The acceptance head of SpecDec++: will the target keep the token that the draft has just been fed?

The head reads the draft's final hidden state `e_i` of token `y_i`; `sigmoid` of what it gives is
`P(y_i kept | all before it kept)` (paper 3, section 3.2 and eq. 3.1; METHODS section 6). Its parameters are a nested
dict, named as flax names them: `{"block_0": {"kernel" [D, D], "bias" [D]}, …, "out": {"kernel" [D], "bias" []}}`.

A head may read two numbers more than the paper's: `log max q` of the law that `y_i` was drawn from, and `log q̃(y_i)`
(`with_law`). They cost next to nothing, for the drafter has them, and a shallow decoder's `e_i`, which is computed from
the tokens up to `y_i`, need not know what was thought likely in `y_i`'s place.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from speccascade_jax import fingerprints
from speccascade_jax.checkpoints.checksums import digest
from speccascade_jax.checkpoints.errors import CheckpointError, damaged
from speccascade_jax.models.base import Array, BoundModel, Params, Prompt
from speccascade_jax.training.storage import write_atomically

if TYPE_CHECKING:
    from speccascade_jax.pair import Pair

FILE = "acceptance_head.msgpack"
"""How a pair's own head is called in its folder."""
FORMAT = 1
_LAW = 2  # numbers of the law behind the state
_LEAST = 1e-6  # a smaller probability is no surer sign of a rejection
_TRAIN = "train one for this pair (experiments/train_acceptance_head.py), or choose the pair that it was trained for"


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a head is and what it was trained on.

    Attributes:
        depth, features: residual blocks, and the width of the draft's hidden states; law: whether it reads `with_law`.
        w_rej: weight of rejections in its loss (`training.acceptance`); at 1 its probabilities are meant as such.
        rule, alpha: whose kept probabilities it was taught.
        temperature, top_p, top_k, draft_temperature: the sampling under which.
        pair: the pair's name; pair_fingerprint, draft_fingerprint: `fingerprints.of_pair`, `of_model` of the draft.
        data: fingerprint of the data folders; prompts, positions: how many were trained on; steps: of the optimiser.
    """

    depth: int
    features: int
    w_rej: float
    rule: str
    alpha: float | None
    temperature: float
    top_p: float
    top_k: int
    draft_temperature: float | None
    pair: str
    pair_fingerprint: str
    draft_fingerprint: str
    law: bool = False
    data: str = ""
    prompts: int = 0
    positions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Head:
    """A head's parameters and its card."""

    params: Params
    card: Card

    @property
    def fingerprint(self) -> str:
        """Hash of parameters and card: what a record that used the head belongs to."""
        arrays = flatten_dict(self.params, sep="/")
        parts = {name: digest(np.asarray(leaf)) for name, leaf in arrays.items()}
        return _text_digest(json.dumps({"card": asdict(self.card), **parts}, sort_keys=True))

    def check(self, pair: Pair) -> None:
        """Refuse a head of another draft; compiles nothing.

        Raises:
            ValueError: names both fingerprints or sizes, and the remedy.
        """
        found = features(pair.draft)
        if found != self.card.features:
            size = "no hidden states" if found is None else f"{found} features"
            raise ValueError(
                f"the acceptance head reads {self.card.features} features, the draft gives {size}: {_TRAIN}"
            )
        draft = fingerprints.of_model(pair.draft)
        if draft != self.card.draft_fingerprint:
            raise ValueError(
                f"the acceptance head belongs to the draft {self.card.draft_fingerprint} of pair {self.card.pair!r}, "
                f"but the draft of {pair.name!r} is {draft} (the same weights in another dtype are another draft): "
                f"{_TRAIN}"
            )


def features(bound: BoundModel) -> int | None:
    """The width of a model's hidden states; `None` where it gives none. Compiles nothing."""
    one: Any = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    length: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    prompt = Prompt(one, length, one if getattr(bound.model, "is_encoder_decoder", False) else None)

    def hidden(params: Params, prompt: Prompt) -> Array | None:
        cache = bound.model.prefill(params, prompt, 2)
        return bound.model.extend(params, cache, prompt.tokens)[0].hidden

    shape = jax.eval_shape(hidden, bound.params, prompt)
    return None if shape is None else int(shape.shape[-1])


def initial(key: Array, features: int, depth: int, law: bool = False) -> Params:
    """Fresh float32 parameters: blocks that change nothing yet, and a linear unit that says next to nothing.

    Raises:
        ValueError: a negative depth.
    """
    if depth < 0:
        raise ValueError(f"depth={depth} is negative: 0 is a linear head")
    features += _LAW if law else 0

    def block() -> Params:
        return {"kernel": jnp.zeros((features, features)), "bias": jnp.zeros((features,))}

    out = {"kernel": jax.random.normal(key, (features,)) / features, "bias": jnp.zeros(())}
    return {f"block_{n}": block() for n in range(depth)} | {"out": out}


def depth(params: Params) -> int:
    """How many residual blocks the parameters are."""
    return len(params) - 1


def with_law(hidden: Array, max_q: Array, drawn: Array) -> Array:
    """Everything that a head may read of tokens, float32 `[..., D + 2]`.

    Args:
        hidden: `[..., D]`, the states `e_i`; max_q: `[...]`, of the raw law that `y_i` was drawn from; drawn: `[...]`,
            the probability `q̃(y_i)` it was drawn with.
    """
    logs = [jnp.log(jnp.maximum(jnp.asarray(x, jnp.float32), _LEAST)) for x in (max_q, drawn)]
    return jnp.concatenate([hidden.astype(jnp.float32), jnp.stack(logs, axis=-1)], axis=-1)


def reads_law(params: Params, features: int) -> bool:
    """Whether a head reads more than the `features` of a hidden state."""
    return bool(params["out"]["kernel"].shape[0] > features)


def logits(params: Params, inputs: Array) -> Array:
    """float32 `[...]` of `inputs` `[..., D]`: `x + SiLU(W x + b)` block by block, then one linear unit.

    Of `with_law`'s inputs a head that was trained on states alone reads these alone.
    """
    x = inputs.astype(jnp.float32)[..., : params["out"]["kernel"].shape[0]]
    for n in range(depth(params)):
        block = params[f"block_{n}"]
        x = x + jax.nn.silu(x @ block["kernel"] + block["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def states(model: Any, params: Params, prompt: Prompt, tokens: Array) -> Array:
    """The hidden state behind each of `tokens` `[B, T]`, float `[B, T, D]`, in one pass: what a stop policy sees.

    The state of token `i` is what `extend` returns for feeding it behind the prompt and the tokens before it.
    """
    cache = model.prefill(params, prompt, prompt.tokens.shape[1] + tokens.shape[1])
    pending = jnp.take_along_axis(prompt.tokens, prompt.length[:, None] - 1, axis=1)
    out, _ = model.extend(params, cache, jnp.concatenate([pending, tokens], axis=1))
    return out.hidden[:, 1:]


def weighted_bce(logits: Array, kept: Array, counted: Array, w_rej: float, w_acc: float = 1.0) -> Array:
    """Mean of `−[w_acc P log P̂ + w_rej (1 − P) log(1 − P̂)]` over counted positions (paper 3, section 3.3).

    Args:
        logits: `[...]`, of `P̂`; kept: float32 `[...]`, `P`; counted: bool `[...]`.
    """
    losses = -(w_acc * kept * jax.nn.log_sigmoid(logits) + w_rej * (1.0 - kept) * jax.nn.log_sigmoid(-logits))
    return jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)


def save(path: str | Path, head: Head) -> None:
    """Write a head as one file, whole or not at all."""
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in flatten_dict(head.params, sep="/").items()}
    card = json.dumps(asdict(head.card), sort_keys=True)
    digests = {name: digest(array) for name, array in arrays.items()} | {"card": _text_digest(card)}
    payload = {"format": FORMAT, "card": card, "digests": digests, "arrays": arrays}
    write_atomically(Path(path), flax.serialization.msgpack_serialize(payload))


def load(path: str | Path) -> Head:
    """Read a head.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: it is damaged (names what in it), or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no acceptance head at {path}: {_TRAIN}")
    try:
        payload = flax.serialization.msgpack_restore(path.read_bytes())
        number, text, digests, arrays = (payload[name] for name in ("format", "card", "digests", "arrays"))
    except Exception as error:  # msgpack has an error of its own for every kind of damage
        raise damaged(path, {"the file": f"it is no acceptance head ({error!r})"}) from error
    if number != FORMAT:
        raise CheckpointError(f"{path} has format {number!r}, this version reads {FORMAT}: train the head again")
    wrong = {
        name: "its bytes are not those written" for name, array in arrays.items() if digest(array) != digests.get(name)
    }
    if _text_digest(text) != digests.get("card"):
        wrong["card"] = "its text is not that written"
    if missing := digests.keys() - arrays.keys() - {"card"}:
        wrong |= dict.fromkeys(missing, "it is not there")
    if wrong:
        raise damaged(path, wrong)
    return Head(jax.tree.map(jnp.asarray, unflatten_dict(arrays, sep="/")), _card(path, text))


def _card(path: Path, text: str) -> Card:
    given: dict[str, Any] = json.loads(text)
    known = {field.name for field in fields(Card)}
    try:
        return Card(**{name: value for name, value in given.items() if name in known})
    except TypeError as error:
        raise CheckpointError(f"{path}: its card lacks an entry ({error}); train the head again") from error


def _text_digest(text: str) -> str:
    return digest(np.frombuffer(text.encode(), np.uint8))

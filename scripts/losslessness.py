"""Does speculative decoding keep the target's distribution? Counts over many simulated requests, against exact numbers.

A small world with V = 8: the target's next token depends on the last two tokens, the drafter's hidden states on the
anchor. Every request decodes rounds of draft_block and verify_block until it has three tokens; their joint counts over
all requests are compared with the exact probabilities (float64) by a chi-square test, cells expected below 5 pooled.

    python scripts/losslessness.py                 the whole matrix, 504 settings (about an hour on two cores)
    python scripts/losslessness.py --pairwise      24 settings that cover every pair of options
    python scripts/losslessness.py --requests 4000000 --only candidates
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import CostTable, DraftSampling, DSparkConfig, draft_block, verify_block
from dspark_jax.confidence.schedule import admit, survival
from dspark_jax.drafting.confidence_head import ConfidenceHead
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.drafting.heads import GatedMarkovHead, RnnMarkovHead, VanillaMarkovHead

V, S, H, REDUCED = 8, 3, 4, 6
COMMITTED = 3
WORLD = 9  # the seed of a world in which dense drafts give 1.4 to 3.8 tokens a round
GROUP = 50  # requests that one scheduler call plans together
POSITION = 10
CONTINUED = 3  # continuations beside the candidates of a "continued" draft

# How a block is drafted and handed to the verifier: (name, k); k = 0 makes the whole draft vocabulary candidates.
FORMS = (
    ("greedy", None), ("dense", None), ("rows", 1), ("rows", 4), ("rows", 0),
    ("candidates", 1), ("candidates", 4), ("candidates", 0),
)  # fmt: skip
KINDS = ("vanilla", "gated", "rnn")
TEMPERATURES = (0.3, 1.0, 1.7)
SCHEDULES = ("none", "prefix", "min_confidence")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cell of the matrix; `form` is one of FORMS."""

    form: tuple[str, int | None]
    kind: str
    temperature: float
    reduced: bool
    schedule: str
    rule: str = "token"

    def __str__(self) -> str:
        name, k = self.form
        k = {None: "", 0: " k=V"}.get(k, f" k={k}")
        vocabulary = "d2t" if self.reduced else "full"
        return f"{name}{k} {self.kind} T={self.temperature} {vocabulary} schedule={self.schedule} {self.rule}"


def whole_matrix() -> list[Setting]:
    """Every combination; the target-only rule, which reads no q, once for each way of sampling drafts."""
    cells = itertools.product(FORMS, KINDS, TEMPERATURES, (False, True), SCHEDULES)
    settings = [Setting(*cell) for cell in cells]
    cells = itertools.product((("dense", None), ("candidates", 4)), KINDS, TEMPERATURES, (False, True), SCHEDULES[:2])
    return settings + [Setting(*cell, rule="target_only") for cell in cells]


def pairwise() -> list[Setting]:
    """24 settings in which every pair of values of two options occurs together at least once."""
    settings = []
    for i, form in enumerate(FORMS):
        for j, kind in enumerate(KINDS):
            temperature, schedule = TEMPERATURES[(i + j) % 3], SCHEDULES[(i + 2 * j + i // 3) % 3]
            settings.append(Setting(form, kind, temperature, (i + j + (j == 2) * (i // 2)) % 2 == 1, schedule))
    return settings


def target_table(seed: int) -> np.ndarray:
    """Return the target's logits [V, V, V]: last token but one, last token, next token."""
    rng = np.random.default_rng(seed)
    pair, triple = rng.normal(size=(V, V)), rng.normal(size=(V, V, V))
    return (1.5 * pair[None] + 0.5 * triple).astype(np.float32)


def make_head(kind: str, reduced: bool, table: np.ndarray, seed: int) -> DSparkHead:
    """Build a drafter of the target that knows its bigrams, with an error of its own, so that much is accepted."""
    rng = np.random.default_rng(seed + 1)
    Vd = REDUCED if reduced else V
    ids = np.sort(rng.choice(V, Vd, replace=False)).astype(np.int32)

    def near(*shape: int, std: float = 0.3) -> jax.Array:
        return jnp.asarray(std * rng.normal(size=shape), jnp.float32)

    # w1 = I makes z the one-hot of the previous token, so that row j of w2 holds the bias of token j after each token.
    w1, w2 = jnp.eye(V), jnp.asarray(table).mean(axis=0)[:, ids].T + near(Vd, V, std=0.2)
    if kind == "vanilla":
        markov = VanillaMarkovHead(w1, w2)
    elif kind == "gated":
        markov = GatedMarkovHead(w1, 1.3 * w2, near(V, H + V, std=1.0), jnp.ones(V))
    else:
        weight = near(3 * V, 2 * V + H).at[2 * V :, V : 2 * V].add(2 * jnp.eye(V))
        markov = RnnMarkovHead(w1, w2, weight, near(3 * V))
    config = DSparkConfig(
        vocab_size=V, draft_vocab_size=Vd, hidden_size=H, block_size=S, mask_token_id=0, markov_rank=V,
        markov_head_type=kind, enable_confidence_head=True, confidence_head_with_markov=True,
    )  # fmt: skip
    # The confidence depends on the token drafted before, so that a schedule that looked ahead would bias the output.
    weight = jnp.concatenate([near(H, std=0.2), near(V, std=1.2)])
    confidence = ConfidenceHead(weight, jnp.float32(1.5))
    return DSparkHead(config, near(Vd, H, std=0.2), markov, confidence, jnp.asarray(ids) if reduced else None)


def cost_table() -> CostTable:
    """Steps get dearer beyond GROUP * 2 tokens, so that schedules cut blocks."""
    return CostTable.make([GROUP, 2 * GROUP, 4 * GROUP], [100.0, 90.0, 55.0])


@partial(jax.jit, static_argnames=("form", "schedule", "rule", "distort"))
def simulate(
    head: DSparkHead,
    table: jax.Array,
    hidden_of: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    costs: CostTable,
    *,
    form: tuple[str, int | None],
    schedule: str,
    rule: str = "token",
    distort: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Decode until each of N requests has three tokens.

    Args:
        table: float32 [V, V, V]; hidden_of: float32 [V, S, H], hidden states of a block by its anchor.
        temperature: float32 [N]; seeds: uint32 [N].
        distort: a function of the block, applied before verification (for power checks), or None.

    Returns:
        tokens int32 [N, 3]; number of tokens each round committed, int32 [3, N].
    """
    N = seeds.shape[0]
    name, k = form
    k = head.config.Vd if k == 0 else k
    outputs = {"greedy": "tokens", "dense": "logits", "rows": "logits"}.get(name, "candidates")
    rows = jnp.arange(N)[:, None]

    def one_round(carry: Any, _: None) -> tuple[Any, jax.Array]:
        history, count = carry  # history: two tokens of context, then the committed ones, then room
        last2 = jnp.take_along_axis(history, count[:, None] + jnp.arange(2)[None], axis=1)
        draw = DraftSampling(temperature, seeds, POSITION + count)
        block = draft_block(
            head, hidden_of[last2[:, 1]], last2[:, 1], sampling=None if name == "greedy" else draw, topk=k,
            outputs=outputs, markov_topk=CONTINUED if name == "continued" else 0,
            min_confidence=0.35 if schedule == "min_confidence" else None,
        )  # fmt: skip
        limit = block.num_draft
        if schedule == "prefix":

            def grouped(x: jax.Array) -> jax.Array:
                return x.reshape(N // GROUP, GROUP, *x.shape[1:])

            plan = jax.vmap(admit, in_axes=(0, 0, None, None))
            assert block.confidence is not None
            chances = survival(block.confidence)
            limit = plan(grouped(chances), grouped(limit), jnp.ones(GROUP, bool), costs).reshape(-1)
        context = jnp.concatenate([last2, block.tokens], axis=1)
        logits = table[context[:, :-1], context[:, 1:]]
        block = block if distort is None else distort(block)
        out = verify_block(block, logits, draw, num_draft=limit, rule=rule)
        where = jnp.where(out.tokens >= 0, 2 + count[:, None] + jnp.arange(S + 1)[None], history.shape[1])
        history = history.at[rows, where].set(out.tokens, mode="drop")
        return (history, jnp.minimum(count + out.num_committed, COMMITTED)), out.num_committed

    history = jnp.zeros((N, 2 + COMMITTED + S + 1), jnp.int32).at[:, 1].set(1)
    (history, _), committed = jax.lax.scan(one_round, (history, jnp.zeros(N, jnp.int32)), None, length=COMMITTED)
    return history[:, 2 : 2 + COMMITTED], committed


def exact_joint(table: np.ndarray, temperature: float) -> np.ndarray:
    """Return the target's probabilities of the first three tokens after (0, 1), float64 [V, V, V]."""
    logits = table.astype(np.float64) / temperature
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("a,ab,abc->abc", p[0, 1], p[1], p)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the p-value of counts under probabilities; cells expected below 5 are pooled."""
    from scipy.stats import chi2

    counts, expected = counts.reshape(-1).astype(np.float64), probabilities.reshape(-1) * counts.sum()
    small = expected < 5
    if counts[expected == 0].any():
        return 0.0
    seen, wanted = counts[~small], expected[~small]
    if expected[small].sum() >= 5:
        seen, wanted = np.append(seen, counts[small].sum()), np.append(wanted, expected[small].sum())
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(chi2.sf(statistic, len(seen) - 1))


def greedy_chain(table: np.ndarray) -> list[int]:
    """Return the target's own greedy continuation of (0, 1)."""
    chain = [0, 1]
    for _ in range(COMMITTED):
        chain.append(int(np.argmax(table[chain[-2], chain[-1]])))
    return chain[2:]


@dataclasses.dataclass(frozen=True)
class Result:
    """p_value of the joint counts; tokens: mean a round commits; whether greedy requests equal the greedy chain."""

    p_value: float
    tokens: float
    greedy_equal: bool


def run(setting: Setting, requests: int, seed: int = WORLD, distort: Any = None) -> Result:
    """Simulate one setting; one group of greedy requests stands behind the sampled ones, in the same batch."""
    sampled = requests - requests % GROUP
    requests = sampled + GROUP
    table = target_table(seed)
    head = make_head(setting.kind, setting.reduced, table, seed)
    if setting.form[0] == "continued":
        head = head.with_continuations(CONTINUED)
    hidden_of = np.random.default_rng(seed + 2).normal(size=(V, S, H)).astype(np.float32)
    temperature = np.where(np.arange(requests) < sampled, setting.temperature, 0.0).astype(np.float32)
    tokens, committed = simulate(
        head, jnp.asarray(table), jnp.asarray(hidden_of), jnp.asarray(temperature),
        jnp.arange(requests, dtype=jnp.uint32) + np.uint32(seed * 2**24), cost_table(),
        form=setting.form, schedule=setting.schedule, rule=setting.rule, distort=distort,
    )  # fmt: skip
    tokens, committed = np.asarray(tokens), np.asarray(committed)
    counts = np.bincount(tokens[:sampled] @ np.array([V * V, V, 1]), minlength=V**3)
    return Result(
        chi_square(counts, exact_joint(table, setting.temperature)),
        float(committed[0, :sampled].mean()),
        bool((tokens[sampled:] == greedy_chain(table)).all()),
    )


def main() -> int:
    """Run the settings; print one line each and return 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--pairwise", action="store_true", help="24 settings instead of all")
    parser.add_argument("--only", default="", help="settings whose line contains this text")
    parser.add_argument("--seed", type=int, default=WORLD, help="of the world and of the requests")
    args = parser.parse_args()
    settings = [s for s in (pairwise() if args.pairwise else whole_matrix()) if args.only in str(s)]
    failed = 0
    for setting in settings:
        begin = time.perf_counter()
        result = run(setting, args.requests, args.seed)
        passed = result.p_value > 1e-4 and result.greedy_equal
        failed += not passed
        took = f"{time.perf_counter() - begin:5.1f}s"
        figures = f"p={result.p_value:.4f} tokens/round={result.tokens:.2f} greedy={result.greedy_equal}"
        print(f"{'ok  ' if passed else 'FAIL'} {figures} {took}  {setting}", flush=True)
    print(f"{len(settings)} settings, {args.requests} requests each: {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

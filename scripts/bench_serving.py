"""Serve a closed loop of users and measure: tokens/s per user and in total for plain, dense and top-k drafted decoding.

    python scripts/bench_serving.py                                       # bundled checkpoint, 1, 4, 16, 64 users
    python scripts/bench_serving.py --input-length 512 --output-length 256 --topk 64 --concurrency 1,8

Each of C users sends a request, waits for its last token and sends the next at once: a finished request's row is given
to a new one between two rounds (continuous batching). Prompts are synthetic, --input-length tokens long: pieces of the
tokens in --prompts, or random ids with --prompts random. Compilation is not measured. A second table gives each part's
share of a round, from the parts timed alone at the same shapes.
"""

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import DraftSampling, load_drafter, load_target, noise
from dspark_jax.cli.text import read_prompts
from dspark_jax.decoding import loop
from dspark_jax.decoding.inputs import prepare_options, start
from dspark_jax.drafting import candidates
from dspark_jax.drafting.drafter import propose_block
from dspark_jax.drafting.heads import bias, bias_at
from dspark_jax.progress import progress
from dspark_jax.verification.verify import verify

CHECKPOINTS = pathlib.Path(__file__).resolve().parent.parent / "checkpoints"


class Server:
    """A batch of C rows in which requests come and go.

    Args:
        mode: None for plain decoding, "off" for dense drafts, or k.
    """

    def __init__(self, target, drafter, mode, args, prompts):
        self.target, self.drafter, self.args = target, None if mode is None else drafter, args
        k = None if mode in (None, "off") else mode
        self.options, _ = prepare_options(target, self.drafter, sampled=args.temperature > 0, draft_topk=k)
        self.prompts, self.sent = prompts, 0

    def begin(self, count):
        """Prefill `count` new requests; return their state."""
        ids = [self.prompts[(self.sent + n) % len(self.prompts)] for n in range(count)]
        draw = None
        if self.args.temperature > 0:
            seeds = np.arange(self.sent, self.sent + count, dtype=np.uint32)
            draw = DraftSampling(np.full(count, self.args.temperature, np.float32), seeds, np.zeros(count, np.int32))
        self.sent += count
        state, _ = start(
            self.target, self.drafter, ids, self.options, sampling=draw, max_new_tokens=self.args.output_length
        )
        return state

    def round(self, state):
        """Run one round."""
        if self.drafter is None:
            return loop.plain_round(self.target, state, options=self.options)
        return loop.speculative_round(self.target, self.drafter, state, None, None, options=self.options)

    def run(self, users, requests):
        """Serve `requests` requests of `users` users: (seconds, seconds of each request, acceptance length)."""
        began = time.perf_counter()
        state, waiting = self.begin(users), requests - users
        sent_at, took = [began] * users, []
        busy = np.ones(users, bool)
        committed = rounds = 0
        while busy.any():
            state, done = self.round(state)
            counts, active = jax.device_get((done.committed, state.active))
            committed, rounds = committed + int(counts[busy].sum()), rounds + int(busy.sum())
            for row in np.flatnonzero(busy & ~active):
                took.append(time.perf_counter() - sent_at[row])
                busy[row] = False
                if waiting > 0:
                    waiting -= 1
                    sent_at[row], busy[row] = time.perf_counter(), True
                    state = loop.replace_rows(state, jnp.asarray([row], jnp.int32), self.begin(1))
        return time.perf_counter() - began, took, committed / max(rounds, 1)


def serve(target, drafter, prompts, args, advance):
    """Return one row per mode and concurrency."""
    rows = []
    for mode in [None, "off", *args.topk]:
        for users in args.concurrency:
            name = "plain" if mode is None else "dense drafts" if mode == "off" else f"top-{mode} drafts"
            advance(f"{name}, {users} users")
            server = Server(target, drafter, mode, args, prompts)
            server.run(users, users + 1)  # compiles all that the measured run needs
            requests, runs = max(args.rounds_of_requests * users, 4), []
            for _ in range(args.repeats):
                server.sent = 0
                runs.append(server.run(users, requests))
            seconds, took, length = min(runs)  # the run that other work on the machine disturbed least
            rows.append(
                {
                    "decoding": name,
                    "concurrency": users,
                    "requests": requests,
                    "tokens_per_s": requests * args.output_length / seconds,
                    "tokens_per_s_per_user": args.output_length / float(np.mean(took)),
                    "acceptance_length": length,
                }
            )
    return rows


def median_ms(function, *arguments, repeats=15):
    """Return the median milliseconds of a jitted function."""
    jitted, times = jax.jit(function), []
    jax.block_until_ready(jitted(*arguments))
    for _ in range(repeats):
        at = time.perf_counter()
        jax.block_until_ready(jitted(*arguments))
        times.append(1e3 * (time.perf_counter() - at))
    return float(np.median(times))


def profile(target, drafter, prompts, args, users, mode):
    """Return milliseconds of the parts of one round with `users` requests, each timed alone."""
    server = Server(target, drafter, mode, args, prompts)
    state, options = server.begin(users), server.options
    assert state.context is not None
    assert state.features is not None
    drafting = options.draft
    assert drafting is not None
    assert drafting.num_steps is not None
    head, S, k = drafter.head, drafting.num_steps, drafting.topk
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    probabilistic = draw if options.method == "probabilistic" else None
    r = head.config.markov_rank
    hidden = jnp.ones((S, users, head.config.hidden_size), drafter.backbone.dtype)
    base = jax.random.normal(jax.random.key(0), (S, users, head.config.Vd)).astype(drafting.logits_dtype)
    latent = jax.random.normal(jax.random.key(1), (S, users, r))
    width = head.config.Vd if k is None else k
    corrected = jax.random.normal(jax.random.key(2), (S, users, width))
    block, _ = propose_block(
        drafter,
        state.context,
        state.features,
        state.anchor,
        state.position,
        probabilistic,
        None,
        options=drafting,
    )

    def backbone(drafter, state):
        context = drafter.backbone.extend(state.context, state.features, state.position)
        return drafter.backbone(context, jnp.ones((users, head.config.block_size), jnp.int32))

    def project(head, latent, ids):
        w2 = head.markov.markov_w2[...]
        if ids is None:
            return jax.lax.map(lambda z: bias(z, w2), latent)
        return jax.lax.map(lambda x: bias_at(x[0], w2, x[1]), (latent, ids))

    def draw_tokens(corrected, draw):
        def step(x):
            if probabilistic is None:
                return noise.choose(x)
            ids = jnp.arange(width, dtype=jnp.int32)
            bits = noise.noise_bits(draw.seed[:, None], draw.position[:, None], 0, noise.DRAFT, ids)
            return noise.choose(noise.scores(x, draw.temperature, bits))

        return jax.lax.map(step, corrected)

    def run_target(target, state, block):
        ids = jnp.concatenate([state.anchor[:, None], block.tokens], axis=1)
        hidden, features, _ = target.forward(ids, state.position, state.target_cache, options.taps)
        return target.logits(hidden), features

    def check(block, logits, draw):
        return verify(block, logits, draw, block.num_draft, None, None, rule="token")

    logits, _ = jax.jit(run_target)(target, state, block)
    ids = None if k is None else candidates.select(base, k)[1]
    parts = {
        "backbone": median_ms(backbone, drafter, state),
        "LM head": median_ms(lambda head, hidden: head.base_logits(hidden, drafting.logits_dtype), head, hidden),
        "selection": 0.0 if k is None else median_ms(lambda x: candidates.select(x, k), base),
        "draft projection": median_ms(project, head, latent, ids),
        "sampling": median_ms(draw_tokens, corrected, draw),
        "target": median_ms(run_target, target, state, block),
        "verification": median_ms(check, block, logits, draw),
    }
    whole = []
    for _ in range(16):
        at = time.perf_counter()
        state, _ = jax.block_until_ready(server.round(state))
        whole.append(1e3 * (time.perf_counter() - at))
    return parts, float(np.median(whole[1:]))


def read_synthetic(args, vocab_size, count=256):
    """Return prompts of --input-length tokens: random windows of the tokens in a file, or random ids."""
    rng = np.random.default_rng(0)
    if args.prompts == "random":
        return rng.integers(0, vocab_size, (count, args.input_length)).tolist()
    text = np.concatenate([t for turns in read_prompts(args.prompts, args.target) for t in turns])
    text = np.tile(text, -(-(args.input_length + 1) // len(text)))
    starts = rng.integers(0, len(text) - args.input_length, count)
    return [text[at : at + args.input_length].tolist() for at in starts]


def tables(report):
    """Return the report as Markdown."""
    users = sorted({row["concurrency"] for row in report["serving"]})
    names = list(dict.fromkeys(row["decoding"] for row in report["serving"]))
    lines = ["tokens/s per user (total); acceptance length", ""]
    lines += ["| decoding | " + " | ".join(f"{n} users" for n in users) + " |", "|---" * (len(users) + 1) + "|"]
    for name in names:
        cells = []
        for n in users:
            row = next(r for r in report["serving"] if (r["decoding"], r["concurrency"]) == (name, n))
            cells.append(
                f"{row['tokens_per_s_per_user']:.1f} ({row['tokens_per_s']:.0f}); {row['acceptance_length']:.2f}"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for entry in report["profile"]:
        total = sum(entry["milliseconds"].values())
        parts = entry["milliseconds"]
        lines += [
            "",
            f"Parts of a round, {entry['decoding']}, {entry['concurrency']} users: {entry['round_ms']:.2f} ms a round; "
            f"the parts timed alone sum to {total:.2f} ms",
            "",
            "| " + " | ".join(parts) + " |",
            "|---" * len(parts) + "|",
            "| " + " | ".join(f"{ms:.2f} ms, {ms / total:.0%}" for ms in parts.values()) + " |",
        ]
    return "\n".join(lines)


def numbers(text):
    """Read a list of integers separated by commas."""
    return [int(item) for item in text.split(",") if item]


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(CHECKPOINTS / "dspark-vanilla"))
    parser.add_argument("--target", default=str(CHECKPOINTS / "target"))
    parser.add_argument("--prompts", default=str(CHECKPOINTS / "prompts.jsonl"), metavar="FILE|random")
    parser.add_argument("--topk", type=numbers, default=[64, 256], metavar="LIST", help="default: 64,256")
    parser.add_argument(
        "--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="LIST", help="default: 1,4,16,64"
    )
    parser.add_argument("--input-length", type=int, default=96)
    parser.add_argument("--output-length", type=int, default=64)
    parser.add_argument("--rounds-of-requests", type=int, default=3, help="requests per user (default: 3)")
    parser.add_argument("--repeats", type=int, default=1, help="measure this often, keep the fastest (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile-at", type=numbers, default=[1, 16], metavar="LIST", help="users of the profiles")
    parser.add_argument("--dtype", help="dtype of all weights (default: as stored)")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    drafter = load_drafter(args.checkpoint, dtype=args.dtype, target=args.target)
    prompts = read_synthetic(args, target.vocab_size)
    modes = ["off", *args.topk]
    with progress((1 + len(modes)) * len(args.concurrency) + len(modes) * len(args.profile_at), "bench") as advance:
        serving = serve(target, drafter, prompts, args, advance)
        profiles = []
        for mode in modes:
            for users in args.profile_at:
                name = "dense drafts" if mode == "off" else f"top-{mode} drafts"
                advance(f"profile of {name}, {users} users")
                parts, whole = profile(target, drafter, prompts, args, users, mode)
                entry = {"decoding": name, "concurrency": users, "milliseconds": parts, "round_ms": whole}
                profiles.append(entry)
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": args.dtype or "stored",
        "temperature": args.temperature,
        "input_length": args.input_length,
        "output_length": args.output_length,
        "serving": serving,
        "profile": profiles,
    }
    print(tables(report))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every key of every family's config made wrong in every way: a right result or one line, in little memory."""

import importlib.util
import json
import resource
import time

import pytest
from fixture_checkpoints import make

from dspark_jax import load_drafter, load_head
from dspark_jax.checkpoint import convert, inspect, verify

FIXTURES = ("deepspec-vanilla", "deepspec-gemma4", "speculators-full", "specforge", "torchspec", "deepseek-v4")
REMOVED = object()
VALUES = (REMOVED, None, "x", 5, -1, 0, True, 1.5, [], {}, [[5]], {"x": [1]}, 2**31, 2**63, -(2**40))


def places(config):
    """Yield the path of every key, those of inner objects included."""
    for key, value in config.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *inner) for inner in places(value))


def changed(config, path, value):
    result = json.loads(json.dumps(config))
    place = result
    for key in path[:-1]:
        place = place[key]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def attempt(call):
    """Run; anything but a result or a one-line error of the promised kinds is a failure. Return the seconds it took."""
    start, said = time.monotonic(), "a result"
    try:
        call()
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    assert "\n" not in said
    assert 0 < len(said) < 20_000
    return time.monotonic() - start


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fixture", FIXTURES)
def test_wrong_configs_give_one_line_or_a_right_result(tmp_path, fixture, share, record_property):
    """One mutation in `share`: all of them run with the slow tests."""
    path = make(fixture, tmp_path)
    convert(path, tmp_path / "right")
    with_torch = importlib.util.find_spec("torch") is not None
    attempt(lambda: load_head(path))  # what is imported on the way is not the configs' doing
    if with_torch:
        attempt(lambda: verify(path, tmp_path / "right"))
    config = json.loads((path / "config.json").read_text())
    before, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    number = 0
    for at in places(config):
        for value in VALUES:
            number += 1
            if number % share:
                continue
            (path / "config.json").write_text(json.dumps(changed(config, at, value)))
            calls = [lambda: inspect(path), lambda: load_head(path)]
            if number // share % 7 == 0:  # building a whole drafter takes longer; its checks come before
                calls.append(lambda: load_drafter(path))
            if number // share % 11 == 0:
                calls.append(lambda n=number: convert(path, tmp_path / f"out{n}"))
            if number // share % 13 == 0 and with_torch:
                calls.append(lambda: verify(path, tmp_path / "right"))
            slowest = max([slowest, *map(attempt, calls)])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    record_property("slowest_seconds", slowest)
    record_property("grown_kilobytes", grown)
    print(f"{fixture}: {number} configs, slowest call {slowest:.2f} s, peak memory grew by {grown / 1024:.0f} MB")
    assert number > 100
    assert grown < 200 * 1024


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**31), ("head_dim", 2**31), ("intermediate_size", 2**40), ("vocab_size", 2**40),
        ("num_attention_heads", 2**20), ("hidden_size", 2**31 - 1), ("markov_rank", 2**31 - 1), ("architectures", 5),
        ("block_size", 2**16), ("max_position_embeddings", 2**62),
    ],
)  # fmt: skip
@pytest.mark.parametrize("load", [load_head, load_drafter, inspect])
def test_sizes_that_a_config_claims_are_compared_before_anything_is_built(tmp_path, key, value, load):
    path = make("deepspec-vanilla", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: value}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attempt(lambda: load(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024

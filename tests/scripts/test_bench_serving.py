"""The closed loop of scripts/bench_serving.py on tiny models."""

import argparse

import bench_serving as bench
import numpy as np
import pytest
from tiny import make_drafter, make_target


@pytest.mark.slow
def test_every_request_is_served_and_users_never_wait():
    target = make_target(num_hidden_layers=2)
    drafter = make_drafter(num_hidden_layers=1, target_layer_ids=[-1, 0], num_target_layers=2)
    args = argparse.Namespace(temperature=0.0, output_length=9)
    prompts = np.random.default_rng(0).integers(0, 37, (8, 4)).tolist()
    server = bench.Server(target, drafter, 3, args, prompts)
    seconds, took, length = server.run(2, 5)
    assert len(took) == 5
    assert server.sent == 5
    # Two users at once, no gaps: the requests' times add up to at most two users' time.
    assert max(took) <= seconds
    assert seconds <= sum(took) <= 2 * seconds + 1e-3
    assert 1 <= length <= 6


def test_synthetic_prompts():
    args = argparse.Namespace(prompts="random", input_length=7)
    found = bench.read_synthetic(args, 37, count=5)
    assert {len(prompt) for prompt in found} == {7}
    assert all(0 <= token < 37 for prompt in found for token in prompt)

"""The package as a whole: lazy imports, and a platform without Pallas' Triton backend."""

import ast
import inspect
import subprocess
import sys
import textwrap

import dspark_jax


def run(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    code = textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_modules_that_need_jax_alone_import_no_flax():
    found = run("""
        import sys
        import dspark_jax, dspark_jax.noise, dspark_jax.config, dspark_jax.linear, dspark_jax.types
        dspark_jax.DSparkConfig(vocab_size=9, hidden_size=4, block_size=3, mask_token_id=0, markov_rank=2,
                                markov_head_type="rnn")
        print("flax" in sys.modules, "dspark_jax.drafting" in sys.modules)
    """)
    assert found == "False False"


def test_the_package_drafts_where_triton_is_absent():
    found = run("""
        import sys
        sys.modules["jax.experimental.pallas.triton"] = None  # an import of it fails
        import jax.numpy as jnp, numpy as np
        sys.path.insert(0, "tests")
        from helpers import make_head
        import dspark_jax
        block = dspark_jax.draft_block(make_head(), np.ones((2, 3, 12), np.float32), [1, 2], topk=5)
        print(block.tokens.shape)
        try:
            dspark_jax.draft_block(make_head(), np.ones((2, 3, 12), np.float32), [1, 2], implementation="pallas")
        except ImportError as error:
            print("refused")
    """)
    assert found.splitlines() == ["(2, 3)", "refused"]


def test_every_public_name_is_listed_where_it_lives():
    tree = ast.parse(inspect.getsource(dspark_jax))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == dspark_jax._HOMES
    assert set(dspark_jax._HOMES) <= set(dir(dspark_jax))
    for name in dspark_jax._HOMES:
        assert getattr(dspark_jax, name).__name__ == name

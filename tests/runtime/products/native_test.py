"""Tests of the compiled matrix products: correct for every shape and dtype; bits do not depend on rows or threads."""

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccascade_jax.models.products import panels
from speccascade_jax.runtime import products
from speccascade_jax.runtime.products import native

if not products.available():
    pytest.skip(f"no products of its own: {native.unavailable()}", allow_module_level=True)
from speccascade_jax.runtime.products import handler
from speccascade_jax.runtime.products.handler import ROWS

call = jax.jit(native.call)


def made(inputs, columns, kind, seed=0):
    """Returns a packed matrix and its values as float64."""
    matrix = np.random.default_rng(seed).normal(size=(inputs, columns)).astype(np.float32)
    packed = panels(matrix, kind, products.width())
    return packed, np.asarray(packed).astype(np.float64)


def inputs_of(rows, width, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(products.KINDS),
    st.integers(1, 3 * ROWS),
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 9),
)
def test_results_equal_the_matrix_product(kind, rows, inputs, columns, seed):
    packed, matrix = made(inputs, columns, kind, seed)
    x = inputs_of(rows, inputs)
    y = np.asarray(call(x, packed.panels, packed.scales))
    bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(matrix)) + 1e-7
    assert np.all(np.abs(y[:, :columns] - x.astype(np.float64) @ matrix) <= bound)
    assert np.all(y[:, columns:] == 0)


@pytest.mark.parametrize("kind", products.KINDS)
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(kind):
    packed, _ = made(300, 500, kind)
    x = inputs_of(4 * ROWS, 300)
    whole = np.asarray(call(x, packed.panels, packed.scales))
    for rows in (1, 2, 3, 4, 5, ROWS, ROWS + 1, 2 * ROWS + 1):
        np.testing.assert_array_equal(call(x[:rows], packed.panels, packed.scales), whole[:rows])
    np.testing.assert_array_equal(call(x[::-1], packed.panels, packed.scales), whole[::-1])


def test_many_threads_can_compute_products_at_once():
    """Jobs of several callers share XLA's threads; a lost or doubled panel would show, and a deadlock never end."""
    packed, _ = made(128, 4096, "float32")

    @jax.jit
    def chain(x, panels):
        for _ in range(8):
            x = jnp.tanh(native.call(x, panels, None)[:, : x.shape[1]])
        return x

    x = [inputs_of(rows, 128, seed=rows) for rows in (1, 2, 5, 8)]
    expected = [np.asarray(chain(sample, packed.panels)) for sample in x]
    wrong = []

    def repeat(number):
        for _ in range(60):
            if not np.array_equal(chain(x[number], packed.panels), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=partial(repeat, number), daemon=True) for number in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_every_call_computes_every_panel():
    """Different inputs in one buffer: a panel computed too late or not at all would show the previous call."""
    packed, matrix = made(512, 8192, "float32")
    xs = inputs_of(2 * 300, 512).reshape(300, 2, 512)  # so many that helpers come in time for some on a busy machine

    @jax.jit
    def all_of(xs, panels):
        return jax.lax.map(lambda x: native.call(x, panels, None), xs)

    np.testing.assert_allclose(all_of(xs, packed.panels), xs.astype(np.float64) @ matrix, atol=2e-3)


@pytest.mark.laws
@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_jobs_are_freed(comes, request):
    """Includes jobs that are taken back from the letter box because no helper `comes` for them."""
    packed, _ = made(128, 256, "float32")  # the product is large enough to ask other threads for help

    @jax.jit
    def often(x, panels, count):
        return jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(native.call(x, panels, None)[:, :128]), x)

    def resident():
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    x = inputs_of(1, 128)
    often(x, packed.panels, 1000).block_until_ready()
    if not comes:
        time.sleep(0.1)  # any waiting helper has ended by then; from now on one seems to wait
        handler._BOX[8] = 1
        request.addfinalizer(lambda: handler._BOX.__setitem__(8, 0))
    before = resident()
    often(x, packed.panels, 200_000).block_until_ready()
    assert resident() - before < 1e7  # a job is 170 bytes: without the release, they would take 34 MB


def test_infinities_and_nan_reach_the_result():
    packed, _ = made(40, 30, "float32")
    x = inputs_of(3, 40)
    x[1, 5], x[2, 7] = np.nan, np.inf
    y = np.asarray(call(x, packed.panels, packed.scales))
    assert np.isfinite(y[0, :30]).all() and np.isnan(y[1, :30]).all() and not np.isfinite(y[2, :30]).any()


@pytest.mark.parametrize(("processor", "lines"), [("sapphirerapids", 4), ("znver4", 0), ("znver5", 0), ("generic", 4)])
def test_lines_are_prefetched_only_on_processors_where_it_helps(monkeypatch, processor, lines):
    """There is one prefetch for each 64 bytes of a row of the panel."""
    monkeypatch.setattr(handler.llvm, "get_host_cpu_name", lambda: processor)
    monkeypatch.setattr(handler, "ahead", handler.ahead.__wrapped__)
    module = handler.ir.Module()
    handler.tile(module, "float32", 2, 64)
    assert str(module).count('call void @"llvm.prefetch.p0"') == lines

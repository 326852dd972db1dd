"""The checks of kernels are checked: kernels with a known fault, which must not get through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from kvec_jax.pallas.aot import compile_for
from kvec_jax.pallas.compat import simulated_tpu

TPUS = ("v5e", "v5p", "v6e")


def _double(x, block, **settings):
    """A grid over blocks of ``x``, right in every interpreter; whether a chip can do it depends on the block."""

    def kernel(x_ref, out_ref, *scratch_refs):
        out_ref[...] = x_ref[...] * 2.0

    spec = pl.BlockSpec(block, lambda i: (i, 0))
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (x.shape[0] // block[0],)
    return pl.pallas_call(kernel, out_shape=out, grid=grid, in_specs=[spec], out_specs=spec, **settings)(x)


def _copy_rows(x, wait: bool):
    """Copies ``x`` by hand; without waiting for the copy to arrive it may read what was there before."""

    def kernel(x_ref, out_ref, buffer, semaphore):
        copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
        copy.start()
        if wait:
            copy.wait()
        out_ref[...] = buffer[...]
        if not wait:
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    )(x)


def _read_past_the_end(x, row):
    def kernel(row_ref, x_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(row_ref[0], 8), :]

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, x.shape[1]), x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
    )(row, x)


def test_a_block_that_breaks_the_tile_rule_passes_the_interpreter():
    x = jnp.arange(16.0 * 128).reshape(16, 128)
    np.testing.assert_array_equal(_double(x, (4, 128), interpret=True), 2 * x)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TPUS)
def test_a_block_that_breaks_the_tile_rule_is_refused(chip):
    pytest.importorskip("libtpu")
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    compile_for(chip, lambda x: _double(x, (8, 128)), x)
    with pytest.raises(Exception, match="divisible by 8 and 128"):
        compile_for(chip, lambda x: _double(x, (4, 128)), x)


@pytest.mark.aot_tpu
@pytest.mark.parametrize("chip", TPUS)
def test_memory_that_the_chip_does_not_have_is_refused(chip):
    pytest.importorskip("libtpu")
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    scratch = pltpu.VMEM((1 << 19, 128), jnp.float32)  # 256 MiB
    with pytest.raises(Exception, match="(?i)vmem"):
        compile_for(chip, lambda x: _double(x, (8, 128), scratch_shapes=[scratch]), x)


@pytest.mark.aot_gpu
def test_memory_that_a_gpu_does_not_have_is_refused():
    pytest.importorskip("jax_plugins.xla_cuda13")

    def square(size):
        def kernel(x_ref, out_ref):
            out_ref[...] = triton.dot(x_ref[...], x_ref[...])

        x = jax.ShapeDtypeStruct((size, size), jnp.float32)
        params = triton.CompilerParams(num_warps=4, num_stages=1)
        return compile_for("h100", lambda x: pl.pallas_call(kernel, out_shape=x, compiler_params=params)(x), x)

    square(64)
    with pytest.raises(Exception, match="(?i)shared memory"):
        square(512)


def test_a_copy_that_is_waited_for_is_no_race():
    x = jnp.arange(8.0 * 128).reshape(8, 128)
    with simulated_tpu():
        np.testing.assert_array_equal(_copy_rows(x, wait=True), x)


def test_a_race_is_caught():
    x = jnp.arange(8.0 * 128).reshape(8, 128)
    with pytest.raises(Exception, match="(?i)race"), simulated_tpu():
        jax.block_until_ready(_copy_rows(x, wait=False))


def test_an_access_out_of_bounds_is_caught():
    x, row = jnp.ones((16, 128)), jnp.array([9], jnp.int32)
    with pytest.raises(Exception, match="(?i)out.of.bounds"), simulated_tpu():
        jax.block_until_ready(_read_past_the_end(x, row))

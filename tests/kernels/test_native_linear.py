"""The native linear layer for few rows, against torch's product in fp64; and what is left to torch."""

from __future__ import annotations

import pytest
import torch
from contract import WIDTHS, vector_width

from abc_attn.kernels import native, native_linear
from abc_attn.kernels.native_linear import MOST_ROWS, linear

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))

DTYPES = (torch.float32, torch.int8)


def weights(outputs, inputs, dtype):
    if dtype == torch.int8:
        return torch.randint(-127, 128, (outputs, inputs), dtype=dtype)
    return torch.randn(outputs, inputs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, MOST_ROWS])
@pytest.mark.parametrize("width", WIDTHS)
def test_products(width, rows, dtype, threads):
    """Widths and outputs with every kind of remainder: of a vector, of four outputs, of the rows of a tile."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for inputs, outputs in ((1, 1), (5, 3), (16, 4), (31, 6), (64, 9), (100, 33)):
            x, weight = torch.randn(rows, inputs), weights(outputs, inputs, dtype)
            scale, bias = torch.rand(outputs), torch.randn(outputs)
            expected = x.double() @ weight.double().T
            size = (x.double().abs() @ weight.double().abs().T).max()
            for by, add in ((None, None), (scale, None), (None, bias), (scale, bias)):
                with vector_width(width):
                    found = linear(x, weight, by, add)
                wanted = expected * (1 if by is None else by.double()) + (0 if add is None else add.double())
                assert (found.double() - wanted).abs().max() < 1e-6 * size
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_x_has_any_shape_and_strides(dtype):
    x, weight = torch.randn(3, 40, 2).mT, weights(7, 40, dtype)
    assert torch.allclose(linear(x, weight), x @ weight.float().T, rtol=1e-4, atol=1e-3)
    assert linear(x[:0], weight).shape == (0, 2, 7)
    assert linear(x, weight[:0]).shape == (3, 2, 0)
    assert torch.equal(linear(x[..., :0], weight[:, :0].contiguous()), torch.zeros(3, 2, 7))


def test_a_number_that_is_not_finite_stays_where_it_is():
    x, weight = torch.ones(2, 20), torch.ones(5, 20)
    x[1, 3] = torch.nan
    weight[4, 19] = torch.inf
    found = linear(x, weight)
    assert found[0, :4].eq(20).all()
    assert found[0, 4].isinf()
    assert found[1].isnan().all()


def test_in_a_graph_any_number_of_rows_is_taken():
    weight, scale = weights(6, 10, torch.int8), torch.rand(6)
    for rows in (2, MOST_ROWS + 1):
        x = torch.randn(rows, 10)
        found = torch.ops.abc_attn.linear(x, weight, scale, None)
        assert torch.allclose(found, x @ weight.float().T * scale, rtol=1e-4, atol=1e-3)
    torch.library.opcheck(torch.ops.abc_attn.linear, (torch.randn(2, 10), weight, scale, torch.randn(6)))


def test_what_is_left_to_torch():
    x, weight = torch.randn(2, 10), torch.randn(6, 10)
    assert linear(x, weight) is not None
    assert linear(x.double(), weight.double()) is None
    assert linear(x.bfloat16(), weight.bfloat16()) is None
    assert linear(x, weight.T.contiguous().T) is None
    assert linear(torch.randn(MOST_ROWS + 1, 10), weight) is None
    weight.requires_grad_()
    assert linear(x, weight) is None
    with torch.no_grad():
        assert linear(x, weight) is not None
    assert torch.func.vmap(lambda row: native_linear.linear(row[None], weight.detach()) is None and row)(x) is not None


@pytest.mark.parametrize("wrong", ["weight", "scale", "bias"])
def test_other_sizes_are_refused(wrong):
    given = {"weight": torch.randn(6, 10), "scale": torch.rand(6), "bias": torch.randn(6)}
    given[wrong] = given[wrong][..., :-1].contiguous()
    with pytest.raises(ValueError, match="contiguous numbers of"):
        torch.ops.abc_attn.linear(torch.randn(2, 10), given["weight"], given["scale"], given["bias"])


@pytest.mark.parametrize("wrong", ["x", "weight", "scale", "bias"])
def test_other_types_are_refused(wrong):
    """Numbers of half the size: as many of them as expected would be read beyond their end."""
    given = {"x": torch.randn(2, 10), "weight": torch.randn(6, 10), "scale": torch.rand(6), "bias": torch.randn(6)}
    given[wrong] = given[wrong].half()
    with pytest.raises(ValueError, match=r"torch\.float16"):
        torch.ops.abc_attn.linear(*given.values())

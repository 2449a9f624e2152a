"""Products by cuBLASLt's fastest algorithm give torch's results; where there is none of it, torch's are taken."""

import pytest
import torch

from decode import cublaslt
from decode.cublaslt import TOLERANCE, WORKSPACE_BYTES, FastestProducts, Product
from decode.fused_ops import preferred_library


def drawn(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to("cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 72, 264])
@pytest.mark.parametrize(("width", "out_width"), [(576, 1536), (12288, 4096)])
def test_every_candidate_and_the_chosen_one_give_torchs_result(rows, width, out_width):
    x, weight = drawn(rows, width), drawn(out_width, width)
    exact = x.double() @ weight.double().t()
    scale = exact.abs().max()
    product = Product(rows, width, out_width, torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))
    out = torch.empty(rows, out_width, dtype=torch.bfloat16, device="cuda")
    candidates = product.candidates(8)
    assert candidates
    for candidate in candidates:
        product.run(candidate, x, weight, out.zero_())
        assert (out - exact).abs().max() <= TOLERANCE * scale
    fastest = FastestProducts()
    assert fastest.mm(x, weight, out.zero_()) is out
    assert (out - exact).abs().max() <= TOLERANCE * scale
    again = fastest.mm(x, weight, torch.zeros_like(out))
    assert torch.equal(again, out)


@pytest.mark.gpu
def test_a_shape_that_was_chosen_in_bfloat16_goes_to_torch_in_float32():
    x, weight, fastest = drawn(72, 64), drawn(96, 64), FastestProducts()
    fastest.mm(x, weight, torch.empty(72, 96, dtype=torch.bfloat16, device="cuda"))
    assert fastest._chosen
    wide, out = (x.float(), weight.float()), torch.empty(72, 96, device="cuda")
    assert torch.equal(fastest.mm(*wide, out), wide[0] @ wide[1].t())


@pytest.mark.parametrize("is_on", [True, False])
def test_linear_asks_for_it_within_passes_of_many_rows_and_if_switched_on(is_on, monkeypatch):
    monkeypatch.setattr(cublaslt, "IS_ON", is_on)
    for num_rows in (1, 16, 24, 264):
        assert not cublaslt.products.serves
        with preferred_library(num_rows):
            assert cublaslt.products.serves == (is_on and num_rows > 16)
    assert not cublaslt.products.serves


@pytest.mark.gpu
def test_a_capture_takes_what_was_chosen_and_never_chooses(monkeypatch):
    x, weight = drawn(72, 12288), drawn(4096, 12288)
    out, fastest = torch.zeros(72, 4096, dtype=torch.bfloat16, device="cuda"), FastestProducts()
    monkeypatch.setattr(cublaslt, "WORTH_IT", 100.0)  # whatever is fastest, torch's own way is not
    graph = torch.cuda.CUDAGraph()
    torch.mm(x, weight.t())
    with torch.cuda.graph(graph):
        fastest.mm(x, weight, out)
    assert not fastest._chosen
    fastest.mm(x, weight, out)
    (chosen,) = fastest._chosen.values()
    assert chosen is not None
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fastest.mm(x, weight, out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_other_tensors_and_a_library_that_fails_go_to_torch(monkeypatch):
    x, weight = drawn(72, 64).float(), drawn(96, 64).float()
    fastest = FastestProducts()
    assert torch.equal(fastest.mm(x, weight, torch.empty(72, 96, device="cuda")), x @ weight.t())
    assert not fastest._chosen

    def refuse(_device):
        raise RuntimeError("none here")

    monkeypatch.setattr(cublaslt, "_library", refuse)
    x, weight = x.bfloat16(), weight.bfloat16()
    assert not fastest._chosen
    out = torch.empty(72, 96, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(fastest.mm(x, weight, out), torch.mm(x, weight.t()))
    assert list(fastest._chosen.values()) == [None]

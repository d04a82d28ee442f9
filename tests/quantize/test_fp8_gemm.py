"""FP8 products on the matrix units agree with the simulation; missing support is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import residua
from residua.ops.low_precision.fp8 import BLOCK, ROW, encode_fp8
from residua.quantize import fp8_gemm, load_quantized, quantize
from residua.quantize.fp8_gemm import SCALINGS, Fp8Projection, find_product, takes, with_fp8_products
from residua.quantize.modules import LowProjection, targets
from residua.quantize.schemes import SCHEMES, find_scheme
from tests.quantize.adversarial import NAMES, tensors

CPU = torch.device("cpu")


def compare(scheme: str, device: torch.device, tokens: int, columns: int, rows: int) -> float:
    """Relative distance of the real product from the simulated one, on activations with an outlier."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, columns, generator=generator)
    x[:, 3] *= 100
    x, w = x.to(device), torch.randn(rows, columns, generator=generator).to(device)
    chosen = find_scheme(scheme)
    weight = chosen.weight(w)
    modules, problems = with_fp8_products({"w": weight}, scheme, device)
    assert not problems, problems
    return relative(modules["w"](x[None])[0], chosen.activation(x) @ weight.dequantize().T)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.shape == found.shape
    return float((found - expected).norm() / expected.norm())


def test_row_wise_products_agree_with_the_simulation() -> None:
    if find_product("row", CPU) is None:
        pytest.skip("this PyTorch has no FP8 product on the CPU")
    assert compare("fp8-row", CPU, 37, 64, 48) < 4e-3  # bf16 results


def test_missing_device_support_is_reported_not_emulated() -> None:
    if find_product("block", CPU) is not None:
        pytest.skip("this CPU has block-wise FP8 products")
    modules, problems = with_fp8_products({"w": encode_fp8(torch.randn(128, 128), BLOCK)}, "fp8", CPU)
    assert not modules and "no block-wise FP8 product on cpu" in problems["w"]


def test_shapes_unsupported_by_the_hardware_are_skipped() -> None:
    rows = encode_fp8(torch.randn(48, 64), ROW)
    assert takes(rows, "row") and not takes(rows, "block")
    assert not takes(encode_fp8(torch.randn(40, 64), ROW), "row")
    assert takes(encode_fp8(torch.randn(256, 128), BLOCK), "block")
    assert not takes(encode_fp8(torch.randn(144, 128), BLOCK), "block")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCALINGS)
@pytest.mark.parametrize("shape", [(512, 512, 1024), (2048, 768, 2048), (1001, 640, 384), (3, 1280, 256)])
def test_products_on_the_gpu_agree_with_the_simulation(scheme: str, shape: tuple[int, int, int]) -> None:
    device = torch.device("cuda")
    if find_product(SCALINGS[scheme][0], device) is None:
        pytest.skip(f"no {SCALINGS[scheme][0]}-wise FP8 product on {torch.cuda.get_device_name()}, {torch.__version__}")
    assert compare(scheme, device, *shape) < 4e-3


class _Divisions(TorchDispatchMode):
    """Notes every division by a plain number, which on CUDA is a product with its rounded reciprocal."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors, self.numbers = 0, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.reciprocal):
            divisors = [a for a in args[1:] if isinstance(a, torch.Tensor)]
            self.tensors += len(divisors)
            self.numbers += [] if divisors else [func]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_simulation_divides_only_by_tensors(scheme: str) -> None:
    """The reason it is the same on every device, checked without a GPU."""
    x, chosen = torch.randn(8, 64), find_scheme(scheme)
    with _Divisions() as seen:
        chosen.activation(x)
        chosen.weight(x).dequantize()
    assert seen.tensors and not seen.numbers


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_simulation_is_the_same_on_the_gpu(scheme: str, name: str) -> None:
    x, chosen = tensors(64, 384)[name], find_scheme(scheme)
    here, there = chosen.weight(x), chosen.weight(x.cuda())
    pairs = {f"weight's {field}": (getattr(here, field), getattr(there, field)) for field in here._fields}
    pairs = {what: pair for what, pair in pairs.items() if isinstance(pair[0], torch.Tensor)}
    pairs["weight"] = (here.dequantize(), there.dequantize())
    pairs["activation"] = (chosen.activation(x), chosen.activation(x.cuda()))
    for what, (expected, found) in pairs.items():
        differ = (expected.float() != found.cpu().float()).nonzero()
        assert not len(differ), f"{what}: {len(differ)} of {expected.numel()} differ, first at {differ[0].tolist()}"


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cuda_graph_replays_the_simulation(scheme: str) -> None:
    low = find_scheme(scheme)
    layer = LowProjection(low.weight(torch.randn(32, 64)).dequantize(), low.activation, scheme).cuda()
    x, graph = torch.randn(4, 64, device="cuda"), torch.cuda.CUDAGraph()
    layer(x)
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(4, 64))
    graph.replay()
    assert relative(y, layer(x)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCALINGS)
def test_an_fp8_projection_runs_under_autocast_and_compile(scheme: str) -> None:
    device, (scaling, tile) = torch.device("cuda"), SCALINGS[scheme]
    product = find_product(scaling, device)
    if product is None:
        pytest.skip(f"no {scaling}-wise FP8 product on this GPU")
    layer = Fp8Projection(find_scheme(scheme).weight(torch.randn(256, 384, device=device)), tile, product)
    x = torch.randn(2, 33, 384, device=device)
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        plain, compiled = layer(x), torch.compile(layer, dynamic=False, fullgraph=True)(x)
    assert plain.dtype == torch.bfloat16
    assert (plain.float() - compiled.float()).norm() < 1e-2 * plain.float().norm()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_an_fp8_projection_compiles_into_one_graph(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the compiler cannot trace PyTorch's product, as torch 2.11's cannot `_scaled_mm_v2`."""
    monkeypatch.setitem(fp8_gemm.PRODUCTS, "row", (torch._disable_dynamo(_simulated),))
    product = find_product.__wrapped__("row", CPU)
    layer = Fp8Projection(encode_fp8(torch.randn(32, 64), ROW), ROW, product)
    x, graphs = torch.randn(2, 3, 64), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=keep, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        found, expected = compiled(x), layer(x)
    assert len(graphs) == 1 and torch.equal(found, expected)
    assert found.shape == (2, 3, 32) and found.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert not [node for node in graphs[0].graph.nodes if "enter_autocast" in str(node.target)]


def _simulated(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    return ((a.float() * scale_a) @ (b.float() * scale_b).T).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_checkpoint_agrees_with_its_simulation(
    device: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = torch.device(device)
    if find_product("row", where) is None:
        pytest.skip(f"no row-wise FP8 product on {device}")
    # the page needs plotly, which a machine that only computes may lack
    monkeypatch.setattr("residua.quantize.run.results", lambda result: {})
    quantize(run, tmp_path / "q", scheme="fp8-row", probes=0, device=device)
    simulated = load_quantized(tmp_path / "q").to(where)
    real = load_quantized(tmp_path / "q", fp8_products=where)
    products = {name: module for name, module in real.named_modules() if isinstance(module, Fp8Projection)}
    assert products.keys() == targets(residua.load(run)).keys()
    with torch.no_grad():
        for name, module in products.items():
            x = torch.randn(2, 5, module.codes.shape[1], device=where)
            distance = relative(module(x), simulated.get_submodule(name)(x))
            assert distance < 4e-3, f"{name} {list(module.codes.shape)}: {distance:.1e} from its simulation"
        tokens = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0)).to(where)
        distance = relative(real(tokens), simulated(tokens))
    # products are rounded to bf16, which may move a value by one step of the E4M3 grid that follows
    assert distance < 2e-2, f"the logits are {distance:.1e} from the simulation's"


def test_casting_a_model_keeps_rounded_weights_on_their_grid() -> None:
    weight = encode_fp8(torch.randn(32, 64), ROW)
    low = LowProjection(weight.dequantize(), find_scheme("fp8-row").activation, "")
    real = Fp8Projection(weight, ROW, _simulated)
    cast = torch.nn.ModuleList([low, real, torch.nn.Linear(4, 4)]).to(torch.bfloat16)
    assert cast[2].weight.dtype == torch.bfloat16
    assert torch.equal(low.weight, weight.dequantize()) and torch.equal(real.codes.float(), weight.codes.float())
    assert real.codes.dtype == torch.float8_e4m3fn and real.scale.dtype == torch.float32
    x = torch.randn(3, 64).bfloat16()
    assert low(x).dtype == real(x).dtype == torch.bfloat16
    assert cast.to("meta")[0].weight.is_meta


@pytest.mark.slow
def test_matrices_without_an_fp8_product_are_reported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("residua.quantize.run.results", lambda result: {})
    for scheme, why in (
        ("nvfp4", "FP8 products support only projections without bias"),
        ("fp8", "no block-wise FP8 product on cpu"),
    ):
        if scheme == "fp8" and find_product("block", CPU) is not None:
            continue
        quantize(run, tmp_path / scheme, scheme=scheme, probes=0, device="cpu")
        words = rf"8 of 8 modules only simulate FP8 products, among them sublayers\.0.*{why}"
        with pytest.warns(UserWarning, match=words):
            model = load_quantized(tmp_path / scheme, fp8_products=CPU)
        assert not [module for module in model.modules() if isinstance(module, Fp8Projection)]

"""``torch.compile(backend="relax_fusion")``: what its users see beside the numbers of models."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

import relax_fusion.torch as door  # noqa: E402
from relax_fusion.errors import PipelineError, TargetError  # noqa: E402
from relax_fusion.torch import pieces  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(quick_to_compile, tmp_path, monkeypatch):
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="relax_fusion", options={"strict": True, **options})


def agree(function, *args, **options):
    """Call a function in PyTorch and compiled, each with inputs of its own, and compare."""
    theirs, ours = ([a.clone() if hasattr(a, "clone") else a for a in args] for _ in range(2))
    with torch.no_grad():
        expected = function(*theirs)
        found = compiled(function, **options)(*ours)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)  # what was written to
    return found


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up = torch.nn.Linear(32, 64)
        self.down = torch.nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_it_is_found_by_its_name():
    assert "relax_fusion" in torch._dynamo.list_backends()


def test_a_model_is_one_piece_with_fused_kernels(caplog):
    caplog.set_level(logging.INFO, "relax_fusion.torch")
    model, x = MLP().eval(), torch.randn(4, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
    assert "1 piece compiled" in caplog.text
    assert "FuseGatedFFN" in caplog.text


def test_changed_weights_are_seen():
    model, x = MLP().eval(), torch.randn(4, 32)
    fast = compiled(model)
    with torch.no_grad():
        fast(x)
        model.up.weight.mul_(2)
        model.down.weight = torch.nn.Parameter(torch.randn(32, 64))
        torch.testing.assert_close(fast(x), model(x))


def test_two_models_do_not_meet():
    first, second, x = MLP().eval(), MLP().eval(), torch.randn(4, 32)
    fast = [compiled(first), compiled(second)]
    with torch.no_grad():
        for _ in range(2):
            for model, other in zip((first, second), fast, strict=True):
                torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize(("is_marked", "times"), [(False, 2), (True, 1)])
def test_another_length_compiles_once_more_and_no_further(is_marked, times):
    """A size that is marked is dynamic from the first call."""
    calls = []

    def counting(module, inputs, **kwargs):
        calls.append(inputs)
        return door.relax_fusion(module, inputs, **kwargs)

    model = MLP().eval()
    fast = torch.compile(model, backend=counting)
    with torch.no_grad():
        for rows in (4, 7, 9, 33, 2):
            x = torch.randn(rows, 32)
            if is_marked:
                torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            torch.testing.assert_close(fast(x), model(x))
    assert len(calls) == times


def test_a_size_that_no_tensor_has():
    def function(x, n: int):
        return torch.arange(n) + x, x.new_full((n,), 2.0) * n

    fast = torch.compile(function, backend="relax_fusion", dynamic=True)
    for n in (5, 8):
        torch.testing.assert_close(fast(torch.ones(1), n), function(torch.ones(1), n))


def test_a_square_of_a_size():
    def function(x):
        return (x @ x).view(-1) + 1

    fast = torch.compile(function, backend="relax_fusion", dynamic=True, options={"strict": True})
    for n in (5, 8):
        torch.testing.assert_close(fast(torch.eye(n)), function(torch.eye(n)))


def test_a_part_of_a_table_has_a_known_size(capfd):
    def function(x, table):
        return torch.relu(x + table[: x.shape[0]])[0] * 2

    fast, table = torch.compile(function, backend="relax_fusion", dynamic=True), torch.randn(16, 4)
    for n in (5, 16):
        torch.testing.assert_close(fast(torch.ones(n, 4), table), function(torch.ones(n, 4), table))
    assert "segfaults" not in capfd.readouterr().err  # TVM says so of places of unknown axes


@pytest.mark.parametrize(
    "layout", [pytest.param(torch.contiguous_format, marks=pytest.mark.slow), torch.channels_last]
)
def test_an_image_of_symbolic_sizes_is_enlarged(layout):
    def function(x):
        return torch.relu(torch.nn.functional.interpolate(x * 2, scale_factor=2.0)) + 1

    fast = torch.compile(function, backend="relax_fusion", dynamic=True, options={"strict": True})
    for n in (5, 7):  # as high as it has channels, it would be another graph
        x = torch.randn(2, 3, n, n + 1).to(memory_format=layout)
        found, expected = fast(x), function(x)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


WRITES = {
    "a row": lambda x, y: (x[1].copy_(y[0]), x.sum())[1],
    "all": lambda x, y: (x.add_(y), x * 2)[1],
    "a view of it": lambda x, y: (x.view(-1)[3:9].mul_(3), x.t() + y.t())[1],
    "twice": lambda x, y: (x.add_(1), x.mul_(y), x.clone())[2],
    "returned": lambda x, y: x.add_(y),
    "rows by index": lambda x, y: (x.index_copy_(0, torch.tensor([2, 0]), y[:2]), x @ y.t())[1],
    "rows by index, read before": lambda x, y: (
        x.sum(),
        x.index_copy_(0, torch.tensor([2, 0]), y[:2]),
    )[0],
    "columns by index": lambda x, y: (x.index_copy_(1, torch.tensor([5]), y[:, :1]), x + y)[1],
    "columns from the end": lambda x, y: x.__setitem__((slice(None), torch.tensor([-1])), y[:, :1]),
    "one element": lambda x, y: x.__setitem__((torch.tensor([1]), torch.tensor([2])), y[0, :1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_arguments_are_written_where_they_are(name):
    agree(WRITES[name], torch.randn(4, 6), torch.randn(4, 6), strict=False)


def test_rows_of_a_cache_are_written_without_a_copy_of_it():
    def function(cache, rows, values):
        cache.index_copy_(2, rows, values)
        return (cache * 2).sum(-1)

    cache, values = torch.zeros(1, 2, 8, 4), torch.randn(1, 2, 1, 4)
    address = cache.data_ptr()
    with torch.no_grad():
        found = compiled(function)(cache, torch.tensor([3]), values)
    assert cache.data_ptr() == address
    torch.testing.assert_close(cache[:, :, 3:4], values)
    torch.testing.assert_close(found, (cache * 2).sum(-1))


def test_a_cache_of_other_strides_is_written():
    def function(cache, rows, values):
        cache.index_copy_(1, rows, values)
        return cache + 1

    whole = torch.zeros(4, 8, 2)
    strided, theirs = whole.transpose(0, 1)[::2], whole.clone().transpose(0, 1)[::2]
    args = (torch.tensor([3]), torch.randn(4, 1, 2))
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(function, strict=False)(strided, *args), function(theirs, *args)
        )
    torch.testing.assert_close(strided, theirs)


RESULTS = {
    "an argument": lambda x: (x, x + 1),
    "a view": lambda x: (x.view(-1), x[1:]),
    "twice the same": lambda x: ((y := x + 1), y),
    "a copy": lambda x: (x.clone(), x + 0),
    "a constant": lambda x: (torch.zeros(3), x.sum(), torch.arange(4)),
    "transposed": lambda x: ((x * 2).t(), (x @ x.t()).t()),
    "expanded": lambda x: (x + 1)[:, None].expand(-1, 3, -1),
    "a scalar": lambda x: x.mean(),
    "bool and int": lambda x: (x > 0, x.argmax(-1), (x > 0).sum()),
    "promoted": lambda x: (x.half() + x, x.long() + 1.5, x > 1, (x > 0) + (x < 0), x.int() / 2),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_of_pytorch_and_nobody_elses(name):
    x = torch.randn(4, 6)
    fast = compiled(RESULTS[name], strict=False)
    with torch.no_grad():
        expected, found = RESULTS[name](x), fast(x)
        torch.testing.assert_close(found, expected)
        if isinstance(found, tuple) and name not in ("an argument", "a view", "twice the same"):
            assert len({each.data_ptr() for each in found}) == len(found)
            before = x.clone()
            for each in found:
                each.zero_()
            torch.testing.assert_close(x, before)
            torch.testing.assert_close(fast(x), expected)
        for got, want in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
            if want is not None and name != "expanded":
                assert got.stride() == want.stride()


INPUTS = {
    "transposed": torch.randn(6, 4).t(),
    "strided": torch.randn(8, 12)[::2, ::2],
    "offset": torch.randn(30)[3:27].view(4, 6),
    "expanded": torch.randn(6).expand(4, 6),
    "no rows": torch.randn(0, 6),
    "negated": torch.randn(4, 6, dtype=torch.complex64).conj().imag,
    "float16": torch.randn(4, 6, dtype=torch.float16),
    "float64": torch.randn(4, 6, dtype=torch.float64),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_strides_and_dtypes(name):
    def function(x):
        return torch.softmax(x @ x.t(), -1) @ x

    x = INPUTS[name]
    with torch.no_grad():
        found, expected = compiled(function)(x), function(x)
    few = {"atol": 4e-3, "rtol": 4e-3} if x.dtype == torch.float16 else {}
    torch.testing.assert_close(found, expected, **few)


@pytest.mark.parametrize(
    ("norm_first", "hidden"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_the_fast_path_of_encoder_layers_is_written_out(norm_first, hidden):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    x, mask = torch.randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    given = {"src_key_padding_mask": mask} if hidden else {}
    with torch.inference_mode():
        expected, found = layer.eval()(x, **given), compiled(layer.eval())(x, **given)
    torch.testing.assert_close(found, expected)


def test_the_fast_path_of_attention_is_written_out():
    layer, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 6, 32)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(layer)(x, x, x), layer(x, x, x))


LOOKED_UP = {
    "columns by a list": lambda x, r: x[:, [0, -1]],
    "rows by a list": lambda x, r: x[[-1, -2]],
    "rows by numbers": lambda x, r: x[r - 4],
    "elements": lambda x, r: x[r - 4, r % 3 - 3],
    "along two dimensions": lambda x, r: x[r - 4, r - 4] + x[r, r],
    "of one dimension": lambda x, r: x[0][-1] * 2 + x.flatten()[-2],
    "the last rows": lambda x, r: x[-1] + x.select(0, -2),
    "taken": lambda x, r: x.take(r - 4),
    "selected": lambda x, r: x.index_select(0, r),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_indices_count_from_the_end(name):
    agree(LOOKED_UP[name], torch.randn(4, 6), torch.tensor([3, 0, 2]), strict=False)


def test_numbers_are_drawn_anew():
    torch.manual_seed(1)
    fast = compiled(lambda x: torch.nn.functional.dropout(x * 2, 0.5, True) + 1, strict=False)
    with torch.no_grad():
        first, second = fast(torch.ones(64)), fast(torch.ones(64))
    assert 0 < int((first == 1).sum()) < 64 and not torch.equal(first, second)


def test_running_statistics_are_updated():
    theirs, ours = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    fast, x = compiled(ours, strict=False), torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


REFUSED = {
    "sorted bytes": lambda x: torch.sort((x * 9).to(torch.int8), 1),
    "sorted bfloat16": lambda x: x.bfloat16().topk(2),
    "a divisor": lambda x: torch.nn.functional.avg_pool2d(x[None, None], 3, divisor_override=5),
    "numbers with alpha": lambda x: torch.add(x, 3, alpha=2) - torch.sub(x, 2, alpha=3),
    "complex numbers": lambda x: torch.complex(x, x).abs() * 2,
    "statistics of a norm": lambda x: torch.ops.aten.native_layer_norm(x, (6,), None, None, 1e-5),
    "one hot": lambda x: torch.nn.functional.one_hot((x > 0).long(), 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_importer_would_get_wrong_is_right(name):
    agree(REFUSED[name], torch.randn(4, 6), strict=False)


def test_a_cache_of_permuted_dimensions_is_written():
    def function(cache, rows, values):
        cache[:, rows] = values
        return (cache * 2).sum(0)

    cache, theirs = (torch.zeros(4, 2, 3).transpose(0, 1) for _ in range(2))
    args = (torch.tensor([1]), torch.ones(2, 1, 3))
    with torch.no_grad():
        torch.testing.assert_close(compiled(function)(cache, *args), function(theirs, *args))
    torch.testing.assert_close(cache, theirs)


def test_what_the_importer_does_not_know_stays_in_pytorch(caplog):
    caplog.set_level(logging.INFO, "relax_fusion.torch")

    def function(x):
        spectrum = torch.fft.rfft(torch.relu(x @ x))
        return torch.tanh(spectrum.real * 2) @ x[:5]

    agree(lambda x: function(x)[:, :5], torch.randn(8, 8), strict=False)
    assert "2 pieces compiled" in caplog.text
    assert "does not know aten._fft_r2c.default" in caplog.text


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.fft.rfft(x).real, r"does not know aten\._fft_r2c\.default"),
        (lambda x: torch.fft.rfft(x).abs(), r"aten\.abs\.default reads _fft_r2c, which has"),
        (lambda x: torch.where(x > 0, x.byte(), -1), r"scalar_tensor\.default: TVM.* Overflow"),
    ],
)
def test_strict_names_what_stays(function, why):
    with pytest.raises(Exception, match=f"strict=True.*{why}"):
        compiled(function)(torch.randn(8))


def test_min_block_size_leaves_small_pieces():
    with pytest.raises(Exception, match="fewer than min_block_size=9"):
        compiled(lambda x: x * 2 + 1, min_block_size=9)(torch.randn(8))


def test_a_graph_that_needs_gradients_runs_in_pytorch_and_warns():
    model, x = MLP(), torch.randn(4, 32)
    with pytest.raises(Exception, match="strict=True, and a graph needs gradients"):
        compiled(model)(x)
    with pytest.warns(RuntimeWarning, match="needs gradients") as told:
        compiled(model, strict=False)(x).sum().backward()
    assert told[0].filename == __file__
    expected = model.up.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(model.up.weight.grad, expected)


def test_autocast_is_respected():
    model, x = MLP().eval(), torch.randn(4, 32)
    fast = compiled(model)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found, expected = fast(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


def test_threads_share_a_model():
    model = MLP().eval()
    fast, failed = compiled(model), []
    inputs = [torch.randn(4, 32) for _ in range(8)]
    with torch.no_grad():
        fast(inputs[0])

    def work(x):
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(fast(x), model(x), atol=1e-5):
                    failed.append(x)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"targt": "llvm"}, "has no option 'targt'; it takes target, backend"),
        ({"min_block_size": 0}, "min_block_size"),
        ({"backend": "cuda"}, "backend"),
        ({"strict": "yes"}, "option: strict"),
        ({"database": "nope.json"}, "option database is 'nope.json'; there is no such file"),
    ],
)
def test_a_wrong_option_is_named(options, text):
    with pytest.raises(PipelineError, match=text):
        door.options.options_of(options)


def test_an_option_that_the_target_does_not_have_is_an_error():
    with pytest.raises(Exception, match="backend 'triton' needs a CUDA target"), torch.no_grad():
        compiled(lambda x: x * 2 + 1, strict=False, backend="triton")(torch.ones(2))


def test_a_target_of_another_device_is_refused():
    with pytest.raises(TargetError, match="cannot run where the inputs are: on cpu"):
        door.TorchOptions(target="h200").target_for(torch.device("cpu"))


def test_a_mode_is_refused():
    with pytest.raises(Exception, match="has no mode 'max-autotune'"):
        torch.compile(lambda x: x + 1, backend="relax_fusion", mode="max-autotune")(torch.ones(2))


def test_dryrun_compiles_nothing_and_tells(capsys, monkeypatch):
    monkeypatch.setattr(pieces, "build", None)
    model, x = MLP().eval(), torch.randn(4, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, dryrun=True)(x), model(x))
    found = capsys.readouterr().out
    assert "1 piece chosen" in found and "\nmain      FuseGatedFFN" in found and "(dryrun)" in found


def test_check_tells_of_a_difference(monkeypatch):
    model, x = MLP().eval(), torch.randn(4, 32)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(model, check=True)(x)
    torch._dynamo.reset()
    real = door.program.Program.results
    monkeypatch.setattr(
        door.program.Program, "results", lambda self, args: [r + 1 for r in real(self, args)]
    )
    differs = r"result 0 of fused_0 differs.* by 1"
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=differs) as told:
        compiled(model, check=True)(x)
    assert told[0].filename == __file__


def test_a_report_is_written(tmp_path):
    model, x = MLP().eval(), torch.randn(4, 32)
    for _ in range(2):  # compiled, and from the cache
        torch._dynamo.reset()
        with torch.no_grad():
            compiled(model, report=str(tmp_path / "report.txt"))(x)
    text = (tmp_path / "report.txt").read_text()
    assert text.count("FuseGatedFFN") >= 4 and text.count("from the cache") == 1


def test_a_report_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(Exception, match=r"option report: .*missing/r.txt cannot be written"):
        compiled(lambda x: x @ x + 1, report=str(tmp_path / "missing" / "r.txt"))(torch.ones(2, 2))

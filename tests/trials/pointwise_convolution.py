"""A chain that the library does not know: pointwise convolutions, as matmuls over the channels."""

from __future__ import annotations

from tvm import relax

from relax_fusion import FusingPass, Reason, module_pass
from relax_fusion.matching.epilogue import epilogue
from relax_fusion.matching.linear import Linear
from relax_fusion.matching.pattern import BlockView, Match, guard
from relax_fusion.matching.projections import norm_matmul, plain_prologue
from relax_fusion.matching.shapes import known_shape, static

WEIGHTS = {"OHWI": ("nk", 0, 3), "HWIO": ("kn", 3, 2)}
"""By the name of a weight's layout: the matmul's, and where outputs and inputs lie in it."""


@module_pass
class FusePointwiseConvolution(FusingPass):
    """Fuse a convolution of one pixel with the element-wise steps after it.

    rewrite::

        y = R.nn.conv2d(x, W, data_layout="NHWC", kernel_layout="OHWI")    # W [n, 1, 1, k]
        z = R.nn.silu(R.add(y, b))
            ->
        z = R.call_tir(fuse_pointwise_convolution_..., (x, W, b))

    declines when:
        channels do not come last; pixels are skipped, added or grouped by channel; and as
        `FuseMatmulEpilogue`.
    """

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the convolution that `var` is."""
        call = view.call(var, "relax.nn.conv2d")
        if call is None:
            return None
        (x, weight), attrs = call.args, call.attrs
        layouts = [str(name) for name in (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)]
        data, kernel, out = layouts
        detail = f"layouts are {', '.join(layouts)}; must be NHWC, OHWI or HWIO, NHWC"
        guard(data == out == "NHWC" and kernel in WEIGHTS, Reason.LAYOUT, detail)
        layout, outputs, inputs = WEIGHTS[kernel]
        shape = [static(d, "a size of the weight") for d in known_shape(weight, "the weight")]
        n, k = shape[outputs], shape[inputs]
        if n * k != shape[0] * shape[1] * shape[2] * shape[3]:
            return None
        steps, rim = (list(map(int, values)) for values in (attrs.strides, attrs.padding))
        plain = {*steps, int(attrs.groups)} == {1} and not any(rim)
        detail = f"strides {steps}, padding {rim}, groups {attrs.groups}; must be 1, 0, 1"
        guard(plain, Reason.ATTRIBUTE, detail)
        chain = epilogue(view, Linear(var, x, weight, layout, n, k, (var,)), set())
        return norm_matmul(view, plain_prologue(x), [chain], self.options.bounds)

"""All kinds of layouts."""

ALL = (
    "dp2, dp4, zero1x2, zero2x2, zero3x4, dp2*zero3x2, tp2, tp2+sp, tp4+sp, pp2+gpipe, pp2, pp2+interleaved, "
    "pp2+zero_bubble, pp4, dp2*tp2, zero3x2*tp2+sp, pp2*dp2, pp2*tp2+sp, pp2*zero2x2, pp2*dp2*tp2"
)

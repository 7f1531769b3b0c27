// How options with numbers of their own are said to `policy_loss.cu`, once for the launch and once for the tests on the CPU. The
// enums without any are said by their place in their declaration.

/// The number of a surrogate, and what its function takes.
fn score_numbers(surrogate: TokenSurrogate) -> (i32, [f32; 4]) {
    match surrogate {
        TokenSurrogate::Clip { ratio_min, ratio_max, dual_clip, delta } => (0, [ratio_min, ratio_max, dual_clip, delta]),
        TokenSurrogate::PolicyGradient => (1, [0.0; 4]),
        TokenSurrogate::DetachedWeight { ratio_min, ratio_max, drop_below, drop_above } => {
            (2, [ratio_min, ratio_max, drop_below, drop_above])
        }
        TokenSurrogate::Topr { positive_weight, negative_weight } => (3, [positive_weight, negative_weight, 0.0, 0.0]),
        TokenSurrogate::SoftGate { tau_pos, tau_neg } => (4, [tau_pos, tau_neg, 0.0, 0.0]),
        TokenSurrogate::SquaredLogRatio { coef } => (5, [coef, 0.0, 0.0, 0.0]),
        TokenSurrogate::DivergenceMask { binary_kl, low, high, ratio_max } => {
            (6, [f32::from(u8::from(binary_kl)), low, high, ratio_max])
        }
    }
}

/// The number of a slope, and its largest weight.
fn slope_numbers(slope: KlSlope) -> (i32, f32) {
    match slope {
        KlSlope::Direct => (0, 0.0),
        KlSlope::StraightThrough => (1, 0.0),
        KlSlope::ImportanceWeighted { max } => (2, max),
    }
}

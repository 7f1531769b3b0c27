//! Tests of the CUDA kernels on the CPU, and of the emulator.
#![allow(unsafe_code)]
#![allow(clippy::too_many_lines, reason = "lists of cases")]

/// Declares tests of the module's `check_all` with each element type and its tolerance.
macro_rules! each_dtype {
    ($name:ident: f32 $f32:expr, bf16 $bf16:expr, f16 $f16:expr) => {
        mod $name {
            use super::check_all;
            use candle_core::Result;

            #[test]
            fn f32() -> Result<()> {
                check_all::<f32>($f32)
            }

            #[test]
            fn bf16() -> Result<()> {
                check_all::<half::bf16>($bf16)
            }

            #[test]
            fn f16() -> Result<()> {
                check_all::<half::f16>($f16)
            }
        }
    };
}

mod adamw;
mod add;
mod add_bias;
mod attention;
mod branches;
mod causal_conv;
mod dequantize;
mod draw_tokens;
mod driver;
mod embedding;
mod experts;
mod gated_delta_rule;
mod gradient_norm;
mod head_transform;
mod host;
mod linear_log_prob;
mod linear_rows;
mod log_prob;
mod paged_attention;
mod policy_loss;
mod rms_norm;
mod route;
mod signatures;
mod swiglu;
mod token_rows;

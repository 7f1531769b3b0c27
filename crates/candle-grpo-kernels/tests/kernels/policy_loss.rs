//! Bad input to `policy_loss`. The tests of `candle-grpo-loss` compare it with its twin.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_kernels::{
    Divisor, EntropyBonus, PolicyStatistic, PolicyTerms, RatioSurrogate, TokenShare, policy_loss,
};
use candle_grpo_test_support::{devices, message};

/// Terms for log-probs `[2, 3]`.
fn terms<'a>(mask: &'a Tensor, advantages: &'a Tensor) -> PolicyTerms<'a> {
    let share = TokenShare {
        scale: 1.0,
        divisor: Divisor::One,
    };
    PolicyTerms::new(mask, advantages, RatioSurrogate::PolicyGradient, share)
}

#[test]
fn bad_input_is_named() -> Result<()> {
    for device in devices() {
        let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device);
        let (log_probs, mask) = (zeros(&[2, 3], DType::F32)?, zeros(&[2, 3], DType::U8)?);
        let (column, wrong) = (zeros(&[2, 1], DType::F32)?, zeros(&[3, 2], DType::F32)?);
        let wrong_mask = zeros(&[3, 2], DType::U8)?;
        let share = TokenShare {
            scale: 1.0,
            divisor: Divisor::PromptTokens,
        };
        let bonus = EntropyBonus { mask: None, share };
        let base = || terms(&mask, &column);
        policy_loss(&log_probs, &base())?;
        let double = zeros(&[2, 3], DType::F64)?;
        let error = message(policy_loss(&double, &base()));
        assert!(error.starts_with("log_probs: F64 on"), "{error}");
        let error = message(policy_loss(&zeros(&[3], DType::F32)?, &base()));
        assert_eq!(error, "log_probs: shape [3], must be [B, T]");
        let error = message(policy_loss(&zeros(&[0, 3], DType::F32)?, &base()));
        assert!(error.starts_with("log_probs: shape [0, 3]"), "{error}");
        let error = message(policy_loss(&log_probs, &terms(&log_probs, &column)));
        assert_eq!(error, "mask: F32, must be u8");
        let error = message(policy_loss(&log_probs, &terms(&mask, &wrong)));
        assert_eq!(error, "advantages: shape [3, 2], must be [2, 3] or [2, 1]");
        let cases: [(&str, PolicyTerms); 6] = [
            (
                "old_log_probs: shape [2, 1], must be [2, 3]",
                PolicyTerms {
                    old_log_probs: Some(&column),
                    ..base()
                },
            ),
            (
                "factors: shape [3, 2]",
                PolicyTerms {
                    factors: [None, Some(&wrong)],
                    ..base()
                },
            ),
            ("prompt_tokens: absent", PolicyTerms { share, ..base() }),
            (
                "prompt_tokens: shape [2, 1], must be [2]",
                PolicyTerms {
                    prompt_tokens: Some(&column),
                    ..base()
                },
            ),
            (
                "entropy: absent",
                PolicyTerms {
                    entropy_bonus: Some(bonus),
                    ..base()
                },
            ),
            (
                "policy_mask: shape [3, 2]",
                PolicyTerms {
                    policy_mask: Some(&wrong_mask),
                    ..base()
                },
            ),
        ];
        for (expected, terms) in cases {
            let error = message(policy_loss(&log_probs, &terms));
            assert!(error.starts_with(expected), "{error}");
        }
        if device.is_cuda() {
            let on_cpu = column.to_device(&Device::Cpu)?;
            let error = message(policy_loss(&log_probs, &terms(&mask, &on_cpu)));
            assert!(error.starts_with("advantages: on Cpu"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn no_tokens_give_no_loss_and_no_gradient() -> Result<()> {
    for device in devices() {
        let log_probs = Var::new(&[[f32::NAN, f32::INFINITY]], device)?;
        let mask = Tensor::zeros((1, 2), DType::U8, device)?;
        let advantages = Tensor::new(&[[f32::NAN]], device)?;
        let (loss, statistics) = policy_loss(&log_probs, &terms(&mask, &advantages))?;
        assert_eq!(loss.to_scalar::<f32>()?, 0.0);
        let gradients = loss.backward()?;
        let gradient = gradients.get(&log_probs).expect("a gradient");
        assert_eq!(gradient.to_vec2::<f32>()?, [[0.0, 0.0]]);
        let statistics = statistics.to_vec1::<f64>()?;
        assert_eq!(statistics.len(), PolicyStatistic::COUNT);
        for (index, x) in statistics.into_iter().enumerate() {
            let expected = match index {
                _ if index == PolicyStatistic::RatioMax as usize => f64::NEG_INFINITY,
                _ if index == PolicyStatistic::K3Max as usize => f64::NEG_INFINITY,
                _ if index == PolicyStatistic::RatioMin as usize => f64::INFINITY,
                _ => 0.0,
            };
            assert_eq!(x, expected, "{index}");
        }
    }
    Ok(())
}

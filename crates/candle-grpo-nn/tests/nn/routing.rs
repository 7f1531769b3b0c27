//! Replayed experts and expert balance in a decoder.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_nn::{
    Decoder, DecoderConfig, Gradients, LanguageModel, PackedTokens, PagedCache, Parameters,
};
use rstest::rstest;

use candle_grpo_test_support::{device, message};

use crate::small::{Family, lively, max_difference};

/// Two mixtures of experts, each choosing two of three experts.
fn model() -> DecoderConfig {
    DecoderConfig {
        mlp_only_layers: Vec::new(),
        ..Family::Qwen3Moe.config(true)
    }
}

fn decoder(parameters: &Parameters) -> Result<Decoder> {
    Decoder::new(&model(), parameters.detached_var_builder())
}

fn sequences() -> [Vec<u32>; 3] {
    [vec![3, 1, 4, 1, 5], vec![3, 1, 9], vec![2, 6]]
}

/// The experts for the tokens in [`sequences`] during decoding, one token at a time.
fn drawn(decoder: &Decoder) -> Result<Vec<Vec<u16>>> {
    let mut cache = PagedCache::new(decoder.config(), DType::F32, device())?;
    let mut all = Vec::new();
    for tokens in sequences() {
        let (id, mut experts) = (cache.add(), Vec::new());
        for token in tokens {
            let (_, chosen) = decoder.next_logits_and_experts(&[(id, &[token])], &mut cache)?;
            let chosen = chosen.expect("a model with experts").to_vec2::<u32>()?;
            experts.extend(chosen.concat().into_iter().map(|expert| expert as u16));
        }
        all.push(experts);
    }
    Ok(all)
}

/// The hidden states, and gradients for their sum of squares.
fn pass(
    parameters: &Parameters,
    tokens: &PackedTokens,
    checkpointing: bool,
) -> Result<(Tensor, Gradients)> {
    let decoder = decoder(parameters)?.with_activation_checkpointing(checkpointing)?;
    let (hidden, recorded) = decoder.record(tokens)?;
    let mut gradients = Gradients::new();
    recorded.backward(&(&hidden * 2.0)?, parameters, &mut gradients)?;
    Ok((hidden, gradients))
}

#[rstest]
fn replay_of_the_same_experts_changes_nothing(
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let parameters = lively(&model())?;
    let experts = drawn(&decoder(&parameters)?)?;
    assert_eq!(experts[0].len(), 5 * 4);
    let (hidden, gradients) = pass(
        &parameters,
        &PackedTokens::sharing_prefixes(&sequences(), device())?,
        checkpointing,
    )?;
    let tokens = PackedTokens::replaying(&sequences(), &experts, device())?;
    assert_eq!(tokens.ids().dims(), [8]);
    let (replayed, of_replayed) = pass(&parameters, &tokens, checkpointing)?;
    assert!(max_difference(&hidden, &replayed)? < 1e-5);
    for (name, gradient) in gradients.iter() {
        let own = of_replayed.get(name).expect("a gradient");
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        assert!(
            max_difference(own, gradient)? < 1e-5 * scale.max(1.0),
            "{name}"
        );
    }
    Ok(())
}

/// All tokens go to experts 2 and 0 in the first block, and 1 and 2 in the second.
fn forced() -> Vec<Vec<u16>> {
    let tokens = sequences().into_iter();
    tokens
        .map(|tokens| [2, 0, 1, 2].repeat(tokens.len()))
        .collect()
}

#[rstest]
fn gradients_with_forced_experts_agree_with_finite_differences(
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let parameters = lively(&model())?;
    let tokens = PackedTokens::replaying(&sequences(), &forced(), device())?;
    let free = PackedTokens::sharing_prefixes(&sequences(), device())?;
    let (hidden, gradients) = pass(&parameters, &tokens, checkpointing)?;
    let (other, _) = pass(&parameters, &free, checkpointing)?;
    assert!(max_difference(&hidden, &other)? > 1e-2);
    let loss = || -> Result<f64> {
        let hidden = decoder(&parameters)?.hidden_states(&tokens)?;
        let squares = hidden.to_dtype(DType::F64)?.sqr()?;
        squares.sum_all()?.to_scalar::<f64>()
    };
    differences(&parameters, &gradients, loss)?;
    // An expert without a token receives none.
    let idle = gradients.get("model.layers.0.mlp.experts.1.up_proj.weight");
    let idle = idle.expect("a gradient");
    assert_eq!(max_difference(idle, &idle.zeros_like()?)?, 0.0);
    Ok(())
}

/// Compares gradients with central differences along one direction for each variable.
fn differences(
    parameters: &Parameters,
    gradients: &Gradients,
    loss: impl Fn() -> Result<f64>,
) -> Result<()> {
    const STEP: f64 = 2e-3;
    for (name, variable) in parameters.iter() {
        let gradient = gradients.get(name).expect("a gradient");
        let norm = gradient.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        if norm < 1e-3 {
            continue;
        }
        let (before, direction) = (
            variable.as_detached_tensor().copy()?,
            (gradient / f64::from(norm))?,
        );
        let at = |step: f64| {
            variable.set(&(&before + (&direction * step)?)?)?;
            loss()
        };
        let slope = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
        variable.set(&before)?;
        let distance = (slope - f64::from(norm)).abs();
        assert!(
            distance < 0.02 * f64::from(norm) + 1e-3,
            "{name}: {slope}, {norm}"
        );
    }
    Ok(())
}

#[rstest]
fn the_gradient_of_the_balance_agrees_with_finite_differences(
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let parameters = lively(&model())?;
    // The choice is fixed: it has no gradient.
    let experts = drawn(&decoder(&parameters)?)?;
    let tokens = PackedTokens::replaying(&sequences(), &experts, device())?;
    let weights = [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0];
    let coef = 3.0;
    let decoder = || -> Result<Decoder> {
        decoder(&parameters)?.with_activation_checkpointing(checkpointing)
    };
    let own = decoder()?;
    let (hidden, mut recorded) = own.record(&tokens)?;
    let balance = recorded
        .balance_experts(&weights, coef)?
        .expect("a model with experts");
    assert!(
        balance.max_load >= 1.0 && balance.max_load <= 1.5,
        "{balance:?}"
    );
    let mut gradients = Gradients::new();
    recorded.backward(&hidden.zeros_like()?, &parameters, &mut gradients)?;
    let router = gradients
        .get("model.layers.1.mlp.gate.weight")
        .expect("a gradient");
    assert!(max_difference(router, &router.zeros_like()?)? > 1e-3);
    let loss = || -> Result<f64> {
        let own = decoder()?;
        let (_, mut recorded) = own.record(&tokens)?;
        let balance = recorded.balance_experts(&weights, 0.0)?.expect("a balance");
        Ok(coef * balance.loss)
    };
    differences(&parameters, &gradients, loss)
}

#[test]
fn a_model_without_experts_has_no_balance() -> Result<()> {
    let model = Family::Qwen3.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    assert_eq!(decoder.expert_choices(), 0);
    let (_, mut recorded) = decoder.record(&PackedTokens::new(&sequences(), device())?)?;
    assert_eq!(recorded.balance_experts(&[1.0; 10], 1.0)?, None);
    let tokens = PackedTokens::replaying(&sequences(), &forced(), device())?;
    let error = message(decoder.record(&tokens).map(|_| ()));
    assert!(
        error.contains("tokens: 4 experts of each token, must be 0"),
        "{error}"
    );
    Ok(())
}

#[test]
fn experts_that_do_not_fit_are_errors() -> Result<()> {
    for experts in [
        vec![vec![0; 4]],
        vec![vec![0; 4], vec![0; 3]],
        vec![vec![]; 2],
    ] {
        let error = message(PackedTokens::replaying(
            &[vec![1, 2], vec![3]],
            &experts,
            &Device::Cpu,
        ));
        assert!(
            error.contains("experts: must have as many entries"),
            "{error}"
        );
    }
    let parameters = lively(&model())?;
    let tokens = PackedTokens::replaying(&[vec![1]], &[vec![0, 3, 0, 1]], device())?;
    let error = message(decoder(&parameters)?.record(&tokens).map(|_| ()));
    assert!(error.contains("experts: 3, must be below 3"), "{error}");
    Ok(())
}

//! The packed rows' loss and its gradient.

use candle_core::{D, DType, Tensor};
use candle_grpo_loss::surrogate::Likelihood;
use candle_grpo_nn::{
    Decoder, DecoderConfig, Gradients, LanguageModel, Lora, LoraConfig, PackedTokens,
};
use candle_grpo_test_support::device;
use candle_grpo_train::learn::LikelihoodSums;
use candle_grpo_train::{Actor, ActorConfig, Sequence};
use rstest::rstest;

use crate::common::{actor_config, max_difference, model, model_with_experts, parameters_of};

fn config() -> ActorConfig {
    actor_config(Default::default())
}

fn actor(model: &DecoderConfig) -> Actor {
    Actor::new(model.clone(), parameters_of(model, device()), config()).unwrap()
}

/// Rows with several answers, a common prefix, weights, and a tail that does not train.
fn examples() -> Vec<Sequence> {
    let example =
        |tokens: &[u32], weights: &[f32]| Sequence::new(tokens.to_vec(), weights.to_vec()).unwrap();
    vec![
        example(&[1, 2, 3, 4, 5, 0], &[0., 0., 1., 1., 0., 1.]),
        example(&[1, 2, 3, 1], &[0., 0., 0., 2.]),
        example(&[4, 4], &[0., 1.]),
        example(&[1, 2, 5, 5, 2, 1, 3], &[0., 0.5, 0.5, 0., 0.5, 0., 0.]),
    ]
}

fn total_weight(examples: &[Sequence]) -> f64 {
    examples.iter().map(Sequence::total_weight).sum()
}

fn largest(x: &Tensor) -> f32 {
    let x = x.abs().unwrap().flatten_all().unwrap();
    x.max(0).unwrap().to_scalar().unwrap()
}

fn assert_close(found: &Gradients, expected: &Gradients, tolerance: f32) {
    assert!(expected.iter().count() > 0);
    for (name, expected) in expected.iter() {
        let difference = max_difference(found.get(name).unwrap(), expected);
        let size = largest(expected);
        assert!(
            difference <= tolerance * size.max(1e-2),
            "{name}: {difference} of {size}"
        );
    }
}

fn assert_sums_close(found: &LikelihoodSums, expected: &LikelihoodSums) {
    for (found, expected) in [
        (found.loss, expected.loss),
        (found.entropy, expected.entropy),
    ] {
        assert!((found - expected).abs() < 1e-5 * expected.abs(), "{found}");
    }
    assert_eq!(
        (found.weight, found.tokens, found.correct),
        (expected.weight, expected.tokens, expected.correct)
    );
}

#[rstest]
#[case::dense(model())]
#[case::experts(model_with_experts())]
fn packed_rows_have_the_loss_and_the_gradient_of_the_rows_one_by_one(#[case] model: DecoderConfig) {
    let examples = examples();
    let scale = 1. / total_weight(&examples);
    let all = examples.clone();
    let mut packed = actor(&model);
    let found = packed
        .forward_backward_examples(&all, Likelihood::default(), scale, 0.)
        .unwrap();
    let mut single = actor(&model);
    let mut sums = LikelihoodSums::default();
    for example in &all {
        sums.add(
            &single
                .forward_backward_examples(
                    std::slice::from_ref(example),
                    Likelihood::default(),
                    scale,
                    0.,
                )
                .unwrap(),
        );
    }
    assert_sums_close(&found, &sums);
    assert_close(packed.gradients(), single.gradients(), 1e-5);
    assert_sums_close(&packed.likelihood(&all).unwrap(), &sums);
}

#[test]
fn adapters_have_the_gradient_of_the_rows_one_by_one() {
    let examples = examples();
    let scale = 1. / total_weight(&examples);
    let all = examples.clone();
    let adapted = || {
        let model = model();
        let lora = Lora::init(LoraConfig::all_linear(2, 4.), &model, 1, device()).unwrap();
        // The second matrices are 0 at the start, and therefore also the first ones' gradients.
        for (name, variable) in lora.parameters().iter() {
            if name.contains("lora_B") {
                let values = Tensor::arange(0f32, variable.elem_count() as f32, device()).unwrap();
                let values = (values.sin().unwrap() * 0.3).unwrap();
                let values = values.reshape(variable.shape()).unwrap();
                variable.set(&values).unwrap();
            }
        }
        Actor::with_adapters(
            model.clone(),
            parameters_of(&model, device()),
            lora,
            config(),
        )
        .unwrap()
    };
    let (mut packed, mut single) = (adapted(), adapted());
    packed
        .forward_backward_examples(&all, Likelihood::default(), scale, 0.)
        .unwrap();
    for example in &all {
        single
            .forward_backward_examples(
                std::slice::from_ref(example),
                Likelihood::default(),
                scale,
                0.,
            )
            .unwrap();
    }
    assert_close(packed.gradients(), single.gradients(), 1e-5);
}

/// The loss in plain Candle operations with a graph, row by row, and how many tokens have the
/// highest logit.
fn plain_loss(decoder: &Decoder, examples: &[Sequence]) -> (Tensor, usize) {
    let mut loss = Tensor::zeros((), DType::F32, device()).unwrap();
    let mut correct = 0;
    for example in examples {
        let tokens = PackedTokens::new(&[example.tokens().to_vec()], device()).unwrap();
        let hidden = decoder.hidden_states(&tokens).unwrap();
        let logits = hidden
            .matmul(&decoder.output_weight().t().unwrap())
            .unwrap();
        let log_probs = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
        let highest: Vec<u32> = logits.argmax(D::Minus1).unwrap().to_vec1().unwrap();
        for (place, &weight) in example.weights().iter().enumerate() {
            if weight > 0. {
                let token = example.tokens()[place] as usize;
                let log_prob = log_probs.get(place - 1).unwrap().get(token).unwrap();
                loss = (loss - (log_prob * f64::from(weight)).unwrap()).unwrap();
                correct += usize::from(highest[place - 1] as usize == token);
            }
        }
    }
    (loss, correct)
}

#[test]
fn the_loss_and_its_gradient_are_those_of_plain_operations() {
    let (model, examples) = (model(), examples());
    let weight = total_weight(&examples);
    let mut actor = actor(&model);
    let all = examples.clone();
    let found = actor
        .forward_backward_examples(&all, Likelihood::default(), 1. / weight, 0.)
        .unwrap();

    let parameters = parameters_of(&model, device());
    let decoder = Decoder::new(&model, parameters.var_builder()).unwrap();
    let (loss, correct) = plain_loss(&decoder, &examples);
    let loss = (loss / weight).unwrap();
    let mut expected = Gradients::new();
    expected.accumulate(&loss, &parameters).unwrap();
    let loss = f64::from(loss.to_scalar::<f32>().unwrap());
    assert!((found.mean_loss() - loss).abs() < 1e-5, "{loss}");
    assert_eq!(found.correct, correct as f64);
    // 2 + 1 + 1 tokens with weight 1, one with 2 and three with 1/2.
    assert_eq!((found.weight, found.tokens), (7.5, 8.));
    assert_close(actor.gradients(), &expected, 1e-4);
}

#[test]
fn the_weight_of_uncertain_tokens_is_a_constant_factor_of_their_gradients() {
    let (model, example) = (model(), &examples()[0]);
    let likelihood = Likelihood {
        uncertainty_weight: true,
    };
    let mut weighted = actor(&model);
    weighted
        .forward_backward_examples(std::slice::from_ref(example), likelihood, 0.5, 0.)
        .unwrap();
    // The same gradient, from the factors as token weights.
    let mut expected = actor(&model);
    let factors = example
        .weights()
        .iter()
        .enumerate()
        .map(|(place, &weight)| {
            if weight == 0. {
                return 0.;
            }
            let mut only = vec![0.; example.tokens().len()];
            only[place] = 1.;
            let token = Sequence::new(example.tokens().to_vec(), only).unwrap();
            let p = (-expected.likelihood(&[token]).unwrap().loss).exp();
            weight * (p * (1. - p)) as f32
        });
    let factors = factors.collect();
    let scaled = Sequence::new(example.tokens().to_vec(), factors).unwrap();
    expected
        .forward_backward_examples(&[scaled], Likelihood::default(), 0.5, 0.)
        .unwrap();
    assert_close(weighted.gradients(), expected.gradients(), 1e-4);
}

#[test]
fn the_gradient_is_the_difference_quotient_of_the_loss() {
    let (model, examples) = (model(), examples());
    let all = examples.clone();
    let mut actor = actor(&model);
    let scale = 1. / total_weight(&examples);
    actor
        .forward_backward_examples(&all, Likelihood::default(), scale, 0.)
        .unwrap();
    for name in [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ] {
        let variable = actor.parameters().get(name).unwrap().clone();
        let gradient = actor.gradients().get(name).unwrap();
        let before = variable.as_detached_tensor().copy().unwrap();
        // Along the gradient the loss changes most.
        let norm = gradient.sqr().unwrap().sum_all().unwrap();
        let norm = f64::from(norm.to_scalar::<f32>().unwrap()).sqrt();
        let step = 1e-2 / norm;
        let loss_at = |step: f64| {
            let moved = (&before + (gradient * step).unwrap()).unwrap();
            variable.set(&moved).unwrap();
            actor.likelihood(&all).unwrap().mean_loss()
        };
        let quotient = (loss_at(step) - loss_at(-step)) / 2e-2;
        variable.set(&before).unwrap();
        assert!(
            (quotient - norm).abs() < 2e-2 * norm + 1e-4,
            "{name}: {quotient}, must be {norm}"
        );
    }
}

#[test]
fn tokens_that_do_not_train_have_an_influence_only_by_being_read() {
    let actor = actor(&model());
    let loss = |tokens: [u32; 5]| {
        let example = Sequence::new(tokens.to_vec(), vec![0., 0., 1., 0., 0.]).unwrap();
        actor.likelihood(&[example]).unwrap().loss
    };
    assert_eq!(loss([1, 2, 3, 4, 5]), loss([1, 2, 3, 1, 1]));
    assert_ne!(loss([1, 2, 3, 4, 5]), loss([1, 3, 3, 4, 5]));
}

#[test]
fn the_balance_of_experts_is_that_of_the_tokens_that_are_read() {
    let model = model_with_experts();
    let mut settings = config();
    settings.router_aux_loss_coef = 0.5;
    let build = || {
        Actor::new(
            model.clone(),
            parameters_of(&model, device()),
            settings.clone(),
        )
    };
    let examples = examples();
    let mut balanced = build().unwrap();
    let row = [examples[0].clone()];
    let sums = balanced
        .forward_backward_examples(&row, Likelihood::default(), 0., 5.)
        .unwrap();
    assert_eq!(sums.read_tokens, 5.);
    // From 1 for equal shares times a token's two experts, to 4.
    let loss = sums.router_aux_loss / sums.read_tokens;
    assert!((1. ..=4.).contains(&loss), "{loss}");
    // A scale of 0 leaves only the balance gradient.
    let router = "model.layers.0.mlp.gate.weight";
    assert!(largest(balanced.gradients().get(router).unwrap()) > 0.);
    let mut half = build().unwrap();
    half.forward_backward_examples(&row, Likelihood::default(), 0., 10.)
        .unwrap();
    let (whole, half) = (balanced.gradients(), half.gradients());
    let doubled = (half.get(router).unwrap() * 2.).unwrap();
    assert!(max_difference(whole.get(router).unwrap(), &doubled) < 1e-6);
}

#[rstest]
#[case(&[], &[], "weights: all 0")]
#[case(&[1], &[1.], "weights: all 0 after the first token")]
#[case(&[1, 2], &[1., 0.], "weights: all 0 after the first token")]
#[case(&[1, 2], &[1.], "weights: 1, must be one for each of 2 tokens")]
#[case(&[1, 2], &[0., -1.], "weights[1]: -1, must be finite and at least 0")]
#[case(&[1, 2], &[f32::NAN, 1.], "weights[0]: NaN, must be finite")]
fn an_example_without_a_token_to_learn_is_an_error(
    #[case] tokens: &[u32],
    #[case] weights: &[f32],
    #[case] expected: &str,
) {
    let error = Sequence::new(tokens.to_vec(), weights.to_vec()).unwrap_err();
    assert!(error.to_string().starts_with(expected), "{error}");
}

#[test]
fn a_weight_that_is_not_finite_stops_the_step_with_its_loss() {
    let mut actor = actor(&model());
    let variable = actor.parameters().get("model.norm.weight").unwrap().clone();
    let broken = (variable.ones_like().unwrap() * f64::NAN).unwrap();
    variable.set(&broken).unwrap();
    let example = Sequence::of_answer(&[1], &[2]).unwrap();
    let error = actor
        .forward_backward_examples(&[example], Likelihood::default(), 1., 0.)
        .unwrap_err();
    assert!(error.is::<candle_grpo_train::NotFinite>(), "{error:#}");
    assert!(actor.gradients().is_empty());
}

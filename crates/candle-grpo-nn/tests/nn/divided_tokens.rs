//! Passes whose tokens several ranks divide.

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::{
    ActivationCheckpointing, Decoder, Gradients, LanguageModel, Lora, LoraConfig, PackedTokens,
    Parameters, SequenceRanks,
};
use candle_grpo_test_support::{device, message, noise_tensor, on_ranks, stay_on_cpu};
use rstest::rstest;
use rstest_reuse::apply;

use crate::small::{Family, each_family, lively, max_difference};

/// Two sequences with a common prompt, of 9 and 6 tokens, one as long as the model takes, and some
/// with fewer tokens than ranks.
fn sequences() -> Vec<Vec<u32>> {
    vec![
        vec![1, 2, 3, 4, 5, 6, 7, 8, 9],
        vec![1, 2, 3, 4, 10, 11],
        vec![3],
        (0..16).map(|token| (token * 5 + 1) % 13).collect(),
        vec![6, 6],
    ]
}

fn bits(x: &Tensor) -> Result<Vec<u32>> {
    let values = x.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.into_iter().map(f32::to_bits).collect())
}

/// The hidden states of a pass, its gradients from noise, and the loss that balances experts.
struct Pass {
    hidden: Tensor,
    gradients: Vec<(String, Tensor)>,
    balance: Option<f64>,
}

/// Runs a pass over the rows that this rank computes.
fn pass(decoder: &Decoder, trained: &Parameters, tokens: &PackedTokens) -> Result<Pass> {
    let rows = tokens.computed_rows();
    let (hidden, mut recorded) = decoder.record(tokens)?;
    let n = tokens.ids().dim(0)?;
    let all = noise_tensor((n, hidden.dim(1)?), 3, DType::F32, device())?;
    let mut gradient = all.index_select(&Tensor::new(rows.as_slice(), device())?, 0)?;
    let mut weights: Vec<f32> = rows.iter().map(|&row| (row % 3) as f32).collect();
    if !tokens.has_rows() {
        gradient = gradient.zeros_like()?;
        weights.fill(0.);
    }
    let balance = recorded.balance_experts(&weights, 0.5)?;
    let mut gradients = Gradients::new();
    recorded.backward(&gradient, trained, &mut gradients)?;
    let gradients = gradients
        .iter()
        .map(|(name, x)| (name.to_owned(), x.clone()));
    Ok(Pass {
        hidden,
        gradients: gradients.collect(),
        balance: balance.map(|balance| balance.loss),
    })
}

/// Checks that the hidden states of `count` ranks have the bits of one, and that their gradients
/// add up to its gradients.
fn check(
    decoder: &Decoder,
    trained: &Parameters,
    tokens: &PackedTokens,
    count: usize,
) -> Result<()> {
    let whole = pass(decoder, trained, tokens)?;
    let parts = on_ranks(count, |collective| {
        let tokens = tokens.clone().divided(&SequenceRanks::new(collective));
        let hidden = decoder
            .hidden_states(&tokens)
            .expect("a pass without gradients");
        let rows = tokens.computed_rows();
        let part = pass(decoder, trained, &tokens).expect("a pass");
        assert_eq!(
            bits(&hidden).expect("f32"),
            bits(&part.hidden).expect("f32")
        );
        (rows, part)
    });
    for (rows, part) in &parts {
        let expected = whole
            .hidden
            .index_select(&Tensor::new(rows.as_slice(), device())?, 0)?;
        assert_eq!(bits(&part.hidden)?, bits(&expected)?, "{count} ranks");
        match (part.balance, whole.balance) {
            (Some(own), Some(whole)) => assert!((own - whole).abs() < 1e-6, "{own} of {whole}"),
            (own, whole) => assert_eq!(own, whole),
        }
    }
    for (at, (name, expected)) in whole.gradients.iter().enumerate() {
        let mut sum = expected.zeros_like()?;
        for (_, part) in &parts {
            assert_eq!(part.gradients[at].0, *name);
            sum = (sum + &part.gradients[at].1)?;
        }
        let scale = max_difference(expected, &expected.zeros_like()?)?;
        let distance = max_difference(&sum, expected)?;
        assert!(
            distance <= 2e-5 * scale.max(0.1),
            "{name} of {count} ranks: {distance} of {scale}"
        );
    }
    Ok(())
}

#[apply(each_family)]
fn the_ranks_compute_what_one_computes(
    family: Family,
    #[values(2, 3, 4, 7)] count: usize,
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    stay_on_cpu();
    let model = family.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let checkpointing = ActivationCheckpointing::from(checkpointing);
    let decoder = decoder.with_activation_checkpointing(checkpointing)?;
    let tokens = PackedTokens::sharing_prefixes(&sequences(), device())?;
    if family != Family::Qwen3_5 {
        return check(&decoder, &parameters, &tokens, count);
    }
    let errors = on_ranks(count, |collective| {
        let tokens = tokens.clone().divided(&SequenceRanks::new(collective));
        message(decoder.hidden_states(&tokens))
    });
    for error in errors {
        assert!(
            error.contains("must be whole for a decoder with a gated delta rule"),
            "{error}"
        );
    }
    Ok(())
}

#[rstest]
fn adapters_get_the_gradients_of_one_rank(#[values(2, 3)] count: usize) -> Result<()> {
    stay_on_cpu();
    let model = Family::LlamaWithBiases.config(true);
    let parameters = lively(&model)?;
    let adapters = Lora::init(LoraConfig::all_linear(2, 4.0), &model, 1, device())?;
    let vb = adapters.detached_var_builder(&parameters)?;
    let decoder = Decoder::new(&model, vb)?;
    let tokens = PackedTokens::new(&sequences(), device())?;
    check(&decoder, adapters.parameters(), &tokens, count)
}

/// One sequence of one token: all ranks but one have nothing to compute.
#[test]
fn a_single_token_is_that_of_one_rank() -> Result<()> {
    stay_on_cpu();
    let model = Family::Llama.config(false);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let tokens = PackedTokens::new(&[vec![5]], device())?;
    check(&decoder, &parameters, &tokens, 3)
}

#[test]
fn experts_are_replayed_on_the_rank_of_their_token() -> Result<()> {
    stay_on_cpu();
    let model = Family::Qwen3Moe.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let experts: Vec<Vec<u16>> = sequences()
        .iter()
        .map(|tokens| {
            tokens
                .iter()
                .flat_map(|&id| [id as u16 % 3, (id as u16 + 1) % 3])
                .collect()
        })
        .collect();
    let tokens = PackedTokens::replaying(&sequences(), &experts, device())?;
    check(&decoder, &parameters, &tokens, 2)
}

#[test]
fn a_pass_with_a_graph_cannot_be_divided() -> Result<()> {
    stay_on_cpu();
    let model = Family::Llama.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.var_builder())?;
    let tokens = PackedTokens::new(&sequences(), device())?;
    for error in on_ranks(2, |collective| {
        let tokens = tokens.clone().divided(&SequenceRanks::new(collective));
        message(decoder.hidden_states(&tokens))
    }) {
        assert!(
            error.contains("must be whole in a pass that records Candle's graph"),
            "{error}"
        );
    }
    Ok(())
}

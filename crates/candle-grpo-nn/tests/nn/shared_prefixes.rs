//! Shared prefixes against separate sequences.

use std::collections::HashSet;

use candle_core::{DType, Result, Tensor};
use candle_grpo_kernels::embedding;
use candle_grpo_nn::{Decoder, Gradients, LanguageModel, PackedTokens, Parameters};
use candle_grpo_test_support::{device, noise_tensor};
use proptest::prelude::*;
use rstest::rstest;
use rstest_reuse::apply;

use crate::small::{Family, config, each_family, lively, max_difference};

/// Two groups, a separate sequence, one that is all of another, and one that occurs twice.
fn sequences() -> Vec<Vec<u32>> {
    [
        &[1, 2, 3, 4, 5][..],
        &[1, 2, 3, 9],
        &[1, 2, 3, 4, 6, 7],
        &[8, 2, 3],
        &[2, 2, 2, 2],
        &[8, 2],
        &[1, 2, 3, 9],
    ]
    .map(<[u32]>::to_vec)
    .to_vec()
}

fn both(sequences: &[Vec<u32>]) -> Result<(PackedTokens, PackedTokens)> {
    Ok((
        PackedTokens::new(sequences, device())?,
        PackedTokens::sharing_prefixes(sequences, device())?,
    ))
}

fn noise(rows: usize, columns: usize) -> Result<Tensor> {
    noise_tensor((rows, columns), 1, DType::F32, device())
}

/// `per_token`, summed over each row's tokens.
fn summed(tokens: &PackedTokens, per_token: &Tensor) -> Result<Tensor> {
    let rows = Tensor::new(tokens.rows(), device())?;
    let zeros = Tensor::zeros(
        (tokens.ids().dim(0)?, per_token.dim(1)?),
        DType::F32,
        device(),
    )?;
    zeros.index_add(&rows, per_token, 0)
}

fn recorded(
    decoder: &Decoder,
    tokens: &PackedTokens,
    hidden_gradient: &Tensor,
    parameters: &Parameters,
) -> Result<(Tensor, Gradients)> {
    let mut gradients = Gradients::new();
    let (hidden, recorded) = decoder.record(tokens)?;
    recorded.backward(hidden_gradient, parameters, &mut gradients)?;
    Ok((hidden, gradients))
}

#[apply(each_family)]
fn shared_prefixes_keep_hidden_states_and_gradients(
    family: Family,
    #[values(true, false)] checkpointing: bool,
) -> Result<()> {
    let model = family.config(true);
    let parameters = lively(&model)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?
        .with_activation_checkpointing(checkpointing)?;
    let (alone, shared) = both(&sequences())?;
    assert_eq!((alone.ids().dim(0)?, shared.ids().dim(0)?), (28, 15));
    let hidden_gradient = noise(28, model.hidden_size)?;
    let (hidden, gradients) = recorded(&decoder, &alone, &hidden_gradient, &parameters)?;
    let row_gradient = summed(&shared, &hidden_gradient)?;
    let (rows, shared_gradients) = recorded(&decoder, &shared, &row_gradient, &parameters)?;

    let spread = embedding(&Tensor::new(shared.rows(), device())?, &rows)?;
    assert!(max_difference(&spread, &hidden)? < 1e-5);
    assert_eq!(shared_gradients.iter().count(), parameters.len());
    for (name, gradient) in gradients.iter() {
        let distance = max_difference(shared_gradients.get(name).expect("a gradient"), gradient)?;
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        assert!(
            scale > 0.0 && distance < 1e-5 * scale.max(0.1),
            "{name}: {distance} of {scale}"
        );
    }
    Ok(())
}

#[test]
fn the_graph_sums_gradients_of_shared_prefixes() -> Result<()> {
    let model = config(false);
    let parameters = lively(&model)?;
    let (_, shared) = both(&sequences())?;
    let row_gradient = noise(15, model.hidden_size)?;
    let decoder = Decoder::new(&model, parameters.detached_var_builder())?;
    let (_, recorded) = recorded(&decoder, &shared, &row_gradient, &parameters)?;
    let tracked = Decoder::new(&model, parameters.var_builder())?;
    let loss = (tracked.hidden_states(&shared)? * row_gradient)?.sum_all()?;
    let graph = loss.backward()?;
    for (name, gradient) in recorded.iter() {
        let variable = parameters.get(name).expect("a variable");
        let by_graph = graph.get(variable).expect("a gradient");
        let scale = max_difference(gradient, &gradient.zeros_like()?)?;
        assert!(
            max_difference(gradient, by_graph)? < 1e-5 * scale.max(0.1),
            "{name}"
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn each_prefix_is_stored_once(
        sequences in prop::collection::vec(prop::collection::vec(0u32..3, 1..6), 1..8),
    ) {
        let (alone, shared) = both(&sequences).unwrap();
        let beginnings: HashSet<&[u32]> = sequences
            .iter()
            .flat_map(|sequence| (1..=sequence.len()).map(|length| &sequence[..length]))
            .collect();
        let ids = shared.ids().to_vec1::<u32>().unwrap();
        prop_assert_eq!(ids.len(), beginnings.len());
        let tokens: Vec<u32> = shared.rows().iter().map(|&row| ids[row as usize]).collect();
        prop_assert_eq!(tokens, alone.ids().to_vec1::<u32>().unwrap());
        prop_assert_eq!(shared.lengths(), alone.lengths());

        let padded = shared.right_padded().unwrap();
        prop_assert_eq!(
            padded.to_vec2::<u32>().unwrap(),
            alone.right_padded().unwrap().to_vec2::<u32>().unwrap()
        );
        let hidden = padded.to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
        let rows = shared.rows_of(&hidden).unwrap().flatten_all().unwrap();
        let rows: Vec<u32> = rows.to_vec1::<f32>().unwrap().iter().map(|&id| id as u32).collect();
        prop_assert_eq!(rows, ids);
    }
}

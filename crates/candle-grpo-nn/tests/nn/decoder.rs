//! The decoder: output invariances, and errors.

use candle_core::{DType, IndexOp, Result, Tensor};
use candle_grpo_nn::{Decoder, Gradients};
use rstest::rstest;

use candle_grpo_test_support::{device, message};

use crate::small::{config, left_padded, lively, max_difference, next_token_loss};

fn decoder() -> Result<Decoder> {
    let config = config(true);
    Decoder::new(&config, lively(&config)?.detached_var_builder())
}

fn logits(decoder: &Decoder, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
    decoder.logits(&decoder.padded_hidden_states(ids, mask)?)
}

fn ids<const S: usize>(rows: &[&[u32; S]]) -> Result<Tensor> {
    let flat: Vec<u32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
    Tensor::from_vec(flat, (rows.len(), S), device())
}

#[test]
fn logits_do_not_depend_on_the_side_of_padding() -> Result<()> {
    let decoder = decoder()?;
    let alone = logits(&decoder, &ids(&[&[3, 1, 4]])?, &ids(&[&[1, 1, 1]])?)?;
    let left = logits(
        &decoder,
        &ids(&[&[0, 0, 3, 1, 4], &[1, 2, 3, 4, 5]])?,
        &ids(&[&[0, 0, 1, 1, 1], &[1; 5]])?,
    )?;
    let right = logits(
        &decoder,
        &ids(&[&[3, 1, 4, 0, 0], &[1, 2, 3, 4, 5]])?,
        &ids(&[&[1, 1, 1, 0, 0], &[1; 5]])?,
    )?;
    let (left, right) = (left.i((..1, 2..))?, right.i((..1, ..3))?);
    assert!(max_difference(&alone, &left)? < 1e-5);
    assert!(max_difference(&alone, &right)? < 1e-5);
    // A model that hardly depends on its input would pass the comparison.
    let other = logits(&decoder, &ids(&[&[9, 1, 4]])?, &ids(&[&[1, 1, 1]])?)?;
    assert!(max_difference(&alone.i((.., 2))?, &other.i((.., 2))?)? > 0.1);
    Ok(())
}

#[test]
fn token_ids_at_padding_change_nothing() -> Result<()> {
    let decoder = decoder()?;
    let mask = ids(&[&[0, 0, 1, 1, 1, 0]])?;
    let zeros = logits(&decoder, &ids(&[&[0, 0, 3, 1, 4, 0]])?, &mask)?;
    let others = logits(&decoder, &ids(&[&[7, 12, 3, 1, 4, 9]])?, &mask)?;
    assert_eq!(
        max_difference(&zeros.i((.., 2..5))?, &others.i((.., 2..5))?)?,
        0.0
    );
    Ok(())
}

#[test]
fn tokens_do_not_depend_on_later_tokens() -> Result<()> {
    let decoder = decoder()?;
    let mask = ids(&[&[1; 5]])?;
    let one = logits(&decoder, &ids(&[&[5, 3, 1, 4, 2]])?, &mask)?;
    let two = logits(&decoder, &ids(&[&[5, 3, 1, 8, 2]])?, &mask)?;
    assert_eq!(max_difference(&one.i((.., ..3))?, &two.i((.., ..3))?)?, 0.0);
    for position in [3, 4] {
        assert!(max_difference(&one.i((.., position))?, &two.i((.., position))?)? > 0.1);
    }
    Ok(())
}

#[test]
fn rows_without_a_real_token_stay_finite_and_leave_the_others_alone() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.var_builder())?;
    let (both, mask) = (
        ids(&[&[3, 1, 4], &[0, 0, 0]])?,
        ids(&[&[1, 1, 1], &[0, 0, 0]])?,
    );
    let all = logits(&decoder, &both, &mask)?;
    assert!(max_difference(&all, &all.zeros_like()?)?.is_finite());
    let gradients_of = |ids: &Tensor, mask: &Tensor| {
        let mut gradients = Gradients::new();
        gradients.accumulate(&next_token_loss(&decoder, ids, mask)?, &parameters)?;
        Ok::<_, candle_core::Error>(gradients)
    };
    let (with, without) = (
        gradients_of(&both, &mask)?,
        gradients_of(&both.i(..1)?, &mask.i(..1)?)?,
    );
    for (name, gradient) in without.iter() {
        let distance = max_difference(gradient, with.get(name).unwrap())?;
        assert!(distance < 1e-6, "{name}: {distance}");
    }
    Ok(())
}

#[rstest]
fn a_mask_may_have_any_dtype(
    #[values(DType::U8, DType::I64, DType::F32, DType::F64, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let decoder = decoder()?;
    let (ids, mask) = left_padded()?;
    let expected = logits(&decoder, &ids, &mask)?;
    assert_eq!(
        max_difference(&logits(&decoder, &ids, &mask.to_dtype(dtype)?)?, &expected)?,
        0.0
    );
    Ok(())
}

#[test]
fn half_precision_trains_f32_variables() -> Result<()> {
    let config = config(false);
    let parameters = lively(&config)?;
    let (ids, mask) = left_padded()?;
    let full = Decoder::new(&config, parameters.var_builder())?;
    let half = Decoder::new(&config, parameters.var_builder().to_dtype(DType::BF16))?;
    let real = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
    let half_logits = logits(&half, &ids, &mask)?;
    assert_eq!(half_logits.dtype(), DType::BF16);
    let distance = max_difference(
        &half_logits.to_dtype(DType::F32)?.broadcast_mul(&real)?,
        &logits(&full, &ids, &mask)?.broadcast_mul(&real)?,
    )?;
    assert!(distance > 0.0 && distance < 0.1, "{distance}");

    let gradients_of = |decoder: &Decoder| {
        let logits = logits(decoder, &ids, &mask)?
            .to_dtype(DType::F32)?
            .broadcast_mul(&real)?;
        let mut gradients = Gradients::new();
        gradients.accumulate(&logits.sqr()?.mean_all()?, &parameters)?;
        Ok::<_, candle_core::Error>(gradients)
    };
    let (full, half) = (gradients_of(&full)?, gradients_of(&half)?);
    for (name, gradient) in half.iter() {
        assert_eq!(gradient.dtype(), DType::F32);
        let reference = full.get(name).unwrap();
        let distance = max_difference(gradient, reference)?
            / max_difference(reference, &reference.zeros_like()?)?;
        assert!(distance < 0.05, "{name}: {distance}");
    }
    Ok(())
}

#[test]
fn the_output_layer_is_the_embedding_when_tied() -> Result<()> {
    for tied in [true, false] {
        let config = config(tied);
        let parameters = lively(&config)?;
        let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
        let name = if tied {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        assert_eq!(
            max_difference(decoder.output_weight(), parameters.get(name).unwrap())?,
            0.0
        );
        assert_eq!(decoder.config(), &config);
    }
    Ok(())
}

#[test]
fn logits_take_any_number_of_leading_dimensions() -> Result<()> {
    let decoder = decoder()?;
    let (ids, mask) = left_padded()?;
    let hidden = decoder.padded_hidden_states(&ids, &mask)?;
    assert_eq!(hidden.dims(), [3, 5, 12]);
    let all = decoder.logits(&hidden)?;
    assert_eq!(all.dims(), [3, 5, 13]);
    // Not contiguous, two dimensions, and one.
    assert_eq!(
        max_difference(&decoder.logits(&hidden.i((.., 2))?)?, &all.i((.., 2))?)?,
        0.0
    );
    assert!(max_difference(&decoder.logits(&hidden.i((1, 2))?)?, &all.i((1, 2))?)? < 1e-6);
    for bad in [hidden.narrow(2, 0, 11)?, hidden.narrow(0, 0, 0)?] {
        assert!(message(decoder.logits(&bad)).contains("must be [.., 12] and not empty"));
    }
    assert!(message(decoder.logits(&hidden.to_dtype(DType::F64)?)).contains("hidden: dtype F64"));
    Ok(())
}

#[test]
fn rows_may_have_max_position_embeddings_tokens_and_no_more() -> Result<()> {
    let decoder = decoder()?;
    decoder.padded_hidden_states(&ids(&[&[1; 16]])?, &ids(&[&[1; 16]])?)?;
    let error = message(decoder.padded_hidden_states(&ids(&[&[1; 17]])?, &ids(&[&[1; 17]])?));
    assert_eq!(
        error,
        "input_ids: 17 positions, must be at most max_position_embeddings, which is 16"
    );
    Ok(())
}

#[test]
fn input_that_does_not_fit_is_refused_by_name() -> Result<()> {
    if !device().is_cpu() {
        // Ids are checked on the CPU only.
        return Ok(());
    }
    let decoder = decoder()?;
    let (good, mask) = left_padded()?;
    let refusal = |ids: &Tensor, mask: &Tensor| message(decoder.padded_hidden_states(ids, mask));
    let cases = [
        (
            refusal(&ids(&[&[1, 2], &[3, 13]])?, &ids(&[&[1; 2]; 2])?),
            "input_ids[1, 1]: 13",
        ),
        (
            refusal(&ids(&[&[u32::MAX]])?, &ids(&[&[1]])?),
            "input_ids[0, 0]: 4294967295",
        ),
        (
            refusal(&good.flatten_all()?, &mask),
            "input_ids: shape [15], must be [B, S]",
        ),
        (
            refusal(&good.to_dtype(DType::I64)?, &mask),
            "input_ids: dtype I64, must be u32",
        ),
        (
            refusal(&good.narrow(0, 0, 0)?, &mask.narrow(0, 0, 0)?),
            "input_ids: shape [0, 5]",
        ),
        (
            refusal(&good.narrow(1, 0, 0)?, &mask.narrow(1, 0, 0)?),
            "input_ids: shape [3, 0]",
        ),
        (
            refusal(&good, &mask.narrow(1, 0, 4)?),
            "attention_mask: shape [3, 4], must be [3, 5]",
        ),
        (
            refusal(&good, &mask.narrow(0, 0, 2)?),
            "attention_mask: shape [2, 5], must be [3, 5]",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message}");
    }
    Ok(())
}

#[test]
fn a_builder_that_lacks_a_weight_or_is_of_integers_is_refused() -> Result<()> {
    let (tied, untied) = (config(true), config(false));
    let lacking = message(Decoder::new(&untied, lively(&tied)?.var_builder()));
    assert!(lacking.contains("lm_head.weight"), "{lacking}");
    let integers = message(Decoder::new(
        &tied,
        lively(&tied)?.var_builder().to_dtype(DType::U32),
    ));
    assert!(integers.contains("vb: dtype U32"), "{integers}");
    Ok(())
}

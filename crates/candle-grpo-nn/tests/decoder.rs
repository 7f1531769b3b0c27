//! The decoder: what must not change its output, and what it refuses.

use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_grpo_nn::{Decoder, Gradients, KvCache};
use rstest::rstest;

mod small;
use small::{config, left_padded, lively, max_difference, message, next_token_loss};

fn decoder() -> Result<Decoder> {
    let config = config(true);
    Decoder::new(&config, lively(&config)?.detached_var_builder())
}

fn logits(decoder: &Decoder, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
    decoder.logits(&decoder.hidden_states(ids, mask, None)?)
}

fn ids<const S: usize>(rows: &[&[u32; S]]) -> Result<Tensor> {
    let flat: Vec<u32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
    Tensor::from_vec(flat, (rows.len(), S), &Device::Cpu)
}

#[test]
fn padding_on_either_side_or_none_is_the_same() -> Result<()> {
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
    // The test would not see much in a model that hardly depends on its input.
    let other = logits(&decoder, &ids(&[&[9, 1, 4]])?, &ids(&[&[1, 1, 1]])?)?;
    assert!(max_difference(&alone.i((.., 2))?, &other.i((.., 2))?)? > 0.1);
    Ok(())
}

#[test]
fn what_stands_at_padding_changes_nothing() -> Result<()> {
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
fn no_token_sees_a_later_one() -> Result<()> {
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

#[rstest]
#[case::one_by_one(&[1, 1, 1, 1, 1])]
#[case::prompt_first(&[3, 1, 1])]
#[case::in_chunks(&[2, 3])]
#[case::at_once(&[5])]
fn with_a_cache_the_output_is_that_of_the_whole(#[case] chunks: &[usize]) -> Result<()> {
    let decoder = decoder()?;
    let (ids, mask) = left_padded()?;
    let whole = decoder.hidden_states(&ids, &mask, None)?;
    let mut cache = KvCache::new(2);
    assert!(cache.is_empty());
    let mut parts = Vec::new();
    for &chunk in chunks {
        let past = cache.len();
        let seen = mask.narrow(1, 0, past + chunk)?;
        parts.push(decoder.hidden_states(&ids.narrow(1, past, chunk)?, &seen, Some(&mut cache))?);
        assert_eq!(cache.len(), past + chunk);
    }
    let real = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
    let (parts, whole) = (
        Tensor::cat(&parts, 1)?.broadcast_mul(&real)?,
        whole.broadcast_mul(&real)?,
    );
    assert!(max_difference(&parts, &whole)? < 1e-5);
    Ok(())
}

#[test]
fn rows_of_a_cache_can_be_repeated_dropped_and_reordered() -> Result<()> {
    let decoder = decoder()?;
    let mut cache = KvCache::new(2);
    decoder.hidden_states(
        &ids(&[&[3, 1, 4], &[5, 9, 2]])?,
        &ids(&[&[1; 3]; 2])?,
        Some(&mut cache),
    )?;
    cache.select_rows(&Tensor::new(&[1i64, 0, 1], &Device::Cpu)?)?;
    let next = ids(&[&[6], &[7], &[8]])?;
    let cached = decoder.hidden_states(&next, &ids(&[&[1; 4]; 3])?, Some(&mut cache))?;
    let sequences = ids(&[&[5, 9, 2, 6], &[3, 1, 4, 7], &[5, 9, 2, 8]])?;
    let whole = decoder.hidden_states(&sequences, &ids(&[&[1; 4]; 3])?, None)?;
    assert!(max_difference(&cached, &whole.i((.., 3..))?)? < 1e-5);
    Ok(())
}

#[test]
fn rows_that_a_cache_does_not_have_are_refused() -> Result<()> {
    let decoder = decoder()?;
    let mut cache = KvCache::new(2);
    let rows = |rows: &[u32]| Tensor::new(rows, &Device::Cpu);
    assert!(message(cache.select_rows(&rows(&[0])?)).contains("empty cache"));
    decoder.hidden_states(&ids(&[&[3, 1]; 2])?, &ids(&[&[1; 2]; 2])?, Some(&mut cache))?;
    assert!(message(cache.select_rows(&rows(&[0, 2])?)).contains("rows contains 2"));
    // Candle takes this index for "none" and would give zeros.
    assert!(message(cache.select_rows(&rows(&[u32::MAX])?)).contains("rows contains 4294967295"));
    assert!(
        message(cache.select_rows(&Tensor::new(&[-1i64], &Device::Cpu)?))
            .contains("rows contains -1")
    );
    assert!(message(cache.select_rows(&rows(&[])?)).contains("rows has shape [0]"));
    assert!(message(cache.select_rows(&Tensor::new(&[0f32], &Device::Cpu)?)).contains("dtype F32"));
    assert!(message(cache.select_rows(&ids(&[&[0]])?)).contains("rows has shape [1, 1]"));
    assert_eq!(cache.len(), 2);
    Ok(())
}

#[test]
fn no_gradient_passes_through_a_cache() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.var_builder())?;
    let hidden = decoder.hidden_states(
        &ids(&[&[3, 1]])?,
        &ids(&[&[1; 2]])?,
        Some(&mut KvCache::new(2)),
    )?;
    assert!(!hidden.track_op());
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
    let hidden = decoder.hidden_states(&ids, &mask, None)?;
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
        assert!(message(decoder.logits(&bad)).contains("it must be [.., 12] and not empty"));
    }
    assert!(
        message(decoder.logits(&hidden.to_dtype(DType::F64)?)).contains("hidden has dtype F64")
    );
    Ok(())
}

#[test]
fn the_longest_row_is_taken_and_one_more_is_refused() -> Result<()> {
    let decoder = decoder()?;
    decoder.hidden_states(&ids(&[&[1; 16]])?, &ids(&[&[1; 16]])?, None)?;
    let long = message(decoder.hidden_states(&ids(&[&[1; 17]])?, &ids(&[&[1; 17]])?, None));
    assert!(
        long.contains("17 positions") && long.contains("max_position_embeddings, which is 16"),
        "{long}"
    );
    let mut cache = KvCache::new(2);
    decoder.hidden_states(&ids(&[&[1; 16]])?, &ids(&[&[1; 16]])?, Some(&mut cache))?;
    let after =
        message(decoder.hidden_states(&ids(&[&[1]])?, &ids(&[&[1; 17]])?, Some(&mut cache)));
    assert!(
        after.contains("1 positions after 16 in the cache"),
        "{after}"
    );
    assert_eq!(cache.len(), 16);
    Ok(())
}

#[test]
fn input_that_does_not_fit_is_refused_by_name() -> Result<()> {
    let decoder = decoder()?;
    let (good, mask) = left_padded()?;
    let refusal = |ids: &Tensor, mask: &Tensor| message(decoder.hidden_states(ids, mask, None));
    let cases = [
        (
            refusal(&ids(&[&[1, 2], &[3, 13]])?, &ids(&[&[1; 2]; 2])?),
            "input_ids[1, 1] is 13",
        ),
        (
            refusal(&ids(&[&[u32::MAX]])?, &ids(&[&[1]])?),
            "input_ids[0, 0] is 4294967295",
        ),
        (
            refusal(&good.flatten_all()?, &mask),
            "input_ids has shape [15], it must be [B, S]",
        ),
        (
            refusal(&good.to_dtype(DType::I64)?, &mask),
            "input_ids has dtype I64, it must be u32",
        ),
        (
            refusal(&good.narrow(0, 0, 0)?, &mask.narrow(0, 0, 0)?),
            "input_ids has shape [0, 5]",
        ),
        (
            refusal(&good.narrow(1, 0, 0)?, &mask.narrow(1, 0, 0)?),
            "input_ids has shape [3, 0]",
        ),
        (
            refusal(&good, &mask.narrow(1, 0, 4)?),
            "attention_mask has shape [3, 4], it must be [3, 5]",
        ),
        (
            refusal(&good, &mask.narrow(0, 0, 2)?),
            "attention_mask has shape [2, 5], it must be [3, 5]",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message}");
    }

    let layers = message(decoder.hidden_states(&good, &mask, Some(&mut KvCache::new(3))));
    assert!(
        layers.contains("cache is for 3 layers, it must be for 2"),
        "{layers}"
    );
    let mut cache = KvCache::new(2);
    decoder.hidden_states(&good, &mask, Some(&mut cache))?;
    let next = (ids(&[&[1]; 2])?, ids(&[&[1; 6]; 2])?);
    let rows = message(decoder.hidden_states(&next.0, &next.1, Some(&mut cache)));
    assert!(rows.contains("cache has 3 rows, it must have 2"), "{rows}");
    let short =
        message(decoder.hidden_states(&ids(&[&[1]; 3])?, &ids(&[&[1]; 3])?, Some(&mut cache)));
    assert!(
        short.contains("attention_mask has shape [3, 1], it must be [3, 6]"),
        "{short}"
    );
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
    assert!(integers.contains("vb has dtype U32"), "{integers}");
    Ok(())
}

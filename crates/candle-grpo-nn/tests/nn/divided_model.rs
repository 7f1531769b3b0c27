//! Decoders whose weights ranks divide.

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_nn::optim::{MasterWeights, Sharding};
use candle_grpo_nn::{
    AdamWConfig, Decoder, DecoderConfig, DividedModel, Export, LanguageModel, PackedTokens,
    PagedCache, Parameters, WeightDivision,
};
use candle_grpo_test_support::{message, on_ranks, stay_on_cpu};
use rstest::rstest;
use rstest_reuse::apply;

use crate::small::{Family, config, each_family, left_padded, lively, recorded_gradients};

fn decoder(config: &DecoderConfig, parameters: &Parameters) -> Result<Decoder> {
    Decoder::new(config, parameters.detached_var_builder())?.gathering(parameters)
}

/// The numbers of a tensor in f32.
fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Hidden states without padding, log-probs of a padded batch, and all gradients.
fn computed(
    config: &DecoderConfig,
    parameters: &Parameters,
    checkpointing: bool,
) -> Result<Vec<Vec<f32>>> {
    let decoder = decoder(config, parameters)?;
    let tokens = PackedTokens::new(&[vec![1, 2, 3, 4], vec![5, 6]], &Device::Cpu)?;
    let (ids, mask) = left_padded()?;
    let mut found = vec![
        numbers(&decoder.hidden_states(&tokens)?)?,
        numbers(&decoder.logits(&decoder.padded_hidden_states(&ids, &mask)?)?)?,
    ];
    let gradients = recorded_gradients(&decoder, parameters, &ids, &mask, checkpointing)?;
    let gradients = gradients.iter().map(|(_, gradient)| numbers(gradient));
    found.extend(gradients.collect::<Result<Vec<_>>>()?);
    Ok(found)
}

/// Calls `work` with the number of each rank and the division of weights that train with `options`.
fn on_all(
    world_size: usize,
    work: impl Fn(usize, WeightDivision) -> Result<()> + Sync,
    options: &AdamWConfig,
    dtype: DType,
) {
    let results = on_ranks(world_size, |collective| {
        let ranks = (&collective, Sharding::Full);
        let division = options.division(dtype, ranks).expect("several ranks");
        work(collective.rank(), division)
    });
    results.into_iter().collect::<Result<()>>().unwrap();
}

#[apply(each_family)]
fn passes_over_gathered_weights_have_the_bits_of_whole_ones(
    family: Family,
    #[values(false, true)] tied: bool,
) -> Result<()> {
    stay_on_cpu();
    let config = family.config(tied);
    for (dtype, checkpointing) in [(DType::F32, false), (DType::BF16, true)] {
        let rounded = lively(&config)?.to_dtype(dtype)?;
        let expected = computed(&config, &rounded, checkpointing)?;
        for world_size in [2, 5] {
            let work = |_, division: WeightDivision| {
                let divided = lively(&config)?.divided(&division)?;
                assert!(divided.is_full());
                for _ in 0..2 {
                    assert!(computed(&config, &divided, checkpointing)? == expected);
                }
                Ok(())
            };
            on_all(world_size, work, &AdamWConfig::default(), dtype);
        }
    }
    Ok(())
}

/// Ranks read their parts of a folder.
#[rstest]
#[case::f32(DType::F32, MasterWeights::F32)]
#[case::rounded(DType::BF16, MasterWeights::F32)]
#[case::bf16(DType::BF16, MasterWeights::Bf16)]
fn a_rank_keeps_its_part_and_exports_all(
    #[case] dtype: DType,
    #[case] master_weights: MasterWeights,
    #[values(2, 3)] world_size: usize,
) -> Result<()> {
    stay_on_cpu();
    let config = config(false);
    let folder = tempfile::tempdir()?;
    let written = lively(&config)?;
    written.save(&folder.path().join("model.safetensors"))?;
    let whole = match master_weights {
        MasterWeights::F32 => written,
        MasterWeights::Bf16 => written.to_dtype(DType::BF16)?,
    };
    let options = AdamWConfig {
        master_weights,
        ..AdamWConfig::default()
    };
    let bytes = whole.num_elements() * dtype.size_in_bytes();
    let expected = folder.path().join("expected");
    whole.save(&expected)?;
    let found = folder.path().join("found");
    let work = |rank: usize, division: WeightDivision| {
        let path = folder.path();
        let read = Parameters::load_folder_divided(&config, path, &division, &Device::Cpu)?;
        // The remainder of each weight is on all ranks.
        let share = bytes / world_size;
        let remainders = read.len() * 8 * world_size * dtype.size_in_bytes();
        assert!((share..=share + remainders).contains(&read.num_bytes()));
        for (name, expected) in whole.iter() {
            let found = read.whole(name)?;
            assert_eq!(found.dtype(), expected.dtype(), "{name}");
            assert_eq!(numbers(&found)?, numbers(expected)?, "{name}");
        }
        if rank == 0 {
            Export::new(&read).with_masters().save(&found)?;
            read.end_exports()
        } else {
            read.take_part_in_export()
        }
    };
    on_all(world_size, work, &options, dtype);
    assert!(std::fs::read(&expected)? == std::fs::read(&found)?);
    Ok(())
}

#[test]
fn weights_have_values_only_while_they_are_held() {
    stay_on_cpu();
    let config = config(true);
    let work = |_, division: WeightDivision| {
        let divided = lively(&config)?.divided(&division)?;
        let decoder = decoder(&config, &divided)?;
        let mut cache = PagedCache::new(&config, DType::F32, &Device::Cpu)?;
        let sequence = cache.add();
        let new: [(_, &[u32]); 1] = [(sequence, &[1, 2])];
        let not_held = "weights: divided between ranks, must be held to sample: see DividedModel";
        assert_eq!(message(decoder.next_logits(&new, &mut cache)), not_held);
        assert_eq!(message(decoder.decoding().map(drop)), not_held);
        for error in [
            message(divided.frozen_copy()),
            message(divided.copy_to(&Device::Cpu)),
            message(divided.to_dtype(DType::BF16)),
        ] {
            let expected = "weights: divided between ranks, must be whole to be copied";
            assert_eq!(error, expected);
        }
        let embedding = "model.embed_tokens.weight";
        let error = message(Export::new(&divided).tensor(embedding));
        let expected = ": divided between ranks, must be held to be exported by one of them";
        assert_eq!(error, format!("{embedding}{expected}"));

        let all = decoder.divided().map(DividedModel::hold_all).transpose()?;
        // Not gathered again.
        let output = decoder
            .divided()
            .map(DividedModel::hold_output)
            .transpose()?;
        let whole = lively(&config)?;
        let expected = Decoder::new(&config, whole.detached_var_builder())?;
        let mut other = PagedCache::new(&config, DType::F32, &Device::Cpu)?;
        let same = other.add();
        let new_of_other: [(_, &[u32]); 1] = [(same, &[1, 2])];
        let logits = expected.next_logits(&new_of_other, &mut other)?;
        let found = decoder.next_logits(&new, &mut cache)?;
        assert_eq!(numbers(&found)?, numbers(&logits)?);
        let exported = Export::new(&divided).tensor(embedding)?;
        let embedding = whole.get(embedding).expect("every model has one");
        assert_eq!(numbers(&exported)?, numbers(embedding)?);
        let values = whole.frozen_copy()?;
        let error = message(divided.set_values(&values));
        assert!(error.ends_with("gathered from all ranks, must be freed before it changes"));
        drop((all, output));
        divided.set_values(&values)?;
        assert_eq!(message(decoder.decoding().map(drop)), not_held);
        Ok(())
    };
    on_all(2, work, &AdamWConfig::default(), DType::F32);
}

/// The ranks of a frozen model need no options of an optimizer.
#[test]
fn a_divided_copy_is_rounded_from_f32() {
    stay_on_cpu();
    let config = config(true);
    let results = on_ranks(3, |collective| -> Result<()> {
        let ranks = (&collective, Sharding::Full);
        let policy = lively(&config)?;
        let policy = AdamWConfig::default().divide(policy, DType::BF16, ranks)?;
        let frozen = WeightDivision::frozen(DType::F16, &collective).expect("several ranks");
        let copy = policy.copy_divided(&config, &frozen)?;
        for (name, expected) in lively(&config)?.iter() {
            let rounded = expected.to_dtype(DType::F16)?;
            assert_eq!(numbers(&copy.whole(name)?)?, numbers(&rounded)?, "{name}");
        }
        Ok(())
    });
    results.into_iter().collect::<Result<()>>().unwrap();
}

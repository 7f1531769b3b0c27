//! Decoders with one base and several adapters, joined.

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::{
    Decoder, DecoderConfig, Gradients, LanguageModel, Lora, LoraConfig, PackedTokens, PagedCache,
    Parameters,
};
use rstest::rstest;
use rstest_reuse::apply;

use candle_grpo_test_support::{device, message, noise_tensor};

use crate::small::{Family, config, each_family, lively, max_difference};

/// Adapters whose b is not zero.
fn adapters(config: LoraConfig, model: &DecoderConfig, seed: u64) -> Result<Lora> {
    let lora = Lora::init(config, model, seed, device())?;
    for (name, variable) in lora.parameters().iter() {
        if name.ends_with("lora_B.weight") {
            let seed = seed + name.len() as u64;
            let noise = noise_tensor(variable.shape(), seed, DType::F32, device())?;
            variable.set(&(noise * 0.3)?)?;
        }
    }
    Ok(lora)
}

/// Decoders over one base with their adapters: for all maps, wider ones for one map, and others for
/// all maps.
fn adapted(
    model: &DecoderConfig,
    frozen: &Parameters,
    dtype: DType,
) -> Result<Vec<(Lora, Decoder)>> {
    let all = LoraConfig::all_linear(2, 4.);
    let one = LoraConfig {
        target_modules: vec!["o_proj".to_owned()],
        ..LoraConfig::all_linear(3, 2.)
    };
    [(&all, 1), (&one, 2), (&all, 3)]
        .into_iter()
        .map(|(config, seed)| {
            let lora = adapters(config.clone(), model, seed)?;
            let vb = match dtype {
                DType::F32 => lora.detached_var_builder(frozen)?,
                _ => lora.copied_var_builder(frozen, dtype)?.0,
            };
            let decoder = Decoder::new(model, vb)?;
            Ok((lora, decoder))
        })
        .collect()
}

/// The decoders in [`adapted`], and one without adapters at index 1.
fn decoders(model: &DecoderConfig, base: &Parameters, dtype: DType) -> Result<Vec<Decoder>> {
    let frozen = base.to_dtype(dtype)?;
    let plain = match dtype {
        DType::F32 => frozen.detached_var_builder(),
        _ => frozen.copied_var_builder(dtype)?.0,
    };
    let plain = Decoder::new(model, plain)?;
    let adapted = adapted(model, &frozen, dtype)?;
    let mut all: Vec<Decoder> = adapted.into_iter().map(|(_, decoder)| decoder).collect();
    all.insert(1, plain);
    Ok(all)
}

/// A sequence's decoder, its prompt and its later tokens.
const SEQUENCES: [(usize, &[u32], &[u32]); 6] = [
    (0, &[3, 1, 4], &[1, 5, 9]),
    (2, &[3, 1, 4], &[2, 6, 5]),
    (2, &[12, 7], &[3, 5, 8]),
    (1, &[3, 1, 4], &[9, 7, 9]),
    (3, &[2, 2, 2, 2, 2], &[3, 3, 3]),
    (0, &[11], &[1, 2, 3]),
];

/// The logits after the prompt of each sequence, and after each later token. The last ones use
/// packed weights.
fn logits(
    decoder: &Decoder,
    sequences: &[(usize, &[u32], &[u32])],
    dtype: DType,
) -> Result<Vec<Tensor>> {
    let mut cache = PagedCache::new(decoder.config(), dtype, device())?.with_recorded_steps();
    let ids: Vec<_> = sequences
        .iter()
        .map(|(adapter, ..)| cache.add_with_adapter(*adapter))
        .collect();
    let prompts = ids.iter().zip(sequences);
    let prompts: Vec<_> = prompts.map(|(id, (_, prompt, _))| (*id, *prompt)).collect();
    let mut all = vec![decoder.next_logits(&prompts, &mut cache)?];
    let ids: Vec<_> = ids
        .iter()
        .map(|id| cache.fork(*id))
        .collect::<Result<_>>()?;
    for at in 0..3 {
        if at == 2 {
            cache.pack_weights();
        }
        let next = ids.iter().zip(sequences);
        let next: Vec<_> = next
            .map(|(id, (_, _, next))| (*id, &next[at..=at]))
            .collect();
        all.push(decoder.next_logits(&next, &mut cache)?);
    }
    Ok(all)
}

/// On the CPU the results have the same bits.
#[apply(each_family)]
fn a_joined_decoder_computes_the_logits_of_each_decoder(
    family: Family,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    if matches!(family, Family::Qwen3Moe) {
        return Ok(());
    }
    let model = family.config(true);
    let decoders = decoders(&model, &lively(&model)?, dtype)?;
    let joined = Decoder::joined(&decoders.iter().collect::<Vec<_>>())?;
    assert_eq!(joined.num_adapters(), 4);
    let found = logits(&joined, &SEQUENCES, dtype)?;
    let mut all = Vec::new();
    for (row, &(decoder, prompt, next)) in SEQUENCES.iter().enumerate() {
        let alone = logits(&decoders[decoder], &[(0, prompt, next)], dtype)?;
        for (found, alone) in found.iter().zip(&alone) {
            let difference = max_difference(&found.narrow(0, row, 1)?, alone)?;
            let bound = match (device().is_cpu(), dtype) {
                (true, _) => 0.,
                (false, DType::F32) => 1e-4,
                (false, _) => 0.1,
            };
            assert!(difference <= bound, "{row}: {difference}");
        }
        all.push(alone);
    }
    // The adapters matter.
    assert!(max_difference(&all[0][0], &all[1][0])? > 1e-3);
    assert!(max_difference(&all[0][0], &all[3][0])? > 1e-3);
    Ok(())
}

#[test]
fn only_decoders_with_the_same_base_can_be_joined() -> Result<()> {
    let model = config(false);
    let (base, other) = (lively(&model)?, lively(&model)?);
    let decoder = |base: &Parameters| Decoder::new(&model, base.detached_var_builder());
    let (first, second) = (decoder(&base)?, decoder(&other)?);
    let error = message(Decoder::joined(&[&first, &first, &second]));
    let words =
        "decoders[2]: model.embed_tokens.weight: another tensor, must be that of the first decoder";
    assert!(error.contains(words), "{error}");

    let shorter = DecoderConfig {
        max_position_embeddings: 8,
        ..model.clone()
    };
    let shorter = Decoder::new(&shorter, base.detached_var_builder())?;
    let error = message(Decoder::joined(&[&first, &shorter]));
    let words = "decoders[1]: another configuration, must be that of the first decoder";
    assert!(error.contains(words), "{error}");

    let error = message(Decoder::joined(&[]));
    assert!(
        error.contains("decoders: none, must be at least one"),
        "{error}"
    );

    let experts = Family::Qwen3Moe.config(false);
    let experts = Decoder::new(&experts, lively(&experts)?.detached_var_builder())?;
    assert_eq!(Decoder::joined(&[&experts])?.num_adapters(), 1);
    let error = message(Decoder::joined(&[&experts, &experts]));
    assert!(
        error.contains("decoders[1]: has experts, must have none"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_sequence_needs_adapters_that_the_decoder_has() -> Result<()> {
    let model = config(true);
    let decoder = Decoder::new(&model, lively(&model)?.detached_var_builder())?;
    let joined = Decoder::joined(&[&decoder, &decoder])?;
    let mut cache = PagedCache::new(&model, DType::F32, device())?;
    let (first, third) = (cache.add(), cache.add_with_adapter(2));
    let error = message(joined.next_logits(&[(first, &[1]), (third, &[1])], &mut cache));
    assert!(
        error.contains("new[1]: adapter 2, must be below 2"),
        "{error}"
    );
    // The cache is unchanged.
    assert_eq!(cache.len(first)?, 0);

    let error = message(joined.decoding()?.add_with_adapter(2));
    assert!(error.contains("adapter: 2, must be below 2"), "{error}");
    Ok(())
}

/// The sequences of each decoder in [`adapted`], which share prefixes, for two passes.
fn parts() -> [[Vec<Vec<u32>>; 3]; 2] {
    [
        [
            vec![vec![1, 2, 3, 4], vec![1, 2, 5], vec![9; 6]],
            vec![vec![1, 2, 3, 4]],
            vec![vec![3, 1], vec![7, 7, 7, 7, 7]],
        ],
        [
            vec![vec![4, 4]],
            vec![vec![5, 6, 7, 8, 9], vec![5, 6, 7]],
            vec![vec![1, 2, 3, 4]],
        ],
    ]
}

/// Compares the hidden states and gradients of joined passes with those of separate ones.
fn assert_joined_passes_equal_separate_ones(
    model: &DecoderConfig,
    passes: &[[Vec<Vec<u32>>; 3]],
    dtype: DType,
) -> Result<()> {
    let frozen = lively(model)?.to_dtype(dtype)?;
    let adapted = adapted(model, &frozen, dtype)?;
    let decoders: Vec<&Decoder> = adapted.iter().map(|(_, decoder)| decoder).collect();
    let joined = Decoder::joined(&decoders)?;
    let mut alone = [(); 3].map(|()| Gradients::new());
    let mut together = [(); 3].map(|()| Gradients::new());
    for (number, parts) in passes.iter().enumerate() {
        let mut packs = Vec::new();
        let (mut states, mut of_states) = (Vec::new(), Vec::new());
        for (at, sequences) in parts.iter().enumerate() {
            let (lora, decoder) = &adapted[at];
            let tokens = PackedTokens::sharing_prefixes(sequences, device())?;
            let (hidden, recorded) = decoder.record(&tokens)?;
            let seed = (3 * number + at) as u64;
            let gradient = noise_tensor(hidden.shape(), seed, dtype, device())?;
            recorded.backward(&gradient, lora.parameters(), &mut alone[at])?;
            packs.push(tokens);
            states.push(hidden);
            of_states.push(gradient);
        }
        let tokens = PackedTokens::joined(&packs.iter().collect::<Vec<_>>())?;
        let (hidden, recorded) = joined.record(&tokens)?;
        let expected = Tensor::cat(&states, 0)?;
        assert_close(&hidden, &expected, dtype, "hidden states")?;
        assert_close(
            &joined.hidden_states(&tokens)?,
            &expected,
            dtype,
            "hidden states",
        )?;
        let sums = adapted.iter().zip(&mut together);
        let sums = sums.map(|((lora, _), sums)| (lora, sums)).collect();
        recorded.backward_joined(&Tensor::cat(&of_states, 0)?, sums)?;
    }
    for (at, (lora, _)) in adapted.iter().enumerate() {
        together[at].ensure_complete(lora.parameters())?;
        for (name, gradient) in together[at].iter() {
            let expected = alone[at].get(name).expect("the same names");
            assert_close(gradient, expected, dtype, name)?;
            assert!(
                max_difference(expected, &expected.zeros_like()?)? > 0.,
                "{name}"
            );
        }
    }
    Ok(())
}

/// The bits are equal on the CPU.
fn assert_close(found: &Tensor, expected: &Tensor, dtype: DType, name: &str) -> Result<()> {
    let largest = max_difference(expected, &expected.zeros_like()?)?;
    let bound = match (device().is_cpu(), dtype) {
        (true, _) => 0.,
        (false, DType::F32) => 1e-4 * largest,
        (false, _) => 0.1 * largest,
    };
    let difference = max_difference(found, expected)?;
    assert!(difference <= bound, "{name}: {difference} {largest}");
    Ok(())
}

#[apply(each_family)]
fn joined_passes_have_the_gradients_of_separate_ones(
    family: Family,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    if matches!(family, Family::Qwen3Moe) {
        return Ok(());
    }
    assert_joined_passes_equal_separate_ones(&family.config(true), &parts(), dtype)
}

/// Products with more than one block of their inner dimension, of few and of many rows.
#[test]
fn joined_passes_have_the_bits_of_separate_ones_in_wide_maps() -> Result<()> {
    let model = DecoderConfig {
        hidden_size: 96,
        intermediate_size: 1100,
        max_position_embeddings: 128,
        ..config(false)
    };
    let long = |length: u32, first: u32| (0..length).map(|at| (at * 5 + first) % 13).collect();
    let passes = [
        [
            vec![long(2, 1)],
            vec![long(90, 2), long(40, 7)],
            vec![long(17, 3)],
        ],
        [
            vec![long(70, 1)],
            vec![long(3, 2)],
            vec![long(65, 3), long(64, 4)],
        ],
    ];
    assert_joined_passes_equal_separate_ones(&model, &passes, DType::F32)
}

#[test]
fn a_joined_pass_needs_a_part_and_gradients_for_each_decoder() -> Result<()> {
    let model = config(true);
    let frozen = lively(&model)?;
    let adapted = adapted(&model, &frozen, DType::F32)?;
    let joined = Decoder::joined(&[&adapted[0].1, &adapted[1].1])?;
    let tokens = PackedTokens::new(&[vec![1, 2]], device())?;
    for error in [
        message(joined.hidden_states(&tokens)),
        message(joined.record(&tokens).map(|_| ())),
    ] {
        let words = "tokens: 1 parts, must be 2, one for each joined decoder";
        assert!(error.contains(words), "{error}");
    }
    let ids = Tensor::new(&[[1u32]], device())?;
    let error = message(joined.padded_hidden_states(&ids, &ids.ones_like()?));
    let words = "decoder: 2 joined ones, must be one to read padded tokens";
    assert!(error.contains(words), "{error}");

    let tokens = PackedTokens::joined(&[&tokens, &tokens])?;
    let error = message(adapted[0].1.hidden_states(&tokens));
    let words = "tokens: 2 parts, must be 1, one for each joined decoder";
    assert!(error.contains(words), "{error}");

    // Gradients are cleared after an error.
    let mut sums = Gradients::new();
    sums.add("a", &Tensor::ones(1, DType::F32, device())?)?;
    let (hidden, recorded) = joined.record(&tokens)?;
    let error = message(recorded.backward_joined(&hidden, vec![(&adapted[0].0, &mut sums)]));
    let words = "adapters: 1, must be 2, one for each joined decoder";
    assert!(error.contains(words), "{error}");
    assert!(sums.is_empty());
    let (hidden, recorded) = joined.record(&tokens)?;
    let error = message(recorded.backward(&hidden, adapted[0].0.parameters(), &mut sums));
    let words = "decoder: 2 joined ones, must be one: call backward_joined";
    assert!(error.contains(words), "{error}");

    let error = message(PackedTokens::joined(&[]));
    assert!(
        error.contains("parts: none, must be at least one"),
        "{error}"
    );
    let experts = PackedTokens::replaying(&[vec![1]], &[vec![0]], device())?;
    let error = message(PackedTokens::joined(&[&tokens, &experts]));
    assert!(
        error.contains("parts[1]: replays experts, must not"),
        "{error}"
    );
    Ok(())
}

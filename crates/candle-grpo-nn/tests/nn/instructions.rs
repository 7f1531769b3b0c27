//! Results in f32 have the same bits with AVX2 and with AVX-512.
//!
//! The instruction set is fixed within a process, so the test runs itself once for each set.

use std::collections::BTreeMap;
use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Command;

use candle_core::{DType, IndexOp, Result, Tensor};
use candle_grpo_kernels::CpuInstructions;
use candle_grpo_nn::{AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, PagedCache};
use candle_grpo_test_support::{device, token_ids};
use rstest::rstest;
use rstest_reuse::apply;

use crate::small::{Family, add_recorded, bits, each_family, lively};

/// The text before a digest on standard output.
const MARK: &str = "digest of";

/// Sizes with whole vectors and partial vectors in every operator, and more rows than a tile.
fn config(family: Family) -> DecoderConfig {
    let small = family.config(false);
    DecoderConfig {
        vocab_size: 203,
        hidden_size: 76,
        intermediate_size: 150,
        head_dim: Some(38),
        max_position_embeddings: 160,
        moe_intermediate_size: small.moe_intermediate_size * 5,
        linear_key_head_dim: small.linear_key_head_dim.map(|_| 19),
        linear_value_head_dim: small.linear_value_head_dim.map(|_| 37),
        ..small
    }
}

/// Three clipped AdamW steps over sequences with different lengths, then the logits for a prompt
/// and two tokens after it.
fn weights_and_logits(family: Family) -> Result<Vec<u64>> {
    let config = config(family);
    let parameters = lively(&config)?;
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    let (rows, length) = (3, 90);
    let ids = Tensor::new(token_ids(rows * length, config.vocab_size, 7), device())?
        .reshape((rows, length))?;
    let mask: Vec<u32> = (0..rows * length)
        .map(|at| u32::from(at % length >= at / length * 31))
        .collect();
    let mask = Tensor::new(mask, device())?.reshape((rows, length))?;
    let mut gradients = Gradients::new();
    for _ in 0..3 {
        gradients.clear();
        let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
        add_recorded(&decoder, &parameters, &ids, &mask, false, &mut gradients)?;
        gradients.clip_by_global_norm(1.0)?;
        optimizer.step(&parameters, &gradients)?;
    }
    let mut all: Vec<u64> = bits(&parameters)?
        .into_iter()
        .flat_map(|(_, bits)| bits)
        .collect();

    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let mut cache = PagedCache::new(&config, DType::F32, device())?;
    let sequence = cache.add();
    let tokens = token_ids(72, config.vocab_size, 11);
    for part in [&tokens[..70], &tokens[70..71], &tokens[71..]] {
        let logits = decoder.next_logits(&[(sequence, part)], &mut cache)?;
        let logits = logits.i(0)?.to_vec1::<f32>()?;
        all.extend(logits.into_iter().map(|x| f64::from(x).to_bits()));
        cache.pack_weights();
    }
    Ok(all)
}

/// Prints a family's digest with this process's instruction set.
#[apply(each_family)]
fn digest(family: Family) -> Result<()> {
    if !device().is_cpu() {
        return Ok(());
    }
    let all = weights_and_logits(family)?;
    assert!(all.iter().all(|&bits| f64::from_bits(bits).is_finite()));
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    println!("\n{MARK} {family:?}: {:016x}", hasher.finish());
    Ok(())
}

#[test]
fn weights_and_logits_have_the_same_bits_with_avx2_and_later_instructions() -> Result<()> {
    let mut digests = BTreeMap::new();
    for set in CpuInstructions::available() {
        if set < CpuInstructions::Avx2 {
            continue;
        }
        let output = Command::new(env::current_exe()?)
            .args(["instructions::digest", "--nocapture"])
            .env("CANDLE_GRPO_CPU", set.name())
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{set}: {text}");
        let mut lines: Vec<_> = text.lines().filter(|line| line.starts_with(MARK)).collect();
        lines.sort_unstable();
        assert!(lines.len() == 13 || !device().is_cpu(), "{set}: {text}");
        digests.insert(set.name(), lines.join("\n"));
    }
    let mut others = digests.iter();
    if let Some((first, expected)) = others.next() {
        for (set, digests) in others {
            assert_eq!(digests, expected, "{set} beside {first}");
        }
    }
    Ok(())
}

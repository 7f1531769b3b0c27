//! A step's time by parts.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_grpo_kernels::{
    KeyValuePages, PAGE, PackedWeight, PageSpan, PagedBatch, PagedRow, linear_rows,
    packed_linear_rows, paged_attention,
};
use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache, Parameters, SequenceId};
use serde::Serialize;

use crate::limits::{best_seconds, matmul_gflop_s, read_gb_s};

/// Number of tokens in a prompt, and in a completion at the measured step.
const PROMPT: usize = 128;
const COMPLETION: usize = 32;

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Read bandwidth of all cores.
    read_gb_s: f64,
    /// Speed for a large matrix product.
    matmul_gflop_s: f64,
    /// Weight bytes that a step reads.
    weight_mb: f64,
    steps: Vec<Step>,
}

/// Milliseconds per step by the number of completions, in groups of 8.
#[derive(Debug, Serialize)]
struct Step {
    completions: usize,
    /// The whole step, from tokens to logits.
    step_ms: f64,
    /// The same with packed weights.
    packed_step_ms: f64,
    /// Reading the weights once, at the measured bandwidth.
    read_limit_ms: f64,
    /// The matrix products, at the measured speed.
    matmul_limit_ms: f64,
    /// The linear layers alone.
    linear_ms: f64,
    /// The same with packed weights.
    packed_linear_ms: f64,
    /// Copying the weights.
    packing_ms: f64,
    /// Attention alone.
    attention_ms: f64,
}

pub(crate) fn measure(
    model: &DecoderConfig,
    parameters: &Parameters,
    decoder: &Decoder,
    dtype: DType,
) -> Result<Report> {
    let (read_gb_s, matmul_gflop_s) = (read_gb_s()?, matmul_gflop_s(dtype)?);
    let weights: usize = parameters
        .iter()
        .filter(|(_, weight)| weight.rank() == 2)
        .map(|(_, weight)| weight.elem_count())
        .sum();
    let bytes = (weights * dtype.size_in_bytes()) as f64;
    let steps = [1, 16, 64]
        .into_iter()
        .map(|completions| {
            let [linear, packed_linear, packing] = linear(model, parameters, dtype, completions)?;
            Ok(Step {
                completions,
                step_ms: 1e3 * step(model, decoder, dtype, completions, false)?,
                packed_step_ms: 1e3 * step(model, decoder, dtype, completions, true)?,
                read_limit_ms: bytes / read_gb_s / 1e6,
                matmul_limit_ms: 2. * (weights * completions) as f64 / matmul_gflop_s / 1e6,
                linear_ms: 1e3 * linear,
                packed_linear_ms: 1e3 * packed_linear,
                packing_ms: 1e3 * packing,
                attention_ms: 1e3 * attention(model, dtype, completions)?,
            })
        })
        .collect::<Result<_>>()?;
    Ok(Report {
        read_gb_s,
        matmul_gflop_s,
        weight_mb: bytes / 1e6,
        steps,
    })
}

fn step(
    model: &DecoderConfig,
    decoder: &Decoder,
    dtype: DType,
    completions: usize,
    packs_weights: bool,
) -> Result<f64> {
    let mut cache = PagedCache::new(model, dtype, &Device::Cpu)?;
    let mut live: Vec<SequenceId> = Vec::new();
    for group in 0..completions.div_ceil(8) {
        let prompt = cache.add();
        let tokens: Vec<u32> = (0..PROMPT).map(|i| (group * PROMPT + i) as u32).collect();
        decoder.next_logits(&[(prompt, &tokens)], &mut cache)?;
        for _ in 0..8.min(completions - live.len()) {
            live.push(cache.fork(prompt)?);
        }
    }
    if packs_weights {
        cache.pack_weights();
    }
    let new: Vec<(SequenceId, &[u32])> = live.iter().map(|&id| (id, &[17][..])).collect();
    for _ in 1..COMPLETION {
        decoder.next_logits(&new, &mut cache)?;
    }
    best_seconds(9, || {
        decoder.next_logits(&new, &mut cache)?;
        Ok(())
    })
}

/// Returns the seconds for the linear layers, for the same with packed weights, and for the copy.
fn linear(
    model: &DecoderConfig,
    parameters: &Parameters,
    dtype: DType,
    completions: usize,
) -> Result<[f64; 3]> {
    let weight = |name: &str| -> Result<Tensor> {
        let weight = parameters.get(name);
        Ok(weight
            .ok_or_else(|| anyhow::anyhow!("no {name}"))?
            .as_detached_tensor()
            .to_dtype(dtype)?)
    };
    let layers = (0..model.num_hidden_layers)
        .map(|layer| {
            let projection =
                |name: &str| weight(&format!("model.layers.{layer}.{name}_proj.weight"));
            Ok([
                vec![
                    projection("self_attn.q")?,
                    projection("self_attn.k")?,
                    projection("self_attn.v")?,
                ],
                vec![projection("self_attn.o")?],
                vec![projection("mlp.gate")?, projection("mlp.up")?],
                vec![projection("mlp.down")?],
            ])
        })
        .collect::<Result<Vec<_>>>()?;
    let head = vec![weight("model.embed_tokens.weight")?];
    let input = |width| Tensor::ones((completions, width), dtype, &Device::Cpu);
    let (narrow, wide) = (input(model.hidden_size)?, input(model.intermediate_size)?);
    let all: Vec<&Vec<Tensor>> = layers.iter().flatten().chain([&head]).collect();
    let x = |weight: &Tensor| {
        if weight.dims()[1] == model.hidden_size {
            &narrow
        } else {
            &wide
        }
    };
    let plain = best_seconds(9, || {
        for weights in &all {
            linear_rows(x(&weights[0]), &weights.iter().collect::<Vec<_>>())?;
        }
        Ok(())
    })?;
    let pack = || {
        let packed = all
            .iter()
            .map(|weights| weights.iter().map(PackedWeight::new).collect());
        packed.collect::<candle_core::Result<Vec<Vec<_>>>>()
    };
    let packing = best_seconds(3, || {
        pack()?;
        Ok(())
    })?;
    let packed = pack()?;
    let packed = best_seconds(9, || {
        for (weights, packed) in all.iter().zip(&packed) {
            packed_linear_rows(x(&weights[0]), &packed.iter().collect::<Vec<_>>())?;
        }
        Ok(())
    })?;
    Ok([plain, packed, packing])
}

/// Times attention over all layers, each with its own keys and values.
fn attention(model: &DecoderConfig, dtype: DType, completions: usize) -> Result<f64> {
    let pages_of = |tokens: usize| tokens.div_ceil(PAGE);
    let (prompt_pages, completion_pages) = (pages_of(PROMPT), pages_of(COMPLETION));
    let groups = completions.div_ceil(8);
    let pages = groups * prompt_pages + completions * completion_pages;
    let (kv_heads, head_dim) = (model.num_key_value_heads, model.head_dim());
    let layers = (0..model.num_hidden_layers)
        .map(|_| {
            Ok(KeyValuePages::new(
                pages,
                kv_heads,
                head_dim,
                dtype,
                &Device::Cpu,
            )?)
        })
        .collect::<Result<Vec<_>>>()?;
    let spans: Vec<Vec<PageSpan>> = (0..completions)
        .map(|completion| {
            let prompt = completion / 8 * prompt_pages;
            let own = groups * prompt_pages + completion * completion_pages;
            (prompt..prompt + prompt_pages)
                .chain(own..own + completion_pages)
                .map(|page| PageSpan { page, len: PAGE })
                .collect()
        })
        .collect();
    let rows: Vec<PagedRow> = spans
        .iter()
        .map(|spans| PagedRow {
            spans,
            visible: PROMPT + COMPLETION,
        })
        .collect();
    let width = model.num_attention_heads * head_dim;
    let query = Tensor::ones((completions, width), dtype, &Device::Cpu)?;
    let batch = PagedBatch::new(&[], &rows, true, &Device::Cpu)?;
    best_seconds(9, || {
        for pages in &layers {
            paged_attention(&query, pages, &batch, 0.125)?;
        }
        Ok(())
    })
}

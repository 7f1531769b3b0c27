//! Biases in all projections, as in Llama with `attention_bias` and `mlp_bias`.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor};
use candle_grpo_nn::{Decoder, DecoderConfig, ModelType, Parameters};
use candle_grpo_test_support::{assert_close, device, numbers};

use crate::small::{Family, bits, lively, lively_tensors};

type Matrix = Vec<Vec<f64>>;

/// One block's weights in f64.
struct Weights(HashMap<String, Matrix>);

impl Weights {
    fn new(tensors: &HashMap<String, Tensor>) -> Result<Self> {
        let matrix = |tensor: &Tensor| {
            let tensor = tensor.to_dtype(DType::F64)?;
            match tensor.rank() {
                1 => Ok(vec![tensor.to_vec1()?]),
                _ => tensor.to_vec2(),
            }
        };
        let tensors = tensors.iter();
        let tensors = tensors.map(|(name, tensor)| Ok((name.clone(), matrix(tensor)?)));
        Ok(Self(tensors.collect::<Result<_>>()?))
    }

    fn vector(&self, name: &str) -> &[f64] {
        &self.0[name][0]
    }

    /// `W x + b` for the linear map with that name in the first block.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let name = format!("model.layers.0.{name}");
        let bias = self.vector(&format!("{name}.bias"));
        let rows = self.0[&format!("{name}.weight")].iter();
        rows.zip(bias)
            .map(|(row, bias)| dot(row, x) + bias)
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64], epsilon: f64) -> Vec<f64> {
        let root = (dot(x, x) / x.len() as f64 + epsilon).sqrt();
        x.iter()
            .zip(self.vector(name))
            .map(|(x, w)| x / root * w)
            .collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Hidden states for a decoder with one block and no rotation, from the formula.
fn reference(config: &DecoderConfig, weights: &Weights, ids: &[u32]) -> Matrix {
    let (heads, groups, dim) = (
        config.num_attention_heads,
        config.num_attention_heads / config.num_key_value_heads,
        config.head_dim(),
    );
    let x: Matrix = ids
        .iter()
        .map(|&id| weights.0["model.embed_tokens.weight"][id as usize].clone())
        .collect();
    let normed: Matrix = x
        .iter()
        .map(|x| {
            weights.norm(
                "model.layers.0.input_layernorm.weight",
                x,
                config.rms_norm_eps,
            )
        })
        .collect();
    let project =
        |name: &str| -> Matrix { normed.iter().map(|x| weights.linear(name, x)).collect() };
    let query = project("self_attn.q_proj");
    let key = project("self_attn.k_proj");
    let value = project("self_attn.v_proj");
    (0..ids.len())
        .map(|at| {
            let mut mixed = Vec::new();
            for head in 0..heads {
                let head_of =
                    |row: &Vec<f64>, head: usize| row[head * dim..(head + 1) * dim].to_vec();
                let shared = head / groups;
                let scores: Vec<f64> = (0..=at)
                    .map(|past| {
                        let score = dot(&head_of(&query[at], head), &head_of(&key[past], shared));
                        (score / (dim as f64).sqrt()).exp()
                    })
                    .collect();
                let total: f64 = scores.iter().sum();
                let mut sum = vec![0.0; dim];
                for (past, score) in scores.iter().enumerate() {
                    let part: Vec<f64> = head_of(&value[past], shared)
                        .iter()
                        .map(|v| v * score / total)
                        .collect();
                    sum = add(&sum, &part);
                }
                mixed.extend(sum);
            }
            let middle = add(&x[at], &weights.linear("self_attn.o_proj", &mixed));
            let name = "model.layers.0.post_attention_layernorm.weight";
            let normed = weights.norm(name, &middle, config.rms_norm_eps);
            let gate = weights.linear("mlp.gate_proj", &normed);
            let up = weights.linear("mlp.up_proj", &normed);
            let inner: Vec<f64> = gate
                .iter()
                .zip(up)
                .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
                .collect();
            let y = add(&middle, &weights.linear("mlp.down_proj", &inner));
            weights.norm("model.norm.weight", &y, config.rms_norm_eps)
        })
        .collect()
}

#[test]
fn every_bias_enters_the_hidden_states_as_in_the_formula() -> Result<()> {
    // A SmolLM3 need not rotate, so that the formula is short.
    let config = DecoderConfig {
        model_type: ModelType::SmolLm3,
        no_rope_layers: vec![0],
        num_hidden_layers: 1,
        ..Family::LlamaWithBiases.config(true)
    };
    let tensors = lively_tensors(&config)?;
    assert_eq!(
        tensors
            .keys()
            .filter(|name| name.ends_with(".bias"))
            .count(),
        7
    );
    let ids = [3u32, 1, 4, 1];
    let expected = reference(&config, &Weights::new(&tensors)?, &ids).concat();

    let parameters = Parameters::from_tensors(&config, tensors, device())?;
    let vb = parameters.detached_var_builder().to_dtype(DType::F64);
    let decoder = Decoder::new(&config, vb)?;
    let ids = Tensor::new(&ids, device())?.unsqueeze(0)?;
    let hidden = decoder.padded_hidden_states(&ids, &ids.ones_like()?)?;
    assert_close(&numbers(&hidden)?, &expected, 1e-9);
    Ok(())
}

#[test]
fn a_hugging_face_folder_keeps_the_biases() -> Result<()> {
    let config = Family::LlamaWithBiases.config(false);
    let parameters = lively(&config)?;
    let folder = tempfile::tempdir()?;
    parameters.save(&folder.path().join("model.safetensors"))?;
    let json = config.to_hugging_face(&[2])?;
    assert_eq!(
        (&json["attention_bias"], &json["mlp_bias"]),
        (&true.into(), &true.into())
    );

    let read = DecoderConfig::from_hugging_face(json.to_string().as_bytes())?;
    assert_eq!(read, config);
    let read = Parameters::load_folder(&read, folder.path(), device())?;
    assert_eq!(bits(&read)?, bits(&parameters)?);
    Ok(())
}

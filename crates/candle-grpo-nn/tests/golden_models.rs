//! The decoder, its gradients and the optimiser against Hugging Face transformers and torch.
//!
//! The values lie in `tests/golden/models` of the workspace, or where `GRPO_GOLDEN_MODELS_DIR` says; the README there
//! describes them. Tolerances are a few times the distance of an unmodified f32 transformers model from the same
//! values, which the manifest states.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_grpo_nn::{
    AdamW, AdamWConfig, DecayRule, Decoder, DecoderConfig, Gradients, KvCache, Parameters,
};
use serde_json::Value;

mod small;
use small::{
    decoder_config, max_difference, next_token_log_probs, next_token_loss, recorded_gradients,
};

/// How many times the stated f32 deviation is allowed.
const SLACK: f64 = 4.0;

/// A deviation that is stated as zero still stands for rounding: one unit in the last place of a number near 4.
const FLOOR: f64 = 5e-7;

struct Case {
    name: String,
    folder: PathBuf,
    config: DecoderConfig,
    deviation: Value,
}

impl Case {
    fn tensors(&self, file: &str) -> Result<HashMap<String, Tensor>> {
        candle_core::safetensors::load(self.folder.join(file), &Device::Cpu)
    }

    fn parameters(&self) -> Result<Parameters> {
        Parameters::load_folder(&self.config, &self.folder, &Device::Cpu)
    }

    /// Another folder beside this one, of the same shape.
    fn sibling(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            folder: self.folder.with_file_name(name),
            config: self.config.clone(),
            deviation: Value::Null,
        }
    }

    fn tolerance(&self, file: &str, quantity: &str) -> f64 {
        let stated = self.deviation[file][quantity].as_f64();
        stated
            .unwrap_or_else(|| panic!("{}: manifest.json lacks {file}.{quantity}", self.name))
            .max(FLOOR)
            * SLACK
    }

    fn near(&self, file: &str, quantity: &str, ours: &Tensor, golden: &Tensor) -> Result<()> {
        let (distance, tolerance) = (
            max_difference(ours, golden)?,
            self.tolerance(file, quantity),
        );
        println!(
            "{} {file} {quantity}: {distance:.2e}, allowed {tolerance:.2e}",
            self.name
        );
        assert!(
            distance <= tolerance,
            "{} {file} {quantity}: {distance} is more than {tolerance}",
            self.name
        );
        Ok(())
    }
}

/// All cases that have `file`.
fn cases(file: &str) -> Vec<Case> {
    let root = std::env::var_os("GRPO_GOLDEN_MODELS_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models"),
        PathBuf::from,
    );
    let read = |path: &Path| {
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let manifest: Value = serde_json::from_str(&read(&root.join("manifest.json"))).unwrap();
    let mut folders: Vec<_> = fs::read_dir(&root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    let mut cases = Vec::new();
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        if !folder.join(file).exists() {
            continue;
        }
        let config = decoder_config(&read(&folder.join("config.json")));
        let deviation = manifest["float32_deviation"][&name].clone();
        cases.push(Case {
            name,
            folder,
            config,
            deviation,
        });
    }
    assert!(
        !cases.is_empty(),
        "no case with {file} in {}",
        root.display()
    );
    cases
}

fn batch(tensors: &HashMap<String, Tensor>, ids: &str) -> Result<(Tensor, Tensor)> {
    Ok((
        tensors[ids].to_dtype(DType::U32)?,
        tensors["in.attention_mask"].clone(),
    ))
}

#[test]
fn golden_models_logits_log_probs_and_loss_are_those_of_transformers() -> Result<()> {
    for file in ["golden", "golden_left"] {
        for case in cases(&format!("{file}.safetensors")) {
            let golden = case.tensors(&format!("{file}.safetensors"))?;
            let decoder = Decoder::new(&case.config, case.parameters()?.detached_var_builder())?;
            let (ids, mask) = batch(&golden, "in.input_ids")?;
            let logits = decoder.logits(&decoder.hidden_states(&ids, &mask, None)?)?;
            // Numbers at padding are stored as zero and mean nothing.
            let logits = logits.broadcast_mul(&mask.to_dtype(DType::F32)?.unsqueeze(2)?)?;
            case.near(file, "logits", &logits, &golden["out.logits"])?;
            let (log_probs, _) = next_token_log_probs(&decoder, &ids, &mask)?;
            case.near(file, "log_probs", &log_probs, &golden["out.log_probs"])?;
            case.near(
                file,
                "loss",
                &next_token_loss(&decoder, &ids, &mask)?,
                &golden["out.loss"],
            )?;
        }
    }
    Ok(())
}

#[test]
fn golden_models_gradients_are_those_of_transformers_with_padding_on_either_side() -> Result<()> {
    for case in cases("golden.safetensors") {
        // Only the file padded on the right has gradients; on the left they must be the same.
        let golden = case.tensors("golden.safetensors")?;
        for file in ["golden", "golden_left"] {
            let (ids, mask) = batch(
                &case.tensors(&format!("{file}.safetensors"))?,
                "in.input_ids",
            )?;
            let parameters = case.parameters()?;
            let decoder = Decoder::new(&case.config, parameters.var_builder())?;
            let mut by_graph = Gradients::new();
            by_graph.accumulate(&next_token_loss(&decoder, &ids, &mask)?, &parameters)?;
            let decoder = Decoder::new(&case.config, parameters.detached_var_builder())?;
            let recorded = |checkpointing| {
                recorded_gradients(&decoder, &parameters, &ids, &mask, checkpointing)
            };
            // The fallback of every operator, as f64 has no fused path.
            let vb = parameters.detached_var_builder().to_dtype(DType::F64);
            let wide = Decoder::new(&case.config, vb)?;
            let composed = recorded_gradients(&wide, &parameters, &ids, &mask, false)?;
            for (way, gradients) in [
                ("composed", composed),
                ("graph", by_graph),
                ("recorded", recorded(false)?),
                ("checkpointed", recorded(true)?),
            ] {
                check_gradients(&case, file, way, &gradients, &golden)?;
            }
        }
    }
    Ok(())
}

fn check_gradients(
    case: &Case,
    file: &str,
    way: &str,
    gradients: &Gradients,
    golden: &HashMap<String, Tensor>,
) -> Result<()> {
    let tolerance = case.tolerance(file, "grads_relative");
    let mut worst = 0f64;
    for (name, gradient) in gradients.iter() {
        let reference = &golden[&format!("grad.{name}")];
        let scale = max_difference(reference, &reference.zeros_like()?)?;
        let distance = max_difference(gradient, reference)? / scale;
        assert!(
            distance <= tolerance,
            "{} {file} {way} grad.{name}: {distance} is more than {tolerance}",
            case.name
        );
        worst = worst.max(distance);
    }
    println!(
        "{} {file} {way} gradients: {worst:.2e}, allowed {tolerance:.2e}",
        case.name
    );
    assert_eq!(
        gradients.iter().count(),
        golden.keys().filter(|key| key.starts_with("grad.")).count()
    );
    Ok(())
}

/// Greedy decoding of 16 tokens, the whole sequence anew for each: ids and log-probabilities.
fn generate_without_cache(
    decoder: &Decoder,
    ids: &Tensor,
    mask: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (mut ids, mut mask) = (ids.clone(), mask.to_dtype(DType::U32)?);
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        let hidden = decoder.hidden_states(&ids, &mask, None)?;
        let (token, log_prob) = greedy(decoder, &hidden)?;
        ids = Tensor::cat(&[&ids, &token], 1)?;
        mask = Tensor::cat(&[&mask, &token.ones_like()?], 1)?;
        tokens.push(token);
        log_probs.push(log_prob);
    }
    Ok((Tensor::cat(&tokens, 1)?, Tensor::cat(&log_probs, 1)?))
}

/// The same with a cache, which sees one token at a time.
fn generate_with_cache(decoder: &Decoder, ids: &Tensor, mask: &Tensor) -> Result<(Tensor, Tensor)> {
    let mut cache = KvCache::new(decoder.config().num_hidden_layers);
    let (mut ids, mut mask) = (ids.clone(), mask.to_dtype(DType::U32)?);
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        let hidden = decoder.hidden_states(&ids, &mask, Some(&mut cache))?;
        let (token, log_prob) = greedy(decoder, &hidden)?;
        mask = Tensor::cat(&[&mask, &token.ones_like()?], 1)?;
        ids = token.clone();
        tokens.push(token);
        log_probs.push(log_prob);
    }
    Ok((Tensor::cat(&tokens, 1)?, Tensor::cat(&log_probs, 1)?))
}

/// The best token at the last position and its log-probability, [B, 1] each.
fn greedy(decoder: &Decoder, hidden: &Tensor) -> Result<(Tensor, Tensor)> {
    let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?;
    let log_probs = candle_nn::ops::log_softmax(&decoder.logits(&last)?, D::Minus1)?;
    let token = log_probs.argmax_keepdim(1)?;
    Ok((token.clone(), log_probs.gather(&token, 1)?))
}

#[test]
fn golden_models_greedy_tokens_are_those_of_transformers_with_and_without_cache() -> Result<()> {
    for case in cases("generate.safetensors") {
        let golden = case.tensors("generate.safetensors")?;
        let decoder = Decoder::new(&case.config, case.parameters()?.detached_var_builder())?;
        let (ids, mask) = batch(&golden, "in.prompt_ids")?;
        for generate in [generate_without_cache, generate_with_cache] {
            let (tokens, log_probs) = generate(&decoder, &ids, &mask)?;
            assert_eq!(
                tokens.to_dtype(DType::I64)?.to_vec2::<i64>()?,
                golden["out.generated_ids"].to_vec2::<i64>()?,
                "{}",
                case.name
            );
            case.near(
                "generate",
                "log_probs",
                &log_probs,
                &golden["out.log_probs"],
            )?;
        }
    }
    Ok(())
}

#[test]
fn golden_models_rows_that_end_leave_the_cache_and_the_others_go_on() -> Result<()> {
    for case in cases("generate.safetensors") {
        let golden = case.tensors("generate.safetensors")?;
        let scalar = |key: &str| golden[key].to_scalar::<i64>();
        let (end, pad) = (
            scalar("in.eos_token_id")? as u32,
            scalar("in.pad_token_id")?,
        );
        let decoder = Decoder::new(&case.config, case.parameters()?.detached_var_builder())?;
        let (mut ids, mask) = batch(&golden, "in.prompt_ids")?;
        let mut mask = mask.to_dtype(DType::U32)?;
        let mut cache = KvCache::new(case.config.num_hidden_layers);
        let mut alive: Vec<usize> = (0..ids.dim(0)?).collect();
        let mut generated = vec![Vec::new(); alive.len()];
        for _ in 0..16 {
            let (token, _) = greedy(
                &decoder,
                &decoder.hidden_states(&ids, &mask, Some(&mut cache))?,
            )?;
            let tokens = token.flatten_all()?.to_vec1::<u32>()?;
            let mut kept = Vec::new();
            for (at, (&row, &id)) in alive.iter().zip(&tokens).enumerate() {
                generated[row].push(i64::from(id));
                if id != end {
                    kept.push(at as u32);
                }
            }
            alive = kept.iter().map(|&at| alive[at as usize]).collect();
            let kept = Tensor::new(kept, &Device::Cpu)?;
            cache.select_rows(&kept)?;
            ids = token.index_select(&kept, 0)?;
            mask = Tensor::cat(&[&mask.index_select(&kept, 0)?, &ids.ones_like()?], 1)?;
        }
        assert_eq!(alive.len(), 2, "{}: one row of three ends", case.name);
        let lengths: Vec<_> = generated.iter().map(|row| row.len() as i64).collect();
        generated.iter_mut().for_each(|row| row.resize(16, pad));
        assert_eq!(
            generated,
            golden["out.generated_ids_eos"].to_vec2::<i64>()?,
            "{}",
            case.name
        );
        assert_eq!(
            lengths,
            golden["out.lengths_eos"].to_vec1::<i64>()?,
            "{}",
            case.name
        );
    }
    Ok(())
}

#[test]
fn golden_models_five_clipped_steps_are_those_of_torch() -> Result<()> {
    for case in cases("adamw.safetensors") {
        let golden = case.tensors("adamw.safetensors")?;
        let (ids, mask) = batch(&golden, "in.input_ids")?;
        let parameters = case.parameters()?;
        let decoder = Decoder::new(&case.config, parameters.var_builder())?;
        let config = AdamWConfig {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decay: DecayRule::All,
        };
        let mut optimiser = AdamW::new(config, &parameters)?;
        let mut gradients = Gradients::new();
        for step in 0..5 {
            let loss = next_token_loss(&decoder, &ids, &mask)?;
            case.near("adamw", "losses", &loss, &golden["out.losses"].i(step)?)?;
            gradients.clear();
            gradients.accumulate(&loss, &parameters)?;
            drop(loss);
            let norm = Tensor::new(gradients.clip_by_global_norm(1.0)?, &Device::Cpu)?;
            case.near(
                "adamw",
                "grad_norms",
                &norm,
                &golden["out.grad_norms"].i(step)?,
            )?;
            optimiser.step(&parameters, &gradients)?;
        }
        case.near(
            "adamw",
            "loss_after",
            &next_token_loss(&decoder, &ids, &mask)?,
            &golden["out.loss_after"],
        )?;

        let mut differences = Vec::new();
        for (name, variable) in parameters.iter() {
            let difference = (variable.as_tensor() - &golden[&format!("param.{name}")])?.abs()?;
            differences.extend(
                difference
                    .flatten_all()?
                    .to_vec1::<f32>()?
                    .into_iter()
                    .map(f64::from),
            );
        }
        let largest = differences.iter().copied().fold(0.0, f64::max);
        let mean = differences.iter().sum::<f64>() / differences.len() as f64;
        let above = differences
            .iter()
            .filter(|&&difference| difference > 1e-5)
            .count() as f64;
        println!(
            "{} parameters: largest {largest:.2e}, mean {mean:.2e}, above 1e-5 {above}",
            case.name
        );
        for (quantity, value) in [
            ("params_max", largest),
            ("params_mean", mean),
            ("params_above_1e-5", above),
        ] {
            let tolerance = case.tolerance("adamw", quantity);
            assert!(
                value <= tolerance,
                "{} {quantity}: {value} is more than {tolerance}",
                case.name
            );
        }
    }
    Ok(())
}

/// Log-probabilities [B, C] of the completion after dividing the logits by the temperature, and zero at padding.
fn completion_log_probs(
    decoder: &Decoder,
    golden: &HashMap<String, Tensor>,
    temperature: f64,
) -> Result<Tensor> {
    let side_by_side = |prompt: &str, completion: &str| {
        Tensor::cat(&[&golden[prompt], &golden[completion]], 1)?.to_dtype(DType::U32)
    };
    let ids = side_by_side("in.prompt_ids", "in.completion_ids")?;
    let mask = side_by_side("in.prompt_mask", "in.completion_attention_mask")?;
    let completion = golden["in.completion_ids"].to_dtype(DType::U32)?;
    let (prompt_length, length) = (golden["in.prompt_ids"].dim(1)?, completion.dim(1)?);
    let hidden = decoder.hidden_states(&ids, &mask, None)?;
    let hidden = hidden.narrow(1, prompt_length - 1, length)?;
    let logits = (decoder.logits(&hidden)? / temperature)?;
    let log_probs = candle_nn::ops::log_softmax(&logits, D::Minus1)?
        .gather(&completion.unsqueeze(2)?, 2)?
        .squeeze(2)?;
    let real = golden["in.completion_attention_mask"].to_dtype(DType::F32)?;
    log_probs * real
}

#[test]
fn golden_models_a_grpo_loss_and_its_gradients_are_those_of_transformers() -> Result<()> {
    for case in cases("grpo.safetensors") {
        let golden = case.tensors("grpo.safetensors")?;
        let scalar =
            |key: &str| Ok::<_, candle_core::Error>(golden[key].to_scalar::<f32>()? as f64);
        let (temperature, clip, beta) = (
            scalar("in.temperature")?,
            scalar("in.clip_eps")?,
            scalar("in.beta")?,
        );
        let bytes = fs::read(case.folder.join("grpo.safetensors"))?;
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let reference = &metadata.metadata().as_ref().unwrap()["reference"];
        let reference = case.sibling(reference).parameters()?;
        let reference = Decoder::new(&case.config, reference.detached_var_builder())?;
        let of_reference = completion_log_probs(&reference, &golden, temperature)?;
        case.near(
            "grpo",
            "log_probs",
            &of_reference,
            &golden["out.ref_log_probs"],
        )?;

        let parameters = case.parameters()?;
        let decoder = Decoder::new(&case.config, parameters.var_builder())?;
        let log_probs = completion_log_probs(&decoder, &golden, temperature)?;
        case.near("grpo", "log_probs", &log_probs, &golden["out.log_probs"])?;

        let mask = golden["in.completion_mask"].to_dtype(DType::F32)?;
        let ratio = (&log_probs - &golden["in.old_log_probs"])?.exp()?;
        let advantages = golden["in.advantages"].unsqueeze(1)?;
        let clipped = ratio
            .clamp(1.0 - clip, 1.0 + clip)?
            .broadcast_mul(&advantages)?;
        let policy = ratio.broadcast_mul(&advantages)?.minimum(&clipped)?.neg()?;
        let apart = (&of_reference - &log_probs)?;
        let kl = ((apart.exp()? - &apart)? - 1.0)?;
        let per_token = ((policy + (kl * beta)?)? * &mask)?;
        let counted = mask.sum(1)?.clamp(1f32, f32::MAX)?;
        let loss = (per_token.sum(1)? / counted)?.mean_all()?;
        case.near("grpo", "loss", &loss, &golden["out.loss"])?;

        let mut gradients = Gradients::new();
        gradients.accumulate(&loss, &parameters)?;
        check_gradients(&case, "grpo", "composed", &gradients, &golden)?;
    }
    Ok(())
}

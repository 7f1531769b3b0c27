//! The decoder, its gradients and the optimizer against Hugging Face transformers and torch.
//!
//! The values are in `tests/golden/models` and `tests/golden/families` of the workspace, or in the
//! folders that `GRPO_GOLDEN_MODELS_DIR` and `GRPO_GOLDEN_FAMILIES_DIR` name; the READMEs there
//! describe them. They were computed in f64 and are stored in f32. Results in f64 must agree to the
//! rounding of the stored numbers. Tolerances of results in f32 are a few times the distance of an
//! unmodified f32 transformers model from the same values, which the manifest states. Every model
//! of a folder is tested, also after another has failed.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::{D, DType, IndexOp, Result, Tensor};
use candle_grpo_nn::optim::DecayRule;
use candle_grpo_nn::{
    AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, PackedTokens, PagedCache, Parameters,
    SequenceClassifier, SequenceClassifierConfig, SequenceId,
};
use candle_grpo_test_support::device;
use rstest::rstest;
use serde_json::Value;

use crate::small::{max_difference, next_token_log_probs, next_token_loss, recorded_gradients};

/// The allowed multiple of the stated f32 deviation.
const SLACK: f64 = 4.0;

/// The rounding that remains where the stated deviation is zero: one unit in the last place of a
/// number near 4.
const FLOOR: f64 = 5e-7;

/// The largest rounding of a number to f32, relative to it.
const ROUNDING: f64 = f32::EPSILON as f64 / 2.0;

/// The allowed distance of a result in f64 from a golden value: its rounding to f32, and those of
/// the computations in f64. AdamW enlarges these most: it may divide an element of a gradient,
/// which is rounded by 1e-16, by no more than epsilon, 1e-8, and multiplies the quotient by the
/// learning rate, 1e-2. So a parameter may be off by 1e-10 in each of five steps.
const STORED: Allowed = Allowed {
    relative: ROUNDING,
    absolute: 1e-9,
};

/// The allowed distance between [`STEPS`] of AdamW in f32 and in f64, given the same gradients.
///
/// A step rounds a parameter three times: the factor of the decay, their product, and the sum with
/// the update. With the decay rates of [`adamw_config`], an update is at most 1.003 learning rates
/// (1e-2), by the inequality of Cauchy and Schwarz. At most 34 roundings reach it: 17 in the
/// average of the gradients, half of 18 in that of their squares, and 8 of the root, the quotient
/// and the coefficients. The parameter itself moves by at most 0.055 and is rounded with what it
/// moves by.
const ADAMW_ROUNDINGS: Allowed = Allowed {
    relative: STEPS as f64 * 3.0 * ROUNDING,
    absolute: STEPS as f64 * (3.0 * 0.055 + 34.0 * 1.003e-2) * ROUNDING,
};

/// The allowed distance from a value: `relative` times its size, plus `absolute`.
#[derive(Debug, Clone, Copy)]
struct Allowed {
    relative: f64,
    absolute: f64,
}

impl Allowed {
    fn absolute(absolute: f64) -> Self {
        Self {
            relative: 0.0,
            absolute,
        }
    }

    /// The largest distance of an element of `ours` from that of `expected`, divided by the allowed
    /// one.
    fn share(self, ours: &Tensor, expected: &Tensor) -> Result<f64> {
        let expected = expected.to_dtype(DType::F64)?;
        let allowed = expected.abs()?.affine(self.relative, self.absolute)?;
        let [ours, expected] = [ours.to_dtype(DType::F64)?, expected].map(|x| x / &allowed);
        max_difference(&ours?, &expected?)
    }
}

/// A folder of cases.
#[derive(Debug, Clone, Copy)]
struct Suite {
    name: &'static str,
    /// The environment variable that replaces the folder.
    variable: &'static str,
    folder: &'static str,
}

const MODELS: Suite = Suite {
    name: "golden_models",
    variable: "GRPO_GOLDEN_MODELS_DIR",
    folder: "models",
};

const FAMILIES: Suite = Suite {
    name: "golden_families",
    variable: "GRPO_GOLDEN_FAMILIES_DIR",
    folder: "families",
};

/// Runs every check on the cases of a suite, in a module of its name.
macro_rules! suite {
    ($name:ident, $suite:expr) => {
        mod $name {
            use super::*;

            #[rstest]
            fn logits_log_probs_and_loss_are_those_of_transformers(
                #[values("golden", "golden_left")] file: &str,
                #[values(DType::F32, DType::F64)] dtype: DType,
            ) -> Result<()> {
                forward($suite, file, dtype)
            }

            #[test]
            fn files_keep_the_names_of_their_tensors() -> Result<()> {
                files($suite)
            }

            #[test]
            fn gradients_are_those_of_transformers_with_padding_on_either_side() -> Result<()> {
                gradients($suite)
            }

            #[test]
            fn greedy_tokens_are_those_of_transformers_with_and_without_cache() -> Result<()> {
                greedy_tokens($suite)
            }

            #[test]
            fn rows_that_end_leave_the_cache_and_the_others_go_on() -> Result<()> {
                rows_that_end($suite)
            }

            #[test]
            fn five_clipped_steps_are_those_of_torch() -> Result<()> {
                adamw_steps($suite)
            }

            #[test]
            fn adamw_in_f32_is_that_in_f64_up_to_its_roundings() -> Result<()> {
                adamw_in_f32($suite)
            }

            #[test]
            fn a_grpo_loss_and_its_gradients_are_those_of_transformers() -> Result<()> {
                grpo_loss($suite)
            }
        }
    };
}

suite!(golden_models, MODELS);
suite!(golden_families, FAMILIES);

#[rstest]
fn golden_families_scores_are_those_of_transformers(
    #[values("scores", "scores_left")] file: &str,
) -> Result<()> {
    scores(FAMILIES, file)
}

/// One folder of golden values.
struct Case {
    name: String,
    folder: PathBuf,
    config: DecoderConfig,
    /// The configuration of a reward model.
    classifier: Option<SequenceClassifierConfig>,
    deviation: Value,
}

impl Case {
    fn read(folder: &Path, manifest: &Value) -> Result<Self> {
        let name = name_of(folder);
        let config = fs::read(folder.join("config.json"))?;
        let is_classifier = folder.join("scores.safetensors").exists();
        let classifier =
            is_classifier.then(|| SequenceClassifierConfig::from_hugging_face(&config));
        Ok(Self {
            config: DecoderConfig::from_hugging_face(&config)?,
            classifier: classifier.transpose()?,
            folder: folder.to_owned(),
            deviation: manifest["float32_deviation"][&name].clone(),
            name,
        })
    }

    fn tensors(&self, file: &str) -> Result<HashMap<String, Tensor>> {
        let tensors = candle_core::safetensors::load(self.folder.join(file), device())?;
        // A text model has these names in a checkpoint with vision.
        let tensors = tensors.into_iter();
        let named = tensors.map(|(name, x)| (name.replace("model.language_model.", "model."), x));
        Ok(named.collect())
    }

    fn parameters(&self) -> Result<Parameters> {
        match &self.classifier {
            Some(classifier) => classifier.load_folder(&self.folder, device()),
            None => Parameters::load_folder(&self.config, &self.folder, device()),
        }
    }

    fn decoder(&self) -> Result<Decoder> {
        Decoder::new(&self.config, self.parameters()?.detached_var_builder())
    }

    /// Another folder beside this one, of the same configuration.
    fn sibling(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            folder: self.folder.with_file_name(name),
            config: self.config.clone(),
            classifier: None,
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

    /// Compares a result with a golden value. In f64 it has the distance [`STORED`] at most, and in
    /// f32 that of the manifest.
    fn near(&self, file: &str, quantity: &str, ours: &Tensor, golden: &Tensor) -> Result<()> {
        let allowed = match ours.dtype() {
            DType::F64 => STORED,
            _ => Allowed::absolute(self.tolerance(file, quantity)),
        };
        let share = allowed.share(ours, golden)?;
        println!(
            "{} {file} {quantity}: {share:.1e} of {allowed:?}",
            self.name
        );
        assert!(share <= 1.0, "{file} {quantity}: {share} times {allowed:?}");
        Ok(())
    }

    /// The loss of the batch of `golden` and its gradients, in the dtype of `parameters`.
    fn pass(
        &self,
        pass: Pass,
        parameters: &Parameters,
        golden: &HashMap<String, Tensor>,
    ) -> Result<(Tensor, Gradients)> {
        let (ids, mask) = batch(golden, "in.input_ids")?;
        let vb = match pass {
            Pass::Graph => parameters.var_builder(),
            Pass::Recorded | Pass::Checkpointed => parameters.detached_var_builder(),
        };
        let decoder = Decoder::new(&self.config, vb)?;
        let loss = next_token_loss(&decoder, &ids, &mask)?;
        let gradients = match pass {
            Pass::Graph => {
                let mut gradients = Gradients::new();
                gradients.accumulate(&loss, parameters)?;
                gradients
            }
            Pass::Recorded | Pass::Checkpointed => {
                let checkpointing = pass == Pass::Checkpointed;
                recorded_gradients(&decoder, parameters, &ids, &mask, checkpointing)?
            }
        };
        Ok((loss.detach(), gradients))
    }
}

/// The origin of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Pass {
    /// Candle's graph, over padded rows.
    Graph,
    /// The decoder's own backward pass, over packed rows.
    Recorded,
    /// The same with activation checkpointing.
    Checkpointed,
}

fn name_of(folder: &Path) -> String {
    folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Runs `check` on every case of `suite` that has `file`. Fails after all of them have run, and
/// prints a line of counts.
fn for_each_case(
    suite: Suite,
    quantity: &str,
    file: &str,
    check: impl Fn(&Case) -> Result<()>,
) -> Result<()> {
    let root = std::env::var_os(suite.variable).map_or_else(
        || {
            let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
            golden.join(suite.folder)
        },
        PathBuf::from,
    );
    let manifest = fs::read(root.join("manifest.json"))?;
    let manifest: Value = serde_json::from_slice(&manifest).expect("manifest.json is JSON");
    let mut folders: Vec<_> = fs::read_dir(&root)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    folders.sort();
    folders.retain(|folder| folder.join(file).exists());
    assert!(
        !folders.is_empty(),
        "no folder with {file} in {}",
        root.display()
    );
    let mut failures = Vec::new();
    for folder in &folders {
        // A failed assertion must not hide the other models; its message has been printed.
        let run = || Case::read(folder, &manifest).and_then(|case| check(&case));
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => failures.push(format!("{}: {error}", name_of(folder))),
            Err(_) => failures.push(format!("{}: an assertion failed", name_of(folder))),
        }
    }
    let counts = format!(
        "{} {quantity}: {} passed, {} failed",
        suite.name,
        folders.len() - failures.len(),
        failures.len()
    );
    // Unlike println!, this is shown for a test that passes.
    writeln!(std::io::stderr(), "{counts}")?;
    assert!(failures.is_empty(), "{counts}\n{}", failures.join("\n"));
    Ok(())
}

fn batch(tensors: &HashMap<String, Tensor>, ids: &str) -> Result<(Tensor, Tensor)> {
    Ok((
        tensors[ids].to_dtype(DType::U32)?,
        tensors["in.attention_mask"].clone(),
    ))
}

fn forward(suite: Suite, file: &str, dtype: DType) -> Result<()> {
    let name = format!("{file}.safetensors");
    let quantity = format!("{file} forward in {}", dtype.as_str());
    for_each_case(suite, &quantity, &name, |case| {
        let golden = case.tensors(&name)?;
        let parameters = case.parameters()?.to_dtype(dtype)?;
        let decoder = Decoder::new(&case.config, parameters.detached_var_builder())?;
        let (ids, mask) = batch(&golden, "in.input_ids")?;
        let logits = decoder.logits(&decoder.padded_hidden_states(&ids, &mask)?)?;
        // Numbers at padding are stored as zero and mean nothing.
        let logits = logits.broadcast_mul(&mask.to_dtype(dtype)?.unsqueeze(2)?)?;
        case.near(file, "logits", &logits, &golden["out.logits"])?;
        let (log_probs, _) = next_token_log_probs(&decoder, &ids, &mask)?;
        case.near(file, "log_probs", &log_probs, &golden["out.log_probs"])?;
        let loss = next_token_loss(&decoder, &ids, &mask)?;
        case.near(file, "loss", &loss, &golden["out.loss"])
    })
}

fn scores(suite: Suite, file: &str) -> Result<()> {
    let name = format!("{file}.safetensors");
    for_each_case(suite, file, &name, |case| {
        let golden = case.tensors(&name)?;
        let config = case.classifier.as_ref().expect("a classifier");
        let vb = case.parameters()?.detached_var_builder();
        let classifier = SequenceClassifier::new(config, vb)?;
        let (ids, mask) = batch(&golden, "in.input_ids")?;
        let rows = unpadded(&ids, &mask)?;
        for tokens in [
            PackedTokens::new(&rows, device())?,
            PackedTokens::sharing_prefixes(&rows, device())?,
        ] {
            let scores = classifier.scores(&tokens)?.squeeze(1)?;
            case.near(file, "scores", &scores, &golden["out.scores"])?;
        }
        let scores = classifier.padded_scores(&ids, &mask)?.squeeze(1)?;
        case.near(file, "scores", &scores, &golden["out.scores"])?;
        Ok(())
    })
}

fn files(suite: Suite) -> Result<()> {
    for_each_case(suite, "files", "model.safetensors", |case| {
        match &case.classifier {
            Some(classifier) => classifier.check_folder(&case.folder)?,
            None => Parameters::check_folder(&case.config, &case.folder)?,
        }
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        case.parameters()?.save(&path)?;
        let stored = case.tensors("model.safetensors")?;
        let saved = candle_core::safetensors::load(&path, device())?;
        // Experts in one tensor are saved as published models have them.
        if stored
            .keys()
            .any(|name| name.ends_with(".experts.down_proj"))
        {
            assert!(
                saved
                    .keys()
                    .any(|name| name.ends_with(".experts.0.down_proj.weight"))
            );
            return Ok(());
        }
        assert_eq!(saved.len(), stored.len());
        for (name, tensor) in stored {
            assert_eq!(max_difference(&saved[&name], &tensor)?, 0.0, "{name}");
        }
        Ok(())
    })
}

fn gradients(suite: Suite) -> Result<()> {
    for_each_case(suite, "gradients", "golden.safetensors", |case| {
        // Only the file padded on the right has gradients; on the left they must be the same.
        let golden = case.tensors("golden.safetensors")?;
        for file in ["golden", "golden_left"] {
            let padded = case.tensors(&format!("{file}.safetensors"))?;
            // f64 takes the composed path of every operator. A GPU is slow at it, and the five
            // steps of `adamw_steps` contain it.
            let dtypes = if device().is_cpu() {
                &[DType::F32, DType::F64][..]
            } else {
                &[DType::F32]
            };
            for &dtype in dtypes {
                let parameters = case.parameters()?.to_dtype(dtype)?;
                for pass in [Pass::Graph, Pass::Recorded, Pass::Checkpointed] {
                    let (_, gradients) = case.pass(pass, &parameters, &padded)?;
                    check_gradients(case, file, &gradients, &golden)?;
                }
            }
        }
        Ok(())
    })
}

fn check_gradients(
    case: &Case,
    file: &str,
    gradients: &Gradients,
    golden: &HashMap<String, Tensor>,
) -> Result<()> {
    let mut worst = 0f64;
    for (name, gradient) in gradients.iter() {
        let expected = of_parameter(golden, "grad", name)?;
        let allowed = match gradient.dtype() {
            DType::F64 => STORED,
            _ => {
                let scale = max_difference(&expected, &expected.zeros_like()?)?;
                Allowed::absolute(case.tolerance(file, "grads_relative") * scale)
            }
        };
        let share = allowed.share(gradient, &expected)?;
        assert!(
            share <= 1.0,
            "{file} grad.{name}: {share} times {allowed:?}"
        );
        worst = worst.max(share);
    }
    println!(
        "{} {file} gradients: {worst:.1e} of what is allowed",
        case.name
    );
    let elements = |count: usize, x: &Tensor| count + x.elem_count();
    let of_golden = golden.iter().filter(|(key, _)| key.starts_with("grad."));
    assert_eq!(
        gradients.iter().map(|(_, x)| x).fold(0, elements),
        of_golden.map(|(_, x)| x).fold(0, elements)
    );
    Ok(())
}

/// The golden tensor `kind` of a parameter. That of an expert's matrix may be a part of one for all
/// experts.
fn of_parameter(golden: &HashMap<String, Tensor>, kind: &str, name: &str) -> Result<Tensor> {
    let key = format!("{kind}.{name}");
    if let Some(found) = golden.get(&key) {
        return Ok(found.clone());
    }
    let (layer, rest) = key.split_once(".experts.").expect("a golden tensor");
    let (expert, map) = rest.split_once('.').expect("a map of an expert");
    let expert: usize = expert.parse().expect("a number");
    let of_experts = |map: &str| golden[&format!("{layer}.experts.{map}")].get(expert);
    if map == "down_proj.weight" {
        return of_experts("down_proj");
    }
    let both = of_experts("gate_up_proj")?;
    let inner = both.dim(0)? / 2;
    both.narrow(0, if map == "up_proj.weight" { inner } else { 0 }, inner)
}

/// The tokens of each row without padding.
fn unpadded(ids: &Tensor, mask: &Tensor) -> Result<Vec<Vec<u32>>> {
    let mask = mask.to_dtype(DType::U32)?.to_vec2::<u32>()?;
    let rows = ids.to_vec2::<u32>()?.into_iter().zip(mask);
    Ok(rows
        .map(|(ids, mask)| {
            let real = ids.into_iter().zip(mask).filter(|&(_, real)| real != 0);
            real.map(|(id, _)| id).collect()
        })
        .collect())
}

/// The best token of each row of `logits` `[B, V]` and its log-probability.
fn greedy(logits: &Tensor) -> Result<Vec<(u32, f32)>> {
    let log_probs = candle_nn::ops::log_softmax(logits, D::Minus1)?;
    let tokens = log_probs.argmax(1)?.to_vec1::<u32>()?;
    let best = log_probs.max(1)?.to_vec1::<f32>()?;
    Ok(tokens.into_iter().zip(best).collect())
}

/// Greedy decoding of `steps` tokens; each step computes the whole sequences again, padded on the
/// left.
fn generate_without_cache(
    decoder: &Decoder,
    ids: &Tensor,
    mask: &Tensor,
    steps: usize,
) -> Result<Vec<Vec<(u32, f32)>>> {
    let (mut ids, mut mask) = (ids.clone(), mask.to_dtype(DType::U32)?);
    let mut generated = vec![Vec::new(); ids.dim(0)?];
    for _ in 0..steps {
        let hidden = decoder.padded_hidden_states(&ids, &mask)?;
        let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.squeeze(1)?;
        let best = greedy(&decoder.logits(&last)?)?;
        let tokens: Vec<u32> = best.iter().map(|&(token, _)| token).collect();
        let tokens = Tensor::new(tokens, device())?.unsqueeze(1)?;
        ids = Tensor::cat(&[&ids, &tokens], 1)?;
        mask = Tensor::cat(&[&mask, &tokens.ones_like()?], 1)?;
        generated
            .iter_mut()
            .zip(best)
            .for_each(|(row, best)| row.push(best));
    }
    Ok(generated)
}

/// Greedy decoding with a cache of at most `steps` tokens. A row whose token is `end` leaves the
/// cache after it.
fn generate_with_cache(
    decoder: &Decoder,
    prompts: &[Vec<u32>],
    steps: usize,
    end: Option<u32>,
) -> Result<Vec<Vec<(u32, f32)>>> {
    let mut cache = PagedCache::new(decoder.config(), DType::F32, device())?;
    let mut alive: Vec<(usize, SequenceId, Vec<u32>)> = prompts
        .iter()
        .enumerate()
        .map(|(row, prompt)| (row, cache.add(), prompt.clone()))
        .collect();
    let mut generated = vec![Vec::new(); prompts.len()];
    for _ in 0..steps {
        let new: Vec<(SequenceId, &[u32])> = alive
            .iter()
            .map(|(_, id, tokens)| (*id, tokens.as_slice()))
            .collect();
        let best = greedy(&decoder.next_logits(&new, &mut cache)?)?;
        let mut going_on = Vec::new();
        for ((row, id, _), (token, log_prob)) in alive.into_iter().zip(best) {
            generated[row].push((token, log_prob));
            if Some(token) == end {
                cache.remove(id)?;
            } else {
                going_on.push((row, id, vec![token]));
            }
        }
        alive = going_on;
        if alive.is_empty() {
            break;
        }
    }
    Ok(generated)
}

fn tokens_of(rows: &[Vec<(u32, f32)>]) -> Vec<Vec<i64>> {
    let tokens = |row: &Vec<(u32, f32)>| row.iter().map(|&(token, _)| token.into()).collect();
    rows.iter().map(tokens).collect()
}

fn greedy_tokens(suite: Suite) -> Result<()> {
    for_each_case(suite, "greedy", "generate.safetensors", |case| {
        let golden = case.tensors("generate.safetensors")?;
        let decoder = case.decoder()?;
        let (ids, mask) = batch(&golden, "in.prompt_ids")?;
        let expected = golden["out.generated_ids"].to_vec2::<i64>()?;
        let steps = expected[0].len();
        let whole = generate_without_cache(&decoder, &ids, &mask, steps)?;
        let cached = generate_with_cache(&decoder, &unpadded(&ids, &mask)?, steps, None)?;
        for generated in [whole, cached] {
            assert_eq!(tokens_of(&generated), expected);
            let log_probs: Vec<Vec<f32>> = generated
                .iter()
                .map(|row| row.iter().map(|&(_, log_prob)| log_prob).collect())
                .collect();
            let log_probs = Tensor::new(log_probs, device())?;
            case.near(
                "generate",
                "log_probs",
                &log_probs,
                &golden["out.log_probs"],
            )?;
        }
        Ok(())
    })
}

fn rows_that_end(suite: Suite) -> Result<()> {
    for_each_case(suite, "rows that end", "generate.safetensors", |case| {
        let golden = case.tensors("generate.safetensors")?;
        let scalar = |key: &str| golden[key].to_scalar::<i64>();
        let (end, pad) = (
            scalar("in.eos_token_id")? as u32,
            scalar("in.pad_token_id")?,
        );
        let (ids, mask) = batch(&golden, "in.prompt_ids")?;
        let expected = golden["out.generated_ids_eos"].to_vec2::<i64>()?;
        let steps = expected[0].len();
        let prompts = unpadded(&ids, &mask)?;
        let generated = generate_with_cache(&case.decoder()?, &prompts, steps, Some(end))?;
        let mut tokens = tokens_of(&generated);
        let lengths: Vec<_> = tokens.iter().map(|row| row.len() as i64).collect();
        assert_eq!(lengths, golden["out.lengths_eos"].to_vec1::<i64>()?);
        tokens.iter_mut().for_each(|row| row.resize(steps, pad));
        assert_eq!(tokens, expected);
        Ok(())
    })
}

/// The options of `adamw.safetensors`.
fn adamw_config() -> AdamWConfig {
    AdamWConfig {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        decay: DecayRule::All,
        ..AdamWConfig::default()
    }
}

const STEPS: usize = 5;

/// In f64. AdamW divides a gradient by its own size, so an element near 0 moves in a direction that
/// depends on its rounding, and in f32 on the order of sums.
fn adamw_steps(suite: Suite) -> Result<()> {
    for_each_case(suite, "adamw", "adamw.safetensors", |case| {
        let golden = case.tensors("adamw.safetensors")?;
        for pass in [Pass::Graph, Pass::Recorded] {
            let parameters = case.parameters()?.to_dtype(DType::F64)?;
            let mut optimizer = AdamW::new(adamw_config(), &parameters)?;
            for step in 0..STEPS {
                let (loss, mut gradients) = case.pass(pass, &parameters, &golden)?;
                case.near("adamw", "losses", &loss, &golden["out.losses"].i(step)?)?;
                let norm = Tensor::new(gradients.clip_by_global_norm(1.0)?, device())?;
                let expected = golden["out.grad_norms"].i(step)?;
                case.near("adamw", "grad_norms", &norm, &expected)?;
                optimizer.step(&parameters, &gradients)?;
            }
            let (loss, _) = case.pass(pass, &parameters, &golden)?;
            case.near("adamw", "loss_after", &loss, &golden["out.loss_after"])?;
            for (name, variable) in parameters.iter() {
                let expected = of_parameter(&golden, "param", name)?;
                case.near("adamw", &format!("param.{name}"), variable, &expected)?;
            }
        }
        Ok(())
    })
}

/// The part of the five steps that all f32 processors share: loss and norm before any step, and
/// AdamW alone, given the gradients of f64.
fn adamw_in_f32(suite: Suite) -> Result<()> {
    for_each_case(suite, "adamw in f32", "adamw.safetensors", |case| {
        let golden = case.tensors("adamw.safetensors")?;
        let narrow = case.parameters()?;
        // The manifest states the largest deviations of five steps. The first has none before it.
        let (loss, gradients) = case.pass(Pass::Graph, &narrow, &golden)?;
        case.near("adamw", "losses", &loss, &golden["out.losses"].i(0)?)?;
        let norm = Tensor::new(gradients.global_norm()? as f32, device())?;
        let expected = golden["out.grad_norms"].i(0)?;
        case.near("adamw", "grad_norms", &norm, &expected)?;

        let wide = narrow.to_dtype(DType::F64)?;
        let mut optimizers = [&narrow, &wide].map(|of| AdamW::new(adamw_config(), of));
        for _ in 0..STEPS {
            let (_, mut gradients) = case.pass(Pass::Recorded, &wide, &golden)?;
            gradients.clip_by_global_norm(1.0)?;
            for (optimizer, parameters) in optimizers.iter_mut().zip([&narrow, &wide]) {
                let optimizer = optimizer.as_mut().expect("parameters that train");
                optimizer.step(parameters, &gradients)?;
            }
        }
        let mut worst = 0f64;
        for ((name, narrow), (_, wide)) in narrow.iter().zip(wide.iter()) {
            let share = ADAMW_ROUNDINGS.share(narrow, wide)?;
            assert!(share <= 1.0, "{name}: {share} times {ADAMW_ROUNDINGS:?}");
            worst = worst.max(share);
        }
        println!(
            "{} AdamW in f32: {worst:.1e} of {ADAMW_ROUNDINGS:?}",
            case.name
        );
        Ok(())
    })
}

/// Log-probabilities [B, C] of the completion after dividing the logits by the temperature, and
/// zero at padding.
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
    let hidden = decoder.padded_hidden_states(&ids, &mask)?;
    let hidden = hidden.narrow(1, prompt_length - 1, length)?;
    let logits = (decoder.logits(&hidden)? / temperature)?;
    let log_probs = candle_nn::ops::log_softmax(&logits, D::Minus1)?
        .gather(&completion.unsqueeze(2)?, 2)?
        .squeeze(2)?;
    let real = golden["in.completion_attention_mask"].to_dtype(DType::F32)?;
    log_probs * real
}

fn grpo_loss(suite: Suite) -> Result<()> {
    for_each_case(suite, "grpo", "grpo.safetensors", |case| {
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
        let ref_log_probs = completion_log_probs(&reference, &golden, temperature)?;
        case.near(
            "grpo",
            "log_probs",
            &ref_log_probs,
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
        let apart = (&ref_log_probs - &log_probs)?;
        let kl = ((apart.exp()? - &apart)? - 1.0)?;
        let per_token = ((policy + (kl * beta)?)? * &mask)?;
        let counted = mask.sum(1)?.clamp(1f32, f32::MAX)?;
        let loss = (per_token.sum(1)? / counted)?.mean_all()?;
        case.near("grpo", "loss", &loss, &golden["out.loss"])?;

        let mut gradients = Gradients::new();
        gradients.accumulate(&loss, &parameters)?;
        check_gradients(case, "grpo", &gradients, &golden)
    })
}

//! Low-rank adapters.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_nn::{
    AdamW, AdamWConfig, BaseWeights, Decoder, DecoderConfig, Gradients, Lora, LoraConfig,
    Parameters,
};
use candle_grpo_test_support::{device, message, noise_tensor};
use rstest::rstest;
use rstest_reuse::apply;

use crate::small::{
    Family, bits, config, each_family, left_padded, lively, max_difference, next_token_loss,
};

/// Adapters whose b is not zero, as it is after some training.
fn trained(config: LoraConfig, model: &DecoderConfig) -> Result<Lora> {
    let lora = Lora::init(config, model, 3, device())?;
    for (name, variable) in lora.parameters().iter() {
        if name.ends_with("lora_B.weight") {
            let seed = name.len() as u64;
            let noise = noise_tensor(variable.shape(), seed, DType::F32, device())?;
            variable.set(&(noise * 0.3)?)?;
        }
    }
    Ok(lora)
}

fn logits(decoder: &Decoder) -> Result<Tensor> {
    let (ids, mask) = left_padded()?;
    decoder.logits(&decoder.padded_hidden_states(&ids, &mask)?)
}

#[rstest]
fn fresh_adapters_change_nothing_and_trained_ones_do(
    #[values(false, true)] tied: bool,
) -> Result<()> {
    let model = config(tied);
    let base = lively(&model)?;
    let off = logits(&Decoder::new(&model, base.detached_var_builder())?)?;
    let fresh = Lora::init(LoraConfig::all_linear(2, 4.), &model, 3, device())?;
    let on = logits(&Decoder::new(&model, fresh.detached_var_builder(&base)?)?)?;
    assert_eq!(max_difference(&on, &off)?, 0.);

    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    let on = logits(&Decoder::new(&model, lora.detached_var_builder(&base)?)?)?;
    assert!(max_difference(&on, &off)? > 0.1);
    Ok(())
}

/// Even after adapter updates.
#[test]
fn a_decoder_without_adapters_stays_bit_identical_to_the_base() -> Result<()> {
    let model = config(false);
    let base = lively(&model)?;
    let before = bits(&base)?;
    let reference = Decoder::new(&model, base.detached_var_builder())?;
    let base_logits = logits(&reference)?;
    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    let policy = Decoder::new(&model, lora.var_builder(&base)?)?;
    let sampler = Decoder::new(&model, lora.detached_var_builder(&base)?)?;
    let policy_logits = logits(&sampler)?;
    let mut optimizer = AdamW::new(AdamWConfig::default(), lora.parameters())?;
    let (ids, mask) = left_padded()?;
    let mut losses = Vec::new();
    for _ in 0..10 {
        let loss = next_token_loss(&policy, &ids, &mask)?;
        losses.push(loss.to_scalar::<f32>()?);
        let mut gradients = Gradients::new();
        gradients.accumulate(&loss, lora.parameters())?;
        drop(loss);
        optimizer.step(lora.parameters(), &gradients)?;
    }
    assert!(losses[9] < losses[0]);
    assert_eq!(max_difference(&logits(&reference)?, &base_logits)?, 0.);
    assert_eq!(bits(&base)?, before);
    // The detached decoder sees the updates.
    assert!(max_difference(&logits(&sampler)?, &policy_logits)? > 1e-3);
    Ok(())
}

#[rstest]
fn merged_weights_are_the_policy_with_its_adapters(
    #[values(Family::Llama, Family::LlamaWithBiases)] family: Family,
    #[values(false, true)] tied: bool,
) -> Result<()> {
    let model = family.config(tied);
    let base = lively(&model)?;
    let before = bits(&base)?;
    let lora = trained(LoraConfig::all_linear(3, 2.), &model)?;
    let on = logits(&Decoder::new(&model, lora.detached_var_builder(&base)?)?)?;
    let merged = lora.merged(&model, &base)?;
    let merged_logits = logits(&Decoder::new(&model, merged.detached_var_builder())?)?;
    assert!(max_difference(&on, &merged_logits)? < 1e-4);
    assert_eq!(bits(&base)?, before);
    Ok(())
}

/// `values`, to a whole number of `unit`.
fn on_grid(values: &Tensor, unit: f64) -> Result<Tensor> {
    (values / unit)?.round()? * unit
}

/// The f64 reference is exact: all numbers are multiples of powers of two.
#[rstest]
fn merged_copies_are_the_exact_sums_rounded_once(
    #[values(DType::F32, DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let model = config(false);
    let base = lively(&model)?;
    for (_, weight) in base.iter() {
        weight.set(&on_grid(weight, 1. / 4096.)?)?;
    }
    let lora = trained(LoraConfig::all_linear(4, 2.), &model)?;
    for (_, matrix) in lora.parameters().iter() {
        matrix.set(&on_grid(matrix, 1. / 64.)?)?;
    }
    let (_, copies) = lora.merged_var_builder(&base, dtype)?;
    let (mut merged, mut rounded) = (0, 0);
    for (name, weight) in base.iter() {
        let module = name.trim_end_matches(".weight");
        let matrix = |part: &str| {
            lora.parameters()
                .get(&format!("{module}.lora_{part}.weight"))
        };
        let (Some(a), Some(b)) = (matrix("A"), matrix("B")) else {
            assert!(copies.get(name).is_none(), "{name}");
            continue;
        };
        let [weight, a, b] =
            [weight, a, b].map(|x| x.to_device(&Device::Cpu)?.to_dtype(DType::F64));
        // alpha / rank is a half.
        let exact = (weight? + (b?.matmul(&a?)? * 0.5)?)?;
        let expected = exact.to_dtype(dtype)?;
        let copy = copies.get(name).expect("a copy").to_device(&Device::Cpu)?;
        assert_eq!(copy.dtype(), dtype);
        assert_eq!(max_difference(&copy, &expected)?, 0., "{name}");
        rounded += usize::from(max_difference(&expected, &exact)? > 0.);
        merged += 1;
    }
    assert_eq!(merged, 14);
    assert_eq!(rounded, if dtype == DType::F32 { 0 } else { merged });
    Ok(())
}

#[apply(each_family)]
fn a_decoder_of_merged_copies_is_the_policy_with_its_adapters(family: Family) -> Result<()> {
    let model = family.config(false);
    let base = lively(&model)?;
    let before = bits(&base)?;
    let lora = trained(LoraConfig::all_linear(3, 2.), &model)?;
    let policy = Decoder::new(&model, lora.detached_var_builder(&base)?)?;
    let (vb, copies) = lora.merged_var_builder(&base, DType::F32)?;
    let decoder = Decoder::new(&model, vb)?;
    let first = logits(&decoder)?;
    assert!(max_difference(&first, &logits(&policy)?)? < 1e-4);

    for (_, matrix) in lora.parameters().iter() {
        matrix.set(&(matrix.as_tensor() * 0.5)?)?;
    }
    assert_eq!(max_difference(&logits(&decoder)?, &first)?, 0.);
    copies.refresh(&lora, &base)?;
    let second = logits(&decoder)?;
    assert!(max_difference(&second, &logits(&policy)?)? < 1e-4);
    assert!(max_difference(&second, &first)? > 1e-2);
    // The weights of a file are the same sums.
    let merged = lora.merged(&model, &base)?;
    let merged = Decoder::new(&model, merged.detached_var_builder())?;
    assert_eq!(max_difference(&second, &logits(&merged)?)?, 0.);
    assert_eq!(bits(&base)?, before);
    Ok(())
}

/// Weights without adapters are not copied if they have the dtype.
#[rstest]
#[case::the_same_dtype(DType::BF16, true)]
#[case::another_dtype(DType::F32, false)]
fn merged_copies_share_the_other_weights(
    #[case] base_dtype: DType,
    #[case] shared: bool,
) -> Result<()> {
    let model = config(true);
    let base = lively(&model)?.frozen_as(&model, BaseWeights::Dense, base_dtype)?;
    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    let (vb, _) = lora.merged_var_builder(&base, DType::BF16)?;
    let decoder = Decoder::new(&model, vb)?;
    assert_eq!(decoder.output_weight().dtype(), DType::BF16);
    let embedding = base.get("model.embed_tokens.weight").expect("a weight");
    embedding.set(&embedding.zeros_like()?)?;
    let zeros = decoder.output_weight().zeros_like()?;
    let is_zero = max_difference(decoder.output_weight(), &zeros)? == 0.;
    assert_eq!(is_zero, shared);
    Ok(())
}

#[test]
fn adapters_of_another_model_are_not_merged() -> Result<()> {
    let model = config(false);
    let base = lively(&model)?;
    let deeper = DecoderConfig {
        num_hidden_layers: 3,
        ..model.clone()
    };
    let lora = |model: &DecoderConfig| trained(LoraConfig::all_linear(2, 4.), model);
    let error = message(lora(&deeper)?.merged_var_builder(&base, DType::F32));
    assert!(
        error.contains("base: no model.layers.2.mlp.down_proj.weight, must have it"),
        "{error}"
    );
    let error = message(lora(&model)?.merged_var_builder(&base, DType::F64));
    assert!(
        error.contains("dtype: F64, must be F32, BF16 or F16"),
        "{error}"
    );

    let (_, copies) = lora(&model)?.merged_var_builder(&base, DType::F32)?;
    let some = LoraConfig {
        target_modules: vec!["q_proj".to_owned()],
        ..LoraConfig::all_linear(2, 4.)
    };
    let error = message(copies.refresh(&trained(some, &model)?, &base));
    assert!(
        error.contains("adapters: none for model.layers.0.mlp.down_proj.weight, must have one"),
        "{error}"
    );
    let wider = DecoderConfig {
        intermediate_size: 24,
        ..model
    };
    let error = message(copies.refresh(&lora(&wider)?, &base));
    assert!(
        error.contains("model.layers.0.mlp.down_proj.weight: "),
        "{error}"
    );
    Ok(())
}

#[test]
fn gradients_equal_finite_differences() -> Result<()> {
    let model = config(false);
    let base = lively(&model)?;
    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    let policy = Decoder::new(&model, lora.var_builder(&base)?)?;
    let (ids, mask) = left_padded()?;
    let mut gradients = Gradients::new();
    gradients.accumulate(&next_token_loss(&policy, &ids, &mask)?, lora.parameters())?;

    // In f64, because a difference in f32 would round more than it measures.
    let wide = |moved: Option<(&str, usize, f64)>| -> Result<f64> {
        let mut tensors = std::collections::HashMap::new();
        for (name, variable) in base.iter() {
            let weight = variable
                .as_detached_tensor()
                .to_dtype(candle_core::DType::F64)?;
            let Some(module) = name.strip_suffix("weight") else {
                continue;
            };
            let part = |part: &str| -> Result<Option<Tensor>> {
                let name = format!("{module}{part}");
                let Some(variable) = lora.parameters().get(&name) else {
                    return Ok(None);
                };
                let x = variable
                    .as_detached_tensor()
                    .to_dtype(candle_core::DType::F64)?;
                let mut values = x.flatten_all()?.to_vec1::<f64>()?;
                if let Some((_, at, by)) = moved.filter(|(moved, ..)| *moved == name) {
                    values[at] += by;
                }
                Tensor::from_vec(values, variable.shape(), device()).map(Some)
            };
            let weight = match (part("lora_A.weight")?, part("lora_B.weight")?) {
                // alpha / rank is 2.
                (Some(a), Some(b)) => (weight + (b.matmul(&a)? * 2.)?)?,
                _ => weight,
            };
            tensors.insert(name.to_owned(), weight);
        }
        let vb = candle_nn::VarBuilder::from_tensors(tensors, candle_core::DType::F64, device());
        next_token_loss(&Decoder::new(&model, vb)?, &ids, &mask)?.to_scalar::<f64>()
    };
    let step = 1e-5;
    for (name, gradient) in gradients.iter() {
        let gradient = gradient.flatten_all()?.to_vec1::<f32>()?;
        for at in [0, gradient.len() / 2, gradient.len() - 1] {
            let up = wide(Some((name, at, step)))?;
            let down = wide(Some((name, at, -step)))?;
            let expected = (up - down) / (2. * step);
            let found = f64::from(gradient[at]);
            assert!(
                (found - expected).abs() < 2e-5 + 1e-3 * expected.abs(),
                "{name}[{at}]: {found}, {expected}"
            );
        }
    }
    assert_eq!(gradients.iter().count(), 2 * 7 * 2);
    Ok(())
}

#[test]
fn the_matrices_of_the_base_get_no_gradient() -> Result<()> {
    let model = config(false);
    let base = lively(&model)?;
    let frozen: BTreeMap<String, Tensor> = base
        .iter()
        .map(|(name, variable)| (name.to_owned(), variable.as_detached_tensor()))
        .collect();
    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    // The adapter builder over a base with these very tensors, so that the store can be asked for
    // them.
    let mut tensors: std::collections::HashMap<String, Tensor> =
        frozen.clone().into_iter().collect();
    for (name, variable) in lora.parameters().iter() {
        tensors.insert(name.to_owned(), variable.as_tensor().clone());
        if let Some(module) = name.strip_suffix("lora_A.weight") {
            tensors.insert(
                format!("{module}lora_scaling"),
                Tensor::new(2f64, device())?,
            );
        }
    }
    let vb = candle_nn::VarBuilder::from_tensors(tensors, candle_core::DType::F32, device());
    let policy = Decoder::new(&model, vb)?;
    let (ids, mask) = left_padded()?;
    let store = next_token_loss(&policy, &ids, &mask)?.backward()?;
    for (name, weight) in frozen.iter().filter(|(_, weight)| weight.rank() == 2) {
        assert!(store.get(weight).is_none(), "{name}");
    }
    for (name, variable) in lora.parameters().iter() {
        assert!(store.get(variable).is_some(), "{name}");
    }
    Ok(())
}

#[test]
fn targets_are_suffixes_of_names() -> Result<()> {
    let model = config(false);
    let names = |targets: &[&str]| -> Result<Vec<String>> {
        let config = LoraConfig {
            target_modules: targets.iter().map(|t| (*t).to_owned()).collect(),
            ..LoraConfig::all_linear(1, 1.)
        };
        let lora = Lora::init(config, &model, 0, device())?;
        Ok(lora
            .parameters()
            .iter()
            .map(|(name, _)| name.to_owned())
            .collect())
    };
    assert_eq!(
        names(&["layers.1.self_attn.q_proj"])?,
        [
            "model.layers.1.self_attn.q_proj.lora_A.weight",
            "model.layers.1.self_attn.q_proj.lora_B.weight"
        ]
    );
    assert_eq!(names(&["q_proj", "v_proj"])?.len(), 8);
    for (targets, words) in [
        (vec!["proj"], "target_modules: \"proj\""),
        (vec!["q_proj", "lm_head"], "target_modules: \"lm_head\""),
        (vec![], "target_modules: []"),
    ] {
        let error = message(names(&targets));
        assert!(error.starts_with(words), "{error}");
    }
    for (rank, alpha, words) in [
        (0, 1., "rank: 0"),
        (1, 0., "alpha: 0"),
        (1, f64::NAN, "alpha"),
    ] {
        let config = LoraConfig::all_linear(rank, alpha);
        let error = message(Lora::init(config, &model, 0, device()));
        assert!(error.starts_with(words), "{error}");
    }
    Ok(())
}

#[test]
fn files_in_the_format_of_peft_round_trip_bit_identically() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = config(false);
    let config = LoraConfig {
        target_modules: vec!["q_proj".to_owned(), "mlp.down_proj".to_owned()],
        ..LoraConfig::all_linear(2, 3.)
    };
    let lora = trained(config.clone(), &model)?;
    lora.save(folder.path(), Some("some/base"))?;
    let back = Lora::load(folder.path(), &model, device())?;
    assert_eq!(back.config(), &config);
    assert_eq!(bits(back.parameters())?, bits(lora.parameters())?);

    let json: serde_json::Value = read_json(&folder.path().join("adapter_config.json"));
    assert_eq!(json["peft_type"], "LORA");
    assert_eq!(json["r"], 2);
    assert_eq!(json["lora_alpha"], 3);
    assert_eq!(json["base_model_name_or_path"], "some/base");
    assert_eq!(
        json["target_modules"],
        serde_json::json!(["q_proj", "mlp.down_proj"])
    );
    let file = folder.path().join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(file, device())?;
    assert_eq!(tensors.len(), 8);
    let name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight";
    assert_eq!(tensors[name].dims(), [12, 2]);
    Ok(())
}

fn read_json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[rstest]
#[case("peft_type", "IA3".into(), "peft_type: \"IA3\"")]
#[case("use_dora", true.into(), "use_dora: true, must be false")]
#[case("use_rslora", true.into(), "use_rslora: true")]
#[case("bias", "all".into(), "bias: \"all\", must be \"none\"")]
#[case("rank_pattern", serde_json::json!({"q_proj": 4}), "rank_pattern: ")]
#[case("modules_to_save", serde_json::json!(["lm_head"]), "modules_to_save: ")]
#[case("target_modules", ".*q_proj".into(), "target_modules: \".*q_proj\"")]
#[case("lora_alpha", "two".into(), "lora_alpha: \"two\"")]
#[case("r", 3.into(), "must be [3, 20]")]
#[case("target_modules", serde_json::json!(["k_proj"]), "missing")]
fn files_with_unsupported_options_are_refused(
    #[case] key: &str,
    #[case] value: serde_json::Value,
    #[case] words: &str,
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = config(false);
    trained(LoraConfig::all_linear(2, 4.), &model)?.save(folder.path(), None)?;
    let path = folder.path().join("adapter_config.json");
    let mut json = read_json(&path);
    json[key] = value;
    std::fs::write(&path, json.to_string())?;
    let error = message(Lora::load(folder.path(), &model, device()));
    assert!(
        error.starts_with("cannot load adapters from") && error.contains(words),
        "{error}"
    );
    Ok(())
}

/// PEFT names the maps that a model has: joined ones in Phi-3, and one per expert.
#[rstest]
#[case(Family::Llama, 7, &["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"])]
#[case(Family::Phi3, 4, &["down_proj", "gate_up_proj", "o_proj", "qkv_proj"])]
#[case(
    Family::Qwen3Moe,
    // 14 maps in the first block, which has a router and three experts, and 7 in the last one.
    10,
    &["down_proj", "gate", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
)]
fn all_linear_maps_of_a_family_are_adapted(
    #[case] family: Family,
    #[case] maps_of_a_block: usize,
    #[case] names: &[&str],
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = family.config(true);
    let lora = trained(LoraConfig::all_linear(2, 4.), &model)?;
    let maps = maps_of_a_block * model.num_hidden_layers;
    assert_eq!(
        lora.parameters().len(),
        2 * (maps + usize::from(family == Family::Qwen3Moe))
    );
    lora.save(folder.path(), None)?;
    let json: serde_json::Value = read_json(&folder.path().join("adapter_config.json"));
    assert_eq!(json["target_modules"], serde_json::json!(names));
    let back = Lora::load(folder.path(), &model, device())?;
    assert_eq!(bits(back.parameters())?, bits(lora.parameters())?);
    Ok(())
}

/// With all keys that PEFT writes.
#[test]
fn a_configuration_of_peft_is_read() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let model = config(false);
    trained(LoraConfig::all_linear(2, 4.), &model)?.save(folder.path(), None)?;
    let json = r#"{"alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "x", "bias": "none",
        "corda_config": null, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
        "inference_mode": true, "init_lora_weights": true, "layer_replication": null, "layers_pattern": null,
        "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 4, "lora_bias": false, "lora_dropout": 0.05,
        "megatron_config": null, "megatron_core": "megatron.core", "modules_to_save": null, "peft_type": "LORA",
        "qalora_group_size": 16, "r": 2, "rank_pattern": {}, "revision": null,
        "target_modules": ["v_proj", "up_proj", "q_proj", "o_proj", "k_proj", "gate_proj", "down_proj"],
        "target_parameters": null, "task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_dora": false,
        "use_qalora": false, "use_rslora": false}"#;
    std::fs::write(folder.path().join("adapter_config.json"), json)?;
    let lora = Lora::load(folder.path(), &model, device())?;
    assert_eq!((lora.config().rank, lora.config().alpha), (2, 4.));
    Ok(())
}

#[test]
fn a_base_of_another_shape_is_an_error() -> Result<()> {
    let lora = Lora::init(LoraConfig::all_linear(1, 1.), &config(false), 0, device())?;
    let mut smaller = config(false);
    smaller.num_hidden_layers = 1;
    let base = Parameters::init(&smaller, 0, device())?;
    let error = message(lora.var_builder(&base));
    assert!(error.starts_with("base: no model.layers.1."), "{error}");
    Ok(())
}

//! Parameters: initialization, copies, files and errors.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{
    AdamWConfig, BaseWeights, DecoderConfig, Gguf, GgufDType, Parameters, WeightDivision,
};
use rstest::rstest;

use candle_grpo_test_support::{device, message, on_ranks};

use crate::gguf::statable;
use crate::small::{Family, bits, config, lively, lively_tensors, max_difference};

#[test]
fn the_same_seed_gives_the_same_bits_and_another_does_not() -> Result<()> {
    let config = config(false);
    let first = bits(&Parameters::init(&config, 3, device())?)?;
    assert_eq!(bits(&Parameters::init(&config, 3, device())?)?, first);
    assert_ne!(bits(&Parameters::init(&config, 4, device())?)?, first);
    Ok(())
}

#[test]
fn fresh_weights_are_normal_and_norms_are_one() -> Result<()> {
    let mut config = config(false);
    (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
    ) = (500, 60, 200);
    for (name, variable) in Parameters::init(&config, 3, device())?.iter() {
        let values = variable.flatten_all()?.to_vec1::<f32>()?;
        if name.contains("norm") {
            assert!(values.iter().all(|&value| value == 1.0), "{name}");
            continue;
        }
        // Two layers: the residual projections are halved.
        let std = if name.contains("o_proj") || name.contains("down_proj") {
            0.01
        } else {
            0.02
        };
        let n = values.len() as f64;
        let moment = |power: i32| {
            values
                .iter()
                .map(|&value| (f64::from(value) / std).powi(power))
                .sum::<f64>()
                / n
        };
        // Five standard errors for the moments of a standard normal: 0, 1 and 3.
        for (power, expected, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (4, 3.0, 96.0)] {
            let error = 5.0 * f64::sqrt(variance / n);
            assert!(
                (moment(power) - expected).abs() < error,
                "{name}: moment {power} is {}",
                moment(power)
            );
        }
    }
    Ok(())
}

#[test]
fn parameters_have_the_names_of_the_configuration_in_sorted_order() -> Result<()> {
    for tied in [true, false] {
        let config = config(tied);
        let parameters = Parameters::init(&config, 3, device())?;
        let names: Vec<_> = parameters.iter().map(|(name, _)| name.to_owned()).collect();
        assert!(names.is_sorted());
        assert_eq!(
            names,
            config.parameter_shapes().into_keys().collect::<Vec<_>>()
        );
        assert_eq!(
            (parameters.len(), parameters.is_empty()),
            (if tied { 20 } else { 21 }, false)
        );
        // By hand: embedding 13*12, each layer 2*12 + q,o 2*24*12 + k,v 2*12*12 + 3*20*12, last
        // norm 12.
        let layers = 2 * (24 + 576 + 288 + 720);
        assert_eq!(
            parameters.num_elements(),
            layers + 12 + if tied { 156 } else { 312 }
        );
        assert_eq!(parameters.get("lm_head.weight").is_none(), tied);
        assert!(parameters.device().same_device(device()));
    }
    Ok(())
}

#[test]
fn tensors_given_are_copied_and_cast() -> Result<()> {
    let config = config(true);
    let mut tensors = lively_tensors(&config)?;
    let var = Var::from_tensor(&tensors["model.norm.weight"])?;
    tensors.insert("model.norm.weight".into(), var.as_tensor().clone());
    let embedding = tensors["model.embed_tokens.weight"].to_dtype(DType::BF16)?;
    tensors.insert("model.embed_tokens.weight".into(), embedding.clone());
    let parameters = Parameters::from_tensors(&config, tensors, device())?;
    assert!(
        parameters
            .iter()
            .all(|(_, variable)| variable.dtype() == DType::F32)
    );
    assert_eq!(
        max_difference(
            parameters.get("model.embed_tokens.weight").unwrap(),
            &embedding
        )?,
        0.0
    );
    let before = bits(&parameters)?;
    var.set(&var.zeros_like()?)?;
    assert_eq!(bits(&parameters)?, before);
    Ok(())
}

#[test]
fn variables_of_another_dtype_are_independent_copies() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let wide = parameters.to_dtype(DType::F64)?;
    assert_eq!((parameters.dtype(), wide.dtype()), (DType::F32, DType::F64));
    let before = bits(&parameters)?;
    assert_eq!(bits(&wide)?, before);
    let same = parameters.to_dtype(DType::F32)?;
    for copies in [&wide, &same] {
        let norm = copies.get("model.norm.weight").unwrap();
        norm.set(&norm.zeros_like()?)?;
    }
    assert_eq!(bits(&parameters)?, before);

    let error = message(parameters.to_dtype(DType::U32));
    assert!(
        error.contains("dtype: U32, must be F32, F64, BF16 or F16"),
        "{error}"
    );
    let wider = DecoderConfig {
        hidden_size: 32,
        ..config
    };
    let blocks = lively(&wider)?.frozen_as(&wider, BaseWeights::Q8_0, DType::F32)?;
    let error = message(blocks.to_dtype(DType::F64));
    assert!(
        error.contains("_proj.weight: blocks of quantized numbers"),
        "{error}"
    );
    Ok(())
}

/// Custom variables may be f64, but then all of them must be.
#[test]
fn custom_variables_have_one_dtype() -> Result<()> {
    let zeros =
        |name: &str, dtype| -> Result<_> { Ok((name.to_owned(), Var::zeros(2, dtype, device())?)) };
    let of = |first, second| -> Result<Parameters> {
        Parameters::from_variables([zeros("a", first)?, zeros("b", second)?], device())
    };
    let wide = of(DType::F64, DType::F64)?.with("c", &Tensor::zeros(2, DType::F32, device())?)?;
    assert_eq!(wide.get("c").unwrap().dtype(), DType::F64);
    for (first, second, expected) in [
        (DType::F64, DType::F32, "variable b: F32"),
        (DType::F32, DType::F64, "variable b: F64"),
        (DType::BF16, DType::BF16, "variable a: BF16"),
    ] {
        let error = message(of(first, second));
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

#[test]
fn a_detached_builder_follows_updates_and_a_frozen_copy_does_not() -> Result<()> {
    let parameters = lively(&config(true))?;
    let (tracked, detached) = (parameters.var_builder(), parameters.detached_var_builder());
    let frozen = parameters.frozen_copy()?;
    let norm = parameters.get("model.norm.weight").unwrap();
    let before = norm.to_vec1::<f32>()?;
    norm.set(&(norm.as_detached_tensor() * 2.0)?)?;
    let after = norm.to_vec1::<f32>()?;
    assert_ne!(before, after);

    let read = |vb: &candle_nn::VarBuilder| vb.get(12, "model.norm.weight");
    assert_eq!(read(&tracked)?.to_vec1::<f32>()?, after);
    assert!(read(&tracked)?.is_variable());
    assert_eq!(read(&detached)?.to_vec1::<f32>()?, after);
    assert!(!read(&detached)?.track_op());
    assert_eq!(frozen["model.norm.weight"].to_vec1::<f32>()?, before);
    assert!(!frozen["model.norm.weight"].track_op());
    // A builder never makes up a tensor.
    assert!(tracked.get(12, "model.normal.weight").is_err());
    Ok(())
}

#[test]
fn a_saved_file_loads_bit_identically_and_leaves_no_temporary_file() -> Result<()> {
    let config = config(false);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let (old, new) = (Parameters::init(&config, 1, device())?, lively(&config)?);
    old.save(&path)?;
    new.save(&path)?;
    assert_eq!(
        bits(&Parameters::load(&config, &path, device())?)?,
        bits(&new)?
    );
    assert_eq!(fs::read_dir(folder.path())?.count(), 1);
    // The header is JSON after eight bytes; transformers asks for this entry.
    let bytes = fs::read(&path)?;
    let header = String::from_utf8_lossy(&bytes[8..200]).into_owned();
    assert!(
        header.contains(r#""__metadata__":{"format":"pt"}"#),
        "{header}"
    );
    Ok(())
}

type Read = fn(&DecoderConfig, &Path, Option<&WeightDivision>) -> Result<Parameters>;

fn folder(
    config: &DecoderConfig,
    path: &Path,
    division: Option<&WeightDivision>,
) -> Result<Parameters> {
    match division {
        None => Parameters::load_folder(config, path, &Device::Cpu),
        Some(division) => Parameters::load_folder_divided(config, path, division, &Device::Cpu),
    }
}

fn gguf(_: &DecoderConfig, path: &Path, division: Option<&WeightDivision>) -> Result<Parameters> {
    let file = Gguf::open(&path.join("model.gguf"))?;
    match division {
        None => file.parameters(&Device::Cpu),
        Some(division) => file.divided_parameters(division, &Device::Cpu),
    }
}

/// Each rank has all weights, rounded, and the ranks together have them in f32.
#[rstest]
#[case::folder(config(false), folder)]
#[case::gguf(config(false), gguf)]
#[case::gguf_with_experts(statable(Family::Qwen3Moe), gguf)]
fn weights_are_divided_while_they_are_read(
    #[case] config: DecoderConfig,
    #[case] read: Read,
    #[values(DType::BF16, DType::F16)] dtype: DType,
) -> Result<()> {
    let files = tempfile::tempdir()?;
    let path = files.path();
    let written = Parameters::init(&config, 1, &Device::Cpu)?;
    written.save(&path.join("model.safetensors"))?;
    let file = path.join("model.gguf");
    Gguf::write(&file, &config, &written, GgufDType::F32, BTreeMap::new())?;
    let whole = read(&config, path, None)?;
    assert_eq!(whole.len(), written.len());
    for world_size in [1, 2, 3, 5] {
        let ranks = on_ranks(world_size, |collective| -> Result<()> {
            let options = AdamWConfig::default();
            assert!(
                options
                    .division(DType::F32, (&collective, Sharding::Resident))
                    .is_none()
            );
            let division = options.division(dtype, (&collective, Sharding::Resident));
            assert_eq!(division.is_none(), world_size == 1);
            let Some(division) = division else {
                return Ok(());
            };
            let divided = read(&config, path, Some(&division))?;
            assert_eq!(divided.len(), whole.len());
            for (name, expected) in whole.iter() {
                let rounded = expected.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let found = divided.get(name).expect("a weight of this name");
                assert_eq!(found.dtype(), dtype);
                let found = found.to_dtype(DType::F32)?;
                assert_eq!(max_difference(&found, &rounded)?, 0.0, "{name}");
                let gathered = divided.whole(name)?;
                assert_eq!(max_difference(&gathered, expected)?, 0.0, "{name}");
            }
            Ok(())
        });
        ranks.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

#[test]
fn a_path_that_cannot_be_written_is_named_and_stays_unchanged() -> Result<()> {
    let parameters = lively(&config(true))?;
    let folder = tempfile::tempdir()?;
    let nowhere = folder.path().join("absent").join("model.safetensors");
    assert!(message(parameters.save(&nowhere)).contains("absent"));
    // A folder that is not empty cannot be replaced by a file.
    let occupied = folder.path().join("occupied");
    fs::create_dir(&occupied)?;
    fs::write(occupied.join("inside"), "here")?;
    assert!(message(parameters.save(&occupied)).contains("occupied"));
    assert_eq!(
        fs::read_dir(folder.path())?.count(),
        1,
        "the temporary file is removed"
    );
    assert!(message(parameters.save(std::path::Path::new("/"))).contains("file name"));
    Ok(())
}

#[test]
fn a_truncated_file_is_refused_at_every_length() -> Result<()> {
    let config = config(true);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    lively(&config)?.save(&path)?;
    let whole = fs::read(&path)?;
    for length in [0, 4, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length])?;
        let message = message(Parameters::load(&config, &path, device()));
        assert!(message.contains("model.safetensors"), "{length}: {message}");
    }
    let absent = message(Parameters::load(
        &config,
        &folder.path().join("absent.safetensors"),
        device(),
    ));
    assert!(absent.contains("absent.safetensors"), "{absent}");
    Ok(())
}

#[rstest]
#[case::missing(|t: &mut HashMap<String, Tensor>| { t.remove("model.norm.weight"); }, r#"missing ["model.norm.weight"], surplus []"#)]
#[case::surplus(|t: &mut HashMap<String, Tensor>| { t.insert("model.extra".into(), t["model.norm.weight"].clone()); }, r#"missing [], surplus ["model.extra"]"#)]
#[case::misshapen(
    |t: &mut HashMap<String, Tensor>| { let w = t["model.layers.0.mlp.up_proj.weight"].t().unwrap().contiguous().unwrap(); t.insert("model.layers.0.mlp.up_proj.weight".into(), w); },
    "tensor model.layers.0.mlp.up_proj.weight: shape [12, 20], must be [20, 12]"
)]
#[case::integer(
    |t: &mut HashMap<String, Tensor>| { let w = t["model.norm.weight"].to_dtype(DType::I64).unwrap(); t.insert("model.norm.weight".into(), w); },
    "tensor model.norm.weight: dtype I64"
)]
fn tensors_that_do_not_fit_are_refused_by_name(
    #[case] spoil: fn(&mut HashMap<String, Tensor>),
    #[case] expected: &str,
) -> Result<()> {
    let config = config(true);
    let mut tensors = lively_tensors(&config)?;
    spoil(&mut tensors);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    for message in [
        message(Parameters::load(&config, &path, device())),
        message(Parameters::from_tensors(&config, tensors, device())),
    ] {
        assert!(message.contains(expected), "{message}");
    }
    Ok(())
}

#[rstest]
#[case("vocab_size: 0", |c: &mut DecoderConfig| c.vocab_size = 0)]
#[case("vocab_size: 4294967296", |c: &mut DecoderConfig| c.vocab_size = 1 << 32)]
#[case("hidden_size: 0", |c: &mut DecoderConfig| c.hidden_size = 0)]
#[case("intermediate_size: 0", |c: &mut DecoderConfig| c.intermediate_size = 0)]
#[case("num_hidden_layers: 0", |c: &mut DecoderConfig| c.num_hidden_layers = 0)]
#[case("num_hidden_layers: 18446744073709551615, must be at most 10000", |c: &mut DecoderConfig| c.num_hidden_layers = usize::MAX)]
#[case("num_attention_heads: 0", |c: &mut DecoderConfig| c.num_attention_heads = 0)]
#[case("num_key_value_heads: 0", |c: &mut DecoderConfig| c.num_key_value_heads = 0)]
#[case("max_position_embeddings: 0", |c: &mut DecoderConfig| c.max_position_embeddings = 0)]
#[case("a multiple of num_key_value_heads", |c: &mut DecoderConfig| c.num_key_value_heads = 3)]
#[case("a multiple of num_attention_heads", |c: &mut DecoderConfig| (c.head_dim, c.hidden_size) = (None, 14))]
#[case("head_dim: 5", |c: &mut DecoderConfig| c.head_dim = Some(5))]
#[case("head_dim: 0", |c: &mut DecoderConfig| c.head_dim = Some(0))]
#[case("head_dim: 3", |c: &mut DecoderConfig| c.head_dim = None)]
#[case("rms_norm_eps: 0", |c: &mut DecoderConfig| c.rms_norm_eps = 0.0)]
#[case("rope_theta: NaN", |c: &mut DecoderConfig| c.rope_theta = f64::NAN)]
fn an_invalid_configuration_is_refused_by_field(
    #[case] expected: &str,
    #[case] spoil: fn(&mut DecoderConfig),
) {
    let mut config = config(true);
    config.validate().unwrap();
    spoil(&mut config);
    for message in [
        message(config.validate()),
        message(Parameters::init(&config, 0, device())),
    ] {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_configuration_has_the_defaults_of_hugging_face() {
    let text = r#"{"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "model_type": "llama"}"#;
    let config: DecoderConfig = serde_json::from_str(text).unwrap();
    assert_eq!(
        (
            config.head_dim,
            config.head_dim(),
            config.tie_word_embeddings
        ),
        (None, 4, false)
    );
    assert_eq!((config.rms_norm_eps, config.rope_theta), (1e-6, 1e4));
    let error =
        serde_json::from_str::<DecoderConfig>(&text.replace("vocab_size", "vocab")).unwrap_err();
    assert!(error.to_string().contains("vocab_size"), "{error}");
}

/// transformers 5 can store all experts' matrices as two tensors.
#[test]
fn experts_in_one_tensor_of_another_shape_are_refused_by_name() -> Result<()> {
    let config = Family::Qwen3Moe.config(true);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let mut tensors = lively_tensors(&config)?;
    tensors.retain(|name, _| !name.contains(".experts."));
    let stack = |shape: &[usize]| Tensor::ones(shape, DType::F32, device());
    let prefix = "model.layers.0.mlp.experts";
    tensors.insert(format!("{prefix}.gate_up_proj"), stack(&[3, 16, 12])?);
    tensors.insert(format!("{prefix}.down_proj"), stack(&[3, 12, 8])?);
    candle_core::safetensors::save(&tensors, &path)?;
    let read = Parameters::load_folder(&config, folder.path(), device())?;
    Parameters::check_folder(&config, folder.path())?;
    let up = read.get(&format!("{prefix}.2.up_proj.weight"));
    assert_eq!(up.expect("a matrix").dims(), [8, 12]);

    tensors.insert(format!("{prefix}.down_proj"), stack(&[3, 8, 12])?);
    candle_core::safetensors::save(&tensors, &path)?;
    let words = "tensor model.layers.0.mlp.experts.down_proj: shape [3, 8, 12], must be [3, 12, 8]";
    let read = message(Parameters::load_folder(&config, folder.path(), device()));
    let checked = message(Parameters::check_folder(&config, folder.path()));
    for error in [read, checked] {
        assert!(error.contains(words), "{error}");
    }
    Ok(())
}

/// Norm weights to which 1 is added.
#[test]
fn fresh_norms_of_gemma_are_zero() -> Result<()> {
    for (name, variable) in Parameters::init(&Family::Gemma2.config(true), 3, device())?.iter() {
        if name.contains("norm") {
            assert_eq!(max_difference(variable, &variable.zeros_like()?)?, 0.0);
        }
    }
    Ok(())
}

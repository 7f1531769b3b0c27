//! Blocks without rotary positions.

use candle_core::{IndexOp, Result, Tensor};
use candle_grpo_nn::{Decoder, DecoderConfig, ModelType};

use candle_grpo_test_support::{device, message};

use crate::small::{config, lively, max_difference};

fn smollm3(no_rope_layers: Vec<u8>) -> DecoderConfig {
    DecoderConfig {
        model_type: ModelType::SmolLm3,
        no_rope_layers,
        ..config(true)
    }
}

/// The logits after the last token.
fn last_logits(config: DecoderConfig, ids: &[u32]) -> Result<Tensor> {
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let ids = Tensor::new(ids, device())?.unsqueeze(0)?;
    let hidden = decoder.padded_hidden_states(&ids, &ids.ones_like()?)?;
    decoder.logits(&hidden.i((0, ids.dim(1)? - 1))?.unsqueeze(0)?)
}

#[test]
fn a_block_without_rotation_ignores_the_order_of_the_past() -> Result<()> {
    // With one block, keys and values do not depend on earlier tokens: only the rotation encodes
    // their order.
    let one_block = |no_rope: u8, ids: &[u32]| {
        let config = DecoderConfig {
            num_hidden_layers: 1,
            ..smollm3(vec![no_rope])
        };
        last_logits(config, ids)
    };
    let moved = |no_rope| {
        max_difference(
            &one_block(no_rope, &[3, 1, 7, 4])?,
            &one_block(no_rope, &[7, 3, 1, 4])?,
        )
    };
    assert!(moved(0)? < 1e-5);
    assert!(moved(1)? > 1e-3);
    Ok(())
}

#[test]
fn each_block_rotates_or_not_by_its_own_number() -> Result<()> {
    let ids = [3, 1, 4];
    let rotating = last_logits(smollm3(vec![]), &ids)?;
    let all = last_logits(smollm3(vec![1, 1]), &ids)?;
    assert_eq!(max_difference(&rotating, &all)?, 0.0);
    for blocks in [[0, 1], [1, 0], [0, 0]] {
        let other = last_logits(smollm3(blocks.to_vec()), &ids)?;
        assert!(max_difference(&rotating, &other)? > 1e-3, "{blocks:?}");
    }
    Ok(())
}

/// Checked against `SmolLM3Config` in transformers 5.24.
#[test]
fn absent_keys_have_the_defaults_of_transformers() -> Result<()> {
    let base = serde_json::json!({
        "model_type": "smollm3", "vocab_size": 7, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 8,
    });
    let read = |key: &str, value: serde_json::Value| {
        let mut config = base.clone();
        config[key] = value;
        DecoderConfig::from_hugging_face(config.to_string().as_bytes())
    };
    let config = read("hidden_act", "silu".into())?;
    assert_eq!((config.rope_theta, config.tie_word_embeddings), (2e6, true));
    assert_eq!(config.no_rope_layers, [1, 1, 1, 0]);
    assert_eq!(read("rope_theta", 5e5.into())?.rope_theta, 5e5);
    let rope = serde_json::json!({"rope_type": "default", "rope_theta": 1e5});
    assert_eq!(read("rope_parameters", rope)?.rope_theta, 1e5);
    let rope = serde_json::json!({"rope_type": "default"});
    assert_eq!(read("rope_parameters", rope)?.rope_theta, 2e6);
    assert!(!read("tie_word_embeddings", false.into())?.tie_word_embeddings);
    Ok(())
}

#[test]
fn no_rope_layers_of_another_family_or_length_are_refused() {
    for (model_type, no_rope_layers) in [
        (ModelType::Llama, vec![1, 0]),
        (ModelType::SmolLm3, vec![1]),
        (ModelType::SmolLm3, vec![1, 2]),
    ] {
        let config = DecoderConfig {
            model_type,
            no_rope_layers,
            ..config(true)
        };
        assert!(message(config.validate()).starts_with("no_rope_layers:"));
    }
}

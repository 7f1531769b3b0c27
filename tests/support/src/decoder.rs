//! A decoder for tests.

/// The `config.json` for a Llama with two layers and about 5,000 parameters.
///
/// It is text, so that crates below the decoder need not depend on it. Read it with `serde_json`,
/// as a `DecoderConfig`.
pub const TINY_DECODER: &str = r#"{
    "model_type": "llama",
    "vocab_size": 6,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "tie_word_embeddings": false
}"#;

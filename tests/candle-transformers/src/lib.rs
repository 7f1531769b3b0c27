//! Counts the variables of the models of candle-transformers that receive a gradient, for the table
//! of docs/candle.md. `make test-candle-transformers` runs it.

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use candle_core::{DType, Device, Result, Tensor};
    use candle_grpo_loss::ensure_gradients;
    use candle_nn::{VarBuilder, VarMap};
    use candle_transformers::models::{gemma, llama, mistral, phi, phi3, qwen2, qwen3};
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    const DOCUMENT: &str = "../../docs/candle.md";

    /// The keys of `config.json` that the models share: two layers, tiny and untied.
    fn config<C: DeserializeOwned>(more: Value) -> C {
        let mut keys = json!({
            "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": false
        });
        for (key, value) in more.as_object().expect("keys") {
            keys[key] = value.clone();
        }
        serde_json::from_value(keys).expect("a configuration")
    }

    /// The cells of a row: how many variables a loss over the logits reaches, of how many.
    fn count(logits: impl FnOnce(VarBuilder, &Tensor) -> Result<Tensor>) -> Result<[usize; 2]> {
        let device = Device::Cpu;
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &device);
        let tokens = Tensor::new(&[[1u32, 5, 3, 2]], &device)?;
        let logits = logits(vb, &tokens)?;
        let gradients = logits.sqr()?.sum_all()?.backward()?;
        let variables = variables.data().lock().expect("no panic");
        let reached = variables
            .values()
            .filter(|variable| gradients.get(variable).is_some());
        let counts = [reached.count(), variables.len()];
        let check = ensure_gradients(&gradients, variables.iter());
        match check.map_err(|error| error.to_string()) {
            Ok(()) => assert_eq!(counts[0], counts[1]),
            Err(error) => {
                let missing = counts[1] - counts[0];
                let start = format!("{missing} of {} variables received no gradient", counts[1]);
                assert!(error.starts_with(&start), "{error}");
            }
        }
        Ok(counts)
    }

    fn table() -> Result<String> {
        let rows = [
            (
                "qwen2",
                count(|vb, tokens| {
                    let keys = json!({"sliding_window": 32, "max_window_layers": 2, "use_sliding_window": false});
                    qwen2::ModelForCausalLM::new(&config(keys), vb)?.forward(tokens, 0)
                })?,
            ),
            (
                "qwen3",
                count(|vb, tokens| {
                    let keys = json!({
                        "head_dim": 4, "attention_bias": false, "sliding_window": null,
                        "max_window_layers": 2, "use_sliding_window": false
                    });
                    qwen3::ModelForCausalLM::new(&config(keys), vb)?.forward(tokens, 0)
                })?,
            ),
            (
                "llama",
                count(|vb, tokens| {
                    let config: llama::LlamaConfig = config(json!({}));
                    let config = config.into_config(false);
                    let mut cache = llama::Cache::new(false, DType::F32, &config, vb.device())?;
                    llama::Llama::load(vb, &config)?.forward(tokens, 0, &mut cache)
                })?,
            ),
            (
                "gemma",
                count(|vb, tokens| {
                    let keys = json!({"head_dim": 4, "attention_bias": false});
                    gemma::Model::new(false, &config(keys), vb)?.forward(tokens, 0)
                })?,
            ),
            (
                "mistral",
                count(|vb, tokens| {
                    mistral::Model::new(&config(json!({})), vb)?.forward(tokens, 0)
                })?,
            ),
            (
                "phi",
                count(|vb, tokens| {
                    let keys = json!({
                        "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": false
                    });
                    phi::Model::new(&config(keys), vb)?.forward(tokens)
                })?,
            ),
            (
                "phi3",
                count(|vb, tokens| phi3::Model::new(&config(json!({})), vb)?.forward(tokens, 0))?,
            ),
        ];
        let mut table = String::from(
            "| candle-transformers 0.11.1 model | variables with a gradient | all variables |\n| --- | ---: | ---: |\n",
        );
        for (name, [reached, all]) in rows {
            writeln!(table, "| `{name}` | {reached} | {all} |").expect("a string grows");
        }
        Ok(table)
    }

    #[test]
    fn the_table_of_the_documentation_is_that_of_the_models() -> Result<()> {
        let table = table()?;
        let document = std::fs::read_to_string(DOCUMENT)?;
        let start = document
            .find("| candle-transformers 0.11.1 model")
            .expect("the table");
        let end = document[start..]
            .find("\n\n")
            .map_or(document.len(), |at| start + at + 1);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            let updated = format!("{}{table}{}", &document[..start], &document[end..]);
            std::fs::write(DOCUMENT, updated)?;
        } else {
            assert_eq!(
                &document[start..end],
                table,
                "set UPDATE_DOCS=1 to write it"
            );
        }
        Ok(())
    }
}

//! Trainable decoder-only transformers, optimiser and gradient handling for candle-grpo.

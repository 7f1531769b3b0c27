//! Differentiable GRPO-family policy losses for Candle.

//! Grouped rewards to advantages for GRPO-family training, as Candle tensor operations.

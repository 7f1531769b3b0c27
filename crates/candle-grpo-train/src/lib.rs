//! Sampler, rewards, actor and training loop for candle-grpo.

//! The CPU path of [`draw_tokens`](crate::draw_tokens()).

mod distribution;
mod token_filters;

use super::{DrawOptions, DrawnToken};
use distribution::Distribution;
use token_filters::FilteredDistribution;

/// Samples the token at `uniform` from a row of logits. Returns `None` if they have no
/// distribution.
pub(crate) fn draw(logits: &[f32], uniform: f64, options: &DrawOptions) -> Option<DrawnToken> {
    let distribution = Distribution::new(logits, options.temperature)?;
    let is_filtered = options.top_k > 0 || options.top_p < 1.0 || options.min_p > 0.0;
    let (token, drawn_log_prob) = if options.greedy {
        (distribution.mode(), Some(0.0))
    } else if is_filtered {
        let (token, log_prob) = FilteredDistribution::new(&distribution, options).quantile(uniform);
        (token, Some(log_prob))
    } else {
        (distribution.quantile(uniform), None)
    };
    let log_prob = distribution.log_prob(token);
    Some(DrawnToken {
        token,
        log_prob,
        drawn_log_prob: drawn_log_prob.unwrap_or(log_prob),
    })
}

//! Requests that rewards send to servers.

use serde::{Deserialize, Serialize};

/// The requests that a reward has sent to servers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RewardRequests {
    /// Requests that were sent, including retries.
    pub requests: usize,
    /// Answers that came from the cache.
    pub cache_hits: usize,
    /// Requests without a usable answer.
    pub failures: usize,
    /// Tokens in requests and answers, if the server reports them.
    pub tokens: usize,
    /// Mean time per request in seconds, including failed requests.
    pub mean_latency: f64,
}

impl RewardRequests {
    /// Returns true if no request was sent or saved.
    pub fn is_empty(&self) -> bool {
        self.requests == 0 && self.cache_hits == 0
    }
}

impl std::ops::AddAssign for RewardRequests {
    fn add_assign(&mut self, other: Self) {
        let seconds = |part: &Self| part.mean_latency * part.requests as f64;
        let seconds = seconds(self) + seconds(&other);
        self.requests += other.requests;
        self.cache_hits += other.cache_hits;
        self.failures += other.failures;
        self.tokens += other.tokens;
        self.mean_latency = seconds / self.requests.max(1) as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_weighted_by_their_requests() {
        let of = |requests, mean_latency| RewardRequests {
            requests,
            mean_latency,
            tokens: 5,
            ..RewardRequests::default()
        };
        let mut sum = RewardRequests::default();
        sum += RewardRequests::default();
        assert_eq!(sum.mean_latency, 0.);
        sum += of(1, 4.);
        sum += of(3, 2.);
        assert_eq!((sum.requests, sum.tokens, sum.mean_latency), (4, 10, 2.5));
    }
}

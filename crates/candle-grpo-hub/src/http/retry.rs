//! Retries for failed requests.

use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::fmt::rfc2822;
use ureq::http::header::{HeaderMap, RETRY_AFTER};

/// Maximum pause before a retry, even if a server requests a longer one.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Interval at which a pause checks for cancellation.
const TICK: Duration = Duration::from_millis(20);

/// Returns whether the same request may succeed later.
pub fn is_transient(status: u16) -> bool {
    matches!(status, 408 | 425 | 429) || (500..600).contains(&status)
}

/// The pause that a server requests with `Retry-After`: seconds, or a date ([RFC
/// 9110](https://www.rfc-editor.org/rfc/rfc9110#field.retry-after)).
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    until(headers.get(RETRY_AFTER)?.to_str().ok()?, Timestamp::now())
}

fn until(value: &str, now: Timestamp) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = rfc2822::parse(value).ok()?.timestamp();
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

/// The pause after `failures` consecutive failures, at least one. It doubles with each.
pub fn backoff(first: Duration, failures: usize, max: Duration) -> Duration {
    let doublings = failures.saturating_sub(1).min(20);
    first.saturating_mul(1 << doublings).min(max)
}

/// Blocks for `duration`. Returns false if it is canceled first.
pub fn pause(duration: Duration, is_canceled: impl Fn() -> bool) -> bool {
    let end = Instant::now() + duration;
    while let Some(rest) = end.checked_duration_since(Instant::now()) {
        if is_canceled() {
            return false;
        }
        thread::sleep(rest.min(TICK));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_asks_for_a_pause_in_seconds_or_by_a_date() {
        let now: Timestamp = "2015-10-21T07:27:30Z".parse().unwrap();
        let seconds = |value: &str| until(value, now).map(|pause| pause.as_secs());
        assert_eq!(seconds("7"), Some(7));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:28:00 GMT"), Some(30));
        assert_eq!(seconds("Wed, 21 Oct 2015 07:27:00 GMT"), Some(0));
        assert_eq!(seconds("soon"), None);
        assert_eq!(seconds("-1"), None);
    }

    #[test]
    fn pauses_double_up_to_their_maximum() {
        let pause = |failures| backoff(Duration::from_secs(1), failures, MAX_PAUSE).as_secs();
        assert_eq!([1, 2, 3, 6, 7, 1000].map(pause), [1, 2, 4, 32, 60, 60]);
    }

    #[test]
    fn a_canceled_pause_ends() {
        assert!(!pause(Duration::from_secs(3600), || true));
        assert!(pause(Duration::ZERO, || true));
    }
}

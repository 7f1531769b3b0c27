//! The task: the answer to `max 3 7 2 =` is the largest digit and the end of the text.

use rand::{Rng, rngs::StdRng};

/// A prompt of two to four digits, and its answer.
pub(crate) fn question(rng: &mut StdRng) -> (String, String) {
    let count = rng.random_range(2..=4);
    let digits: Vec<u32> = (0..count).map(|_| rng.random_range(0..10)).collect();
    let largest = digits.iter().max().expect("at least two");
    let texts: Vec<String> = digits.iter().map(u32::to_string).collect();
    (format!("max {} =", texts.join(" ")), largest.to_string())
}

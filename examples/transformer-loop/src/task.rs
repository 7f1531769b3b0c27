//! The task: `max 3 7 2 =` is answered with the largest digit, `min 3 7 2 =` with the smallest.

use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// A prompt and its answer.
pub(crate) fn question(rng: &mut StdRng) -> (String, String) {
    let digits: Vec<u32> = (0..rng.random_range(2..=4))
        .map(|_| rng.random_range(0..10))
        .collect();
    let largest = digits.iter().max().expect("at least two");
    let smallest = digits.iter().min().expect("at least two");
    let (word, answer) = *[("max", largest), ("min", smallest)]
        .choose(rng)
        .expect("two");
    let digits: Vec<String> = digits.iter().map(u32::to_string).collect();
    (format!("{word} {} =", digits.join(" ")), answer.to_string())
}
